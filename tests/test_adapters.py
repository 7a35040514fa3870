"""Low-rank sites and the factors of their members."""

import pytest
import torch
from torch import nn

from embens.adapters import choose_low_rank, sample_factors
from embens.embed import Source
from embens.spec import LowRankSite


def make_source():
    layers = [nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)]
    return Source(nn.Sequential(*layers), members=3)


def test_small_layers_get_their_full_rank():
    sites = choose_low_rank(make_source(), "all", LowRankSite("", 4, "additive"))
    assert {site.layer: site.rank for site in sites} == {"0": 4, "2": 4, "4": 2}


def test_separate_layers_are_left_out():
    sites = choose_low_rank(make_source(), "all", LowRankSite("", 2, "additive"), ["2"])
    assert [site.layer for site in sites] == ["0", "4"]


@pytest.mark.parametrize("kind", ["multiplicative", "additive"])
def test_the_product_of_the_factors_has_the_scale_of_the_site(kind):
    weight = 3 * torch.randn(200, 300, dtype=torch.float64)
    site = LowRankSite("layer", 5, kind, scale=0.5)
    factors = sample_factors(site, 4, weight, torch.Generator().manual_seed(0))
    product = factors["layer.left"] @ factors["layer.right"]
    assert product.shape == (4, 200, 300)
    expected = 0.5 if kind == "multiplicative" else 0.5 * weight.square().mean().sqrt()
    # Relative standard error: 5 products per entry share 4 * 5 * (200 + 300) independent factors.
    assert product.std() == pytest.approx(float(expected), rel=0.05)


def test_a_scale_of_zero_starts_at_the_reference():
    site = LowRankSite("layer", 2, "additive", scale=0.0)
    factors = sample_factors(site, 3, torch.randn(4, 5), None)
    assert not factors["layer.left"].any()
    assert factors["layer.right"].any()
