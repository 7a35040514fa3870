"""Fluctuations of a member's kernel: closed forms, and networks drawn by hand."""

from __future__ import annotations

import math

import pytest
import torch
from theory.measured import images, points
from torch import nn

import embens
from embens import laws, theory
from embens.theory import effective_width, fluctuation

SIGNS, NORMAL = laws.Signs(0.0), laws.Normal()


def mlp(width=32, depth=2, **options):
    return embens.networks.mlp(5, width, depth, weight_std=math.sqrt(2), **options)


def sampled(draw, groups=20):
    """Return the relative variance of draws ``(draw, …)``, and its standard error."""
    parts = torch.stack(draw.chunk(groups))
    each = parts.flatten(1).var(1) / parts.flatten(1).mean(1) ** 2
    return each.mean().item(), each.std().item() / math.sqrt(groups)


def drawn_kernels(x, width, depth, phi, pre, post, *, bias=0.0, draws=40_000):
    """Return the last hidden layer's kernel of networks written out, in NTK parametrization."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    h = (x.float() / math.sqrt(len(x))).expand(draws, -1)
    for _ in range(depth):
        z = torch.einsum("di,dij->dj", h, math.sqrt(2) * normal(draws, h.shape[1], width))
        z = z + bias * normal(draws, width)
        u, v = (1.0 if law is None else law.sample(z.shape, generator) for law in (post, pre))
        h = u * phi(v * z) / math.sqrt(width)
    return (2 * h.square().sum(1) + bias**2).double()


class TestPerceptron:
    @pytest.mark.parametrize(
        ("pre", "post", "kappa"),
        [
            (None, None, 1.0),
            (SIGNS, SIGNS, 1.0),
            (NORMAL, NORMAL, 9.0),
            (None, laws.Bernoulli(0.8), 1.25),
            (laws.Uniform(), laws.Shifted(0.5), 1.8 * 2.875),
            (laws.Correlated(0.3), laws.Ternary(0.5), 6.0),
        ],
    )
    def test_of_relu_adds_its_laws_kurtoses_layer_by_layer(self, pre, post, kappa):
        ensemble = embens.embed(mlp(40, 3), 4, pre=pre, post=post) if pre or post else mlp(40, 3)
        expected = torch.full((3,), 3 * (6 * kappa - 1) / 40).double()
        torch.testing.assert_close(fluctuation(ensemble, points(3)), expected)

    @pytest.mark.parametrize(
        ("activation", "kappa"),
        [("abs", 3.0), ("leaky_relu", 6 * (1 + 0.2**4) / (1 + 0.2**2) ** 2)],
    )
    def test_of_piecewise_linear_activations_has_their_kurtosis(self, activation, kappa):
        slope = {"activation_slope": 0.2} if activation == "leaky_relu" else {}
        net = mlp(10, 1, activation=activation, **slope)
        computed = fluctuation(embens.embed(net, 2, pre=NORMAL, post=None), points(1))
        assert computed.item() == pytest.approx((3 * kappa - 1) / 10)

    @pytest.mark.parametrize(
        ("pre", "post"), [(SIGNS, SIGNS), (laws.Uniform(), laws.Bernoulli(0.5, 2**0.5))]
    )
    def test_of_drawn_relu_networks_is_met_with_an_error_that_falls_as_one_over_width(
        self, pre, post
    ):
        x, depth = points(1)[0], 2
        step = 6 * pre.kurtosis * post.kurtosis - 1
        errors = []
        for width in (8, 16):
            exact = (1 + step / width) ** depth - 1
            relu = drawn_kernels(x, width, depth, torch.relu, pre, post, draws=30_000)
            measured, error = sampled(relu)
            assert measured == pytest.approx(exact, abs=5 * error)
            ensemble = embens.embed(mlp(width, depth), 4, pre=pre, post=post)
            computed = fluctuation(ensemble, x[None]).item()
            errors.append(abs(computed / exact - 1))

        assert errors[1] < 0.75 * errors[0]

    @pytest.mark.parametrize(
        ("activation", "phi", "pre", "post", "other"),
        [
            ("erf", torch.erf, laws.Ternary(0.2), laws.Shifted(0.6), SIGNS),
            ("gelu", nn.GELU(), SIGNS, laws.Signs(0.6), laws.Uniform()),
        ],
    )
    def test_of_smooth_networks_with_biases_is_that_of_drawn_ones(
        self, activation, phi, pre, post, other
    ):
        x = points(1)[0]
        net = mlp(48, 2, activation=activation, bias_std=0.5)
        computed = fluctuation(embens.embed(net, 4, pre=pre, post=post), x[None]).item()
        measured, error = sampled(
            drawn_kernels(x, 48, 2, phi, pre, post, bias=0.5, draws=6000), groups=10
        )
        assert error < 0.05 * computed
        assert computed == pytest.approx(measured, abs=4 * error + 0.05 * computed)
        wrong = fluctuation(embens.embed(net, 4, pre=pre, post=other), x[None]).item()
        assert abs(wrong - measured) > 8 * error

    def test_makes_the_tails_of_outputs(self):
        generator = torch.Generator().manual_seed(0)
        x = points(1)[0]
        kernel = drawn_kernels(x, 16, 1, torch.relu, SIGNS, SIGNS, draws=200_000)
        outputs = kernel.sqrt() * torch.randn(len(kernel), generator=generator)
        kurtosis = outputs.pow(4).mean() / outputs.square().mean() ** 2
        computed = fluctuation(embens.embed(mlp(16, 1), 2, pre=SIGNS, post=SIGNS), x[None])

        assert kurtosis.item() == pytest.approx(3 + 3 * computed.item(), abs=0.08)


def measured_of_ensembles(make, x, draws):
    """Return kernels of members of networks that embens made, ``(draw, member, n)``."""
    computed = [embens.finite.nngp(make(torch.Generator().manual_seed(i)), x) for i in range(draws)]
    return torch.stack([k.diagonal().diagonal(dim1=0, dim2=1) for k in computed]).double()


class TestEnsembles:
    @pytest.mark.long
    def test_with_masks_of_equal_size_fluctuate_less_than_with_independent_ones(self):
        x = points(1).float()

        def make(generator):
            net = embens.networks.mlp(5, 60, 1, generator=generator)
            return embens.embed(net, 8, pre=None, post=laws.Masks(0.5), generator=generator)

        keep = laws.Masks(0.5).marginal(8).keep
        computed = fluctuation(make(torch.Generator()), x).item()
        assert computed == pytest.approx(5 / keep / 60)
        measured, error = sampled(measured_of_ensembles(make, x, 60), groups=10)
        assert computed == pytest.approx(measured, abs=4 * error)
        assert (6 / keep - 1) / 60 > computed

    def test_of_masks_for_both_takes_both_sums_off(self):
        keep = laws.Masks(0.5).marginal(4).keep
        ensemble = embens.embed(mlp(60, 1), 4, pre=laws.Masks(), post=laws.Masks())
        kappa = 1 / keep
        expected = (6 * kappa**2 - 2 * kappa + 1) / 60
        assert fluctuation(ensemble, points(1)).item() == pytest.approx(expected)

    @pytest.mark.long
    def test_of_images_are_those_of_drawn_ones(self):
        x = images(1, 3, 6)

        def make(generator):
            net = embens.networks.cnn(
                (24, 24), inputs=3, outputs=1, image=6, weight_std=2**0.5, generator=generator
            )
            return embens.embed(net, 8, None, laws.Bernoulli(0.5), generator=generator)

        computed = fluctuation(make(torch.Generator().manual_seed(0)), x).item()
        measured, error = sampled(measured_of_ensembles(make, x, 50), groups=10)
        assert computed == pytest.approx(measured, abs=4 * error + 0.1 * computed)
        assert error < 0.1 * computed

    def test_of_one_pixel_are_those_of_a_perceptron(self):
        layers = [embens.networks.Conv2d(5, 20, 1), nn.ReLU()]
        layers += [nn.Flatten(), embens.networks.Linear(20, 1)]
        ensemble = embens.embed(nn.Sequential(*layers), 4, pre=NORMAL, post=NORMAL)

        assert fluctuation(ensemble, points(2)[..., None, None]).tolist() == pytest.approx(
            [53 / 20] * 2
        )


class TestEffectiveWidth:
    def test_is_the_width_where_laws_have_no_tails(self):
        for ensemble in (
            embens.embed(mlp(64, 3), 8, pre=SIGNS, post=laws.Signs(0.7)),
            embens.independent(mlp(64, 3), 4),
            embens.embed(mlp(64, 3, activation="erf"), 8, pre=SIGNS, post=SIGNS),
        ):
            assert effective_width(ensemble, points(2)) == pytest.approx(64)

    def test_falls_with_the_tails(self):
        ensemble = embens.embed(mlp(128, 3), 8)
        assert effective_width(ensemble, points(4)) == pytest.approx(128 * 5 / 53)
        assert effective_width(mlp(128, 3), points(4)) == pytest.approx(128)
        shifted = embens.embed(mlp(128, 3), 8, pre=laws.Shifted(0.9), post=laws.Shifted(0.9))
        assert 128 * 5 / 53 < effective_width(shifted, points(1)) < 128

    def test_is_the_width_of_the_plain_network_with_the_same_fluctuation(self):
        x = points(3)
        ensemble = embens.embed(mlp(80, 2, activation="gelu", bias_std=0.3), 4)
        width = effective_width(ensemble, x[:1])
        plain = fluctuation(mlp(1, 2, activation="gelu", bias_std=0.3), x[:1])
        assert fluctuation(ensemble, x[:1]).item() == pytest.approx((plain / width).item())

    def test_of_images_falls_further_as_pixels_average_out(self):
        net = embens.networks.cnn((16, 16), inputs=3, image=8)
        signs = embens.embed(net, 4, pre=SIGNS, post=SIGNS)
        assert effective_width(signs, images(2, 3, 8)) == pytest.approx(16)
        assert effective_width(embens.embed(net, 4), images(2, 3, 8)) < 16 * 5 / 53

    def test_of_a_network_without_hidden_layers_is_refused(self):
        with pytest.raises(ValueError, match="no hidden layer"):
            effective_width(nn.Linear(5, 2), points(1))


class TestRefusals:
    def test_modulated_inputs(self):
        with pytest.raises(ValueError, match=r"modulated inputs or outputs.*sites='hidden'"):
            fluctuation(embens.embed(mlp(), 2, sites="all"), points(1))

    def test_an_activation_after_flatten(self):
        layers = [embens.networks.Conv2d(2, 4, 3), nn.Flatten(), nn.ReLU()]
        net = nn.Sequential(*layers, embens.networks.Linear(16, 1))
        with pytest.raises(TypeError, match=r"at '2' \(ReLU\) is not known.*before nn.Flatten\(\)"):
            fluctuation(net, images(1, 2, 4))

    def test_a_block_with_a_users_rule(self):
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = mlp(8, 1, outputs=8)

        theory.propagate.register(Block, lambda m, s: theory.propagate(m.body, s))
        head = embens.networks.Linear(8, 1)
        with pytest.raises(TypeError, match=r"at '0' \(Block\) is not known: layers"):
            fluctuation(nn.Sequential(Block(), nn.ReLU(), head), points(1))

    def test_layers_without_an_activation_between_them(self):
        layers = [embens.networks.Linear(a, b) for a, b in ((5, 8), (8, 6), (6, 2))]
        with pytest.raises(TypeError, match=r"at '1' \(Linear\) is not known: .* must alternate"):
            fluctuation(nn.Sequential(*layers), points(1))

    def test_what_has_no_limit(self):
        with pytest.raises(TypeError, match="layers and activations must alternate"):
            fluctuation(nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 1)), points(1))
        with pytest.raises(NotImplementedError, match="no quadrature"):
            effective_width(embens.embed(mlp(), 2, pre=None, post=Bare()), points(1))


class Bare(laws.Law):
    mean, second_moment = 0.5, 1 / 3

    def sample(self, shape, generator=None, dtype=None, device=None):
        return torch.rand(shape, generator=generator, dtype=dtype, device=device)
