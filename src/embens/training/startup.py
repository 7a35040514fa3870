"""The start of ``fit``: its arguments become data, an optimizer, a scheduler and callbacks."""

import functools
import inspect
from typing import Any

from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from embens.ensemble import EmbeddedEnsemble
from embens.inference import check_ensemble, floating_dtype
from embens.optim import Gamma, MakeOptimizer
from embens.sources import count_inputs
from embens.training import processes
from embens.training.batches import AnySource, batches_of
from embens.training.callbacks import Callback
from embens.training.checkpoint import Checkpoint
from embens.training.features import compute_features, separate_heads
from embens.training.options import MakeScheduler, Options, linear_decay

DEFAULT_LR = 0.01


def check_trainable(ensemble: Any) -> None:
    """Raise unless the first argument of ``fit`` is an ensemble with parameters to train.

    Args:
        ensemble: The argument.

    Raises:
        TypeError: If it is not an ensemble.
        ValueError: If all of its parameters are frozen, or one is on the meta device.
    """
    check_ensemble("fit", ensemble)
    if not any(parameter.requires_grad for parameter in ensemble.parameters()):
        raise ValueError("the ensemble has no parameter that requires a gradient")


def check_functions(criterion: Any, scheduler: Any) -> None:
    """Raise TypeError unless the criterion and the scheduler are functions, or None.

    Args:
        criterion: Of one member's outputs and the target.
        scheduler: Of the optimizer.
    """
    is_class = isinstance(criterion, type)
    if criterion is not None and (is_class or not callable(criterion)):
        raise TypeError(
            "criterion must be a function of one member's (outputs, target), such as "
            f"nn.CrossEntropyLoss() or torch.nn.functional.l1_loss, got {criterion!r}."
        )
    if scheduler is not None and not callable(scheduler):
        raise TypeError(
            "scheduler must be a function from the optimizer to a scheduler, such as "
            "lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10), got "
            f"{type(scheduler).__name__}."
        )
    if isinstance(scheduler, type):
        try:
            inspect.signature(scheduler).bind("optimizer")
        except TypeError as error:
            name = scheduler.__name__
            raise TypeError(
                f"scheduler: {name} needs more than the optimizer ({error}). Pass the other "
                f"arguments with functools.partial({name}, …)."
            ) from None


def collect_options(callbacks: list[Callback]) -> Options:
    """Return the options that callbacks set.

    Args:
        callbacks: Of the run, in the order of the user.

    Returns:
        The options.

    Raises:
        ValueError: If two options exclude one another.
    """
    options = Options()
    for callback in callbacks:
        callback.setup(options)
    options.check()
    return options


def read_data(
    ensemble: EmbeddedEnsemble,
    train: Any,
    validation: Any,
    batch_size: int,
    seed: int,
    options: Options,
    world: processes.World,
) -> tuple[AnySource, AnySource | None]:
    """Return the batches of training and validation data.

    Args:
        ensemble: The ensemble, whose signature and dtype the data have to fit.
        train: Training data, as for :func:`embens.fit`.
        validation: Validation data, or None.
        batch_size: Rows per batch, in all processes together.
        seed: Of the sample order.
        options: Of the run.
        world: The processes that share each batch.

    Returns:
        The batches of the training data, and those of the validation data or None.
    """
    if world.size > 1 and options.batch == "split":
        raise ValueError('Batches("split") needs one process; use Batches("own").')
    reading = reading_options(ensemble)
    members = ensemble.members if options.batch == "own" else None
    train_batches = batches_of(
        train, batch_size, seed=seed, members=members, world=world, **reading
    )
    if validation is None:
        return train_batches, None
    validation_batches = batches_of(validation, batch_size, seed=None, name="validation", **reading)
    return train_batches, validation_batches


def reading_options(ensemble: EmbeddedEnsemble) -> dict[str, Any]:
    """Return the options of ``batches_of`` that depend on an ensemble.

    Args:
        ensemble: The ensemble.
    """
    counts = count_inputs(ensemble.reference.forward)
    return {"counts": counts, "dtype": floating_dtype(ensemble)}


