"""Options of the training loop, the callbacks that set them, and the default schedule.

Each option is set by one callback. The loop reads :class:`Options` where it needs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from embens import metrics
from embens.checks import check_choice, check_whole
from embens.training.callbacks import Callback

if TYPE_CHECKING:
    from embens.training.run import Run

BatchKind = Literal["same", "own", "split"]
ObjectiveKind = Literal["members", "mean", "moments"]
Metric = str | Callable[[Tensor, Tensor], Any] | None
MakeScheduler = Callable[[Optimizer], LRScheduler]
METRICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brier": metrics.brier,
    "ece": metrics.expected_calibration_error,
}
"""Metrics by name that need the outputs of all validation rows together."""
DIRECTIONS: dict[Any, bool] = {
    "accuracy": True,
    "loss": False,
    "nll": False,
    "rmse": False,
    "brier": False,
    "ece": False,
    metrics.ensemble_accuracy: True,
    metrics.nll: False,
    metrics.brier: False,
    metrics.expected_calibration_error: False,
}
"""Whether a larger value of a metric is better."""


@dataclass
class Options:
    """Options that callbacks may change in :meth:`Callback.setup`.

    Attributes:
        accumulate: Batches per step of the optimizer.
        autocast: Dtype of the forward passes; None: that of the parameters.
        batch: Which rows members see: "same", "own" or "split" (:class:`Batches`).
        cache_features: Whether to train last layers on features that are computed once.
        chunk: Members per backward pass; None: all at once.
        compile: Whether to compile the forward pass.
        keep_best: Whether to end with the weights of the best epoch.
        maximise: Whether a larger metric is better; None: by the metric.
        metric: Selects the best epoch.
        of: What the criterion is applied to: "members", "mean" or "moments" (:class:`Objective`).
        schedule_every: When the scheduler makes a step: "epoch" or "step".

    Example:
        >>> class AccumulateTwo(Callback):
        ...     changes_training = True
        ...
        ...     def setup(self, options):
        ...         options.accumulate = 2
        >>> options = Options()
        >>> AccumulateTwo().setup(options)
        >>> options.accumulate
        2
    """

    accumulate: int = 1
    autocast: torch.dtype | None = None
    batch: BatchKind = "same"
    cache_features: bool = False
    chunk: int | None = None
    compile: bool = False
    keep_best: bool = True
    maximise: bool | None = None
    metric: Metric = None
    of: ObjectiveKind = "members"
    schedule_every: Literal["epoch", "step"] = "epoch"

    def check(self) -> None:
        """Raise ValueError for options that exclude one another.

        Example:
            >>> try:
            ...     Options(compile=True, chunk=2).check()
            ... except ValueError as error:
            ...     print(error)
            Compile() needs all members at once; leave out Objective(chunk=…).
        """
        if self.chunk is not None and (self.batch != "same" or self.of != "members"):
            raise ValueError("Objective(chunk=…) cannot be combined with of=… or Batches(…).")
        if self.compile and self.chunk is not None:
            raise ValueError("Compile() needs all members at once; leave out Objective(chunk=…).")
        if self.of != "members" and self.batch != "same":
            raise ValueError(
                f"Objective(of={self.of!r}) needs the same rows for all members; leave out "
                f"Batches({self.batch!r})."
            )

    def choose_metric(self, metric: Metric, maximise: bool | None) -> None:
        """Set the metric that selects the best epoch, unless None.

        Args:
            metric: As for :class:`KeepBest`.
            maximise: As for :class:`KeepBest`.

        Raises:
            ValueError: If another callback has set a different metric.

        Example:
            >>> options = Options()
            >>> options.choose_metric("nll", None)
            >>> options.metric
            'nll'
        """
        if metric is None:
            return
        if self.metric is not None and self.metric != metric:
            raise ValueError("callbacks choose two metrics; pass metric= to one of them.")
        self.metric = metric
        self.maximise = maximise


def is_larger_better(metric: Metric, maximise: bool | None) -> bool:
    """Return whether a larger value of a metric is better.

    Args:
        metric: Name or function.
        maximise: The answer for functions outside ``embens.metrics``; None: by the metric.

    Returns:
        True or False.

    Raises:
        ValueError: If the metric is unknown, or a function without a known direction.

    Example:
        >>> is_larger_better("accuracy", None), is_larger_better("nll", None)
        (True, False)
    """
    if isinstance(metric, str):
        check_choice("metric", metric, [name for name in DIRECTIONS if isinstance(name, str)])
    if maximise is not None:
        return maximise
    if metric not in DIRECTIONS:
        raise ValueError(
            "metric: the direction of this function is unknown; pass maximise=True or False."
        )
    return DIRECTIONS[metric]


class Accumulate(Callback):
    """Make one step of the optimizer per ``batches`` batches, on the mean over their rows.

    Args:
        batches: Batches per step.

    Example:
        >>> callbacks = [Accumulate(4)]
    """

    changes_training = True

    def __init__(self, batches: int):
        self.batches = check_whole("batches", batches)

    def setup(self, options: Options) -> None:
        """Set ``options.accumulate``."""
        options.accumulate = self.batches


class Autocast(Callback):
    """Run forward passes in half precision; losses are computed in full precision.

    Args:
        dtype: ``torch.bfloat16``, or ``torch.float16`` (with a gradient scaler).

    Example:
        >>> callbacks = [Autocast(torch.bfloat16)]
    """

    changes_training = True

    def __init__(self, dtype: torch.dtype = torch.bfloat16):
        self.dtype = check_choice("dtype", dtype, (torch.bfloat16, torch.float16))

    def setup(self, options: Options) -> None:
        """Set ``options.autocast``."""
        options.autocast = self.dtype


class Batches(Callback):
    """Show members different rows.

    Args:
        kind: "own": each member has a separate order of the training data, and batches
            ``(member, batch, …)`` (a loader has to yield this shape); "split": row ``i`` of a
            batch goes to member ``i mod M``.

    Example:
        >>> callbacks = [Batches("own")]
    """

    changes_training = True

    def __init__(self, kind: Literal["own", "split"]):
        check_choice("kind", kind, ("own", "split"))
        self.kind: BatchKind = kind

    def setup(self, options: Options) -> None:
        """Set ``options.batch``."""
        options.batch = self.kind


class Compile(Callback):
    """Compile the forward pass with ``torch.compile``; needs torch 2.10.

    Example:
        >>> callbacks = [Compile()]
    """

    changes_training = True

    def setup(self, options: Options) -> None:
        """Set ``options.compile``."""
        if torch.__version__ < (2, 10):  # type: ignore[operator]
            raise ValueError(f"Compile() needs torch 2.10, got {torch.__version__}.")
        options.compile = True


class Objective(Callback):
    """Choose the training objective and its backward pass.

    Args:
        of: What the criterion is applied to. "members": the outputs of each member; "mean": the
            mean output; "moments": one normal distribution with the mean and variance of the
            members' mixture. See :func:`embens.objective`.
        chunk: Members per backward pass, to save memory; None: all at once.

    Example:
        >>> callbacks = [Objective(chunk=2)]
    """

    changes_training = True

    def __init__(self, of: ObjectiveKind = "members", *, chunk: int | None = None):
        check_choice("of", of, ("members", "mean", "moments"))
        self.of: ObjectiveKind = of
        self.chunk = chunk
        if chunk is not None:
            check_whole("chunk", chunk)

    def setup(self, options: Options) -> None:
        """Set ``options.of`` and ``options.chunk``."""
        options.of = self.of
        options.chunk = self.chunk


class ScheduleEveryStep(Callback):
    """Step the scheduler after each step of the optimizer instead of each epoch.

    Example:
        >>> callbacks = [ScheduleEveryStep()]
    """

    changes_training = True

    def setup(self, options: Options) -> None:
        """Set ``options.schedule_every``."""
        options.schedule_every = "step"


class KeepBest(Callback):
    """End with the weights of the best epoch by a metric on the validation data.

    Without this callback ``fit`` does the same with the default metric.

    Args:
        metric: Of the ensemble: "accuracy", "nll", "brier" or "ece" for classification, "rmse" or
            "nll" (with predicted variances) for regression; "loss" (mean over members); or a
            function of ``(outputs, target)``. None: "accuracy" for classification, "loss"
            otherwise.
        maximise: Whether larger is better; needed for functions outside ``embens.metrics``.

    Example:
        >>> callbacks = [KeepBest("nll")]
    """

    changes_training = True

    def __init__(self, metric: Metric = None, maximise: bool | None = None):
        if metric is not None:
            is_larger_better(metric, maximise)
        self.metric = metric
        self.maximise = maximise

    def setup(self, options: Options) -> None:
        """Set ``options.metric``."""
        options.choose_metric(self.metric, self.maximise)


class KeepLast(Callback):
    """End with the weights of the last epoch, also with validation data.

    Example:
        >>> callbacks = [KeepLast()]
    """

    changes_training = True

    def setup(self, options: Options) -> None:
        """Set ``options.keep_best``."""
        options.keep_best = False


class EarlyStopping(Callback):
    """Stop after ``patience`` epochs without a better metric on the validation data.

    The ensemble ends with the weights of the best epoch; add :class:`KeepLast` to keep the last.

    Args:
        patience: Number of epochs.
        metric: As for :class:`KeepBest`.
        maximise: As for :class:`KeepBest`.

    Example:
        >>> callbacks = [EarlyStopping(10, metric="loss")]
    """

    changes_training = True

    def __init__(self, patience: int, metric: Metric = None, maximise: bool | None = None):
        if metric is not None:
            is_larger_better(metric, maximise)
        self.patience = check_whole("patience", patience)
        self.metric = metric
        self.maximise = maximise

    def setup(self, options: Options) -> None:
        """Set ``options.metric``."""
        options.choose_metric(self.metric, self.maximise)

    def on_start(self, run: Run) -> None:
        """Raise ValueError without validation data."""
        if run.validation is None:
            raise ValueError("EarlyStopping needs validation data, got validation=None.")

    def on_epoch(self, run: Run, record: dict[str, Any]) -> None:
        """Stop if the best epoch is too long ago."""
        if math.isnan(record["metric"]):
            return
        best_epoch = run.best_epoch or 0
        if run.epoch - best_epoch >= self.patience:
            run.stop("patience")


def linear_decay(epochs: int, *, hold: float = 0.5, final: float = 0.01) -> MakeScheduler:
    """Return the paper's schedule: constant, then linearly decreasing.

    Args:
        epochs: Epochs of the whole run.
        hold: Fraction of the epochs with the full rate.
        final: Fraction of the rate after the last epoch.

    Returns:
        A function from an optimizer to a scheduler that makes one step per epoch.

    Raises:
        ValueError: If ``hold`` or ``final`` is not between 0 and 1.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> scheduler = linear_decay(8, final=0.0)(optimizer)
        >>> [scheduler.lr_lambdas[0](epoch) for epoch in range(8)]
        [1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if not 0 <= hold <= 1 or not 0 <= final <= 1:
        raise ValueError(f"hold and final must be between 0 and 1, got {hold} and {final}.")
    decaying_epochs = max(epochs * (1 - hold), 1e-12)

    def factor(epoch: int) -> float:
        remaining = (epochs - epoch) / decaying_epochs
        return final + (1 - final) * min(1.0, max(0.0, remaining))

    def make(optimizer: Optimizer) -> LRScheduler:
        return LambdaLR(optimizer, factor)

    return make
