"""Activations that are linear on each half-line."""

import math

import pytest
import torch
from theory.integrals import LAWS, PI, number
from torch import nn

from embens.laws import Normal
from embens.theory.duals import dual


class TestHomogeneous:
    def test_is_exact_on_the_diagonal(self):
        q = torch.rand(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 7
        f, g, h = dual(nn.ReLU()).same(q, q, q, None)
        assert torch.equal(f, q / 2)
        assert torch.equal(h, q / 2)
        assert (g == 0.5).all()
        f, g, _ = dual(nn.ReLU()).same(q, q, -q, None)
        assert f.abs().max() < 1e-15 * 7
        assert g.abs().max() < 1e-15

    def test_is_exact_for_collinear_inputs(self):
        q = torch.rand(1000, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 7
        for factor in (3.0, 0.7, 1 / 3):
            _, g, _ = dual(nn.ReLU()).same(q, factor**2 * q, factor * q, None)
            assert (g - 0.5).abs().max() < 1e-15

    def test_resolves_small_angles(self):
        one = number([1.0])
        for angle in (1e-2, 1e-4, 1e-6):
            c = number([1 - 2 * math.sin(angle / 2) ** 2])
            _, g, _ = dual(nn.ReLU()).same(one, one, c, None)
            # c itself is known to 1e-16, the angle hence to that over the angle.
            assert g.item() == pytest.approx((PI - angle) / (2 * PI), abs=1e-16 / angle + 1e-16)

    def test_forgives_correlations_beyond_one_by_rounding(self):
        q = number([1.0, 1.0])
        f, g, h = dual(nn.ReLU()).same(q, q, number([1 + 3e-16, -1 - 3e-16]), Normal())
        assert all(x.isfinite().all() for x in (f, g, h))
        assert g.tolist() == pytest.approx([0.5, 0.0], abs=1e-15)

    def test_bounds_g_from_below_between_members_for_positive_correlations(self):
        for law in LAWS[1:]:
            for rho in (0.0, 0.3, 0.99, 1.0):
                one, c = number([1.0]), number([rho])
                assert dual(nn.ReLU()).cross(one, one, c, law)[1] >= law.mean**2 / 4 - 1e-15
