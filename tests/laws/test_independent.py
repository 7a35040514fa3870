"""Exact moments, quadratures and parameters of the laws of independent members."""

import math
from fractions import Fraction

import pytest
import torch
from laws.sampling import generator

from embens.laws import (
    Bernoulli,
    Constant,
    Normal,
    Rademacher,
    Shifted,
    Signs,
    Ternary,
    Uniform,
)


class TestExactMoments:
    @pytest.mark.parametrize(
        ("law", "mean", "second_moment", "overlap", "kurtosis"),
        [
            (Constant(-3), -3, 9, 1, 1),
            (Constant(0), 0, 0, 1, 1),
            (Normal(), 0, 1, 0, 3),
            (Normal(1, 2), 1, 5, 1 / 5, 73 / 25),
            (Normal(1, 0.5), 1, 1.25, 0.8, 1.72),
            (Shifted(0.7), 0.7, 1, 0.49, 2.5198),
            (Bernoulli(0.25, scale=4), 1, 4, 1 / 4, 4),
            (Ternary(0.2), 0, 0.8, 0, 1.25),
            (Ternary(1 / 3, math.sqrt(1.5)), 0, 1, 0, 1.5),
            (Uniform(), 0, 1, 0, 9 / 5),
            (Uniform(0, 3), 1.5, 3, 3 / 4, 9 / 5),
            (Rademacher(), 0, 1, 0, 1),
            (Signs(-0.7), -0.7, 1, 0.49, 1),
        ],
    )
    def test_equal_textbook_values(self, law, mean, second_moment, overlap, kurtosis):
        assert law.kurtosis == pytest.approx(kurtosis, rel=1e-14)
        assert law.mean == pytest.approx(mean, abs=1e-16)
        assert law.second_moment == pytest.approx(second_moment, rel=1e-15)
        assert law.overlap == pytest.approx(overlap, rel=1e-15)
        assert law.variance == pytest.approx(second_moment - mean**2, rel=1e-15)

    @pytest.mark.parametrize(
        ("law", "positive", "negative"),
        [
            (Normal(), (1 / 2, 1 / math.sqrt(2 * math.pi), 1 / 2), None),
            (Rademacher(), (1 / 2, 1 / 2, 1 / 2), None),
            (Ternary(0.4), (0.3, 0.3, 0.3), None),
            (Signs(0.5), (0.75, 0.75, 0.75), (0.25, 0.25, 0.25)),
            (Bernoulli(0.6, scale=2), (0.6, 1.2, 2.4), (0, 0, 0)),
            (Bernoulli(0.6, scale=-2), (0, 0, 0), (0.6, 1.2, 2.4)),
            (Constant(3), (1, 3, 9), (0, 0, 0)),
            (Shifted(-1), (0, 0, 0), (1, 1, 1)),
            (Uniform(-1, 3), (3 / 4, 9 / 8, 9 / 4), (1 / 4, 1 / 8, 1 / 12)),
            (Normal(2, 0), (1, 2, 4), (0, 0, 0)),
        ],
    )
    def test_of_half_lines_equal_closed_forms(self, law, positive, negative):
        for sign, expected in ((1, positive), (-1, negative or positive)):
            moments = [law.half_moment(k, sign) for k in range(3)]
            assert moments == pytest.approx(expected, rel=1e-15, abs=0)

    @pytest.mark.parametrize("law", [Normal(-0.4, 1.7), Shifted(0.7), Shifted(-0.2)], ids=repr)
    @pytest.mark.parametrize("sign", [1, -1])
    @pytest.mark.parametrize("k", [1, 2])
    def test_of_gaussian_half_lines_agree_with_quadrature(self, law, k, sign):
        nodes, weights = law.quadrature(20_001)
        step = (nodes[1] - nodes[0]).item()
        by_quadrature = (weights @ (sign * nodes).clamp(min=0) ** k).item()
        assert law.half_moment(k, sign) == pytest.approx(by_quadrature, abs=step**2)

    def test_of_gaussian_half_lines_are_accurate_in_far_tails(self):
        for mean in (8.0, 20.0, 37.0, 38.4, 1e3):
            moments = [Normal(mean).half_moment(k, -1) for k in range(2)]
            assert 0 <= moments[1] <= moments[0] < 1e-14
        density = math.exp(-450) / math.sqrt(2 * math.pi)
        mills = 1 / 30 - 1 / 30**3 + 3 / 30**5

        assert Normal(30.0).half_moment(0, -1) == pytest.approx(density * mills, rel=1e-6, abs=0)


