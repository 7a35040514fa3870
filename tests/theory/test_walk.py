"""Kernels of custom forwards: against wide networks, and against the rules of a chain."""

from __future__ import annotations

import math

import pytest
import torch
from theory.measured import assert_gradients_agree, images, points
from torch import nn
from torch.nn import functional as F

import embens
from embens import laws, networks, theory
from embens.networks import Conv2d, Linear

pytestmark = pytest.mark.usefixtures("double")
SIGNS = laws.Signs(0.5)


class Residual(nn.Module):
    """A perceptron with two skip connections; the stream itself has no activation."""

    def __init__(self, width: int, norm: type[nn.Module] = nn.Identity, **options):
        super().__init__()
        self.stem = Linear(5, width, **options)
        self.norms = nn.ModuleList([norm(width) for _ in range(2)])
        self.up = nn.ModuleList([Linear(width, width, weight_std=1.4, **options) for _ in range(2)])
        self.down = nn.ModuleList([Linear(width, width, **options) for _ in range(2)])
        self.head = Linear(width, 1, **options)

    def forward(self, x):
        x = self.stem(x)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(torch.relu(up(norm(x))))
        return self.head(x)


class PreActivation(Residual):
    def forward(self, x):
        x = self.stem(x)
        for down in self.down:
            x = x + 0.5 * down(F.relu(x))
        return self.head(torch.tanh(x))


class Gated(Residual):
    def forward(self, x):
        x = torch.tanh(self.stem(x))
        return self.head(self.up[0](x) * torch.sigmoid(self.up[1](x)))


class Split(nn.Module):
    """A gate that is one half of a layer's units."""

    def __init__(self, width: int, **options):
        super().__init__()
        self.stem = Linear(5, width, **options)
        self.both = Linear(width, 2 * width, **options)
        self.head = Linear(width, 1, **options)

    def forward(self, x):
        value, gate = self.both(torch.relu(self.stem(x))).chunk(2, dim=-1)
        return self.head(value * torch.sigmoid(gate))


class Dense(nn.Module):
    """Concatenates features of two layers of different width."""

    def __init__(self, width: int, **options):
        super().__init__()
        self.first = Linear(5, width, **options)
        self.second = Linear(width, 2 * width, weight_std=1.7, **options)
        self.head = Linear(3 * width, 1, **options)

    def forward(self, x):
        x = self.first(x)
        y = self.second(F.gelu(x))
        return self.head(torch.relu(torch.cat([x, y], 1)))


class Images(nn.Module):
    """A small residual CNN with a grouped convolution, depthwise one, and global pooling."""

    def __init__(self, width: int, norm: bool = False, **options):
        super().__init__()
        self.stem = Conv2d(2, width, 3, padding=1, **options)
        self.norm = nn.GroupNorm(2, width, affine=False) if norm else nn.Identity()
        self.body = Conv2d(width, width, 3, padding=1, groups=2, **options)
        self.depthwise = Conv2d(width, width, 3, padding=1, groups=width, **options)
        self.pointwise = Conv2d(width, width, 1, **options)
        self.head = Linear(width, 1, **options)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.body(self.norm(x).relu())
        x = x + self.pointwise(self.depthwise(x))
        return self.head(x.mean((2, 3)))


class Tokens(nn.Module):
    """A mixer: tokens are mixed by a convolution over them."""

    def __init__(self, width: int, **options):
        super().__init__()
        self.stem = Linear(5, width, **options)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.up = Linear(width, width, **options)
        self.head = Linear(width, 1, **options)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.up(self.norm(x))
        return self.head(torch.relu(x).mean(1))


def rms(width: int) -> nn.Module:
    return nn.RMSNorm(width, elementwise_affine=False)


def post_only(law=SIGNS):
    return {"pre": None, "post": law}


