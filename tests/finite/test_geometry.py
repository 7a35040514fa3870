"""Gradients of single members, compared with networks that are modulated by hand."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from cases import ARCHITECTURES, Architecture, Residual
from reference import member_by_hand
from torch import Tensor, nn

import embens
from embens import laws
from embens.finite.geometry import (
    cosines,
    gradient_cosines,
    gradient_norms,
    jackknife_error,
    joint_norm,
    member_gradients,
    off_diagonal,
    pair_error,
    shared_layer_names,
    vector_gram,
)
from embens.finite.values import site_values

MEMBERS = 3
ATTENTIVE = ("transformer", "encoder layer, time first", "cross attention")


def wave(outputs: Tensor, target: object) -> Tensor:
    """A criterion for outputs of any shape."""
    return (outputs.sin() + outputs.square()).mean()


def made(architecture: Architecture) -> tuple[nn.Module, embens.EmbeddedEnsemble, Tensor]:
    generator = torch.Generator().manual_seed(3)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        reference = architecture.build().double().eval()
    x = architecture.inputs(generator)
    x = x.double() if x.is_floating_point() else x
    ensemble = embens.embed(reference, MEMBERS, example_input=x, generator=generator)
    return reference, ensemble, x


def by_hand(reference: nn.Module, ensemble: embens.EmbeddedEnsemble, x: Tensor, a: int):
    """Return the shared gradients of a member by layer, from hooks on a copy of the reference."""
    network = member_by_hand(reference, ensemble, a)
    parameters = dict(network.named_parameters())
    computed = torch.autograd.grad(wave(network(x), None), list(parameters.values()))
    layers: dict[str, list[Tensor]] = {}
    for name, gradient in zip(parameters, computed, strict=True):
        layers.setdefault(name.rpartition(".")[0], []).append(gradient.flatten())
    return {layer: torch.cat(parts) for layer, parts in layers.items()}


@pytest.mark.parametrize(
    "architecture", [a for a in ARCHITECTURES if a.name not in ATTENTIVE], ids=str
)
def test_cosines_and_norms_are_those_of_members_modulated_by_hand(architecture):
    reference, ensemble, x = made(architecture)
    expected = [by_hand(reference, ensemble, x, a) for a in range(MEMBERS)]
    computed = gradient_cosines(ensemble, x, None, wave, by_layer=True)
    norms = gradient_norms(ensemble, x, None, wave)
    assert set(computed) == set(norms) == set(expected[0])
    for layer in computed:
        rows = torch.stack([e[layer] for e in expected])
        unit = rows / rows.norm(dim=1, keepdim=True)
        torch.testing.assert_close(computed[layer], unit @ unit.T, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(norms[layer], rows.norm(dim=1), rtol=1e-9, atol=0)
    rows = torch.stack([torch.cat([e[layer] for layer in computed]) for e in expected])
    unit = rows / rows.norm(dim=1, keepdim=True)
    total = gradient_cosines(ensemble, x, None, wave)
    torch.testing.assert_close(total, unit @ unit.T, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(norms.total, rows.norm(dim=1))


def individual_total(norms):
    return torch.stack(list(norms.individual.values())).norm(dim=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_norms_are_those_of_one_backward_pass_for_all_members(architecture):
    _, ensemble, x = made(architecture)
    outputs = ensemble(x)
    shared = list(ensemble.shared_parameters())
    individual = list(ensemble.individual_parameters())
    norms = gradient_norms(ensemble, x, None, wave)
    for a in range(MEMBERS):
        computed = torch.autograd.grad(
            wave(outputs[a], None), shared + individual, retain_graph=True, materialize_grads=True
        )
        expected = (
            joint_norm(computed[: len(shared)]),
            joint_norm([g[a] for g in computed[len(shared) :]]),
        )
        got = float(norms.total[a]), float(individual_total(norms)[a])
        assert got == pytest.approx(expected, rel=1e-6)


def test_the_sign_of_a_cosine_is_kept():
    reference = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Identity(), nn.Linear(1, 1))
    reference[2].bias.requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    ensemble = embens.embed(
        reference, 6, pre=None, post=laws.Rademacher(), trainable=False, generator=generator
    )
    signs = site_values(ensemble, ensemble.spec.sites[0])[:, 0]
    assert set(signs.tolist()) == {-1.0, 1.0}
    computed = gradient_cosines(ensemble, torch.ones(3, 2), None, lambda o, _: o.sum())
    torch.testing.assert_close(computed, signs[:, None] * signs)


def test_nothing_of_the_ensemble_is_changed():
    generator = torch.Generator().manual_seed(0)
    ensemble = embens.batch_ensemble(Residual(dropout=0.5), 3).train()
    next(m for m in ensemble.modules() if isinstance(m, nn.Linear)).eval()
    x = torch.randn(4, 3, 6, 6, generator=generator)
    target = torch.tensor([0, 1, 2, 3])
    for parameter in list(ensemble.parameters())[:2]:
        parameter.grad = torch.ones_like(parameter)
    before = copy.deepcopy(ensemble.state_dict())
    modes = [m.training for m in ensemble.modules()]
    grads = [None if p.grad is None else p.grad.clone() for p in ensemble.parameters()]
    state = torch.random.get_rng_state()
    gradient_cosines(ensemble, x, target)
    gradient_norms(ensemble, x, target)
    assert torch.equal(state, torch.random.get_rng_state())
    assert modes == [m.training for m in ensemble.modules()]
    for name, value in ensemble.state_dict().items():
        assert torch.equal(value, before[name]), name
    for parameter, grad in zip(ensemble.parameters(), grads, strict=True):
        assert (parameter.grad is None) == (grad is None)
        assert grad is None or torch.equal(parameter.grad, grad)


def test_separate_networks_share_nothing():
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    ensemble = embens.independent(net, 3, generator=torch.Generator().manual_seed(0))
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    assert torch.equal(gradient_cosines(ensemble, x, y), torch.eye(3))
    assert gradient_cosines(ensemble, x, y, by_layer=True) == {}
    norms = gradient_norms(ensemble, x, y)
    assert torch.equal(norms.total, torch.zeros(3))
    for a in range(3):
        member = ensemble.member(a)
        loss = nn.functional.cross_entropy(member(x), y)
        expected = joint_norm(torch.autograd.grad(loss, list(member.parameters())))
        assert float(individual_total(norms)[a]) == pytest.approx(expected, rel=1e-5)


def test_fresh_masks_are_drawn_once_for_each_member():
    net = nn.Sequential(nn.Linear(3, 50), nn.Tanh(), nn.Linear(50, 2))
    ensemble = embens.mc_dropout(net, 4, law=laws.Normal(), fresh=True)
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    computed = gradient_cosines(ensemble, x, y)
    assert off_diagonal(computed).abs().max() < 0.95
    assert list(gradient_norms(ensemble, x, y).individual) == []


def test_frozen_parameters_are_left_out():
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    net[2].requires_grad_(False)
    ensemble = embens.mc_dropout(net, 3)
    assert list(gradient_norms(ensemble, torch.randn(4, 3), torch.zeros(4).long())) == ["0"]


def test_a_gradient_that_vanishes_has_no_direction():
    gram = vector_gram([torch.zeros(3), torch.ones(3), -torch.ones(3)])
    expected = torch.tensor([[1.0, 0, 0], [0, 1, -1], [0, -1, 1]], dtype=torch.float64)
    assert torch.equal(cosines(gram), expected)


def test_several_arguments_are_a_tuple_or_a_dict():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x, y):
            return self.second(torch.tanh(self.first(x + y)))

    torch.manual_seed(0)
    ensemble = embens.batch_ensemble(Sum(), 3)
    x, y, target = torch.randn(4, 3), torch.randn(4, 3), torch.zeros(4).long()
    one = gradient_cosines(ensemble, (x, y), target)
    other = gradient_cosines(ensemble, (x + y, torch.zeros_like(y)), target)
    torch.testing.assert_close(one, other)
    assert torch.equal(gradient_cosines(ensemble, {"y": y, "x": x}, target), one)


def test_only_the_first_members_run_where_a_number_is_given():
    ensemble = embens.batch_ensemble(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), 4)
    x, y = torch.randn(4, 3), torch.zeros(4).long()
    every, few = (
        [m.loss for m in member_gradients(ensemble, x, y, nn.functional.cross_entropy, members=n)]
        for n in (None, 2)
    )
    assert len(every) == 4
    assert few == every[:2]


def test_a_parameter_belongs_to_the_first_layer_that_holds_it():
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    net[2].weight = net[0].weight
    ensemble = embens.last_layer_dropout(net, 2)
    assert shared_layer_names(ensemble) == ["0", "0", "2"]


def test_the_jackknife_of_a_mean_is_the_usual_error():
    values = torch.randn(9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    without = torch.stack([torch.cat([values[:i], values[i + 1 :]]).mean() for i in range(9)])
    assert jackknife_error(without) == pytest.approx(float(values.std()) / 3)


def test_the_jackknife_of_pairs_leaves_out_a_member_with_all_its_pairs():
    matrix = torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix = matrix + matrix.T
    without = []
    for a in range(5):
        kept = [b for b in range(5) if b != a]
        pairs = [float(matrix[b, c]) for b in kept for c in kept if b != c]
        without.append(sum(pairs) / len(pairs))
    assert pair_error(matrix) == pytest.approx(jackknife_error(torch.tensor(without).double()))
    assert math.isnan(pair_error(matrix[:2, :2]))
