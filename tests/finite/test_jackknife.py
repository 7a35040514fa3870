"""Standard errors by leaving out one part at a time, against the same by hand."""

from __future__ import annotations

import math

import pytest
import torch

from embens.finite.jackknife import jackknife_error, pair_error


def test_of_a_mean_it_is_the_usual_error():
    values = torch.randn(9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    without = torch.stack([torch.cat([values[:i], values[i + 1 :]]).mean() for i in range(9)])
    assert jackknife_error(without) == pytest.approx(float(values.std()) / 3)


def test_of_pairs_it_leaves_out_a_member_with_all_its_pairs():
    matrix = torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix = matrix + matrix.T
    without = []
    for a in range(5):
        kept = [b for b in range(5) if b != a]
        pairs = [float(matrix[b, c]) for b in kept for c in kept if b != c]
        without.append(sum(pairs) / len(pairs))
    assert pair_error(matrix) == pytest.approx(jackknife_error(torch.tensor(without).double()))
    assert math.isnan(pair_error(matrix[:2, :2]))
