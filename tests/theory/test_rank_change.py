"""Low-rank members: against drawn wide networks, and integrals by other means."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from theory.measured import assert_gradients_agree, points
from torch import nn

import embens
from embens import networks, theory
from embens.networks import Linear
from embens.spec import LowRankSite
from embens.theory import activations
from embens.theory.mixture import activate_sum
from embens.theory.moments import Moments, Pass, State
from embens.theory.rank_change import chi_square_nodes

pytestmark = pytest.mark.usefixtures("double")
X = points(2)


def perceptron(width: int, activation: str = "relu", generator=None, **options):
    return networks.mlp(
        5, width, 3, activation=activation, weight_std=1.4, generator=generator, **options
    )


CASES = {
    "relu": ({}, {"rank": 2, "scale": 0.7}),
    "tanh": ({"activation": "tanh"}, {"rank": 3, "scale": 0.8}),
    "standard": ({"parametrization": "standard"}, {"rank": 2, "scale": 0.5}),
    "scale 0": ({}, {"rank": 2, "scale": 0.0}),
    "frozen": ({}, {"rank": 2, "scale": 0.7, "shared": "frozen"}),
    "biases": ({"bias_std": 0.8}, {"rank": 2, "scale": 0.7}),
    "biases, tanh": ({"bias_std": 0.8, "activation": "tanh"}, {"rank": 1, "scale": 0.7}),
}


@pytest.mark.parametrize("name", CASES)
def test_wide_networks_of_multiplicative_members_have_these_kernels(name):
    network, options = CASES[name]

    def draw(generator, width=128):
        net = perceptron(width, generator=generator, **network)
        return embens.low_rank(net, 2, sites=["2", "4"], generator=generator, **options)

    assert_gradients_agree(draw, X, seeds=12, bias=0.04)


def test_wide_networks_of_additive_members_have_these_kernels():
    def draw(generator, width=128):
        net = perceptron(width, generator=generator, parametrization="standard")
        return embens.low_rank(net, 8, 4, "additive", sites=["0", "2", "4"], generator=generator)

    assert_gradients_agree(draw, X, seeds=12, bias=0.04)


def test_additive_members_begin_as_the_plain_network():
    net = perceptron(8, bias_std=0.3)
    k = theory.kernels(embens.low_rank(net, 3, 2, "additive", sites=["2", "4", "6"]), X)
    plain = theory.kernels(net, X)

    assert torch.equal(k.nngp.same, plain.nngp.same)
    assert torch.equal(k.nngp.cross, plain.nngp.same)
    assert torch.equal(k.ntk_shared.cross, plain.ntk_shared.same)
    # In the NTK parametrization a matrix has the rate of one weight, and weights are many.
    assert not k.ntk_individual.same.any()


@pytest.mark.parametrize("degrees", [1, 2, 5])
def test_nodes_have_the_moments_of_the_chi_square_distribution(degrees):
    nodes, weights = chi_square_nodes(degrees, 8)
    expected_moment = 1.0
    for power in range(1, 8):
        expected_moment *= degrees + 2 * (power - 1)
        moment = (weights * nodes**power).sum().item()
        assert moment == pytest.approx(expected_moment, rel=1e-10)


def chi_nodes(degrees: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return lengths of a row and their probabilities, by Gauss-Legendre on the chi density."""
    nodes, weights = (torch.tensor(values) for values in numpy.polynomial.legendre.leggauss(60))
    lengths = 5 * (nodes + 1)  # the density beyond 10 is below 1e-18
    density = lengths ** (degrees - 1) * torch.exp(-(lengths**2) / 2)
    probabilities = weights * density
    return lengths, probabilities / probabilities.sum()


