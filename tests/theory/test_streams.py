"""Sums, products and concatenations of streams by hand."""

from __future__ import annotations

import pytest
import torch

from embens.theory.moments import Moments, State
from embens.theory.streams import (
    Part,
    Stream,
    add_streams,
    average_parts,
    concatenate,
    multiply_streams,
    split_stream,
)


def stream(name: str, nngp: float, ntk: float, width: int = 1, **options) -> Stream:
    moments = Moments(torch.tensor([[nngp]]), torch.tensor([[ntk]]))
    settings = {"gaussian": True, "centred": True, "sources": frozenset([name]), **options}
    return Stream((Part(State(moments, **settings), width),), name)


def values(state: State) -> tuple[float, float]:
    assert state.same.nngp is not None
    assert state.same.ntk is not None
    return state.same.nngp.item(), state.same.ntk.item()


def test_kernels_of_a_sum_add():
    state = average_parts(add_streams(stream("a", 2.0, 3.0), stream("b", 5.0, 7.0)))
    assert values(state) == (7.0, 10.0)
    assert state.gaussian
    assert state.sources == {"a", "b"}


def test_a_product_has_the_derivative_of_a_product():
    state = average_parts(multiply_streams(stream("a", 2.0, 3.0), stream("b", 5.0, 7.0)))
    assert values(state) == (10.0, 3.0 * 5.0 + 2.0 * 7.0)
    assert not state.gaussian


def test_a_concatenation_is_an_average_by_widths():
    joined = concatenate([stream("a", 2.0, 4.0, width=1), stream("b", 6.0, 8.0, width=3)])
    assert values(average_parts(joined)) == (5.0, 7.0)


def test_halves_of_a_layer_are_independent_of_each_other_but_not_of_the_layer():
    whole = stream("a", 2.0, 3.0, width=4)
    first, second = split_stream(whole, [2, 2])
    assert values(average_parts(multiply_streams(first, second))) == (4.0, 12.0)
    with pytest.raises(ValueError, match="contain the units"):
        add_streams(first, first)


def test_concatenations_with_other_parts_do_not_add():
    joined = concatenate([stream("a", 1.0, 1.0, width=1), stream("b", 1.0, 1.0, width=3)])
    with pytest.raises(ValueError, match="different parts"):
        add_streams(joined, stream("c", 1.0, 1.0, width=4))


def test_pieces_that_overlap_are_not_independent():
    whole = stream("a", 2.0, 3.0, width=8)
    first, second = split_stream(whole, [4, 4])
    other_first, other_second = split_stream(whole, [2, 6])
    multiply_streams(first.at(0), second.at(0))
    for a, b in ((first, other_first), (second, other_second), (first, whole)):
        same_width = Stream((Part(b.parts[0].state, 4),), b.name)
        with pytest.raises(ValueError, match="both streams contain the units"):
            multiply_streams(a, same_width)
    with pytest.raises(ValueError, match="piece of a split"):
        split_stream(first, [2, 2])
