r"""Layers whose weights differ between members by a matrix of low rank.

.. math:: W_a = W \circ (1 + B_a A_a) \qquad\text{or}\qquad W_a = W + B_a A_a

with ``left`` :math:`B_a`, ``(member, row, rank)``, and ``right`` :math:`A_a`, ``(member, rank,
column)``. The matrix of a weight is its first axis against all others, as in LoRA. Biases are
shared.

The members' weights are built, unless a matrix is added to a Linear layer, and a member has few
rows: then it runs on activations, :math:`W x + B (A x)`.
"""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embens.ensemble.own import MemberLayer
from embens.ensemble.plan import LowRankSite
from embens.ensemble.run import Run, together
from embens.laws import Normal


class LowRank(MemberLayer):
    """A shared layer with a matrix of low rank for each member.

    At the ``border`` its input is still the same for all members; the generator draws the factors.
    """

    def __init__(
        self,
        module: nn.Module,
        site: LowRankSite,
        members: int,
        *,
        border: bool = False,
        generator: torch.Generator | None = None,
    ):
        super().__init__(module, ("weight",), border=border)
        self.site = site
        weight: Any = module.weight
        rows, columns = weight.flatten(1).shape
        self.multiplies = site.kind == "multiplicative"
        right = 1.0 if self.multiplies else columns**-0.5
        size = 1.0 if self.multiplies else weight.detach().square().mean().sqrt()
        left = site.scale * size / (right * math.sqrt(site.rank))
        draw = {"generator": generator, "dtype": weight.dtype, "device": weight.device}
        self.left = nn.Parameter(Normal().sample((members, rows, site.rank), **draw) * left)
        self.right = nn.Parameter(Normal().sample((members, site.rank, columns), **draw) * right)

    def tensors(self) -> dict[str, Tensor]:
        return {"left": self.left, "right": self.right}

    def now(self, run: Run) -> dict[str, Tensor]:
        return {"weight": self._weights(*run.of(self).values())}

    def _weights(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the weights of some members, members first."""
        weight: Any = self.module.weight
        delta = (left @ right).view(-1, *weight.shape)
        return weight * (1 + delta) if self.multiplies else weight + delta

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
        if self.multiplies or not (self._batched and isinstance(self.module, nn.Linear)):
            return False
        if torch.compiler.is_compiling():  # a graph should be right for any number of rows
            return True
        return x.numel() // x.shape[-1] <= 2 * self.module.out_features  # as it was measured

    def _on_activations(self, run: Run, x: Tensor) -> Tensor:
        module: Any = self.module
        left, right = run.of(self).values()
        weight, bias = module.weight, module.bias
        axes = x.shape[:-1]
        if hasattr(module, "effective_parameters"):
            weight, bias = module.effective_parameters()
            left = module.effective_parameters(left)[0]
        shared = F.linear(x, weight, bias)
        if run.count == 1 or (self.border and run.common):
            x, shared = (t.flatten(0, -2).expand(run.count, -1, -1) for t in (x, shared))
            axes = (run.count * axes[0], *axes[1:])
        else:
            x, shared = (run.apart(t).flatten(1, -2) for t in (x, shared))
        products = together(torch.baddbmm(shared, x @ right.mT, left.mT))
        return products.unflatten(0, (-1, *axes[1:])) if len(axes) > 1 else products

    def plain(self, member: int | None, memo: dict[int, Any]) -> nn.Module:
        """Return a plain layer with one member's weights; None: the mean of all members'."""
        layer: Any = copy.deepcopy(self.module)
        some = slice(None) if member is None else slice(member, member + 1)
        with torch.no_grad():
            layer.weight.copy_(self._weights(self.left[some], self.right[some]).mean(0))
        return layer

    def extra_repr(self) -> str:
        return f"{self.site.kind}, rank={self.site.rank}, members={len(self.left)}"
