"""Values of both sets of inputs."""

from __future__ import annotations

import torch

from embens.theory.input_pair import InputPair, constant_part


def test_a_function_acts_on_both_values():
    assert InputPair(1, 2).map(lambda value: value + 1) == InputPair(2, 3)


def test_equal_numbers_are_constants_and_tensors_stay_pairs():
    assert constant_part(InputPair(0.5, 0.5)) == 0.5
    assert constant_part(InputPair(1, 2)) == InputPair(1, 2)
    pair = InputPair(torch.ones(2), torch.ones(2))
    assert constant_part(pair) is pair
