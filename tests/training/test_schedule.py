"""The paper's schedule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from embens.training import linear_decay


def test_the_schedule_is_constant_then_linear():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.01)
    scheduler = linear_decay(1000)(optimizer)
    rates = []
    for _ in range(1000):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[:501] == [0.01] * 501
    assert rates[750] == pytest.approx((0.01 + 1e-4) / 2)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)


@pytest.mark.parametrize("options", [{"hold": 2}, {"final": -0.1}])
def test_fractions_outside_zero_and_one_raise(options):
    with pytest.raises(ValueError, match="between 0 and 1"):
        linear_decay(10, **options)
