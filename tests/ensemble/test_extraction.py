"""Members as plain networks."""

import torch
from torch import nn

import embens
from embens.ensemble.extraction import plain_member


def make_ensemble():
    reference = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    reference[0].bias.requires_grad_(False)
    return embens.batch_ensemble(reference, members=3, own="last")


def addresses(module):
    return {tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers())}


def test_members_share_no_memory_with_the_ensemble_unless_this_is_asked_for():
    ensemble = make_ensemble()
    values = ensemble.sample_values()
    assert not addresses(plain_member(ensemble, 1, values)) & addresses(ensemble)
    shared = plain_member(ensemble, 1, values, share_parameters=True)
    assert shared[0].bias.data_ptr() != ensemble.reference[0].bias.data_ptr()  # modulated
    assert shared[2].weight.data_ptr() == ensemble.individual["2.weight"][1].data_ptr()


def test_parameters_of_members_are_trained_as_those_of_the_ensemble():
    ensemble = make_ensemble()
    ensemble.individual["2.bias"].requires_grad_(False)
    flags = {name: p.requires_grad for name, p in ensemble.member(0).named_parameters()}
    assert flags == {"0.weight": True, "0.bias": False, "2.weight": True, "2.bias": False}


def test_members_have_the_outputs_of_the_ensemble():
    ensemble = make_ensemble()
    x = torch.randn(5, 3)
    for a in range(3):
        torch.testing.assert_close(ensemble.member(a)(x), ensemble(x)[a])
