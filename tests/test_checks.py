import functools
import inspect
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import embens
from embens.checks import (
    check_choice,
    check_members,
    check_number,
    check_rows,
    check_whole,
    closest,
    find_gaps,
    name_rows,
    short_repr,
    suggest,
    warn,
)
from embens.optim import gradient_factor


class TestCheckWhole:
    def test_returns_python_integers(self):
        assert check_whole("epochs", 0, least=0) == 0
        assert type(check_whole("epochs", np.int64(3))) is int
        assert check_members(4) == 4

    @pytest.mark.parametrize("value", [1.0, "1", True, None, torch.ones(())])
    def test_raises_for_other_types(self, value):
        with pytest.raises(TypeError, match=r"depth must be a positive integer, got .*\.$"):
            check_whole("depth", value)

    @pytest.mark.parametrize(
        ("value", "least", "message"),
        [
            (0, 1, r"depth must be a positive integer, got 0\."),
            (-1, 0, r"depth must be a non-negative integer, got -1\."),
            (1, 2, r"depth must be an integer of at least 2, got 1\."),
        ],
    )
    def test_raises_below_the_smallest_valid_value(self, value, least, message):
        with pytest.raises(ValueError, match=message):
            check_whole("depth", value, least)

    def test_names_the_members(self):
        with pytest.raises(ValueError, match=r"members must be a positive integer, got 0\."):
            check_members(0)


class TestCheckNumber:
    @pytest.mark.parametrize("value", [2, 2.0, np.float32(2), torch.tensor(2), torch.tensor([2.0])])
    def test_returns_floats(self, value):
        number = check_number("rate", value, "a number")
        assert number == 2
        assert type(number) is float

    @pytest.mark.parametrize("value", ["2", True, None, 2j, torch.ones(2), torch.tensor(True)])
    def test_raises_for_other_types(self, value):
        with pytest.raises(TypeError, match="rate must be a number above 0, got "):
            check_number("rate", value, "a number above 0", lambda rate: rate > 0)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, torch.tensor(0.0)])
    def test_raises_for_values_that_are_not_finite_or_not_valid(self, value):
        with pytest.raises(ValueError, match="rate must be a number above 0, got "):
            check_number("rate", value, "a number above 0", lambda rate: rate > 0)


class TestCheckChoice:
    def test_returns_a_valid_choice(self):
        assert check_choice("pool", "max", ("average", "max")) == "max"

    def test_suggests_the_closest_choice(self):
        message = r"pool: unknown 'averge'; did you mean 'average'\? Candidates: 'average', 'max'"
        with pytest.raises(ValueError, match=message):
            check_choice("pool", "averge", ("average", "max"))
        with pytest.raises(ValueError, match=r"pool: unknown None\. Candidates: 'average', 'max'"):
            check_choice("pool", None, ("average", "max"))

    def test_lists_at_most_twenty_candidates(self):
        assert closest("x", ["a", "b"]) == ". Candidates: 'a', 'b'"
        assert closest("layer.10", [f"layer.{i}" for i in range(21)]).endswith("'layer.19', …")


class TestSuggest:
    @pytest.fixture
    def function(self):
        @suggest({"old": ": it is called new now."})
        def function(first: int, second: int = 2, *, third: str = "") -> str:
            """Join the arguments."""
            return f"{first} {second} {third}"

        return function

    def test_keeps_result_signature_and_docstring(self, function):
        assert function(1, third="a") == "1 2 a"
        assert list(inspect.signature(function).parameters) == ["first", "second", "third"]
        assert function.__doc__ == "Join the arguments."

    def test_suggests_a_name_or_gives_the_hint(self, function):
        with pytest.raises(TypeError, match="function has no argument 'thrid'; did you mean 'thi"):
            function(1, thrid="a")
        with pytest.raises(TypeError, match="no argument 'old': it is called new now"):
            function(1, old="a")

    def test_leaves_missing_arguments_to_python(self, function):
        with pytest.raises(TypeError, match="missing 1 required"):
            function()


