r"""Second moments of a layer's parameters, and the gains of their gradients.

With :math:`N` inputs of one output, :math:`\sigma_w^2 = N\,\mathrm{Var}\,W` and :math:`\sigma_b^2 =
\mathrm{Var}\,b`. The gains :math:`g_w, g_b` are squared gradients of an output, divided by the mean
squared input:

=====================  ====================  ======================
parametrization        :math:`g_w`           :math:`g_b`
=====================  ====================  ======================
``"ntk"``              :math:`\sigma_w^2`    :math:`\sigma_b^2`
``"standard"``         1                     :math:`1/N`
``"xavier"``           1                     :math:`1/N`
=====================  ====================  ======================

In the last two, gradients grow with :math:`N`. The limit exists with layer rates proportional to
:math:`1/N`, which the gains contain; :math:`1/N` is 0 unless the inputs of the layer are those of
the network. ``"xavier"`` is taken at the layer's ratio of fan-in and fan-out. Frozen parameters
have gain 0.
"""

import math
from typing import NamedTuple

from torch import Tensor, nn

from embens.networks import Parametrized
from embens.theory.moments import MEASURE, describe


class WeightLaw(NamedTuple):
    r"""The values :math:`\sigma_w^2, \sigma_b^2, g_w, g_b` of a layer."""

    weight_variance: float
    bias_variance: float
    weight_gain: float
    bias_gain: float

    def gradients(self, kernel: Tensor, moment: float) -> Tensor:
        r"""Return :math:`g_w\, U\, \mathcal A[K] + g_b` for a kernel and a moment :math:`U`."""
        tangents = kernel * (moment * self.weight_gain)
        return tangents + self.bias_gain if self.bias_gain else tangents


def weight_law(layer: nn.Module, *, finite: bool, path: str = "") -> WeightLaw:
    r"""Return the law of the weights of a Linear layer or a convolution.

    Layers of :mod:`embens.networks` carry their law. For layers of torch the default initialisation
    is assumed (uniform, :math:`\sigma_w^2 = 1/3`) and checked.

    Args:
        layer: The layer.
        finite: True if its inputs are those of the network, which are finitely many.
        path: Name of the layer, for messages.

    Raises:
        TypeError: If the weights are computed from other parameters, as by weight norm.
        ValueError: If the weights of a torch layer do not look like torch's initialisation.

    Example:
        >>> from embens.networks import Linear
        >>> weight_law(Linear(4, 2, weight_std=2.0), finite=False)
        WeightLaw(weight_variance=4.0, bias_variance=0.0, weight_gain=4.0, bias_gain=0.0)
    """
    weight: Tensor = layer.weight  # type: ignore[assignment]
    bias: Tensor | None = layer.bias  # type: ignore[assignment]
    fan_in = weight[0].numel()
    _require_stored_tensors(layer, path)
    if isinstance(layer, Parametrized):
        weight_variance = layer.weight_std**2
        bias_variance = layer.bias_std**2
        if layer.parametrization == "xavier":
            fan_out = weight.numel() // weight.shape[1]
            weight_variance *= 2 * fan_in / (fan_in + fan_out)
    else:
        _require_torch_initialisation(layer, weight, fan_in, path)
        weight_variance = 1 / 3
        bias_variance = 1 / (3 * fan_in) if finite else 0.0
    if isinstance(layer, Parametrized) and layer.parametrization == "ntk":
        weight_gain, bias_gain = weight_variance, bias_variance
    else:
        weight_gain = 1.0
        bias_gain = 1 / fan_in if finite else 0.0
    if not weight.requires_grad:
        weight_gain = 0.0
    if bias is None:
        return WeightLaw(weight_variance, 0.0, weight_gain, 0.0)
    if not bias.requires_grad:
        bias_gain = 0.0
    return WeightLaw(weight_variance, bias_variance, weight_gain, bias_gain)


def _require_stored_tensors(layer: nn.Module, path: str) -> None:
    """Raise if weights or biases are computed from other parameters, which have other tangents."""
    stored = {name for name, _ in layer.named_parameters(recurse=False)}
    stored |= {name for name, _ in layer.named_buffers(recurse=False)}
    for name in ("weight", "bias"):
        if getattr(layer, name) is not None and name not in stored:
            raise TypeError(
                f"the {name} of {describe(layer, path)} is computed from other parameters, whose "
                "tangents have no rule. Remove the parametrization: "
                "torch.nn.utils.parametrize.remove_parametrizations. " + MEASURE
            )


def _require_torch_initialisation(layer: nn.Module, weight: Tensor, fan_in: int, path: str) -> None:
    """Raise unless weights can be uniform on ±1/√N, by their size and their second moment."""
    scaled = weight.detach().double() * math.sqrt(fan_in)
    # 4/45 is the variance of the square of a variable that is uniform on [-1, 1].
    standard_error = math.sqrt(4 / 45 / scaled.numel())
    within_bounds = bool(scaled.abs().max() <= 1 + 1e-6)
    deviation = abs(scaled.square().mean().item() - 1 / 3)
    if not (within_bounds and deviation < 6 * standard_error):
        raise ValueError(
            f"the law of the weights of {describe(layer, path)} is not known: they are not as "
            "torch draws them (trained, or initialised in another way). The limit belongs to "
            "an initialisation: build the network with embens.networks.mlp, cnn, Linear and "
            f"Conv2d, which carry theirs. {MEASURE}"
        )
