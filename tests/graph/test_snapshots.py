"""Snapshots differ if something in a value has changed."""

import itertools

import numpy as np
import torch

from embens.graph.snapshots import random_state, snapshot


def test_snapshots_compare_contents_of_containers():
    values = {"a": [1, 2]}
    before = snapshot(values, set())
    assert snapshot(values, set()) == before
    values["a"].append(3)
    assert snapshot(values, set()) != before


def test_snapshots_contain_slots_versions_and_values_of_tensors():
    class Slotted:
        __slots__ = ("tensor",)

    value = Slotted()
    value.tensor = torch.zeros(2)
    for change in (value.tensor.add_, value.tensor.data.add_):
        before = snapshot(value, set())
        assert snapshot(value, set()) == before
        change(1)
        assert snapshot(value, set()) != before


def test_snapshots_contain_the_state_of_iterators_and_arrays():
    values = {"count": itertools.count(), "array": np.zeros(2), "bytes": bytearray(1)}
    for change in (
        lambda: next(values["count"]),
        lambda: values["array"].__setitem__(0, 1),
        lambda: values["bytes"].append(1),
    ):
        before = snapshot(values, set())
        assert snapshot(values, set()) == before
        change()
        assert snapshot(values, set()) != before


def test_tensors_without_values_are_compared_by_identity():
    with torch._subclasses.FakeTensorMode():
        value = torch.zeros(2)
    assert snapshot(value, set()) == snapshot(value, set())
    assert snapshot(value, set()) != snapshot(torch.zeros(2), set())


def test_random_state_changes_with_every_draw():
    before = random_state()
    assert random_state() == before
    torch.rand(1)
    assert random_state() != before
