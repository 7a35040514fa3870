"""Rules of modules, what has none, the law of weights, and convolutional networks."""

from __future__ import annotations

import math
import re
import warnings
from itertools import product

import pytest
import torch
from theory.measured import assert_gradients_agree, average, expected, images, long_except, points
from torch import nn

import embens
from embens import laws, networks, theory
from embens.networks import Conv2d, Linear
from embens.theory.ensembles import site_values

pytestmark = pytest.mark.usefixtures("double")


def test_layers_without_activation_between_are_a_deep_linear_network():
    net = nn.Sequential(networks.Linear(5, 4), networks.Linear(4, 4), networks.Linear(4, 1))
    law = laws.Shifted(0.6)
    k = theory.kernels(embens.embed(net, pre=law, post=law), points())
    q = points() @ points().T / 5

    torch.testing.assert_close(k.nngp.same, q)
    torch.testing.assert_close(k.nngp.cross, q * 0.6**8)
    torch.testing.assert_close(k.ntk_individual.same, 4 * q)


def test_a_new_rule_is_one_function():
    class Doubled(nn.Module):
        def forward(self, x):
            return 2 * x

    @theory.propagate.register(Doubled)
    def _(module, state):
        return state.map(lambda kernel: 4 * kernel)

    net = nn.Sequential(networks.Linear(5, 4), nn.ReLU(), Doubled(), networks.Linear(4, 1))
    plain = nn.Sequential(networks.Linear(5, 4), nn.ReLU(), networks.Linear(4, 1))
    k, reference = theory.kernels(net, points()), theory.kernels(plain, points())
    torch.testing.assert_close(k.ntk_shared.same, 4 * reference.ntk_shared.same)


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (
            nn.Sequential(networks.Linear(5, 4), nn.BatchNorm1d(4), networks.Linear(4, 1)),
            r"'1' \(BatchNorm1d\) is not known: norm layers",
        ),
        (nn.Sequential(networks.Linear(5, 4), nn.ReLU()), "ends in '1' .ReLU"),
        (
            nn.Sequential(networks.Linear(5, 4), nn.ReLU(), nn.Tanh(), networks.Linear(4, 1)),
            r"'2' \(Tanh\) acts on units that are not Gaussian",
        ),
        (nn.Sequential(nn.ReLU()), "no Linear or convolution"),
        (
            nn.Sequential(networks.Linear(5, 4), nn.ReLU(), nn.Dropout(), networks.Linear(4, 1)),
            "drops units afresh",
        ),
    ],
)
def test_networks_without_a_limit_are_refused_by_name(net, message):
    with pytest.raises((TypeError, ValueError), match=message):
        theory.kernels(net, points())


class Skip(nn.Module):
    """A residual block as people write it."""

    def __init__(self, inside: nn.Module | None = None):
        super().__init__()
        self.layer, self.inside = nn.Linear(5, 5), inside or nn.Identity()

    def forward(self, x):
        return x + self.inside(torch.relu(self.layer(x)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.lstm = nn.Linear(5, 4), nn.LSTM(4, 4)
        self.hidden, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.hidden(self.lstm(self.first(x))[0]))


def between(*modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 5), *modules, nn.Linear(5, 2))


