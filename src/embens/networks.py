r"""Reference networks with layers that know their initialisation.

The infinite-width limit of a network depends on the distribution of its weights. The layers here
store it as ``weight_std`` (:math:`\sigma_w`), ``bias_std`` (:math:`\sigma_b`) and
``parametrization``. With :math:`N` inputs per output (``fan_in``), a layer computes

.. math::
    y = \frac{\sigma_w}{\sqrt{N}} W x + \sigma_b b, \qquad W, b \sim N(0, 1) .

- ``"ntk"``: :math:`W` and :math:`b` are the parameters; the scales belong to the forward pass.
- ``"standard"``: the scales are part of the initialisation of the parameters. The function at
  initialisation is the same, but gradients differ.
- ``"xavier"``: as ``"standard"``, with :math:`1 / N` replaced by :math:`2 / (N + N')`, where
  :math:`N'` is the number of outputs per input. This is the initialisation of the paper.
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
DEFAULT_SLOPE = 0.01  # of leaky ReLU


class Parametrized(nn.Module):
    r"""Base of layers that know the distribution of their parameters.

    It is combined with a layer of torch, as in :class:`Linear`.

    Args:
        *sizes: Positional arguments of the torch layer.
        weight_std: The scale :math:`\sigma_w` of the weights.
        bias_std: The scale :math:`\sigma_b` of the biases; 0: the layer has no bias.
        parametrization: "ntk", "standard" or "xavier".
        generator: Draws the parameters; None: the global generator.
        **options: Keyword arguments of the torch layer, apart from ``bias``.

    Attributes:
        fan_in: Number of inputs per output.

    Example:
        >>> layer = Linear(4, 3, weight_std=2.0, bias_std=0.1)
        >>> isinstance(layer, Parametrized), layer.fan_in
        (True, 4)
    """

    weight: Tensor
    bias: Any
    linear_in_parameters = True  # the output is linear in (weight, bias) together

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
        """Resample the parameters from their distribution.

        Args:
            generator: Source of randomness; None: the global generator.

        Example:
            >>> layer = Linear(4, 3)
            >>> layer.reset_parameters(torch.Generator().manual_seed(0))
        """
        if not hasattr(self, "parametrization"):
            # The constructor of the torch layer calls this method too early; ours calls it again.
            return
        if self.parametrization == "ntk":
            weight_std = 1.0
            bias_std = 1.0
        elif self.parametrization == "standard":
            weight_std = self.weight_std / math.sqrt(self.fan_in)
            bias_std = self.bias_std
        else:
            fan_out = self.weight.numel() // self.weight.shape[1]
            weight_std = self.weight_std * math.sqrt(2 / (self.fan_in + fan_out))
            bias_std = self.bias_std
        _resample_(self.weight, weight_std, generator)
        if self.bias is not None:
            _resample_(self.bias, bias_std, generator)

    def effective_parameters(
        self,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the weight and bias of a plain torch layer with the same outputs.

        Args:
            weight: A weight to use instead of the layer's.
            bias: A bias to use instead of the layer's.

        Returns:
            Weight and bias, each with the shape of the layer's; the bias is None if there is none.

        Example:
            >>> layer = Linear(4, 3, weight_std=2.0)
            >>> weight, bias = layer.effective_parameters()
            >>> torch.equal(weight, layer.weight)  # 2 / √4 = 1
            True
        """
        if weight is None:
            weight = self.weight
        if bias is None:
            bias = self.bias
        if self.parametrization == "ntk":
            weight = weight * (self.weight_std / math.sqrt(self.fan_in))
            if bias is not None:
                bias = bias * self.bias_std
        return weight, bias

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, parametrization={self.parametrization!r}, "
            f"weight_std={self.weight_std:g}, bias_std={self.bias_std:g}"
        )


class Linear(Parametrized, nn.Linear):
    """Linear layer ``(batch, in) -> (batch, out)`` that knows its initialisation.

    Args:
        *sizes: ``in_features`` and ``out_features``.
        **options: As for :class:`Parametrized`.

    Example:
        >>> Linear(4, 3)(torch.zeros(2, 4)).shape
        torch.Size([2, 3])
    """

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.effective_parameters()
        return F.linear(input, weight, bias)