class TestQuadrature:
    @pytest.mark.parametrize(("n", "tolerance"), [(15, 1e-6), (31, 1e-13), (181, 1e-13)])
    def test_of_gaussians_converges_geometrically(self, n, tolerance):
        nodes, weights = Normal().quadrature(n)
        assert len(nodes) == n
        characteristic = (weights @ torch.cos(nodes)).item()
        assert characteristic == pytest.approx(math.exp(-1 / 2), abs=tolerance)

    def test_resolves_tanh_of_a_product_of_gaussians(self):
        def second_moment(n):
            v, weights = Normal().quadrature(n)
            return weights @ torch.tanh(v[:, None] * v) ** 2 @ weights

        torch.testing.assert_close(second_moment(181), second_moment(1441), rtol=0, atol=1e-11)

    def test_of_discrete_laws_is_their_atoms(self):
        nodes, weights = Ternary(0.5).quadrature(7)
        assert nodes.tolist() == [-1, 0, 1]
        assert weights.tolist() == [0.25, 0.5, 0.25]

    def test_leaves_out_values_of_probability_zero(self):
        assert Ternary(0.0).quadrature()[0].tolist() == [-1, 1]
        assert Bernoulli(1.0, scale=3.0).quadrature()[0].tolist() == [3]

    def test_raises_for_fewer_than_two_nodes(self):
        with pytest.raises(ValueError, match="at least 2 nodes, got n=1"):
            Normal().quadrature(1)


class TestShifted:
    @pytest.mark.parametrize("p", [-1.0, -0.3, 0.0, 0.6, 0.999, 1.0])
    def test_has_the_distribution_of_a_normal_law_but_is_not_equal_to_it(self, p):
        law, normal = Shifted(p), Normal(p, math.sqrt(1 - p * p))
        assert law != normal
        torch.testing.assert_close(law.sample(9, generator()), normal.sample(9, generator()))
        for k, sign in ((0, 1), (1, 1), (2, -1)):
            assert law.half_moment(k, sign) == pytest.approx(normal.half_moment(k, sign))

    def test_keeps_the_second_moment_at_one(self):
        assert {Shifted(p / 100).second_moment for p in range(-100, 101)} == {1.0}

    def test_has_an_accurate_deviation_near_one(self):
        p = 1 - 2.0**-50
        assert Shifted(p).std == math.sqrt(Fraction(1) - Fraction(p) ** 2)


class TestSigns:
    def test_of_mean_zero_sample_the_same_values_as_rademacher(self):
        assert torch.equal(Signs(0).sample(99, generator()), Rademacher().sample(99, generator()))
        assert Signs(0).atoms == Rademacher().atoms

    def test_of_mean_one_are_constant(self):
        for p in (-1, 1):
            assert Signs(p).quadrature()[0].tolist() == [p]


class TestParameters:
    def test_are_converted_to_floats(self):
        assert Normal(0, 1) == Normal(0.0, 1.0) == Normal(torch.tensor(0), torch.ones(1, 1))
        assert hash(Normal(0, 1)) == hash(Normal(0.0, 1.0))
        assert repr(Normal(0, 1)) == "Normal(mean=0.0, std=1.0)"
        assert Bernoulli(Fraction(1, 2)) == Bernoulli(0.5)

    def test_may_be_numpy_numbers(self):
        numpy = pytest.importorskip("numpy")
        assert repr(Normal(numpy.float32(0.5), numpy.int64(2))) == "Normal(mean=0.5, std=2.0)"

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (
                lambda: Shifted(1.5),
                r"Shifted: p must be .* in \[-1, 1\].*use Normal.*got 1.5",
            ),
            (lambda: Shifted(-1.0001), r"p must be a number in \[-1, 1\].*got -1.0001"),
            (lambda: Signs(1.5), r"Signs: p must be a number in \[-1, 1\].*got 1.5"),
            (lambda: Normal(0, -1), r"Normal: std must be a number >= 0.*got -1"),
            (lambda: Bernoulli(0), r"Bernoulli: keep must be in \(0, 1\], one minus.*got 0"),
            (lambda: Bernoulli(1.1), r"keep must be in \(0, 1\].*got 1.1"),
            (lambda: Bernoulli(0.5, math.inf), r"scale must be a finite number.*got inf"),
            (
                lambda: Ternary(1.0),
                r"Ternary: zero must be .* in \[0, 1\).*use Constant\(0\)",
            ),
            (lambda: Uniform(1, 1), r"Uniform: high must be a number above low .*Constant.*got 1"),
            (lambda: Uniform(-math.inf), r"Uniform: low must be a finite number, got -inf"),
            (lambda: Ternary(0.5, math.nan), r"Ternary: scale must be a finite number.*got nan"),
            (lambda: Ternary(-0.1), r"zero must be a number in \[0, 1\).*got -0.1"),
            (lambda: Constant(math.nan), r"Constant: value must be a finite number.*got nan"),
            (lambda: Normal(math.inf), r"mean must be a finite number, got inf"),
            (lambda: Normal(0, math.nan), r"std must be a number >= 0.*got nan"),
            (lambda: Shifted(math.nan), r"p must be a number in \[-1, 1\].*got nan"),
        ],
    )
    def test_out_of_range_raise(self, make, message):
        with pytest.raises(ValueError, match=message):
            make()

    @pytest.mark.parametrize("value", ["1", True, None, 1j, [1.0], torch.ones(2), torch.ones(0)])
    @pytest.mark.parametrize("law", [Constant, Normal, Shifted, Signs, Bernoulli, Ternary, Uniform])
    def test_of_another_type_raise(self, law, value):
        with pytest.raises(TypeError, match=rf"{law.__name__}: \w+ must be .*, got "):
            law(value)
