r"""Fluctuation: how far a member's kernel is from its limit at finite width.

A unit of layer :math:`l` adds :math:`u^2 \phi^\top S \phi / N_l` to the kernel of the outputs. Here
:math:`\phi = \phi(v z)` is a vector over pixels in a convolution, and :math:`S = \partial
\Sigma_{aa} / \partial K^l` is the sensitivity of the limit. To leading order in 1/width, layers add
up:

.. math::
    \frac{\mathrm{Var}\, \hat\Sigma_{aa}}{\Sigma_{aa}^2} = \sum_l \frac{t_l^2}{N_l}
        \big(\kappa_{u^l} \kappa_l - 1\big), \qquad
    t_l = \frac{E[\phi^\top S \phi]}{\Sigma_{aa}}, \qquad
    \kappa_l = \frac{E[(\phi^\top S \phi)^2]}{E[\phi^\top S \phi]^2} .

For ReLU perceptrons without biases :math:`t_l = 1` and :math:`\kappa_l = 6 \kappa_v`, so the tails
of a law cost width. For a ``balanced`` law the squares of a layer's values have a fixed mean; the
part of the variance that this mean would add is subtracted. ``docs/theory-derivations.md`` derives
the formula.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from embens.ensemble import EmbeddedEnsemble
from embens.laws import Constant, Law, Normal
from embens.theory import activations
from embens.theory.closed_forms import Homogeneous
from embens.theory.limit import Limit
from embens.theory.moments import DIAGONAL, Moments, Pass, State, describe
from embens.theory.pixels import count_poolings
from embens.theory.placement import SHARED, Modulation, Placements
from embens.theory.recursion import propagate

if TYPE_CHECKING:
    from jaxtyping import Float

DRAWS = 2048
"""Number of fixed draws of a channel's pixels for their fourth moments."""


def fluctuation(ensemble: EmbeddedEnsemble | nn.Module, x: Tensor) -> Float[Tensor, " n"]:
    r"""Compute the relative variance of :math:`\hat\Sigma_{aa}(x, x)` to leading order in 1/width.

    :math:`\hat\Sigma_{aa}` is the variance of a member's outputs given its last hidden layer. It
    varies over draws of weights and modulations. The kurtosis of outputs is 3 plus 3 times the
    result.

    Args:
        ensemble: An ensemble, or a plain network; the widths of its layers matter.
        x: Inputs, ``(n, …)``.

    Returns:
        One relative variance for each input, ``(n,)``.

    Raises:
        ValueError: If inputs or outputs are modulated, or there is no hidden layer.
        TypeError: If layers and activations do not alternate.

    Example:
        >>> from embens import embed, laws, networks
        >>> net, x = networks.mlp(4, 100, depth=1), torch.ones(1, 4)
        >>> signs = embed(net, 8, pre=laws.Signs(0.0), post=laws.Signs(0.0))
        >>> [round(fluctuation(e, x).item(), 9) for e in (signs, embed(net, 8))]  # 5, 53 / width
        [0.05, 0.53]
    """
    limit = Limit(ensemble, x)
    widths, terms = _layer_terms(limit, limit.placements)
    return (terms / widths).sum(1)


def effective_width(ensemble: EmbeddedEnsemble | nn.Module, x: Tensor) -> float:
    """Compute the width at which an unmodulated network fluctuates as a member does.

    Args:
        ensemble: An ensemble, or a plain network.
        x: Inputs, ``(n, …)``; the result is a mean over them.

    Returns:
        The width that all hidden layers of the unmodulated network have.

    Example:
        >>> from embens import embed, networks
        >>> ensemble = embed(networks.mlp(4, 128, depth=3), 8)
        >>> round(effective_width(ensemble, torch.ones(1, 4)), 1)  # 128 · 5 / 53
        12.1
    """
    limit = Limit(ensemble, x)
    widths, terms = _layer_terms(limit, limit.placements)
    _, unmodulated_terms = _layer_terms(limit, {})
    ratios = unmodulated_terms.sum(1) / (terms / widths).sum(1)
    return float(ratios.mean())


