"""Batches from every kind of data."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from embens.sources import (
    as_tensors,
    check_inputs,
    count_inputs,
    has_weights,
    input_batches,
    labelled_batches,
    split_target,
)

X = torch.arange(14.0).view(7, 2)
Z = torch.arange(7.0)
Y = torch.arange(7)


class Pairs(Dataset):
    def __len__(self):
        return 7

    def __getitem__(self, index):
        return X[index], Y[index]


class Named(Dataset):
    def __len__(self):
        return 7

    def __getitem__(self, index):
        return {"x": X[index].numpy(), "labels": Y[index]}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


SOURCES = {
    "tensors": lambda: (X, Y),
    "a list": lambda: [X, Y],
    "arrays": lambda: (X.numpy(), Y.numpy()),
    "a tensor data set": lambda: TensorDataset(X, Y),
    "a data set": Pairs,
    "a stream": Stream,
    "a loader": lambda: DataLoader(Pairs(), 3),
    "a generator": lambda: ((X[i : i + 3], Y[i : i + 3]) for i in range(0, 7, 3)),
}


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES.keys())
def test_labelled_data_come_in_order_with_their_targets(make):
    batches = list(labelled_batches(make(), batch_size=3))
    assert [len(target) for _, target in batches] == [3, 3, 1]
    assert torch.equal(torch.cat([inputs for inputs, _ in batches]), X)
    assert torch.equal(torch.cat([target for _, target in batches]), Y)


UNLABELLED = {
    "a tensor": lambda: X,
    "an array": lambda: X.numpy(),
    "a tensor data set": lambda: TensorDataset(X),
    "a loader of tensors": lambda: DataLoader(X, 3),
    "a generator": lambda: iter(X.split(3)),
}
LABELLED = {
    name: make for name, make in SOURCES.items() if name not in ("tensors", "a list", "arrays")
}
INPUT_SOURCES = {**UNLABELLED, **{f"{name} of pairs": make for name, make in LABELLED.items()}}


@pytest.mark.parametrize("make", INPUT_SOURCES.values(), ids=INPUT_SOURCES.keys())
def test_inputs_come_in_order_without_targets(make):
    batches = list(input_batches(make(), batch_size=3))
    assert [len(inputs) for inputs in batches] == [3, 3, 1]
    assert torch.equal(torch.cat(batches), X)


def test_several_and_named_inputs_keep_their_structure():
    (first, _, _) = input_batches((X, Z), batch_size=3)
    assert isinstance(first, tuple)
    assert torch.equal(first[1], Z[:3])
    (first, _, _) = input_batches({"x": X, "z": Z.numpy()}, batch_size=3)
    assert torch.equal(first["z"], Z[:3])
    for data in ((X, Z, Y), ((X, Z), Y), TensorDataset(X, Z, Y)):
        (inputs, target) = next(iter(labelled_batches(data, batch_size=3)))
        assert isinstance(inputs, tuple)
        assert torch.equal(inputs[1], Z[:3])
        assert torch.equal(target, Y[:3])


def test_dicts_contain_the_target_under_labels():
    inputs, target = next(iter(labelled_batches(Named(), batch_size=3)))
    assert list(inputs) == ["x"]
    assert torch.equal(target, Y[:3])
    assert list(next(iter(input_batches(Named(), batch_size=3)))) == ["x"]
    inputs, target = next(iter(labelled_batches({"x": X, "labels": Y}, batch_size=3)))
    assert torch.equal(inputs["x"], X[:3])


def test_tensors_without_rows_are_one_empty_batch():
    (batch,) = input_batches(X[:0], batch_size=3)
    assert batch.shape == (0, 2)


def test_read_only_arrays_are_copied():
    array = np.zeros((4, 2))
    array.flags.writeable = False
    (batch,) = input_batches(array, batch_size=4)
    assert batch.dtype == torch.float64


def test_data_sets_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    list(input_batches(Pairs(), batch_size=3))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("x", [X.tolist(), "text", 3, None, [X, Y]])
def test_other_inputs_raise(x):
    with pytest.raises(TypeError, match=r"x must be a tensor \(batch, …\)"):
        list(input_batches(x, batch_size=3))


def test_lists_of_numbers_get_a_hint():
    with pytest.raises(TypeError, match=r"got list\. Convert lists of numbers with torch\.tensor"):
        list(input_batches(X.tolist(), batch_size=3))


def test_missing_targets_and_unequal_rows_raise():
    for data in (DataLoader(X, 3), (X,), {"x": X}):
        with pytest.raises(TypeError, match="without a target"):
            list(labelled_batches(data, batch_size=3))
    with pytest.raises(TypeError, match=r"data must be tensors \(inputs, target\)"):
        list(labelled_batches(3, batch_size=3))
    with pytest.raises(ValueError, match="same number of rows in all tensors"):
        list(labelled_batches((X, Y[:5]), batch_size=3))
    with pytest.raises(TypeError, match="without a target"):
        split_target("text")


def test_the_numbers_of_inputs_are_those_of_the_signature():
    assert count_inputs(lambda x: x) == (1, 1)
    assert count_inputs(lambda x, z=None, *, w=0: x) == (1, 2)
    assert count_inputs(lambda x, *more: x) == (1, math.inf)


@pytest.mark.parametrize(
    ("parts", "counts", "expected"),
    [
        (2, (1, 1), False),
        (3, (1, 1), True),
        (3, (2, 2), False),
        (4, (2, 2), True),
        (3, None, False),
        (3, (3, 3), False),
    ],
)
def test_weights_follow_the_target_if_there_are_more_parts_than_inputs(parts, counts, expected):
    assert has_weights(tuple(torch.zeros(5) for _ in range(parts)), counts) is expected


def test_weights_of_nested_inputs_are_the_third_part():
    x, y, w = torch.zeros(5, 2), torch.zeros(5), torch.ones(5)
    assert has_weights(((x,), y, w), (1, 2))
    assert not has_weights(((x, x), y), (2, 2))
    with pytest.raises(TypeError, match="ambiguous"):
        has_weights((x, y, w), (1, 2))


def test_numeric_tables_of_pandas_become_tensors():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"a": [1.0, 2.0], "b": [3, 4]})
    x, y = as_tensors((table, table["b"]), torch.float32)
    assert torch.equal(x, torch.tensor([[1.0, 3.0], [2.0, 4.0]]))
    assert torch.equal(y, torch.tensor([3, 4]))
    with pytest.raises(TypeError, match=r"must hold numbers.*embens\.tabular"):
        as_tensors(pandas.DataFrame({"a": ["red", "blue"]}))


@pytest.mark.parametrize(
    ("counts", "valid"), [((1, 1), False), ((2, 2), True), ((1, math.inf), True), (None, True)]
)
def test_a_wrong_number_of_inputs_raises(counts, valid):
    if valid:
        check_inputs("train", (X, Z), counts)
        return
    with pytest.raises(ValueError, match="train: the network takes 1 input, got 2"):
        check_inputs("train", (X, Z), counts)


def test_inputs_with_a_target_raise_if_the_network_takes_one():
    with pytest.raises(ValueError, match=r"takes 1 input, got 2\. Pass inputs without targets"):
        list(input_batches((X, Y), batch_size=3, counts=(1, 1)))


def test_a_list_of_dicts_is_a_data_set():
    data = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]
    inputs, target = next(iter(labelled_batches(data, batch_size=3, counts=(1, 1))))
    assert torch.equal(inputs["x"], X[:3])
    assert torch.equal(target, Y[:3])
    (first, *_) = input_batches(data, batch_size=3)
    assert torch.equal(first["x"], X[:3])
