"""Activations of sums of units with random factors: against the direct rule, and integrals."""

from __future__ import annotations

import itertools

import numpy
import pytest
import torch
from theory.hand_made import close
from torch import nn

from embens import laws
from embens.networks import Erf
from embens.spec import Site
from embens.theory import activations
from embens.theory.mixture import activate_sum
from embens.theory.moments import Addend, Moments, Pass, State
from embens.theory.placement import Modulation

MEMBERS = 4


def modulation(law, *, trainable: bool = True) -> Modulation:
    return Modulation(Site("0", "pre", law, 1, trainable=trainable), MEMBERS)


def kernel(value: float) -> torch.Tensor:
    return torch.full((1, 1), value, dtype=torch.float64)


def addend(c: float, between: float, **options) -> Addend:
    """Return an addend with the tangent kernels 2 within, 0.7 between and 0.3 of individuals."""
    return Addend(
        Moments(kernel(c), kernel(2.0)),
        cross=lambda: Moments(kernel(between), kernel(0.7)),
        individual=kernel(0.3),
        **options,
    )


def activate(module: nn.Module, addends, variances, largest: float = 40.0) -> State:
    """Return the kernels after an activation of a sum, for one pair of inputs."""
    dual = activations.dual(module).prepare(largest, None)
    recorded = [torch.tensor([q], dtype=torch.float64) for q, _ in variances]
    other = [torch.tensor([q], dtype=torch.float64) for _, q in variances]
    facts = Pass(variances=(recorded, other), duals=[dual] * (len(addends) + 1))
    total = Moments(sum(part.covariance for part in addends))
    state = State(total, gaussian=True, addends=tuple(addends), facts=facts)
    return activate_sum(module, dual, state)


LAWS = {
    "signs": laws.Signs(0.3),
    "bernoulli": laws.Bernoulli(0.7),
    "masks": laws.Masks(0.5),
    "normal": laws.Normal(),
    "shifted": laws.Shifted(0.7),
}
MODULES = {"relu": nn.ReLU(), "tanh": nn.Tanh(), "erf": Erf(), "elu": nn.ELU()}


@pytest.mark.parametrize("activation", MODULES)
@pytest.mark.parametrize("name", LAWS)
def test_one_addend_has_the_expectations_of_a_modulation(name, activation):
    if name in ("normal", "shifted") and activation in ("tanh", "elu"):
        pytest.skip("without a modulation they have no expectations at large variances")
    law, module = LAWS[name], MODULES[activation]
    v = modulation(law)
    q1, q2, c, between = 1.2, 0.9, 0.6, 0.3

    after = activate(module, [addend(c, between, pre=v)], [(q1, q2)])

    dual = activations.dual(module)
    variances = kernel(q1), kernel(q2)
    f, g, h = dual.same(*variances, kernel(c), v.marginal)
    tolerance = {"rtol": 1e-7, "atol": 1e-9}
    close(after.covariance, f, **tolerance)
    close(after.same.ntk, 2 * g, **tolerance)
    close(after.individual, h + 0.3 * g, **tolerance)
    f, g = dual.joint(*variances, kernel(between), law, MEMBERS)
    close(after.crossed.nngp, f, **tolerance)
    close(after.crossed.ntk, 0.7 * g, **tolerance)


@pytest.mark.parametrize("activation", MODULES)
def test_equal_inputs_have_finite_tangents(activation):
    parts = [addend(0.4, 0.1, pre=modulation(laws.Signs(0.0))), addend(0.3, 0.2)]
    near = [addend(0.4 - 1e-5, 0.1, pre=modulation(laws.Signs(0.0))), addend(0.3, 0.2)]
    module = MODULES[activation]

    after = activate(module, parts, [(0.4, 0.4), (0.3, 0.3)])
    close_by = activate(module, near, [(0.4, 0.4), (0.3, 0.3)])

    close(after.individual, close_by.individual, rtol=0.02, atol=0.0)


