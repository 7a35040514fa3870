r"""Maps of pixels: convolutions, average pooling and flattening.

As the number of channels grows, a kernel of images becomes a kernel over pairs of pixels, and
layers act on it linearly. A convolution with :math:`k^2` pixels and stride :math:`s` maps it to

.. math:: \mathcal A[K](p, p') = \frac1{k^2} \sum_\delta K(s p + \delta, s p' + \delta) ,

where :math:`K` is zero outside the image. The mean is computed along one axis after another.
Average pooling acts on the pixels of ``x1`` and on those of ``x2`` as it does on an image. A Linear
layer after ``nn.Flatten`` takes the mean over :math:`K(p, p)`. Where no pooling follows, pairs of
equal pixels are enough. Any number of pixel axes is supported.
"""

import math
from collections.abc import Callable
from functools import cache, singledispatch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from embens.theory.moments import DIAGONAL, MEASURE, PAIRS, Moments, State, describe

PixelMap = Callable[[Tensor], Tensor]

AVERAGES: dict[type[nn.Module], int] = {
    nn.AvgPool1d: 1,
    nn.AvgPool2d: 2,
    nn.AvgPool3d: 3,
    nn.AdaptiveAvgPool1d: 1,
    nn.AdaptiveAvgPool2d: 2,
    nn.AdaptiveAvgPool3d: 3,
}
"""Average poolings and their number of pixel axes."""


@singledispatch
def pixel_map(layer: nn.Module, state: State) -> PixelMap:
    r"""Return the map :math:`\mathcal A` of an affine layer on the pixels of a kernel.

    Args:
        layer: A Linear layer or a convolution.
        state: Kernels before the layer.

    Raises:
        TypeError: If the kind of convolution has no limit here.
        ValueError: If the layer does not fit the pixel axes.
    """
    if state.layout is None:
        return lambda kernel: kernel
    if state.features_last:
        return lambda kernel: kernel  # acts on each token
    if not state.flat and state.spatial == 1:
        raise ValueError(
            f"{describe(layer, state.path)} mixes tokens or pixels with the same weights for all "
            "units, which correlates the units, so that there is no limit. Mix them by attention, "
            "a convolution or average pooling; after pixels put nn.Flatten() before a Linear. "
            + MEASURE
        )
    if not state.flat:
        raise ValueError(
            f"{describe(layer, state.path)} comes after pixels: put nn.Flatten() before it, after "
            "nn.AdaptiveAvgPool2d(1) if pixels are to be averaged."
        )
    axes = tuple(range(-state.spatial, 0))
    return lambda kernel: kernel.mean(axes)


@pixel_map.register
def _(layer: _ConvNd, state: State) -> PixelMap:
    name = describe(layer, state.path)
    is_transposed = isinstance(layer, _ConvTransposeNd)
    if is_transposed or layer.padding_mode != "zeros":
        raise TypeError(
            f"the infinite-width limit of {name} is not known: convolutions must have "
            f"padding_mode='zeros', and not be transposed; got {layer}. {MEASURE}"
        )
    if state.features_last:
        raise ValueError(f"{name} needs channels before pixels; transpose the tokens first.")
    if len(state.pixels) != len(layer.kernel_size):
        raise ValueError(
            f"{name} expects {len(layer.kernel_size)} pixel axes; got {len(state.pixels)}."
        )
    padding = _padding(layer)

    def convolve(kernel: Tensor) -> Tensor:
        for axis in range(-state.spatial, 0):
            axes = (axis - state.spatial, axis) if state.layout == PAIRS else (axis,)
            kernel = shifted_mean(
                kernel,
                axes,
                size=layer.kernel_size[axis],
                stride=layer.stride[axis],
                padding=padding[axis],
                dilation=layer.dilation[axis],
            )
        return kernel

    return convolve


def is_depthwise(layer: nn.Module) -> bool:
    """Return True for a convolution whose groups have one input channel each.

    Other groups count as wide, so grouped convolutions have the kernels of ordinary ones.
    """
    return isinstance(layer, _ConvNd) and layer.groups == layer.in_channels > 1


