"""``embens.fit``: the plain loop around :func:`embens.objective`, and what determines a run."""

import functools
import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from embens import metrics
from embens.checks import Gamma, check_choice, check_number, check_whole, gradient_factor, suggest
from embens.ensemble import EmbeddedEnsemble
from embens.ensemble.export import evaluating
from embens.ensemble.rates import MakeOptimizer
from embens.objective import OPTIONS, BatchKind, Criterion, Of
from embens.training import randomness
from embens.training.each import EachMember
from embens.training.history import History
from embens.training.trainer import Trainer

MakeScheduler = Callable[[Optimizer], LRScheduler]
Metric = str | Callable[[Tensor, Tensor], Any] | None
MORE: dict[Any, bool] = {"accuracy": True, metrics.ensemble_accuracy: True, "loss": False}
"""Whether more of a metric is better."""
MORE |= dict.fromkeys((metrics.nll, metrics.brier, metrics.expected_calibration_error), False)
_NO_SETTINGS = "ensemble train validation callbacks checkpoint every progress time_limit".split()


@suggest()
def fit(
    ensemble: EmbeddedEnsemble,
    train: Any,
    validation: Any = None,
    *,
    epochs: int,
    batch_size: int = 128,
    lr: float = 0.01,
    modulation_lr: float | None = None,
    weight_decay: float = 5e-4,
    modulation_weight_decay: float = 0.0,
    gamma: Gamma = None,
    criterion: Criterion | None = None,
    batch: BatchKind = "same",
    of: Of = "members",
    chunk: int | None = None,
    optimizer: MakeOptimizer | None = None,
    scheduler: MakeScheduler | None = None,
    callbacks: Sequence[Any] = (),
    metric: Metric = None,
    maximise: bool | None = None,
    patience: int | None = None,
    keep: str = "best",
    seed: int = 0,
    clip: float | None = None,
    accumulate: int = 1,
    autocast: torch.dtype | None = None,
    compile: bool = False,
    schedule_by: Literal["epoch", "step"] = "epoch",
    each: EachMember | None = None,
    average: float | None = None,
    time_limit: float | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    every: int | None = None,
    progress: bool | None = None,
) -> History:
    r"""Train an ensemble in place.

    .. math::
        \Delta u_a = -\eta_u \frac{\partial L_a}{\partial u_a}, \qquad
        \Delta w = -\eta_w \frac{\gamma(M)}{M} \sum_a \frac{\partial L_a}{\partial w}

    The result depends on the arguments and the ensemble's weights alone; the global random
    generators are left as they were. Under ``torchrun`` all processes share each batch, and the
    result is that of one process, to rounding. If the run diverges, ``Divergence`` is raised and
    the ensemble has its last good weights.

    Args:
        ensemble: of any family; ``embens.independent(reference, members)`` are separate networks.
        train: tensors ``(inputs, targets)``, a ``Dataset`` of such pairs, or a ``DataLoader``;
            several inputs are ``((x, z), y)`` or ``({"a": x, "b": z}, y)``, with the names that the
            reference gives them. Numbers that are not finite are refused, unless the network and
            the criterion make finite losses of them.
        validation: the same, to be evaluated after each epoch.
        epochs: how many.
        batch_size: samples in a step, in all processes together; a loader has its own.
        lr: rate :math:`\eta_w`; see :meth:`~embens.EmbeddedEnsemble.parameter_groups` for what
            optimizers of the Adam kind make of gamma.
        modulation_lr: rate of the individual parameters; None: ``lr``.
        weight_decay: of the shared parameters.
        modulation_weight_decay: of the individual parameters.
        gamma: factor of the shared rate: a number, a function of M, or None for the natural value.
        criterion: a function of one member's outputs and the target; None: by the target, see
            :func:`embens.objective`.
        batch: "same": all members see the batch; "own": each has its own, drawn separately;
            "split": row i goes to member i mod M. In networks with an input for each member
            (``embens.mimo``) it is "own": tensors, data sets and the batches of a loader are dealt
            out to every member in another order.
        of: "members", or "mean" or "moments" for the loss of all members together; see
            :func:`embens.objective`.
        chunk: how many members to backpropagate at a time, to save memory; None: all.
        optimizer: a function from parameter groups to an optimizer, such as
            ``torch.optim.AdamW``; None: SGD with momentum 0.9.
        scheduler: a function from the optimizer to a torch scheduler, which makes a step after each
            epoch (``ReduceLROnPlateau`` by the metric; choose its mode for it); None: the
            paper's, constant for half the epochs, then linearly to 1 % (``linear_decay``).
        callbacks: objects with any of ``on_step``, ``on_epoch`` and ``on_end``, or functions of the
            ensemble and an epoch's record; see :mod:`embens.training.callbacks`, which has ``CSV``
            and ``Log``.
        metric: what is best on the validation data: "accuracy" (of the ensemble), "loss" (mean of
            the members'), or a function of ``(outputs, target)`` such as ``embens.metrics.nll``;
            None: "accuracy" for classes, otherwise "loss".
        maximise: whether more is better, for a function of your own.
        patience: stop after so many epochs without a better metric.
        keep: "best": with validation data, end with the weights of the best epoch; "last".
        seed: of the order of samples, and of whatever is random in the network and the data set.
        clip: the largest norm of a member's gradient, its own and γ/M times the shared one
            (:func:`embens.training.clip_gradients_`), so that it means the same for any M.
        accumulate: so many batches make a step, on the mean over their rows.
        autocast: ``torch.bfloat16``, or ``torch.float16`` with a gradient scaler, for the passes
            through the network; losses are computed in full precision.
        compile: run the network's steps through ``torch.compile``.
        schedule_by: "step": the scheduler makes a step after each step of the optimizer.
        each: rates, label smoothing, row weights and targets of each member's own, as an
            ``embens.EachMember``.
        average: judge, and end with, not the weights of the last step but their running mean over
            about so many epochs, in full precision; statistics of norm layers are the last ones.
        time_limit: seconds after which the run ends, with the best weights until then; the epoch
            that it cuts short is judged. With a checkpoint it can go on where it was.
        checkpoint: a folder to keep checkpoints of this run in. If it has one, the run goes on
            from there and ends as if it had never stopped (a loader: from the last epoch). A
            checkpoint of another run (other arguments, laws or shapes) is refused; the data are
            compared by their number of rows alone. To train a finished ensemble further, call
            ``fit`` again with another folder.
        every: steps between checkpoints; None: one after each epoch.
        progress: show a progress bar; None: if the error stream is a terminal.

    Example:
        >>> from embens import batch_ensemble
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
        >>> history = fit(batch_ensemble(net, 4), (x, (x[:, 0] > 0).long()), epochs=20, lr=0.1)
        >>> history.epochs[-1]["ensemble_accuracy"] > 0.9
        True
    """
    given = locals()
    if not isinstance(ensemble, EmbeddedEnsemble):
        kind = type(ensemble).__name__
        hint = "Embed it first: embens.embed(network, members=…), or embens.independent(network, 1)"
        if kind in ("DistributedDataParallel", "DataParallel"):
            hint = "Pass its .module: fit itself averages over processes under torchrun"
        raise TypeError(f"fit expects an ensemble; got {kind}. {hint}.")
    if not any(p.requires_grad for p in ensemble.parameters()):
        raise ValueError("the ensemble has no parameter that requires a gradient")
    if ensemble.plan.heads is not None and batch == "same":
        given["batch"] = "own"
    Settings(**given).check()
    settings = Settings(**{name: given[name] for name in given if name not in _NO_SETTINGS})
    with evaluating(ensemble), randomness.seeded(seed), torch.enable_grad():  # modes are kept
        run = Trainer(ensemble, train, validation, settings, callbacks, progress)
        return run.train(checkpoint, every, time_limit)


