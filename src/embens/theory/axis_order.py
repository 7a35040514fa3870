"""Orders of axes: rules of reshape, transpose, selection and mean in a traced forward.

The kernels of a :class:`~embens.theory.State` do not depend on the order of the axes of a value.
So these rules change the description of the order only: images ``(n, channel, pixel…)``, tokens
``(n, token, feature)``, and heads of attention ``(n, token, head, feature)`` or
``(n, head, token, feature)``. A rule returns None where it does not apply.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embens.theory.moments import PAIRS, State
from embens.theory.pixels import keep_diagonal
from embens.theory.streams import Part, Stream

FEATURES = "features"
HEADS = "heads"


def axis_names(state: State) -> tuple[str, ...]:
    """Return the names of the axes of a value after the batch axis.

    Args:
        state: Kernels of the value.

    Returns:
        ``"features"``, ``"heads"`` and a name for each pixel axis, in the order of the axes.
    """
    if state.flat:
        return (FEATURES,)
    pixels = tuple(f"pixel {axis}" for axis in range(state.spatial))
    names = (*pixels, FEATURES) if state.features_last else (FEATURES, *pixels)
    if not state.heads:
        return names
    return (HEADS, *names) if state.heads_first else (*pixels, HEADS, FEATURES)


def with_axes(state: State, names: tuple[str, ...]) -> State | None:
    """Return the state for another order of the same axes, or None if it cannot be described."""
    changed = state.replace(
        features_last=names[-1] == FEATURES,
        heads_first=bool(state.heads) and names[0] == HEADS,
    )
    return changed if axis_names(changed) == names else None


def permute(stream: Stream, order: tuple[int, ...]) -> Stream | None:
    """Return the stream with permuted axes.

    Args:
        stream: The stream.
        order: Old axes in their new order, as for ``torch.permute``; the batch axis stays first.
    """
    names = ("batch", *axis_names(stream.parts[0].state))
    if sorted(order) != list(range(len(names))) or order[0] != 0:
        return None
    permuted = tuple(names[axis] for axis in order[1:])
    if with_axes(stream.parts[0].state, permuted) is None:
        return None
    return stream.map(lambda state: with_axes(state, permuted) or state)


def reshape(stream: Stream, before: torch.Size, after: torch.Size) -> Stream | None:
    """Return the stream in another shape: flattened, with joined pixels, or with heads.

    Args:
        stream: The stream.
        before: Its shape for one input.
        after: The new shape for one input.
    """
    if before == after:
        return stream
    state = stream.parts[0].state
    tokens = before[:2]
    if state.heads:
        is_joined = not state.heads_first and after == (*tokens, before[-2:].numel())
        return _join_heads(stream) if is_joined and state.features_last else None
    if len(after) == 2:
        return stream.map(_flatten)
    is_tokens = state.spatial == 1 and state.features_last and not state.flat
    if is_tokens and len(after) == 4 and after[:2] == tokens and after[2:].numel() == before[2]:
        return _split_heads(stream, after[2])
    if len(after) == 3 and after[:2] == tokens and not state.features_last:
        return stream.map(_join_pixels)
    return None


def _split_heads(stream: Stream, heads: int) -> Stream | None:
    if len(stream.parts) != 1 or stream.parts[0].width % heads:
        return None
    part = stream.parts[0]
    state = part.state.replace(heads=heads, heads_first=False)
    return Stream((Part(state, part.width // heads),), stream.name)


def _join_heads(stream: Stream) -> Stream:
    part = stream.parts[0]
    state = part.state.replace(heads=0)
    return Stream((Part(state, part.width * part.state.heads),), stream.name)


def _flatten(state: State) -> State:
    if state.layout is None or state.flat:
        return state
    return keep_diagonal(state).replace(flat=True, features_last=False)


def _join_pixels(state: State) -> State:
    """Return the kernels with one axis for all pixels of an input."""
    if state.flat or not state.spatial:
        raise ValueError(f"only pixels of images can be joined; got pixels {state.pixels}.")
    groups = 2 if state.layout == PAIRS else 1
    pixels = torch.Size(state.pixels).numel()

    def join(kernel: Tensor) -> Tensor:
        leading = kernel.shape[: kernel.dim() - groups * state.spatial]
        return kernel.reshape(*leading, *(pixels,) * groups)

    return state.map(join).replace(spatial=1)


def select_token(stream: Stream, token: int) -> Stream | None:
    """Return one token of the stream, ``x[:, token]``."""
    state = stream.parts[0].state
    if axis_names(state) != ("pixel 0", FEATURES):
        return None

    def select(state: State) -> State:
        axes = (token, token) if state.layout == PAIRS else (token,)
        after = state.map(lambda kernel: kernel[(..., *axes)])
        return after.replace(layout=None, spatial=0, features_last=False)

    return stream.map(select)


def average_pixels(stream: Stream, axes: set[int]) -> Stream | None:
    """Return the mean over all pixels.

    Args:
        stream: The stream.
        axes: Axes of the mean, which may be negative; they must be those of all pixels.
    """
    state = stream.parts[0].state
    names = ("batch", *axis_names(state))
    pixels = {index for index, name in enumerate(names) if name.startswith("pixel")}
    if not pixels or state.heads or {axis % len(names) for axis in axes} != pixels:
        return None

    def average(state: State) -> State:
        groups = 2 if state.layout == PAIRS else 1
        dims = tuple(range(-groups * state.spatial, 0))
        after = state.map(lambda kernel: kernel.mean(dims))
        return after.replace(layout=None, spatial=0, features_last=False)

    return stream.map(average)
