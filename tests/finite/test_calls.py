"""Layers with rules, and the gradients that follow from their calls."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import embens
from embens import laws
from embens.finite.calls import add_call, backward, layers_with_rules, make_call, separate_input
from embens.finite.grams import MemberGradients


def reference() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def test_layers_have_their_trainable_parameters_and_modulations():
    network = reference()
    network[0].bias.requires_grad_(False)
    ensemble = embens.embed(network, 2, trainable={"pre": True, "post": False})
    layers = layers_with_rules(ensemble, ensemble.member(0))

    assert list(layers) == ["0", "2"]
    assert list(layers["0"].parameters) == ["weight"]
    assert layers["0"].trainable_pre
    assert layers["2"].post is not None
    assert not layers["2"].trainable_post


def test_sites_with_zeros_are_left_to_autograd():
    ensemble = embens.embed(reference(), 2, pre=laws.Bernoulli(0.5), post=laws.Bernoulli(0.5))
    with torch.no_grad():
        for values in ensemble.individual_parameters():
            values[0, 0] = 0.0
    layers = layers_with_rules(ensemble, ensemble.member(0))

    assert not layers["0"].trainable_pre
    assert not layers["2"].trainable_post


def test_weights_of_low_rank_layers_have_no_rule():
    ensemble = embens.low_rank(reference(), 2, rank=1, sites=["2"])
    layers = layers_with_rules(ensemble, ensemble.member(0))
    assert list(layers["0"].parameters) == ["weight", "bias"]
    assert list(layers["2"].parameters) == ["bias"]


def test_a_layer_without_some_parameters_keeps_its_modulations():
    ensemble = embens.batch_ensemble(reference(), 2)
    facts = layers_with_rules(ensemble, ensemble.member(0))["0"]
    removed = facts.without({id(facts.parameters["bias"]), id(facts.pre.parameter)})

    assert list(removed.parameters) == ["weight"]
    assert not removed.trainable_pre
    assert torch.equal(removed.pre.values, facts.pre.values)


def test_the_gradients_of_a_call_are_those_of_autograd_through_the_ensemble():
    ensemble, a = embens.batch_ensemble(reference(), 3), 1
    x = torch.randn(5, 3, dtype=torch.float64)
    network = ensemble.member(a)
    facts = layers_with_rules(ensemble, network)["2"]
    calls = []

    def keep(layer: nn.Module, args: tuple, output: Tensor) -> None:
        calls.append(make_call(facts, layer, args[0], output))

    network[2].register_forward_pre_hook(separate_input)
    network[2].register_forward_hook(keep)
    output = network(x)
    cotangents = torch.ones(1, 5, 2, dtype=torch.float64)
    ((gradients),) = backward(output, calls, cotangents)
    member = MemberGradients()
    add_call(member, calls[0], gradients, a, batch=5)
    expected_output = ensemble(x, chunk=1)[a].sum(1)
    for parameter, row in ((facts.parameters["bias"], None), (facts.post.parameter, a)):
        rows = []
        for value in expected_output:
            (gradient,) = torch.autograd.grad(value, parameter, retain_graph=True)
            rows.append(gradient if row is None else gradient[row])
        torch.testing.assert_close(member.rows[id(parameter)][:, 0], torch.stack(rows))
    assert list(member.weights) == [id(facts.parameters["weight"])]
