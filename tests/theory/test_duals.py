"""Every activation under every law against quadrature that shares nothing with the library."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from embens import networks
from embens.laws import Bernoulli, Constant, Discrete, Normal, Rademacher, Shifted, Ternary
from embens.theory.duals import dual, register

PI = math.pi


class Three(Discrete):
    """A user's law: neither symmetric nor of one sign, with an atom at 0."""

    def __repr__(self):
        return "Three()"

    atoms = ((-1.5, 0.2), (0.0, 0.3), (0.8, 0.5))


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def bell(x):
    return torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


def mass(x):
    return torch.special.erfc(-x / math.sqrt(2)) / 2


def soft(x):
    return torch.clamp(x, min=0) + torch.log1p(torch.exp(-x.abs()))


def curve(x):
    return math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


def curve_slope(x):
    return math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)


# Each activation with its derivative, written out.
PIECEWISE = {
    nn.ReLU(): (1.0, 0.0, 0.0),
    nn.LeakyReLU(0.2): (1.0, 0.2, 0.2),
    networks.Abs(): (1.0, -1.0, 0.0),
    nn.Identity(): (1.0, 1.0, 1.0),
}
SMOOTH = {
    networks.Erf(): (torch.erf, lambda x: 2 / math.sqrt(math.pi) * torch.exp(-(x**2))),
    networks.Sin(): (torch.sin, torch.cos),
    networks.Cos(): (torch.cos, lambda x: -torch.sin(x)),
    nn.GELU(): (lambda x: x * mass(x), lambda x: mass(x) + x * bell(x)),
    nn.Tanh(): (torch.tanh, lambda x: 1 / torch.cosh(x.clamp(-300, 300)) ** 2),
    nn.Sigmoid(): (sigmoid, lambda x: sigmoid(x) * sigmoid(-x)),
    nn.Softplus(2.0): (lambda x: soft(2 * x) / 2, lambda x: sigmoid(2 * x)),
    nn.SiLU(): (
        lambda x: x * sigmoid(x),
        lambda x: sigmoid(x) + x * sigmoid(x) * sigmoid(-x),
    ),
    nn.Mish(): (
        lambda x: x * torch.tanh(soft(x)),
        lambda x: torch.tanh(soft(x)) + x * sigmoid(x) * (1 - torch.tanh(soft(x)) ** 2),
    ),
    nn.GELU("tanh"): (
        lambda x: x * (1 + torch.tanh(curve(x))) / 2,
        lambda x: (
            (1 + torch.tanh(curve(x))) / 2
            + x * (1 - torch.tanh(curve(x)) ** 2) * curve_slope(x) / 2
        ),
    ),
}
LAWS = [
    None,
    Constant(1.3),
    Bernoulli(0.6, 1 / 0.6),
    Ternary(),
    Rademacher(),
    Three(),
    Normal(),
    Shifted(0.7),
]
FEW = LAWS[:-2]
GEOMETRIES = [  # q1, q2, ρ
    (1.2, 0.9, 0.6),
    (0.5, 2.0, -0.95),
    (1.3, 1.3, 1.0),
    (1.3, 1.3, -1.0),
    (0.3, 1.7, 1.0),
    (1.0, 0.4, 0.0),
    (0.0, 1.1, 0.0),
    (0.0, 0.0, 0.0),
]


def number(x):
    return torch.tensor(x, dtype=torch.float64)


def tensors(*geometries):
    return (number([g[i] for g in geometries]) for i in (0, 1)), number(
        [rho * (q1 if q1 == q2 else math.sqrt(q1 * q2)) for q1, q2, rho in geometries]
    )


def all_five(module, law, *geometries):
    """Return F, G, H within a member and F, G between members, ``(geometry, 5)``."""
    (q1, q2), c = tensors(*geometries)
    of = dual(module)
    return torch.stack([*of.same(q1, q2, c, law), *of.cross(q1, q2, c, law)], dim=1)


def nodes_of(law, step):
    """Return values of v and their weights: atoms, or a trapezoid rule of our own."""
    if law is None:
        return number([1.0]), number([1.0])
    if isinstance(law, Discrete):
        return tuple(number(list(x)) for x in zip(*law.atoms, strict=True))
    normal = torch.arange(-9, 9 + step / 2, step, dtype=torch.float64)
    return law.mean + law.std * normal, step * bell(normal)


