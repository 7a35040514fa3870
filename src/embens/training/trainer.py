"""A run of :func:`embens.fit`: its state, its steps, and what happens at the end of an epoch.

A step is forward, backward, update; whatever can wait is done for many steps at once, because on
small networks book-keeping would take longer than the arithmetic. So a loss that is not finite is
found a little later than it happens, and the run goes back to the weights of the epoch before.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._pytree import tree_map

from embens.objective import BatchKind, default_criterion, member_losses, squared_error
from embens.prediction import evaluating
from embens.training import parallel, randomness
from embens.training.batches import Minibatch, count_rows, training_batches, validation_batches
from embens.training.checkpoint import Checkpoints
from embens.training.history import History, Tally, history_of
from embens.training.progress import Progress
from embens.training.settings import Settings, linear_decay

if TYPE_CHECKING:
    from embens.ensemble import EmbeddedEnsemble

Callback = Callable[["EmbeddedEnsemble", dict[str, Any]], object]
_CHECK_EVERY = 64  # steps between looks at whether losses are finite
_DEFAULTS = {f.__name__: f for f in (torch.nn.functional.cross_entropy, squared_error)}


class Divergence(ArithmeticError):
    """The loss, or a weight, is not finite. The ensemble has its last good weights."""

    def __init__(self, message: str, history: History):
        super().__init__(message)
        self.history = history  # of the epochs before


class Trainer:
    """A training run between two steps.

    So many epochs are done (``epoch``), so many steps of the next one (``step``), and in all
    (``steps``). A criterion of None becomes its default on the first batch.
    """

    def __init__(
        self,
        ensemble: EmbeddedEnsemble,
        train: Any,
        validation: Any,
        settings: Settings,
        callbacks: Sequence[Callback] = (),
        progress: bool | None = False,
    ):
        self.ensemble, self.settings, self.callbacks = ensemble, settings, callbacks
        self.device = next(ensemble.parameters()).device
        self.world = parallel.join(self.device)
        if self.world.size > 1 and settings.batch == "split":
            raise ValueError(
                "batch='split' deals out the rows of one batch to members, which several processes "
                "can't do for each other; use one process, or batch='same' or 'own'"
            )
        own = ensemble.members if settings.batch == "own" else None
        heads = ensemble.plan.heads
        repetition = None if heads is None else heads.repetition
        options = {"seed": settings.seed, "own": own, "world": self.world, "repetition": repetition}
        self.batches = training_batches(train, settings.batch_size, **options)
        given = validation is not None
        self.validation = validation_batches(validation, settings.batch_size) if given else None
        progress = progress if self.world.rank == 0 else False
        self.progress = Progress(progress, settings.epochs, len(self.batches))
        parallel.broadcast_(self.world, ensemble.state_dict().values())
        self.optimizer = settings.make_optimizer(ensemble)
        self.scheduler = (settings.scheduler or linear_decay(settings.epochs))(self.optimizer)
        self.criterion = settings.criterion
        self.shared = list(ensemble.shared_parameters())
        self.individual = list(ensemble.individual_parameters())
        self.parameters = [*self.shared, *self.individual]
        self.epoch = self.steps = 0
        self.records: list[dict[str, Any]] = []
        self.best: dict[str, Tensor] | None = None
        self.best_value, self.best_epoch = math.nan, None
        self.stopped: str | None = None
        self._unchecked: list[Tensor] = []
        self._begin_epoch()
        self.keep_good()

    def _begin_epoch(self) -> None:
        self.step, self.seconds = 0, 0.0
        self.norms: list[float] | None = None
        self.tally = Tally(self.ensemble.members, self.settings.batch, self.device)

    # Steps

    def train(self, folder: str | os.PathLike[str] | None, every: int | None) -> History:
        """Run until the end, from the last checkpoint in the folder if there is one."""
        if folder is None:
            return self._train(None, every)
        run = self.settings.describe(self.ensemble, self.optimizer, self.batches.count)
        checkpoints = Checkpoints(folder, run)
        with checkpoints.alone() if self.world.rank == 0 else nullcontext():
            return self._train(checkpoints, every)

    def _train(self, checkpoints: Checkpoints | None, every: int | None) -> History:
        if checkpoints and (state := checkpoints.load_last()):
            self.load(state)
        tensors = self.ensemble.state_dict().values()
        parallel.broadcast_(self.world, tensors)  # nobody starts before all have read
        if self.settings.epochs == 0:
            self.stopped = "epochs"
        self.progress.start(self.steps)
        with self.progress:
            while self.stopped is None:
                self._run_epoch(checkpoints, every if self.batches.resumable else None)
        self.optimizer.zero_grad(set_to_none=True)
        if self.best is not None:
            self.ensemble.load_state_dict(self.best)
        return history_of(self.records, self.best_epoch, self.stopped)

    def _run_epoch(self, checkpoints: Checkpoints | None, every: int | None) -> None:
        self.ensemble.train()
        began = time.perf_counter() - self.seconds
        for batch in self.batches.epoch(self.epoch, self.step):
            self.take_step(batch)
            if checkpoints and every and self.steps % every == 0:
                self.seconds = time.perf_counter() - began
                self.save(checkpoints)
        if self.step == 0:
            raise ValueError("train: expected at least one batch; the loader gave none")
        self.seconds = time.perf_counter() - began
        self.end_epoch()
        if checkpoints and (not every or self.stopped):
            self.save(checkpoints)

    def take_step(self, batch: Minibatch) -> None:
        inputs, target = tuple(map(self._move, batch.inputs)), self._move(batch.target)
        for parameter in self.parameters:
            parameter.grad = None
        try:
            loss, losses, outputs = self._backward(inputs, target)
        except (RuntimeError, ValueError):  # what is not finite may be refused somewhere
            self.check_losses()
            raise
        loss = parallel.average_(self.world, loss, self.parameters, batch.rows, batch.total)
        if self.norms is None:
            self.norms = [gradient_norm(self.shared), gradient_norm(self.individual)]
        self.optimizer.step()
        if batch.rows:
            self.tally.add(losses, outputs, target, batch.rows)
        self.step += 1
        self.steps += 1
        self._unchecked.append(loss)
        if self.step % _CHECK_EVERY == 0:
            self.check_losses()
        self.progress.step(loss, len(losses))

    def _backward(self, inputs: tuple, target: Any) -> tuple[Tensor, Tensor, Any]:
        """Return the objective, the members' losses and their outputs."""
        if self.settings.chunk is None:
            outputs = self.ensemble(*inputs, batch=self.settings.batch)
            losses = self._losses(outputs, target, self.settings.batch)
            loss = losses.sum()
            loss.backward()
            return loss.detach(), losses, outputs
        seen: list[tuple[Any, Tensor]] = []

        def watched(outputs: Any, target: Any) -> Tensor:
            losses = self._losses(outputs, target)
            seen.append((tree_map(Tensor.detach, outputs), losses.detach()))
            return losses[:, None]

        watched.over_members = True  # type: ignore[attr-defined]
        loss = self.ensemble.backward(*inputs, target, criterion=watched, chunk=self.settings.chunk)
        whole = all(isinstance(outputs, Tensor) for outputs, _ in seen)
        outputs = torch.cat([outputs for outputs, _ in seen]) if whole else None
        return loss, torch.cat([losses for _, losses in seen]), outputs

    def _losses(self, outputs: Any, target: Any, batch: BatchKind = "same") -> Tensor:
        if self.criterion is None:
            self.criterion = default_criterion(outputs, target, batch)
        members = self.ensemble.members if batch == "split" else None
        return member_losses(
            *(outputs, target, self.criterion), batch=batch, of=self.settings.of, members=members
        )

    def _move(self, values: Any) -> Any:
        if isinstance(values, Tensor):
            return values.to(self.device, non_blocking=True)
        return tree_map(lambda v: self._move(v) if isinstance(v, Tensor) else v, values)

    def check_losses(self) -> None:
        """Raise :class:`Divergence` if a loss since the last time is not finite."""
        values = torch.stack(self._unchecked).tolist() if self._unchecked else []
        self._unchecked = []
        for index, value in enumerate(values):
            if not math.isfinite(value):
                raise self._divergence(f"the loss is {value}", self.step - len(values) + index + 1)

    # Epochs

    def end_epoch(self) -> None:
        """Write the epoch's record, validate, change the rates, decide whether to go on."""
        self.check_losses()
        self.tally.flush()
        parallel.sum_(self.world, self.tally.sums.values())
        record: dict[str, Any] = {"epoch": self.epoch + 1, **self.tally.summary()}
        if not all_finite(self.ensemble.parameters()):
            raise self._divergence("a weight is not finite", self.step)
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
        for callback in self.callbacks:
            with randomness.seeded(self.settings.seed):
                callback(self.ensemble, history_of([record], None, None).epochs[0])

    @torch.no_grad()
    def _validate(self, record: dict[str, Any]) -> float:
        """Add the validation columns; return the metric."""
        assert self.validation is not None
        metric, tally = self.settings.metric, Tally(self.ensemble.members, device=self.device)
        kept: list[tuple[Any, Any]] = []
        seed = randomness.combine(self.settings.seed, self.epoch, 1)
        with evaluating(self.ensemble), randomness.seeded(seed):
            for inputs, target in self.validation():
                target = self._move(target)
                outputs = self.ensemble(*map(self._move, inputs))
                tally.add(self._losses(outputs, target), outputs, target, count_rows(target))
                if callable(metric):
                    kept.append((outputs, target))
        record.update(tally.summary("validation_"))
        if callable(metric):
            outputs = torch.cat([outputs for outputs, _ in kept], 1)
            value = metric(outputs, torch.cat([target for _, target in kept]))
        else:
            loss = self._metric_name(record) == "loss"
            value = record["validation_loss" if loss else "validation_ensemble_accuracy"]
        value = torch.tensor([float(value)], dtype=torch.float64, device=self.device)
        parallel.broadcast_(self.world, [value])
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
        found = {id(p): float(g["lr"]) for g in self.optimizer.param_groups for p in g["params"]}
        firsts = (next(iter(parameters), None) for parameters in (self.shared, self.individual))
        shared, individual = (found.get(id(first), math.nan) for first in firsts)
        return shared, individual

    # State

    def keep_good(self) -> None:
        self.good = {k: v.detach().clone() for k, v in self.ensemble.state_dict().items()}

    def _divergence(self, what: str, step: int) -> Divergence:
        settings, (shared, individual) = self.settings, self._rates()
        self.ensemble.load_state_dict(self.good)
        self.optimizer.zero_grad(set_to_none=True)
        where = f"after epoch {self.epoch}" if self.epoch else "before training"
        return Divergence(
            f"the run diverged in epoch {self.epoch + 1} at step {step}: {what}. The ensemble has "
            f"its weights from {where} again. Try a lower lr (shared rate now {shared:g}, "
            f"modulations {individual:g}), a smaller gamma (now "
            f"{settings.gamma_of(self.ensemble):g}: it multiplies the rate of the shared "
            "parameters; 1 is the mean gradient), standardised inputs, or clipped gradients in a "
            "loop of your own.",
            history_of(self.records, self.best_epoch, "epochs"),
        )

    def save(self, checkpoints: Checkpoints) -> None:
        self.check_losses()
        self.tally.flush()
        sums = {name: value.clone() for name, value in self.tally.sums.items()}
        parallel.sum_(self.world, sums.values())
        if self.world.rank > 0 or not all_finite(self.ensemble.parameters()):
            return
        state = {
            "model": self.ensemble.state_dict(),
            "good": None if self.step == 0 else self.good,
            "best": self.best,
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": randomness.get_states(),
            "generators": [g.get_state() for g in self.batches.generators],
            "tally": sums,
            "criterion": next((k for k, v in _DEFAULTS.items() if v is self.criterion), None),
            **{name: getattr(self, name) for name in _POSITION},
        }
        checkpoints.save(self.steps, state)

    def load(self, state: dict[str, Any]) -> None:
        self.ensemble.load_state_dict(state["model"])
        self.keep_good()
        self.good = state["good"] or self.good
        self.best = state["best"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        randomness.set_states(state["random"])
        for generator, value in zip(self.batches.generators, state["generators"], strict=True):
            generator.set_state(value)
        self.criterion = _DEFAULTS.get(state["criterion"], self.criterion)
        if self.world.rank == 0:
            for name, value in state["tally"].items():
                self.tally.sums[name].copy_(value)
        for name in _POSITION:
            setattr(self, name, state[name])


_POSITION = "epoch step steps seconds norms records best_value best_epoch stopped".split()


@torch.no_grad()
def gradient_norm(parameters: Iterable[Tensor]) -> float:
    """Return the norm of all gradients together; NaN if there are none."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients)) if gradients else math.nan


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all numbers are finite."""
    floats = [t for t in tensors if t.is_floating_point()]
    return math.isfinite(torch.nn.utils.get_total_norm(floats)) or all(
        bool(t.isfinite().all()) for t in floats
    )