class TestCheckRows:
    def test_returns_the_number_of_rows(self):
        assert check_rows("x", {"a": torch.zeros(5, 2), "b": [torch.zeros(5)]}, "tensors") == 5

    @pytest.mark.parametrize("values", [[], [1, 2], torch.tensor(1.0), (torch.zeros(2), "a")])
    def test_raises_for_anything_but_tensors_with_rows(self, values):
        with pytest.raises(TypeError, match=r"x must be a batch of tensors, got \("):
            check_rows("x", values, "a batch of tensors")

    def test_names_the_fix_for_a_list_of_numbers(self):
        with pytest.raises(TypeError, match=r"Convert lists of numbers with torch\.tensor"):
            check_rows("train", [torch.zeros(2), [0, 1]], "tensors")

    def test_raises_for_different_numbers_of_rows(self):
        message = r"x must have the same number of rows in all tensors, got shapes \(2,\), \(3, 1\)"
        with pytest.raises(ValueError, match=message):
            check_rows("x", (torch.zeros(2), torch.zeros(3, 1)), "tensors")


class TestFindGaps:
    def test_describes_the_rows(self):
        x = torch.zeros(30, 2)
        x[4:18, 1] = torch.inf
        text = find_gaps("inputs", {"a": x})

        assert text.startswith("inputs['a'] have infinite values in rows 4, 5, 6")
        assert text.endswith("13 and 4 more")
        assert find_gaps("inputs", torch.tensor(torch.nan)) == "inputs have NaN in row 0"
        assert find_gaps("inputs", (torch.tensor([torch.nan]),)) == "inputs have NaN in row 0"

    def test_is_empty_if_all_values_are_finite(self):
        assert find_gaps("inputs", {"a": torch.zeros(3, 2), "n": torch.arange(30), "s": "x"}) == ""
        assert find_gaps("inputs", torch.full((3,), 3e38)) == ""  # only the sum overflows

    def test_names_one_row_or_several(self):
        assert name_rows(torch.tensor([[False, True], [False, False]])) == "row 0"
        assert name_rows(torch.tensor([True, True])) == "rows 0, 1"


class TestGradientFactor:
    def test_takes_a_number_a_function_or_none(self):
        assert gradient_factor(2.0, 4, natural=1.0) == 0.5
        assert gradient_factor(torch.tensor(2.0), 4, natural=1.0) == 0.5
        assert gradient_factor(lambda members: members, 4, natural=1.0) == 1
        assert gradient_factor(None, 4, natural=1.0) == 0.25

    def test_raises_for_other_values(self):
        with pytest.raises(TypeError, match=r"gamma must be a number, a function .* got 'large'"):
            gradient_factor("large", 4, natural=1.0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="gamma must be finite and not negative, got -1"):
            gradient_factor(-1, 4, natural=1.0)


def test_short_repr_shows_shapes_instead_of_values():
    @dataclass(repr=False)
    class Kernel:
        same: torch.Tensor
        name: str
        __repr__ = short_repr

    assert repr(Kernel(torch.rand(40, 30), "ntk")) == "Kernel(same=(40, 30), name='ntk')"


class Hidden(nn.Module):
    """A network whose data flow cannot be read."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 2)])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks[: int(x.abs().sum()) % 2 + 2]:
            x = block(x)
        return x


def step_with_groups_for_sgd():
    ensemble = embens.batch_ensemble(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), 2, p=0.5)
    torch.optim.Adam(ensemble.parameter_groups()).step()


def warn_inside_of_torch():
    module = nn.Identity()
    module.forward = functools.partial(warn, "noise")
    module()


@pytest.mark.parametrize(
    "call",
    [
        lambda: embens.embed(Hidden(), 2),
        lambda: embens.batch_ensemble(Hidden(), 2),
        lambda: embens.mc_dropout(Hidden(), 2),
        lambda: embens.low_rank(Hidden(), 2),
        step_with_groups_for_sgd,
        warn_inside_of_torch,
    ],
)
def test_warnings_point_at_the_line_of_the_user(call):
    with pytest.warns(UserWarning, match=r"data flow|groups are for SGD|noise") as caught:
        call()

    assert {warning.filename for warning in caught} == {__file__}