@dataclass(frozen=True)
class _HiddenLayer:
    """A hidden layer on its inputs.

    Attributes:
        width: Number of units or channels.
        activation: Its activation.
        covariance: Covariance of units before the activation, of each input with itself.
        kernel: The same after the activation; the outputs depend on it.
        pre: Modulation before the activation.
        post: Modulation after the activation.
    """

    width: int
    activation: nn.Module
    covariance: Tensor
    kernel: Tensor
    pre: Modulation | None
    post: Modulation | None = None

    def term(self, sensitivity: Tensor, total: Tensor) -> Tensor:
        """Return the contribution of the layer to the relative variance, times its width, ``(n,)``.

        Args:
            sensitivity: Derivatives of the outputs' kernels by ``kernel``.
            total: The outputs' kernels, ``(n,)``.
        """
        pixels = math.isqrt(sensitivity[0].numel())
        sensitivity = sensitivity.detach().reshape(len(total), pixels, pixels)
        covariance = self.covariance.detach().reshape(len(total), pixels, pixels)
        u = _marginal(self.post)
        v = _marginal(self.pre)
        # A homogeneous activation takes v as a factor: φ(vz)² = v² φ(z)² up to signs.
        is_factor = isinstance(activations.dual(self.activation), Homogeneous)
        law = Constant() if is_factor else v
        mean, mean_square, mean_given_v = self._form_moments(law, sensitivity, covariance)
        kurtosis = mean_square / mean**2
        kurtosis_of_v = mean_given_v / mean**2
        if is_factor:
            kurtosis = kurtosis * v.kurtosis
            kurtosis_of_v = kurtosis_of_v * v.kurtosis
        excess = u.kurtosis * kurtosis - 1
        if self.post is not None and self.post.law.balanced:
            excess = excess - (u.kurtosis - 1)
        if self.pre is not None and self.pre.law.balanced:
            excess = excess - (kurtosis_of_v - 1)
        return (mean / total) ** 2 * excess

    def _form_moments(
        self,
        law: Law,
        sensitivity: Tensor,
        covariance: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        r"""Return moments of the quadratic form :math:`Q = \phi^\top S \phi`, each ``(n,)``.

        They are :math:`E Q`, :math:`E Q^2` and :math:`E[E[Q \mid v]^2]`.
        """
        units, unit_weights = _normal_units(covariance)
        # With pixels every node of v costs a matrix product.
        values, weights = law.quadrature(181 if covariance.shape[1] == 1 else 31)
        mean = mean_square = mean_given_v = torch.zeros_like(covariance[:, 0, 0])
        for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
            activated = self.activation(value * units)
            form = ((activated @ sensitivity) * activated).sum(-1)
            mean_of_form = form @ unit_weights
            mean = mean + weight * mean_of_form
            mean_square = mean_square + weight * (form**2 @ unit_weights)
            mean_given_v = mean_given_v + weight * mean_of_form**2
        return mean, mean_square, mean_given_v


def _marginal(modulation: Modulation | None) -> Law:
    return Constant() if modulation is None else modulation.marginal


def _normal_units(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return values of normal units, ``(n, value, pixel)``, and the weights of values.

    Args:
        covariance: Covariances of pixels, ``(n, pixel, pixel)``.
    """
    pixels = covariance.shape[1]
    if pixels == 1:
        nodes, weights = Normal().quadrature()
        nodes, weights = nodes.to(covariance), weights.to(covariance)
        return covariance.sqrt() * nodes[:, None], weights
    noise = torch.randn(DRAWS, pixels, generator=torch.Generator().manual_seed(0))
    largest = covariance.amax((1, 2), keepdim=True)
    jitter = 1e-10 * largest * torch.eye(pixels).to(covariance)
    root = torch.linalg.cholesky(covariance + jitter)
    return noise.to(covariance) @ root.mT, covariance.new_full((DRAWS,), 1 / DRAWS)


def _layer_terms(limit: Limit, placements: Placements) -> tuple[Tensor, Tensor]:
    """Return widths of hidden layers, ``(layer,)``, and their terms, ``(n, layer)``.

    Args:
        limit: The limit on its inputs.
        placements: Modulations to use; an empty mapping leaves them out.
    """
    if limit.conditional:
        raise ValueError(
            "fluctuations need exchangeable members; with modulated inputs or outputs members are "
            "not exchangeable. Use sites='hidden'."
        )
    if any(placement.low_rank is not None for placement in limit.placements.values()):
        raise TypeError(
            "fluctuations of low-rank members have no formula. embens.diagnose measures them."
        )
    if limit.walk is not None:
        raise TypeError(
            "fluctuations are known for nn.Sequential only; this network's forward is custom code. "
            "embens.diagnose measures it."
        )
    rows = []
    widths: list[int] = []
    # Images go one at a time, because pairs of pixels are many.
    chunk = 1 if limit.x1.dim() > 2 else len(limit.x1)
    for inputs in limit.x1.split(chunk):
        inputs = inputs.clone().requires_grad_()
        layers, total = _hidden_layers(limit, inputs, placements)
        layer_kernels = [layer.kernel for layer in layers]
        sensitivities = torch.autograd.grad(total.sum(), layer_kernels)
        terms = []
        for layer, sensitivity in zip(layers, sensitivities, strict=True):
            terms.append(layer.term(sensitivity, total.detach()))
        rows.append(torch.stack(terms, 1))
        widths = [layer.width for layer in layers]
    return rows[0].new_tensor(widths), torch.cat(rows)


@torch.enable_grad()
def _hidden_layers(
    limit: Limit,
    x: Tensor,
    placements: Placements,
) -> tuple[list[_HiddenLayer], Tensor]:
    """Return the hidden layers of each input with itself, and the outputs' kernels ``(n,)``."""
    # One more pooling than there is keeps all pairs of pixels to the end.
    modules = nn.ModuleList([module for _, module in limit.steps])
    poolings = 1 + count_poolings(modules)
    facts = Pass(placements=placements, recording=[], tracked=False)
    state = State(Moments(), inputs=(x, x), poolings=poolings, facts=facts)
    layers: list[_HiddenLayer] = []
    width = 0
    for path, module in limit.steps:
        before = state.replace(path=path)
        state = propagate(module, before)
        parts = [part for part in module.modules() if isinstance(part, nn.Linear | _ConvNd)]
        is_activation = not parts and state.depth > before.depth and before.layout != DIAGONAL
        if is_activation:
            layer = _HiddenLayer(
                width=width,
                activation=module,
                covariance=before.covariance,
                kernel=state.covariance,
                pre=before.pre,
            )
            layers.append(layer)
        if len(facts.recording or ()) != len(layers) or (parts and before.gaussian):
            raise TypeError(
                f"the fluctuation at {describe(module, path)} is not known: layers and activations "
                "must alternate, and activations must come before nn.Flatten()."
            )
        if parts:
            width = parts[0].weight.shape[0]
            if layers:
                post = placements.get(parts[0], SHARED).post
                layers[-1] = replace(layers[-1], post=post)
    if not layers:
        raise ValueError("the network has no hidden layer, so its kernel does not fluctuate")
    return layers, state.covariance.reshape(len(x), -1).mean(1)
