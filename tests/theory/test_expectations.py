"""The contract of every dual, joint laws, derivatives, and the paper's errata about duals."""

import math

import pytest
import torch
from theory.integrals import (
    CASES,
    EVERY,
    GEOMETRIES,
    PI,
    Three,
    TwoSteps,
    all_five,
    by_grid,
    functions_of,
    name,
    nodes_of,
    number,
    tensors,
    two_steps,
)
from torch import nn

from embens import networks
from embens.laws import (
    Bernoulli,
    Constant,
    Correlated,
    Disjoint,
    Masks,
    Normal,
    Rademacher,
    Shifted,
    Ternary,
)
from embens.theory.activations import dual, register
from embens.theory.closed_forms import Homogeneous
from embens.theory.expectations import Dual


def list_joint_cases():
    cases = []
    for module in EVERY:
        cases += [(module, Masks(0.5)), (module, Disjoint())]
        if isinstance(dual(module), Homogeneous):
            cases += [(module, Correlated(0.6)), (module, Correlated(-0.5))]
    return cases


def draw_correlated_pair(count, q1, q2, rho, generator):
    """Return samples of two normal variables with these variances and this correlation."""
    x, y = torch.randn(2, count, generator=generator, dtype=torch.float64)
    z1 = math.sqrt(q1) * x
    z2 = math.sqrt(q2) * (rho * x + math.sqrt(1 - rho**2) * y)
    return z1, z2


def assert_agree_with_samples(computed, samples, errors):
    """Compare expectations with the means of samples ``(expectation, sample)``."""
    standard_error = samples.std(dim=1) / math.sqrt(samples.shape[1])
    assert ((computed - samples.mean(1)).abs() <= errors * standard_error + 1e-12).all()


class TestJointLaws:
    """Of two members whose modulations are drawn together."""

    slopes = pytest.mark.parametrize("of", [Homogeneous(), Homogeneous(1, 0.1), Homogeneous(1, -1)])
    geometry = number([1.2]), number([0.9]), number([0.4])

    @slopes
    @pytest.mark.parametrize("law", [Masks(0.3), Disjoint()], ids=repr)
    def test_of_masks_are_equal_or_independent_members_and_half_lines_agree(self, of, law):
        by_half_lines = of.joint(*self.geometry, law, 5)
        by_mixture = Dual.joint(of, *self.geometry, law, 5)
        torch.testing.assert_close(by_half_lines, by_mixture, rtol=1e-13, atol=1e-15)

    @slopes
    def test_of_normal_values_are_independent_equal_or_opposite_at_the_ends(self, of):
        q1, q2, c = self.geometry

        independent = of.joint(q1, q2, c, Correlated(0.0), 2)
        equal = of.joint(q1, q2, c, Correlated(1.0 - 1e-13), 2)
        opposite = of.joint(q1, q2, c, Correlated(-1.0), 2)

        f, g, _ = of.same(q1, q2, c, Normal())
        f_turned, g_turned, _ = of.same(q1, q2, -c, Normal())
        torch.testing.assert_close(independent, of.cross(q1, q2, c, Normal()))
        torch.testing.assert_close(equal, (f, g))
        torch.testing.assert_close(opposite, (f_turned, -g_turned))