class Conv2d(Parametrized, nn.Conv2d):
    """Convolution ``(batch, in, height, width) -> (batch, out, …)`` that knows its initialisation.

    Args:
        *sizes: ``in_channels``, ``out_channels`` and ``kernel_size``.
        **options: As for :class:`Parametrized`, with the options of torch's layer such as
            ``padding``.

    Example:
        >>> Conv2d(3, 8, 3, padding=1)(torch.zeros(2, 3, 5, 5)).shape
        torch.Size([2, 8, 5, 5])
    """

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.effective_parameters()
        return self._conv_forward(input, weight, bias)


class Abs(nn.Module):
    """Absolute value, elementwise ``(…) -> (…)``.

    Example:
        >>> Abs()(torch.tensor([-2.0]))
        tensor([2.])
    """

    def forward(self, input: Tensor) -> Tensor:
        return input.abs()


class Erf(nn.Module):
    """Error function, elementwise ``(…) -> (…)``.

    Example:
        >>> Erf()(torch.zeros(1))
        tensor([0.])
    """

    def forward(self, input: Tensor) -> Tensor:
        return input.erf()


class Sin(nn.Module):
    """Sine, elementwise ``(…) -> (…)``.

    Example:
        >>> Sin()(torch.zeros(1))
        tensor([0.])
    """

    def forward(self, input: Tensor) -> Tensor:
        return input.sin()


class Cos(nn.Module):
    """Cosine, elementwise ``(…) -> (…)``.

    Example:
        >>> Cos()(torch.zeros(1))
        tensor([1.])
    """

    def forward(self, input: Tensor) -> Tensor:
        return input.cos()


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
    activation_slope: float = DEFAULT_SLOPE,
    weight_std: float = 1.0,
    bias_std: float = 0.0,
    parametrization: str = "ntk",
    generator: torch.Generator | None = None,
) -> nn.Sequential:
    """Build a multilayer perceptron.

    Args:
        inputs: Number of input features.
        width: Number of units of each hidden layer.
        depth: Number of hidden layers.
        outputs: Number of outputs.
        activation: A name in ``ACTIVATIONS``, or a module, which is copied for each layer.
        activation_slope: Slope of "leaky_relu" for negative inputs.
        weight_std: Scale of the weights; the square root of 2 preserves the signal under ReLU.
        bias_std: Scale of the biases; 0: no biases.
        parametrization: "ntk", "standard" or "xavier".
        generator: Draws the parameters; None: the global generator.

    Returns:
        A network ``(batch, inputs) -> (batch, outputs)``.

    Example:
        >>> net = mlp(inputs=4, width=16, depth=2, outputs=3)
        >>> net(torch.zeros(5, 4)).shape
        torch.Size([5, 3])
    """
    check_whole("inputs", inputs)
    check_whole("width", width)
    check_whole("depth", depth)
    check_whole("outputs", outputs)

    sizes = [inputs, *[width] * depth, outputs]
    modules: list[nn.Module] = []
    for in_features, out_features in pairwise(sizes):
        if modules:
            modules.append(make_activation(activation, activation_slope))
        layer = Linear(
            in_features,
            out_features,
            weight_std=weight_std,
            bias_std=bias_std,
            parametrization=parametrization,
            generator=generator,
        )
        modules.append(layer)
    return nn.Sequential(*modules)


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
    activation_slope: float = DEFAULT_SLOPE,
    weight_std: float = 1.0,
    parametrization: str = "xavier",
    generator: torch.Generator | None = None,
) -> nn.Sequential:
    """Build the convolutional network of the paper.

    It has 3×3 convolutions with padding 1, 2×2 pooling between them, and no biases.

    Args:
        channels: Number of channels of each convolution.
        width: Factor of all ``channels``.
        inputs: Number of channels of the images.
        outputs: Number of outputs.
        image: Height and width of the images; only ``readout="flatten"`` depends on it.
        pool: "average" or "max".
        readout: "mean" over pixels, or "flatten", with separate weights for each pixel.
        activation: A name in ``ACTIVATIONS``, or a module, which is copied for each layer.
        activation_slope: Slope of "leaky_relu" for negative inputs.
        weight_std: Scale of the weights.
        parametrization: "ntk", "standard" or "xavier".
        generator: Draws the parameters; None: the global generator.

    Returns:
        A network ``(batch, inputs, image, image) -> (batch, outputs)``.

    Example:
        >>> net = cnn((4, 8), outputs=10)
        >>> net(torch.zeros(5, 3, 32, 32)).shape
        torch.Size([5, 10])
    """
    _check_channels(channels)
    check_number("width", width, "a positive factor of the channels", lambda width: width > 0)
    check_whole("inputs", inputs)
    check_whole("outputs", outputs)
    check_whole("image", image)
    check_choice("pool", pool, ("average", "max"))
    check_choice("readout", readout, ("mean", "flatten"))

    distribution = {
        "weight_std": weight_std,
        "parametrization": parametrization,
        "generator": generator,
    }
    modules: list[nn.Module] = []
    in_channels = inputs
    for count in channels:
        if modules:
            modules.append(_make_pooling(pool))
        out_channels = max(1, round(width * count))
        modules.append(Conv2d(in_channels, out_channels, 3, padding=1, **distribution))
        modules.append(make_activation(activation, activation_slope))
        in_channels = out_channels

    features = in_channels
    if readout == "mean":
        modules.append(nn.AdaptiveAvgPool2d(1))
    else:
        features *= _pixels_after_pooling(image, len(channels) - 1)
    modules.append(nn.Flatten())
    modules.append(Linear(features, outputs, **distribution))
    return nn.Sequential(*modules)


