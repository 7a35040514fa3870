r"""Reference networks, and layers that know the law of their own weights.

An infinite-width limit is that of a network *with* its initialisation, which the layers here carry:

.. math::
    y = \frac{\sigma_w}{\sqrt{N}} W x + \sigma_b b, \qquad W, b \sim N(0, 1)

in the ``"ntk"`` parametrization, where :math:`N` is the number of inputs of one output. With
``"standard"``, :math:`\sigma_w / \sqrt{N}` and :math:`\sigma_b` are in the law of :math:`W` and
:math:`b` instead: the same functions at initialisation, other gradients. ``"xavier"`` replaces
:math:`1 / N` by the paper's :math:`2 / (N + N')` with :math:`N'` outputs of one input.
"""

import copy
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embens.checks import check_choice, check_number, check_whole
from embens.laws import Normal

PARAMETRIZATIONS = ("ntk", "standard", "xavier")


class Parametrized(nn.Module):
    """What the layers of this module share: the law of their parameters.

    Sizes and options are those of torch's layer. ``weight_std`` is :math:`σ_w`, ``bias_std``
    :math:`σ_b`, 0 for a layer without biases; ``fan_in`` the number of inputs that one output sees.
    """

    weight: Tensor
    bias: Any
    linear_in_parameters = True  # in weight and bias together

    def __init__(
        self,
        *sizes: Any,
        weight_std: float = 1.0,
        bias_std: float = 0.0,
        parametrization: str = "ntk",
        generator: torch.Generator | None = None,
        **options: Any,
    ):
        super().__init__(*sizes, bias=bias_std != 0, **options)
        expected = "a number >= 0, a standard deviation"
        self.weight_std = check_number("weight_std", weight_std, expected, lambda std: std >= 0)
        self.bias_std = check_number("bias_std", bias_std, expected, lambda std: std >= 0)
        self.parametrization = check_choice("parametrization", parametrization, PARAMETRIZATIONS)
        self.fan_in = self.weight[0].numel()
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the parameters anew, from the same law."""
        if not hasattr(self, "parametrization"):
            return  # torch's constructor calls this before the law is known
        fan_out = self.weight.numel() // self.weight.shape[1]
        std = {
            "ntk": 1.0,
            "standard": self.weight_std / math.sqrt(self.fan_in),
            "xavier": self.weight_std * math.sqrt(2 / (self.fan_in + fan_out)),
        }[self.parametrization]
        _draw_(self.weight, std, generator)
        if self.bias is not None:
            _draw_(self.bias, 1.0 if self.parametrization == "ntk" else self.bias_std, generator)

    def effective_parameters(
        self, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return its weight and bias, or others, as the plain torch layer would have them."""
        weight = self.weight if weight is None else weight
        bias = self.bias if bias is None else bias
        if self.parametrization != "ntk":
            return weight, bias
        scale = self.weight_std / math.sqrt(self.fan_in)
        return weight * scale, None if bias is None else bias * self.bias_std

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, parametrization={self.parametrization!r}, "
            f"weight_std={self.weight_std:g}, bias_std={self.bias_std:g}"
        )


