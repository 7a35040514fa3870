"""The refusal of units that are not Gaussian."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from embens.theory.activation_step import LINEAR, activate
from embens.theory.moments import Moments, State


def test_activations_need_gaussian_units():
    with pytest.raises(ValueError, match="not Gaussian"):
        activate(nn.ReLU(), LINEAR, State(Moments(torch.ones(1, 1))))