def by_grid(functions, law, q1, q2, rho, step):
    """Return all five by a trapezoid rule in two normal variables and in v."""
    phi, slope = functions
    v, weights = nodes_of(law, step)
    line = torch.arange(-8.5, 8.5 + step / 2, step, dtype=torch.float64)
    probability = step * bell(line)
    first = math.sqrt(q1) * line
    if abs(rho) == 1:
        second, joint = rho * math.sqrt(q2) * line, probability
    else:
        mixed = rho * line[:, None] + math.sqrt(1 - rho**2) * line
        second, joint = math.sqrt(q2) * mixed, probability[:, None] * probability
        first = first[:, None]
    same = torch.zeros(3, dtype=torch.float64)
    average = [0.0, 0.0, 0.0, 0.0]
    for value, weight in zip(v.tolist(), weights.tolist(), strict=True):
        x, y, dx, dy = (f(value * z) for f in (phi, slope) for z in (first, second))
        terms = (x * y, value**2 * dx * dy, first * second * dx * dy)
        same += weight * torch.stack([(joint * term).sum() for term in terms])
        parts = (x, y, value * dx, value * dy)
        average = [a + weight * part for a, part in zip(average, parts, strict=True)]
    f, g = average[0] * average[1], average[2] * average[3]
    return torch.stack([*same, (joint * f).sum(), (joint * g).sum()])


def by_angle(slopes, law, q1, q2, rho):
    """Return all five for slopes right and left of 0, in polar coordinates, where E r² = 2.

    Integrands are smooth between the angles at which an argument changes its sign.
    """
    right, left, at_zero = slopes
    theta = math.acos(rho)
    kinks = sorted((k + side) % (2 * math.pi) for k in (0, theta) for side in (-PI / 2, PI / 2))
    abscissae, unit = (number(x) for x in np.polynomial.legendre.leggauss(30))
    angle, weight = [], []
    for start, end in itertools.pairwise([*kinks, kinks[0] + 2 * math.pi]):
        if end - start > 1e-12:
            angle.append((end - start) / 2 * abscissae + (start + end) / 2)
            weight.append((end - start) / 2 * unit / (2 * math.pi))
    angle, weight = torch.cat(angle), torch.cat(weight)
    z1, z2 = math.sqrt(q1) * torch.cos(angle), math.sqrt(q2) * torch.cos(angle - theta)

    def slope(x):
        return right * (x > 0).double() + left * (x < 0).double() + at_zero * (x == 0).double()

    def expect(function, power):
        """Average a function of v that is proportional to this power of |v| on each side."""
        if law is None or isinstance(law, Discrete):
            v, probability = nodes_of(law, None)
            values = [p * function(x) for x, p in zip(v, probability, strict=True)]
            return sum(values)
        size = torch.linspace(0, 12, 6001, dtype=torch.float64)
        simpson = torch.full_like(size, 2 / 3)
        simpson[1::2], simpson[0], simpson[-1] = 4 / 3, 1 / 3, 1 / 3
        result = 0.0
        for sign in (1.0, -1.0):
            density = bell((sign * size - law.mean) / law.std) / law.std
            moment = (density * size**power * simpson).sum() * (size[1] - size[0])
            result = result + moment * function(number(sign))
        return result

    def both(v):
        return slope(v * z1) * slope(v * z2) * weight

    f = expect(lambda v: (both(v) * v * v * z1 * z2).sum() * 2, 2)
    g = expect(lambda v: (both(v) * v * v).sum(), 2)
    h = expect(lambda v: (both(v) * z1 * z2).sum() * 2, 0)
    mean = [expect(lambda v, z=z: v * z * slope(v * z), 1) for z in (z1, z2)]
    tilt = [expect(lambda v, z=z: v * slope(v * z), 1) for z in (z1, z2)]
    cross = [(mean[0] * mean[1] * weight).sum() * 2, (tilt[0] * tilt[1] * weight).sum()]
    return torch.stack([f, g, h, *cross])


def functions_of(module):
    return next(functions for other, functions in SMOOTH.items() if repr(other) == repr(module))


def name(x):
    return type(x).__name__ if isinstance(x, nn.Module) else repr(x)


class TestClosedForms:
    @pytest.mark.parametrize("law", LAWS, ids=name)
    @pytest.mark.parametrize("module", PIECEWISE, ids=name)
    def test_of_half_lines_equal_polar_integrals(self, module, law):
        expected = torch.stack([by_angle(PIECEWISE[module], law, *g) for g in GEOMETRIES[:6]])
        found = all_five(module, law, *GEOMETRIES[:6])
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)

    @pytest.mark.parametrize("law", FEW, ids=name)
    @pytest.mark.parametrize("module", list(SMOOTH)[:4], ids=name)
    def test_of_smooth_activations_equal_integrals(self, module, law):
        expected = torch.stack([by_grid(SMOOTH[module], law, *g, 0.12) for g in GEOMETRIES])
        found = all_five(module, law, *GEOMETRIES)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


