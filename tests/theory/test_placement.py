"""Placements: what an ensemble does at each layer of its reference."""

import pytest

import embens
from embens import laws, networks
from embens.theory.ensembles import plain_reference
from embens.theory.placement import find_placements


def placements(ensemble):
    reference = plain_reference(ensemble)
    names = {module: name for name, module in reference.named_modules()}
    return {names[m]: p for m, p in find_placements(ensemble, reference).items()}


def test_modulations_are_found_at_the_layers_of_their_sites():
    ensemble = embens.embed(
        networks.mlp(5, 4, 2), 3, pre={"0": laws.Normal()}, post={"4": laws.Shifted(0.5)}
    )
    by_layer = placements(ensemble)

    assert set(by_layer) == {"0", "4"}
    assert by_layer["0"].pre.law == laws.Normal()
    assert by_layer["0"].post is None
    assert by_layer["4"].post.pair_moment == pytest.approx(0.25)
    assert by_layer["4"].post.trainable


@pytest.mark.parametrize("weights", ["drawn", "copied"])
def test_copies_say_how_they_began(weights):
    ensemble = embens.embed(networks.mlp(5, 4, 2), 3, None, None, own="last", own_weights=weights)
    assert {name: p.copies for name, p in placements(ensemble).items()} == {"4": weights}


def test_low_rank_layers_are_marked():
    by_layer = placements(embens.low_rank(networks.mlp(5, 4, 2), 3, rank=1))
    assert by_layer
    assert all(placement.low_rank for placement in by_layer.values())


def test_fixed_and_resampled_masks_are_not_trainable():
    for fresh in (True, False):
        by_layer = placements(embens.mc_dropout(networks.mlp(5, 4, 2), 3, fresh=fresh))
        assert not any(placement.post.trainable for placement in by_layer.values())


def test_moments_of_joint_laws_are_those_of_all_members_that_were_drawn():
    ensemble = embens.embed(networks.mlp(5, 8, 1), 4, pre=None, post=laws.Masks(0.3))
    (placement,) = placements(ensemble.subset([0, 1])).values()
    assert placement.post.members == 4
    assert placement.post.marginal == laws.Masks(0.3).marginal(4)
