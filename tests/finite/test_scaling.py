"""Exponents: recovered where they are known, and those of the theory where it predicts them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import embens
from embens.finite.gradients import (
    cosines,
    member_gradients,
    off_diagonal,
    shared_grams,
    total_gram,
)
from embens.finite.scaling import (
    fit_exponent,
    scaling,
)

WIDTHS = (16, 32, 64, 128)


@pytest.mark.parametrize("exponent", [-1.0, -0.5, 0.0, 2.0])
def test_an_exact_power_law_is_recovered(exponent):
    law = scaling(lambda width, _: 3 * width**exponent, WIDTHS, predicted=exponent)
    assert law.exponent == pytest.approx(exponent, abs=1e-12)
    assert law.agrees
    assert law.table[1]["slope"] == pytest.approx(exponent)
    assert scaling(lambda w, _: w**exponent, WIDTHS, predicted=exponent + 0.1).agrees is False
    assert scaling(lambda w, _: w**exponent, WIDTHS).agrees is None


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_the_interval_holds_the_exponent_as_often_as_it_says(level):
    runs, seeds = 400, 6
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(runs, len(WIDTHS), seeds, generator=generator, dtype=torch.float64)
    clean = torch.tensor(WIDTHS, dtype=torch.float64)[:, None] ** -0.5
    laws = [
        fit_exponent(WIDTHS, clean * (0.3 * n).exp(), predicted=-0.5, level=level) for n in noise
    ]
    held = sum(bool(law.agrees) for law in laws) / runs
    assert abs(held - level) < 4 * math.sqrt(level * (1 - level) / runs)
    mean = sum(law.exponent for law in laws) / runs
    spread = math.sqrt(sum((law.exponent - mean) ** 2 for law in laws) / runs)
    assert abs(mean + 0.5) < 4 * spread / math.sqrt(runs)


def test_a_measurement_depends_on_its_generator_alone():
    def measure(width, generator):
        return float(torch.rand((), generator=generator)) + 1 / width

    first, second = scaling(measure, WIDTHS), scaling(measure, WIDTHS)
    assert first == second
    third = scaling(measure, WIDTHS, generator=torch.Generator().manual_seed(1))
    assert third.exponent != first.exponent


def test_it_prints_as_a_table():
    text = str(scaling(lambda width, _: 1 / width, (8, 16), predicted=-1.0))
    assert "exponent -1.00" in text
    assert "predicted -1, inside" in text
    assert len(text.splitlines()) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"widths": [8, 8]}, "two different widths"),
        ({"widths": [0, 8]}, "at least 1"),
        ({"seeds": 1}, "at least two seeds"),
        ({"level": 1.0}, "between 0 and 1"),
        ({"measure": lambda width, _: -1.0}, "positive mean"),
        ({"measure": lambda width, _: math.nan}, "finite values"),
    ],
)
def test_what_can_t_be_fitted_is_refused(arguments, message):
    arguments = {"measure": lambda width, _: 1.0, "widths": [8, 16], **arguments}
    with pytest.raises(ValueError, match=message):
        scaling(**arguments)


X = torch.randn(16, 8, generator=torch.Generator().manual_seed(5))
Y = torch.arange(16) % 3


def build(width: int, generator: torch.Generator, p: float = 0.0) -> embens.EmbeddedEnsemble:
    reference = embens.networks.mlp(8, width, 3, 3, weight_std=math.sqrt(2), generator=generator)
    return embens.batch_ensemble(reference, 6, p=p, generator=generator)


def test_cosines_fall_as_theory_says_in_total_and_layer_by_layer():
    widths, seeds = (32, 64, 128, 256), 8
    found = {layer: torch.zeros(len(widths), seeds) for layer in ("0", "2", "4", "6", "all")}
    for i, width in enumerate(widths):
        for seed in range(seeds):
            generator = torch.Generator().manual_seed(100 * width + seed)
            members = member_gradients(build(width, generator), X, Y, F.cross_entropy)
            grams = shared_grams(members)
            grams["all"] = total_gram(grams, 6)
            for layer, gram in grams.items():
                found[layer][i, seed] = off_diagonal(cosines(gram)).abs().mean()
    laws = {layer: fit_exponent(widths, v.double(), level=0.99) for layer, v in found.items()}
    for layer in ("all", "0", "6"):
        assert laws[layer].interval[0] - 0.1 < -0.5 < laws[layer].interval[1] + 0.1, laws[layer]
        assert laws[layer].interval[0] > -1  # not the paper's exponent
    for layer in ("2", "4"):
        assert laws[layer].interval[0] - 0.1 < -1 < laws[layer].interval[1] + 0.1, laws[layer]
        assert laws[layer].interval[1] < -0.5


def test_the_ratio_of_kernels_is_that_of_naive_jacobians():
    ensemble = build(16, torch.Generator().manual_seed(0))
    losses = F.cross_entropy(ensemble(X).flatten(0, 1), Y.repeat(6), reduction="none")
    shared = list(ensemble.shared_parameters())
    rows = [torch.autograd.grad(loss, shared, retain_graph=True) for loss in losses]
    jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).double()
    kernel = (jacobian @ jacobian.T).reshape(6, 16, 6, 16).square()
    between = [kernel[a, :, b].mean() for a in range(6) for b in range(6) if a != b]
    within = [kernel[a, :, a].mean() for a in range(6)]
    expected = float(torch.stack(between).mean() / torch.stack(within).mean())
    kernel = embens.finite.ntk(ensemble, X, outputs="nll", target=Y)
    assert float(embens.finite.ntk_ratio(kernel.shared)) == pytest.approx(expected, rel=1e-4)


def test_shifted_members_keep_their_cosine():
    def measure(width, generator):
        ensemble = build(width, generator, p=0.95)
        return off_diagonal(embens.finite.gradient_cosines(ensemble, X, Y)).abs().mean()

    law = scaling(measure, (64, 256), seeds=5, predicted=0.0, level=0.99)
    assert law.agrees, law
    assert law.interval[0] > -0.5
    assert law.table[-1]["mean"] > 0.2
