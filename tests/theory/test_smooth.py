"""Tables of smooth activations: how exact they are, what they cover, and what they say if not."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from embens.laws import Discrete, Law, Normal, Rademacher, Shifted
from embens.networks import Cos, Erf, Sin
from embens.theory.duals import dual, register
from embens.theory.duals.closed import Cosine, Sine
from embens.theory.duals.homogeneous import Homogeneous
from embens.theory.duals.smooth import Smooth


def number(x):
    return torch.tensor(x, dtype=torch.float64)


def on_a_line(function, slope, law, q1, q2, sign, step):
    """Return F, G, H and F, G between members for z2 = ± sqrt(q2 / q1) z1, on a fine grid."""
    line = torch.arange(-10, 10 + step / 2, step, dtype=torch.float64)
    weights = step * torch.exp(-(line**2) / 2) / math.sqrt(2 * math.pi)
    v, probability = (number([1.0]),) * 2
    if law is not None:
        v, probability = law.mean + law.std * line, weights
    z1, z2 = math.sqrt(q1) * line, sign * math.sqrt(q2) * line
    f = [function(v[:, None] * z) for z in (z1, z2)]
    g = [slope(v[:, None] * z) for z in (z1, z2)]
    bent = [v[:, None] * x for x in g]
    same = [probability @ product @ weights for product in (f[0] * f[1], bent[0] * bent[1])]
    h = probability @ (g[0] * g[1]) @ (weights * z1 * z2)
    means = [[probability @ x for x in pair] for pair in (f, bent)]
    return torch.stack([*same, h, *((a * b) @ weights for a, b in means)])


def all_five(of, law, q1, q2, c):
    return torch.stack([*of.same(q1, q2, c, law), *of.cross(q1, q2, c, law)], dim=-1)


def tanh_slope(x):
    return 1 - torch.tanh(x) ** 2


class TestAccuracy:
    @pytest.mark.parametrize(
        ("law", "q", "step"),
        [(None, 100.0, 0.005), (Normal(), 10.0, 0.0125), (Shifted(0.7), 4.0, 0.02)],
    )
    def test_is_ten_digits_also_for_large_variances(self, law, q, step):
        q1, q2 = number([q, q, q]), number([q, q / 2, q])
        c = torch.sqrt(q1 * q2) * number([1, 1, -1])
        found = all_five(dual(nn.Tanh()), law, q1, q2, c)
        for row, first, second, sign in zip(found, q1, q2, (1, 1, -1), strict=True):
            expected = on_a_line(torch.tanh, tanh_slope, law, first, second, sign, step)
            torch.testing.assert_close(row, expected, rtol=1e-10, atol=1e-10)

    def test_is_relative_for_small_variances(self):
        """Near 0, SiLU is z/2 + z²/4, hence F = c/4 + E[z1² z2²]/16, and so on."""
        of = dual(nn.SiLU()).prepare(0.0, 2.0, None)
        q = number([1e-5, 1e-6])
        f, g, h = of.same(q, q, q / 2, None)
        fourth = q * q + 2 * (q / 2) ** 2  # E[z1² z2²]
        torch.testing.assert_close(f, q / 8 + fourth / 16, rtol=1e-9, atol=0)
        torch.testing.assert_close(g, 0.25 + q / 8, rtol=1e-9, atol=0)
        torch.testing.assert_close(h, q / 8 + fourth / 4, rtol=1e-9, atol=0)

    @pytest.mark.parametrize("law", [None, Rademacher(), Normal(0.5, 0.5)], ids=repr)
    def test_of_interpolation_in_the_variances_is_ten_digits(self, law):
        module = nn.Softplus()
        wide = dual(module).prepare(0.0, 3.0, law)
        for q in (1e-3, 0.037, 0.61, 1.9, 2.99):
            q1, q2 = number([q, q, 2.0]), number([q, q / 1.3, q])
            c = torch.sqrt(q1 * q2) * number([1.0, 0.7, -0.9])
            narrow = Smooth(dual(module).function, "softplus").prepare(q / 1.3, q, law)
            for i in (0, 1):
                arguments = (q1[i : i + 1], q2[i : i + 1], c[i : i + 1])
                found, expected = (all_five(of, law, *arguments) for of in (wide, narrow))
                torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10 * q)

    def test_agrees_with_a_closed_form(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(30, 4, generator=generator, dtype=torch.float64)
        q, c = (x**2).sum(1) / 4, x @ x.T / 4
        table = Smooth(torch.erf, "erf").prepare(q.min().item(), q.max().item(), Rademacher())
        for law in (None, Rademacher()):
            found = all_five(table, law, q[:, None], q[None], c)
            expected = all_five(dual(Erf()), law, q[:, None], q[None], c)
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)

    def test_is_the_same_in_blocks(self):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(400, 3, generator=generator, dtype=torch.float64)
        q, c = (x**2).sum(1) / 3, x @ x.T / 3
        of = dual(nn.Tanh()).prepare(q.min().item(), q.max().item(), None)
        whole = of.same(q[:, None], q[None], c, None)
        part = of.same(q[37:41, None], q[None, 5:300], c[37:41, 5:300], None)
        for all_of_it, some in zip(whole, part, strict=True):
            torch.testing.assert_close(all_of_it[37:41, 5:300], some, rtol=1e-13, atol=1e-14)

    def test_covers_a_law_with_many_values(self):
        class Spread(Discrete):
            atoms = tuple((x / 10, 1 / 21) for x in range(-10, 11))

        q = number([1.3])
        for module in (Erf(), nn.Tanh()):
            function, slope = (torch.erf, lambda x: 2 / math.sqrt(math.pi) * torch.exp(-(x**2)))
            if isinstance(module, nn.Tanh):
                function, slope = torch.tanh, tanh_slope
            expected = sum(
                p * on_a_line(function, slope, Normal(v, 0.0), 1.3, 1.3, 1, 0.05)[:3]
                for v, p in Spread.atoms
            )
            found = all_five(dual(module), Spread(), q, q, q)[0]
            torch.testing.assert_close(found[:3], expected, rtol=1e-10, atol=1e-10)
            assert (found[3:].abs() < 1e-16).all()


def over_modulations(of, law, q1, q2, c):
    """Return all five by sums of the closed form over modulations.

    The grid is even for waves, and for others fine near v = 0, where they are steep.
    """
    if isinstance(of, Sine | Cosine):
        step = min(0.3 / math.sqrt(max(q1, q2)), law.std / 3)
        v = torch.arange(law.mean - 9 * law.std, law.mean + 9 * law.std, step, dtype=torch.float64)
        weights = torch.full_like(v, step)
    else:
        width, step = min(0.3 / math.sqrt(max(q1, q2)), law.std), 0.06
        reach = math.asinh((abs(law.mean) + 9 * law.std) / width)
        t = torch.arange(-reach, reach, step, dtype=torch.float64)
        v, weights = width * torch.sinh(t), step * width * torch.cosh(t)
    density = torch.exp(-(((v - law.mean) / law.std) ** 2) / 2) / (law.std * math.sqrt(2 * math.pi))
    weights = weights * density
    f, g, h = of.fixed(v**2 * q1, v**2 * q2, v**2 * c, with_h=True)
    same = [weights @ f, weights @ (v**2 * g), weights @ (h / v**2)]
    f, g = of.fixed(v[:, None] ** 2 * q1, v**2 * q2, v[:, None] * v * c, with_h=False)
    return torch.stack([*same, weights @ f @ weights, (weights * v) @ g @ (weights * v)])


class TestLargeVariances:
    """Activations with a closed form keep ten digits where inputs are not standardised."""

    @pytest.mark.parametrize(
        ("q", "law"),
        [(3.0, Shifted(0.7)), (64.0, Normal()), (64.0, Normal(2.0, 0.3)), (1e4, Shifted(0.7))],
        ids=repr,
    )
    @pytest.mark.parametrize("module", [Erf(), nn.GELU(), Sin(), Cos()], ids=repr)
    def test_keep_ten_digits_with_normal_modulations(self, module, law, q):
        of = dual(module)
        if isinstance(module, Sin | Cos):
            q = min(q, 300.0)  # what the grid can do
        for second, rho in ((1.0, 1.0), (1.0, 0.5), (0.3, 0.999), (0.7, -0.9)):
            q2 = second * q
            c = rho * math.sqrt(q * q2)
            arguments = number([q]), number([q2]), number([c])
            expected = over_modulations(of, law, q, q2, c)
            largest = over_modulations(of, law, q, q2, math.sqrt(q * q2)).abs()
            scale = torch.cat([torch.maximum(largest[:2], largest[3:]), largest[2:3]])
            scale = scale[[0, 1, 2, 0, 1]]
            for ready in (of, of.prepare(q2, q, law)):
                error = (all_five(ready, law, *arguments)[0] - expected).abs() / scale
                assert error.max() < 1e-10

    def test_agree_with_integrals_over_the_activation_itself(self):
        bell = 2 / math.sqrt(math.pi)
        expected = on_a_line(
            torch.erf, lambda x: bell * torch.exp(-(x**2)), Shifted(0.7), 64.0, 32.0, 1, 0.008
        )
        arguments = number([64.0]), number([32.0]), number([math.sqrt(64.0 * 32.0)])
        found = all_five(dual(Erf()), Shifted(0.7), *arguments)[0]
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)

    @pytest.mark.parametrize("module", [Erf(), nn.GELU(), Sin(), Cos()], ids=repr)
    def test_keep_relative_accuracy_of_small_ones_beside_them(self, module):
        law, of = Shifted(0.7), dual(module)
        ready = of.prepare(0.0, 50.0, law)
        q = number([1e-4, 0.0])
        found = all_five(ready, law, q, q, q / 2)
        expected = over_modulations(of, law, 1e-4, 1e-4, 5e-5)
        torch.testing.assert_close(found[0], expected, rtol=1e-8, atol=1e-14)
        assert found.isfinite().all()

    def test_of_a_law_of_the_users_are_served_by_its_quadrature(self):
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
        f, g, h = of.fixed(v**2 * q1, v**2 * q2, v**2 * c, with_h=True)
        same = [weights @ f, weights @ (v**2 * g), weights @ (h / v**2)]
        f, g = of.fixed(v[:, None] ** 2 * q1, v**2 * q2, v[:, None] * v * c, with_h=False)
        cross = [weights @ f @ weights, (weights * v) @ g @ (weights * v)]
        found = all_five(of, Uniform(), q1, q2, c)[0]
        torch.testing.assert_close(found, torch.stack([*same, *cross]), rtol=1e-10, atol=1e-11)

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
        q = number([100.0])
        with pytest.warns(RuntimeWarning, match="erf .* accurate to"):
            dual(Erf()).same(q, q, q, Coarse())


class TestTables:
    def test_are_shared_by_instances_with_the_same_values(self):
        one, other = dual(nn.Softplus(1.5)), dual(nn.Softplus(1.5))
        assert one is not other
        assert one.prepare(1.0, 1.1, None) is other.prepare(1.0, 1.1, None)
        assert one.prepare(1.0, 1.1, None) is not dual(nn.Softplus(1.6)).prepare(1.0, 1.1, None)

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own
    def test_can_be_made_while_derivatives_are_taken_and_used_afterwards(self):
        q, one = number([1.7]), number([1.0])
        for module, law in ((nn.Softplus(0.9), None), (nn.GELU(), Normal(0.4, 1.1))):
            of = dual(module)

            def first(c, of=of, law=law):
                return torch.func.jvp(lambda x: of.cross(q, q, x, law)[0], (c,), (one,))[1]

            slope, _ = torch.func.jvp(first, (number([0.5]),), (one,))
            expected = of.cross(q, q, number([0.5]), law)[1]
            torch.testing.assert_close(slope, expected, rtol=1e-8, atol=1e-9)

    def test_are_used_again_for_nearby_variances(self):
        of = dual(nn.Tanh())
        assert of.prepare(1.0, 1.1, None) is of.prepare(1.02, 1.3, None)
        assert of.prepare(1.0, 1.1, None) is not of.prepare(1.0, 1.1, Rademacher())

    def test_serve_other_laws_and_variances_too(self):
        of = dual(nn.Tanh()).prepare(1.0, 1.1, None)
        q = number([7.0])
        expected = all_five(dual(nn.Tanh()), Rademacher(), q, q, q / 2)
        torch.testing.assert_close(all_five(of, Rademacher(), q, q, q / 2), expected)
        torch.testing.assert_close(of.same(q, q, q / 2, None)[0], expected[..., 0])

    def test_are_not_made_where_a_closed_form_will_do(self):
        for module, law in ((nn.ReLU(), Normal()), (Erf(), None), (nn.GELU(), Rademacher())):
            of = dual(module)
            assert of.prepare(0.5, 1.0, law) is of

    def test_can_be_made_within_inference_mode_and_used_outside(self):
        of = dual(nn.Tanh())
        with torch.inference_mode():
            prepared = of.prepare(1.0, 1.1, None)
        c = number([0.5]).requires_grad_()
        f, g, _ = prepared.same(number([1.0]), number([1.0]), c, None)
        f.backward()
        torch.testing.assert_close(c.grad, g.detach(), rtol=1e-8, atol=1e-9)


class Steep(nn.Module):
    def __init__(self, slope):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(slope))

    def forward(self, x):
        return torch.tanh(self.slope * x)


class TestRegister:
    def test_makes_a_users_activation_known_by_its_class(self):
        register(Steep)
        module = Steep(2.0)
        before = copy.deepcopy(module.state_dict())
        q = number([0.7])
        found = dual(module).same(q, q, q / 3, None)
        expected = dual(nn.Tanh()).same(4 * q, 4 * q, 4 * q / 3, None)
        factors = (1, 4, 1)  # φ(2z) has variances 4q; G is by c, H has z and not 2z
        for x, y, factor in zip(found, expected, factors, strict=True):
            torch.testing.assert_close(x, factor * y, rtol=1e-10, atol=1e-11)
        assert module.state_dict() == before
        assert module.slope.dtype == torch.float32

    def test_takes_a_function_that_returns_a_dual_as_argument_or_decorator(self):
        class Bent(nn.Module):
            forward = staticmethod(torch.relu)

        register(Bent, lambda module: Homogeneous())
        assert dual(Bent()) == Homogeneous()

        @register(Bent)
        def bent(module):
            return Homogeneous(2.0)

        assert dual(Bent()) == bent(Bent()) == Homogeneous(2.0)

    def test_serves_subclasses(self):
        class Mine(nn.Tanh):
            pass

        q = number([0.7])
        found, expected = (dual(m).same(q, q, q / 3, None)[0] for m in (Mine(), nn.Tanh()))
        assert torch.equal(found, expected)

    def test_respects_the_settings_of_an_instance(self):
        q = number([0.7])
        one, two = (dual(m).same(q, q, q / 3, None)[0] for m in (nn.Softplus(1), nn.Softplus(3)))
        assert abs(one - two) > 0.01
        exact, approximate = (
            dual(nn.GELU(approximate=a)).same(q, q, q / 3, None)[0] for a in ("none", "tanh")
        )
        assert 1e-6 < abs(exact - approximate) < 1e-2


class TestMessages:
    def test_warn_of_a_kink(self):
        class Kinked(nn.Module):
            def forward(self, x):
                return x.abs() + x**2

        register(Kinked)
        q = number([1.0])
        with pytest.warns(RuntimeWarning, match=r"Kinked .* accurate to .* kink"):
            f, _, _ = dual(Kinked()).same(q, q, q, None)
        assert f.item() == pytest.approx(1 + 3 + 2 * 2 * math.sqrt(2 / math.pi), rel=1e-3)

    def test_warn_of_large_variances(self):
        q = number([400.0])
        with pytest.warns(RuntimeWarning, match="scale the inputs or the weights down"):
            f, _, _ = dual(nn.Tanh()).same(q, q, q, None)
        expected = on_a_line(torch.tanh, tanh_slope, None, 400.0, 400.0, 1, 0.001)[0]
        assert f.item() == pytest.approx(expected.item(), rel=1e-4)

    @pytest.mark.parametrize(("q", "reached"), [(3e3, r"0\.\d+"), (2e6, "no digit at all")])
    def test_refuse_variances_so_large_that_results_would_be_wrong(self, q, reached):
        q = number([q])
        with pytest.raises(ValueError, match=f"reached was {reached}. Standardise the inputs or"):
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
        with pytest.raises(ValueError, match="does not act on each number alone"):
            dual(Normalised())
        for kind in (Noisy, Total):
            with pytest.raises(ValueError, match="always the same"):
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