CASES = {
    "residual, signs": (Residual, {}, {"pre": SIGNS, "post": SIGNS}),
    "residual, normal": (Residual, {}, {"pre": laws.Shifted(0.6), "post": laws.Shifted(0.7)}),
    "residual, layer norm": (
        lambda width, **o: Residual(width, nn.LayerNorm, **o),
        {},
        post_only(laws.Shifted(0.7)),
    ),
    "residual, rms norm": (
        lambda width, **o: Residual(width, rms, **o),
        {"bias_std": 0.3},
        {"pre": laws.Shifted(0.6), "post": laws.Signs(0.6)},
    ),
    "pre-activation": (PreActivation, {}, post_only()),
    "pre-activation, signs": (PreActivation, {}, {"pre": SIGNS, "post": SIGNS}),
    "pre-activation, masks": (
        PreActivation,
        {"bias_std": 0.3},
        {"pre": laws.Masks(0.5), "post": laws.Masks(0.5)},
    ),
    "gated": (Gated, {"bias_std": 0.3}, {"pre": SIGNS, "post": laws.Shifted(0.7)}),
    "split": (Split, {}, {"pre": SIGNS, "post": SIGNS}),
    "dense": (Dense, {}, {"pre": SIGNS, "post": SIGNS}),
    "per-member layer": (Residual, {}, {**post_only(), "own": "down.0"}),
    "images": (Images, {}, post_only()),
    "images, group norm": (lambda width, **o: Images(width, norm=True, **o), {}, post_only()),
    "tokens": (Tokens, {}, post_only()),
}


def inputs_of(name: str):
    if "images" in name or "CNN" in name:
        return images(2, size=4)
    if "tokens" in name:
        return torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
    return points(2)


@pytest.mark.parametrize("name", CASES)
def test_wide_networks_have_these_kernels(name):
    build, options, kinds = CASES[name]
    x = inputs_of(name)
    width = 96 if "images" in name else 256

    def draw(generator, width=width):
        net = build(width, generator=generator, **options)
        return embens.embed(net, members=2, generator=generator, **kinds)

    assert_gradients_agree(draw, x, seeds=24, bias=0.04)


