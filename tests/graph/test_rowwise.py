"""Operations that are said to be row-wise are; others are refused."""

import pytest
import torch
import torch.nn.functional as F

from embens.graph.domains import Domain, Unfoldable, Value
from embens.graph.rowwise import infer

BATCH = Value(Domain.SHARED, 3)
X = torch.rand(4, 6, 6) + 0.1
# Name, arguments after the batch, and the function.
ROWWISE = [
    ("mean", (1,), lambda x: x.mean(1)),
    ("mean", ((1, 2),), lambda x: x.mean((1, 2))),
    ("sum", (2, True), lambda x: x.sum(2, True)),
    ("flatten", (1,), lambda x: x.flatten(1)),
    ("relu", (), F.relu),
    ("add", (2,), lambda x: x + 2),
    ("softmax", (-1,), lambda x: x.softmax(-1)),
    ("transpose", (1, 2), lambda x: x.transpose(1, 2)),
    ("permute", (0, 2, 1), lambda x: x.permute(0, 2, 1)),
    ("unsqueeze", (1,), lambda x: x.unsqueeze(1)),
    ("select", (1, 0), lambda x: x.select(1, 0)),
    ("getitem", ((slice(None), 0),), lambda x: x[:, 0]),
    ("pad", ((1, 1),), lambda x: F.pad(x, (1, 1))),
    ("unflatten", (1, (2, 3)), lambda x: x.unflatten(1, (2, 3))),
    ("layer_norm", ((6,),), lambda x: F.layer_norm(x, (6,))),
    ("max_pool1d", (2,), lambda x: F.max_pool1d(x, 2)),
]
MIXING = [
    ("mean", ()),
    ("mean", (0,)),
    ("mean", ((0, 1),)),
    ("softmax", (0,)),
    ("softmax", (-3,)),
    ("softmax", ()),
    ("cumsum", (0,)),
    ("glu", (0,)),
    ("getitem", (0,)),
    ("getitem", ((slice(1, None), 0),)),
    ("flip", (0,)),
    ("permute", (1, 0, 2)),
    ("transpose", (0, 1)),
    ("batch_norm", ()),
    ("sort", (0,)),
    ("chunk", (2,)),
    ("roll", (8,)),
    ("matmul", (Value(Domain.SHARED, 2),)),
    ("pad", ((0, 0, 0, 0, 1, 1),)),
    ("layer_norm", ((4, 6, 6),)),
    ("view", (4, 36)),
    ("squeeze", ()),
    ("einsum", ("bij->ij",)),
    ("add", (Value(Domain.CONSTANT, 3),)),
    ("add", (Value(Domain.SHARED, 2),)),
    ("mean", (-4,)),
    ("linear", (Value(Domain.CONSTANT, 2), Value(Domain.SHARED, 1))),
    ("linear", (Value(Domain.CONSTANT, 2), Value(Domain.CONSTANT, 2))),
    ("mean", ((),)),
    ("amax", ([],)),
    ("getitem", ((slice(None), (0, 1), (1, 2)),)),
    ("getitem", ((slice(None), True),)),
    ("expand", (Value(Domain.SHARED, None, "rows"), 4, 6, 6)),
]


def label(value):
    return value if isinstance(value, str) else ""


@pytest.mark.parametrize(("name", "arguments", "run"), ROWWISE, ids=label)
def test_known_operations_are_row_wise(name, arguments, run):
    value = infer(name, [BATCH, *arguments], {})
    assert value.domain is Domain.SHARED
    assert value.rank == run(X).dim()
    torch.testing.assert_close(run(X)[:2], run(X[:2]))
    torch.testing.assert_close(run(X)[2:], run(X[2:]))


@pytest.mark.parametrize(("name", "arguments"), MIXING, ids=label)
def test_operations_that_may_mix_rows_are_refused(name, arguments):
    with pytest.raises(Unfoldable):
        infer(name, [BATCH, *arguments], {})


def test_axes_are_kept_by_both_names():
    assert infer("mean", [BATCH, 1], {"keepdim": True}).rank == 3
    assert infer("mean", [BATCH, 1], {"keepdims": True}).rank == 3


def test_the_result_belongs_to_members_if_an_argument_does():
    value = infer("add", [BATCH, Value(Domain.MEMBER, 3)], {})
    assert value.domain is Domain.MEMBER


def test_a_constant_of_one_row_meets_every_row():
    assert infer("add", [BATCH, Value(Domain.CONSTANT, 3, leading=1)], {}) == BATCH


def test_functions_that_get_all_arguments_by_name_are_refused():
    for name in ("softmax", "sum", "matmul", "reshape", "cat", "zeros"):
        with pytest.raises(Unfoldable, match="by name"):
            infer(name, [], {"input": BATCH, "dim": 1})


def test_an_axis_of_a_constant_may_be_passed_by_name():
    assert infer("unsqueeze", [Value(Domain.CONSTANT, 1)], {"dim": 0}).leading == 1


def test_only_arithmetic_of_sizes_gives_a_number():
    size = infer("size", [BATCH, 2], {})
    assert infer("floordiv", [size, 2], {}).kind == "other"
    assert infer("sqrt", [size], {}).kind == "other"
    for name in ("randn", "eye", "linspace", "rand"):
        with pytest.raises(Unfoldable):
            infer(name, [size], {})
