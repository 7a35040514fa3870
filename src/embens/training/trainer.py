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
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._pytree import tree_map_only

from embens.checks import find_gaps
from embens.ensemble.export import evaluating
from embens.ensemble.run import gather
from embens.objective import (
    BatchKind,
    check_labels,
    default_criterion,
    gaussian_nll,
    ignored_label,
    member_losses,
    squared_error,
)
from embens.training import parallel, randomness
from embens.training.batches import (
    Loaded,
    Minibatch,
    Shuffled,
    map_tensors,
    training_batches,
    validation_batches,
)
from embens.training.callbacks import by_moment
from embens.training.checkpoint import Checkpoints
from embens.training.clipping import clip_gradients_
from embens.training.each import EachMember
from embens.training.history import History, Tally, history_of
from embens.training.progress import Progress
from embens.training.settings import Settings, linear_decay, more_is_better

if TYPE_CHECKING:
    from embens.ensemble import EmbeddedEnsemble

_CHECK_EVERY = 64  # steps between looks at whether losses are finite
_DEFAULTS = {f.__name__: f for f in (F.cross_entropy, squared_error, gaussian_nll)}


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
        callbacks: Sequence[Any] = (),
        progress: bool | None = False,
    ):
        self.ensemble, self.settings = ensemble, settings
        self.device = next(ensemble.parameters()).device
        self.world = parallel.join(self.device)
        self.moments = by_moment(callbacks)
        if self.world.rank > 0:
            progress, callbacks, self.moments = False, (), by_moment(())
        self.stateful = [c for c in callbacks if hasattr(c, "state_dict")]
        if self.world.size > 1 and settings.batch == "split":
            raise ValueError(
                "batch='split' deals out the rows of one batch to members, which several processes "
                "can't do for each other; use one process, or batch='same' or 'own'"
            )
        own = ensemble.members if settings.batch == "own" else None
        repetition = ensemble.plan.heads and ensemble.plan.heads.repetition
        options = {"seed": settings.seed, "own": own, "world": self.world, "repetition": repetition}
        self.batches = training_batches(train, settings.batch_size, **options)
        if settings.each is not None:
            rows = self.batches.count if self.batches.resumable else None
            settings.each.check(ensemble, rows, settings.optimizer)
        self.validation: Shuffled | Loaded | None = None
        if validation is not None:
            self.validation = validation_batches(validation, settings.batch_size)
        self.progress = Progress(progress, settings.epochs, len(self.batches))
        parallel.broadcast_(self.world, ensemble.state_dict().values())
        self.optimizer = settings.make_optimizer(ensemble)
        self.scheduler = (settings.scheduler or linear_decay(settings.epochs))(self.optimizer)
        plateau = isinstance(self.scheduler, ReduceLROnPlateau)
        if plateau and settings.schedule_by == "step":
            raise ValueError("ReduceLROnPlateau goes by a metric of epochs: schedule_by='epoch'")
        half = settings.autocast == torch.float16  # else the scaler does nothing
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=half)
        # A graph for each shape: which one runs must not depend on those that ran before.
        self.forward: Callable = ensemble
        if settings.compile:
            self.forward = torch.compile(lambda *a, **k: ensemble(*a, **k), dynamic=False)
        self.criterion = settings.criterion
        self.shared = list(ensemble.shared_parameters())
        self.individual = list(ensemble.individual_parameters())
        if settings.each is not None:
            settings.each.attach(self.optimizer, settings.optimizer, self.individual)
            if settings.each.dropout is not None:
                self.forward = settings.each.dropping(ensemble)
        self.parameters = [*self.shared, *self.individual]
        self.epoch = self.steps = 0
        self.records: list[dict[str, Any]] = []
        self.best: dict[str, Tensor] | None = None
        self.best_value, self.best_epoch = math.nan, None
        self.stopped: str | None = None
        self._unchecked: list[Tensor] = []
        self._labels: list[tuple[str, Any]] = []
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
        if self.stopped is None:
            self._check_data()
        self.progress.start(self.steps)
        with self.progress:
            while self.stopped is None:
                self._run_epoch(checkpoints, every if self.batches.resumable else None)
        self.optimizer.zero_grad(set_to_none=True)
        if self.best is not None:
            self.ensemble.load_state_dict(self.best)
        history = history_of(self.records, self.best_epoch, self.stopped)
        self._tell("on_end", history)
        return history

    def _run_epoch(self, checkpoints: Checkpoints | None, every: int | None) -> None:
        self.ensemble.train()
        began = time.perf_counter() - self.seconds
        batches = self.batches.epoch(self.epoch, self.step * self.settings.accumulate)
        while several := list(islice(batches, self.settings.accumulate)):
            self.take_step(several)
            if checkpoints and every and self.steps % every == 0:
                self.seconds = time.perf_counter() - began
                self.save(checkpoints)
        self.seconds = time.perf_counter() - began
        self.end_epoch()
        if checkpoints and (not every or self.stopped):
            self.save(checkpoints)

    def take_step(self, several: Sequence[Minibatch]) -> None:
        """Make one step on the mean over the rows of some batches."""
        for parameter in self.parameters:
            parameter.grad = None
        rows, totals = sum(b.rows for b in several), [b.total for b in several]
        parts = [self._add_gradients(b, b.rows / rows if rows else 1.0) for b in several]
        loss, members = reduce(torch.add, [loss for loss, _ in parts]), parts[0][1]
        total = None if None in totals else sum(totals)  # type: ignore[arg-type]
        loss = parallel.average_(self.world, loss, self.parameters, rows, total)
        moved = self._update()
        self.step += 1
        self.steps += 1
        self._unchecked.append(loss)
        if self.step % _CHECK_EVERY == 0:
            self.check_losses()
        if self.moments["on_step"]:
            record = {"epoch": self.epoch + 1, "step": self.steps, "loss": float(loss) / members}
            self._tell("on_step", record | self._rates())
        if moved and self.settings.schedule_by == "step":
            self.scheduler.step()
        self.progress.step(loss, members)

    def _update(self) -> bool:
        """Change the weights by their gradients; return whether the scaler let it happen."""
        self.scaler.unscale_(self.optimizer)
        if self.settings.clip is not None:
            clip_gradients_(self.ensemble, self.settings.clip, gamma=self.settings.gamma)
        if self.norms is None:
            self.norms = [gradient_norm(self.shared), gradient_norm(self.individual)]
        self.scaler.step(self.optimizer)
        scale = self.scaler.get_scale()
        self.scaler.update()
        return self.scaler.get_scale() >= scale

    def _add_gradients(self, batch: Minibatch, weight: float) -> tuple[Tensor, int]:
        """Add a batch's gradients, times a weight; return its objective and how many members."""
        name = f"train: batch {self.step + 1}"
        gaps = "" if self.batches.tensors else self._look(name, batch.inputs, batch.target)
        inputs, target = self._move((batch.inputs, batch.target))
        try:
            loss, losses, outputs = self._backward(inputs, target, weight, batch.numbers)
        except (RuntimeError, ValueError) as error:  # what is not finite may be refused somewhere
            if self.steps == 0:
                self.ensemble.load_state_dict(self.good)
            self.check_losses()
            _explain(error, f"{name} has {batch.rows} rows")
            raise
        _refuse(name, gaps, loss)
        if batch.rows:
            self.tally.add(losses, outputs, target, batch.rows)
        return loss if weight == 1 else weight * loss, len(losses)

    def _backward(
        self, inputs: Any, target: Any, weight: float, rows: Tensor | None
    ) -> tuple[Tensor, Tensor, Any]:
        """Return the objective, the members' losses and their outputs."""
        if self.settings.chunk is None:
            outputs = self._outputs(self.forward, inputs, self.settings.batch)
            losses = self._losses(outputs, target, self.settings.batch, self.settings.each, rows)
            loss = losses.sum() + self._kl()
            self._scaled(loss, weight).backward()
            return loss.detach(), losses, outputs
        seen: list[tuple[Any, Tensor]] = []

        def loss_of(outputs: Any) -> Tensor:
            with torch.autocast(self.device.type, enabled=False):
                outputs = tree_map_only(Tensor, _full, outputs)
                losses = self._losses(outputs, target)
            seen.append((tree_map_only(Tensor, Tensor.detach, outputs), losses.detach()))
            return self._scaled(losses.sum(), weight)

        args, kwargs = self.ensemble.bind(inputs)
        run = self.ensemble.run(args, kwargs, chunk=self.settings.chunk, cut=True)
        with run, self._autocast():
            run.backward(loss_of)
        outputs, losses = (gather(parts, torch.cat) for parts in zip(*seen, strict=True))
        kl = self._kl()
        if isinstance(kl, Tensor):
            self._scaled(kl, weight).backward()
            kl = kl.detach()
        return losses.sum() + kl, losses, outputs

    def _kl(self) -> Tensor | float:
        """Return the divergence from a prior for each row, of members that have one."""
        if not self.ensemble.plan.has_prior:
            return 0.0
        batches = self.batches
        try:
            rows = batches.count if isinstance(batches, Shuffled) else len(batches.data.dataset)
        except (AttributeError, TypeError):
            raise TypeError(
                "train: the objective of these members has their divergence from the prior, "
                "divided by the number of rows, which this loader does not know; pass tensors or "
                "a DataLoader of a data set with a length"
            ) from None
        return self.ensemble.kl() / rows

    def _scaled(self, loss: Tensor, weight: float) -> Tensor:
        return self.scaler.scale(loss if weight == 1 else weight * loss)

    def _autocast(self) -> AbstractContextManager:
        kind = self.settings.autocast
        return nullcontext() if kind is None else torch.autocast(self.device.type, kind)

    def _outputs(self, call: Callable, inputs: Any, batch: BatchKind = "same") -> Any:
        args, kwargs = self.ensemble.bind(inputs)
        with self._autocast():
            outputs = call(*args, batch=batch, **kwargs)
        return outputs if self.settings.autocast is None else tree_map_only(Tensor, _full, outputs)

    def _losses(
        self,
        outputs: Any,
        target: Any,
        batch: BatchKind = "same",
        each: EachMember | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        if self.criterion is None:
            self.criterion = default_criterion(outputs, target, batch, self.settings.of)
        if self._labels:
            ignored, labels, self._labels = ignored_label(self.criterion), self._labels, []
            if ignored is not None:
                for name, values in labels:
                    check_labels(name, values, outputs.shape[1 if batch == "split" else 2], ignored)
        if each is not None:
            return each.losses(outputs, target, self.criterion, batch, rows)
        members = self.ensemble.members if batch == "split" else None
        return member_losses(
            *(outputs, target, self.criterion), batch=batch, of=self.settings.of, members=members
        )

    def _move(self, values: Any) -> Any:
        return map_tensors(lambda v: v.to(self.device, non_blocking=True), values)

    # Data

    def _look(self, name: str, inputs: Any, target: Any) -> str:
        """Return where data that were not looked at before are not finite; note their labels."""
        self._labels.append((name, target))
        return find_gaps("inputs", inputs) or find_gaps("targets", target)

    @torch.no_grad()
    def _check_data(self) -> None:
        """Refuse, before anything is spent, tensors that would not do.

        Where they are not finite the first epoch is rehearsed: their losses may be.
        """
        settings, criterion = self.settings, self.criterion
        for name, batches in (("train", self.batches), ("validation", self.validation)):
            if batches is None or batches.tensors is None:
                continue
            if not (gaps := self._look(name, *batches.tensors)):
                continue
            kind = settings.batch if name == "train" else "same"
            with evaluating(self.ensemble), randomness.seeded(settings.seed):
                for batch in batches.epoch(0):
                    inputs, target = self._move((batch.inputs, batch.target))
                    loss = self._losses(self._outputs(self.ensemble, inputs, kind), target, kind)
                    parallel.sum_(self.world, [loss := loss.sum()])
                    _refuse(name, gaps, loss)
            self.criterion = criterion
        if self.steps or isinstance(self.batches, Loaded):
            return
        rows = (self.batches.count - 1) % settings.batch_size + 1
        split = self.ensemble.members if settings.batch == "split" else 1
        if rows < 2 * self.world.size * split:  # too few for BatchNorm?
            (last,) = self.batches.epoch(0, len(self.batches) - 1)
            self.ensemble.train()
            try:
                with randomness.seeded(settings.seed):
                    self._outputs(self.ensemble, self._move(last.inputs), settings.batch)
            except ValueError as error:
                _explain(error, f"train: the last of {self.batches.count} rows in batches of "
                         f"{settings.batch_size} are {rows}")  # fmt: skip
                raise
            finally:
                self.ensemble.load_state_dict(self.good)

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
        if not all_finite(self.parameters):
            raise self._divergence("a weight is not finite", self.step)
        if self.validation is not None:
            self._validate(record, self.validation)
        metric = record.get("metric", math.nan)
        shared, individual = self.norms or (math.nan, math.nan)
        record |= self._rates()
        record |= {"gradient_norm_shared": shared, "gradient_norm_individual": individual}
        record["seconds"] = self.seconds
        self.records.append(record)
        self.epoch += 1
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(record["loss"] if math.isnan(metric) else metric)
        elif self.settings.schedule_by == "epoch":
            self.scheduler.step()
        self.keep_good()
        self._compare(metric)
        if self.epoch == self.settings.epochs:
            self.stopped = "epochs"
        self._begin_epoch()
        self.progress.epoch(record)
        if self.moments["on_epoch"]:
            self._tell("on_epoch", history_of([record], None, None).epochs[0])

    def _tell(self, moment: str, record: Any) -> None:
        for callback in self.moments[moment]:
            with randomness.seeded(self.settings.seed):
                callback(self.ensemble, record)

    @torch.no_grad()
    def _validate(self, record: dict[str, Any], validation: Shuffled | Loaded) -> None:
        """Add the validation columns, and the metric."""
        metric, tally = self.settings.metric, Tally(self.ensemble.members, device=self.device)
        kept: list[tuple[Any, Any]] = []
        seed = randomness.combine(self.settings.seed, self.epoch, 1)
        with evaluating(self.ensemble), randomness.seeded(seed):
            for number, batch in enumerate(validation.epoch(0), 1):
                name = f"validation: batch {number}"
                gaps = "" if validation.tensors else self._look(name, batch.inputs, batch.target)
                inputs, target = self._move((batch.inputs, batch.target))
                outputs = self._outputs(self.ensemble, inputs)
                losses = self._losses(outputs, target)
                _refuse(name, gaps, losses.sum())
                tally.add(losses, outputs, target, batch.rows)
                if callable(metric):
                    kept.append((outputs, target))
        record.update(tally.summary("validation_"))
        if metric is None:
            metric = "loss" if math.isnan(record[_METRICS["accuracy"]]) else "accuracy"
        if callable(metric):
            outputs = gather([outputs for outputs, _ in kept], lambda parts: torch.cat(parts, 1))
            value = metric(outputs, gather([target for _, target in kept], torch.cat))
        else:
            value = record[_METRICS[metric]]
        value = torch.tensor([float(value)], dtype=torch.float64, device=self.device)
        parallel.broadcast_(self.world, [value])
        record["metric"], self.more = float(value), more_is_better(metric, self.settings.maximise)

    def _compare(self, metric: float) -> None:
        if math.isnan(metric):
            return
        better = metric > self.best_value if self.more else metric < self.best_value
        if math.isnan(self.best_value) or better:
            self.best_value, self.best_epoch = metric, self.epoch
            if self.settings.keep == "best":
                self.best = self.good
        patience = self.settings.patience
        if patience is not None and self.epoch - (self.best_epoch or 0) >= patience:
            self.stopped = "patience"

    def _rates(self) -> dict[str, float]:
        found = {id(p): float(g["lr"]) for g in self.optimizer.param_groups for p in g["params"]}
        firsts = (next(iter(parameters), None) for parameters in (self.shared, self.individual))
        shared, individual = (found.get(id(first), math.nan) for first in firsts)
        return {"lr": shared, "modulation_lr": individual}

    # State

    def keep_good(self) -> None:
        self.good = {k: v.detach().clone() for k, v in self.ensemble.state_dict().items()}

    def _divergence(self, what: str, step: int) -> Divergence:
        shared, individual = self._rates().values()
        self.ensemble.load_state_dict(self.good)
        self.optimizer.zero_grad(set_to_none=True)
        where = f"after epoch {self.epoch}" if self.epoch else "before training"
        return Divergence(
            f"the run diverged in epoch {self.epoch + 1} at step {step}: {what}. The ensemble has "
            f"its weights from {where} again. Try a lower lr (shared rate now {shared:g}, "
            f"modulations {individual:g}), a smaller gamma (now "
            f"{self.settings.gamma_of(self.ensemble):g}: it multiplies the rate of the shared "
            "parameters; 1 is the mean gradient), standardised inputs, or clip=.",
            history_of(self.records, self.best_epoch, "epochs"),
        )

    def save(self, checkpoints: Checkpoints) -> None:
        self.check_losses()
        self.tally.flush()
        sums = {name: value.clone() for name, value in self.tally.sums.items()}
        parallel.sum_(self.world, sums.values())
        if self.world.rank > 0 or not all_finite(self.parameters):
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
            "scaler": self.scaler.state_dict(),
            "callbacks": [callback.state_dict() for callback in self.stateful],
            "criterion": next((k for k, v in _DEFAULTS.items() if v is self.criterion), None),
            **{name: getattr(self, name) for name in _POSITION},
        }
        checkpoints.save(self.steps, state)

    def load(self, state: dict[str, Any]) -> None:
        self.ensemble.load_state_dict(state["model"])
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # before the scheduler's
        self.keep_good()
        self.good = state["good"] or self.good
        self.best = state["best"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        randomness.set_states(state["random"])
        for generator, value in zip(self.batches.generators, state["generators"], strict=True):
            generator.set_state(value)
        self.criterion = _DEFAULTS.get(state["criterion"], self.criterion)
        self.scaler.load_state_dict(state["scaler"])
        for callback, value in zip(self.stateful, state["callbacks"], strict=False):
            callback.load_state_dict(value)
        if self.world.rank == 0:
            for name, value in state["tally"].items():
                self.tally.sums[name].copy_(value)
        for name in _POSITION:
            setattr(self, name, state[name])


_METRICS = {"loss": "validation_loss", "accuracy": "validation_ensemble_accuracy"}
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


def _full(value: Tensor) -> Tensor:
    """Return numbers of half precision in single precision."""
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


def _refuse(name: str, gaps: str, loss: Tensor) -> None:
    """Raise if a loss is not finite because data are not."""
    if gaps and not loss.isfinite():
        raise ValueError(
            f"{name}: {gaps}, and the loss is {float(loss)} there. Leave these rows out, or fill "
            "them in (torch.nan_to_num)."
        )


def _explain(error: Exception, what: str) -> None:
    """Raise what torch says of BatchNorm on one row in words that say what to do."""
    if "more than 1 value per channel" in str(error):
        raise ValueError(
            f"{what}, and BatchNorm needs at least two rows of each member in training. Choose "
            "another batch_size, or pass a DataLoader with drop_last=True."
        ) from error
