"""Operations that change their arguments are known by their names."""

import operator

import pytest
import torch

from embens.graph.operations import changed_arguments, is_in_place, operation_name


@pytest.mark.parametrize("name", ["add_", "relu_", "iadd", "__iadd__", "setitem"])
def test_names_of_operations_in_place(name):
    assert is_in_place(name)


@pytest.mark.parametrize("name", ["add", "__add__", "relu"])
def test_names_of_other_operations(name):
    assert not is_in_place(name)


def test_changed_arguments_are_the_first_and_the_output():
    a, b = torch.zeros(2), torch.ones(2)
    assert changed_arguments("add", (a, b), {}) == []
    assert changed_arguments("add_", (a, b), {})[0] is a
    assert changed_arguments("relu", (a,), {"inplace": True})[0] is a
    assert changed_arguments("add", (a, a), {"out": b})[0] is b


def test_targets_of_nodes_are_functions_or_names():
    assert operation_name("relu") == "relu"
    assert operation_name(operator.iadd) == "iadd"
