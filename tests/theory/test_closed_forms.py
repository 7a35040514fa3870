"""Activations with closed forms: large variances, and exactness for ReLU.

``test_expectations.py`` has the contract that they share with all other duals.
"""

import math

import numpy as np
import pytest
import torch
from theory.integrals import LAWS, PI, all_five_of, number, on_a_line
from torch import nn

from embens.laws import Law, Normal, Shifted
from embens.networks import Cos, Erf, Sin
from embens.theory.activations import dual
from embens.theory.closed_forms import Wave


def grid_of_modulations(law, largest_variance, *, is_wave):
    """Return values of v and weights: even for waves, otherwise fine near v = 0."""
    length = 0.3 / math.sqrt(largest_variance)  # on which a steep function of v changes
    if is_wave:
        step = min(length, law.std / 3)
        v = torch.arange(law.mean - 9 * law.std, law.mean + 9 * law.std, step, dtype=torch.float64)
        return v, torch.full_like(v, step)
    length, step = min(length, law.std), 0.06
    end = math.asinh((abs(law.mean) + 9 * law.std) / length)
    t = torch.arange(-end, end, step, dtype=torch.float64)
    return length * torch.sinh(t), step * length * torch.cosh(t)


def sum_over_modulations(of, v, weights, q1, q2, c):
    """Return all five from the closed form for fixed modulations v with these probabilities."""
    f, g, h = of.fixed(v**2 * q1, v**2 * q2, v**2 * c, with_h=True)
    v1 = v[:, None]
    cross_f, cross_g = of.fixed(v1**2 * q1, v**2 * q2, v1 * v * c, with_h=False)
    expectations = [
        weights @ f,
        weights @ (v**2 * g),
        weights @ (h / v**2),
        weights @ cross_f @ weights,
        (weights * v) @ cross_g @ (weights * v),
    ]
    return torch.stack(expectations)


def over_modulations(of, law, q1, q2, c):
    """Return all five for a normal law."""
    v, weights = grid_of_modulations(law, max(q1, q2), is_wave=isinstance(of, Wave))
    density = torch.exp(-(((v - law.mean) / law.std) ** 2) / 2) / (law.std * math.sqrt(2 * math.pi))
    return sum_over_modulations(of, v, weights * density, q1, q2, c)


def scale_of_errors(of, law, q1, q2):
    """Return the largest value of each of the five at any covariance."""
    f, g, h, cross_f, cross_g = over_modulations(of, law, q1, q2, math.sqrt(q1 * q2)).abs()
    largest_f, largest_g = torch.maximum(f, cross_f), torch.maximum(g, cross_g)
    return torch.stack([largest_f, largest_g, h, largest_f, largest_g])


RATIOS = ((1.0, 1.0), (1.0, 0.5), (0.3, 0.999), (0.7, -0.9))  # q2 / q1, ρ


class TestLargeVariances:
    """Activations with a closed form keep ten digits where inputs are not standardised."""

    @pytest.mark.parametrize(
        ("q", "law"),
        [
            (3.0, Shifted(0.7)),
            pytest.param(64.0, Normal(), marks=pytest.mark.long),
            pytest.param(64.0, Normal(2.0, 0.3), marks=pytest.mark.long),
            pytest.param(1e4, Shifted(0.7), marks=pytest.mark.long),
        ],
        ids=repr,
    )
    @pytest.mark.parametrize("module", [Erf(), nn.GELU(), Sin(), Cos()], ids=repr)
    def test_keep_ten_digits_with_normal_modulations(self, module, law, q):
        of = dual(module)
        if isinstance(module, Sin | Cos):
            q = min(q, 300.0)  # what the grid can do
        geometries = [(q * x, rho * q * math.sqrt(x)) for x, rho in RATIOS]
        q2, c = (number(list(x)) for x in zip(*geometries, strict=True))
        for ready in {of, of.prepare(q, law)}:
            computed = all_five_of(ready, law, number([q]), q2, c)
            for row, (second, covariance) in zip(computed, geometries, strict=True):
                expected = over_modulations(of, law, q, second, covariance)
                errors = (row - expected).abs() / scale_of_errors(of, law, q, second)
                assert errors.max() < 1e-10

    @pytest.mark.long
    def test_agree_with_integrals_over_the_activation_itself(self):
        bell = 2 / math.sqrt(math.pi)
        expected = on_a_line(
            torch.erf, lambda x: bell * torch.exp(-(x**2)), Shifted(0.7), 64.0, 32.0, 1, 0.008
        )
        arguments = number([64.0]), number([32.0]), number([math.sqrt(64.0 * 32.0)])
        computed = all_five_of(dual(Erf()), Shifted(0.7), *arguments)[0]

        torch.testing.assert_close(computed, expected, rtol=1e-9, atol=1e-10)

    @pytest.mark.parametrize("module", [Erf(), nn.GELU(), Sin(), Cos()], ids=repr)
    def test_small_values_keep_their_relative_accuracy(self, module):
        law, of = Shifted(0.7), dual(module)
        ready = of.prepare(50.0, law)
        q = number([1e-4, 0.0])
        computed = all_five_of(ready, law, q, q, q / 2)
        expected = over_modulations(of, law, 1e-4, 1e-4, 5e-5)

        torch.testing.assert_close(computed[0], expected, rtol=1e-8, atol=1e-14)
        assert computed.isfinite().all()

    def test_use_the_quadrature_of_a_users_law(self):
        class Uniform(Law):
            mean, second_moment = 0.5, 1 / 3

            def sample(self, shape, generator=None, dtype=None, device=None):
                return torch.rand(shape, generator=generator, dtype=dtype, device=device)

            def quadrature(self, n=181):
                nodes, weights = (number(x) for x in np.polynomial.legendre.leggauss(n))
                return (nodes + 1) / 2, weights / 2

        v, weights = Uniform().quadrature(400)
        q1, q2, c = number([20.0]), number([9.0]), number([12.0])
        of = dual(Erf())
        expected = sum_over_modulations(of, v, weights, q1, q2, c)
        computed = all_five_of(of, Uniform(), q1, q2, c)[0]
        torch.testing.assert_close(computed, expected, rtol=1e-10, atol=1e-11)

    def test_are_refused_if_the_quadrature_of_a_law_is_too_coarse(self):
        class Coarse(Law):
            mean, second_moment = 0.5, 1 / 3

            def sample(self, shape, generator=None, dtype=None, device=None):
                return torch.rand(shape, generator=generator, dtype=dtype, device=device)

            def quadrature(self, n=181):
                return (torch.arange(n) + 0.5).double() / n, torch.ones(n).double() / n

        q = number([1e8])
        with pytest.raises(ValueError, match="Standardise the inputs"):
            dual(Erf()).same(q, q, q, Coarse())
        q = number([10.0])
        with pytest.warns(RuntimeWarning, match="erf .* accurate to"):
            dual(Erf()).same(q, q, q, Coarse())


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