class Settings(SimpleNamespace):
    """The arguments of :func:`embens.fit` that can change its result, by their names there."""

    def check(self) -> None:
        for name in ("epochs", "batch_size", "chunk", "patience", "seed", "accumulate", "every"):
            if (value := getattr(self, name)) is not None:
                check_whole(name, value, 0 if name in ("epochs", "seed") else 1)
        choices = {**OPTIONS, "keep": ("best", "last"), "schedule_by": ("epoch", "step")}
        choices["autocast"] = (None, torch.bfloat16, torch.float16)
        for name, possible in choices.items():
            check_choice(name, getattr(self, name), possible)
        for name in ("clip", "average", "time_limit"):
            if (value := getattr(self, name)) is not None:
                check_number(name, value, "a number above 0", lambda number: number > 0)
        if self.compile and (self.chunk is not None or torch.__version__ < (2, 10)):  # type: ignore[operator]
            raise ValueError("compile=True needs torch 2.10, and all members at once: no chunk=")
        if self.each is not None:
            if self.chunk is not None or self.batch == "split" or self.of != "members":
                raise ValueError("each= needs all members at once: no chunk=, batch='split' or of=")
            if self.each.dropout is not None and self.compile:
                raise ValueError("each: members with dropout of their own can't be compiled")
        if self.chunk is not None and (self.batch != "same" or self.of != "members"):
            raise ValueError("chunk= needs batch='same' and of='members'; leave it out")
        if self.of != "members" and self.batch != "same":
            raise ValueError(f"of={self.of!r} needs batch='same'; got batch={self.batch!r}")
        if self.patience is not None and self.validation is None:
            raise ValueError("patience: early stopping needs validation data; got none")
        self.more_is_better(self.metric or "accuracy")

    def make_optimizer(self, ensemble: EmbeddedEnsemble) -> Optimizer:
        """Return the optimizer, with gamma in its rates; None: SGD with momentum 0.9."""
        # On the CPU the fused kernel takes any memory for contiguous, and no sparse gradients.
        sparse = any(getattr(module, "sparse", False) for module in ensemble.modules())
        dense = (p.is_contiguous() and p.device.type == "cpu" for p in ensemble.parameters())
        fused = not sparse and all(dense)
        make = self.optimizer or functools.partial(SGD, momentum=0.9, fused=fused)
        groups = ensemble.parameter_groups(
            *(self.lr, self.modulation_lr, self.weight_decay),
            gamma=self.gamma,
            optimizer=make,
            modulation_weight_decay=self.modulation_weight_decay,
        )
        return make(groups)

    def make_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        return (self.scheduler or linear_decay(self.epochs))(optimizer)

    def gamma_of(self, ensemble: EmbeddedEnsemble) -> float:
        factor = gradient_factor(self.gamma, ensemble.members, ensemble.natural_gamma)
        return ensemble.members * factor

    def describe(
        self, ensemble: EmbeddedEnsemble, optimizer: Optimizer, rows: int
    ) -> dict[str, Any]:
        """Return what identifies a run, for its checkpoints."""
        hidden, plan = ("params", "lr", "initial_lr"), ensemble.plan
        groups = optimizer.param_groups
        groups = [{k: describe(v) for k, v in g.items() if k not in hidden} for g in groups]
        tensors = ensemble.state_dict().items()
        return {
            "family": plan.family + str(plan.heads or ""),
            "members": ensemble.members,
            "sites": [[s.layer, s.kind, repr(s.law), s.trainable, s.fresh] for s in plan.sites],
            **{f"shape of {name}": [list(t.shape), str(t.dtype)] for name, t in tensors},
            **{name: describe(value) for name, value in vars(self).items()},
            "gamma": self.gamma_of(ensemble),
            "optimizer": {"name": type(optimizer).__name__, "groups": groups},
            "batches or rows": rows,
        }

    def more_is_better(self, metric: Metric) -> bool:
        """Return the direction of a metric; ``maximise`` says so for a function of the user's."""
        if isinstance(metric, str):
            check_choice("metric", metric, ("accuracy", "loss"))
        if self.maximise is None and metric not in MORE:
            raise ValueError("metric: is more better? Not known; pass maximise=True or False")
        return MORE[metric] if self.maximise is None else self.maximise


