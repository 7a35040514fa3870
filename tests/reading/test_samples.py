"""What is said to be row by row is: an operation on two samples is that on each."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from embens.reading import opened
from embens.reading.samples import is_row_by_row, module_is_row_by_row, time_first
from torch import nn

X = torch.rand(4, 6, 6) + 0.1
FUNCTIONS = [
    (("mean", (1,)), lambda x: x.mean(1)),
    (("mean", ((1, 2),)), lambda x: x.mean((1, 2))),
    (("sum", (2, True)), lambda x: x.sum(2, True)),
    (("flatten", (1,)), lambda x: x.flatten(1)),
    (("relu", ()), F.relu),
    (("add", (2,)), lambda x: x + 2),
    (("pow", (2,)), lambda x: x**2),
]
MIXING = [
    (("mean", ()), lambda x: x + x.mean()),
    (("mean", (0,)), lambda x: x + x.mean(0)),
    (("mean", ((0, 1),)), lambda x: x + x.mean((0, 1))),
    (("softmax", (0,)), lambda x: x.softmax(0)),
    (("getitem", (0,)), lambda x: x - x[0]),
    (("getitem", ((0, slice(None)),)), lambda x: x - x[0, :]),
    (("flip", (0,)), lambda x: x.flip(0)),
    (("permute", (1, 0, 2)), lambda x: x.permute(1, 0, 2)),
    (("batch_norm", ()), lambda x: F.batch_norm(x, None, None, training=True)),
    (("sort", (0,)), lambda x: x.sort(0).values),
    (("chunk", (2,)), lambda x: torch.cat(x.chunk(2), 1)),
    (("roll", (8,)), lambda x: x.roll(8)),
    (
        ("scaled_dot_product_attention", ()),
        lambda x: F.scaled_dot_product_attention(*[x[:, 0]] * 3),
    ),
    (("matmul", ()), lambda x: x @ x[0]),
]


@pytest.mark.parametrize(("known", "run"), FUNCTIONS, ids=[str(known) for known, _ in FUNCTIONS])
def test_known_operations_are_row_by_row(known, run):
    assert is_row_by_row(*known)
    torch.testing.assert_close(run(X)[:2], run(X[:2]))
    torch.testing.assert_close(run(X)[2:], run(X[2:]))


@pytest.mark.parametrize(("known", "run"), MIXING, ids=[str(known) for known, _ in MIXING])
def test_mixing_operations_are_not_known(known, run):
    assert not is_row_by_row(*known)
    assert run(X)[2:].shape != run(X[2:]).shape or not torch.equal(run(X)[2:], run(X[2:]))


def test_modules_of_torch_are_known_by_their_types():
    for module in (nn.ReLU(), nn.Linear(2, 3), nn.Softmax(1), nn.Flatten(), nn.LayerNorm(3)):
        assert module_is_row_by_row(module)
    for module in (
        nn.Softmax(0),
        nn.Softmax(),
        nn.Flatten(0),
        nn.LSTM(2, 3),
        nn.Bilinear(2, 2, 2),
        nn.GLU(0),
    ):
        assert not module_is_row_by_row(module)
    encoder = opened(nn.TransformerEncoderLayer(4, 2, batch_first=True))
    assert module_is_row_by_row(encoder)
    late = opened(nn.TransformerEncoderLayer(4, 2))
    assert not module_is_row_by_row(late)
    assert time_first(late) is late.self_attn
    assert time_first(encoder) is None
    assert time_first(nn.Sequential(nn.GRU(2, 3))) is not None
