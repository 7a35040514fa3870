"""The callback protocol of :func:`embens.fit`, and callbacks that act during a run.

A callback is an object of a subclass of :class:`Callback`, or a plain function of
``(ensemble, record)``, which is called after each epoch.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from embens.checks import check_number, closest
from embens.ensemble import EmbeddedEnsemble

if TYPE_CHECKING:
    from embens.training.history import History
    from embens.training.options import Options
    from embens.training.run import Run

MOMENTS = ("on_start", "on_gradients", "on_step", "on_epoch", "on_end")


class Callback:
    """Base class of callbacks; override the methods you need.

    By default a callback only watches a run: it exists in the first process only, and random values
    that it draws do not change the run. A callback that changes training sets
    ``changes_training = True``. It then exists in every process and shares the run's random
    generators, and a checkpoint is resumed only with the same :meth:`settings`.

    Example:
        >>> from torch import nn
        >>> from embens import batch_ensemble, fit
        >>> from embens.training import Callback
        >>> class Report(Callback):
        ...     def on_start(self, run):
        ...         print(f"{run.epochs} epochs of {run.steps_per_epoch} steps")
        ...
        ...     def on_epoch(self, run, record):
        ...         print(f"epoch {record['epoch']}: {run.steps} steps")
        ...
        ...     def on_end(self, run, history):
        ...         print(f"stopped after all {history.stopped}")
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> data = torch.randn(64, 2), torch.randn(64)
        >>> options = {"batch_size": 16, "epochs": 2, "progress": False}
        >>> history = fit(batch_ensemble(net, 2), data, callbacks=[Report()], **options)
        2 epochs of 4 steps
        epoch 1: 4 steps
        epoch 2: 8 steps
        stopped after all epochs
    """

    changes_training = False

    def setup(self, options: Options) -> None:
        """Change options before the run is built.

        Args:
            options: The options, changed in place.

        Example:
            >>> from embens.training import Options
            >>> class Split(Callback):
            ...     changes_training = True
            ...
            ...     def setup(self, options):
            ...         options.batch = "split"
            >>> options = Options()
            >>> Split().setup(options)
            >>> options.batch
            'split'
        """

    def on_start(self, run: Run) -> None:
        """Called once before the first step.

        Args:
            run: The state of the run.
        """

    def on_gradients(self, run: Run) -> None:
        """Called when the gradients of a step are complete, before the optimizer's step.

        Args:
            run: The state of the run.

        Example:
            >>> class SignGradients(Callback):
            ...     changes_training = True
            ...
            ...     def on_gradients(self, run):
            ...         for parameter in run.parameters:
            ...             parameter.grad.sign_()
        """

    def on_step(self, run: Run) -> None:
        """Called after each step of the optimizer.

        Args:
            run: The state of the run.

        Example:
            >>> class StopAtStep(Callback):
            ...     def on_step(self, run):
            ...         if run.steps == 100:
            ...             run.stop("100 steps")
        """

    def on_epoch(self, run: Run, record: dict[str, Any]) -> None:
        """Called after each epoch.

        Args:
            run: The state of the run.
            record: The row of ``history.epochs``.
        """

    def on_end(self, run: Run, history: History) -> None:
        """Called once at the end.

        Args:
            run: The state of the run.
            history: The result of ``fit``.
        """

    def settings(self) -> dict[str, Any]:
        """Return the settings that change the result; a run with other settings does not resume.

        Returns:
            All public attributes by name, unless a subclass returns others.

        Example:
            >>> from embens.training import ClipGradients
            >>> ClipGradients(1.0).settings()
            {'norm': 1.0, 'gamma': None}
        """
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def state_dict(self) -> dict[str, Any]:
        """Return the state to be saved in checkpoints.

        Returns:
            Tensors, scalars and strings, in lists and dictionaries.

        Example:
            >>> class CountSteps(Callback):
            ...     steps = 0
            ...
            ...     def on_step(self, run):
            ...         self.steps += 1
            ...
            ...     def state_dict(self):
            ...         return {"steps": self.steps}
            ...
            ...     def load_state_dict(self, state):
            ...         self.steps = state["steps"]
            >>> CountSteps().state_dict()
            {'steps': 0}
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned.

        Args:
            state: The state.

        Example:
            >>> class CountSteps(Callback):
            ...     def load_state_dict(self, state):
            ...         self.steps = state["steps"]
            >>> callback = CountSteps()
            >>> callback.load_state_dict({"steps": 7})
            >>> callback.steps
            7
        """


class EpochFunction(Callback):
    """Call a function of ``(ensemble, record)`` after each epoch."""

    def __init__(self, function: Callable[[EmbeddedEnsemble, dict[str, Any]], object]):
        self.function = function

    def on_epoch(self, run: Run, record: dict[str, Any]) -> None:
        self.function(run.ensemble, record)


def as_callbacks(callbacks: Any) -> list[Callback]:
    """Return callbacks as a list of :class:`Callback`; raise TypeError for anything else.

    Args:
        callbacks: A list of callbacks and functions of ``(ensemble, record)``.
    """
    if not isinstance(callbacks, Sequence):
        kind = type(callbacks).__name__
        raise TypeError(f"callbacks: expected a list of callbacks, got {kind}.")
    result: list[Callback] = []
    for callback in callbacks:
        if isinstance(callback, Callback):
            _check_names(callback)
            result.append(callback)
        elif callable(callback) and not isinstance(callback, type):
            result.append(EpochFunction(callback))
        else:
            raise TypeError(
                "callbacks: expected objects of a subclass of embens.training.Callback, or "
                f"functions of (ensemble, record); got {callback!r:.80}."
            )
    kinds = [type(callback) for callback in result if callback.changes_training]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise ValueError(f"callbacks has {kinds.count(kind)} {kind.__name__}; pass one.")
    return result


def _check_names(callback: Callback) -> None:
    """Raise if a method looks like one of the protocol but would never be called."""
    for name in dir(callback):
        if name.startswith("on_") and name not in MOMENTS:
            kind = type(callback).__name__
            raise TypeError(f"callbacks: {kind} has an unknown {name}{closest(name, MOMENTS)}")


class TimeLimit(Callback):
    """Stop after a number of seconds; the epoch that is cut short is validated.

    With a :class:`Checkpoint` the next run continues where this one stopped.

    Args:
        seconds: Wall-clock time since the start of ``fit``, above 0.

    Example:
        >>> callbacks = [TimeLimit(3600)]
    """

    changes_training = True

    def __init__(self, seconds: float):
        self.seconds = check_number("seconds", seconds, "a number above 0", lambda value: value > 0)
        self._deadline = math.inf

    def settings(self) -> dict[str, Any]:
        """Return nothing: a run may continue with another limit."""
        return {}

    def setup(self, options: Options) -> None:
        """Start the clock, before the data are prepared."""
        self._deadline = time.monotonic() + self.seconds

    def on_step(self, run: Run) -> None:
        """Stop after the deadline of the first process, in all processes at the same step."""
        if run.agree(time.monotonic() > self._deadline):
            run.stop("time")


class WeightAveraging(Callback):
    r"""Validate, and end with, a running mean of the weights instead of the last weights.

    After step :math:`s`, the mean moves by

    .. math:: \bar w \leftarrow \bar w + \frac{w - \bar w}{\min(h, 1 + s/9)},

    where :math:`h` is the number of steps in ``epochs`` epochs. Buffers, such as statistics of norm
    layers, are copied. The mean is evaluated in full precision.

    Args:
        epochs: Length of the average, a number above 0.

    Example:
        >>> callbacks = [WeightAveraging(epochs=2)]
    """

    changes_training = True

    def __init__(self, epochs: float):
        self.epochs = check_number("epochs", epochs, "a number above 0", lambda value: value > 0)
        self._average: Any = None

    def on_start(self, run: Run) -> None:
        """Copy the ensemble."""
        if run.steps_per_epoch == 0:
            raise ValueError(
                "WeightAveraging: the length of this loader is unknown; pass one with len()."
            )
        self._average = copy.deepcopy(run.ensemble)
        run.evaluated = self._average

    @torch.no_grad()
    def on_step(self, run: Run) -> None:
        """Update the average."""
        horizon = max(self.epochs * run.steps_per_epoch, 1.0)
        decay = 1 - 1 / min(horizon, 1 + run.steps / 9)
        means = [p.detach() for p in self._average.parameters()]
        weights = [p.detach() for p in run.ensemble.parameters()]
        get_ema_multi_avg_fn(decay)(means, weights, run.steps)
        buffers = zip(self._average.buffers(), run.ensemble.buffers(), strict=True)
        for copied, buffer in buffers:
            copied.copy_(buffer)

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged weights."""
        return dict(self._average.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the averaged weights."""
        self._average.load_state_dict(state)