REFUSED = {
    "residual network": (Skip(nn.Linear(5, 5)), "'add' combines a stream with the inputs"),
    "first block": (nn.Sequential(Skip(), nn.Linear(5, 2)), "'add' combines a stream with the"),
    "norm in a block": (
        between(Skip(nn.BatchNorm1d(5))),
        r"'1\.inside' \(BatchNorm1d\).*norm layers",
    ),
    "batch norm": (between(nn.BatchNorm1d(5), nn.ReLU()), r"'1' \(BatchNorm1d\).*norm layers"),
    "norm of inputs": (
        nn.Sequential(nn.BatchNorm1d(5, affine=False), between(nn.ReLU())),
        r"'0' \(BatchNorm1d\).*norm layers",
    ),
    "recurrent": (Recurrent(), r"of 'lstm' \(LSTM\) is not known: there is no rule"),
    "attention": (
        between(nn.TransformerEncoderLayer(5, 1, 5)),
        r"of '1' \(TransformerEncoderLayer\) is not known: its attention divides",
    ),
    "embedding": (
        nn.Sequential(
            nn.Embedding(5, 2, padding_idx=0), nn.Flatten(), nn.Linear(10, 4), nn.Linear(4, 2)
        ),
        r"'0' \(Embedding\) has padding_idx",
    ),
    "softmax": (between(nn.Softmax(1)), r"'1' \(Softmax\) is not known: there is no rule"),
    "slopes": (between(nn.PReLU()), r"'1' \(PReLU\) is not known: there is no rule"),
    "activation": (
        between(nn.Hardswish()),
        r"'1' \(Hardswish\).*register_activation\(Hardswish\)",
    ),
    "two activations": (between(nn.ReLU(), nn.ReLU()), r"'2' \(ReLU\) acts on units"),
    "dropout": (between(nn.ReLU(), nn.AlphaDropout()), r"'2' \(AlphaDropout\) drops.*\.eval"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_what_the_user_wrote_and_what_to_do(name):
    net, message = REFUSED[name]
    embedding = name == "embedding"
    x = torch.randint(5, (4, 5)) if embedding else torch.randn(4, 5).float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if name == "recurrent" else "error")  # members share LSTMs
        ensemble = embens.batch_ensemble(net, 3, example_input=x)
    for network in (net, ensemble):
        with pytest.raises((TypeError, ValueError), match=message) as refused:
            theory.kernels(network, x)
        assert name == "dropout" or "embens.finite.ntk and embens.diagnose measure" in str(
            refused.value
        )
        if "activation" not in name:
            assert "register_activation" not in str(refused.value)
    reason = theory.regime(ensemble, None if embedding else x).reason
    layer = message.partition(".*")[0]  # the regime needs no fix, only the layer without a rule

    assert embedding or re.search(layer, reason)


def test_a_rule_can_hold_the_first_layer():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = networks.mlp(5, 4, 1, outputs=4)

        def forward(self, x):
            return self.body(x)

    net = nn.Sequential(Block(), nn.ReLU(), networks.Linear(4, 1))
    traced = theory.kernels(net, points())

    @theory.propagate.register(Block)
    def _(module, state):
        return theory.propagate(module.body, state)

    assert torch.equal(theory.kernels(net, points()).ntk_shared.same, traced.ntk_shared.same)
    k = theory.kernels(embens.embed(net, post=laws.Shifted(0.6)), points())
    plain = theory.kernels(embens.embed(networks.mlp(5, 4, 2), post=laws.Shifted(0.6)), points())
    torch.testing.assert_close(k.ntk_shared.cross, plain.ntk_shared.cross)
    with pytest.raises(TypeError, match="lies inside a module "):
        theory.kernels(embens.embed(net, sites="all"), points())


@pytest.mark.parametrize(("std", "message"), [(30.0, "overflows"), (1e-3, "underflows")])
def test_a_network_too_deep_for_numbers_is_refused(std, message):
    net = networks.mlp(5, 4, 300, weight_std=std)
    with pytest.raises(ValueError, match=f"{message} before"):
        theory.kernels(net, points())


def test_a_sequence_with_a_custom_forward_needs_a_rule():
    class Residual(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    net = nn.Sequential(
        networks.Linear(5, 4), Residual(nn.ReLU(), networks.Linear(4, 4)), networks.Linear(4, 1)
    )
    with pytest.raises(TypeError, match=r"'1' \(Residual\) is not known: its forward is custom"):
        theory.kernels(net, points())

    @theory.propagate.register(Residual)
    def _(module, state):
        return state.map(lambda kernel: 4 * kernel)

    assert theory.kernels(net, points()).nngp.same.isfinite().all()


def test_frozen_weights_have_no_tangents():
    net = networks.mlp(5, 4, 2)
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    k = theory.kernels(embens.embed(net), points())

    assert (k.ntk_shared.same == 0).all()
    assert (k.ntk_individual.same.diagonal() > 0).all()


def test_plain_torch_layers_are_taken_as_torch_draws_them():
    torch.manual_seed(0)
    x = points(4)

    def draw(generator, width=600):
        torch.manual_seed(0 if generator is None else generator.initial_seed())
        net = nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 1))
        return embens.embed(net, 2, pre=None, post=laws.Shifted(0.8))

    k = expected(theory.kernels(draw(None, 8), x))
    for part, (mean, error) in average(draw, x, seeds=30).items():
        if not part.startswith("nngp"):
            assert ((mean - k[part]).abs() <= 4 * error + 0.02 * k[part].abs()).all(), part


def test_weights_of_unknown_law_are_refused():
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
    nn.init.normal_(net[2].weight)
    with pytest.raises(ValueError, match=r"law of the weights of '2' \(Linear\) is not known"):
        theory.kernels(embens.embed(net), points())


def relu_moments(q1, q2, c):
    """F and G of an ordinary ReLU."""
    s = math.sqrt(q1 * q2)
    if s == 0:
        return 0.0, 0.0
    angle = math.acos(max(-1.0, min(1.0, c / s)))
    f = s * (math.sin(angle) + (math.pi - angle) * math.cos(angle)) / (2 * math.pi)
    return f, (math.pi - angle) / (2 * math.pi)


