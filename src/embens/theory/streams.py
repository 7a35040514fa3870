r"""Streams: values of a traced forward, and how sums, products and concatenations combine them.

A stream has parts along the features, each a :class:`~embens.theory.State` with its share of the
width; a concatenation has several. A layer averages its parts.

*Sums.* Streams :math:`s` and :math:`t` of one unit are uncorrelated if different layers drew them
(their ``sources`` are disjoint) and one of them is centred. Then :math:`K = K_s + K_t`, and tangent
kernels add as well, within and between members: products of the gradients of both streams
contain the fresh centred weights of one of them once. Modulations :math:`v` of the streams wait
for the next activation (:mod:`embens.theory.pending`).

*Products* of streams of different layers, such as gates, have

.. math:: K = K_s K_t, \qquad \Theta = \Theta_s K_t + K_s \Theta_t .
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from embens.theory.moments import MEASURE, PAIRS, Moments, State
from embens.theory.pending import add_kernels, addends_of, settle, with_addends


@dataclass(frozen=True)
class Part:
    """Units of a stream with one kernel.

    Attributes:
        state: Their kernels.
        width: Number of units.
    """

    state: State
    width: int


@dataclass(frozen=True)
class Stream:
    """A value of the forward that depends on layers.

    Attributes:
        parts: Its parts along the features.
        name: Name of the value in messages.
    """

    parts: tuple[Part, ...]
    name: str = ""

    def map(self, function: Callable[[State], State]) -> Stream:
        """Apply a function to the state of each part."""
        parts = [Part(function(part.state), part.width) for part in self.parts]
        return Stream(tuple(parts), self.name)

    @property
    def depth(self) -> int:
        """Number of recorded variances so far."""
        return max(part.state.depth for part in self.parts)

    def at(self, depth: int) -> Stream:
        """Return the stream with its parts numbered for the records that come next."""
        return self.map(lambda state: state.replace(depth=depth))


def pass_parts(stream: Stream, function: Callable[[State], State], name: str) -> Stream:
    """Pass the parts of a stream through a module that records variances, one after another.

    Args:
        stream: The stream.
        function: The rule of the module.
        name: Name of the result in messages.
    """
    parts = []
    depth = stream.depth
    for part in stream.parts:
        state = function(part.state.replace(depth=depth))
        depth = state.depth
        parts.append(Part(state, part.width))
    return Stream(tuple(parts), name).at(depth)


def settle_parts(stream: Stream) -> Stream:
    """Apply the factors of all parts that wait for an activation."""
    return stream.map(settle)


def average_parts(stream: Stream) -> State:
    """Return the average of the parts of a stream, weighted by their widths."""
    if len(stream.parts) == 1:
        return stream.parts[0].state
    stream = settle_parts(stream)
    total = sum(part.width for part in stream.parts)
    average: State | None = None
    for part in stream.parts:
        share = scale_kernels(part.state, part.width / total)
        if average is None:
            average = share
        else:
            addends = (*addends_of(average), *addends_of(share))
            sources = average.sources | share.sources
            average = with_addends(average, addends).replace(sources=sources)
    assert average is not None
    return average.replace(gaussian=False)


def scale_kernels(state: State, factor: float) -> State:
    """Return the kernels times a factor."""
    return state.map(lambda kernel: kernel * factor)


def add_streams(first: Stream, second: Stream) -> Stream:
    """Return the sum of two streams.

    Raises:
        ValueError: If the streams are correlated or have different shapes.
    """

    def add(a: State, b: State) -> State:
        a, b = _broadcast(a, b)
        _require_independence(a, b, f"the sum of {first.name!r} and {second.name!r}")
        if not (a.centred or b.centred):
            raise ValueError(
                f"the sum of {first.name!r} and {second.name!r} adds two streams with non-zero "
                "means, which are correlated. End one of them in a Linear or a convolution. "
                + MEASURE
            )
        state = with_addends(a, (*addends_of(a), *addends_of(b)))
        return state.replace(
            sources=a.sources | b.sources,
            depth=max(a.depth, b.depth),
            gaussian=a.gaussian and b.gaussian,
            centred=a.centred and b.centred,
        )

    return _combine_parts(first, second, add)


def multiply_streams(first: Stream, second: Stream) -> Stream:
    """Return the product of two independent streams.

    Raises:
        ValueError: If the streams have layers in common or different shapes.
    """
    first, second = settle_parts(first), settle_parts(second)

    def multiply(a: State, b: State) -> State:
        a, b = _broadcast(a, b)
        _require_independence(a, b, f"the product of {first.name!r} and {second.name!r}")
        state = _multiply_states(a, b)
        return state.replace(gaussian=False, centred=a.centred or b.centred)

    return _combine_parts(first, second, multiply)


def concatenate(streams: list[Stream]) -> Stream:
    """Return streams side by side along the features."""
    parts: list[Part] = []
    for stream in streams:
        parts.extend(stream.parts)
    joined = Stream(tuple(parts), " and ".join(repr(stream.name) for stream in streams))
    return joined.at(joined.depth)


def split_stream(stream: Stream, widths: list[int]) -> list[Stream]:
    """Return parts of a stream along the features; different units are independent.

    Raises:
        ValueError: If the stream is a concatenation, or a piece of another split.
    """
    if len(stream.parts) != 1:
        raise ValueError(f"{stream.name!r} is a concatenation, which cannot be split. {MEASURE}")
    part = stream.parts[0]
    if any(source.endswith("]") for source in part.state.sources):
        raise ValueError(f"{stream.name!r} is a piece of a split; split it once. {MEASURE}")
    pieces = []
    start = 0
    for index, width in enumerate(widths):
        # The range of units tells later which pieces overlap.
        units = f"[{start}:{start + width}]"
        sources = frozenset(source + units for source in part.state.sources)
        state = part.state.replace(sources=sources)
        pieces.append(Stream((Part(state, width),), f"{stream.name}[{index}]"))
        start += width
    return pieces


def _combine_parts(
    first: Stream, second: Stream, function: Callable[[State, State], State]
) -> Stream:
    depth = max(first.depth, second.depth)
    if [part.width for part in first.parts] != [part.width for part in second.parts]:
        raise ValueError(
            f"{first.name!r} and {second.name!r} are concatenations with different parts; apply a "
            f"layer to them first. {MEASURE}"
        )
    parts = []
    for a, b in zip(first.parts, second.parts, strict=True):
        parts.append(Part(function(a.state, b.state), a.width))
    return Stream(tuple(parts), first.name).at(depth)


def _broadcast(a: State, b: State) -> tuple[State, State]:
    """Return both states with the same pixels where one of them has axes of one pixel."""
    if len(a.pixels) != len(b.pixels) or a.layout != b.layout or a.pixels == b.pixels:
        return a, b
    if any(m != n and 1 not in (m, n) for m, n in zip(a.pixels, b.pixels, strict=True)):
        return a, b
    pixels = torch.broadcast_shapes(a.pixels, b.pixels)
    groups = 2 if a.layout == PAIRS else 1

    def expand(kernel: Tensor) -> Tensor:
        leading = kernel.shape[: kernel.dim() - groups * len(pixels)]
        return kernel.expand(*leading, *pixels * groups).contiguous()

    return a.map(expand), b.map(expand)


def _require_independence(a: State, b: State, what: str) -> None:
    if a.spatial != b.spatial or a.pixels != b.pixels or a.flat != b.flat:
        raise ValueError(
            f"{what} has different pixels, {a.pixels} and {b.pixels}; broadcasting has no rule."
        )
    if (a.features_last, a.heads, a.heads_first) != (b.features_last, b.heads, b.heads_first):
        raise ValueError(f"{what} has axes in different orders; broadcasting has no rule.")
    common = set()
    for first, second in itertools.product(a.sources, b.sources):
        if _overlap(first, second):
            common.add(first)
    if common:
        raise ValueError(
            f"{what} has no rule: both streams contain the units of {sorted(common)}, so they are "
            "correlated. End one of them in another Linear or convolution, or write the block as a "
            f"module and register a rule with embens.theory.propagate.register. {MEASURE}"
        )


def _overlap(first: str, second: str) -> bool:
    """Return True if two sources, such as ``"gate"`` and ``"gate[0:8]"``, have common units."""
    first_layer, _, first_units = first.partition("[")
    second_layer, _, second_units = second.partition("[")
    if first_layer != second_layer:
        return False
    if not (first_units and second_units):
        return True
    first_start, first_stop = map(int, first_units.rstrip("]").split(":"))
    second_start, second_stop = map(int, second_units.rstrip("]").split(":"))
    return max(first_start, second_start) < min(first_stop, second_stop)


def _times(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return None
    return first * second


def _multiply_states(a: State, b: State) -> State:
    def rule(first: Moments, second: Moments) -> Moments:
        ntk = add_kernels(_times(first.ntk, second.nngp), _times(first.nngp, second.ntk))
        return Moments(_times(first.nngp, second.nngp), ntk)

    cross = None
    if a.cross is not None or b.cross is not None:
        cross = cache(lambda: rule(a.crossed, b.crossed))
    individual = add_kernels(
        _times(a.individual, b.same.nngp),
        _times(a.same.nngp, b.individual),
    )
    return a.replace(
        same=rule(a.same, b.same),
        cross=cross,
        individual=individual,
        depth=max(a.depth, b.depth),
        sources=a.sources | b.sources,
    )
