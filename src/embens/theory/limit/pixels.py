r"""What layers do to the pixels of a kernel.

With channels going to infinity, a kernel of images is one over pairs of pixels, on which layers act
linearly. A convolution of :math:`k^2` pixels and stride :math:`s` makes it
:math:`\tfrac1{k^2} \sum_\delta K(s p + \delta, s p' + \delta)`, zero outside the image, a sum along
each axis in turn; average pooling acts on the pixels of ``x1`` and on those of ``x2`` as it does on
an image; flatten, then Linear, is the mean over :math:`K(p, p)`. Where no pooling is to come, only
pairs of equal pixels matter. Any number of pixel axes will do.
"""

import math
from collections.abc import Callable
from functools import cache, singledispatch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from embens.theory.limit.state import DIAGONAL, MEASURE, PAIRS, Moments, State, describe

PixelMap = Callable[[Tensor], Tensor]


@singledispatch
def pixel_map(layer: nn.Module, state: State) -> PixelMap:
    """Return what an affine layer does to the pixels of a kernel; here for a Linear."""
    if state.layout is None:
        return lambda kernel: kernel
    if not state.flat:
        raise ValueError(
            f"{describe(layer, state.path)} comes after pixels: put nn.Flatten() before it, after "
            "nn.AdaptiveAvgPool2d(1) if pixels are to be averaged."
        )
    axes = tuple(range(-state.spatial, 0))
    return lambda kernel: kernel.mean(axes)


@pixel_map.register
def _(layer: _ConvNd, state: State) -> PixelMap:
    where = describe(layer, state.path)
    if isinstance(layer, _ConvTransposeNd) or layer.groups != 1 or layer.padding_mode != "zeros":
        raise TypeError(
            f"the infinite-width limit of {where} is not known: convolutions must have groups=1 "
            f"and padding_mode='zeros', and not be transposed; got {layer}. {MEASURE}"
        )
    if len(state.pixels) != len(layer.kernel_size):
        raise ValueError(
            f"{where} expects {len(layer.kernel_size)} pixel axes; got {len(state.pixels)}."
        )
    extents = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    named = {"valid": [(0, 0)] * len(extents), "same": [(e // 2, e - e // 2) for e in extents]}
    given = layer.padding
    pads = named[given] if isinstance(given, str) else [(p, p) for p in given]

    def convolve(kernel: Tensor) -> Tensor:
        for axis in range(-state.spatial, 0):
            axes = (axis - state.spatial, axis) if state.layout == PAIRS else (axis,)
            kernel = shifted_mean(
                kernel,
                axes,
                size=layer.kernel_size[axis],
                stride=layer.stride[axis],
                padding=pads[axis],
                dilation=layer.dilation[axis],
            )
        return kernel

    return convolve


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

    Example:
        >>> shifted_mean(torch.ones(4), (-1,), size=3, padding=(1, 1))
        tensor([0.6667, 1.0000, 1.0000, 0.6667])
    """
    pads = [0] * (2 * kernel.dim())  # before and after each axis, the last one first
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

    def shifted(offset: int) -> Tensor:
        index = [slice(None)] * kernel.dim()
        for axis in axes:
            index[axis] = slice(offset * dilation, offset * dilation + reach, stride)
        return padded[tuple(index)]

    result = shifted(0).clone()
    for offset in range(1, size):
        result += shifted(offset)
    return result.div_(size)


def pool(module: nn.Module, state: State, *, axes: int) -> State:
    """Return the kernels after average pooling; pairs of pixels are dropped after the last one."""
    pixels, mixes = state.pixels, mixes_pixels(module)
    if len(pixels) != axes:
        raise ValueError(
            f"{describe(module, state.path)} expects {axes} pixel axes; got {len(pixels)}. "
            "It must come after a convolution and before nn.Flatten()."
        )
    if state.layout == DIAGONAL and mixes:
        raise ValueError(
            f"the pooling {state.path!r} comes where pairs of pixels were dropped, since no "
            "pooling was found in the network. Use torch's own pooling modules."
        )

    def average(kernel: Tensor) -> Tensor:
        """Pool the last pixels; of pairs, these are made the first, and then the others pooled."""
        sides = 2 if state.layout == PAIRS else 1
        lead, after = kernel.shape[: kernel.dim() - sides * len(pixels)], kernel.shape
        for _ in range(sides):
            kernel = module(kernel.reshape(-1, *pixels))
            after = kernel.shape[1:]
            if sides == 2:
                kernel = kernel.reshape(math.prod(lead), -1, after.numel()).mT
        return kernel.reshape(*lead, *[*after] * sides)

    try:
        state = state.map(average)
    except RuntimeError as error:
        raise ValueError(
            f"{describe(module, state.path)} does not fit: only {pixels} pixels are left; use "
            f"larger images or fewer poolings. ({error})"
        ) from error
    if not mixes:
        return state
    state = state.replace(poolings=state.poolings - 1)
    return state if state.poolings > 0 else keep_diagonal(state)


def mixes_pixels(module: nn.Module) -> bool:
    """Return whether an average pooling averages; a window of one pixel does not."""
    sizes = getattr(module, "kernel_size", None)  # adaptive poolings have none
    return sizes is None or any(k > 1 for k in ((sizes,) if isinstance(sizes, int) else sizes))


def keep_diagonal(state: State) -> State:
    """Return the state of pairs of equal pixels only."""
    return state.map(state.equal_pixels).replace(layout=DIAGONAL)


def open_inputs(layer: nn.Module, state: State) -> State:
    r"""Replace the inputs by their kernel :math:`\frac1{C} \sum_c x_c(p)\, x'_c(p')`."""
    assert state.inputs is not None
    x1, x2 = state.inputs
    spatial = len(layer.kernel_size) if isinstance(layer, _ConvNd) else 0
    channels, pixels = x1.shape[-1 - spatial], x1.shape[x1.dim() - spatial :]
    layout = None if not spatial else PAIRS if state.poolings else DIAGONAL
    i, j = ("i", "i") if state.recording is not None else ("i", "j")
    p, q = {None: ("", ""), PAIRS: ("p", "q"), DIAGONAL: ("p", "p")}[layout]
    out = "".join(dict.fromkeys(i + j + p + q))
    if spatial:
        x1, x2 = (x.flatten(-spatial) for x in (x1, x2))

    def gram(a: Tensor, b: Tensor) -> Moments:
        kernel = torch.einsum(f"...{i}c{p},...{j}c{q}->...{out}", a, b) / channels
        lead = kernel.shape[: kernel.dim() - len(set(p + q))]
        return Moments(kernel.reshape(*lead, *pixels * len(set(p + q))))

    cross = None
    if state.drawn and state.tracked:
        cross = cache(lambda: gram(x1.unsqueeze(1), x2.unsqueeze(0)))
    return state.replace(
        same=gram(x1, x2), cross=cross, layout=layout, spatial=spatial, inputs=None
    )
