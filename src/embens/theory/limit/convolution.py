"""Rules for images: convolutions, average pooling, flattening; what they do is in ``pixels``."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import adaptive_avg_pool1d, avg_pool1d
from torch.nn.modules.conv import _ConvNd

from embens.theory.limit.pixels import after_pooling, keep_diagonal, pixel_sizes, pool
from embens.theory.limit.rules import affine, propagate
from embens.theory.limit.state import PAIRS, State, describe

AVERAGES = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
ADAPTIVE = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
MAXIMA = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)


def count_poolings(network: nn.Module) -> int:
    """Return how many modules of a network average over pixels."""
    return sum(
        isinstance(m, ADAPTIVE)
        or (isinstance(m, AVERAGES) and any(k > 1 for k in _each(m.kernel_size, 1)))
        for m in network.modules()
    )


@propagate.register(_ConvNd)
def _(module: _ConvNd, state: State) -> State:
    return affine(module, state)


@propagate.register(nn.AvgPool1d)
@propagate.register(nn.AvgPool2d)
@propagate.register(nn.AvgPool3d)
def _(module: nn.AvgPool2d, state: State) -> State:
    axes = _pixel_axes(module, state)
    sizes, strides = _each(module.kernel_size, axes), _each(module.stride, axes)
    paddings, pixels = _each(module.padding, axes), pixel_sizes(state)
    if getattr(module, "divisor_override", None) is not None:
        raise TypeError(
            f"{describe(module, state.path)}: average pooling with divisor_override has no rule."
        )
    if any(k > n + 2 * p for k, n, p in zip(sizes, pixels, paddings, strict=True)):
        raise ValueError(
            f"{describe(module, state.path)} pools windows of {sizes} pixels, and only "
            f"{pixels} are left; use larger images or fewer poolings."
        )
    if all(size == 1 for size in sizes):
        if any(stride != 1 for stride in strides) or any(paddings):
            raise TypeError(f"{describe(module, state.path)} averages nothing; leave it out.")
        return state
    edge = {"ceil_mode": module.ceil_mode, "count_include_pad": module.count_include_pad}
    windows = [
        avg_pool1d(torch.eye(n)[None], k, s, p, **edge)[0]
        for n, k, s, p in zip(pixels, sizes, strides, paddings, strict=True)
    ]
    return pool(state, windows)


@propagate.register(nn.AdaptiveAvgPool1d)
@propagate.register(nn.AdaptiveAvgPool2d)
@propagate.register(nn.AdaptiveAvgPool3d)
def _(module: nn.AdaptiveAvgPool2d, state: State) -> State:
    axes = _pixel_axes(module, state)
    pixels = pixel_sizes(state)
    wanted = zip(_each(module.output_size, axes), pixels, strict=True)
    counts = [n if w is None else w for w, n in wanted]
    if list(pixels) == counts:
        return after_pooling(state)  # it was counted, and averages nothing
    sizes = zip(pixels, counts, strict=True)
    return pool(state, [adaptive_avg_pool1d(torch.eye(n)[None], c)[0] for n, c in sizes])


@propagate.register(nn.Flatten)
def _(module: nn.Flatten, state: State) -> State:
    if module.start_dim != 1 or module.end_dim != -1:
        raise TypeError(
            f"{describe(module, state.path)}: only Flatten(1, -1) has a rule; got {module}."
        )
    if state.layout is None:
        return state
    state = keep_diagonal(state) if state.layout == PAIRS else state
    return state.replace(flat=True)


def _refuse(module: nn.Module, state: State) -> State:
    raise TypeError(
        f"{describe(module, state.path)}: the maximum of correlated units is not Gaussian and has "
        "no kernel in closed form, so max pooling has no limit here. Use average pooling: "
        "embens.networks.cnn(pool='average') or nn.AvgPool2d."
    )


for _kind in MAXIMA:
    propagate.register(_kind)(_refuse)


def _pixel_axes(module: nn.Module, state: State) -> int:
    axes = int(type(module).__name__[-2])  # AvgPool2d
    if state.layout is None or state.flat or state.spatial != axes:
        got = 0 if state.layout is None or state.flat else state.spatial
        raise ValueError(
            f"{describe(module, state.path)} expects {axes} pixel axes; got {got}. It must come "
            "after a convolution and before nn.Flatten()."
        )
    return axes


def _each(value, axes: int) -> list:
    return [value] * axes if isinstance(value, int) or value is None else list(value)
