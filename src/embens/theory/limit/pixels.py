r"""What layers do to the pixels of a kernel.

With channels going to infinity, a kernel of images is one over pairs of pixels,
:math:`K(x, p; x', p')`, and layers act on it linearly:

.. math::
    \text{convolution } k \times k,\ \text{stride } s: \quad
    \mathcal A[K](p, p') &= \tfrac1{k^2} \textstyle\sum_\delta K(s p + \delta, s p' + \delta),
    \text{ zero outside the image} \\
    \text{average pooling}: \quad \mathcal P[K](P, P') &= \tfrac1{|P||P'|}
    \textstyle\sum_{p \in P,\, p' \in P'} K(p, p') \\
    \text{flatten, then Linear}: \quad \mathcal A[K] &= \tfrac1{|P|} \textstyle\sum_p K(p, p)

A convolution is a sum along each axis in turn. Where no pooling is to come, only pairs of equal
pixels matter (:data:`~embens.theory.limit.state.DIAGONAL`). Any number of pixel axes will do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from embens.theory.limit.state import DIAGONAL, PAIRS, Side, State, describe, diagonal_of

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
            f"and padding_mode='zeros', and not be transposed; got {layer}."
        )
    if state.layout is None or state.flat or state.spatial != len(layer.kernel_size):
        raise ValueError(
            f"{where} expects {len(layer.kernel_size)} pixel axes; got "
            f"{0 if state.layout is None or state.flat else state.spatial}."
        )
    pads = _padding(layer)

    def convolve(kernel: Tensor) -> Tensor:
        for axis in range(state.spatial):
            kernel = shifted_mean(
                kernel,
                _axes(axis, state),
                size=layer.kernel_size[axis],
                stride=layer.stride[axis],
                padding=pads[axis],
                dilation=layer.dilation[axis],
            )
        return kernel

    return convolve


def _axes(axis: int, state: State) -> tuple[int, ...]:
    """Return where a pixel axis is, counted from the end: twice, or once on the diagonal."""
    last = axis - state.spatial
    return (last - state.spatial, last) if state.layout == PAIRS else (last,)


def _padding(layer: _ConvNd) -> list[tuple[int, int]]:
    if isinstance(layer.padding, str):
        extents = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        if layer.padding == "valid":
            return [(0, 0)] * len(extents)
        return [(extent // 2, extent - extent // 2) for extent in extents]
    return [(p, p) for p in layer.padding]


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
    length = kernel.shape[axes[0]]
    reach = length + sum(padding) - dilation * (size - 1)
    count = (reach - 1) // stride + 1
    if reach < 1:
        raise ValueError(
            f"a convolution of {size} pixels (dilation {dilation}) does not fit into {length} with "
            f"padding {padding}; use larger images or fewer poolings and strides."
        )
    shape = list(kernel.shape)
    for axis in axes:
        shape[axis] = count
    result = kernel.new_zeros(shape)
    for offset in range(size):
        shift = offset * dilation - padding[0]  # output p sees input stride * p + shift
        first = max(0, -(shift // stride))  # the first p that sees a pixel
        last = min(count - 1, (length - 1 - shift) // stride)
        if last < first:
            continue
        source, sink = kernel, result
        for axis in axes:
            step = slice(stride * first + shift, stride * last + shift + 1, stride)
            source = source[_at(axis, step, source.dim())]
            sink = sink[_at(axis, slice(first, last + 1), sink.dim())]
        sink += source
    return result.div_(size)


def _at(axis: int, step: slice, dims: int) -> tuple[slice, ...]:
    index = [slice(None)] * dims
    index[axis] = step
    return tuple(index)


def pool(state: State, windows: list[Tensor]) -> State:
    """Return the kernels after average pooling; pairs of pixels are dropped after the last one.

    Args:
        state: kernels before.
        windows: for each pixel axis a matrix ``(pixels, windows)`` of weights.
    """
    if state.layout == DIAGONAL:
        raise ValueError(
            f"the pooling {state.path!r} comes where pairs of pixels were dropped, since no "
            "pooling was found in the network. Use torch's own pooling modules."
        )

    def average(kernel: Tensor) -> Tensor:
        for axis, window in enumerate(windows):
            for where in _axes(axis, state):
                kernel = window_mean(kernel, where, window)
        return kernel

    return after_pooling(state.map(average))


def after_pooling(state: State) -> State:
    """Return the state with one pooling less to come."""
    state = state.replace(poolings=state.poolings - 1)
    return state if state.poolings > 0 or state.layout != PAIRS else keep_diagonal(state)


def window_mean(kernel: Tensor, axis: int, window: Tensor) -> Tensor:
    """Return weighted means over windows of one axis: adjacent ones by a sum, others by a product.

    Example:
        >>> window_mean(torch.arange(6.0), -1, torch.eye(3).repeat_interleave(2, 0) / 2)
        tensor([0.5000, 2.5000, 4.5000])
    """
    pixels, count = window.shape
    size = pixels // count
    adjacent = torch.eye(count).repeat_interleave(size, 0) / size
    if pixels == count * size and torch.equal(window, adjacent.to(window)):
        parts = kernel.unflatten(axis, (count, size)).unbind(axis)
        result = parts[0].clone()
        for part in parts[1:]:
            result += part
        return result.div_(size)
    return (kernel.movedim(axis, -1) @ window.to(kernel)).movedim(-1, axis)


def keep_diagonal(state: State) -> State:
    """Return the state of pairs of equal pixels only."""
    spatial = state.spatial
    return state.map(lambda kernel: diagonal_of(kernel, spatial)).replace(layout=DIAGONAL)


def pixel_sizes(state: State) -> tuple[int, ...]:
    """Return how many pixels there are along each axis."""
    kernel = state.same.nngp
    if state.layout is None or kernel is None:
        return ()
    return tuple(kernel.shape[-state.spatial :])


def open_inputs(layer: nn.Module, state: State) -> State:
    r"""Replace the inputs by their kernel :math:`\frac1{C} \sum_c x_c(p)\, x'_c(p')`."""
    assert state.inputs is not None
    x1, x2 = state.inputs
    spatial = len(layer.kernel_size) if isinstance(layer, _ConvNd) else 0
    channels = x1.shape[-1 - spatial]
    layout = None if not spatial else PAIRS if state.poolings else DIAGONAL
    pixels = x1.shape[x1.dim() - spatial :]
    paired = state.recording is not None
    i, j = ("i", "i") if paired else ("i", "j")
    p, q = {None: ("", ""), PAIRS: ("p", "q"), DIAGONAL: ("p", "p")}[layout]
    out = ("i" if paired else "ij") + "".join(dict.fromkeys(p + q))
    equation = f"...{i}c{p},...{j}c{q}->...{out}"
    if spatial:
        x1, x2 = (x.flatten(-spatial) for x in (x1, x2))
    shape = pixels * 2 if layout == PAIRS else pixels

    def gram(a: Tensor, b: Tensor) -> Tensor:
        kernel = torch.einsum(equation, a, b) / channels
        return kernel.reshape(*kernel.shape[: kernel.dim() - len(p + q if p != q else p)], *shape)

    same = Side(gram(x1, x2), None)
    members = x1.dim() > 2 + bool(spatial)
    cross = same
    if members and state.tracked:
        cross = Side(gram(x1.unsqueeze(1), x2.unsqueeze(0)), None)
    return state.replace(same=same, cross=cross, layout=layout, spatial=spatial, inputs=None)
