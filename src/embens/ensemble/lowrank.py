r"""Layers whose weights differ between members by a matrix of low rank.

.. math:: W_a = W \circ (1 + B_a A_a) \qquad\text{or}\qquad W_a = W + B_a A_a

with ``left`` :math:`B_a`, ``(member, row, rank)``, and ``right`` :math:`A_a`, ``(member, rank,
column)``. The matrix of a weight is its first axis against all others, as in LoRA; every projection
of an attention has its own. Biases are shared.

Either the members' weights are built, or a Linear layer runs on activations:
:math:`W x + B (A x)`, or :math:`W x + \sum_k B_k \circ W (A_k \circ x)`, at the cost of rank + 1
products. The first is faster where a member has many rows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embens.ensemble.attention import attend, join_projections, projection_parameters
from embens.ensemble.own import MemberLayer
from embens.ensemble.plan import LowRankSite
from embens.ensemble.run import Run, together
from embens.laws import Normal
from embens.reading.layers import PROJECTIONS


class LowRank(MemberLayer):
    """A shared layer with a matrix of low rank for each member.

    Args:
        module: the layer, or an attention.
        sites: what is put in, by projection; by "" for a layer.
        members: how many.
        border: whether its input is still the same for all members.
        generator: draws the factors.
    """

    def __init__(
        self,
        module: nn.Module,
        sites: Mapping[str, LowRankSite],
        members: int,
        *,
        border: bool = False,
        generator: torch.Generator | None = None,
    ):
        super().__init__(module, ("weight",) if "" in sites else (), border=border)
        self.sites = dict(sites)
        for key, site in self.sites.items():
            weight = layer_weight(module, key).detach()
            rows, columns = weight.flatten(1).shape
            multiplies = site.kind == "multiplicative"
            right = 1.0 if multiplies else columns**-0.5
            size = 1.0 if multiplies else weight.square().mean().sqrt()
            left = site.scale * size / (right * math.sqrt(site.rank))
            shapes = {"left": (left, rows, site.rank), "right": (right, site.rank, columns)}
            for name, (std, *shape) in shapes.items():
                drawn = Normal().sample((members, *shape), generator, weight.dtype, weight.device)
                self.register_parameter(f"{key}_{name}".strip("_"), nn.Parameter(drawn * std))
        if "" not in self.sites:
            self.names = tuple(self._weights([t.detach()[:1] for t in self.parameters(False)]))

    def tensors(self) -> dict[str, Tensor]:
        return dict(self._parameters)  # type: ignore[arg-type]

    def now(self, run: Run) -> dict[str, Tensor]:
        return self._weights(list(run.of(self).values()))

    def _weights(self, factors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the weights of some members by name, members first."""
        built = {}
        for i, (key, site) in enumerate(self.sites.items()):
            weight = layer_weight(self.module, key)
            delta = (factors[2 * i] @ factors[2 * i + 1]).view(-1, *weight.shape)
            built[key] = weight * (1 + delta) if site.kind == "multiplicative" else weight + delta
        if "" in built:
            return {"weight": built[""]}
        members = (len(factors[0]), -1, -1)
        every = {p: (layer_weight(self.module, p).expand(members), None) for p in PROJECTIONS}
        return join_projections(self.module, every | {p: (w, None) for p, w in built.items()})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer; the projections of an attention for all running members at once."""
        run = self.current.get()
        several = run.count > 1 and run.index is None and not (self.border and run.common)
        added = all(site.kind == "additive" for site in self.sites.values())
        if not several or not added or "" in self.sites or len(args) < 3:
            return super().forward(*args, **kwargs)
        attention: Any = self.module

        def project(x: Tensor, projection: str) -> Tensor:
            shared = F.linear(x, *projection_parameters(attention, projection))
            if projection not in self.sites:
                return shared
            left, right = (factors[f"{projection}_{side}"] for side in ("left", "right"))
            mine, rows = (run.apart(t).flatten(1, -2) for t in (x, shared))
            return together(torch.baddbmm(rows, mine @ right.mT, left.mT)).view(shared.shape)

        factors = run.of(self)
        return attend(attention, project, args[:3], *args[3:], **kwargs)

    def _alone(self, run: Run, args: tuple, kwargs: dict, method: str = "__call__") -> Any:
        called = method == "__call__" and len(args) == 1 and not kwargs
        if called and args[0].dim() > 1 and self._is_thin(args[0]):
            return self._on_activations(run, args[0])
        return super()._alone(run, args, kwargs, method)

    def _together(self, run: Run, x: Tensor) -> Tensor:
        rows = x if self.border and run.common else x[: max(1, len(x) // run.count)]
        return self._on_activations(run, x) if self._is_thin(rows) else super()._together(run, x)

    def _is_thin(self, x: Tensor) -> bool:
        """Return whether a member's rows are so few that activations are the cheaper place."""
        if not (self._batched and isinstance(self.module, nn.Linear)):
            return False
        site = self.sites[""]
        if torch.compiler.is_compiling():  # a graph should be right for any number of rows
            return site.kind == "additive"
        rows = x.numel() // x.shape[-1]  # of both kinds as it was measured
        if site.kind == "additive":
            return rows <= 2 * self.module.out_features
        return 4 * site.rank * rows <= self.module.out_features

    def _on_activations(self, run: Run, x: Tensor) -> Tensor:
        module: Any = self.module
        left, right = run.of(self).values()
        weight, bias = module.weight, module.bias
        effective = getattr(module, "effective_parameters", None)
        additive, axes = self.sites[""].kind == "additive", x.shape[:-1]
        if effective is not None:
            weight, bias = effective()
            left = effective(left)[0] if additive else left
        shared = F.linear(x, weight, bias)
        if run.count == 1 or (self.border and run.common):
            x, shared = (t.flatten(0, -2).expand(run.count, -1, -1) for t in (x, shared))
            axes = (run.count * axes[0], *axes[1:])
        else:
            x, shared = (run.apart(t).flatten(1, -2) for t in (x, shared))
        if additive:
            products = torch.baddbmm(shared, x @ right.mT, left.mT)
        else:
            terms = F.linear(
                x.unsqueeze(1) * right.unsqueeze(2), weight
            )  # (member, rank, row, out)
            products = shared + (terms * left.mT.unsqueeze(2)).sum(1)
        products = together(products)
        return products.unflatten(0, (-1, *axes[1:])) if len(axes) > 1 else products

    def plain(self, member: int | None, memo: dict[int, Any]) -> nn.Module:
        """Return a plain layer with one member's weights; None: the mean of all members'."""
        layer = copy.deepcopy(self.module)
        some = slice(None) if member is None else slice(member, member + 1)
        with torch.no_grad():
            for name, stack in self._weights([t[some] for t in self.parameters(False)]).items():
                layer.get_parameter(name).copy_(stack.mean(0))
        return layer

    def extra_repr(self) -> str:
        site = next(iter(self.sites.values()))
        return f"{site.kind}, rank={site.rank}, members={len(next(self.parameters()))}"


def layer_weight(module: nn.Module, projection: str = "") -> Tensor:
    """Return the weight of a layer, or of a projection of an attention."""
    if isinstance(module, nn.MultiheadAttention):
        return projection_parameters(module, projection)[0]
    return module.weight  # type: ignore[return-value]