def jacobian_product(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    rows = []
    for output in net(x)[:, 0]:
        gradients = torch.autograd.grad(output, list(net.parameters()), retain_graph=True)
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return torch.stack(rows) @ torch.stack(rows).T


class ResNet(nn.Module):
    """A residual block of convolutions, with LayerNorm over channels or none."""

    def __init__(self, width: int, *, norm: bool = False, **options):
        super().__init__()
        self.stem = Conv2d(2, width, 3, padding=1, **options)
        self.norm = nn.LayerNorm(width, elementwise_affine=False) if norm else nn.Identity()
        self.up = Conv2d(width, width, 3, padding=1, weight_std=1.4, **options)
        self.down = Conv2d(width, width, 3, padding=1, **options)
        self.head = Linear(width, 1, **options)

    def forward(self, x):
        x = self.stem(x)
        h = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        x = x + self.down(torch.relu(self.up(h)))
        return self.head(torch.relu(x).mean((2, 3)))


class Transformer(nn.Module):
    """A pre-norm block with two causal heads, whose scores are divided by their width."""

    def __init__(self, width: int, **options):
        super().__init__()
        self.stem = Linear(5, width, **options)
        self.norms = nn.ModuleList(
            [nn.LayerNorm(width, elementwise_affine=False) for _ in range(2)]
        )
        self.query, self.value = Linear(width, width, **options), Linear(width, width, **options)
        self.out, self.up = Linear(width, width, **options), Linear(width, width, **options)
        self.down, self.head = Linear(width, width, **options), Linear(width, 1, **options)

    def forward(self, x):
        x = self.stem(x)
        h = self.norms[0](x)
        n, t, width = h.shape
        q = self.query(h).view(n, t, 2, width // 2).transpose(1, 2)
        v = self.value(h).view(n, t, 2, width // 2).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, q, v, is_causal=True, scale=2 / width)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, width))
        x = x + self.down(torch.relu(self.up(self.norms[1](x))))
        return self.head(x.mean(1))


BLOCKS = {
    "residual perceptron": (Residual, (32, 128, 512)),
    "residual CNN": (ResNet, (8, 32, 128)),
    "residual CNN, layer norm": (lambda width, **o: ResNet(width, norm=True, **o), (8, 32, 128)),
    "transformer tokens": (Transformer, (64, 512)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_errors_fall_as_the_root_of_the_width(name):
    build, widths = BLOCKS[name]
    x = inputs_of(name)
    limit = theory.kernels(build(4), x).ntk_shared.same
    errors = []
    for width in widths:
        draws = []
        for seed in range(16):
            net = build(width, generator=torch.Generator().manual_seed(seed))
            draws.append(jacobian_product(net, x))
        errors.append((torch.stack(draws) - limit).square().mean().sqrt().item())
    slope = math.log(errors[-1] / errors[0]) / math.log(widths[-1] / widths[0])
    # Each error has 16 draws of correlated entries: a standard error of about 0.12 of its log.
    assert abs(slope + 0.5) < 0.2, errors


def test_a_chain_written_as_code_has_the_kernels_of_the_chain():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = networks.mlp(5, 4, 2, bias_std=0.3)

        def forward(self, x):
            return self.net(x.flatten(1).reshape(x.shape[0], -1))

    net, kinds = Chain(), {"pre": laws.Shifted(0.4), "post": laws.Shifted(0.6)}
    k = theory.kernels(embens.embed(net, **kinds), points(3), points(4, seed=1))
    plain = theory.kernels(embens.embed(net.net, **kinds), points(3), points(4, seed=1))
    for ours, theirs in zip(k.blocks, plain.blocks, strict=True):
        assert torch.equal(ours, theirs)


def test_images_written_as_code_have_the_kernels_of_the_chain():
    body = nn.Sequential(Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), Conv2d(4, 4, 1))
    head = Linear(4, 1)

    class Code(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = body, head

        def forward(self, x):
            return self.head(F.adaptive_avg_pool2d(self.body(x).relu(), 1).flatten(1))

    chain = nn.Sequential(body, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
    ours, theirs = theory.kernels(Code(), images()), theory.kernels(chain, images())
    torch.testing.assert_close(ours.ntk_shared.same, theirs.ntk_shared.same, rtol=1e-13, atol=0)


def test_blocks_of_a_graph_are_those_of_the_whole():
    ensemble = embens.embed(Residual(4, nn.LayerNorm), pre=None, post=SIGNS)
    whole = theory.kernels(ensemble, points(5))
    parts = theory.kernels(ensemble, points(5), block=2)
    torch.testing.assert_close(parts.ntk_shared.cross, whole.ntk_shared.cross)


def code(forward, **layers) -> nn.Module:
    class Code(nn.Module):
        def __init__(self):
            super().__init__()
            for name, layer in layers.items():
                self.add_module(name, layer)

        def forward(self, x):
            return forward(self, x)

    return Code()


def layers(**more):
    return {"a": Linear(5, 4), "b": Linear(4, 4), "c": Linear(4, 1), **more}


REFUSED = {
    "operation": (lambda s, x: s.c(s.a(x).softmax(-1)), "'softmax' is not known"),
    "twice": (lambda s, x: s.c(s.b(torch.relu(s.b(s.a(x))))), r"'b' \(Linear\) is used twice"),
    "correlated": (
        lambda s, x: s.c((h := s.a(x)) + torch.relu(h)),
        r"contain the units of \['a'\]",
    ),
    "two means": (
        lambda s, x: s.c(torch.relu(h := s.a(x)) + torch.relu(s.b(h))),
        "two streams with non-zero means",
    ),
    "not Gaussian": (
        lambda s, x: s.c(torch.relu(torch.relu(h := s.a(x)) + s.b(h))),
        "units that are not Gaussian",
    ),
    "inputs": (lambda s, x: s.c(s.a(x) + x[:, :4]), "finitely many units"),
    "constant": (lambda s, x: s.c(s.a(x) + 1.0), "operation 'add' is not known"),
    "two outputs": (lambda s, x: (s.c(s.a(x)), x), "must return one tensor.*got tuple"),
    "keyword": (lambda s, x: s.c(torch.relu(input=s.a(x))), "operation 'relu' is not known"),
    "control flow": (lambda s, x: s.c(s.a(x)) if x.sum() > 0 else x, "cannot be traced"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_operations_without_a_rule_are_named(name):
    forward, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=message) as raised:
        theory.kernels(code(forward, **layers()), points())
    if name != "two outputs":
        assert "test_walk.py" in str(raised.value)


@pytest.mark.parametrize(
    "forward",
    [
        lambda s, x: s.c(torch.relu(s.a(x + s.shift))),
        lambda s, x: s.c(torch.relu(s.a(x)) * s.shift[0]),
        lambda s, x: s.c(torch.relu(s.b(x) + s.a(s.shift))),
    ],
    ids=["inputs", "factor", "layer"],
)
def test_trained_parameters_outside_of_layers_are_refused(forward):
    net = code(forward, **layers(b=Linear(5, 4)))
    net.shift = nn.Parameter(torch.ones(5))
    with pytest.raises(TypeError, match=r"uses the parameter 'shift' outside.*test_walk\.py"):
        theory.kernels(net, points())


def test_frozen_parameters_are_constants():
    net = code(lambda s, x: s.c(torch.relu(s.a(x + s.shift.to(s.a.weight.dtype)))), **layers())
    net.shift = nn.Parameter(torch.ones(5), requires_grad=False)
    plain = code(lambda s, x: s.c(torch.relu(s.a(x))), **layers())
    ours, theirs = theory.kernels(net, points()), theory.kernels(plain, points() + 1)
    torch.testing.assert_close(ours.ntk_shared.same, theirs.ntk_shared.same)


def test_inputs_that_do_not_fit_are_named_with_the_line():
    with pytest.raises(ValueError, match=r"does not fit the network.*test_walk\.py.*s\.a\(x\)"):
        theory.kernels(code(lambda s, x: s.c(s.a(x) * 2), **layers()), points(features=7))


def test_an_operation_without_a_rule_is_named_with_its_line():
    class Code(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.c = Linear(5, 4), Linear(4, 1)

        def forward(self, x):
            return self.c(self.a(x).cumsum(-1))

    message = r"'cumsum' is not known.*test_walk\.py.*self\.a\(x\)\.cumsum.*propagate\.register"
    with pytest.raises(TypeError, match=message):
        theory.kernels(Code(), points())


@pytest.mark.parametrize("activation", ["relu", "elu", "tanh"])
def test_functions_of_concatenations_have_the_kernels_of_modules(activation):
    module = {"relu": nn.ReLU(), "elu": nn.ELU(), "tanh": nn.Tanh()}[activation]
    function = {"relu": torch.relu, "elu": F.elu, "tanh": torch.tanh}[activation]
    parts = {"a": Linear(5, 4), "b": Linear(5, 4, weight_std=3.0), "c": Linear(8, 1)}

    with_function = code(lambda s, x: s.c(function(torch.cat([s.a(x), s.b(x)], 1))), **parts)
    with_module = code(
        lambda s, x: s.c(s.activation(torch.cat([s.a(x), s.b(x)], 1))), **parts, activation=module
    )

    of_function = theory.kernels(with_function, points())
    of_module = theory.kernels(with_module, points())
    assert torch.equal(of_function.ntk_shared.same, of_module.ntk_shared.same)


class OneBlock(nn.Module):
    """A block whose sum has an activation."""

    def __init__(self, width: int, **options):
        super().__init__()
        self.stem, self.down = Linear(5, width, **options), Linear(width, width, **options)
        self.head = Linear(width, 1, **options)

    def forward(self, x):
        x = self.stem(x)
        return self.head(torch.erf(x + 0.5 * self.down(F.relu(x))))


def test_the_default_family_on_a_residual_network_has_these_kernels():
    def draw(generator, width=192):
        return embens.batch_ensemble(
            PreActivation(width, generator=generator), members=2, generator=generator
        )

    assert_gradients_agree(draw, points(2), seeds=16, bias=0.04)


def test_normal_modulations_before_a_residual_sum_have_these_kernels():
    def draw(generator, width=192):
        net = OneBlock(width, generator=generator)
        kinds = {"pre": laws.Shifted(0.5), "post": laws.Signs(0.0)}
        return embens.embed(net, members=2, **kinds, generator=generator)

    assert_gradients_agree(draw, points(2), seeds=16, bias=0.04)


def test_many_normal_modulations_before_a_residual_sum_are_refused():
    coupled = embens.embed(PreActivation(4), pre=laws.Shifted(0.5), post=SIGNS)
    with pytest.raises(TypeError, match=r"sum of 3 streams with random factors.*test_walk\.py"):
        theory.kernels(coupled, points())


def test_modulated_inputs_of_code_are_refused():
    with pytest.raises(TypeError, match=r"known for nn\.Sequential only"):
        theory.kernels(embens.embed(Residual(4), sites="all"), points())
