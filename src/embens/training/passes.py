"""Forward and backward passes of a run, and checks of the data before the first step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embens.checks import find_gaps
from embens.ensemble import EmbeddedEnsemble
from embens.losses import (
    Criterion,
    check_labels,
    default_criterion,
    gaussian_nll,
    ignored_label,
    logits_of,
    member_losses,
    squared_error,
)
from embens.modes import evaluating
from embens.optim import has_labels, total_cross_entropy
from embens.training import processes
from embens.training.batches import AnySource, LoaderSource, Minibatch, map_tensors
from embens.training.options import BatchKind, Options
from embens.training.tally import BatchResult, Task
from embens.training.weighting import WeightedTarget, weighted
from embens.trees import gather

if TYPE_CHECKING:
    from embens.training.run import Run

DEFAULT_CRITERIA: dict[str, Criterion] = {
    "cross_entropy": F.cross_entropy,
    "squared_error": squared_error,
    "gaussian_nll": gaussian_nll,
}

ERRORS = (squared_error, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)
ERROR_MODULES = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
"""Criteria that compare values with their predictions."""


class Passes:
    """Compute outputs, losses and gradients of batches.

    Args:
        ensemble: The ensemble that is trained.
        options: Of the run.
        criterion: The criterion; None: chosen on the first batch and then kept.
    """

    def __init__(self, ensemble: EmbeddedEnsemble, options: Options, criterion: Criterion | None):
        self.ensemble = ensemble
        self.options = options
        self.criterion = criterion
        self.uses_logits = criterion is None
        self.device = next(ensemble.parameters()).device
        half_precision = options.autocast == torch.float16
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=half_precision)
        self.forward: Callable[..., Any] = ensemble
        if options.compile:
            # dynamic=False compiles one graph per shape. Otherwise the graph would depend on the
            # shapes seen before, and a resumed run would differ in the last bits.
            self.forward = torch.compile(lambda *a, **k: ensemble(*a, **k), dynamic=False)
        self._unchecked_targets: list[tuple[str, Any]] = []

    def train(
        self, batch: Minibatch, weight: float, name: str, inspect: bool
    ) -> tuple[Tensor, BatchResult]:
        """Add the gradients of a batch, multiplied by a weight.

        Args:
            batch: The batch.
            weight: Its share of the rows of a step.
            name: Of the batch, for error messages.
            inspect: Whether to look for invalid values in the batch.

        Returns:
            The weighted objective, and the losses and outputs.
        """
        gaps = ""
        if inspect:
            gaps = self.inspect(name, batch.inputs, batch.target)
        inputs, target, sample_weight = self.move((batch.inputs, batch.target, batch.weight))
        full_target = _with_weight(target, sample_weight)
        if self.options.chunk is None:
            objective, losses, outputs, log_probabilities = self._backward(
                inputs, full_target, weight
            )
        else:
            losses, outputs = self._backward_in_chunks(inputs, full_target, weight)
            objective, log_probabilities = losses.sum(), None
        if gaps:
            refuse_gaps(name, gaps, objective)
        if weight != 1:
            objective = weight * objective
        task: Task | None = "classification"
        if log_probabilities is None:
            task = self._task(outputs, target, self.options.batch)
        return objective, BatchResult(losses, outputs, target, batch.rows, task, log_probabilities)

    def _backward(
        self, inputs: Any, target: Any, weight: float
    ) -> tuple[Tensor, Tensor | None, Any, Tensor | None]:
        """Add the gradients of all members at once.

        Returns:
            The objective; losses ``(member,)``, or None in the case of log-probabilities; outputs;
            log-probabilities ``(member, class, batch)``, or None.
        """
        args, kwargs = self.ensemble.bind(inputs)
        with self.autocast():
            outputs = self.forward(*args, batch=self.options.batch, **kwargs)
        outputs = self._prepare_outputs(outputs)
        self._prepare_criterion(outputs, target, self.options.batch)
        objective, losses, log_probabilities = None, None, None
        if self._has_plain_cross_entropy(outputs, target):
            objective, log_probabilities = total_cross_entropy(outputs, target)
            if not math.isfinite(objective.item()):  # all labels of the batch may be ignored
                objective, log_probabilities = None, None
        if objective is None:
            losses = self._losses(outputs, target, self.options.batch)
            objective = losses.sum()
            losses = losses.detach()
        self._scale(objective, weight).backward()
        if log_probabilities is not None:
            log_probabilities = log_probabilities.detach()
        return objective.detach(), losses, map_tensors(Tensor.detach, outputs), log_probabilities

    def _has_plain_cross_entropy(self, outputs: Any, target: Any) -> bool:
        """Return whether one reduction over all members and rows computes the objective."""
        if self.criterion is not F.cross_entropy:
            return False
        if self.options.batch != "same" or self.options.of != "members":
            return False
        return has_labels(outputs, target) and outputs.dim() == 3

    def _backward_in_chunks(self, inputs: Any, target: Any, weight: float) -> tuple[Tensor, Any]:
        """Add the gradients of one chunk of members after another; return losses and outputs."""
        all_losses, all_outputs = [], []

        def criterion(outputs: Any, target: Any) -> Tensor:
            """Return the scaled loss of one member, and keep its loss and outputs."""
            outputs = self._prepare_outputs(outputs)
            with self.autocast(enabled=False):
                stacked = map_tensors(lambda output: output[None], outputs)
                (loss,) = self._losses(stacked, target, "same")
            all_losses.append(loss.detach())
            all_outputs.append(map_tensors(Tensor.detach, outputs))
            return self._scale(loss, weight)

        with self.autocast():
            self.ensemble.backward(
                inputs, target, criterion=criterion, chunk=self.options.chunk or 1
            )
        return torch.stack(all_losses), gather(all_outputs, torch.stack)

    def evaluate(
        self, source: AnySource, ensemble: EmbeddedEnsemble, batch: BatchKind = "same"
    ) -> Iterator[BatchResult]:
        """Yield the results of all batches of a data source, without gradients.

        The generator of fresh masks is left as it was, so that validation does not change training.

        Args:
            source: The data.
            ensemble: The ensemble of the run, or an average of its weights.
            batch: How to call the ensemble.
        """
        mask_state = ensemble.generator_state
        if mask_state is not None:
            ensemble.generator_state = mask_state.clone()
        try:
            yield from self._evaluate(source, ensemble, batch)
        finally:
            ensemble.generator_state = mask_state

    def _evaluate(
        self, source: AnySource, ensemble: EmbeddedEnsemble, batch: BatchKind
    ) -> Iterator[BatchResult]:
        for number, minibatch in enumerate(source.epoch(0), 1):
            name = f"{source.name}: batch {number}"
            gaps = ""
            if source.tensors is None:
                gaps = self.inspect(name, minibatch.inputs, minibatch.target)
            inputs, target, sample_weight = self.move(
                (minibatch.inputs, minibatch.target, minibatch.weight)
            )
            args, kwargs = ensemble.bind(inputs)
            with self.autocast(enabled=ensemble is self.ensemble):
                outputs = ensemble(*args, batch=batch, **kwargs)
            outputs = self._prepare_outputs(outputs)
            losses = self._losses(outputs, _with_weight(target, sample_weight), batch)
            refuse_gaps(name, gaps, losses.sum())
            task = self._task(outputs, target, batch)
            yield BatchResult(losses, outputs, target, minibatch.rows, task)

    def autocast(self, enabled: bool = True) -> AbstractContextManager:
        """Return the autocast context of the run.

        Args:
            enabled: Whether operations run in the lower precision.
        """
        dtype = self.options.autocast
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype, enabled)

    def move(self, values: Any) -> Any:
        """Move tensors to the device of the ensemble.

        Args:
            values: Tensors in any containers.
        """
        return map_tensors(lambda value: value.to(self.device, non_blocking=True), values)

    def inspect(self, name: str, inputs: Any, target: Any) -> str:
        """Describe non-finite values of new data; remember the target for a check of its labels.

        Args:
            name: Name of the batch, for error messages.
            inputs: Its inputs.
            target: Its target.
        """
        self._unchecked_targets.append((name, target))
        return find_gaps("inputs", inputs) or find_gaps("targets", target)

    def _prepare_outputs(self, outputs: Any) -> Any:
        """Return outputs in full precision; only the logits, if the criterion is a default."""
        if self.uses_logits:
            outputs = logits_of(outputs)
        if self.options.autocast is None:
            return outputs
        return map_tensors(_full_precision, outputs)

    def _prepare_criterion(self, outputs: Any, target: Any, batch: BatchKind) -> None:
        """Choose the criterion and check labels, as soon as there are outputs."""
        if self.criterion is None:
            if isinstance(target, WeightedTarget):
                target = target.target
            self.criterion = default_criterion(outputs, target, batch, self.options.of)
        if self._unchecked_targets:
            self._check_labels(outputs, batch)

    def _losses(self, outputs: Any, target: Any, batch: BatchKind) -> Tensor:
        """Return the losses of the members that have rows, ``(member,)``."""
        self._prepare_criterion(outputs, target, batch)
        criterion = self.criterion
        assert criterion is not None
        if isinstance(target, WeightedTarget):
            criterion = weighted(criterion)
        members = self.ensemble.members if batch == "split" else None
        return member_losses(
            outputs, target, criterion, batch=batch, of=self.options.of, members=members
        )

    def _task(self, outputs: Any, target: Any, batch: BatchKind) -> Task | None:
        """Return the task whose metrics apply to outputs and targets, if there is one."""
        if not isinstance(outputs, Tensor) or not isinstance(target, Tensor):
            return None
        if not target.is_floating_point():
            return "classification" if _are_classes(outputs, target, batch) else None
        criterion = getattr(self.criterion, "func", self.criterion)
        if criterion is gaussian_nll:
            return "gaussian" if outputs.shape[-1] == 2 else None
        is_error = isinstance(criterion, ERROR_MODULES)
        is_error = is_error or any(criterion is error for error in ERRORS)
        has_values = target.numel() * self.ensemble.members == outputs.numel()
        return "regression" if is_error and has_values else None

    def _check_labels(self, outputs: Any, batch: str) -> None:
        """Check the labels of new data, now that the number of classes is known."""
        ignored = ignored_label(self.criterion)
        if ignored is not None:
            classes = outputs.shape[1 if batch == "split" else 2]
            for name, target in self._unchecked_targets:
                check_labels(name, target, classes, ignored)
        self._unchecked_targets = []

    def _scale(self, loss: Tensor, weight: float) -> Tensor:
        """Multiply a loss by its weight in a step, and by the scale of half precision."""
        if weight != 1:
            loss = weight * loss
        return self.scaler.scale(loss)

    def criterion_name(self) -> str | None:
        """Return the name of the default criterion in use, for checkpoints."""
        for name, criterion in DEFAULT_CRITERIA.items():
            if criterion is self.criterion:
                return name
        return None

    def restore_criterion(self, name: str | None) -> None:
        """Use a default criterion by name; None changes nothing.

        Args:
            name: The result of :meth:`criterion_name`.
        """
        if name is not None:
            self.criterion = DEFAULT_CRITERIA[name]


def _with_weight(target: Any, sample_weight: Tensor | None) -> Any:
    """Return a target together with its sample weights, if there are any."""
    if sample_weight is None:
        return target
    return WeightedTarget(target, sample_weight)


def _are_classes(outputs: Tensor, target: Tensor, batch: BatchKind) -> bool:
    """Return whether outputs are logits of classes, and the target their indices."""
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        return False
    axes = 2 if batch == "split" else 3
    if outputs.dim() != axes or outputs.shape[-1] < 2:
        return False
    rows = outputs.shape[1:-1] if batch == "same" else outputs.shape[:-1]
    return target.shape == rows


def refuse_gaps(name: str, gaps: str, loss: Tensor) -> None:
    """Raise ValueError if data have non-finite values and the loss is not finite either.

    Networks and criteria may handle missing values, which are then no error.

    Args:
        name: Of the data, for the error message.
        gaps: Description of the non-finite values; "" if there are none.
        loss: The sum of the members' losses.
    """
    if gaps and not loss.isfinite():
        raise ValueError(
            f"{name}: {gaps}, and the loss is {float(loss)} there. Leave these rows out, or fill "
            "them in (torch.nan_to_num)."
        )


def _full_precision(value: Tensor) -> Tensor:
    """Return a tensor of half precision in float32; others unchanged."""
    if value.dtype in (torch.bfloat16, torch.float16):
        return value.float()
    return value


def check_data(run: Run) -> None:
    """Raise ValueError for data that would fail during the run.

    Tensors are checked here, batches of a loader when they arrive.

    Args:
        run: The run before its first step.
    """
    _check_finite(run, run.train, run.options.batch)
    if run.validation is not None:
        _check_finite(run, run.validation, "same")
    if run.steps == 0:
        _check_last_batch(run)


@torch.no_grad()
def _check_finite(run: Run, source: AnySource, batch: BatchKind) -> None:
    """Evaluate non-finite data once: the network and criterion may turn them into finite losses."""
    if source.tensors is None:
        return
    gaps = run.passes.inspect(source.name, *source.tensors)
    if not gaps:
        return
    criterion = run.passes.criterion
    with evaluating(run.ensemble), processes.seeded(run.seed):
        for result in run.passes.evaluate(source, run.ensemble, batch):
            assert result.losses is not None
            loss = result.losses.sum()
            processes.sum_(source.world, [loss])
            refuse_gaps(source.name, gaps, loss)
    run.passes.criterion = criterion


@torch.no_grad()
def _check_last_batch(run: Run) -> None:
    """Rehearse a small last batch: BatchNorm needs two rows of each member."""
    source = run.train
    if isinstance(source, LoaderSource):
        return
    rows = (source.count - 1) % source.batch_size + 1
    members_per_row = run.ensemble.members if run.options.batch == "split" else 1
    if rows >= 2 * source.world.size * members_per_row:
        return
    (last,) = source.epoch(0, len(source) - 1)
    name = f"train: the last of {source.count} rows in batches of {source.batch_size} are {rows}"
    weights = {key: value.clone() for key, value in run.ensemble.state_dict().items()}
    args, kwargs = run.ensemble.bind(run.passes.move(last.inputs))
    run.ensemble.train()
    try:
        with processes.seeded(run.seed), run.passes.autocast():
            run.ensemble(*args, batch=run.options.batch, **kwargs)
    except ValueError as error:
        explain_batch_norm(error, name)
        raise
    finally:
        run.ensemble.load_state_dict(weights)


def explain_batch_norm(error: ValueError, name: str) -> None:
    """Raise an error with the fix, if BatchNorm has refused a single row."""
    if "more than 1 value per channel" in str(error):
        raise ValueError(
            f"{name}, and BatchNorm needs at least two rows of each member in training. Choose "
            "another batch_size, or pass a DataLoader with drop_last=True."
        ) from error
