"""Copies of layers that every member has separately."""

import pytest
import torch
from torch import nn

from embens.replicas import reinitialise_, stack_tensors, tensor_names
from embens.sites import PerMember


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))


def test_tensor_names_are_those_of_parameters_and_buffers():
    net = network()
    assert tensor_names(net) == ()
    assert tensor_names(net[1])[:2] == ("weight", "bias")
    assert "running_mean" in tensor_names(net[1])
    assert tensor_names(net[2]) == ("weight",)


def test_stacks_hold_one_tensor_per_member():
    sources = [network() for _ in range(3)]
    values = stack_tensors(sources[0], PerMember("0", ("weight",)), sources, {})
    assert isinstance(values["0.weight"], nn.Parameter)
    for a, source in enumerate(sources):
        assert torch.equal(values["0.weight"][a], source[0].weight)


def test_tied_tensors_have_one_stack():
    net, stacks = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), {}
    net[1].weight = net[0].weight
    first = stack_tensors(net, PerMember("0", ("weight",)), [net] * 2, stacks)
    second = stack_tensors(net, PerMember("1", ("weight",)), [net] * 2, stacks)
    assert first["0.weight"] is second["1.weight"]


def test_reinitialised_layers_depend_on_the_seed_only():
    networks = [network() for _ in range(3)]
    random_state = torch.random.get_rng_state()
    for net, seed in zip(networks, (0, 0, 1), strict=True):
        before = net[2].weight.clone()
        reinitialise_(net, ["0"], None, seed)
        assert torch.equal(net[2].weight, before)
    assert torch.equal(networks[0][0].weight, networks[1][0].weight)
    assert not torch.equal(networks[0][0].weight, networks[2][0].weight)
    assert torch.equal(torch.random.get_rng_state(), random_state)


def test_a_layer_without_reset_parameters_is_refused_by_name():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

    with pytest.raises(ValueError, match=r"the parameters of '0' \(Scale\) cannot be reinit"):
        reinitialise_(nn.Sequential(Scale()), ["0"], None, 0)
