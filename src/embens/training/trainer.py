"""A run of :func:`embens.fit`: its state, its steps, and what happens at the end of an epoch.

A step is forward, backward (:mod:`embens.training.passes`), update; whatever can wait is done for
many steps at once, because on small networks book-keeping would take longer than the arithmetic. So
a loss that is not finite is found a little later than it happens, and the run goes back to the
weights of the epoch before.
"""

import copy
import math
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import get_ema_multi_avg_fn

from embens.ensemble import EmbeddedEnsemble
from embens.ensemble.export import evaluating
from embens.ensemble.run import gather
from embens.objective import gaussian_nll, squared_error
from embens.training import parallel, randomness
from embens.training.batches import AnyBatches, Minibatch, batches_of
from embens.training.callbacks import Progress, by_moment
from embens.training.checkpoint import Checkpoints
from embens.training.history import History, Tally, history_of
from embens.training.passes import Passes, clip_gradients_

_CHECK_EVERY = 64  # steps between looks at whether losses are finite
_DEFAULTS = {f.__name__: f for f in (F.cross_entropy, squared_error, gaussian_nll)}
_METRICS = {"loss": "validation_loss", "accuracy": "validation_ensemble_accuracy"}
_POSITION = "epoch step steps seconds norms records best best_value best_epoch stopped".split()


class Divergence(ArithmeticError):
    """The loss, or a weight, is not finite. The ensemble has its last good weights."""

    def __init__(self, message: str, history: History):
        super().__init__(message)
        self.history = history  # of the epochs before


