"""The state of a training run."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from embens.ensemble import EmbeddedEnsemble
from embens.training import processes
from embens.training.batches import AnySource
from embens.training.callbacks import MOMENTS, Callback
from embens.training.history import History, make_history
from embens.training.options import Options
from embens.training.passes import Passes
from embens.training.processes import World
from embens.training.tally import Tally


class Divergence(ArithmeticError):
    """A loss or a weight is not finite; the ensemble has the weights of the last good epoch.

    Attributes:
        history: History of the epochs before.

    Example:
        >>> from torch import nn
        >>> from embens import batch_ensemble, fit
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> data = torch.randn(32, 2), torch.randn(32)
        >>> try:
        ...     fit(batch_ensemble(net, 2), data, epochs=50, lr=1e6, progress=False)
        ... except Divergence as error:
        ...     isinstance(error.history, History)
        True
    """

    def __init__(self, message: str, history: History):
        super().__init__(message)
        self.history = history


class Run:
    """The state of a training run; callbacks receive it.

    Attributes:
        ensemble: The ensemble that is trained.
        evaluated: The ensemble that is validated and returned: ``ensemble``, or its average.
        train: The training batches.
        validation: The validation batches, or None.
        optimizer: The optimizer.
        scheduler: The learning-rate scheduler.
        options: Options that callbacks have set.
        callbacks: Callbacks of this process, in the order in which they are called.
        arguments: Arguments of ``fit`` that determine the result.
        gamma: The gamma passed to ``fit``.
        seed: The seed passed to ``fit``.
        world: Rank and number of processes.
        device: Device of the ensemble.
        passes: Forward and backward passes.
        shared: Shared parameters.
        individual: Individual parameters.
        parameters: Shared and individual parameters.
        epochs: Number of epochs of the whole run.
        steps_per_epoch: Steps of the optimizer per epoch; 0 if a loader has no length.
        epoch: Number of completed epochs.
        step: Number of completed steps in the current epoch.
        steps: Number of completed steps in the whole run.
        records: Losses and metrics of the completed epochs.
        tally: Losses and metrics of the current epoch.
        best_epoch: The epoch with the best metric so far, counted from 1.
        stopped: Why the run ends; None while it continues.
        interrupted: Whether the last epoch was cut short.
        cleanup: Contexts that are closed at the end of the run, also after an error.

    Example:
        >>> class StopAtLoss(Callback):
        ...     def on_step(self, run):
        ...         if run.agree(run.loss) < 0.1:
        ...             run.stop("the loss is below 0.1")
        ...
        ...     def on_epoch(self, run, record):
        ...         print(run.learning_rates()["lr"], run.history().epochs[-1]["loss"])
    """

    def __init__(
        self,
        ensemble: EmbeddedEnsemble,
        train: AnySource,
        validation: AnySource | None,
        optimizer: Optimizer,
        scheduler: Any,
        options: Options,
        callbacks: list[Callback],
        arguments: dict[str, Any],
        cleanup: ExitStack,
    ):
        self.ensemble = ensemble
        self.evaluated = ensemble
        self.train = train
        self.validation = validation
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.options = options
        self.callbacks = callbacks
        self.arguments = arguments
        self.cleanup = cleanup
        self.gamma = arguments["gamma"]
        self.seed: int = arguments["seed"]
        self.epochs: int = arguments["epochs"]
        self.world: World = train.world
        self.device = next(ensemble.parameters()).device
        self.passes = Passes(ensemble, options, arguments["criterion"])
        self.shared = list(ensemble.shared_parameters())
        self.individual = list(ensemble.individual_parameters())
        self.parameters = self.shared + self.individual
        self.steps_per_epoch = math.ceil(len(train) / options.accumulate)

        self.epoch = 0
        self.steps = 0
        self.records: list[dict[str, Any]] = []
        self.best_value = math.nan
        self.larger_is_better = False
        self.best_epoch: int | None = None
        self.best_weights: dict[str, Tensor] | None = None
        self.stopped: str | None = "epochs" if self.epochs == 0 else None
        self.interrupted = False
        self.last_objective: Tensor | None = None
        self.last_members = ensemble.members  # a small split batch has rows for fewer members
        self.unchecked_objectives: list[Tensor] = []
        self.begin_epoch()
        self.good_weights = copy_weights(ensemble)
        self._listeners = {moment: _listeners(callbacks, moment) for moment in MOMENTS}

    def begin_epoch(self) -> None:
        """Reset the counters and sums of an epoch."""
        self.step = 0
        self.seconds = 0.0
        self.gradient_norms: tuple[float, float] | None = None
        self.tally = Tally(self.ensemble.members, self.options.batch, self.device)

    # For callbacks

    @property
    def loss(self) -> float:
        """Mean loss of the members at the last step."""
        if self.last_objective is None:
            return math.nan
        return float(self.last_objective) / self.last_members

    def learning_rates(self) -> dict[str, float]:
        """Return the learning rates of the next step.

        Returns:
            The rate of the shared parameters as ``lr`` and that of the individual ones as
            ``modulation_lr``; NaN for parameters that do not exist or are not optimized.
        """
        return {
            "lr": self._rate_of(self.shared),
            "modulation_lr": self._rate_of(self.individual),
        }

    def _rate_of(self, parameters: Sequence[Tensor]) -> float:
        """Return the rate of the group that contains the first parameter."""
        if not parameters:
            return math.nan
        for group in self.optimizer.param_groups:
            if any(parameter is parameters[0] for parameter in group["params"]):
                return float(group["lr"])
        return math.nan

    def stop(self, reason: str) -> None:
        """End the run after this step or epoch; the first reason counts.

        Args:
            reason: Becomes ``history.stopped``.
        """
        if self.stopped is None:
            self.stopped = reason

    def agree(self, value: float) -> float:
        """Return the value of the first process, so that all processes decide the same.

        Args:
            value: The value of this process.

        Returns:
            The value of the first process.
        """
        if self.world.size == 1:
            return float(value)
        shared_value = torch.tensor([float(value)], dtype=torch.float64, device=self.device)
        processes.broadcast_(self.world, [shared_value])
        return float(shared_value)

    def notify(self, moment: str, *arguments: Any) -> None:
        """Call a method of all callbacks that override it.

        Args:
            moment: Name of the method, such as "on_step".
            *arguments: Arguments after the run.
        """
        for callback in self._listeners[moment]:
            method = getattr(callback, moment)
            if callback.changes_training:
                method(self, *arguments)
            else:
                # Random values that the callback draws must not change the run.
                with processes.seeded(self.seed):
                    method(self, *arguments)

    # For the loop

    def history(self) -> History:
        """Return the history of the completed epochs.

        Returns:
            The history.
        """
        return make_history(self.records, self.best_epoch, self.stopped or "epochs")

    def update_best(self, metric: float) -> None:
        """Remember the current epoch if its metric is the best so far; ignore NaN.

        Args:
            metric: Metric of the epoch that has just ended.
        """
        if math.isnan(metric):
            return
        is_better = metric > self.best_value if self.larger_is_better else metric < self.best_value
        if self.best_epoch is None or is_better:
            self.best_value = metric
            self.best_epoch = self.epoch
            if self.options.keep_best:
                self.best_weights = copy_weights(self.evaluated)

    def check_objectives(self) -> None:
        """Raise :class:`Divergence` if an objective since the last check is not finite."""
        if not self.unchecked_objectives:
            return
        values = torch.stack(self.unchecked_objectives).tolist()
        self.unchecked_objectives = []
        first_step = self.step - len(values) + 1
        for step, value in enumerate(values, first_step):
            if not math.isfinite(value):
                raise self.divergence(f"the loss is {value}", step)

    @torch.no_grad()
    def has_finite_weights(self) -> bool:
        """Return whether all parameters are finite.

        Returns:
            True if no parameter is NaN or infinite.
        """
        # One fused reduction; it may overflow, so only a finite norm is conclusive.
        if math.isfinite(torch.nn.utils.get_total_norm(self.parameters)):
            return True
        return all(bool(parameter.isfinite().all()) for parameter in self.parameters)

    def check_weights(self) -> None:
        """Raise :class:`Divergence` if a weight is not finite."""
        if not self.has_finite_weights():
            raise self.divergence("a weight is not finite", self.step)

    def divergence(self, problem: str, step: int) -> Divergence:
        """Restore the last good weights and return the error to raise.

        Args:
            problem: The problem, a sentence without its final period.
            step: The step of the current epoch at which it occurred, counted from 1.

        Returns:
            The error.
        """
        rates = self.learning_rates()
        self.ensemble.load_state_dict(self.good_weights)
        self.optimizer.zero_grad(set_to_none=True)
        origin = f"after epoch {self.epoch}" if self.epoch > 0 else "before training"
        return Divergence(
            f"the run diverged in epoch {self.epoch + 1} at step {step}: {problem}. The ensemble "
            f"has its weights from {origin} again. Try a lower lr (rate of the shared parameters "
            f"now {rates['lr']:g}, of modulations {rates['modulation_lr']:g}), a smaller gamma (it "
            "multiplies the rate of the shared parameters; 1 is the mean gradient), standardised "
            "inputs, or embens.training.ClipGradients.",
            self.history(),
        )

    # For checkpoints

    def state_dict(self, *, with_callbacks: bool = True) -> dict[str, Any]:
        """Return the state between two steps; to be called in all processes.

        Args:
            with_callbacks: Whether to include the states of callbacks, which may not have one
                before the first step.

        Returns:
            Tensors, scalars, strings and containers of them, which a checkpoint can hold.
        """
        self.tally.flush()
        sums = {name: value.clone() for name, value in self.tally.sums.items()}
        processes.sum_(self.world, sums.values())
        # At the start of an epoch the good weights are those of the ensemble.
        between_epochs = self.step == 0
        callback_states = []
        for callback in self.callbacks if with_callbacks else ():
            state = callback.state_dict()
            if state:
                callback_states.append([type(callback).__name__, state])
        return {
            "ensemble": self.ensemble.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.passes.scaler.state_dict(),
            "epochs": self.epochs,
            "epoch": self.epoch,
            "step": self.step,
            "steps": self.steps,
            "seconds": self.seconds,
            "gradient_norms": self.gradient_norms,
            "records": self.records,
            "best_value": self.best_value,
            "best_epoch": self.best_epoch,
            "best_weights": self.best_weights,
            "good_weights": None if between_epochs else self.good_weights,
            # A run that was stopped inside an epoch continues when it is loaded.
            "stopped": self.stopped if between_epochs else None,
            "tally": sums,
            "random": processes.get_states(),
            "generators": [generator.get_state() for generator in self.train.generators],
            "criterion": self.passes.criterion_name(),
            "callbacks": callback_states,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned.

        Args:
            state: The state.
        """
        self.ensemble.load_state_dict(state["ensemble"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.passes.scaler.load_state_dict(state["scaler"])
        # The scheduler would warn that the optimizer has made no step.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self.epoch = state["epoch"]
        self.step = state["step"]
        self.steps = state["steps"]
        self.seconds = state["seconds"]
        self.gradient_norms = state["gradient_norms"]
        self.records = state["records"]
        self.best_value = state["best_value"]
        self.best_epoch = state["best_epoch"]
        self.best_weights = state["best_weights"]
        self.good_weights = state["good_weights"] or copy_weights(self.ensemble)
        self.stopped = state["stopped"]
        self._continue_schedule(state["epochs"])
        if self.world.rank == 0:  # sums over processes: one process has them, the others zeros
            for name, value in state["tally"].items():
                self.tally.sums[name].copy_(value)
        processes.set_states(state["random"])
        for generator, value in zip(self.train.generators, state["generators"], strict=True):
            generator.set_state(value)
        self.passes.restore_criterion(state["criterion"])
        self._load_callbacks(state["callbacks"])

    def _continue_schedule(self, epochs: int) -> None:
        """Adapt a run that was saved with another number of epochs.

        Args:
            epochs: Number of epochs of the run that was saved.
        """
        if epochs == self.epochs:
            return
        if self.stopped == "epochs" and self.epoch < self.epochs:
            self.stopped = None
        if isinstance(self.scheduler, LambdaLR):
            # The rates of the optimizer are still those of the old schedule.
            groups = self.optimizer.param_groups
            schedules = self.scheduler.lr_lambdas
            rates = self.scheduler.base_lrs
            for group, rate, schedule in zip(groups, rates, schedules, strict=True):
                group["lr"] = rate * schedule(self.scheduler.last_epoch)

    def _load_callbacks(self, states: list[Any]) -> None:
        """Give each callback the first unused state of its class."""
        unused = list(states)
        for callback in self.callbacks:
            for position, (name, state) in enumerate(unused):
                if name == type(callback).__name__:
                    callback.load_state_dict(state)
                    del unused[position]
                    break


def copy_weights(ensemble: EmbeddedEnsemble) -> dict[str, Any]:
    """Return a copy of the state of an ensemble.

    Args:
        ensemble: The ensemble.
    """
    weights = {}
    for name, value in ensemble.state_dict().items():
        if isinstance(value, Tensor):
            weights[name] = value.detach().clone()
        else:
            weights[name] = copy.deepcopy(value)  # of a module with get_extra_state
    return weights


def _listeners(callbacks: list[Callback], moment: str) -> list[Callback]:
    """Return the callbacks that override a method."""
    default = getattr(Callback, moment)
    return [callback for callback in callbacks if getattr(type(callback), moment) is not default]
