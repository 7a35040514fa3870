r"""Fluctuation: how far a member's kernel is from its limit at finite width, and what a law costs.

A unit of layer :math:`l` adds :math:`u^2 \phi^\top S \phi / N_l` to the kernel of the outputs:
:math:`\phi = \phi(v z)`, a vector of pixels in a convolution, and :math:`S = \partial \Sigma_{aa} /
\partial K^l` is the limit's sensitivity. To leading order in 1/width layers add up,

.. math::
    \frac{\mathrm{Var}\, \hat\Sigma_{aa}}{\Sigma_{aa}^2} = \sum_l \frac{t_l^2}{N_l}
        \big(\kappa_{u^l} \kappa_l - 1\big), \qquad
    t_l = \frac{E[\phi^\top S \phi]}{\Sigma_{aa}}, \qquad
    \kappa_l = \frac{E[(\phi^\top S \phi)^2]}{E[\phi^\top S \phi]^2} ;

for ReLU perceptrons without biases :math:`t_l = 1` and :math:`\kappa_l = 6 \kappa_v`. Where a law
is ``balanced``, what the mean of its squares would add is taken off. ``docs/theory.md`` derives it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from embens.ensemble import EmbeddedEnsemble
from embens.ensemble.layers import Modulated, Modulation
from embens.ensemble.wrapping import walk
from embens.laws import Constant, Normal
from embens.theory import duals
from embens.theory.duals.closed import Homogeneous
from embens.theory.limit.limit import Limit
from embens.theory.limit.rules import count_poolings, propagate
from embens.theory.limit.state import DIAGONAL, Moments, State, describe, plain_module

if TYPE_CHECKING:
    from jaxtyping import Float

DRAWS = 2048
"""Of a channel's pixels for their fourth moments, always the same."""


def fluctuation(ensemble: EmbeddedEnsemble | nn.Module, x: Tensor) -> Float[Tensor, " n"]:
    r"""Return the relative variance of :math:`\hat\Sigma_{aa}(x, x)`, to leading order in 1/width.

    That is the variance of a member's outputs given its last hidden layer, over draws of weights
    and modulations. Outputs have the kurtosis 3 + 3 times this.

    Example:
        >>> from embens import embed, laws, networks
        >>> net, x = networks.mlp(4, 100, depth=1), torch.ones(1, 4)
        >>> signs = embed(net, 8, pre=laws.Signs(0.0), post=laws.Signs(0.0))
        >>> [round(fluctuation(e, x).item(), 9) for e in (signs, embed(net, 8))]  # 5, 53 / width
        [0.05, 0.53]
    """
    widths, terms = _terms(Limit(ensemble, x))
    return (terms / widths).sum(1)


def effective_width(ensemble: EmbeddedEnsemble | nn.Module, x: Tensor) -> float:
    """Return the width at which a network without modulations fluctuates as a member does.

    All its hidden layers have that width. A mean over inputs ``x``.

    Example:
        >>> from embens import embed, networks
        >>> ensemble = embed(networks.mlp(4, 128, depth=3), 8)
        >>> round(effective_width(ensemble, torch.ones(1, 4)), 1)  # 128 · 5 / 53
        12.1
    """
    limit = Limit(ensemble, x)
    (widths, terms), (_, plain) = (_terms(limit, modulated=m) for m in (True, False))
    return float((plain.sum(1) / (terms / widths).sum(1)).mean())