def cache_features(
    ensemble: EmbeddedEnsemble, train: Any, validation: Any, batch_size: int
) -> tuple[EmbeddedEnsemble, Any, Any]:
    """Return the last layers of an ensemble, and the data with features in place of inputs.

    Args:
        ensemble: An ensemble whose members share all but their last layers.
        train: Training data, as for :func:`embens.fit`.
        validation: Validation data, or None.
        batch_size: Rows per batch of the pass that computes the features.

    Returns:
        The last layers as an ensemble; the training data; the validation data or None.
    """
    heads, layer = separate_heads(ensemble)
    reading = reading_options(ensemble)
    source = batches_of(train, batch_size, seed=None, **reading)
    train = compute_features(ensemble, heads, layer, source)
    if validation is not None:
        source = batches_of(validation, batch_size, seed=None, name="validation", **reading)
        validation = compute_features(ensemble, heads, layer, source)
    return heads, train, validation


def make_optimizer(
    ensemble: EmbeddedEnsemble, optimizer: MakeOptimizer | Optimizer | None, lr: float, gamma: Gamma
) -> Optimizer:
    """Return the user's optimizer, or make one of the ensemble's parameter groups.

    Args:
        ensemble: The ensemble that is trained.
        optimizer: An optimizer, a function from groups to one, or None for SGD with momentum.
        lr: Learning rate; the default if the optimizer has its rates already.
        gamma: Gradient scale; None if the optimizer has its rates already.

    Returns:
        The optimizer.

    Raises:
        ValueError: If the user's optimizer is for another network, or if rates are passed twice.
    """
    if isinstance(optimizer, Optimizer):
        if lr != DEFAULT_LR or gamma is not None:
            raise ValueError(
                "optimizer already has learning rates; leave out lr= and gamma=, or pass them to "
                "ensemble.parameter_groups(lr=…, gamma=…)."
            )
        _check_parameters(optimizer, ensemble)
        return optimizer
    make = optimizer
    if make is None:
        make = functools.partial(SGD, momentum=0.9, fused=can_fuse(ensemble))
    groups = ensemble.parameter_groups(lr, gamma=gamma, optimizer=make)
    return make(groups)


def _check_parameters(optimizer: Optimizer, ensemble: EmbeddedEnsemble) -> None:
    """Raise ValueError if an optimizer is for another network."""
    optimized = set()
    for group in optimizer.param_groups:
        optimized.update(id(parameter) for parameter in group["params"])
    if not any(id(parameter) in optimized for parameter in ensemble.parameters()):
        raise ValueError(
            "optimizer has no parameter of this ensemble; build it from "
            "ensemble.parameter_groups(…) of the ensemble that you train."
        )


def can_fuse(ensemble: EmbeddedEnsemble) -> bool:
    """Return whether torch's fused SGD is correct and available for all parameters.

    Args:
        ensemble: The ensemble.
    """
    # On the CPU the fused kernel assumes contiguous memory and dense gradients.
    if any(getattr(module, "sparse", False) for module in ensemble.modules()):
        return False
    return all(p.is_contiguous() and p.device.type == "cpu" for p in ensemble.parameters())


def make_scheduler(
    optimizer: Optimizer, scheduler: MakeScheduler | None, epochs: int, options: Options
) -> Any:
    """Return the scheduler of a run; the default is the paper's.

    Args:
        optimizer: The optimizer.
        scheduler: A function from the optimizer to a scheduler; None: the default.
        epochs: Number of epochs.
        options: Of the run.

    Returns:
        The scheduler.
    """
    make = scheduler or linear_decay(epochs)
    made_scheduler = make(optimizer)
    by_step = options.schedule_every == "step"
    if isinstance(made_scheduler, ReduceLROnPlateau) and by_step:
        raise ValueError("ReduceLROnPlateau needs a metric per epoch; leave out ScheduleEveryStep.")
    return made_scheduler


def group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of all groups, without their parameters.

    Args:
        optimizer: Any optimizer.
    """
    settings = []
    for group in optimizer.param_groups:
        settings.append({name: value for name, value in group.items() if name != "params"})
    return settings


def order_callbacks(callbacks: list[Callback], rank: int) -> list[Callback]:
    """Return the callbacks of this process; checkpoints last, to save what the others have done.

    Args:
        callbacks: Of the run.
        rank: Of this process; callbacks that only watch exist in the first one.

    Returns:
        The callbacks, otherwise in the same order.
    """
    if rank > 0:
        callbacks = [callback for callback in callbacks if callback.changes_training]
    return sorted(callbacks, key=lambda callback: isinstance(callback, Checkpoint))
