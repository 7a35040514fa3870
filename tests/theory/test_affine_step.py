"""The step of an affine layer on given kernels."""

from __future__ import annotations

import torch
from torch import nn

from embens.theory.affine_step import AffineStep
from embens.theory.moments import Moments, State
from embens.theory.weight_law import WeightLaw


def step(copies: str = "") -> AffineStep:
    law = WeightLaw(weight_variance=2.0, bias_variance=0.5, weight_gain=3.0, bias_gain=0.25)
    return AffineStep(nn.Linear(1, 1), law, lambda kernel: kernel, None, copies, tracked=True)


def test_variances_and_gains_enter_as_in_the_formula():
    one = torch.ones(1, 1)
    state = State(Moments(one, 4 * one))
    same = step().within(state)
    assert (same.nngp, same.ntk) == (2.5, 2 * 4 + 3 + 0.25)
    assert step().between(state, same) is None


def test_units_and_bias_split_into_two_addends():
    one = torch.ones(1, 1)
    weights, bias = step().split(State(Moments(one, 4 * one)))
    assert weights.same == (2.0, 2 * 4 + 3)
    assert bias.same == (0.5, 0.25)


def test_copies_move_the_gains_to_individual_parameters():
    one = torch.ones(1, 1)
    state = State(Moments(one, 4 * one))
    drawn = step("drawn")
    assert drawn.within(state).ntk == 8
    assert drawn.individual(state) == 3.25
    between = drawn.between(state, drawn.within(state))
    assert between is not None
    assert between() == Moments(None, None)