@dataclass(frozen=True)
class _Units:
    """Units of a layer: how many, before and after their activation, and its modulations."""

    width: int
    activation: nn.Module
    covariance: Tensor
    kernel: Tensor
    pre: Modulation | None
    post: Modulation | None = None

    def term(self, sensitivity: Tensor, total: Tensor) -> Tensor:
        """Return the relative variance of the outputs' kernel by these units, times the width."""
        square = len(total), *(math.isqrt(sensitivity[0].numel()),) * 2
        sensitivity, covariance = (
            t.detach().reshape(square) for t in (sensitivity, self.covariance)
        )
        z, weights = _normal(covariance)
        u, v = (Constant() if m is None else m.law.marginal(m.drawn) for m in (self.post, self.pre))
        is_factor = isinstance(duals.dual(self.activation), Homogeneous)
        values = (Constant() if is_factor else v).quadrature(181 if square[1] == 1 else 31)
        first = second = of_v = torch.zeros_like(total)
        for value, chance in zip(*(t.tolist() for t in values), strict=True):
            units = self.activation(value * z)
            form = ((units @ sensitivity) * units).sum(-1)
            mean = form @ weights
            first, of_v = first + chance * mean, of_v + chance * mean**2
            second = second + chance * form**2 @ weights
        second, of_v = (t * (v.kurtosis if is_factor else 1) / first**2 for t in (second, of_v))
        excess = u.kurtosis * second - 1
        for modulation, of_mean in ((self.post, u.kurtosis), (self.pre, of_v)):
            if modulation is not None and modulation.law.balanced:
                excess = excess - (of_mean - 1)
        return (first / total) ** 2 * excess


def _normal(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return values ``(n, value, pixel)`` of normal units, and the weights of values."""
    pixels = covariance.shape[1]
    if pixels == 1:
        nodes, weights = (t.to(covariance) for t in Normal().quadrature())
        return covariance.sqrt() * nodes[:, None], weights
    noise = torch.randn(DRAWS, pixels, generator=torch.Generator().manual_seed(0))
    jitter = 1e-10 * covariance.amax((1, 2), keepdim=True) * torch.eye(pixels).to(covariance)
    root = torch.linalg.cholesky(covariance + jitter)
    return noise.to(covariance) @ root.mT, covariance.new_full((DRAWS,), 1 / DRAWS)


def _terms(limit: Limit, *, modulated: bool = True) -> tuple[Tensor, Tensor]:
    """Return widths of hidden layers and, ``(n, layer)``, what they add to the variance, times it.

    Images go one at a time, as pairs of pixels are many.
    """
    if limit.conditional:
        raise ValueError(
            "fluctuations are those of members that are drawn alike; with modulated inputs or "
            "outputs they are not. Use sites='hidden'."
        )
    rows, layers = [], []
    for part in limit.x1.split(1 if limit.x1.dim() > 2 else len(limit.x1)):
        layers, total = _pass(limit, part.clone().requires_grad_(), modulated=modulated)
        slopes = torch.autograd.grad(total.sum(), [layer.kernel for layer in layers])
        terms = [layer.term(s, total.detach()) for layer, s in zip(layers, slopes, strict=True)]
        rows.append(torch.stack(terms, 1))
    return rows[0].new_tensor([layer.width for layer in layers]), torch.cat(rows)


@torch.enable_grad()
def _pass(limit: Limit, x: Tensor, *, modulated: bool) -> tuple[list[_Units], Tensor]:
    """Return the units on the way of each input with itself, and the outputs' kernel."""
    poolings = 1 + count_poolings(nn.ModuleList([m for _, m in limit.steps]))  # all pairs, always
    state = State(Moments(), inputs=(x, x), recording=[], tracked=False, poolings=poolings)
    found: list[_Units] = []
    width = 0
    for path, module in limit.steps:
        before, post = state.replace(path=path), None
        if isinstance(module, Modulated):
            module, post = (module, module.post) if modulated else (module.inner(), None)
        layer = next((m for _, m in walk(module) if isinstance(m, nn.Linear | _ConvNd)), None)
        state = propagate(module, before)
        if layer is None and state.depth > before.depth and before.layout != DIAGONAL:
            kernels = before.covariance, state.covariance
            found.append(_Units(width, plain_module(module), *kernels, before.pre))
        if len(state.recording or ()) != len(found) or (layer is not None and before.gaussian):
            raise TypeError(
                f"no fluctuation is known at {describe(module, path)}: expected layers and "
                "activations by turns, and activations before nn.Flatten()"
            )
        if layer is not None:
            width = layer.out_channels if isinstance(layer, _ConvNd) else layer.out_features
            found[-1:] = [replace(units, post=post) for units in found[-1:]]
    if not found:
        raise ValueError("the network has no hidden layer, so its kernel does not fluctuate")
    return found, state.covariance.reshape(len(x), -1).mean(1)
