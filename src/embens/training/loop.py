"""``embens.fit``: the training loop.

A step is forward, backward, update. Everything else is a callback (:mod:`embens.training`).
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from embens.checks import check_whole, suggest
from embens.ensemble import EmbeddedEnsemble
from embens.losses import Criterion
from embens.modes import evaluating
from embens.optim import Gamma, MakeOptimizer
from embens.training import processes
from embens.training.batches import AnySource
from embens.training.callbacks import as_callbacks
from embens.training.hints import HINTS
from embens.training.history import History, epoch_row
from embens.training.options import METRICS, MakeScheduler, is_larger_better
from embens.training.passes import check_data
from embens.training.progress import Progress
from embens.training.run import Run, copy_weights
from embens.training.startup import (
    DEFAULT_LR,
    cache_features,
    check_functions,
    check_trainable,
    collect_options,
    group_settings,
    make_optimizer,
    make_scheduler,
    order_callbacks,
    read_data,
)
from embens.training.step import take_step
from embens.training.tally import BatchResult, Tally
from embens.trees import gather


@suggest(HINTS)
def fit(
    ensemble: EmbeddedEnsemble,
    train: Any,
    validation: Any = None,
    *,
    epochs: int,
    batch_size: int = 128,
    lr: float = DEFAULT_LR,
    gamma: Gamma = None,
    optimizer: MakeOptimizer | Optimizer | None = None,
    scheduler: MakeScheduler | None = None,
    criterion: Criterion | None = None,
    seed: int = 0,
    callbacks: Sequence[Any] = (),
    progress: bool | None = None,
) -> History:
    r"""Train an ensemble in place.

    .. math::
        \Delta u_a = -\eta_u \frac{\partial L_a}{\partial u_a}, \qquad
        \Delta w = -\eta_w \frac{\gamma(M)}{M} \sum_a \frac{\partial L_a}{\partial w}

    With validation data the ensemble ends with the weights of its best epoch
    (:class:`~embens.training.KeepBest`, :class:`~embens.training.KeepLast`). The result depends on
    the arguments and the initial weights only; global random generators are left unchanged. Under
    ``torchrun`` the processes share each batch, and the result equals that of one process up to
    rounding.

    Args:
        ensemble: An ensemble of any family.
        train: Tensors ``(inputs, targets)``, a ``Dataset`` of such pairs, or a ``DataLoader``.
            Several inputs are ``((x, z), y)`` or ``({"x": x, "z": z}, y)``, with the argument
            names of the reference. Sample weights follow the targets, as in ``(x, y, w)``: the
            loss is then a weighted mean over the rows of a batch. Arrays of numpy become tensors.
        validation: Data of the same form, evaluated after each epoch.
        epochs: Number of epochs.
        batch_size: Rows per step, in all processes together; a loader has a fixed one.
        lr: Learning rate :math:`\eta_w = \eta_u`. For separate rates and weight decays pass an
            optimizer of ``ensemble.parameter_groups(lr=…, modulation_lr=…, weight_decay=…)``.
        gamma: Gradient scaling: a number, a function of M, or None for the natural value. See
            :meth:`~embens.EmbeddedEnsemble.parameter_groups`.
        optimizer: A function from parameter groups to an optimizer, such as ``torch.optim.AdamW``;
            or an optimizer, whose groups then determine the rates (leave out lr and gamma). None:
            SGD with momentum 0.9.
        scheduler: A function from the optimizer to a torch scheduler, which makes one step per
            epoch (``ReduceLROnPlateau``: by the metric). None: the paper's,
            :func:`embens.training.linear_decay`.
        criterion: A function of the outputs of one member and the target; None: chosen for the
            target, see :func:`embens.objective`.
        seed: Seed of the sample order and of all randomness in the network and the data set.
        callbacks: Objects of subclasses of :class:`embens.training.Callback`, or functions of
            ``(ensemble, record)`` to be called after each epoch.
        progress: False: print nothing. Otherwise a terminal shows a bar, and other error streams
            get one line per epoch.

    Returns:
        The history of losses and metrics.

    Raises:
        Divergence: If a loss or a weight is not finite. The ensemble then has the weights of the
            last good epoch.
        ValueError: If data are not finite, labels are no classes, or options exclude one another.

    Example:
        >>> from embens import batch_ensemble
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
        >>> history = fit(batch_ensemble(net, 4), (x, (x[:, 0] > 0).long()), epochs=20, lr=0.1)
        >>> history.epochs[-1]["ensemble_accuracy"] > 0.9
        True
    """
    check_trainable(ensemble)
    check_functions(criterion, scheduler)
    check_whole("epochs", epochs, 0)
    check_whole("batch_size", batch_size)
    check_whole("seed", seed, 0)
    callback_list = as_callbacks(callbacks)
    options = collect_options(callback_list)
    if options.cache_features:
        ensemble, train, validation = cache_features(ensemble, train, validation, batch_size)
    world = processes.join(next(ensemble.parameters()).device)
    train_batches, validation_batches = read_data(
        ensemble, train, validation, batch_size, seed, options, world
    )
    if world.size > 1:
        processes.broadcast_(world, ensemble.state_dict().values())
    made_optimizer = make_optimizer(ensemble, optimizer, lr, gamma)
    arguments = {
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "gamma": gamma,
        "optimizer": [type(made_optimizer).__name__, group_settings(made_optimizer)],
        "scheduler": scheduler,
        "criterion": criterion,
        "seed": seed,
    }
    with (
        evaluating(ensemble),  # restores the mode of every module
        processes.seeded(seed),
        torch.enable_grad(),
        ExitStack() as cleanup,
    ):
        made_scheduler = make_scheduler(made_optimizer, scheduler, epochs, options)
        run = Run(
            ensemble,
            train_batches,
            validation_batches,
            made_optimizer,
            made_scheduler,
            options,
            order_callbacks(callback_list, world.rank),
            arguments,
            cleanup,
        )
        show = progress if world.rank == 0 else False
        return _train(run, Progress(show, epochs, run.steps_per_epoch))


def _train(run: Run, progress: Progress) -> History:
    """Train until the run is stopped, and load the final weights."""
    run.notify("on_start")
    if run.world.size > 1:
        # A barrier too: no process starts before all have read the checkpoint.
        processes.broadcast_(run.world, run.ensemble.state_dict().values())
    if run.stopped is None:
        check_data(run)
    with progress.running():
        while run.stopped is None:
            _train_epoch(run, progress)
            _end_epoch(run, progress)
    run.optimizer.zero_grad(set_to_none=True)
    if run.best_weights is not None:
        run.ensemble.load_state_dict(run.best_weights)
    elif run.evaluated is not run.ensemble:
        run.ensemble.load_state_dict(run.evaluated.state_dict())
    history = run.history()
    run.notify("on_end", history)
    return history


def _train_epoch(run: Run, progress: Progress) -> None:
    """Make the remaining steps of an epoch."""
    run.ensemble.train()
    start = time.perf_counter() - run.seconds
    batches = run.train.epoch(run.epoch, run.step * run.options.accumulate)
    while minibatches := list(islice(batches, run.options.accumulate)):
        take_step(run, minibatches)
        run.seconds = time.perf_counter() - start
        run.notify("on_step")
        progress.step(run)
        if run.stopped is not None:
            run.interrupted = True
            break
    run.seconds = time.perf_counter() - start


def _end_epoch(run: Run, progress: Progress) -> None:
    """Validate, write the epoch's record and prepare the next epoch."""
    run.check_objectives()
    run.check_weights()
    run.tally.flush()
    processes.sum_(run.world, run.tally.sums.values())
    record: dict[str, Any] = {"epoch": run.epoch + 1, **run.tally.summary()}
    if run.validation is not None:
        record.update(_validate(run, run.validation))
    record.update(run.learning_rates())
    norms = run.gradient_norms or (math.nan, math.nan)
    record["gradient_norm_shared"], record["gradient_norm_individual"] = norms
    record["seconds"] = run.seconds
    run.records.append(record)
    run.epoch += 1
    run.begin_epoch()
    run.good_weights = copy_weights(run.ensemble)
    metric = record.get("metric", math.nan)
    run.update_best(metric)
    if isinstance(run.scheduler, ReduceLROnPlateau):
        run.scheduler.step(record["loss"] if math.isnan(metric) else metric)
    elif run.options.schedule_every == "epoch":
        run.scheduler.step()
    if run.epoch == run.epochs:
        run.stop("epochs")
    row = epoch_row(record)
    run.notify("on_epoch", row)
    progress.epoch(run, row)


