"""Rules for images: convolutions, average pooling, flattening; what they do is in ``pixels``."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.nn.modules.conv import _ConvNd

from embens.theory.limit.pixels import keep_diagonal, mixes_pixels, pool
from embens.theory.limit.rules import affine, propagate
from embens.theory.limit.state import PAIRS, State, describe

AVERAGES = {
    1: (nn.AvgPool1d, nn.AdaptiveAvgPool1d),
    2: (nn.AvgPool2d, nn.AdaptiveAvgPool2d),
    3: (nn.AvgPool3d, nn.AdaptiveAvgPool3d),
}
"""Average poolings, by the number of pixel axes."""
MAXIMA = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)


def count_poolings(network: nn.Module) -> int:
    """Return how many modules of a network average over pixels."""
    kinds = sum(AVERAGES.values(), ())
    return sum(isinstance(m, kinds) and mixes_pixels(m) for m in network.modules())


@propagate.register(_ConvNd)
def _(module: _ConvNd, state: State) -> State:
    return affine(module, state)


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


def _average(module: nn.Module, state: State, *, axes: int) -> State:
    if len(state.pixels) != axes:
        raise ValueError(
            f"{describe(module, state.path)} expects {axes} pixel axes; got {len(state.pixels)}. "
            "It must come after a convolution and before nn.Flatten()."
        )
    return pool(module, state)


def _refuse(module: nn.Module, state: State) -> State:
    raise TypeError(
        f"{describe(module, state.path)}: the maximum of correlated units is not Gaussian and has "
        "no kernel in closed form, so max pooling has no limit here. Use average pooling: "
        "embens.networks.cnn(pool='average') or nn.AvgPool2d."
    )


for _axes, _kinds in AVERAGES.items():
    for _kind in _kinds:
        propagate.register(_kind)(partial(_average, axes=_axes))
for _kind in MAXIMA:
    propagate.register(_kind)(_refuse)