def by_hand(x: torch.Tensor, readout: str, stride: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """conv 3×3 – ReLU – pool 2×2 – conv 3×3 – ReLU – readout, pixel pair by pixel pair."""
    n, channels, size, _ = x.shape
    inputs = range(n)

    def pixels(m):
        return list(product(range(m), range(m)))

    def convolve(kernel, m):
        result, out = {}, (m - 1) // stride + 1
        for i, j, p, r in product(inputs, inputs, pixels(out), pixels(out)):
            total = 0.0
            for dy, dx in product((-1, 0, 1), repeat=2):
                a = (stride * p[0] + dy, stride * p[1] + dx)
                b = (stride * r[0] + dy, stride * r[1] + dx)
                total += kernel.get((i, j, a, b), 0.0)
            result[i, j, p, r] = total / 9
        return result, out

    def activate(sigma, theta):
        f, g = {}, {}
        for i, j, p, r in sigma:
            f[i, j, p, r], factor = relu_moments(
                sigma[i, i, p, p], sigma[j, j, r, r], sigma[i, j, p, r]
            )
            g[i, j, p, r] = factor * theta[i, j, p, r]
        return f, g

    def pool(kernel, m):
        half = m // 2
        window = list(product((0, 1), repeat=2))
        result = {}
        for i, j, p, r in product(inputs, inputs, pixels(half), pixels(half)):
            values = [
                kernel[i, j, (2 * p[0] + a, 2 * p[1] + b), (2 * r[0] + c, 2 * r[1] + d)]
                for (a, b), (c, d) in product(window, window)
            ]
            result[i, j, p, r] = sum(values) / 16
        return result, half

    kernel = {
        (i, j, p, r): (x[i, :, p[0], p[1]] @ x[j, :, r[0], r[1]]).item() / channels
        for i, j, p, r in product(inputs, inputs, pixels(size), pixels(size))
    }
    sigma, size = convolve(kernel, size)
    theta = dict(sigma)
    f, g = activate(sigma, theta)
    (f, half), (g, _) = pool(f, size), pool(g, size)
    sigma, out = convolve(f, half)
    passed, _ = convolve(g, half)
    theta = {key: sigma[key] + passed[key] for key in sigma}
    f, g = activate(sigma, theta)
    nngp, ntk = torch.zeros(n, n), torch.zeros(n, n)
    spots = pixels(out)
    pairs = [(p, p) for p in spots] if readout == "flatten" else list(product(spots, spots))
    for i, j in product(inputs, inputs):
        nngp[i, j] = sum(f[i, j, p, r] for p, r in pairs) / len(pairs)
        ntk[i, j] = nngp[i, j] + sum(g[i, j, p, r] for p, r in pairs) / len(pairs)
    return nngp, ntk


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("readout", ["flatten", "mean"])
def test_an_ordinary_network_agrees_with_sums_over_pixel_pairs(readout, stride):
    size = 4 * stride
    x = images(size=size)
    pixels = (2 // stride) ** 2
    last = [nn.AdaptiveAvgPool2d(1)] if readout == "mean" else []
    net = nn.Sequential(
        Conv2d(2, 3, 3, padding=1, stride=stride), nn.ReLU(), nn.AvgPool2d(2),
        Conv2d(3, 3, 3, padding=1, stride=stride), nn.ReLU(), *last, nn.Flatten(),
        Linear(3 * (1 if last else pixels), 1),
    )  # fmt: skip
    k = theory.kernels(net, x)
    nngp, ntk = by_hand(x, readout, stride)

    torch.testing.assert_close(k.nngp.same, nngp, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(k.ntk_shared.same, ntk, rtol=1e-7, atol=1e-9)


CASES = {
    "mean, both": ("mean", {"pre": laws.Shifted(0.5), "post": laws.Shifted(0.7)}, "relu"),
    "flatten, both": ("flatten", {"pre": laws.Shifted(0.5), "post": laws.Shifted(0.7)}, "relu"),
    "mean, centred": ("mean", {}, "relu"),
    "flatten, masks": (
        "flatten",
        {"pre": None, "post": laws.Bernoulli(0.7), "trainable": False},
        "relu",
    ),
    "mean, erf": ("mean", {"pre": laws.Normal(), "post": laws.Shifted(0.8)}, "erf"),
}


@pytest.mark.parametrize("name", long_except(CASES, ("mean, centred", "flatten, both")))
def test_wide_networks_have_these_kernels(name):
    readout, options, activation = CASES[name]
    x = images()

    def draw(generator, width=96):
        net = networks.cnn(
            (width, width), inputs=2, outputs=1, image=4, readout=readout, activation=activation,
            weight_std=1.4, parametrization="ntk", generator=generator,
        )  # fmt: skip
        return embens.embed(net, 2, generator=generator, **options)

    assert_gradients_agree(draw, x, seeds=30, bias=0.04, width=4)


def test_images_can_be_flattened_at_once():
    x = images()
    net = nn.Sequential(nn.Flatten(), *networks.mlp(32, 4, 2))
    k = theory.kernels(embens.embed(net, post=laws.Shifted(0.5)), x)
    plain = theory.kernels(
        embens.embed(networks.mlp(32, 4, 2), post=laws.Shifted(0.5)), x.flatten(1)
    )

    for name, value in expected(k).items():
        assert torch.equal(value, expected(plain)[name])


def test_an_activation_after_the_flatten_acts_on_every_pixel():
    x = images()
    before = nn.Sequential(Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), Linear(12, 1))
    after = nn.Sequential(Conv2d(2, 3, 3), nn.Flatten(), nn.ReLU(), Linear(12, 1))
    first, second = theory.kernels(before, x), theory.kernels(after, x)
    torch.testing.assert_close(first.ntk_shared.same, second.ntk_shared.same)


def test_one_dimensional_convolutions_work_as_torch_draws_them():
    x = torch.randn(3, 2, 7, generator=torch.Generator().manual_seed(0))
    net = nn.Sequential(nn.Conv1d(2, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 5, 1))
    k = theory.kernels(embens.embed(net), x)
    assert (k.nngp.cross == 0).all()
    assert torch.linalg.eigvalsh(k.ntk_shared.same).min() > 0


def test_input_modulations_of_channels_are_conditional():
    x = images(2)
    net = networks.cnn((4, 4), inputs=2, outputs=1, image=4, parametrization="ntk")
    ensemble = embens.embed(
        net, 2, pre=None, post={"0": laws.Normal()}, sites="all", trainable=False
    )
    k = theory.kernels(ensemble, x)
    u = site_values(ensemble, ensemble.spec.sites[0])
    joint = torch.cat([x * row[:, None, None] for row in u])
    reference = theory.kernels(net, joint)

    torch.testing.assert_close(k.nngp.cross[0, 1], reference.nngp.same[:2, 2:])
    torch.testing.assert_close(k.ntk_shared.same[1], reference.ntk_shared.same[2:, 2:])


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.MaxPool2d(2), r"'2' \(MaxPool2d\): the maximum of correlated units"),
        (nn.AvgPool2d(9), "only"),
        (nn.ConvTranspose2d(3, 3, 3), "not be transposed"),
        (nn.LPPool2d(2, 2), r"LPPool2d.*not known"),
        (Linear(4, 4), "comes after pixels"),
        (nn.AvgPool1d(2), "expects 1 pixel axes; got 2"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_modules_without_a_rule_are_refused_by_name(module, message):
    net = nn.Sequential(Conv2d(2, 3, 3, padding=1), nn.ReLU(), module, nn.Flatten(), Linear(48, 1))
    with pytest.raises((TypeError, ValueError), match=message):
        theory.kernels(net, images())


def test_a_network_that_ends_in_pixels_is_refused():
    with pytest.raises(TypeError, match="pixels \\(4, 4\\) left"):
        theory.kernels(nn.Sequential(Conv2d(2, 3, 3, padding=1)), images())


def test_max_pooling_of_the_papers_network_is_refused():
    net = networks.cnn((4, 4), inputs=2, outputs=1, pool="max")
    with pytest.raises(TypeError, match="average pooling"):
        theory.kernels(embens.embed(net), images())


def test_the_papers_network_has_the_ratios_of_its_widths():
    """Xavier's variance depends on fan-in and fan-out: 2 N / (N + N')."""
    net = networks.cnn((4, 8), inputs=2, outputs=6)
    k = theory.kernels(net, images())
    stds = [(2 * 2 / (2 + 4)) ** 0.5, (2 * 4 / (4 + 8)) ** 0.5, (2 * 8 / (8 + 6)) ** 0.5]
    same = nn.Sequential(
        Conv2d(2, 4, 3, padding=1, weight_std=stds[0]), nn.ReLU(), nn.AvgPool2d(2),
        Conv2d(4, 8, 3, padding=1, weight_std=stds[1]), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), Linear(8, 6, weight_std=stds[2]),
    )  # fmt: skip

    torch.testing.assert_close(k.nngp.same, theory.kernels(same, images()).nngp.same)