def linear_decay(epochs: int, *, hold: float = 0.5, final: float = 0.01) -> MakeScheduler:
    """Return the paper's schedule: a constant rate, then linearly down.

    Args:
        epochs: of the whole run.
        hold: fraction of the epochs with the full rate.
        final: fraction of the rate at the end; the last epoch comes one step short of it.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> scheduler = linear_decay(8, final=0.0)(optimizer)
        >>> [scheduler.lr_lambdas[0](epoch) for epoch in range(8)]
        [1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if not 0 <= hold <= 1 or not 0 <= final <= 1:
        raise ValueError(f"hold and final are fractions from 0 to 1; got {hold} and {final}")

    def factor(epoch: int) -> float:
        left = (epochs - epoch) / max(epochs * (1 - hold), 1e-12)
        return final + (1 - final) * min(1.0, max(0.0, left))

    return lambda optimizer: LambdaLR(optimizer, factor)


def describe(value: Any) -> Any:
    """Return JSON for a function, a module or a number that is the same in every process."""
    if isinstance(value, EachMember):
        value = list(vars(value).values())
    elif isinstance(value, functools.partial):
        value = [value.func, value.args, sorted(value.keywords.items())]
    elif isinstance(value, nn.Module):
        value = [repr(value), *value.state_dict().values()]
    if isinstance(value, (tuple, list)):
        return [describe(v) for v in value]
    if isinstance(value, Tensor):
        return value.tolist() if value.numel() < 1000 else list(value.shape)
    if value is None or (isinstance(value, (bool, int, str, float)) and value == value):
        return value
    if name := getattr(value, "__qualname__", ""):
        return f"{value.__module__}.{name}"
    return str(value) if isinstance(value, (torch.dtype, float)) else type(value).__name__
