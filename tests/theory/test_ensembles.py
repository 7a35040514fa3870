"""The theory reads an ensemble as its plain reference and the values of its sites."""

import pytest
import torch
from torch import nn

import embens
from embens import laws, networks
from embens.theory.ensembles import (
    data_flow,
    drawn_members,
    has_repeated_members,
    parameter_layers,
    per_member,
    plain_reference,
    site_values,
)


def test_the_reference_has_plain_modules_and_the_users_names():
    net = networks.mlp(5, 4, 2)
    reference = plain_reference(embens.batch_ensemble(net, 3))
    assert [type(m) for m in reference.modules()] == [type(m) for m in net.modules()]
    assert torch.equal(reference[2].weight, net[2].weight)


def test_layers_of_which_members_have_copies_have_the_shapes_of_the_reference():
    net = networks.mlp(5, 4, 2, bias_std=0.3)
    ensemble = embens.embed(net, 3, None, None, own="last")
    reference = plain_reference(ensemble)
    assert reference[4].weight.shape == net[4].weight.shape
    (item,) = per_member(ensemble)
    assert (item.module, item.drawn) == ("4", True)


def test_site_values_make_a_member_of_the_reference():
    net = networks.mlp(5, 4, 1)
    ensemble = embens.embed(net, 3, pre=None, post=laws.Normal())
    (site,) = ensemble.spec.sites
    values = site_values(ensemble, site)

    assert values.shape == (3, 4)
    torch.testing.assert_close(ensemble.member(1)[2].weight, net[2].weight * values[1])


def test_resampled_masks_have_no_values():
    ensemble = embens.mc_dropout(networks.mlp(5, 4, 1), 3, fresh=True)
    with pytest.raises(ValueError, match="drawn at each pass"):
        site_values(ensemble, ensemble.spec.sites[0])


def test_a_subset_knows_how_many_members_its_values_were_drawn_for():
    ensemble = embens.batch_ensemble(networks.mlp(5, 4, 1), 4)
    assert drawn_members(ensemble.subset([0, 2])) == 4
    assert not has_repeated_members(ensemble.subset([0, 2]))
    assert has_repeated_members(ensemble.subset([1, 1]))


def test_first_and_last_layers_are_those_of_the_data_flow():
    net = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    flow = data_flow(net)
    assert set(flow.first) == {"0"}
    assert set(flow.last) == {"2"}
    assert list(parameter_layers(net)) == ["0", "2"]
