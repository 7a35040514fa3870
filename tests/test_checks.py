import inspect
import math

import numpy as np
import pytest
import torch

from embens import checks
from embens.checks import (
    check_choice,
    check_members,
    check_number,
    check_whole,
    closest,
    gradient_factor,
)


def test_whole_numbers_are_returned_as_ints():
    assert check_whole("epochs", 0, least=0) == 0
    assert type(check_whole("epochs", np.int64(3))) is int
    assert check_members(4) == 4


@pytest.mark.parametrize("value", [1.0, "1", True, None, torch.ones(())])
def test_what_is_no_whole_number_is_refused(value):
    with pytest.raises(TypeError, match="depth must be a whole number; got "):
        check_whole("depth", value)


def test_whole_numbers_have_a_least():
    with pytest.raises(ValueError, match="depth must be at least 2; got 1"):
        check_whole("depth", 1, least=2)
    with pytest.raises(ValueError, match="members must be at least 1; got 0"):
        check_members(0)


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), torch.tensor(2), torch.tensor([2.0])])
def test_numbers_of_any_kind_are_returned_as_floats(value):
    number = check_number("rate", value, "a number")
    assert number == 2
    assert type(number) is float


@pytest.mark.parametrize("value", ["2", True, None, 2j, torch.ones(2), torch.tensor(True)])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(TypeError, match="rate must be a number above 0; got "):
        check_number("rate", value, "a number above 0", lambda rate: rate > 0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, torch.tensor(0.0)])
def test_numbers_must_be_finite_and_valid(value):
    with pytest.raises(ValueError, match="rate must be a number above 0; got "):
        check_number("rate", value, "a number above 0", lambda rate: rate > 0)


def test_a_choice_is_one_of_those_there_are():
    assert check_choice("pool", "max", ("average", "max")) == "max"
    with pytest.raises(ValueError, match=r"pool: unknown 'averge'; did you mean 'average'\? Cand"):
        check_choice("pool", "averge", ("average", "max"))
    with pytest.raises(ValueError, match=r"pool: unknown None\. Candidates: 'average', 'max'"):
        check_choice("pool", None, ("average", "max"))


def test_candidates_are_named_up_to_twenty():
    assert closest("x", ["a", "b"]) == ". Candidates: 'a', 'b'"
    assert closest("layer.10", [f"layer.{i}" for i in range(21)]).endswith("'layer.19', …")


def test_gamma_is_a_number_a_function_of_the_members_or_natural():
    assert gradient_factor(2.0, 4, natural=1.0) == 0.5
    assert gradient_factor(lambda members: members, 4, natural=1.0) == 1
    assert gradient_factor(None, 4, natural=1.0) == 0.25
    with pytest.raises(TypeError, match="gamma must be a number, a function"):
        gradient_factor("large", 4, natural=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="finite and not negative; got -1"):
        gradient_factor(-1, 4, natural=1.0)


def test_a_misspelled_argument_gets_a_hint_and_the_signature_stays():
    @checks.suggest({"old": ": it is called new now."})
    def function(first: int, second: int = 2, *, third: str = "") -> str:
        """Say it."""
        return f"{first} {second} {third}"

    assert function(1, third="a") == "1 2 a"
    assert list(inspect.signature(function).parameters) == ["first", "second", "third"]
    assert function.__doc__ == "Say it."
    with pytest.raises(TypeError, match=r"function has no argument 'thrid'; did you mean 'third'"):
        function(1, thrid="a")
    with pytest.raises(TypeError, match=r"no argument 'old': it is called new now"):
        function(1, old="a")
    with pytest.raises(TypeError, match="missing 1 required"):
        function()


def test_rows_that_are_not_finite_are_found_and_named():
    x = torch.zeros(30, 2)
    assert checks.find_gaps("inputs", {"a": x, "n": torch.arange(30)}) == ""
    x[4:18, 1] = torch.inf
    found = checks.find_gaps("inputs", {"a": x})
    assert found.startswith("inputs['a'] have infinite numbers in rows 4, 5, 6")
    assert found.endswith("13 and 4 more")
    assert checks.find_gaps("x", torch.full((3,), 3e38)) == ""  # only its sum overflows
    assert checks.find_gaps("x", torch.tensor(torch.nan)) == "x have NaN in row 0"


def test_a_short_repr_has_shapes_and_no_values():
    import torch

    from embens.theory import Kernels, MemberKernel

    block = MemberKernel(torch.rand(40, 30), torch.rand(40, 30))
    assert repr(block) == "MemberKernel(same=(40, 30), cross=(40, 30))"
    assert repr(Kernels(block, block, block)).count("(40, 30)") == 6