class TestQuadrature:
    @pytest.mark.parametrize("law", FEW, ids=name)
    @pytest.mark.parametrize("module", list(SMOOTH)[4:], ids=name)
    def test_equals_integrals_on_a_grid(self, module, law):
        expected = torch.stack([by_grid(SMOOTH[module], law, *g, 0.1) for g in GEOMETRIES])
        found = all_five(module, law, *GEOMETRIES)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)

    @pytest.mark.parametrize(
        ("module", "law"),
        [*((m, Shifted(0.7)) for m in SMOOTH), *((m, Normal()) for m in list(SMOOTH)[::4])],
        ids=name,
    )
    def test_equals_integrals_with_normal_modulations(self, module, law):
        geometries = [*GEOMETRIES[2:5], GEOMETRIES[0]]
        steps = [0.04, 0.04, 0.04, 0.18]  # fine where there is one normal variable only
        found = all_five(module, law, *geometries)
        for geometry, step, row in zip(geometries, steps, found, strict=True):
            close = 1e-10 if step < 0.1 else 1e-4
            expected = by_grid(SMOOTH[module], law, *geometry, step)
            torch.testing.assert_close(row, expected, rtol=close, atol=close)

    def test_keeps_ten_digits_in_the_plane_with_normal_modulations(self):
        for module in (nn.Tanh(), nn.SiLU()):
            functions = functions_of(module)
            expected = by_grid(functions, Normal(0.5, 0.5), *GEOMETRIES[0], 0.09)[None]
            found = all_five(module, Normal(0.5, 0.5), GEOMETRIES[0])
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


EVERY = [*PIECEWISE, *SMOOTH]


class TestEveryDual:
    @pytest.mark.parametrize("module", EVERY, ids=name)
    def test_agrees_with_samples(self, module):
        generator = torch.Generator().manual_seed(3)
        law, (q1, q2, rho) = Shifted(0.7), (1.2, 0.9, 0.6)
        count = 200_000
        x, y = torch.randn(2, count, generator=generator, dtype=torch.float64)
        z1 = math.sqrt(q1) * x
        z2 = math.sqrt(q2) * (rho * x + math.sqrt(1 - rho**2) * y)
        v, other = law.sample((2, count), generator, torch.float64)
        slope = torch.func.vmap(torch.func.grad(module))
        terms = [
            module(v * z1) * module(v * z2),
            v**2 * slope(v * z1) * slope(v * z2),
            z1 * z2 * slope(v * z1) * slope(v * z2),
            module(v * z1) * module(other * z2),
            v * other * slope(v * z1) * slope(other * z2),
        ]
        samples = torch.stack(terms)
        error = samples.std(dim=1) / math.sqrt(count)
        found = all_five(module, law, (q1, q2, rho))[0]
        assert ((found - samples.mean(1)).abs() <= 4 * error + 1e-12).all()

    @pytest.mark.parametrize("law", [None, Three(), Normal(0.3, 0.8)], ids=name)
    @pytest.mark.parametrize("module", EVERY, ids=name)
    def test_has_g_as_the_derivative_of_f(self, module, law):
        of, step = dual(module), 1e-4
        q1, q2, c = number([1.2]), number([0.9]), number([0.4])
        of = of.prepare(0.9, 1.2, law)
        for function in (of.same, of.cross):
            ahead, behind, here = (function(q1, q2, c + d, law) for d in (step, -step, 0))
            slope = (ahead[0] - behind[0]) / (2 * step)
            torch.testing.assert_close(slope, here[1], rtol=1e-7, atol=1e-8)

    @pytest.mark.parametrize("law", [None, Constant(1.3), Constant(-0.7), Normal(0.8, 0.0)])
    @pytest.mark.parametrize("module", EVERY, ids=name)
    def test_has_cross_equal_to_same_bit_for_bit_if_members_are_alike(self, module, law):
        found = all_five(module, law, *GEOMETRIES)
        assert torch.equal(found[:, :2], found[:, 3:])

    @pytest.mark.parametrize("law", [Normal(), Rademacher(), Ternary(0.2)], ids=name)
    @pytest.mark.parametrize("module", [nn.Tanh(), networks.Erf(), networks.Sin(), nn.Identity()])
    def test_has_nothing_in_common_for_odd_activations_and_symmetric_laws(self, module, law):
        assert (all_five(module, law, *GEOMETRIES[:1])[:, 3:] == 0).all()

    @pytest.mark.parametrize("module", EVERY, ids=name)
    def test_broadcasts_over_any_axes(self, module):
        law, generator = Three(), torch.Generator().manual_seed(0)
        x, y = torch.randn(2, 3, 2, 5, generator=generator, dtype=torch.float64) / 2
        of = dual(module)
        q1, q2 = (x**2).sum(-1)[:, None, :, None], (y**2).sum(-1)[None, :, None, :]
        c = torch.einsum("ipk,jrk->ijpr", x, y)
        pairs = [*of.same(q1, q2, c, law), *of.cross(q1, q2, c, law)]
        flat = [a.reshape(-1) for a in torch.broadcast_tensors(q1, q2, c)]
        elementwise = [*of.same(*flat, law), *of.cross(*flat, law)]
        shared = [a[0, :, 0, 0] for a in of.same(q1[:1], q2, c[:1], law)]
        for found, expected in zip(pairs, elementwise, strict=True):
            assert found.shape == (3, 3, 2, 2)
            torch.testing.assert_close(found.reshape(-1), expected, rtol=1e-12, atol=1e-13)
        for found, expected in zip(shared, pairs, strict=False):
            torch.testing.assert_close(found, expected[0, :, 0, 0], rtol=1e-12, atol=1e-13)
        members = [a.expand(2, *c.shape) for a in of.same(q1, q2, c, law)]
        for found, expected in zip(
            of.same(q1, q2, c.expand(2, *c.shape), law), members, strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)

    @pytest.mark.parametrize("module", EVERY, ids=name)
    def test_works_in_single_precision(self, module):
        (q1, q2), c = tensors(*GEOMETRIES)
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


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own
class TestForwardDerivatives:
    @pytest.mark.parametrize("rho", [-1.0, -0.4, 0.0, 0.6, 1.0])
    @pytest.mark.parametrize("module", [nn.ReLU(), networks.Erf(), nn.GELU(), nn.Tanh()], ids=name)
    def test_nested_give_g_and_are_finite(self, module, rho):
        one, direction = number([1.3]), number([1.0])
        of = dual(module).prepare(1.3, 1.3, None)

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
        of = dual(module).prepare(0.3, 1.6, law)

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