def _check_channels(channels: Sequence[int]) -> None:
    """Raise unless there is at least one convolution and all have a positive size."""
    if not channels:
        raise ValueError(
            "channels must contain one number per convolution, got none. Try (64, 128)."
        )
    for count in channels:
        check_whole("channels", count)


def _make_pooling(pool: str) -> nn.Module:
    if pool == "average":
        return nn.AvgPool2d(2)
    return nn.MaxPool2d(2)


def make_activation(activation: str | nn.Module, slope: float = DEFAULT_SLOPE) -> nn.Module:
    """Create an activation.

    Args:
        activation: A name in ``ACTIVATIONS``, or a module to copy.
        slope: Slope of "leaky_relu" for negative inputs.

    Returns:
        A new module.

    Example:
        >>> make_activation("leaky_relu", slope=0.2)
        LeakyReLU(negative_slope=0.2)
    """
    if isinstance(activation, nn.Module):
        return copy.deepcopy(activation)
    if not isinstance(activation, str):
        raise TypeError(
            f"activation must be a name or a module such as torch.nn.Mish(), got {activation!r}."
        )
    check_choice("activation", activation, ACTIVATIONS)
    if activation == "leaky_relu":
        return nn.LeakyReLU(slope)
    if slope != DEFAULT_SLOPE:
        raise ValueError(
            f"activation_slope={slope} applies to 'leaky_relu' only, got activation={activation!r}."
        )
    return ACTIVATIONS[activation]()


def _pixels_after_pooling(image: int, poolings: int) -> int:
    """Return the number of pixels of a square image after 2×2 poolings."""
    divisor = 2**poolings
    if image % divisor != 0:
        raise ValueError(
            f"image must be divisible by {divisor}, since {poolings} poolings halve it, got "
            f'{image}. Use another image size, fewer channels, or readout="mean".'
        )
    return (image // divisor) ** 2


def _resample_(parameter: Tensor, std: float, generator: torch.Generator | None) -> None:
    """Overwrite a parameter with values of a centred normal distribution."""
    values = Normal(0.0, std).sample(
        parameter.shape,
        generator,
        dtype=parameter.dtype,
        device=parameter.device,
    )
    parameter.copy_(values)
