"""Axes and arguments of operations on a batch."""

import pytest

from embens.graph.domains import Domain, Unfoldable, Value, argument, axis_of, batch_value, flatten


def test_axes_are_counted_from_the_start():
    assert axis_of("softmax", -1, 3) == 2


@pytest.mark.parametrize("axis", [0, -3, 3, True, None])
def test_the_axis_of_the_batch_and_unknown_axes_are_refused(axis):
    with pytest.raises(Unfoldable, match=r"axis|along"):
        axis_of("softmax", axis, 3)


def test_arguments_are_found_by_position_and_by_name():
    assert argument([1, 2], {}, 1, "dim", 0) == 2
    assert argument([1], {"dim": 2}, 1, "dim", 0) == 2
    assert argument([1], {}, 1, "dim", 0) == 0


def test_slices_and_dictionaries_are_flattened():
    assert flatten([{"a": 1}, slice(2, None)]) == [1, 2, None, None]


def test_numbers_and_scalars_have_no_batch_axis():
    for value in (1.0, Value(Domain.CONSTANT, 0), Value(Domain.SHARED, None, "rows")):
        with pytest.raises(Unfoldable, match="no batch axis"):
            batch_value("mean", value)
