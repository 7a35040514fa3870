"""Checks of rules on two samples: comparisons and noise."""

from __future__ import annotations

import torch

from embens.finite.verification import TOLERANCE, is_close, with_noise


def test_close_is_relative_to_the_largest_entry():
    expected = torch.tensor([1e6, 1.0], dtype=torch.float64)
    error = TOLERANCE[torch.float64] * 1e6
    assert is_close(expected + 0.9 * error, expected)
    assert not is_close(expected + 1.1 * error, expected)
    assert not is_close(expected[:1], expected)


def test_noise_is_fixed_and_leaves_integers():
    pair = (torch.zeros(2, 3), torch.arange(4).view(2, 2))
    first, second = with_noise(pair), with_noise(pair)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[0][0], first[0][1])
    assert torch.equal(first[1], pair[1])