class Trainer:
    """A training run between two steps; its settings are :class:`embens.training.loop.Settings`.

    So many epochs are done (``epoch``), so many steps of the next one (``step``), and in all
    (``steps``).
    """

    def __init__(
        self,
        ensemble: EmbeddedEnsemble,
        train: Any,
        validation: Any,
        settings: Any,
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
            raise ValueError("batch='split' needs one process; use batch='same' or 'own'")
        self.batches = batches_of(
            *(train, settings.batch_size),
            seed=settings.seed,
            own=ensemble.members if settings.batch == "own" else None,
            world=self.world,
            repetition=ensemble.plan.heads and ensemble.plan.heads.repetition,
        )
        in_order = {"seed": None, "name": "validation"}
        rows = settings.batch_size
        self.validation = None if validation is None else batches_of(validation, rows, **in_order)
        self.progress = Progress(progress, settings.epochs, len(self.batches))
        self.shared = list(ensemble.shared_parameters())
        self.individual = list(ensemble.individual_parameters())
        self.parameters = [*self.shared, *self.individual]
        parallel.broadcast_(self.world, ensemble.state_dict().values())
        self.optimizer = settings.make_optimizer(ensemble)
        self.scheduler = settings.make_scheduler(self.optimizer)
        self.plateau = isinstance(self.scheduler, ReduceLROnPlateau)
        if self.plateau and settings.schedule_by == "step":
            raise ValueError("ReduceLROnPlateau goes by a metric of epochs: schedule_by='epoch'")
        if settings.each is not None:
            rows = self.batches.count if self.batches.resumable else None
            settings.each.check(ensemble, rows, settings.optimizer)
            settings.each.attach(self.optimizer, self.individual)
        self.judged = ensemble if settings.average is None else copy.deepcopy(ensemble)
        if settings.average is not None and len(self.batches) == 0:
            raise ValueError("average: this loader does not know how many batches an epoch has")
        self.passes = Passes(ensemble, settings, self.batches)
        self.scaler = self.passes.scaler
        names = ["ensemble", "optimizer", "scheduler", "scaler"]
        names += [] if self.judged is ensemble else ["judged"]
        self.parts = {name.replace("ensemble", "model"): getattr(self, name) for name in names}
        self.epoch = self.steps = 0
        self.records: list[dict[str, Any]] = []
        self.best: dict[str, Tensor] | None = None
        self.best_value, self.best_epoch, self.more = math.nan, None, False
        self.stopped = None if settings.epochs else "epochs"
        self._unchecked: list[Tensor] = []
        self._begin_epoch()
        self._keep_good()

    def _begin_epoch(self) -> None:
        self.step, self.seconds = 0, 0.0
        self.norms: list[float] | None = None
        self.tally = Tally(self.ensemble.members, self.settings.batch, self.device)

    # Steps

    def train(
        self, folder: str | os.PathLike[str] | None, every: int | None, seconds: float | None
    ) -> History:
        """Run until the end, from the last checkpoint in the folder if there is one."""
        checkpoints, self.deadline = None, time.monotonic() + (seconds or math.inf)
        if folder is not None:
            run = self.settings.describe(self.ensemble, self.optimizer, self.batches.count)
            checkpoints = Checkpoints(folder, run)
        with checkpoints.alone() if checkpoints and self.world.rank == 0 else nullcontext():
            if checkpoints and (state := checkpoints.load_last()):
                self._load(state)
            tensors = self.ensemble.state_dict().values()
            parallel.broadcast_(self.world, tensors)  # nobody starts before all have read
            if self.stopped is None:
                self.passes.check(self.validation, first=self.steps == 0)
            with self.progress.beginning(self.steps):
                while self.stopped is None:
                    self._run_epoch(checkpoints, every if self.batches.resumable else None)
        self.optimizer.zero_grad(set_to_none=True)
        if self.best is not None or self.judged is not self.ensemble:
            self.ensemble.load_state_dict(self.best or self.judged.state_dict())
        history = history_of(self.records, self.best_epoch, self.stopped)
        self._tell("on_end", history)
        return history

    def _run_epoch(self, checkpoints: Checkpoints | None, every: int | None) -> None:
        self.ensemble.train()
        began = time.perf_counter() - self.seconds
        batches = self.batches.epoch(self.epoch, self.step * self.settings.accumulate)
        while several := list(islice(batches, self.settings.accumulate)):
            self._take_step(several)
            late = self.deadline < math.inf and self._agree(time.monotonic() > self.deadline)
            self.seconds = time.perf_counter() - began
            within = self.batches.resumable if late else every and self.steps % every == 0
            if checkpoints and within:  # to go on within this epoch
                self._save(checkpoints)
            if late:
                self.stopped = "time"
                break
        self.seconds = time.perf_counter() - began
        self._end_epoch()
        if checkpoints and (not every or self.stopped) and self.stopped != "time":
            self._save(checkpoints)

    def _agree(self, value: Any) -> float:
        """Return a number as the first process has it, so that all end at one step."""
        number = torch.tensor([float(value)], dtype=torch.float64, device=self.device)
        parallel.broadcast_(self.world, [number])
        return float(number)

    def _take_step(self, several: Sequence[Minibatch]) -> None:
        """Make one step on the mean over the rows of some batches."""
        for parameter in self.parameters:
            parameter.grad = None
        rows, totals, losses, result = sum(b.rows for b in several), [], [], ([],)
        try:
            for batch in several:
                weight = batch.rows / rows if rows else 1.0
                loss, result = self.passes.train(f"train: batch {self.step + 1}", batch, weight)
                losses.append(loss)
                totals.append(batch.total)
                if batch.rows:
                    self.tally.add(*result)
        except (RuntimeError, ValueError):  # what is not finite may be refused somewhere
            if self.steps == 0:
                self.ensemble.load_state_dict(self.good)
            self._check_losses()
            raise
        total, members = None if None in totals else sum(totals), len(result[0])
        loss = sum(losses[1:], losses[0])
        loss = parallel.average_(self.world, loss, self.parameters, rows, total)
        self.scaler.unscale_(self.optimizer)
        if self.settings.clip is not None:
            clip_gradients_(self.ensemble, self.settings.clip, gamma=self.settings.gamma)
        if self.norms is None:
            self.norms = [gradient_norm(self.shared), gradient_norm(self.individual)]
        self.scaler.step(self.optimizer)
        scale = self.scaler.get_scale()
        self.scaler.update()
        self.step += 1
        self.steps += 1
        if self.judged is not self.ensemble:
            self._average()
        self._unchecked.append(loss)
        if self.step % _CHECK_EVERY == 0:
            self._check_losses()
        if self.moments["on_step"]:
            record = {"epoch": self.epoch + 1, "step": self.steps, "loss": float(loss) / members}
            self._tell("on_step", record | self._rates())
        if self.settings.schedule_by == "step" and self.scaler.get_scale() >= scale:
            self.scheduler.step()  # unless the scaler skipped the step
        self.progress.step(loss, members)

    @torch.no_grad()
    def _average(self) -> None:
        r"""Move the mean: :math:`\bar w \leftarrow \bar w + (w - \bar w) / \min(h, 1 + s/9)`."""
        epoch = math.ceil(len(self.batches) / self.settings.accumulate)
        kept = 1 - 1 / min(max(self.settings.average * epoch, 1.0), 1 + self.steps / 9)
        both = self.judged, self.ensemble
        mean, latest = ([p.detach() for p in some.parameters()] for some in both)
        get_ema_multi_avg_fn(kept)(mean, latest, self.steps)
        for mine, buffer in zip(self.judged.buffers(), self.ensemble.buffers(), strict=True):
            mine.copy_(buffer)

    def _check_losses(self) -> None:
        """Raise :class:`Divergence` if a loss since the last time is not finite."""
        values = torch.stack(self._unchecked).tolist() if self._unchecked else []
        self._unchecked = []
        for index, value in enumerate(values):
            if not math.isfinite(value):
                raise self._divergence(f"the loss is {value}", self.step - len(values) + index + 1)

    # Epochs

    def _end_epoch(self) -> None:
        """Write the epoch's record, validate, change the rates, decide whether to go on."""
        self._check_losses()
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
        if self.plateau:
            self.scheduler.step(record["loss"] if math.isnan(metric) else metric)
        elif self.settings.schedule_by == "epoch":
            self.scheduler.step()
        self._keep_good()
        sign = -1 if self.more else 1
        if not math.isnan(metric) and not sign * metric >= sign * self.best_value:  # NaN: the first
            self.best_value, self.best_epoch = metric, self.epoch
            self.best = _copy(self.judged) if self.settings.keep == "best" else None
        patience = self.settings.patience or math.inf
        if not math.isnan(metric) and self.epoch - (self.best_epoch or 0) >= patience:
            self.stopped = self.stopped or "patience"
        if self.epoch == self.settings.epochs and self.stopped != "time":
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
    def _validate(self, record: dict[str, Any], validation: AnyBatches) -> None:
        """Add the validation columns, and the metric."""
        metric: Any = self.settings.metric
        tally, kept = Tally(self.ensemble.members, device=self.device), []
        seed = randomness.combine(self.settings.seed, self.epoch, 1)
        with evaluating(self.judged), randomness.seeded(seed):
            for result in self.passes.evaluate("validation", validation, self.judged):
                tally.add(*result)
                if callable(metric):
                    kept.append(result)
        record.update(tally.summary("validation_"))
        if metric is None:
            metric = "loss" if math.isnan(record[_METRICS["accuracy"]]) else "accuracy"
        if callable(metric):
            _, outputs, targets, _ = zip(*kept, strict=True)
            outputs = gather(outputs, lambda parts: torch.cat(parts, 1))
            value: Any = metric(outputs, gather(targets, torch.cat))
        else:
            value = record[_METRICS[metric]]
        record["metric"], self.more = self._agree(value), self.settings.more_is_better(metric)

    def _rates(self) -> dict[str, float]:
        found = {id(p): float(g["lr"]) for g in self.optimizer.param_groups for p in g["params"]}
        firsts = (next(iter(parameters), None) for parameters in (self.shared, self.individual))
        shared, individual = (found.get(id(first), math.nan) for first in firsts)
        return {"lr": shared, "modulation_lr": individual}

    # State

    def _keep_good(self) -> None:
        self.good = _copy(self.ensemble)

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

    def _save(self, checkpoints: Checkpoints) -> None:
        self._check_losses()
        self.tally.flush()
        sums = {name: value.clone() for name, value in self.tally.sums.items()}
        parallel.sum_(self.world, sums.values())
        if self.world.rank > 0 or not all_finite(self.parameters):
            return
        criterion = self.passes.criterion
        state = {
            **{name: part.state_dict() for name, part in self.parts.items()},
            **{name: getattr(self, name) for name in _POSITION},
            "good": None if self.step == 0 else self.good,
            "random": randomness.get_states(),
            "generators": [g.get_state() for g in self.batches.generators],
            "tally": sums,
            "callbacks": [callback.state_dict() for callback in self.stateful],
            "criterion": next((k for k, v in _DEFAULTS.items() if v is criterion), None),
        }
        checkpoints.save(self.steps, state)

    def _load(self, state: dict[str, Any]) -> None:
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # before the scheduler's
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        for name in _POSITION:
            setattr(self, name, state[name])
        self._keep_good()
        self.good = state["good"] or self.good
        randomness.set_states(state["random"])
        for generator, value in zip(self.batches.generators, state["generators"], strict=True):
            generator.set_state(value)
        for callback, value in zip(self.stateful, state["callbacks"], strict=False):
            callback.load_state_dict(value)
        if self.world.rank == 0:
            for name, value in state["tally"].items():
                self.tally.sums[name].copy_(value)
        self.passes.criterion = _DEFAULTS.get(state["criterion"], self.passes.criterion)


def _copy(ensemble: EmbeddedEnsemble) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in ensemble.state_dict().items()}


def gradient_norm(parameters: Iterable[Tensor]) -> float:
    """Return the norm of all gradients together; NaN if there are none."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients)) if gradients else math.nan


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all numbers are finite."""
    return all(bool(t.isfinite().all()) for t in tensors)