def expectation(function, covariance) -> float:
    """Integrate a function of four normal variables by Gauss-Hermite quadrature."""
    nodes, weights = numpy.polynomial.hermite_e.hermegauss(14)
    weights = torch.tensor(weights / weights.sum())
    axes = torch.cartesian_prod(*[torch.tensor(nodes)] * 4)
    total = torch.cartesian_prod(*[weights] * 4).prod(1)
    values, vectors = torch.linalg.eigh(covariance)
    z = axes @ (vectors * values.clamp(min=0).sqrt()).mT
    return float(total @ function(*z.unbind(1)))


def test_two_addends_have_the_tangents_of_an_integral():
    law = laws.Bernoulli(0.6)  # 0, or about 1.29
    x, y = torch.tensor([[0.3, 0.1], [0.1, 0.25]]), torch.tensor([[0.2, -0.1], [-0.1, 0.15]])
    x_between, y_between = 0.15, 0.05
    parts = [
        addend(0.1, x_between, pre=modulation(law), scales=frozenset(["norm"])),
        addend(-0.1, y_between, pre=modulation(law), scales=frozenset(["norm"])),
    ]

    after = activate(nn.Tanh(), parts, [(0.3, 0.25), (0.2, 0.15)])

    def slope(s):
        return 1 - torch.tanh(s) ** 2

    atoms = [(value, weight) for value, weight in law.atoms]
    covariance = torch.block_diag(x, y).double()
    f = shared = own = 0.0
    for (v, weight_v), (w, weight_w) in itertools.product(atoms, atoms):

        def values(x1, x2, y1, y2, v=v, w=w):
            return torch.tanh(v * x1 + w * y1) * torch.tanh(v * x2 + w * y2)

        def of_parameters(x1, x2, y1, y2, v=v, w=w):
            s1, s2 = v * x1 + w * y1, v * x2 + w * y2
            return (2 * v * v + 2 * w * w + s1 * s2) * slope(s1) * slope(s2)

        def of_members(x1, x2, y1, y2, v=v, w=w):
            before = 0.3 * v * v + 0.3 * w * w + x1 * x2 + y1 * y2
            return before * slope(v * x1 + w * y1) * slope(v * x2 + w * y2)

        weight = weight_v * weight_w
        f += weight * expectation(values, covariance)
        shared += weight * expectation(of_parameters, covariance)
        own += weight * expectation(of_members, covariance)
    tolerance = {"rtol": 1e-6, "atol": 1e-8}
    close(after.covariance, kernel(f), **tolerance)
    close(after.same.ntk, kernel(shared), **tolerance)
    close(after.individual, kernel(own), **tolerance)

    covariance[0, 1] = covariance[1, 0] = x_between
    covariance[2, 3] = covariance[3, 2] = y_between
    f = shared = 0.0
    for (v1, p1), (v2, p2), (w1, p3), (w2, p4) in itertools.product(*[atoms] * 4):

        def between(x1, x2, y1, y2, a=(v1, w1), b=(v2, w2)):
            return torch.tanh(a[0] * x1 + a[1] * y1) * torch.tanh(b[0] * x2 + b[1] * y2)

        def tangents(x1, x2, y1, y2, a=(v1, w1), b=(v2, w2)):
            s1, s2 = a[0] * x1 + a[1] * y1, b[0] * x2 + b[1] * y2
            return (0.7 * (a[0] * b[0] + a[1] * b[1]) + s1 * s2) * slope(s1) * slope(s2)

        f += p1 * p2 * p3 * p4 * expectation(between, covariance)
        shared += p1 * p2 * p3 * p4 * expectation(tangents, covariance)
    close(after.crossed.nngp, kernel(f), **tolerance)
    close(after.crossed.ntk, kernel(shared), **tolerance)


def test_laws_with_many_values_are_refused():
    parts = [addend(0.1, 0.1, pre=modulation(laws.Correlated(0.3))), addend(0.1, 0.1)]
    after = activate(nn.ReLU(), parts, [(0.3, 0.3), (0.2, 0.2)])
    with pytest.raises(TypeError, match=r"modulated by Correlated.*Use another law"):
        after.crossed.map(torch.clone)
    parts = [addend(0.1, 0.1, pre=modulation(laws.Shifted(0.5))) for _ in range(4)]
    with pytest.raises(TypeError, match=r"sum of 4 streams.*at most 32,768"):
        activate(nn.ReLU(), parts, [(0.3, 0.3)] * 4)
