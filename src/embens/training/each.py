"""Settings of each member's own in ``embens.fit`` (hyper-deep ensembles, Wenzel et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from embens.ensemble.rates import MakeOptimizer, is_linear_in_rate
from embens.objective import BatchKind, Criterion, member_losses, squared_error

if TYPE_CHECKING:
    from embens.ensemble import EmbeddedEnsemble


@dataclass(frozen=True, eq=False)
class EachMember:
    """What members train with that is not the same for all; None: the same.

    Attributes:
        rates: factors of the rate of a member's own parameters (modulations, own layers, separate
            networks), of their decay too. What members share has one rate.
        weight_decay: of a member's own parameters, in the place of ``fit``'s; of what members share
            there is one.
        dropout: the rate of a member, wherever the reference has dropout at a rate above 0
            (``nn.Dropout`` and its kin, ``F.dropout``, in attention and between recurrent layers).
            Members then run one after another.
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
    weight_decay: Sequence[float] | None = None

    def check(
        self, ensemble: EmbeddedEnsemble, rows: int | None, optimizer: MakeOptimizer | None
    ) -> None:
        """Refuse what does not fit the members, or the rows (None: they have no numbers)."""
        members, plan = ensemble.members, ensemble.plan
        for name, values in vars(self).items():
            if values is None:
                continue
            if len(values) != members:
                got = f"got those of {len(values)}"
                raise ValueError(f"each: expected {name} of {members} members; {got}")
            if name not in ("weights", "targets"):
                most = math.inf if name in ("rates", "weight_decay") else 1.0
                for value in values:
                    if not 0 <= value <= most:
                        raise ValueError(f"each: {name} must be from 0 to {most:g}; got {value}")
                continue
            weights = name == "weights"
            if rows is None:
                raise ValueError(f"each: {name} need rows with numbers: tensors or a data set")
            if values.shape[1:2] != (rows,) or (weights and values.dim() != 2):
                shape = f"({members}, {rows}{'' if weights else ', …'})"
                raise ValueError(f"each: expected {name} {shape}; got {tuple(values.shape)}")
            if not values.isfinite().all() or (weights and (values < 0).any()):
                raise ValueError(f"each: expected finite {name}, and no weight below 0")
        if self.rates is not None and optimizer and not is_linear_in_rate(optimizer):
            raise ValueError(
                "each: the steps of this optimizer are not proportional to its rate, so members "
                "can't have rates of their own. Use SGD, Adam or AdamW."
            )
        if self.weight_decay is not None and not list(ensemble.individual_parameters()):
            raise ValueError("each: members have no trainable parameters of their own to decay")
        if self.dropout is not None and (plan.heads is not None or plan.recompute):
            why = "recomputes activations" if plan.recompute else "runs once for all members (mimo)"
            raise ValueError(
                f"each: this network {why}, so members can't have dropout of their own. Set the "
                "rates of its dropout layers instead, for all members alike."
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

    def attach(
        self, optimizer: Optimizer, make: MakeOptimizer | None, own: Sequence[Tensor]
    ) -> None:
        """Let an optimizer step with the members' rates and decay, of their own parameters."""
        decay = None
        if self.weight_decay is not None:
            decay = _add_ if make is None else _decay_rule(make)  # None: SGD
        mine, before = {id(p) for p in own}, {}
        for group in optimizer.param_groups:  # all of it is members' own, or nothing
            if decay is not None and id(group["params"][0]) in mine:
                group["weight_decay"] = 0.0

        @torch.no_grad()
        def begin(*_: Any) -> None:
            moved = ((p, g["lr"]) for g in optimizer.param_groups for p in g["params"])
            for p, lr in ((p, lr) for p, lr in moved if id(p) in mine and p.grad is not None):
                if self.rates is not None:
                    before[p] = p.detach().clone()
                if decay is not None:
                    decay(p, _by_member(self.weight_decay, p), lr)

        @torch.no_grad()
        def end(*_: Any) -> None:
            for p, old in before.items():
                p.copy_(old.lerp(p, _by_member(self.rates, p).expand_as(p)))
            before.clear()

        optimizer.register_step_pre_hook(begin)
        optimizer.register_step_post_hook(end)

    def dropping(self, ensemble: EmbeddedEnsemble) -> Callable[..., Any]:
        """Return a call of an ensemble in which every member has its own rate of dropout."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            with _Dropout(ensemble, [float(rate) for rate in self.dropout or ()]) as mode:
                outputs = ensemble(*args, chunk=1, **kwargs)
            if not mode.found:
                raise ValueError(
                    "each: dropout is given, but the reference has none at a rate above 0 in "
                    "training. Put nn.Dropout layers into it; their rates don't matter then."
                )
            return outputs

        return forward


def _by_member(values: Any, like: Tensor) -> Tensor:
    return torch.as_tensor(values).to(like).view(-1, *(1,) * (like.dim() - 1))


Decay = Callable[[Tensor, Any, float], None]


def _add_(parameter: Tensor, decay: Any, lr: float) -> None:
    """Add decay to the gradient, as SGD and Adam do."""
    parameter.grad = parameter.grad + decay * parameter


def _shrink_(parameter: Tensor, decay: Any, lr: float) -> None:
    """Take decay off a parameter, as AdamW does."""
    parameter.mul_(1 - lr * decay)


@torch.no_grad()
def _decay_rule(make: MakeOptimizer) -> Decay:
    """Return what an optimizer does with decay, by trial on a small parameter."""
    start = torch.linspace(1.0, 2.0, 4)

    def tried(decay: float, rule: Decay | None = None) -> Tensor:
        parameter = nn.Parameter(start.clone())
        optimizer = make([{"params": [parameter], "lr": 0.01, "weight_decay": decay}])
        for turn in range(4):
            parameter.grad = torch.cos(start * (3.0 + turn))
            if rule is not None:
                rule(parameter, 0.5, 0.01)
            optimizer.step()
        return parameter.detach()

    expected = tried(0.5)
    for rule in (_add_, _shrink_):
        if torch.allclose(tried(0.0, rule), expected, rtol=1e-5, atol=1e-6):
            return rule
    raise ValueError(
        "each: what this optimizer does with weight decay is not known, so members can't have "
        "decays of their own. Use SGD, Adam or AdamW."
    )


class _Dropout(TorchFunctionMode):
    """While it is open, dropout is at the rate of the one member that runs.

    ``found`` says whether there was any.
    """

    def __init__(self, ensemble: EmbeddedEnsemble, rates: Sequence[float]):
        super().__init__()
        self.current, self.rates, self.found = ensemble.current, rates, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs, run = list(args), dict(kwargs or {}), self.current.run
        given, place = _find_rate(getattr(func, "__name__", ""), args, kwargs)
        if place is not None and given[place] > 0 and run is not None:
            given[place], self.found = self.rates[run.start], True
        return func(*args, **kwargs)


PLACES = {"multi_head_attention_forward": 10, "scaled_dot_product_attention": 4}
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""Functions of torch with dropout inside, and where the first ones have its rate."""


def _find_rate(name: str, args: list, kwargs: dict) -> tuple[Any, Any]:
    """Return the arguments in which a function has a rate of dropout for training, and where."""
    dropout = "dropout" in name or name in PLACES or name in RECURRENT
    if not dropout or not kwargs.get("training", kwargs.get("train", True)):
        return args, None
    for key in ("p", "dropout_p"):
        if key in kwargs:
            return kwargs, key
    place = PLACES.get(name, 1)
    if name in RECURRENT:  # behind the flag for biases and the number of layers
        place = next(i for i, value in enumerate(args) if isinstance(value, bool)) + 2
    evaluates = name not in PLACES and args[place + 1 : place + 2] == [False]
    return args, None if evaluates or len(args) <= place else place
