"""Settings of each member's own in ``embens.fit`` (hyper-deep ensembles, Wenzel et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embens.ensemble.rates import MakeOptimizer, is_linear_in_rate
from embens.objective import BatchKind, Criterion, member_losses, squared_error


@dataclass(frozen=True, eq=False)
class EachMember:
    """What members train with that is not the same for all; None: the same.

    Attributes:
        rates: factors of the rate of a member's own parameters (modulations, own layers, separate
            networks), of their decay too. What members share has one rate.
        label_smoothing: of cross-entropy.
        weights: of the training data's rows, ``(member, row)``: a member's loss is the mean over
            rows of weight times loss. Weights of mean 1 keep its size.
        targets: of the training data's rows, ``(member, row, …)``, in the place of theirs.

    Example:
        >>> each = EachMember(rates=[1.0, 0.3, 0.1], label_smoothing=[0.0, 0.0, 0.1])
    """

    rates: Sequence[float] | None = None
    label_smoothing: Sequence[float] | None = None
    weights: Tensor | None = None
    targets: Tensor | None = None

    def check(self, members: int, rows: int | None, optimizer: MakeOptimizer | None) -> None:
        """Refuse what does not fit the members, or the rows (None: they have no numbers)."""
        for name, values in vars(self).items():
            if values is not None and len(values) != members:
                raise ValueError(
                    f"each: expected {name} of {members} members; got those of {len(values)}"
                )
        for name, most in (("rates", math.inf), ("label_smoothing", 1.0)):
            for value in () if (values := getattr(self, name)) is None else values:
                if not 0 <= value <= most:
                    raise ValueError(f"each: {name} must be from 0 to {most:g}; got {value}")
        for name in ("weights", "targets"):
            if (values := getattr(self, name)) is None:
                continue
            if rows is None:
                raise ValueError(f"each: {name} need rows with numbers: tensors or a data set")
            if values.shape[1:2] != (rows,) or (name == "weights" and values.dim() != 2):
                shape = f"({members}, {rows}{', …' * (name == 'targets')})"
                raise ValueError(f"each: expected {name} {shape}; got {tuple(values.shape)}")
            if not values.isfinite().all() or (name == "weights" and (values < 0).any()):
                raise ValueError(f"each: expected finite {name}, and no weight below 0")
        if self.rates is not None and optimizer and not is_linear_in_rate(optimizer):
            raise ValueError(
                "each: the steps of this optimizer are not proportional to its rate, so members "
                "can't have rates of their own. Use SGD, Adam or AdamW."
            )

    def losses(
        self, outputs: Any, target: Any, criterion: Criterion, batch: BatchKind, rows: Tensor | None
    ) -> Tensor:
        """Return the losses of the members on some rows of the training data."""
        found = []
        for a, output in enumerate(outputs):
            mine = rows if rows is None or rows.dim() == 1 else rows[a]
            own = target if batch == "same" else target[a]
            if self.targets is not None:
                own = self.targets[a][mine].to(output.device)
            rule = self._criterion(criterion, a)
            if self.weights is None:
                found.append(member_losses(output[None], own, rule)[0])
                continue
            losses = rule(output, own)
            if losses.shape[:1] != output.shape[:1]:
                raise ValueError("each: weights need a criterion that returns a loss for each row")
            losses = losses.reshape(len(losses), -1).mean(1)
            found.append((self.weights[a][mine].to(losses) * losses).mean())
        return torch.stack(found)

    def _criterion(self, criterion: Criterion, a: int) -> Criterion:
        if criterion is squared_error and self.weights is not None:
            return lambda outputs, target: (outputs - target.reshape(outputs.shape)).square()
        options: dict[str, Any] = {} if self.weights is None else {"reduction": "none"}
        if self.label_smoothing is not None:
            if criterion is not F.cross_entropy:
                raise ValueError("each: label_smoothing is for the default criterion of classes")
            options["label_smoothing"] = float(self.label_smoothing[a])
        return partial(criterion, **options) if criterion is F.cross_entropy else criterion

    @contextmanager
    def scaling(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Multiply what happens to the members' own parameters by their factors."""
        before = [p.detach().clone() for p in parameters] if self.rates is not None else ()
        yield
        for parameter, old in zip(parameters, before, strict=False):
            factors = torch.as_tensor(self.rates).to(old).view(-1, *(1,) * (old.dim() - 1))
            with torch.no_grad():
                parameter.copy_(old.lerp(parameter, factors.expand_as(old)))
