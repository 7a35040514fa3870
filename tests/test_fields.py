"""Fields of files are read with their type and range, and errors name all that matters."""

import math

import pytest
import torch
from torch import Tensor

from embens.fields import FIX, Fields, is_typed, refusal
from embens.files import Refused

VALUES = {
    "whole": 3,
    "number": 0.5,
    "flag": True,
    "text": "words",
    "items": [1, 2],
    "fields": {"a": 1},
    "nan": math.nan,
    "huge": 10**400,
    "tensor": torch.zeros(2),
}


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda f: f.whole("flag"), "flag must be an integer of at least 1, got True"),
        (lambda f: f.whole("number"), "number must be an integer of at least 1, got 0.5"),
        (lambda f: f.whole("whole", 4), "whole must be an integer of at least 4, got 3"),
        (lambda f: f.whole("whole", 0, 2), "whole must be an integer from 0 to 2, got 3"),
        (lambda f: f.whole("huge"), "huge must be an integer of at least 1, got 1000"),
        (lambda f: f.number("nan"), "nan must be a finite number, got nan"),
        (lambda f: f.number("huge"), "huge must be a finite number, got 1000"),
        (lambda f: f.number("flag"), "flag must be a finite number, got True"),
        (lambda f: f.number("number", 1, 2), "number must be a finite number from 1 to 2, got 0.5"),
        (lambda f: f.flag("whole"), "whole must be true or false, got 3"),
        (lambda f: f.text("whole"), "whole must be a text, got 3"),
        (lambda f: f.text("text", ("a", "b")), "text must be one of 'a', 'b', got 'words'"),
        (lambda f: f.items("text"), "text must be a list, got 'words'"),
        (lambda f: f.texts("items"), r"items must be a list of texts, got \[1, 2\]"),
        (lambda f: f.wholes("items", 0, 1), r"items must be a list of integers from 0 to 1, got"),
        (lambda f: f.fields("items"), r"items must be a dictionary, got \[1, 2\]"),
        (lambda f: f.fields("fields", ["b"]), "fields has no field 'b'"),
        (lambda f: f.fields("fields", []), "fields has an unknown field 'a'"),
        (lambda f: f.each("items", []), r"items\[0\] must be a dictionary, got 1"),
        (lambda f: f.tensor("whole"), "whole must be a tensor of finite values, got 3"),
        (lambda f: f.tensor("tensor", 2), r"tensor must be a tensor with 2 dimensions, got a ten"),
        (lambda f: f.typed("whole", str), "whole must be a value of type str, got 3"),
        (lambda f: f.text("missing"), "missing must be a text, got None"),
    ],
)
def test_a_wrong_value_is_an_error_with_file_field_value_and_fix(read, expected):
    fields = Fields(VALUES, "x.safetensors: spec", VALUES)
    with pytest.raises(Refused, match=r"^x\.safetensors: spec\." + expected) as caught:
        read(fields)
    assert str(caught.value).endswith(FIX)


def test_right_values_are_returned():
    fields = Fields(VALUES, "x", VALUES)
    assert fields.whole("whole", 3, 3) == 3
    assert fields.number("number", 0.5, 0.5) == 0.5
    assert fields.flag("flag") is True
    assert fields.text("text", ["words"]) == "words"
    assert fields.wholes("items", 1, 2) == [1, 2]
    assert fields.fields("fields", ["a"], ["b"]).whole("a") == 1
    assert torch.equal(fields.tensor("tensor", 1), torch.zeros(2))


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (1, int, True),
        (True, int, False),
        (1, float, True),
        (math.nan, float, False),
        (math.inf, float, True),
        (None, float | None, True),
        ("a", float | None, False),
        (["a"], list[str], True),
        (["a", 1], list[str], False),
        ({}, dict[str, int], True),
        (torch.zeros(2), Tensor | float, True),
        (torch.tensor(math.nan), Tensor, False),
        (1, bool, False),
    ],
)
def test_types_are_those_of_annotations(value, hint, expected):
    assert is_typed(value, hint) == expected


def test_long_values_and_tensors_are_described_briefly():
    assert len(str(refusal("x", "short", "long" * 1000))) < 300
    message = str(refusal("x", "finite", torch.full((2,), math.nan)))
    assert "a tensor of torch.float32 and shape (2,) with NaN or infinite values" in message
