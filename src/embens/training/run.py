"""A run of :func:`embens.fit`: its state, its steps, and what happens at the end of an epoch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._pytree import tree_map

from embens.objective import BatchKind, member_losses
from embens.prediction import evaluating
from embens.training import parallel, randomness, rates
from embens.training.batches import Batch, Loaded, Part, Shuffled, count_rows
from embens.training.checkpoint import Checkpoints
from embens.training.history import History, Tally, history_of
from embens.training.progress import Silent
from embens.training.settings import Settings

if TYPE_CHECKING:
    from embens.ensemble import EmbeddedEnsemble


class Divergence(ArithmeticError):
    """The loss, or a weight, is not finite. The ensemble has its last good weights.

    Attributes:
        history: of the epochs before.
    """

    def __init__(self, message: str, history: History):
        super().__init__(message)
        self.history = history


class Run:
    """A training run between two steps.

    Attributes:
        epoch: how many epochs are done.
        step: how many steps of the next one are done.
        steps: how many steps are done in all.
    """

    def __init__(
        self,
        ensemble: EmbeddedEnsemble,
        settings: Settings,
        batches: Shuffled | Loaded,
        validation: Callable[[], Iterator[tuple[tuple, Any]]] | None,
        part: Part,
        progress: Silent,
    ):
        self.ensemble, self.settings, self.part, self.progress = ensemble, settings, part, progress
        self.batches, self.validation = batches, validation
        self.device = next(ensemble.parameters()).device
        self.optimizer = settings.make_optimizer(ensemble)
        make_scheduler = settings.scheduler or rates.linear_decay(settings.epochs)
        self.scheduler = make_scheduler(self.optimizer)
        self.shared = list(ensemble.shared_parameters())
        self.individual = list(ensemble.individual_parameters())
        self.epoch = self.step = self.steps = 0
        self.records: list[dict[str, Any]] = []
        self.best: dict[str, Tensor] | None = None
        self.best_value, self.best_epoch = math.nan, None
        self.stopped: str | None = None
        self._begin_epoch()
        self.keep_good()

    def _begin_epoch(self) -> None:
        self.step, self.seconds = 0, 0.0
        self.norms: list[float] | None = None
        self.tally = Tally(self.ensemble.members, self.settings.batch, self.device)

    # Steps

    def train(self, checkpoints: Checkpoints | None, every: int | None) -> History:
        """Run until the end, from wherever the state is."""
        self.progress.start(self.steps)
        if self.settings.epochs == 0:
            self.stopped = "epochs"
        while self.stopped is None:
            self.ensemble.train()
            began = time.perf_counter() - self.seconds
            for batch in self.batches.epoch(self.epoch, self.step):
                self.progress.step(self.take_step(batch))
                self.step += 1
                self.steps += 1
                if checkpoints and every and self.batches.resumable and self.steps % every == 0:
                    self.seconds = time.perf_counter() - began
                    self.save(checkpoints)
            if self.step == 0:
                raise ValueError("train: expected at least one batch; the loader gave none")
            self.seconds = time.perf_counter() - began
            self.end_epoch()
            if checkpoints and (not every or not self.batches.resumable or self.stopped):
                self.save(checkpoints)
        self.optimizer.zero_grad(set_to_none=True)
        if self.best is not None:
            self.ensemble.load_state_dict(self.best)
        return self.history()

    def take_step(self, batch: Batch) -> float:
        """Forward, backward, update; return the loss."""
        settings, ensemble = self.settings, self.ensemble
        inputs, target = self._move(batch.inputs), self._move(batch.target)
        self.optimizer.zero_grad(set_to_none=True)
        if settings.chunk is None:
            outputs = ensemble(*inputs, batch=settings.batch)
            losses = self._losses(outputs, target, settings.batch)
            losses.sum().backward()
        else:
            losses, outputs = self._backward_in_chunks(inputs, target, settings.chunk)
        parameters = (*self.shared, *self.individual)
        loss = losses.detach().mean()
        loss = parallel.average_(self.part, loss, parameters, batch.rows, batch.total)
        if self.norms is None:
            self.norms = [gradient_norm(self.shared), gradient_norm(self.individual)]
        value = float(loss)
        if not math.isfinite(value):
            raise self._divergence(f"the loss is {value}")
        self.optimizer.step()
        if batch.rows:
            self.tally.add(losses, outputs, target, batch.rows)
        return value

    def _backward_in_chunks(self, inputs: tuple, target: Any, chunk: int) -> tuple[Tensor, Any]:
        """Backpropagate chunk by chunk; return the losses and the outputs, detached."""
        seen: list[tuple[Any, Tensor]] = []

        def watched(outputs: Any, target: Any) -> Tensor:
            losses = member_losses(outputs, target, self.settings.criterion)
            seen.append((tree_map(Tensor.detach, outputs), losses.detach()))
            return losses[:, None]

        watched.over_members = True  # type: ignore[attr-defined]
        self.ensemble.backward(*inputs, target, criterion=watched, chunk=chunk)
        whole = all(isinstance(outputs, Tensor) for outputs, _ in seen)
        outputs = torch.cat([outputs for outputs, _ in seen]) if whole else None
        return torch.cat([losses for _, losses in seen]), outputs

    def _losses(self, outputs: Any, target: Any, batch: BatchKind = "same") -> Tensor:
        settings, members = self.settings, self.ensemble.members
        return member_losses(
            *(outputs, target, settings.criterion), batch=batch, of=settings.of, members=members
        )

    def _move(self, values: Any) -> Any:
        if isinstance(values, Tensor):
            return values.to(self.device, non_blocking=True)
        return tree_map(
            lambda v: v.to(self.device, non_blocking=True) if isinstance(v, Tensor) else v, values
        )

    # Epochs

    def end_epoch(self) -> None:
        """Write the epoch's record, validate, change the rates, decide whether to go on."""
        self.tally.flush()
        parallel.sum_(self.part, self.tally.counts)
        record: dict[str, Any] = {"epoch": self.epoch + 1, **self.tally.summary()}
        if not all_finite(self.ensemble.parameters()):
            raise self._divergence("a weight is not finite")
        metric = self._validate(record) if self.validation is not None else math.nan
        record["lr"], record["modulation_lr"] = self._rates()
        norms = self.norms or [math.nan, math.nan]
        record["gradient_norm_shared"], record["gradient_norm_individual"] = norms
        record["seconds"] = self.seconds
        self.records.append(record)
        self.epoch += 1
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(record["loss"] if math.isnan(metric) else metric)
        else:
            self.scheduler.step()
        self.keep_good()
        self._compare(metric, record)
        if self.epoch == self.settings.epochs:
            self.stopped = "epochs"
        self._begin_epoch()
        self.progress.epoch(record)

    @torch.no_grad()
    def _validate(self, record: dict[str, Any]) -> float:
        """Add the validation columns; return the metric."""
        assert self.validation is not None
        settings, members = self.settings, self.ensemble.members
        tally, kept = Tally(members, device=self.device), []
        seed = randomness.combine(settings.seed, self.epoch, 1)
        with evaluating(self.ensemble), randomness.seeded(seed):
            for inputs, target in self.validation():
                inputs, target = self._move(inputs), self._move(target)
                outputs = self.ensemble(*inputs)
                losses = self._losses(outputs, target)
                tally.add(losses, outputs, target, count_rows(target))
                if callable(settings.metric):
                    kept.append((outputs, target))
        record.update(tally.summary("validation_"))
        if callable(settings.metric):
            outputs = torch.cat([outputs for outputs, _ in kept], 1)
            value = settings.metric(outputs, torch.cat([target for _, target in kept]))
        elif self._metric_name(record) == "loss":
            value = record["validation_loss"]
        else:
            value = record["validation_ensemble_accuracy"]
        value = torch.tensor([float(value)], dtype=torch.float64, device=self.device)
        parallel.broadcast_(self.part, [value])
        record["metric"] = float(value)
        return record["metric"]

    def _metric_name(self, record: dict[str, Any]) -> str:
        if isinstance(self.settings.metric, str):
            return self.settings.metric
        return "loss" if math.isnan(record["validation_ensemble_accuracy"]) else "accuracy"

    def _compare(self, metric: float, record: dict[str, Any]) -> None:
        if math.isnan(metric):
            return
        more = self.settings.more_is_better(self._metric_name(record))
        better = metric > self.best_value if more else metric < self.best_value
        if math.isnan(self.best_value) or better:
            self.best_value, self.best_epoch = metric, self.epoch
            if self.settings.keep == "best":
                self.best = self.good
        patience = self.settings.patience
        if patience is not None and self.epoch - (self.best_epoch or 0) >= patience:
            self.stopped = "patience"

    def _rates(self) -> tuple[float, float]:
        """Return the rates of the shared and of the individual parameters."""
        found = {id(p): float(g["lr"]) for g in self.optimizer.param_groups for p in g["params"]}
        firsts = (next(iter(parameters), None) for parameters in (self.shared, self.individual))
        shared, individual = (found.get(id(first), math.nan) for first in firsts)
        return shared, individual

    def history(self) -> History:
        """Return the tables so far."""
        return history_of(self.records, self.best_epoch, self.stopped or "epochs")

    # State

    def keep_good(self) -> None:
        """Remember the weights as good ones."""
        self.good = {k: v.detach().clone() for k, v in self.ensemble.state_dict().items()}

    def _divergence(self, what: str) -> Divergence:
        settings, (shared, individual) = self.settings, self._rates()
        self.ensemble.load_state_dict(self.good)
        self.optimizer.zero_grad(set_to_none=True)
        gamma = self.ensemble.natural_gamma if settings.gamma is None else settings.gamma
        gamma = gamma(self.ensemble.members) if callable(gamma) else gamma
        where = f"after epoch {self.epoch}" if self.epoch else "before training"
        return Divergence(
            f"the run diverged in epoch {self.epoch + 1} at step {self.step + 1}: {what}. The "
            f"ensemble has its weights from {where} again. Try a lower lr (now {shared:g}, "
            f"modulations {individual:g}), a smaller gamma (now {gamma:g}: it multiplies the rate "
            "of the shared parameters; 1 is the mean gradient), standardised inputs, or clipped "
            "gradients in a loop of your own.",
            self.history(),
        )

    def save(self, checkpoints: Checkpoints) -> None:
        """Write a checkpoint, from the first process."""
        self.tally.flush()
        tally = parallel.sum_(self.part, self.tally.counts.clone())
        if self.part.rank > 0 or not all_finite(self.ensemble.parameters()):
            return
        state = {
            "model": self.ensemble.state_dict(),
            "good": None if self.step == 0 else self.good,
            "best": self.best,
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": randomness.get_states(),
            "batches": self.batches.state(),
            "tally": tally,
            **{name: getattr(self, name) for name in _POSITION},
        }
        checkpoints.save(self.steps, state)

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.ensemble.load_state_dict(state["model"])
        self.keep_good()
        self.good = state["good"] or self.good
        self.best = state["best"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        randomness.set_states(state["random"])
        self.batches.load_state(state["batches"])
        if self.part.rank == 0:
            self.tally.counts.copy_(state["tally"])
        for name in _POSITION:
            setattr(self, name, state[name])


_POSITION = (
    *("epoch", "step", "steps", "seconds", "norms", "records"),
    *("best_value", "best_epoch", "stopped"),
)


@torch.no_grad()
def gradient_norm(parameters: Iterable[Tensor]) -> float:
    """Return the norm of all gradients together; NaN if there are none."""
    norms = [p.grad.norm() for p in parameters if p.grad is not None]
    return float(torch.stack(norms).norm()) if norms else math.nan


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all numbers are finite."""
    floats = (t.detach() for t in tensors if t.is_floating_point())
    return all(math.isfinite(t.sum()) or bool(torch.isfinite(t).all()) for t in floats)