@pytest.mark.parametrize("activation", ["relu", "tanh", "erf"])
@pytest.mark.parametrize(("rank", "scale"), [(1, 0.8), (4, 0.5)])
def test_expectations_equal_sums_over_lengths_of_rows(activation, rank, scale):
    module = networks.mlp(2, 2, 1, activation=activation)[1]
    plain = activations.dual(module)
    q1, q2, c, between = (torch.tensor(value) for value in (1.2, 0.9, 0.6, 0.3))

    variances = [q1[None], q1[None]], [q2[None], q2[None]]
    facts = Pass(variances=variances, duals=[plain, plain.prepare(80.0, None)])
    one = torch.ones(1, 1)
    state = State(
        Moments(c * one, one),
        cross=lambda: Moments(between * one, one),
        gaussian=True,
        low_rank=LowRankSite("2", rank, "multiplicative", scale),
        facts=facts,
    )
    after = activate_sum(module, plain, state)
    f, g, h = after.covariance, after.same.ntk, after.individual
    cross_f, cross_g = after.crossed

    lengths, weights = chi_nodes(rank)
    t = scale**2 / rank * lengths**2
    tau = 1 + t
    plain_f, plain_g, plain_h = plain.same(tau * q1, tau * q2, tau * c, None)
    tangents = t / tau**2 * plain_h + (rank - t / tau + t) * c * plain_g
    assert f.item() == pytest.approx((weights @ plain_f).item(), rel=1e-8)
    assert g.item() == pytest.approx((weights @ (tau * plain_g)).item(), rel=1e-7)
    assert h.item() == pytest.approx((weights @ tangents).item(), rel=1e-7)

    between_pairs = between.expand(len(tau), len(tau))
    plain_f, plain_g = plain.cross(tau[:, None] * q1, tau * q2, between_pairs, None)
    assert cross_f.item() == pytest.approx((weights @ plain_f @ weights).item(), rel=1e-7)
    assert cross_g.item() == pytest.approx((weights @ plain_g @ weights).item(), rel=1e-7)


REFUSED = {
    "first layer": ({"sites": ["0"]}, {}, r"'0' .*is the first layer"),
    "last layer": ({"sites": ["6"]}, {}, "Outputs are finitely many"),
    "additive": (
        {"sites": ["2"], "kind": "additive", "scale": 0.2},
        {},
        "stay random in the limit. Use scale=0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_members_without_a_limit_are_refused(name):
    options, network, message = REFUSED[name]
    ensemble = embens.low_rank(perceptron(8, **network), 3, rank=2, **options)
    with pytest.raises(TypeError, match=message):
        theory.kernels(ensemble, X)


def test_finite_width_statements_refuse_low_rank_members():
    ensemble = embens.low_rank(perceptron(8), 3, rank=2, sites=["2"])
    with pytest.raises(TypeError, match="low-rank members"):
        theory.fluctuation(ensemble, X)
    with pytest.raises(TypeError, match="weights differ between members"):
        theory.interference(ensemble, X)


class Residual(nn.Module):
    """Norm, then a low-rank layer on the branch."""

    def __init__(self, width: int, *, train: bool = False, generator=None):
        super().__init__()
        law = {"weight_std": 1.4, "generator": generator}
        self.stem, self.up = Linear(5, width, **law), Linear(width, width, **law)
        self.norm = nn.RMSNorm(width, elementwise_affine=train)
        self.down, self.head = Linear(width, width, **law), Linear(width, 1, **law)

    def forward(self, x):
        x = self.stem(x)
        return self.head(x + self.down(torch.relu(self.norm(self.up(x)))))


@pytest.mark.parametrize("train", [False, True])
def test_norms_and_sums_after_low_rank_layers_have_these_kernels(train):
    def draw(generator, width=128):
        net = Residual(width, train=train, generator=generator)
        return embens.low_rank(net, 3, 2, scale=0.7, sites=["up", "down"], generator=generator)

    assert_gradients_agree(draw, X, seeds=12, bias=0.04)


def test_the_variance_of_units_is_that_of_the_members():
    ensemble = embens.low_rank(perceptron(8), 3, 2, scale=0.5, sites=["2"])
    k = theory.kernels(ensemble, X)
    plain = theory.kernels(perceptron(8), X)
    torch.testing.assert_close(k.nngp.same, (1 + 0.5**2) * plain.nngp.same)
    assert math.isfinite(k.ntk_individual.same.sum().item())