class Linear(Parametrized, nn.Linear):
    """Linear layer in one of the parametrizations."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, *self.effective_parameters())


class Conv2d(Parametrized, nn.Conv2d):
    """Convolution in one of the parametrizations."""

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, *self.effective_parameters())


class _Function(nn.Module):
    """A method of tensors that has the name of the class."""

    def forward(self, input: Tensor) -> Tensor:
        return getattr(input, type(self).__name__.lower())()


class Abs(_Function):
    """Absolute value."""


class Erf(_Function):
    """Error function."""


class Sin(_Function):
    """Sine."""


class Cos(_Function):
    """Cosine."""


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "abs": Abs,
    "erf": Erf,
    "sin": Sin,
    "cos": Cos,
    "identity": nn.Identity,
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "silu": nn.SiLU,
}


def mlp(
    inputs: int = 64,
    width: int = 512,
    depth: int = 3,
    outputs: int = 1,
    *,
    activation: str | nn.Module = "relu",
    activation_slope: float = 0.01,
    weight_std: float = 1.0,
    bias_std: float = 0.0,
    parametrization: str = "ntk",
    generator: torch.Generator | None = None,
) -> nn.Sequential:
    """Build a perceptron with ``depth`` hidden layers of ``width`` units.

    The activation is a name in ``ACTIVATIONS``, or a module, which is copied for each layer;
    ``activation_slope`` is the slope of ``"leaky_relu"`` for negative inputs. A ``weight_std`` of
    sqrt(2) keeps the size of a signal under ReLU; with ``bias_std=0`` there are no biases. The
    parametrization is ``"ntk"``, ``"standard"`` or ``"xavier"``.
    """
    sizes = {"inputs": inputs, "width": width, "depth": depth, "outputs": outputs}
    for name, size in sizes.items():
        check_whole(name, size)
    law = {"weight_std": weight_std, "bias_std": bias_std, "parametrization": parametrization}
    modules: list[nn.Module] = []
    for fan_in, fan_out in pairwise([inputs, *[width] * depth, outputs]):
        linear = Linear(fan_in, fan_out, **law, generator=generator)
        modules += [linear, make_activation(activation, activation_slope)]
    return nn.Sequential(*modules[:-1])


def cnn(
    channels: Sequence[int] = (64, 128, 256, 512),
    width: float = 1.0,
    *,
    inputs: int = 3,
    outputs: int = 100,
    image: int = 32,
    pool: str = "average",
    readout: str = "mean",
    activation: str | nn.Module = "relu",
    activation_slope: float = 0.01,
    weight_std: float = 1.0,
    parametrization: str = "xavier",
    generator: torch.Generator | None = None,
) -> nn.Sequential:
    """Build the paper's convolutional network: 3×3 filters, 2×2 pooling between layers, no biases.

    ``width`` is a factor of all ``channels``. Pooling is ``"average"`` or ``"max"``. The readout is
    the ``"mean"`` over pixels, or ``"flatten"``, with weights for each pixel of an ``image`` of
    this height and width. Everything else is as in :func:`mlp`.
    """
    if not channels:
        raise ValueError("channels must hold one number per convolution; got none. Try (64, 128).")
    named = [("inputs", inputs), ("outputs", outputs), ("image", image)]
    for name, size in named + [("channels", count) for count in channels]:
        check_whole(name, size)
    check_number("width", width, "a positive factor of the channels", lambda width: width > 0)
    check_choice("pool", pool, ("average", "max"))
    check_choice("readout", readout, ("mean", "flatten"))
    shrink = 2 ** (len(channels) - 1)
    if readout == "flatten" and image % shrink:
        raise ValueError(
            f"image must be divisible by {shrink}, since {len(channels) - 1} poolings halve it; "
            f'got {image}. Give another image size, fewer channels, or readout="mean".'
        )

    law = {"weight_std": weight_std, "parametrization": parametrization, "generator": generator}
    sizes = [inputs, *(max(1, round(width * count)) for count in channels)]
    modules: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        modules += [
            Conv2d(fan_in, fan_out, 3, padding=1, **law),
            make_activation(activation, activation_slope),
            nn.AvgPool2d(2) if pool == "average" else nn.MaxPool2d(2),
        ]
    modules.pop()  # no pooling after the last convolution
    pixels = (image // shrink) ** 2 if readout == "flatten" else 1
    if readout == "mean":
        modules.append(nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(*modules, nn.Flatten(), Linear(sizes[-1] * pixels, outputs, **law))


def make_activation(activation: str | nn.Module, slope: float = 0.01) -> nn.Module:
    """Return a new activation of this name, or a copy of this module."""
    if isinstance(activation, nn.Module):
        return copy.deepcopy(activation)
    if not isinstance(activation, str):
        raise TypeError(
            f"activation must be a module such as torch.nn.Mish(), or a name; got {activation!r}"
        )
    check_choice("activation", activation, ACTIVATIONS)
    if activation == "leaky_relu":
        return nn.LeakyReLU(slope)
    if slope != 0.01:
        raise ValueError(f"activation_slope={slope} belongs to leaky_relu, not to {activation!r}")
    return ACTIVATIONS[activation]()


def _draw_(parameter: Tensor, std: float, generator: torch.Generator | None) -> None:
    law = Normal(0.0, std)
    parameter.copy_(law.sample(parameter.shape, generator, parameter.dtype, parameter.device))