class TwoSteps(nn.Module):
    """The counterexample of erratum 3, less steep."""

    def __init__(self, steepness=10.0):
        super().__init__()
        self.steepness = steepness

    def forward(self, x):
        return torch.sigmoid(self.steepness * (x - 1)) + torch.sigmoid(self.steepness * (x + 2))


def two_steps(k):
    def slope(x):
        return sum(k * sigmoid(k * y) * sigmoid(-k * y) for y in (x - 1, x + 2))

    return lambda x: sigmoid(k * (x - 1)) + sigmoid(k * (x + 2)), slope


class TestErrata:
    """Numbers at q1 = 1.2, q2 = 0.9, ρ = 0.6, where the paper's formulas would give others."""

    GEOMETRY = (1.2, 0.9, 0.6)

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
        index = {"same": 0, "cross": 1}[which]
        if isinstance(module, nn.ReLU):
            # Steps have no grid of their own: P(v z1 > 0, v z2 > 0) by angles.
            rho = self.GEOMETRY[2]
            plus, minus = law.half_moment(0, 1), law.half_moment(0, -1)
            both, only = (PI - math.acos(rho)) / (2 * PI), math.acos(rho) / (2 * PI)
            same = law.second_moment * (plus + minus) * both
            cross = law.mean**2 * ((plus**2 + minus**2) * both + 2 * plus * minus * only)
            wrong = (same, cross)[index]
        else:
            wrong = self.printed_g(functions_of(module), law, 0.12)[index]
        found = all_five(module, law, self.GEOMETRY)[0][[1, 4]][index].item()
        assert found == pytest.approx(value, abs=6e-5)
        assert wrong == pytest.approx(printed, abs=6e-5)

    @pytest.mark.parametrize(
        ("module", "value", "printed"), [(nn.ReLU(), 0.3521, 0.9022), (nn.Tanh(), 0.2056, 0.3620)]
    )
    def test_2_h_has_derivatives_in_it(self, module, value, printed):
        found = all_five(module, Normal(), self.GEOMETRY)[0, 2].item()
        assert found == pytest.approx(value, abs=6e-5)
        functions = (torch.relu, torch.relu) if isinstance(module, nn.ReLU) else (torch.tanh,) * 2
        wrong = by_grid(functions, Normal(), *self.GEOMETRY, 0.12)[2].item()  # z1 z2 φ φ
        assert wrong == pytest.approx(printed, abs=2e-4)

    def test_3_g_between_members_can_be_negative(self):
        register(TwoSteps)
        geometry, k = (1.0, 4.0, 1.0), 6.0
        found = all_five(TwoSteps(k), Rademacher(), geometry)[0]
        expected = by_grid(two_steps(k), Rademacher(), *geometry, 0.01)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-9)
        assert found[4] < -0.04
        slopes = by_grid((two_steps(k)[1],) * 2, Rademacher(), *geometry, 0.01)
        assert slopes[3] > 0  # while E φ'φ' between members, which the proof uses, is positive

    def test_8_odd_activations_are_independent_with_symmetric_pre_laws_alone(self):
        for module in (nn.Tanh(), networks.Erf()):
            assert (all_five(module, Normal(), self.GEOMETRY)[0, 3:] == 0).all()
        assert (all_five(nn.ReLU(), Normal(), self.GEOMETRY)[0, 3:] > 0.05).all()