class TestEveryDual:
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_agrees_with_plain_integration(self, case):
        expected = [case.integrate(case.law, *geometry) for geometry in case.geometries]
        computed = all_five(case.module, case.law, *case.geometries)
        relative, absolute = case.tolerance
        torch.testing.assert_close(computed, torch.stack(expected), rtol=relative, atol=absolute)

    @pytest.mark.parametrize("module", EVERY, ids=name)
    def test_agrees_with_samples(self, module):
        generator = torch.Generator().manual_seed(3)
        law, geometry, count = Shifted(0.7), (1.2, 0.9, 0.6), 200_000
        z1, z2 = draw_correlated_pair(count, *geometry, generator)
        v, v2 = law.sample((2, count), generator, torch.float64)
        slope = torch.func.vmap(torch.func.grad(module))
        samples = [
            module(v * z1) * module(v * z2),
            v**2 * slope(v * z1) * slope(v * z2),
            z1 * z2 * slope(v * z1) * slope(v * z2),
            module(v * z1) * module(v2 * z2),
            v * v2 * slope(v * z1) * slope(v2 * z2),
        ]

        computed = all_five(module, law, geometry)[0]

        assert_agree_with_samples(computed, torch.stack(samples), errors=4)

    @pytest.mark.parametrize(("module", "law"), list_joint_cases(), ids=name)
    def test_agrees_with_samples_of_joint_laws(self, module, law):
        generator = torch.Generator().manual_seed(4)
        geometry, count = (1.2, 0.9, -0.6), 60_000
        z1, z2 = draw_correlated_pair(count, *geometry, generator)
        v, v2, _ = law.sample((3, count), generator, torch.float64)
        slope = torch.func.vmap(torch.func.grad(module))
        samples = [
            module(v * z1) * module(v2 * z2),
            v * v2 * slope(v * z1) * slope(v2 * z2),
        ]

        computed = torch.cat(dual(module).joint(*tensors(geometry), law, 3))

        assert_agree_with_samples(computed, torch.stack(samples), errors=4.5)

    @pytest.mark.parametrize("law", [None, Three(), Normal(0.3, 0.8)], ids=name)
    @pytest.mark.parametrize("module", EVERY, ids=name)
    def test_has_g_as_the_derivative_of_f(self, module, law):
        step = 1e-4
        q1, q2, c = number([1.2]), number([0.9]), number([0.4])
        of = dual(module).prepare(1.2, law)
        for function in (of.same, of.cross):
            f_above, *_ = function(q1, q2, c + step, law)
            f_below, *_ = function(q1, q2, c - step, law)
            g = function(q1, q2, c, law)[1]
            torch.testing.assert_close((f_above - f_below) / (2 * step), g, rtol=1e-7, atol=1e-8)

    @pytest.mark.parametrize("law", [None, Constant(1.3), Constant(-0.7), Normal(0.8, 0.0)])
    @pytest.mark.parametrize("module", EVERY, ids=name)
    def test_cross_equals_same_bit_for_bit_if_members_are_equal(self, module, law):
        computed = all_five(module, law, *GEOMETRIES)
        assert torch.equal(computed[:, :2], computed[:, 3:])

    @pytest.mark.parametrize("law", [Normal(), Rademacher(), Ternary(0.2)], ids=name)
    @pytest.mark.parametrize("module", [nn.Tanh(), networks.Erf(), networks.Sin(), nn.Identity()])
    def test_has_nothing_in_common_for_odd_activations_and_symmetric_laws(self, module, law):
        assert (all_five(module, law, *GEOMETRIES[:1])[:, 3:] == 0).all()

    @pytest.mark.parametrize("module", EVERY, ids=name)
    def test_broadcasts_over_any_axes(self, module):
        law, generator = Three(), torch.Generator().manual_seed(0)
        x, y = torch.randn(2, 3, 2, 5, generator=generator, dtype=torch.float64) / 2
        of = dual(module)
        q1 = (x**2).sum(-1)[:, None, :, None]
        q2 = (y**2).sum(-1)[None, :, None, :]
        c = torch.einsum("ipk,jrk->ijpr", x, y)

        same, cross = of.same(q1, q2, c, law), of.cross(q1, q2, c, law)
        same_of_row = of.same(q1[:1], q2, c[:1], law)
        same_of_members = of.same(q1, q2, c.expand(2, *c.shape), law)

        flat = [tensor.reshape(-1) for tensor in torch.broadcast_tensors(q1, q2, c)]
        same_of_flat, cross_of_flat = of.same(*flat, law), of.cross(*flat, law)
        tolerance = {"rtol": 1e-12, "atol": 1e-13}
        for i in range(2):
            assert cross[i].shape == (3, 3, 2, 2)
            torch.testing.assert_close(cross[i].reshape(-1), cross_of_flat[i], **tolerance)
        for i in range(3):
            assert same[i].shape == (3, 3, 2, 2)
            torch.testing.assert_close(same[i].reshape(-1), same_of_flat[i], **tolerance)
            torch.testing.assert_close(same_of_row[i], same[i][:1], **tolerance)
            expected = same[i].expand(2, *c.shape)
            torch.testing.assert_close(same_of_members[i], expected, **tolerance)

    @pytest.mark.parametrize("module", EVERY, ids=name)
    def test_works_in_single_precision(self, module):
        q1, q2, c = tensors(*GEOMETRIES)
        double = dual(module).same(q1, q2, c, Ternary())
        single = dual(module).same(q1.float(), q2.float(), c.float(), Ternary())

        for low, high in zip(single, double, strict=True):
            assert low.dtype == torch.float32
            torch.testing.assert_close(low.double(), high, rtol=2e-5, atol=2e-6)

    @pytest.mark.parametrize("module", EVERY, ids=name)
    def test_takes_empty_kernels(self, module):
        empty, one = torch.zeros(0, 1, dtype=torch.float64), torch.ones(1, 3, dtype=torch.float64)
        for result in dual(module).same(empty, one, torch.zeros(0, 3).double(), None):
            assert result.shape == (0, 3)

    @pytest.mark.parametrize("module", EVERY, ids=name)
    def test_is_the_limit_where_a_variance_vanishes(self, module):
        tiny = all_five(module, Three(), (1e-14, 1.1, 0.0), (1e-14, 1e-14, 0.0))
        zero = all_five(module, Three(), (0.0, 1.1, 0.0), (0.0, 0.0, 0.0))
        torch.testing.assert_close(zero, tiny, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own
class TestForwardDerivatives:
    @pytest.mark.parametrize("rho", [-1.0, -0.4, 0.0, 0.6, 1.0])
    @pytest.mark.parametrize("module", [nn.ReLU(), networks.Erf(), nn.GELU(), nn.Tanh()], ids=name)
    def test_nested_give_g_and_are_finite(self, module, rho):
        one, direction = number([1.3]), number([1.0])
        of = dual(module).prepare(1.3, None)

        def first(c):
            return torch.func.jvp(lambda x: of.same(one, one, x, None)[0], (c,), (direction,))

        c = 1.3 * number([rho])
        (value, slope), (_, curvature) = torch.func.jvp(first, (c,), (direction,))
        f, g, _ = of.same(one, one, c, None)
        torch.testing.assert_close(value, f, rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(slope, g, rtol=1e-9, atol=1e-9)
        assert curvature.isfinite().all()
        if isinstance(module, nn.ReLU):
            expected = 0.0 if abs(rho) == 1 else 1 / (2 * PI * 1.3 * math.sqrt(1 - rho**2))
            assert curvature.item() == pytest.approx(expected, rel=1e-12)

    @pytest.mark.parametrize("module", [nn.ReLU(), networks.Erf(), nn.GELU(), nn.Tanh()], ids=name)
    def test_by_the_inputs_are_those_of_the_activation(self, module):
        """∂x ∂x' F = E[w² φ'(wx) φ'(wx')] for one input; here H / (x x')."""
        law, x = Rademacher(), number([0.8])
        of = dual(module).prepare(1.6, law)

        def f(a, b):
            return of.same(a * a, b * b, a * b, law)[0]

        def first(a, b):
            return torch.func.jvp(lambda y: f(y, b), (a,), (number([1.0]),))[1]

        for factor in (1.0, 1.2, -0.9):
            b = factor * x
            mixed = torch.func.jvp(lambda y: first(x, y), (b,), (number([1.0]),))[1]
            h = of.same(x * x, b * b, x * b, law)[2]
            torch.testing.assert_close(mixed, h / (x * b), rtol=1e-7, atol=1e-8)

    def test_backward_gives_g_too(self):
        for module in (nn.ReLU(), networks.Erf(), nn.SiLU()):
            c = number([0.3, 0.9]).requires_grad_()
            q = number([1.0, 1.0])
            f, g, _ = dual(module).same(q, q, c, Normal())
            (slope,) = torch.autograd.grad(f.sum(), c)
            torch.testing.assert_close(slope, g.detach(), rtol=1e-8, atol=1e-8)


class TestErrata:
    """Numbers at q1 = 1.2, q2 = 0.9, ρ = 0.6, where the paper's formulas would give others."""

    GEOMETRY = (1.2, 0.9, 0.6)

    def printed_g_of_relu(self, law):
        """Return the same for steps, which have no grid: P(v z1 > 0, v z2 > 0) by angles."""
        theta = math.acos(self.GEOMETRY[2])
        plus, minus = law.half_moment(0, 1), law.half_moment(0, -1)
        both_positive, one_positive = (PI - theta) / (2 * PI), theta / (2 * PI)
        same = (plus + minus) * both_positive
        cross = (plus**2 + minus**2) * both_positive + 2 * plus * minus * one_positive
        return law.second_moment * same, law.mean**2 * cross

    def printed_g(self, functions, law, step):
        """Return E[v1 v2] E[φ' φ'], same and cross, as the paper has it."""
        _, slope = functions
        v, weights = nodes_of(law, step)
        ones = (slope, slope)  # F of the derivative
        same, cross = by_grid(ones, law, *self.GEOMETRY, step)[[0, 3]].tolist()
        return (weights @ v**2).item() * same, (weights @ v).item() ** 2 * cross

    @pytest.mark.parametrize(
        ("module", "law", "which", "value", "printed"),
        [
            (nn.ReLU(), Normal(), "cross", 0.0652, 0.0),
            (nn.ReLU(), Shifted(0.7), "cross", 0.1920, 0.1452),
            (nn.ReLU(), Rademacher(), "cross", 0.1024, 0.0),
            (nn.ReLU(), Bernoulli(0.6), "same", 0.2114, 0.1269),
            (networks.Erf(), Normal(), "same", 0.3104, 0.7074),
            (networks.Erf(), Shifted(0.7), "same", 0.3264, 0.6788),
            (networks.Erf(), Shifted(0.7), "cross", 0.1739, 0.3019),
            (nn.Tanh(), Normal(), "same", 0.2680, 0.5731),
            (nn.GELU(), Normal(), "same", 0.3623, 0.3245),
            (nn.GELU(), Normal(), "cross", 0.0628, 0.0),
        ],
        ids=name,
    )
    def test_1_g_does_not_factorise(self, module, law, which, value, printed):
        position = {"same": 1, "cross": 4}[which]
        computed = all_five(module, law, self.GEOMETRY)[0][position].item()
        if isinstance(module, nn.ReLU):
            printed_same, printed_cross = self.printed_g_of_relu(law)
        else:
            printed_same, printed_cross = self.printed_g(functions_of(module), law, 0.12)

        assert computed == pytest.approx(value, abs=6e-5)
        of_paper = printed_same if which == "same" else printed_cross
        assert of_paper == pytest.approx(printed, abs=6e-5)

    @pytest.mark.parametrize(
        ("module", "value", "printed"), [(nn.ReLU(), 0.3521, 0.9022), (nn.Tanh(), 0.2056, 0.3620)]
    )
    def test_2_h_has_derivatives_in_it(self, module, value, printed):
        computed = all_five(module, Normal(), self.GEOMETRY)[0, 2].item()
        assert computed == pytest.approx(value, abs=6e-5)
        functions = (torch.relu, torch.relu) if isinstance(module, nn.ReLU) else (torch.tanh,) * 2
        wrong = by_grid(functions, Normal(), *self.GEOMETRY, 0.12)[2].item()  # z1 z2 φ φ
        assert wrong == pytest.approx(printed, abs=2e-4)

    def test_3_g_between_members_can_be_negative(self):
        register(TwoSteps)
        geometry, k = (1.0, 4.0, 1.0), 6.0
        computed = all_five(TwoSteps(k), Rademacher(), geometry)[0]
        expected = by_grid(two_steps(k), Rademacher(), *geometry, 0.01)
        torch.testing.assert_close(computed, expected, rtol=1e-8, atol=1e-8)
        assert computed[4] < -0.04
        slopes = by_grid((two_steps(k)[1],) * 2, Rademacher(), *geometry, 0.01)
        assert slopes[3] > 0  # while E φ'φ' between members, which the proof uses, is positive

    def test_8_odd_activations_are_independent_with_symmetric_pre_laws_alone(self):
        for module in (nn.Tanh(), networks.Erf()):
            assert (all_five(module, Normal(), self.GEOMETRY)[0, 3:] == 0).all()
        assert (all_five(nn.ReLU(), Normal(), self.GEOMETRY)[0, 3:] > 0.05).all()
