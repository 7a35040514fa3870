"""Smooth activations: accuracy of the quadrature, warnings and errors.

``test_expectations.py`` has the contract that they share with all other duals.
"""

import math

import pytest
import torch
from theory.integrals import all_five_of, number, on_a_line
from torch import nn

from embens.laws import Discrete, Law, Normal, Rademacher, Shifted
from embens.networks import Cos, Erf, Sin
from embens.theory.activations import dual, register
from embens.theory.quadrature import Smooth


def tanh_slope(x):
    return 1 - torch.tanh(x) ** 2


def erf_slope(x):
    return 2 / math.sqrt(math.pi) * torch.exp(-(x**2))


class TestAccuracy:
    @pytest.mark.parametrize(
        ("law", "q", "step"),
        [(None, 100.0, 0.005), (Normal(), 10.0, 0.0125), (Shifted(0.7), 4.0, 0.02)],
    )
    def test_is_eight_digits_also_for_large_variances(self, law, q, step):
        q1, q2 = number([q, q, q]), number([q, q / 2, q])
        c = torch.sqrt(q1 * q2) * number([1, 1, -1])
        computed = all_five_of(dual(nn.Tanh()), law, q1, q2, c)
        for row, first, second, sign in zip(computed, q1, q2, (1, 1, -1), strict=True):
            expected = on_a_line(torch.tanh, tanh_slope, law, first, second, sign, step)
            torch.testing.assert_close(row, expected, rtol=1e-8, atol=1e-8)

    def test_is_relative_for_small_variances(self):
        """Near 0, SiLU is z/2 + z²/4, hence F = c/4 + E[z1² z2²]/16, and so on."""
        of = dual(nn.SiLU()).prepare(2.0, None)
        q = number([1e-5, 1e-6])
        f, g, h = of.same(q, q, q / 2, None)
        fourth = q * q + 2 * (q / 2) ** 2  # E[z1² z2²]

        torch.testing.assert_close(f, q / 8 + fourth / 16, rtol=1e-9, atol=0)
        torch.testing.assert_close(g, 0.25 + q / 8, rtol=1e-9, atol=0)
        torch.testing.assert_close(h, q / 8 + fourth / 4, rtol=1e-9, atol=0)

    @pytest.mark.parametrize("law", [None, Rademacher(), Normal(0.5, 0.5)], ids=repr)
    def test_of_interpolation_in_the_variances_is_eight_digits(self, law):
        module = nn.Softplus()
        wide = dual(module).prepare(3.0, law)
        for q in (1e-3, 0.037, 0.61, 1.9, 2.99):
            q1, q2 = number([q, q, 2.0]), number([q, q / 1.3, q])
            c = torch.sqrt(q1 * q2) * number([1.0, 0.7, -0.9])
            narrow = Smooth(dual(module).function, "softplus").prepare(q, law)
            for i in (0, 1):
                arguments = (q1[i : i + 1], q2[i : i + 1], c[i : i + 1])
                computed = all_five_of(wide, law, *arguments)
                expected = all_five_of(narrow, law, *arguments)
                torch.testing.assert_close(computed, expected, rtol=1e-8, atol=1e-8 * q)

    def test_agrees_with_a_closed_form(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(30, 4, generator=generator, dtype=torch.float64)
        q, c = (x**2).sum(1) / 4, x @ x.T / 4
        for law in (None, Rademacher()):
            computed = all_five_of(Smooth(torch.erf, "erf"), law, q[:, None], q[None], c)
            expected = all_five_of(dual(Erf()), law, q[:, None], q[None], c)
            torch.testing.assert_close(computed, expected, rtol=1e-8, atol=1e-9)

    @pytest.mark.parametrize("module", [Cos(), Sin()], ids=repr)
    def test_resolves_waves_and_agrees_with_their_closed_forms(self, module):
        q1, q2 = number([6.0, 6.0, 5.0]), number([6.0, 4.0, 2.0])
        c = torch.sqrt(q1 * q2) * number([1.0, -0.9, 0.6])
        table = Smooth(dual(module).function, "wave").prepare(6.0, Normal())
        computed = all_five_of(table, Normal(), q1, q2, c)
        expected = all_five_of(dual(module), Normal(), q1, q2, c)

        torch.testing.assert_close(computed, expected, rtol=1e-8, atol=1e-8)

    def test_is_the_same_in_blocks(self):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(60, 3, generator=generator, dtype=torch.float64)
        q, c = (x**2).sum(1) / 3, x @ x.T / 3
        of = dual(nn.Tanh()).prepare(q.max().item(), None)
        whole = of.same(q[:, None], q[None], c, None)
        part = of.same(q[37:41, None], q[None, 5:50], c[37:41, 5:50], None)

        for whole_kernel, block in zip(whole, part, strict=True):
            torch.testing.assert_close(whole_kernel[37:41, 5:50], block, rtol=1e-13, atol=1e-14)

    @pytest.mark.parametrize(
        ("module", "function", "slope"),
        [(Erf(), torch.erf, erf_slope), (nn.Tanh(), torch.tanh, tanh_slope)],
    )
    def test_covers_a_law_with_many_values(self, module, function, slope):
        class Spread(Discrete):
            atoms = tuple((x / 10, 1 / 21) for x in range(-10, 11))

        q = number([1.3])
        computed = all_five_of(dual(module), Spread(), q, q, q)[0]

        expected = torch.zeros(3)
        for value, probability in Spread.atoms:
            fixed = on_a_line(function, slope, Normal(value, 0.0), 1.3, 1.3, 1, 0.05)
            expected = expected + probability * fixed[:3]
        torch.testing.assert_close(computed[:3], expected, rtol=1e-8, atol=1e-8)
        assert (computed[3:].abs() < 1e-16).all()


class Kinked(nn.Module):
    def __init__(self, power):
        super().__init__()
        self.power = power

    def forward(self, x):
        return x.abs() ** self.power + x**2


class TestMessages:
    def test_warn_of_a_weak_kink_and_refuse_a_strong_one(self):
        register(Kinked)
        q = number([1.0])
        with pytest.warns(RuntimeWarning, match=r"Kinked .* accurate to .* kink"):
            f, _, _ = dual(Kinked(1.75)).same(q, q, q, None)

        def absolute_moment(k):
            return 2 ** (k / 2) * math.gamma((k + 1) / 2) / math.sqrt(math.pi)

        expected = absolute_moment(3.5) + 2 * absolute_moment(3.75) + 3
        assert f.item() == pytest.approx(expected, rel=1e-4)
        with pytest.raises(ValueError, match="an activation with a kink"):
            dual(Kinked(1)).same(q, q, q, None)

    def test_warn_of_large_variances(self):
        q = number([200.0])
        with pytest.warns(RuntimeWarning, match="scale the inputs or the weights down"):
            f, _, _ = dual(nn.Tanh()).same(q, q, q, None)
        expected = on_a_line(torch.tanh, tanh_slope, None, 200.0, 200.0, 1, 0.001)[0]
        assert f.item() == pytest.approx(expected.item(), rel=1e-4)

    @pytest.mark.parametrize("q", [3e3, 2e6])
    def test_refuse_variances_so_large_that_results_would_be_wrong(self, q):
        q = number([q])
        with pytest.raises(ValueError, match=r"got \d.*. Standardise the inputs or"):
            dual(nn.Tanh()).same(q, q, q, None)

    def test_refuse_what_grows_too_fast(self):
        class Explosive(nn.Module):
            def forward(self, x):
                return torch.exp(x**4)

        register(Explosive)
        with pytest.raises(ValueError, match="grows too fast"):
            dual(Explosive()).same(number([1.0]), number([1.0]), number([0.5]), None)

    def test_refuse_modules_that_mix_numbers_or_are_random(self):
        class Normalised(nn.Module):
            def forward(self, x):
                return x - x.mean()

        class Noisy(nn.Module):
            def forward(self, x):
                return x + torch.rand_like(x)

        class Total(nn.Module):
            def forward(self, x):
                return x.sum()

        for kind in (Normalised, Noisy, Total):
            register(kind)
        with pytest.raises(ValueError, match="does not act elementwise"):
            dual(Normalised())
        for kind in (Noisy, Total):
            with pytest.raises(ValueError, match="must act elementwise and not be random"):
                dual(kind())

    def test_say_how_to_make_an_activation_known(self):
        with pytest.raises(TypeError, match=r"register_activation\(PReLU\)"):
            dual(nn.PReLU())

    def test_refuse_to_register_an_instance(self):
        with pytest.raises(TypeError, match="the class and not an instance"):
            register(nn.Tanh())

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
    def test_refuse_impossible_variances(self, bad):
        q = number([1.0, bad])
        with pytest.raises(ValueError, match="must be finite and >= 0"):
            dual(nn.Tanh()).same(q, q, q / 2, None)

    def test_name_what_a_law_lacks(self):
        class Bare(Law):
            mean, second_moment = 0.0, 1.0

            def sample(self, shape, generator=None, dtype=None, device=None):
                return torch.ones(shape)

        q = number([1.0])
        with pytest.raises(NotImplementedError, match="quadrature"):
            dual(nn.Tanh()).same(q, q, q, Bare())
        with pytest.raises(NotImplementedError, match="half-line moments"):
            dual(nn.ReLU()).cross(q, q, q, Bare())
