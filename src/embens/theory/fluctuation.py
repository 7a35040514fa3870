r"""Fluctuation: how far a member's kernel is from its limit at finite width, and what a law costs.

Given layer :math:`l` the next one is Gaussian with the empirical kernel of :math:`N_l` units, each
of which adds :math:`u^2 \phi(v z) \phi(v z)`. To leading order in 1/width their deviations from the
mean reach the kernel of the outputs with the limit's own sensitivity :math:`S^l = \partial
\Sigma_{aa} / \partial K^l`, and layers add up:

.. math::
    \frac{\mathrm{Var}\, \hat\Sigma_{aa}}{\Sigma_{aa}^2} = \sum_l \frac{t_l^2}{N_l}
        \big(\kappa_{u^l} \kappa_l - 1\big), \qquad
    t_l = \frac{E[\phi^\top S^l \phi]}{\Sigma_{aa}}, \qquad
    \kappa_l = \frac{E[(\phi^\top S^l \phi)^2]}{E[\phi^\top S^l \phi]^2}

with :math:`\phi = \phi(v z)`, a vector of pixels in a convolution. For ReLU and its relatives
without biases :math:`t_l = 1` and :math:`\kappa_l = \kappa_v \kappa_\phi`, 6 times that of the law
for ReLU in a perceptron. Where the squares of a law sum up (``law.balanced``), what its own mean
would add is taken off. ``docs/theory.md`` derives all this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from embens.ensemble import EmbeddedEnsemble
from embens.ensemble.layers import Modulated, Modulation
from embens.ensemble.plain import walk
from embens.laws import Constant, Normal
from embens.theory import duals
from embens.theory.duals.closed import Homogeneous
from embens.theory.limit.limit import Limit
from embens.theory.limit.rules import activate, count_poolings, propagate
from embens.theory.limit.state import DIAGONAL, Moments, State, describe, plain_module
from embens.theory.regime import Structure

if TYPE_CHECKING:
    from jaxtyping import Float

DRAWS = 2048
"""Images' pixels are drawn so often for their fourth moments, always in the same way."""


def fluctuation(ensemble: EmbeddedEnsemble | nn.Module, x: Tensor) -> Float[Tensor, " n"]:
    r"""Return the relative variance of :math:`\hat\Sigma_{aa}(x, x)`, to leading order in 1/width.

    :math:`\hat\Sigma_{aa}` is the variance of one member's outputs given its last hidden layer;
    it varies between draws of weights and modulations. Outputs have the kurtosis 3 + 3 times that.

    Example:
        >>> from embens import embed, laws, networks
        >>> net, x = networks.mlp(4, 100, depth=1), torch.ones(1, 4)
        >>> signs = embed(net, 8, pre=laws.Signs(0.0), post=laws.Signs(0.0))
        >>> [round(fluctuation(e, x).item(), 9) for e in (signs, embed(net, 8))]  # 5, 53 / width
        [0.05, 0.53]
    """
    terms = _terms(Limit(ensemble, x))
    return sum((term.value / term.width for term in terms), torch.zeros(len(x)).double())


def effective_width(
    ensemble: EmbeddedEnsemble, x: Tensor | None = None, *, modulated: bool = True
) -> float:
    """Return the width at which a network without modulations fluctuates as a member does.

    All its hidden layers have that width, so it is the width itself where all layers have one and
    modulations cost nothing. The mean over inputs ``x``; by default over a few random ones.
    ``modulated=False``: of the ensemble's network without them, the most that there could be.

    Example:
        >>> from embens import embed, networks
        >>> round(effective_width(embed(networks.mlp(4, 128, depth=3), 8)), 1)  # 128 · 5 / 53
        12.1
    """
    limit = _limit_of_some(ensemble) if x is None else Limit(ensemble, x)
    members, plain = _terms(limit, modulated=modulated), _terms(limit, modulated=False)
    if not members:
        raise ValueError("the network has no hidden layer, so its kernel does not fluctuate")
    at_one = torch.stack([term.value for term in plain]).sum(0)
    own = torch.stack([term.value / term.width for term in members]).sum(0)
    return float((at_one / own).mean())


class _Term(NamedTuple):
    """What a layer adds to the fluctuation: its width, and a value for each input, times that."""

    width: int
    value: Tensor


