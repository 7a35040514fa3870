r"""Per-sample gradients of single layers, in factored form.

The output of most layers is linear in their parameters. The gradient of sample :math:`i` then
follows from the input :math:`h` of the layer and the gradient :math:`c = \partial f/\partial z` of
its output, which one backward pass gives for all samples at once:

.. math:: \nabla_W f(x_i) = \sum_p c_{ip} \otimes h_{ip}

Here :math:`p` runs over the positions (pixels, time steps, repeated uses) at which the layer is
applied. For a convolution :math:`h` is a patch, for an embedding a one-hot vector.

Member :math:`a` has the weights :math:`v_a u_a^\top \circ W`. If its layer has the input :math:`x`
and the output gradient :math:`\delta`, the factors of the *shared* weight are :math:`h = u_a \circ
x` and :math:`c = v_a \circ \delta`. With the member's output :math:`z` and the gradient
:math:`\delta_x` of its input, the gradients of the modulations are :math:`\sum_p z_p \circ \delta_p
/ v_a` and :math:`\sum_p x_p \circ \delta_{x,p} / u_a`. They are exact to rounding unless a value is
zero; those sites have no rule here.

Shapes: layer inputs ``(row, ...)``, output gradients ``(class, row, ...)``. There may be several
rows per sample, as long as the samples come first. Parameters other than weights are short, so
their gradients are returned as rows ``(batch, class, entry)``.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from embens.networks import Parametrized

CHANNEL_NORMS = (_NormBase, nn.GroupNorm)
FEATURE_NORMS = (nn.LayerNorm, nn.RMSNorm)


def is_norm(layer: nn.Module) -> bool:
    """Return True for torch's norm layers, which have a scale and a shift."""
    if not isinstance(layer, CHANNEL_NORMS + FEATURE_NORMS):
        return False
    # A subclass of the user's may compute something else.
    return type(layer).__module__.startswith("torch.nn.")


def has_rule(layer: nn.Module) -> bool:
    """Return True if the gradients of a layer's parameters factor.

    A network may also use the parameters elsewhere, so the result has to be tested on the network.
    """
    if is_norm(layer):
        return True
    if isinstance(layer, nn.Embedding):
        return not layer.sparse and not layer.scale_grad_by_freq
    if isinstance(layer, _ConvNd):
        return layer.groups == 1 and not layer.transposed
    return isinstance(layer, nn.Linear)


def normalize(layer: nn.Module, value: Tensor) -> Tensor:
    """Return the output of a norm layer before its scale and shift."""
    plain = {}
    for name, parameter in layer.named_parameters(recurse=False):
        plain[name] = torch.full_like(parameter, float(name == "weight"))
    return torch.func.functional_call(layer, plain, (value,))


def parameter_scale(layer: nn.Module, name: str) -> float:
    """Return the factor of a parameter in the forward pass; not 1 in the NTK parametrization."""
    if not isinstance(layer, Parametrized) or layer.parametrization != "ntk":
        return 1.0
    if name == "bias":
        return layer.bias_std
    return layer.weight_std / math.sqrt(layer.fan_in)


def spatial_axes(layer: nn.Module) -> int:
    """Return the number of axes after the channels in the layer's input and output."""
    if isinstance(layer, _ConvNd):
        return len(layer.kernel_size)
    return 0


def scale_channels(layer: nn.Module, values: Tensor, scale: Tensor | None) -> Tensor:
    """Multiply the channels of a layer's input or output by a vector ``(channel,)``."""
    if scale is None:
        return values
    return values * scale.reshape(-1, *(1,) * spatial_axes(layer))


def by_position(layer: nn.Module, gradient: Tensor, batch: int) -> Tensor:
    """Return a gradient ``(class, row, ...)`` as ``(batch, class, position, channel)``."""
    channels_last = gradient.movedim(-1 - spatial_axes(layer), -1)
    channels = channels_last.shape[-1]
    return channels_last.reshape(len(gradient), batch, -1, channels).transpose(0, 1)