def _padding(layer: _ConvNd) -> list[tuple[int, int]]:
    """Return the padding before and after each pixel axis."""
    if layer.padding == "valid":
        return [(0, 0)] * len(layer.kernel_size)
    if layer.padding == "same":
        padding = []
        for dilation, size in zip(layer.dilation, layer.kernel_size, strict=True):
            total = dilation * (size - 1)
            padding.append((total // 2, total - total // 2))
        return padding
    return [(size, size) for size in layer.padding]  # type: ignore[misc]


def shifted_mean(
    kernel: Tensor,
    axes: tuple[int, ...],
    *,
    size: int,
    stride: int = 1,
    padding: tuple[int, int] = (0, 0),
    dilation: int = 1,
) -> Tensor:
    r"""Return :math:`\frac1k \sum_\delta K(\dots, s p + \delta, \dots)`, one shift for all axes.

    Args:
        kernel: A kernel with pixel axes.
        axes: Axes to shift together, counted from the end.
        size: Number of pixels of the convolution, :math:`k`.
        stride: Step between output pixels, :math:`s`.
        padding: Number of zeros before and after the pixels.
        dilation: Distance between pixels of the convolution.

    Raises:
        ValueError: If the convolution is larger than the image.

    Example:
        >>> shifted_mean(torch.ones(4), (-1,), size=3, padding=(1, 1))
        tensor([0.6667, 1.0000, 1.0000, 0.6667])
    """
    pads = [0] * (2 * kernel.dim())  # before and after each axis, the last axis first
    for axis in axes:
        pads[-2 * axis - 2 : -2 * axis] = padding
    padded = F.pad(kernel, pads)
    reach = padded.shape[axes[0]] - dilation * (size - 1)
    if reach < 1:
        raise ValueError(
            f"a convolution of {size} pixels (dilation {dilation}) does not fit into "
            f"{kernel.shape[axes[0]]} with padding {padding}; use larger images or fewer poolings "
            "and strides."
        )

    def shift(offset: int) -> Tensor:
        index = [slice(None)] * kernel.dim()
        for axis in axes:
            index[axis] = slice(offset * dilation, offset * dilation + reach, stride)
        return padded[tuple(index)]

    total = shift(0).clone()
    for offset in range(1, size):
        total += shift(offset)
    return total.div_(size)


def pool(module: nn.Module, state: State, *, axes: int) -> State:
    """Return the kernels after average pooling.

    Args:
        module: The pooling module.
        state: Kernels before it.
        axes: Number of pixel axes that it acts on.

    Returns:
        The kernels after it; after the last pooling only those of equal pixels.

    Raises:
        ValueError: If the pixel axes do not fit.
    """
    pixels = state.pixels
    if len(pixels) != axes:
        raise ValueError(
            f"{describe(module, state.path)} expects {axes} pixel axes; got {len(pixels)}. "
            "It must come after a convolution and before nn.Flatten()."
        )
    mixing = mixes_pixels(module)
    if state.layout == DIAGONAL and mixing:
        raise ValueError(
            f"the pooling {state.path!r} comes where pairs of pixels were dropped, since no "
            "pooling was found in the network. Use the pooling modules of torch."
        )

    try:
        state = _map_pixels(module, state)
    except RuntimeError as error:
        raise ValueError(
            f"{describe(module, state.path)} does not fit: only {pixels} pixels are left; use "
            f"larger images or fewer poolings. ({error})"
        ) from error
    if not mixing:
        return state
    state = state.replace(poolings=state.poolings - 1)
    return state if state.poolings > 0 else keep_diagonal(state)


def upsample(module: nn.Upsample, state: State) -> State:
    """Return the kernels after an interpolation between pixels, which is linear.

    Args:
        module: The interpolation.
        state: Kernels before it.

    Raises:
        ValueError: If there are no pixel axes, or covariances of pixels were dropped.
    """
    if not state.pixels or state.features_last:
        raise ValueError(f"{describe(module, state.path)} needs an image; got {state.pixels}.")
    if state.layout == DIAGONAL and module.mode != "nearest":
        raise ValueError(
            f"{describe(module, state.path)} comes where pairs of pixels were dropped, since no "
            "pooling follows in the network. Use mode='nearest'."
        )
    return _map_pixels(module, state)


def _map_pixels(module: nn.Module, state: State) -> State:
    """Apply a linear map of images to the pixels of both inputs."""
    pixels = state.pixels

    def apply(kernel: Tensor) -> Tensor:
        # Axes are (*leading, *pixels of x1, *pixels of x2), or one group for equal pixels. All axes
        # but the last group act as the channels of one image.
        groups = 2 if state.layout == PAIRS else 1
        leading = kernel.shape[: kernel.dim() - groups * len(pixels)]
        if groups == 1:
            mapped = module(kernel.reshape(1, -1, *pixels))
            return mapped.reshape(*leading, *mapped.shape[2:])
        mapped_pixels = pixels
        # Map the pixels of x2, exchange both groups of axes, and map those of x1.
        for _ in range(2):
            kernel = module(kernel.reshape(1, -1, *pixels))
            mapped_pixels = kernel.shape[2:]
            kernel = kernel.reshape(math.prod(leading), -1, math.prod(mapped_pixels)).mT
        return kernel.reshape(*leading, *mapped_pixels, *mapped_pixels)

    return state.map(apply)


def mixes_pixels(module: nn.Module) -> bool:
    """Return True if an average pooling has a window of more than one pixel."""
    sizes = getattr(module, "kernel_size", None)
    if sizes is None:  # adaptive poolings have no window
        return True
    if isinstance(sizes, int):
        return sizes > 1
    return any(size > 1 for size in sizes)


def count_poolings(network: nn.Module) -> int:
    """Return the number of modules of a network that average over pixels."""
    count = 0
    for module in network.modules():
        if isinstance(module, tuple(AVERAGES)) and mixes_pixels(module):
            count += 1
    return count


def keep_diagonal(state: State) -> State:
    """Return the kernels of equal pixels only."""
    return state.map(state.equal_pixels).replace(layout=DIAGONAL)


def kernel_of_inputs(layer: nn.Module, state: State) -> State:
    r"""Replace the inputs by their kernel :math:`\frac1{C} \sum_c x_c(p)\, x'_c(p')`.

    Args:
        layer: The first layer; a convolution has pixel axes.
        state: The state that holds the inputs.

    Returns:
        The state with kernels within a member and, for inputs with a member axis, between members.
    """
    assert state.inputs is not None
    x1, x2 = state.inputs
    spatial = len(layer.kernel_size) if isinstance(layer, _ConvNd) else 0
    if isinstance(layer, _ConvNd) and layer.groups > 1:
        raise TypeError(
            f"{describe(layer, state.path)} has groups of the inputs, which are finitely many. Put "
            f"a layer with groups=1 before it. {MEASURE}"
        )
    member_axes = int(state.facts.input_members)
    features_last = not spatial and x1.dim() > 2 + member_axes
    if features_last:
        spatial = x1.dim() - 2 - member_axes
        x1 = x1.movedim(-1, 1 + member_axes)
        x2 = x2.movedim(-1, 1 + member_axes)
    channels = x1.shape[-1 - spatial]
    pixels = x1.shape[x1.dim() - spatial :]
    layout = None
    if spatial:
        layout = PAIRS if state.poolings else DIAGONAL
        x1, x2 = x1.flatten(-spatial), x2.flatten(-spatial)
    equation = _gram_equation(layout, paired=state.facts.recording is not None)

    def gram(first: Tensor, second: Tensor) -> Moments:
        kernel = torch.einsum(equation, first, second) / channels
        if layout is None:
            return Moments(kernel)
        groups = 2 if layout == PAIRS else 1  # of pixel axes
        leading = kernel.shape[: kernel.dim() - groups]
        return Moments(kernel.reshape(*leading, *pixels * groups))

    cross = None
    if state.facts.input_members and state.facts.tracked:
        cross = cache(lambda: gram(x1.unsqueeze(1), x2.unsqueeze(0)))
    return state.replace(
        same=gram(x1, x2),
        cross=cross,
        layout=layout,
        spatial=spatial,
        features_last=features_last,
        inputs=None,
    )


def _gram_equation(layout: str | None, *, paired: bool) -> str:
    """Return the equation of ``torch.einsum`` for the kernel of inputs.

    Axes: inputs i and j, channels c, pixels p and q. ``paired``: every input with itself only.
    """
    i, j = ("i", "i") if paired else ("i", "j")
    inputs = "i" if paired else "ij"
    if layout is None:
        return f"...{i}c,...{j}c->...{inputs}"
    if layout == DIAGONAL:
        return f"...{i}cp,...{j}cp->...{inputs}p"
    return f"...{i}cp,...{j}cq->...{inputs}pq"
