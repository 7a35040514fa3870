"""Activations and laws with their expectations by plain integration, slow and independent.

``CASES`` is the list of the contract in ``test_expectations.py``.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from embens import networks
from embens.laws import Bernoulli, Constant, Discrete, Normal, Rademacher, Shifted, Ternary
from embens.theory.activations import dual
from embens.theory.closed_forms import FixedModulation

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
    """Return q1, q2 and the covariances of geometries (q1, q2, ρ), exact where q1 = q2."""
    covariances = []
    for q1, q2, rho in geometries:
        geometric_mean = q1 if q1 == q2 else math.sqrt(q1 * q2)
        covariances.append(rho * geometric_mean)
    first = number([q1 for q1, _, _ in geometries])
    second = number([q2 for _, q2, _ in geometries])
    return first, second, number(covariances)


def all_five(module, law, *geometries):
    """Return F, G, H within a member and F, G between members, ``(geometry, 5)``."""
    return all_five_of(dual(module), law, *tensors(*geometries))


def all_five_of(of, law, q1, q2, c):
    """Return the same for a dual and tensors of variances and covariances, on a new last axis."""
    return torch.stack([*of.same(q1, q2, c, law), *of.cross(q1, q2, c, law)], dim=-1)


def nodes_of(law, step):
    """Return values of v and their weights: atoms, or a trapezoidal rule."""
    if law is None:
        return number([1.0]), number([1.0])
    if isinstance(law, Discrete):
        values, probabilities = zip(*law.atoms, strict=True)
        return number(values), number(probabilities)
    normal = torch.arange(-9, 9 + step / 2, step, dtype=torch.float64)
    return law.mean + law.std * normal, step * bell(normal)


def by_grid(functions, law, q1, q2, rho, step):
    """Return all five by the trapezoidal rule in two normal variables and in v."""
    function, slope = functions
    line = torch.arange(-8.5, 8.5 + step / 2, step, dtype=torch.float64)
    probability = step * bell(line)
    z1 = math.sqrt(q1) * line
    if abs(rho) == 1:
        z2 = rho * math.sqrt(q2) * line
        weights = probability
    else:
        z2 = math.sqrt(q2) * (rho * line[:, None] + math.sqrt(1 - rho**2) * line)
        z1 = z1[:, None]
        weights = probability[:, None] * probability

    f = g = h = 0.0
    mean_x1 = mean_x2 = mean_slope1 = mean_slope2 = 0.0
    values, probabilities = nodes_of(law, step)
    for v, p in zip(values.tolist(), probabilities.tolist(), strict=True):
        x1, x2 = function(v * z1), function(v * z2)
        slope1, slope2 = slope(v * z1), slope(v * z2)
        f += p * (weights * x1 * x2).sum()
        g += p * (weights * v**2 * slope1 * slope2).sum()
        h += p * (weights * z1 * z2 * slope1 * slope2).sum()
        mean_x1, mean_x2 = mean_x1 + p * x1, mean_x2 + p * x2
        mean_slope1, mean_slope2 = mean_slope1 + p * v * slope1, mean_slope2 + p * v * slope2
    cross_f = (weights * mean_x1 * mean_x2).sum()
    cross_g = (weights * mean_slope1 * mean_slope2).sum()
    return torch.stack([f, g, h, cross_f, cross_g])


def on_a_line(function, slope, law, q1, q2, sign, step):
    """Return all five for z2 = ± sqrt(q2 / q1) z1 and a normal law, on a fine grid."""
    line = torch.arange(-10, 10 + step / 2, step, dtype=torch.float64)
    weights = step * bell(line)
    v = probability = number([1.0])
    if law is not None:
        v = law.mean + law.std * line
        probability = weights
    z1 = math.sqrt(q1) * line
    z2 = sign * math.sqrt(q2) * line
    values = [function(v[:, None] * z) for z in (z1, z2)]
    slopes = [slope(v[:, None] * z) for z in (z1, z2)]
    modulated = [v[:, None] * x for x in slopes]
    f = probability @ (values[0] * values[1]) @ weights
    g = probability @ (modulated[0] * modulated[1]) @ weights
    h = probability @ (slopes[0] * slopes[1]) @ (weights * z1 * z2)
    cross_f = (probability @ values[0]) * (probability @ values[1]) @ weights
    cross_g = (probability @ modulated[0]) * (probability @ modulated[1]) @ weights
    return torch.stack([f, g, h, cross_f, cross_g])


def by_angle(slopes, law, q1, q2, rho):
    """Return all five for slopes right and left of 0, in polar coordinates, where E r² = 2."""
    right, left, at_zero = slopes
    angles, weights = nodes_of_angles(math.acos(rho))
    z1 = math.sqrt(q1) * torch.cos(angles)
    z2 = math.sqrt(q2) * torch.cos(angles - math.acos(rho))

    def slope(x):
        return right * (x > 0).double() + left * (x < 0).double() + at_zero * (x == 0).double()

    def product(v):
        return slope(v * z1) * slope(v * z2) * weights

    f = homogeneous_mean(lambda v: (product(v) * v * v * z1 * z2).sum() * 2, law, power=2)
    g = homogeneous_mean(lambda v: (product(v) * v * v).sum(), law, power=2)
    h = homogeneous_mean(lambda v: (product(v) * z1 * z2).sum() * 2, law, power=0)
    mean_x1 = homogeneous_mean(lambda v: v * z1 * slope(v * z1), law, power=1)
    mean_x2 = homogeneous_mean(lambda v: v * z2 * slope(v * z2), law, power=1)
    mean_slope1 = homogeneous_mean(lambda v: v * slope(v * z1), law, power=1)
    mean_slope2 = homogeneous_mean(lambda v: v * slope(v * z2), law, power=1)
    cross_f = (mean_x1 * mean_x2 * weights).sum() * 2
    cross_g = (mean_slope1 * mean_slope2 * weights).sum()
    return torch.stack([f, g, h, cross_f, cross_g])


def nodes_of_angles(theta):
    """Return angles and probabilities, by Gauss-Legendre between the kinks.

    Integrands are smooth between the angles at which an argument changes its sign.
    """
    kinks = []
    for center in (0, theta):
        for side in (-PI / 2, PI / 2):
            kinks.append((center + side) % (2 * PI))
    kinks.sort()
    kinks.append(kinks[0] + 2 * PI)
    nodes, node_weights = (number(x) for x in np.polynomial.legendre.leggauss(30))
    angles, weights = [], []
    for start, end in itertools.pairwise(kinks):
        if end - start > 1e-12:
            angles.append((end - start) / 2 * nodes + (start + end) / 2)
            weights.append((end - start) / 2 * node_weights / (2 * PI))
    return torch.cat(angles), torch.cat(weights)


def homogeneous_mean(function, law, power):
    """Average a function of v that is proportional to this power of |v| on each side of 0."""
    if law is None or isinstance(law, Discrete):
        values, probabilities = nodes_of(law, None)
        return sum(p * function(v) for v, p in zip(values, probabilities, strict=True))
    # Simpson's rule for the moments of a normal law on each side.
    size = torch.linspace(0, 12, 6001, dtype=torch.float64)
    weights = torch.full_like(size, 2 / 3)
    weights[1::2] = 4 / 3
    weights[0] = weights[-1] = 1 / 3
    weights *= size[1] - size[0]
    mean = 0.0
    for sign in (1.0, -1.0):
        density = bell((sign * size - law.mean) / law.std) / law.std
        moment = (density * size**power * weights).sum()
        mean = mean + moment * function(number(sign))
    return mean


def functions_of(module):
    return next(functions for other, functions in SMOOTH.items() if repr(other) == repr(module))


def name(x):
    """Return the class of a module, and the representation of a law."""
    if isinstance(x, nn.Module):
        return type(x).__name__
    return repr(x)


EVERY = [*PIECEWISE, *SMOOTH]


class TwoSteps(nn.Module):
    """The counterexample of erratum 3, less steep."""

    def __init__(self, steepness=10.0):
        super().__init__()
        self.steepness = steepness

    def forward(self, x):
        return torch.sigmoid(self.steepness * (x - 1)) + torch.sigmoid(self.steepness * (x + 2))


def two_steps(k):
    """Return the function of `TwoSteps` and its derivative."""

    def function(x):
        return sigmoid(k * (x - 1)) + sigmoid(k * (x + 2))

    def step_slope(x):
        return k * sigmoid(k * x) * sigmoid(-k * x)

    def slope(x):
        return step_slope(x - 1) + step_slope(x + 2)

    return function, slope


@dataclass(frozen=True)
class Case:
    """An activation and a law, with the integral and the tolerance for their expectations."""

    module: nn.Module
    law: Any
    geometries: list
    integrate: Callable = field(repr=False)  # (law, q1, q2, ρ) → all five
    tolerance: tuple[float, float]  # relative, absolute

    def __str__(self):
        return f"{name(self.module)}-{name(self.law)}-{len(self.geometries)}"


def grid_case(module, law, geometries, step, tolerance):
    integrate = partial(by_grid, functions_of(module), step=step)
    return Case(module, law, geometries, integrate, tolerance)


def make_cases():
    """Return cases for closed forms and for quadrature, with discrete and with normal laws."""
    cases = []
    for module, slopes in PIECEWISE.items():
        for law in LAWS:
            integrate = partial(by_angle, slopes)
            cases.append(Case(module, law, GEOMETRIES[:6], integrate, (1e-12, 1e-14)))
    for module in SMOOTH:
        has_closed_form = isinstance(dual(module), FixedModulation)
        for law in FEW:
            if has_closed_form:
                cases.append(grid_case(module, law, GEOMETRIES, 0.12, (1e-11, 1e-12)))
            else:
                cases.append(grid_case(module, law, GEOMETRIES, 0.1, (1e-8, 1e-8)))
    # With a normal law, the grid is fine enough for collinear inputs, and coarse in the plane.
    normal = [(module, Shifted(0.7)) for module in list(SMOOTH)[::3]]
    normal.append((list(SMOOTH)[4], Normal()))
    for module, law in normal:
        cases.append(grid_case(module, law, GEOMETRIES[2:5], 0.04, (1e-8, 1e-8)))
        cases.append(grid_case(module, law, GEOMETRIES[:1], 0.18, (1e-4, 1e-4)))
    for module in (nn.Tanh(), nn.SiLU()):
        cases.append(grid_case(module, Normal(0.5, 0.5), GEOMETRIES[:1], 0.09, (1e-8, 1e-8)))
    return cases


CASES = make_cases()