def channel_rows(layer: nn.Module, gradient: Tensor, batch: int) -> Tensor:
    """Sum a gradient ``(class, row, ...)`` over positions to ``(batch, class, channel)``."""
    return by_position(layer, gradient, batch).sum(2)


def norm_rows(layer: Any, gradient: Tensor, batch: int) -> Tensor:
    """Sum a gradient ``(class, row, ...)`` to the entries of a norm layer's scale or shift."""
    if isinstance(layer, CHANNEL_NORMS):
        gradient = gradient.movedim(2, -1)
        entries = gradient.shape[-1]
    else:
        entries = math.prod(layer.normalized_shape)
    by_sample = gradient.reshape(len(gradient), batch, -1, entries)
    return by_sample.sum(2).transpose(0, 1)


@dataclass(frozen=True)
class WeightUse:
    """One use of a weight in a member's pass, with both factors of its gradients.

    Attributes:
        layer: The layer that uses the weight.
        value: The layer's input, ``(row, ...)``; the tokens of an Embedding.
        gradient: The gradient of the layer's output, ``(class, row, ...)``.
        post: The member's modulation of the input, ``(channel,)``, or None.
        pre: The member's modulation of the output, ``(channel,)``, or None.
    """

    layer: nn.Module
    value: Tensor
    gradient: Tensor
    post: Tensor | None = None
    pre: Tensor | None = None

    @property
    def channels(self) -> int:
        """The number of channels of the layer's output."""
        return self.gradient.shape[-1 - spatial_axes(self.layer)]

    @property
    def features(self) -> int:
        """The number of features of the layer's input factor."""
        weight: Any = self.layer.weight
        return weight.numel() // self.channels

    def positions(self, batch: int) -> int:
        """Return the number of positions per sample at which the layer is applied."""
        return self.gradient[0].numel() // (batch * self.channels)

    def inputs(self, batch: int) -> Tensor:
        """Return :math:`h`, ``(batch, position, feature)``."""
        layer = self.layer
        if isinstance(layer, nn.Embedding):
            return one_hot(layer, self.value.reshape(batch, -1))
        value = scale_channels(layer, self.value, self.post)
        if isinstance(layer, _ConvNd):
            if value.dim() == len(layer.kernel_size) + 1:  # one image without a batch axis
                value = value.unsqueeze(0)
            value = patches(value, layer)
        return value.reshape(batch, -1, value.shape[-1])

    def outputs(self, batch: int) -> Tensor:
        """Return :math:`c`, ``(batch, class, position, channel)``."""
        gradient = by_position(self.layer, self.gradient, batch)
        if self.pre is not None:
            gradient = gradient * self.pre
        return gradient


def one_hot(layer: nn.Embedding, tokens: Tensor) -> Tensor:
    """Return tokens ``(batch, position)`` as one-hot vectors, zero for the padding token."""
    vectors = F.one_hot(tokens.long(), layer.num_embeddings).to(layer.weight.dtype)
    if layer.padding_idx is None:
        return vectors
    return vectors * (tokens != layer.padding_idx).unsqueeze(-1)


def patches(images: Tensor, layer: _ConvNd) -> Tensor:
    """Return the patches that a convolution sees, ``(image, position, feature)``.

    Channels are the last axis of a feature, so images in the memory format ``channels_last`` are
    copied in long pieces.
    """
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = F.pad(images, layer._reversed_padding_repeated_twice, mode=mode)
    windows = padded.movedim(1, -1)
    axes = len(layer.kernel_size)
    for i in range(axes):
        reach = (layer.kernel_size[i] - 1) * layer.dilation[i] + 1
        windows = windows.unfold(1 + i, reach, layer.stride[i])
        windows = windows[..., :: layer.dilation[i]]
    windows = windows.movedim(1 + axes, -1)
    positions = windows.shape[1 : 1 + axes].numel()
    return windows.reshape(len(images), positions, -1)
