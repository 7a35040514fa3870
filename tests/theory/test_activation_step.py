"""Pending modulations without an activation, and the refusal of units that are not Gaussian."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from embens.theory.activation_step import LINEAR, activate, settle
from embens.theory.moments import Moments, State


def test_nothing_pending_changes_nothing():
    state = State(Moments(torch.ones(1, 1)), gaussian=True)
    assert settle(nn.Identity(), state) is state


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gaussian": False}, "not Gaussian"),
        ({"gaussian": True, "uneven_tangents": True}, "vary over units"),
    ],
)
def test_activations_need_gaussian_units(settings, message):
    with pytest.raises(ValueError, match=message):
        activate(nn.ReLU(), LINEAR, State(Moments(torch.ones(1, 1)), **settings))
