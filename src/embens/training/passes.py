"""What a run computes of a batch: outputs, losses and gradients, and whether its data will do.

Data are looked at once: tensors before the first step, those of a loader as they come. Numbers that
are not finite are refused where the loss is not finite either.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from embens.checks import Gamma, check_number, find_gaps, gradient_factor
from embens.ensemble import EmbeddedEnsemble
from embens.ensemble.export import evaluating
from embens.ensemble.run import gather
from embens.objective import (
    BatchKind,
    check_labels,
    default_criterion,
    ignored_label,
    logits_of,
    member_losses,
)
from embens.training import parallel, randomness
from embens.training.batches import AnyBatches, Loaded, Minibatch, Shuffled, map_tensors
from embens.training.each import EachMember

Result = tuple[Tensor, Any, Any, int]
"""What a batch gave: the losses of members, their outputs, the target and how many rows."""


class Passes:
    """Passes of an ensemble through batches; a criterion of None is chosen on the first one."""

    def __init__(self, ensemble: EmbeddedEnsemble, settings: Any, batches: AnyBatches):
        self.ensemble, self.settings, self.batches = ensemble, settings, batches
        self.device = next(ensemble.parameters()).device
        self.criterion = settings.criterion
        half = settings.autocast == torch.float16  # else the scaler does nothing
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=half)
        self.forward: Callable = ensemble
        if settings.compile:
            # A graph for each shape: which one runs must not depend on those that ran before.
            self.forward = torch.compile(lambda *a, **k: ensemble(*a, **k), dynamic=False)
        if settings.each is not None and settings.each.dropout is not None:
            self.forward = settings.each.dropping(ensemble)
        self._labels: list[tuple[str, Any]] = []

    def train(self, name: str, batch: Minibatch, weight: float) -> tuple[Tensor, Result]:
        """Add a batch's gradients, times a weight; return its objective and what it gave."""
        gaps = "" if self.batches.tensors else self._look(name, batch.inputs, batch.target)
        inputs, target = self._move((batch.inputs, batch.target))
        with _explaining(f"{name} has {batch.rows} rows"):
            losses, outputs = self._backward(inputs, target, weight, batch.numbers)
        loss = losses.sum()
        if self.ensemble.plan.has_prior:
            kl = self.ensemble.kl() / self._rows()
            self._scaled(kl, weight).backward()
            loss = loss + kl.detach()
        _refuse(name, gaps, loss)
        return loss if weight == 1 else weight * loss, (losses, outputs, target, batch.rows)

    def evaluate(
        self, name: str, batches: AnyBatches, ensemble: EmbeddedEnsemble, kind: BatchKind = "same"
    ) -> Iterator:
        """Yield what every batch gives, in the mode of an ensemble that is like the one here."""
        for number, batch in enumerate(batches.epoch(0), 1):
            where = f"{name}: batch {number}"
            gaps = "" if batches.tensors else self._look(where, batch.inputs, batch.target)
            inputs, target = self._move((batch.inputs, batch.target))
            args, kwargs = ensemble.bind(inputs)
            with self._autocast(enabled=ensemble is self.ensemble):
                outputs = self._take(ensemble(*args, batch=kind, **kwargs))
            losses = self._losses(outputs, target, kind)
            _refuse(where, gaps, losses.sum())
            yield losses, outputs, target, batch.rows

    def _backward(
        self, inputs: Any, target: Any, weight: float, rows: Tensor | None
    ) -> tuple[Tensor, Any]:
        """Add gradients, of some members after others; return members' losses and outputs."""
        settings, seen = self.settings, []

        def loss_of(outputs: Any) -> Tensor:
            outputs = self._take(outputs)
            with self._autocast(enabled=False):
                losses = self._losses(outputs, target, settings.batch, settings.each, rows)
            seen.append((losses.detach(), map_tensors(Tensor.detach, outputs)))
            return self._scaled(losses.sum(), weight)

        args, kwargs = self.ensemble.bind(inputs)
        if settings.chunk is None:
            with self._autocast():
                outputs = self.forward(*args, batch=settings.batch, **kwargs)
            loss_of(outputs).backward()
            return seen[0]
        run = self.ensemble.run(args, kwargs, chunk=settings.chunk, cut=True)
        with run, self._autocast():
            run.backward(loss_of)
        losses, outputs = (gather(parts, torch.cat) for parts in zip(*seen, strict=True))
        return losses, outputs

    def _rows(self) -> int:
        batches = self.batches
        try:
            return batches.count if isinstance(batches, Shuffled) else len(batches.data.dataset)
        except (AttributeError, TypeError):
            raise TypeError(
                "train: the divergence from the prior is divided by the number of rows, which this "
                "loader does not know; pass tensors, or a DataLoader of a data set with a length"
            ) from None

    def _scaled(self, loss: Tensor, weight: float) -> Tensor:
        return self.scaler.scale(loss if weight == 1 else weight * loss)

    def _autocast(self, enabled: bool = True) -> AbstractContextManager:
        kind = self.settings.autocast
        return nullcontext() if kind is None else torch.autocast(self.device.type, kind, enabled)

    def _take(self, outputs: Any) -> Any:
        """Return outputs in full precision; the logits of several, if no criterion takes them."""
        outputs = logits_of(outputs) if self.settings.criterion is None else outputs
        if self.settings.autocast is None:
            return outputs
        half = (torch.bfloat16, torch.float16)
        return map_tensors(lambda v: v.float() if v.dtype in half else v, outputs)

    def _losses(
        self,
        outputs: Any,
        target: Any,
        batch: BatchKind,
        each: EachMember | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        if self.criterion is None:
            self.criterion = default_criterion(outputs, target, batch, self.settings.of)
        if self._labels and (ignored := ignored_label(self.criterion)) is not None:
            classes = outputs.shape[1 if batch == "split" else 2]
            for name, values in self._labels:
                check_labels(name, values, classes, ignored)
        self._labels = []
        if each is not None:
            return each.losses(outputs, target, self.criterion, batch, rows)
        members, of = self.ensemble.members if batch == "split" else None, self.settings.of
        return member_losses(outputs, target, self.criterion, batch=batch, of=of, members=members)

    def _move(self, values: Any) -> Any:
        return map_tensors(lambda v: v.to(self.device, non_blocking=True), values)

    # Data

    def _look(self, name: str, inputs: Any, target: Any) -> str:
        """Return where data that were not looked at before are not finite; note their labels."""
        self._labels.append((name, target))
        return find_gaps("inputs", inputs) or find_gaps("targets", target)

    @torch.no_grad()
    def check(self, validation: AnyBatches | None, first: bool) -> None:
        """Refuse, before anything is spent, tensors that would not do.

        Where they are not finite the first epoch is rehearsed: their losses may be. Before the
        first step, so is a last batch with few rows, which BatchNorm may refuse.
        """
        settings, criterion, train = self.settings, self.criterion, self.batches
        for name, batches in (("train", train), ("validation", validation)):
            if batches is None or batches.tensors is None:
                continue
            if not (gaps := self._look(name, *batches.tensors)):
                continue
            kind = settings.batch if name == "train" else "same"
            with evaluating(self.ensemble), randomness.seeded(settings.seed):
                for losses, *_ in self.evaluate(name, batches, self.ensemble, kind):
                    parallel.sum_(train.world, [loss := losses.sum()])
                    _refuse(name, gaps, loss)
            self.criterion = criterion
        rows = (train.count - 1) % settings.batch_size + 1
        split = self.ensemble.members if settings.batch == "split" else 1
        if not first or isinstance(train, Loaded) or rows >= 2 * train.world.size * split:
            return
        (last,) = train.epoch(0, len(train) - 1)
        what = f"train: the last of {train.count} rows in batches of {settings.batch_size}"
        before = {k: v.clone() for k, v in self.ensemble.state_dict().items()}
        try:
            self.ensemble.train()
            args, kwargs = self.ensemble.bind(self._move(last.inputs))
            explained = _explaining(f"{what} are {rows}")
            with explained, randomness.seeded(settings.seed), self._autocast():
                self.ensemble(*args, batch=settings.batch, **kwargs)
        finally:
            self.ensemble.load_state_dict(before)


def _refuse(name: str, gaps: str, loss: Tensor) -> None:
    """Raise if a loss is not finite because data are not."""
    if gaps and not loss.isfinite():
        raise ValueError(
            f"{name}: {gaps}, and the loss is {float(loss)} there. Leave these rows out, or fill "
            "them in (torch.nan_to_num)."
        )


@contextmanager
def _explaining(what: str) -> Iterator[None]:
    """Say what to do where torch has one row for BatchNorm."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise ValueError(
            f"{what}, and BatchNorm needs at least two rows of each member in training. Choose "
            "another batch_size, or pass a DataLoader with drop_last=True."
        ) from error


@torch.no_grad()
def clip_gradients_(ensemble: EmbeddedEnsemble, bound: float, *, gamma: Gamma = None) -> Tensor:
    r"""Clip the gradients of an ensemble in place; return the members' norms before, ``(member,)``.

    To a member :math:`a` a step is one of its own network. Its gradient's norm :math:`n_a` and the
    factor :math:`c_a` that clips it to :math:`C` are

    .. math::
        n_a^2 = \Big\| \frac{\gamma}{M} \sum_b \frac{\partial L_b}{\partial w} \Big\|^2
              + \Big\| \frac{\partial L_a}{\partial u_a} \Big\|^2, \qquad
        c_a = \min\Big(1, \frac{C}{n_a}\Big).

    Individual gradients are multiplied by their member's :math:`c_a`, shared ones by the smallest,
    so no member's norm exceeds :math:`C`, which means the same for any number of members.

    Args:
        ensemble: with the plain gradients of the objective, before the optimizer's step.
        bound: the largest norm, :math:`C`.
        gamma: as for :meth:`~embens.EmbeddedEnsemble.parameter_groups`.
    """
    check_number("clip", bound, "a number above 0", lambda value: value > 0)
    factor = gradient_factor(gamma, ensemble.members, ensemble.natural_gamma)
    shared = [p.grad for p in ensemble.shared_parameters() if p.grad is not None]
    own = [p.grad for p in ensemble.individual_parameters() if p.grad is not None]
    squares = [g.reshape(ensemble.members, -1).square().sum(1) for g in own]
    if shared:
        square = (factor * torch.nn.utils.get_total_norm(shared)).square()
        squares.append(square.expand(ensemble.members))
    norms = torch.stack(squares).sum(0).sqrt()
    scales = (bound / norms).clamp(max=1.0)
    for gradient in shared:
        gradient.mul_(scales.min())
    for gradient in own:
        gradient.mul_(scales.view(-1, *(1,) * (gradient.dim() - 1)))
    return norms
