"""Sizes, indices and reshapes keep the rows of members apart."""

import pytest

from embens.graph.domains import OTHER, Domain, Unfoldable, Value
from embens.graph.rowwise import infer
from embens.graph.shapes import infer_index

BATCH = Value(Domain.SHARED, 3)


def test_sizes_of_the_batch_are_numbers_of_rows():
    assert infer("size", [BATCH, 0], {}).kind == "rows"
    assert infer("size", [BATCH, 1], {}).kind == "other"
    rows = infer("size", [BATCH, 0], {})
    assert infer("view", [BATCH, rows, 36], {}) == Value(Domain.SHARED, 2)
    with pytest.raises(Unfoldable, match="number of samples"):
        infer("truediv", [BATCH, rows], {})


def test_a_table_that_is_indexed_by_a_batch_has_its_rows():
    table, indices = Value(Domain.CONSTANT, 2), Value(Domain.MEMBER, 1)
    assert infer_index(table, indices) == Value(Domain.MEMBER, 2)


def test_the_type_of_a_tensor_does_not_depend_on_its_rows():
    assert infer("getattr", [BATCH, "dtype"], {}) == OTHER
    with pytest.raises(Unfoldable, match="attribute 'grad'"):
        infer("getattr", [BATCH, "grad"], {})
