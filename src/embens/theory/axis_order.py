"""Orders of axes: rules of reshape, transpose, selection and mean in a traced forward.

The kernels of a :class:`~embens.theory.State` do not depend on the order of the axes of a value.
So these rules change the description of the order only: images ``(n, channel, pixel…)``, tokens
``(n, token, feature)``, and heads of attention ``(n, token, head, feature)`` or
``(n, head, token, feature)``. A rule returns None where it does not apply.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embens.theory.input_pair import InputPair
from embens.theory.moments import DIAGONAL, PAIRS, State
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
    """Return heads side by side; those with different masks are the parts of a concatenation."""
    parts = []
    for part in stream.parts:
        heads = part.state.heads if len(stream.parts) == 1 else 1
        parts.append(Part(part.state.replace(heads=0), part.width * heads))
    return Stream(tuple(parts), stream.name)


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


def average_pixels(stream: Stream, axes: set[int], *, keep: bool = False) -> Stream | None:
    """Return the mean over all pixels.

    Args:
        stream: The stream.
        axes: Axes of the mean, which may be negative; they must be those of all pixels.
        keep: Keep axes of one pixel.
    """
    state = stream.parts[0].state
    names = ("batch", *axis_names(state))
    pixels = {index for index, name in enumerate(names) if name.startswith("pixel")}
    if not pixels or state.heads or {axis % len(names) for axis in axes} != pixels:
        return None

    def average(state: State) -> State:
        groups = 2 if state.layout == PAIRS else 1
        dims = tuple(range(-groups * state.spatial, 0))
        after = state.map(lambda kernel: kernel.mean(dims, keepdim=keep))
        return after if keep else after.replace(layout=None, spatial=0, features_last=False)

    return stream.map(average)


def insert_pixel_axis(stream: Stream, axis: int) -> Stream | None:
    """Return the stream with an axis of one pixel, to be broadcast.

    Args:
        stream: The stream.
        axis: Place of the new axis: 1 for tokens, the last one for images.
    """
    state = stream.parts[0].state
    names = ("batch", *axis_names(state))
    is_last = axis == len(names)
    is_token = axis == 1 and not state.spatial
    if state.heads or state.flat or not (is_last or is_token):
        return None
    if is_last and state.features_last and state.spatial:
        return None

    def insert(state: State) -> State:
        layout = state.layout or (PAIRS if state.poolings else DIAGONAL)
        spatial = state.spatial

        def expand(kernel: Tensor) -> Tensor:
            if layout == PAIRS:
                kernel = kernel.unsqueeze(kernel.dim() - spatial)
            return kernel.unsqueeze(-1)

        after = state.map(expand)
        return after.replace(layout=layout, spatial=spatial + 1, features_last=not is_last)

    return stream.map(insert)


def weigh_pixels(stream: Stream, factors: Tensor | InputPair) -> Stream | None:
    """Return the stream times factors that are the same for all features, such as a padding mask.

    Args:
        stream: The stream.
        factors: Factors that broadcast to the stream; a pair if they are computed from the inputs.
    """
    pair = factors if isinstance(factors, InputPair) else InputPair(factors, factors)
    state = stream.parts[0].state
    aligned = []
    for values in pair:
        inputs = len(values) if isinstance(factors, InputPair) else 1
        kernel_factors = _align_factors(values, state, inputs)
        if kernel_factors is None:
            return None
        aligned.append(kernel_factors)

    def weigh(state: State) -> State:
        is_paired = state.facts.recording is not None
        first, second = state.align(aligned[0], aligned[1], paired=is_paired)
        scales = (first * second).to(state.covariance)
        return state.map(lambda kernel: kernel * scales)

    return stream.map(weigh)


def _align_factors(values: Tensor, state: State, inputs: int) -> Tensor | None:
    """Return factors ``(n, *pixel)``, or None unless they are the same for all features."""
    names = axis_names(state)
    sizes = iter(state.pixels)
    full = [inputs, *(next(sizes) if name.startswith("pixel") else 1 for name in names)]
    shape = (1,) * (len(full) - values.dim()) + tuple(values.shape)
    if len(shape) != len(full):
        return None
    if any(size not in (1, expected) for size, expected in zip(shape, full, strict=True)):
        return None
    pixels = [size for name, size in zip(names, shape[1:], strict=True) if name.startswith("pixel")]
    flattened = [1] * (state.spatial - len(pixels))
    return values.reshape(shape[0], *pixels, *flattened)
