r"""The law of a layer's weights: what the limit needs to know of a layer.

With :math:`N` inputs of one output, :math:`\sigma_w^2 = N\,\mathrm{Var}\,W` and
:math:`\sigma_b^2 = \mathrm{Var}\,b` set the covariance; the *gains* :math:`g_w`, :math:`g_b` set
the tangent kernel: squared gradients of an output, divided by the mean squared input.

======================  ================  =========================================
parametrization         gain of weights   gain of the bias
======================  ================  =========================================
``"ntk"``               :math:`\sigma_w^2`  :math:`\sigma_b^2`
``"standard"``,         1                 :math:`1/N`: 0 but for the network's inputs
``"xavier"``
======================  ================  =========================================

In the last two, gradients grow with :math:`N`; the limit exists with layer rates
:math:`\propto 1/N`, which are in the gains. ``"xavier"`` depends on the ratio of fan-in and
fan-out; it is taken at the layer's own. Frozen parameters have gain 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from embens.networks import Parametrized
from embens.theory.limit.state import describe


@dataclass(frozen=True)
class WeightLaw:
    """Second moments of a layer's parameters, and the gains of their gradients."""

    weight_variance: float
    bias_variance: float
    weight_gain: float
    bias_gain: float


def weight_law(layer: nn.Module, *, finite: bool, path: str = "") -> WeightLaw:
    r"""Return the law of a layer's weights.

    Layers of :mod:`embens.networks` carry it. Torch's own are taken to be as torch draws them
    (uniform, :math:`\sigma_w^2 = 1/3`), if their weights look like that.

    Args:
        layer: Linear or convolution.
        finite: whether its inputs are the network's, of which there are finitely many.
        path: its name, for messages.
    """
    weight, bias = layer.weight, layer.bias
    fan_in = weight[0].numel()  # type: ignore[index]
    if isinstance(layer, Parametrized):
        weight_variance, bias_variance = layer.weight_std**2, layer.bias_std**2
        if layer.parametrization == "xavier":
            fan_out = layer.weight.numel() // layer.weight.shape[1]
            weight_variance *= 2 * fan_in / (fan_in + fan_out)
        ntk = layer.parametrization == "ntk"
    else:
        if not _looks_like_torchs(weight, fan_in):
            raise ValueError(
                f"the law of the weights of {describe(layer, path)} is not known: they are not as "
                "torch draws them (trained, or initialised in another way). The limit belongs to "
                "an initialisation: build the network with embens.networks.mlp, cnn, Linear and "
                "Conv2d, which carry theirs."
            )
        weight_variance, bias_variance = 1 / 3, 1 / (3 * fan_in) if finite else 0.0
        ntk = False
    scale = 0.0 if not finite else 1 / fan_in
    gains = (weight_variance, bias_variance) if ntk else (1.0, scale)
    return WeightLaw(
        weight_variance=weight_variance,
        bias_variance=0.0 if bias is None else bias_variance,
        weight_gain=gains[0] * bool(weight.requires_grad),  # type: ignore[union-attr]
        bias_gain=0.0 if bias is None else gains[1] * bool(bias.requires_grad),  # type: ignore[union-attr]
    )


def _looks_like_torchs(weight, fan_in: int) -> bool:
    """Return whether weights can be uniform on ±1/√N: their size, and their second moment."""
    scaled = weight.detach().double() * math.sqrt(fan_in)
    if not scaled.abs().max() <= 1 + 1e-6:
        return False
    error = math.sqrt(4 / 45 / scaled.numel())  # standard deviation of the mean of a square
    return abs(scaled.square().mean().item() - 1 / 3) < 6 * error
