"""The parts of an ensemble that measurements read."""

from __future__ import annotations

import torch
from torch import nn

import embens
from embens import laws, networks
from embens.finite.values import (
    individual_tensors,
    site_values,
    with_fixed_masks,
)


def identities(tensors):
    return {id(tensor) for tensor in tensors}


def test_plain_reference_holds_the_shared_parameters():
    network = networks.mlp(4, 6, 2, 3)
    ensemble = embens.batch_ensemble(network, 2)

    reference = ensemble.reference

    assert [type(layer) for layer in reference] == [type(layer) for layer in network]
    assert identities(reference.parameters()) == identities(ensemble.shared_parameters())


def test_values_of_trainable_sites_are_the_individual_parameters():
    ensemble = embens.batch_ensemble(networks.mlp(4, 6, 2, 3), 2)

    values = [site_values(ensemble, site) for site in ensemble.spec.sites]

    assert identities(values) == identities(ensemble.individual_parameters())
    for site, values_of_site in zip(ensemble.spec.sites, values, strict=True):
        assert values_of_site.shape == (2, site.size)


def test_per_member_layers_have_stacked_tensors():
    ensemble = embens.batch_ensemble(networks.mlp(4, 6, 2, 3), 2, own="last")
    (item,) = ensemble.spec.per_member
    assert item.module == "4"
    assert individual_tensors(ensemble)["4"]["weight"].shape == (2, 3, 6)


def test_low_rank_layers_have_two_factors():
    reference = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    tensors = individual_tensors(embens.low_rank(reference, 2, rank=1))
    assert tensors
    for factors in tensors.values():
        assert len(factors) == 2


def test_fresh_masks_are_fixed_in_a_copy():
    ensemble = embens.mc_dropout(networks.mlp(4, 6, 2, 3), 3, law=laws.Normal(), fresh=True)
    fixed = with_fixed_masks(ensemble)
    x = torch.randn(5, 4)

    assert torch.equal(fixed(x), fixed(x))
    assert not torch.equal(ensemble(x), ensemble(x))
    torch.testing.assert_close(fixed.member(1)(x), fixed(x)[1])
    assert any(site.fresh for site in ensemble.spec.sites)


def test_an_ensemble_without_fresh_masks_is_not_copied():
    ensemble = embens.batch_ensemble(networks.mlp(4, 6, 2, 3), 2)
    assert with_fixed_masks(ensemble) is ensemble