@dataclass(frozen=True)
class _Units:
    """A layer of units: how many, their covariance, what an activation makes of it, and laws."""

    width: int
    covariance: Tensor
    kernel: Tensor
    activation: nn.Module
    homogeneous: bool  # so that v is a factor
    pre: Modulation | None
    post: Modulation | None = None

    def term(self, sensitivity: Tensor, total: Tensor) -> _Term:
        """Return what their number adds to the relative variance of the outputs' kernel."""
        n, pixels = len(total), math.isqrt(self.covariance[0].numel())
        covariance, sensitivity = (
            t.detach().reshape(n, pixels, pixels) for t in (self.covariance, sensitivity)
        )
        z, weights = _normal(covariance)
        pre, post = (Constant() if m is None else m.law for m in (self.pre, self.post))
        law_u, law_v = (
            law if m is None else law.marginal(m.drawn)
            for law, m in ((post, self.post), (pre, self.pre))
        )
        varied = Constant() if self.homogeneous else law_v
        values, chances = varied.quadrature(181 if pixels == 1 else 31)
        first = second = of_v = torch.zeros_like(total)
        for v, chance in zip(values.tolist(), chances.tolist(), strict=True):
            units = self.activation(v * z)
            each = ((units @ sensitivity) * units).sum(-1)
            mean = each @ weights
            first, of_v = first + chance * mean, of_v + chance * mean**2
            second = second + chance * each**2 @ weights
        factor = law_v.kurtosis if self.homogeneous else 1.0
        kurtosis = law_u.kurtosis * factor * second / first**2
        fixed = post.balanced * (law_u.kurtosis - 1) + pre.balanced * (factor * of_v / first**2 - 1)
        return _Term(self.width, (first / total) ** 2 * (kurtosis - 1 - fixed))


def _normal(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return values ``(n, value, pixel)`` of normal units, and the weights of values."""
    n, pixels = covariance.shape[:2]
    if pixels == 1:
        nodes, weights = (t.to(covariance) for t in Normal().quadrature())
        return covariance.sqrt() * nodes[:, None], weights
    small = 1e-10 * covariance.diagonal(dim1=1, dim2=2).mean(1)
    root = torch.linalg.cholesky(covariance + torch.diag_embed(small[:, None].expand(n, pixels)))
    noise = torch.randn(DRAWS, pixels, generator=torch.Generator().manual_seed(0))
    return noise.to(covariance) @ root.mT, covariance.new_full((DRAWS,), 1 / DRAWS)


def _limit_of_some(ensemble: EmbeddedEnsemble) -> Limit:
    unknown: Exception = TypeError("the shape of its inputs is not known; pass x")
    for x in Structure(ensemble).generic_inputs():
        try:
            return Limit(ensemble, x)
        except (TypeError, ValueError, RuntimeError) as error:
            unknown = error
    raise unknown


def _terms(limit: Limit, *, modulated: bool = True) -> list[_Term]:
    """Return the terms of all hidden layers; an image at a time, as pairs of pixels are many."""
    if limit.conditional:
        raise ValueError(
            "fluctuations are those of members that are drawn alike; with modulated inputs or "
            "outputs they are not. Use sites='hidden'."
        )
    parts = []
    for x in limit.x1.split(1 if limit.x1.dim() > 2 else 64):
        units, total = _pass(limit, x.detach().clone().requires_grad_(), modulated=modulated)
        kernels = [layer.kernel for layer in units]
        slopes = torch.autograd.grad(total.sum(), kernels) if kernels else ()
        parts.append([u.term(s, total.detach()) for u, s in zip(units, slopes, strict=True)])
    return [
        _Term(layer[0].width, torch.cat([term.value for term in layer]))
        for layer in zip(*parts, strict=True)
    ]


@torch.enable_grad()
def _pass(limit: Limit, x: Tensor, *, modulated: bool) -> tuple[list[_Units], Tensor]:
    """Return the layers of units on the way of each input with itself, and the outputs' kernel."""
    poolings = 1 + count_poolings(nn.ModuleList([m for _, m in limit.steps]))  # all pairs, always
    state = State(Moments(), inputs=(x, x), recording=[], tracked=False, poolings=poolings)
    found: list[_Units] = []
    width = 0
    for path, module in limit.steps:
        post = module.post if isinstance(module, Modulated) and modulated else None
        module = module if modulated or not isinstance(module, Modulated) else module.inner()
        layer = next((m for _, m in walk(module) if isinstance(m, nn.Linear | _ConvNd)), None)
        state = state.replace(path=path)
        if layer is not None and state.gaussian:  # no activation lies between two layers
            after = activate(module, duals.dual(nn.Identity()), state)
            found.append(_units(nn.Identity(), width, state, after))
            state = after
        after = propagate(module, state)
        if layer is None and after.depth > state.depth:
            found.append(_units(module, width, state, after))
        if len(after.recording or ()) != len(found):
            where = describe(module, path)
            raise TypeError(f"fluctuations inside {where}, with a rule of its own, are not known")
        if layer is not None:
            width = layer.out_channels if isinstance(layer, _ConvNd) else layer.out_features
            found[-1:] = [replace(units, post=post) for units in found[-1:]]
        state = after
    return found, state.covariance.reshape(len(x), -1).mean(1)


def _units(module: nn.Module, width: int, before: State, after: State) -> _Units:
    if before.layout == DIAGONAL:
        raise TypeError(
            f"fluctuations are not known where {describe(module, before.path)} comes after "
            "nn.Flatten(); put it before"
        )
    assert before.recording
    homogeneous = isinstance(before.recording[-1].dual, Homogeneous)
    activation = plain_module(module)
    return _Units(width, before.covariance, after.covariance, activation, homogeneous, before.pre)
