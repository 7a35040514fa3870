"""Settings of each member's own in ``embens.fit`` (hyper-deep ensembles, Wenzel et al. 2020)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from embens.ensemble import EmbeddedEnsemble
from embens.ensemble.rates import MakeOptimizer, is_linear_in_rate
from embens.objective import BatchKind, Criterion, member_losses, squared_error


@dataclass(frozen=True, eq=False)
class EachMember:
    """What members train with that is not the same for all; None: the same.

    Attributes:
        rates: factors of the rate of a member's own parameters (modulations, own layers, separate
            networks), of their decay too. What members share has one rate.
        dropout: the rate of a member in the reference's ``nn.Dropout`` layers, and their kin, whose
            rate is above 0. Members then run one after another.
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
    dropout: Sequence[float] | None = None

    def check(
        self, ensemble: EmbeddedEnsemble, rows: int | None, optimizer: MakeOptimizer | None
    ) -> None:
        """Refuse what does not fit the members, or the rows (None: they have no numbers)."""
        members, plan = ensemble.members, ensemble.plan
        for name, values in vars(self).items():
            if values is None:
                continue
            values, of_rows = torch.as_tensor(values), name in ("weights", "targets")
            if of_rows and rows is None:
                raise ValueError(f"each: {name} need rows with numbers: tensors or a data set")
            expected = (members, rows) if of_rows else (members,)
            most = 1.0 if name in ("dropout", "label_smoothing") else math.inf
            least = -math.inf if name == "targets" else 0.0
            if values.shape[: 2 if name == "targets" else None] != expected:
                got = tuple(values.shape)
                raise ValueError(f"each: expected {name} of shape {expected}; got {got}")
            if not values.isfinite().all() or values.min() < least or values.max() > most:
                raise ValueError(f"each: {name} must be finite, and from {least:g} to {most:g}")
        if self.rates is not None and optimizer and not is_linear_in_rate(optimizer):
            raise ValueError("each: steps are not proportional to rates; use SGD, Adam or AdamW")
        if self.dropout is not None and (plan.heads is not None or plan.recompute):
            why = "recomputes activations" if plan.recompute else "runs once for all members (mimo)"
            raise ValueError(f"each: this network {why}, so members can't have their own dropout")
        if self.dropout is not None:
            layers = [*ensemble.modules()]
            if any(isinstance(rate := getattr(m, "dropout", 0), float) and rate for m in layers):
                raise ValueError("each: dropout inside attention or recurrent layers is for all")
            if not any(isinstance(m, _DropoutNd) and m.p > 0 for m in layers):
                raise ValueError("each: the reference has no nn.Dropout at a rate above 0")

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

    def attach(self, optimizer: Optimizer, own: Sequence[Tensor]) -> None:
        """Let an optimizer step with the members' rates, of their own parameters."""
        before: dict[Tensor, Tensor] = {}

        def begin(*_: Any) -> None:
            before.update((p, p.detach().clone()) for p in own if p.grad is not None)

        @torch.no_grad()
        def end(*_: Any) -> None:
            for p, old in before.items():
                rates = torch.as_tensor(self.rates).to(p).view(-1, *(1,) * (p.dim() - 1))
                p.copy_(old.lerp(p, rates.expand_as(p)))
            before.clear()

        if self.rates is not None:
            optimizer.register_step_pre_hook(begin)
            optimizer.register_step_post_hook(end)

    def dropping(self, ensemble: EmbeddedEnsemble) -> Callable[..., Any]:
        """Return a call of an ensemble in which every member has its own rate of dropout."""
        layers = [m for m in ensemble.modules() if isinstance(m, _DropoutNd) and m.p > 0]
        usual = [layer.p for layer in layers]

        def choose(layer: Any, _: Any) -> None:
            layer.p = float(self.dropout[ensemble.current.run.start])  # type: ignore[index]

        def forward(*args: Any, **kwargs: Any) -> Any:
            hooks = [layer.register_forward_pre_hook(choose) for layer in layers]
            try:
                return ensemble(*args, chunk=1, **kwargs)
            finally:
                for layer, hook, rate in zip(layers, hooks, usual, strict=True):
                    hook.remove()
                    layer.p = rate

        return forward