@torch.no_grad()
def _validate(run: Run, validation: AnySource) -> dict[str, Any]:
    """Evaluate on the validation data; return columns of the record, with the metric."""
    tally = Tally(run.ensemble.members, device=run.device)
    results: list[BatchResult] = []
    metric = run.options.metric
    keeps_outputs = callable(metric) or metric in METRICS
    seed = processes.combine(run.seed, run.epoch, 1)
    with evaluating(run.evaluated), processes.seeded(seed):
        for result in run.passes.evaluate(validation, run.evaluated):
            tally.add(result)
            if keeps_outputs:
                results.append(result)
    columns = tally.summary("validation_")
    if metric is None:
        metric = "loss"
        if "validation_ensemble_accuracy" in columns:
            metric = "accuracy"
    if callable(metric):
        value = _compute_metric(metric, results)
    elif metric in METRICS and "classification" in tally.tasks:
        value = _compute_metric(METRICS[metric], results)
    else:
        value = _named_column(columns, metric)
    columns["metric"] = run.agree(float(value))
    run.larger_is_better = is_larger_better(metric, run.options.maximise)
    return columns


def _compute_metric(metric: Callable[[Any, Any], Any], results: list[BatchResult]) -> Any:
    """Return a metric of the outputs and targets of all batches together."""
    outputs = gather([result.outputs for result in results], lambda parts: torch.cat(parts, 1))
    target = gather([result.target for result in results], torch.cat)
    return metric(outputs, target)


def _named_column(columns: dict[str, Any], metric: str) -> float:
    """Return the column of the history that a metric names."""
    name = "ensemble_accuracy" if metric == "accuracy" else metric
    if f"validation_{name}" not in columns:
        hint = ""
        if metric == "nll":
            hint = " For values, nll needs predicted variances: criterion=embens.gaussian_nll."
        names = [column.removeprefix("validation_") for column in epoch_row(columns)]
        raise ValueError(
            f"metric={metric!r} is not defined for these targets; the history has "
            f"{', '.join(names)}.{hint}"
        )
    return columns[f"validation_{name}"]
