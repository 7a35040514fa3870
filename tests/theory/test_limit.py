"""Kernels of infinitely wide networks: against recursions by hand and wide networks."""

from __future__ import annotations

import math

import pytest
import torch
from theory.measured import (
    assert_gradients_agree,
    expected,
    long_except,
    measured_kernels,
    points,
)
from torch import nn

import embens
from embens import laws, networks, theory

pytestmark = pytest.mark.usefixtures("double")


def ordinary_relu(x: torch.Tensor, depth: int, weight: float, bias: float):
    """Return the NNGP and NTK of an ordinary ReLU network, by the textbook's recursion."""
    sigma = weight * x @ x.T / x.shape[1] + bias
    theta = sigma.clone()
    for _ in range(depth):
        q = sigma.diagonal()
        norm = (q[:, None] * q).sqrt()
        angle = (sigma / norm).clamp(-1, 1).arccos()
        angle.fill_diagonal_(0)
        f = norm * (angle.sin() + (math.pi - angle) * angle.cos()) / (2 * math.pi)
        g = (math.pi - angle) / (2 * math.pi)
        sigma = weight * f + bias
        theta = sigma + weight * g * theta
    return sigma, theta


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("bias", [0.0, 0.3])
def test_without_modulations_it_is_the_ordinary_relu_network(depth, bias):
    x = points(6)
    net = networks.mlp(5, 7, depth, weight_std=2**0.5, bias_std=bias)
    k = theory.kernels(net, x)
    sigma, theta = ordinary_relu(x, depth, 2.0, bias**2)

    torch.testing.assert_close(k.nngp.same, sigma, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(k.ntk_shared.same, theta, rtol=1e-13, atol=1e-14)
    assert not k.ntk_individual.same.any()


def test_an_ordinary_erf_network_has_williams_kernel():
    x = points(6)
    k = theory.kernels(networks.mlp(5, 7, 1, activation="erf"), x)
    q = (x @ x.T) / 5
    d = 1 + 2 * q.diagonal()
    f = 2 / math.pi * (2 * q / (d[:, None] * d).sqrt()).arcsin()
    g = 4 / math.pi / (d[:, None] * d - 4 * q**2).sqrt()

    torch.testing.assert_close(k.nngp.same, f, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(k.ntk_shared.same, f + g * q, rtol=1e-13, atol=1e-14)


CASES = {
    "relu, both": ("relu", 3, {"pre": laws.Shifted(0.5), "post": laws.Shifted(0.7)}),
    "relu, pre only, random signs": ("relu", 3, {"pre": laws.Rademacher(), "post": None}),
    "relu, pre only, normal": ("relu", 2, {"pre": laws.Normal(), "post": None}),
    "relu, pre only, dropout": ("relu", 2, {"pre": laws.Bernoulli(0.6), "post": None}),
    "leaky, centred": ("leaky_relu", 2, {"pre": laws.Normal(), "post": laws.Normal()}),
    "abs, ternary": ("abs", 2, {"pre": laws.Ternary(), "post": laws.Shifted(0.8)}),
    "erf, pre only": ("erf", 3, {"pre": laws.Shifted(0.7), "post": None}),
    "gelu, both": ("gelu", 2, {"pre": laws.Shifted(0.6), "post": laws.Bernoulli(0.7, 1.2)}),
    "tanh, dropout": ("tanh", 2, {"pre": laws.Bernoulli(0.6), "post": None}),
    "sin, both": ("sin", 2, {"pre": laws.Shifted(0.6), "post": laws.Shifted(0.8)}),
    "identity, both": ("identity", 2, {"pre": laws.Shifted(0.6), "post": laws.Shifted(0.8)}),
    "silu, post only": ("silu", 2, {"pre": None, "post": laws.Normal(1.0, 0.3)}),
    "relu, frozen masks": (
        "relu",
        2,
        {"pre": None, "post": laws.Bernoulli(0.8), "trainable": False},
    ),
    "relu, one frozen": (
        "relu",
        2,
        {"pre": laws.Shifted(0.5), "post": laws.Shifted(0.5), "trainable": {"pre": False}},
    ),
    "relu, law by layer": (
        "relu",
        3,
        {"pre": {"0": laws.Normal()}, "post": {"6": laws.Shifted(0.6)}},
    ),
    "softplus, with biases": (
        "softplus",
        2,
        {"pre": laws.Shifted(0.6), "post": laws.Shifted(0.8), "bias_std": 0.4},
    ),
    "relu, masks": ("relu", 3, {"pre": None, "post": laws.Masks(0.4)}),
    "relu, repelling": ("relu", 3, {"pre": None, "post": laws.Correlated(-1 / 2)}),
    "relu, repelling u and v": (
        "relu",
        2,
        {"pre": laws.Correlated(-0.4), "post": laws.Correlated(0.7)},
    ),
    "abs, joint masks": ("abs", 2, {"pre": laws.Masks(0.6), "post": laws.Disjoint()}),
    "tanh, masks as v": ("tanh", 2, {"pre": laws.Masks(0.5), "post": laws.Correlated(-0.4)}),
    "softplus, masks as v": ("softplus", 2, {"pre": laws.Masks(0.5), "post": None}),
    "erf, repelling, with biases": (
        "erf",
        2,
        {"pre": None, "post": laws.Correlated(-0.5), "bias_std": 0.4, "trainable": False},
    ),
    "relu, own last layer": ("relu", 2, {"pre": None, "post": None, "own": "last"}),
    "relu, own hidden layer with biases": (
        "relu",
        3,
        {"pre": None, "post": laws.Shifted(0.8), "own": "2", "bias_std": 0.4},
    ),
    "erf, own first layer": ("erf", 2, {"pre": laws.Shifted(0.6), "post": None, "own": "0"}),
    "identity, own layers follow each other": (
        "identity",
        2,
        {"pre": None, "post": None, "own": ["0", "2"]},
    ),
    "relu, own copies with biases": (
        "relu",
        2,
        {
            "pre": None,
            "post": laws.Shifted(0.8),
            "own": "4",
            "own_weights": "copied",
            "bias_std": 0.4,
        },
    ),
    "relu, standard": (
        "relu",
        2,
        {"pre": laws.Shifted(0.5), "post": laws.Shifted(0.7), "parametrization": "standard"},
    ),
    "relu, standard with biases": (
        "relu",
        2,
        {"pre": None, "post": laws.Normal(), "parametrization": "standard", "bias_std": 0.4},
    ),
}


QUICK = (
    "relu, pre only, normal",
    "relu, law by layer",
    "relu, masks",
    "relu, own last layer",
    "relu, standard with biases",
    "tanh, dropout",
    "softplus, with biases",
)


@pytest.mark.parametrize("name", long_except(CASES, QUICK))
def test_wide_networks_have_these_kernels(name):
    activation, depth, options = CASES[name]
    options = dict(options)
    build = {k: options.pop(k) for k in ("bias_std", "parametrization") if k in options}
    x = points()

    def draw(generator, width=384):
        net = networks.mlp(
            5, width, depth, activation=activation, weight_std=1.3, generator=generator, **build
        )
        return embens.embed(net, members=3, generator=generator, **options)

    assert_gradients_agree(draw, x, seeds=24, bias=0.02, width=4)


def test_outputs_have_this_covariance():
    """Many outputs of one network are as many draws of its Gaussian process."""
    x = points()
    kinds = {"pre": laws.Shifted(0.5), "post": laws.Shifted(0.8)}
    outputs = []
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        net = networks.mlp(5, 512, 2, 64, weight_std=1.4, bias_std=0.3, generator=generator)
        with torch.no_grad():
            outputs.append(embens.embed(net, 2, **kinds, generator=generator)(x))
    f = torch.stack(outputs)
    k = theory.kernels(
        embens.embed(networks.mlp(5, 4, 2, weight_std=1.4, bias_std=0.3), **kinds), x
    )
    products = torch.einsum("saik,sbjk->sabij", f, f) / f.shape[-1]
    mean, error = products.mean(0), products.std(0) / 40**0.5
    for a in range(2):
        for b in range(2):
            limit = k.nngp.same if a == b else k.nngp.cross
            assert ((mean[a, b] - limit).abs() <= 4 * error[a, b] + 0.01 * limit.abs()).all()


@pytest.mark.long
def test_kernels_are_approached_at_the_theoretical_rate():
    """The mean squared error of a tangent kernel falls as 1/width, for same and cross alike."""
    x, seeds, widths = points(2), 64, [64, 512, 4096]
    kinds = {"pre": laws.Shifted(0.5), "post": laws.Shifted(0.7)}
    k = theory.kernels(embens.embed(networks.mlp(5, 4, 1), 2, **kinds), x)
    limits = {
        "shared.same": k.ntk_shared.same,
        "shared.cross": k.ntk_shared.cross,
        "individual.same": k.ntk_individual.same,
    }
    errors = {name: torch.zeros(len(widths)) for name in limits}
    for i, width in enumerate(widths):
        for seed in range(seeds):
            generator = torch.Generator().manual_seed(seed)
            net = networks.mlp(5, width, 1, generator=generator)
            blocks = measured_kernels(embens.embed(net, 2, **kinds, generator=generator), x)
            for name, limit in limits.items():
                part, kind = name.split(".")
                block = blocks[part][0, 0 if kind == "same" else 1]
                errors[name][i] += (block - limit).square().mean() / seeds
    for name, error in errors.items():
        slope = (error[-1] / error[0]).log() / math.log(widths[-1] / widths[0])
        assert -1.2 < slope < -0.8, (name, slope)


def test_the_printed_recursion_would_fail():
    """Erratum 1 in a whole network: E[v v' φ' φ'] is not E[v v'] E[φ' φ']."""
    x = points(2)
    net = networks.mlp(5, 4, 1)
    k = theory.kernels(embens.embed(net, pre=laws.Rademacher(), post=None), x)
    q = x @ x.T / 5
    rho = q[0, 1] / (q[0, 0] * q[1, 1]).sqrt()
    right = k.nngp.cross[0, 1] + rho.arcsin() / (2 * math.pi) * q[0, 1]
    torch.testing.assert_close(k.ntk_shared.cross[0, 1], right, rtol=1e-12, atol=0)
    printed = k.nngp.cross[0, 1]  # with E[v v'] = 0 in front, nothing is passed on
    assert (k.ntk_shared.cross[0, 1] - printed).abs() > 0.02 * printed.abs()


@pytest.mark.parametrize("pre", [None, laws.Normal(), laws.Shifted(0.5)])
@pytest.mark.parametrize("activation", ["relu", "tanh", "softplus"])
def test_cross_is_zero_to_the_last_bit_when_the_last_post_law_is_centred(pre, activation):
    net = networks.mlp(5, 4, 3, activation=activation)
    post = {"2": laws.Shifted(0.9), "6": laws.Rademacher()}
    k = theory.kernels(embens.embed(net, pre=pre, post=post), points())

    assert (k.nngp.cross == 0).all()
    assert (k.ntk_shared.cross == 0).all()
    assert (k.nngp.same.diagonal() > 0).all()


def test_a_shared_output_bias_couples_members():
    """Erratum 4: in the NTK parametrization; in the standard one the coupling vanishes."""
    net = networks.mlp(5, 4, 2, bias_std=0.5)
    k = theory.kernels(embens.embed(net), points())
    assert (k.nngp.cross == 0.25).all()
    assert (k.ntk_shared.cross == 0.25).all()
    net = networks.mlp(5, 4, 2, bias_std=0.5, parametrization="standard")
    k = theory.kernels(embens.embed(net), points())
    assert (k.nngp.cross == 0.25).all()
    assert (k.ntk_shared.cross == 0).all()


@pytest.mark.parametrize("activation", list(networks.ACTIVATIONS))
def test_cross_equals_same_when_modulations_are_constant(activation):
    law = laws.Constant(1.2)
    net = networks.mlp(5, 4, 3, activation=activation, bias_std=0.2)
    k = theory.kernels(embens.embed(net, pre=law, post=law, trainable=False), points())
    assert torch.equal(k.nngp.same, k.nngp.cross)
    assert torch.equal(k.ntk_shared.same, k.ntk_shared.cross)


def test_per_member_last_layers_share_no_outputs_and_move_their_gains():
    """By hand, for one hidden layer of ReLU: heads of their own on common features."""
    x, net = points(), networks.mlp(5, 4, 1, activation="relu", weight_std=1.3)
    ensemble = embens.embed(net, 4, None, None, own="last")
    k, alone = theory.kernels(ensemble, x), theory.kernels(net, x)
    torch.testing.assert_close(k.nngp.same, alone.nngp.same)
    assert not k.nngp.cross.any()
    assert not k.ntk_shared.cross.any()
    torch.testing.assert_close(k.ntk_individual.same, alone.nngp.same)
    whole = k.ntk_shared.same + k.ntk_individual.same
    torch.testing.assert_close(whole, alone.ntk_shared.same)
    assert theory.natural_gamma(k, 4) == pytest.approx(4)
    frozen = networks.mlp(5, 4, 1, activation="relu", weight_std=1.3)
    frozen[2].weight.requires_grad_(False)
    k = theory.kernels(embens.embed(frozen, 4, None, None, own="last"), x)
    assert not k.ntk_individual.same.any()


def test_linear_layers_after_per_member_layers_stay_independent():
    net = nn.Sequential(networks.Linear(5, 4), networks.Linear(4, 4), networks.Linear(4, 1))
    k = theory.kernels(embens.embed(net, 4, None, None, own="0"), points())
    assert not k.nngp.cross.any()
    assert k.ntk_shared.cross is not None


def test_separate_networks_share_nothing():
    net = networks.mlp(5, 4, 2)
    k, plain = theory.kernels(embens.independent(net, 3), points()), theory.kernels(net, points())

    assert torch.equal(k.nngp.same, plain.nngp.same)
    assert torch.equal(k.ntk_individual.same, plain.ntk_shared.same)
    for zero in (k.nngp.cross, k.ntk_shared.same, k.ntk_shared.cross, k.ntk_individual.cross):
        assert (zero == 0).all()


def test_kernels_between_two_sets_are_blocks_of_those_of_both():
    ensemble = embens.embed(networks.mlp(5, 4, 3), pre=laws.Normal(), post=laws.Shifted(0.6))
    x = points(9)
    whole = theory.kernels(ensemble, x)
    part = theory.kernels(ensemble, x[:5], x[5:])
    block = whole[:5, 5:]

    for name, value in expected(part).items():
        torch.testing.assert_close(value, expected(block)[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("x1", "x2", "message"),
    [
        (torch.zeros(0, 5), None, "at least one input"),
        (torch.zeros(5), None, r"at least one input.*x1\[None\]"),
        (torch.full((2, 5), math.nan), None, "not finite"),
        (torch.zeros(2, 4), None, r"takes \(n, 5\); got \(2, 4\)"),
        (torch.zeros(2, 5), torch.zeros(2, 6), r"x2 does not fit"),
        (torch.zeros(2, 5, 3), None, "Flatten"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(x1, x2, message):
    with pytest.raises(ValueError, match=message):
        theory.kernels(networks.mlp(5, 4, 1), x1, x2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[0.0] * 5],), "x1 must be a real tensor; got list"),
        ((torch.zeros(2, 5), [1, 2]), "x2 must be a real tensor; got list"),
        ((torch.zeros(2, 5, dtype=torch.complex64),), "must be a real tensor; got torch.complex64"),
    ],
)
def test_inputs_of_other_types_are_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        theory.kernels(networks.mlp(5, 4, 1), *arguments)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(TypeError, match=r"must be torch\.float64 or torch\.float32"):
        theory.kernels(networks.mlp(5, 4, 1), points(), dtype=dtype)


def test_inputs_of_zero_have_kernels_of_zero():
    k = theory.kernels(embens.embed(networks.mlp(5, 4, 3)), torch.zeros(2, 5))
    assert (k.nngp.same == 0).all()
    assert (k.ntk_shared.same == 0).all()
    assert torch.isfinite(k.ntk_individual.same).all()


def test_float32_is_close_and_stays_float32():
    ensemble = embens.embed(networks.mlp(5, 4, 3), post=laws.Shifted(0.5))
    k = theory.kernels(ensemble, points())
    single = theory.kernels(ensemble, points(), dtype=torch.float32)

    assert single.nngp.same.dtype is torch.float32
    torch.testing.assert_close(
        single.ntk_shared.cross.double(), k.ntk_shared.cross, rtol=2e-3, atol=1e-4
    )


class TestJointLaws:
    def test_without_coupling_are_independent_laws(self):
        net, x = networks.mlp(5, 8, 2), points()
        joint = theory.kernels(embens.embed(net, 4, laws.Correlated(0.0), laws.Disjoint()), x)
        plain = theory.kernels(embens.embed(net, 4, laws.Normal(), laws.Normal()), x)

        torch.testing.assert_close(joint.nngp.same, plain.nngp.same)
        torch.testing.assert_close(joint.ntk_shared.cross, plain.ntk_shared.cross)
        torch.testing.assert_close(joint.ntk_individual.same, plain.ntk_individual.same)

    @pytest.mark.parametrize("law", [laws.Masks(0.36), laws.Correlated(0.36)], ids=repr)
    def test_of_u_couple_as_a_shift_does(self, law):
        net, x = networks.mlp(5, 8, 3, activation="tanh"), points()
        joint = theory.kernels(embens.embed(net, 4, None, law), x)
        shifted = theory.kernels(embens.embed(net, 4, None, laws.Shifted(0.6)), x)
        for part in expected(joint):
            torch.testing.assert_close(expected(joint)[part], expected(shifted)[part])

    def test_of_equal_members_are_the_network_alone(self):
        net, x = networks.mlp(5, 8, 2), points()
        k = theory.kernels(embens.embed(net, 4, laws.Correlated(1.0), laws.Masks(1.0)), x)
        torch.testing.assert_close(k.nngp.cross, k.nngp.same)
        torch.testing.assert_close(k.ntk_shared.cross, k.ntk_shared.same)

    def test_can_couple_members_below_zero(self):
        net = networks.mlp(5, 8, 2)
        k = theory.kernels(embens.embed(net, 4, None, laws.Correlated(-0.2)), points())
        assert (k.ntk_shared.cross.diagonal() < 0).all()

    def test_of_v_with_smooth_activations_are_refused_where_no_series_is_known(self):
        net = networks.mlp(5, 8, 2, activation="tanh")
        with pytest.raises(
            NotImplementedError, match=r"Correlated\(rho=0.3\).*Use the law for post"
        ):
            theory.kernels(embens.embed(net, 4, laws.Correlated(0.3), laws.Shifted(0.5)), points())
