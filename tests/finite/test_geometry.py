"""Gradients of single members, compared with networks that are modulated by hand."""

from __future__ import annotations

import copy
import itertools
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


def build(architecture: Architecture) -> tuple[nn.Module, embens.EmbeddedEnsemble, Tensor]:
    """Return a reference in float64, an ensemble of it, and samples."""
    generator = torch.Generator().manual_seed(3)
    reference = architecture.build().double().eval()
    x = architecture.inputs(generator)
    if x.is_floating_point():
        x = x.double()
    ensemble = embens.embed(reference, MEMBERS, example_input=x, generator=generator)
    return reference, ensemble, x


def gradients_by_hand(
    reference: nn.Module, ensemble: embens.EmbeddedEnsemble, x: Tensor, a: int
) -> dict[str, Tensor]:
    """Return the shared gradients of a member by layer, from hooks on a copy of the reference."""
    network = member_by_hand(reference, ensemble, a)
    parameters = dict(network.named_parameters())
    gradients = torch.autograd.grad(wave(network(x), None), list(parameters.values()))
    by_layer: dict[str, list[Tensor]] = {}
    for name, gradient in zip(parameters, gradients, strict=True):
        layer = name.rpartition(".")[0]
        by_layer.setdefault(layer, []).append(gradient.flatten())
    return {layer: torch.cat(parts) for layer, parts in by_layer.items()}


def cosines_of_rows(rows: Tensor) -> Tensor:
    unit = rows / rows.norm(dim=1, keepdim=True)
    return unit @ unit.T


@pytest.mark.parametrize(
    "architecture", [a for a in ARCHITECTURES if a.name not in ATTENTIVE], ids=str
)
def test_cosines_and_norms_equal_those_of_members_modulated_by_hand(architecture):
    reference, ensemble, x = build(architecture)
    members = [gradients_by_hand(reference, ensemble, x, a) for a in range(MEMBERS)]

    by_layer = gradient_cosines(ensemble, x, None, wave, by_layer=True)
    total = gradient_cosines(ensemble, x, None, wave)
    norms = gradient_norms(ensemble, x, None, wave)

    assert set(by_layer) == set(members[0])
    assert set(norms) == set(members[0])
    rows_of_layers = []
    for layer in by_layer:
        rows = torch.stack([gradients[layer] for gradients in members])
        rows_of_layers.append(rows)
        torch.testing.assert_close(by_layer[layer], cosines_of_rows(rows), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(norms[layer], rows.norm(dim=1), rtol=1e-9, atol=0)
    rows = torch.cat(rows_of_layers, dim=1)
    torch.testing.assert_close(total, cosines_of_rows(rows), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(norms.total, rows.norm(dim=1))


def total_of_individual_norms(norms):
    return torch.stack(list(norms.individual.values())).norm(dim=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_norms_equal_those_of_one_backward_pass_for_all_members(architecture):
    _, ensemble, x = build(architecture)
    outputs = ensemble(x)
    shared = list(ensemble.shared_parameters())
    individual = list(ensemble.individual_parameters())

    norms = gradient_norms(ensemble, x, None, wave)

    totals_of_individual = total_of_individual_norms(norms)
    for a in range(MEMBERS):
        gradients = torch.autograd.grad(
            wave(outputs[a], None), shared + individual, retain_graph=True, materialize_grads=True
        )
        shared_norm = joint_norm(gradients[: len(shared)])
        individual_norm = joint_norm([gradient[a] for gradient in gradients[len(shared) :]])
        assert float(norms.total[a]) == pytest.approx(shared_norm, rel=1e-6)
        assert float(totals_of_individual[a]) == pytest.approx(individual_norm, rel=1e-6)


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
    state_before = copy.deepcopy(ensemble.state_dict())
    modes_before = [module.training for module in ensemble.modules()]
    gradients_before = copy.deepcopy([parameter.grad for parameter in ensemble.parameters()])
    random_state = torch.random.get_rng_state()

    gradient_cosines(ensemble, x, target)
    gradient_norms(ensemble, x, target)

    assert torch.equal(random_state, torch.random.get_rng_state())
    assert modes_before == [module.training for module in ensemble.modules()]
    for name, value in ensemble.state_dict().items():
        assert torch.equal(value, state_before[name]), name
    for parameter, gradient in zip(ensemble.parameters(), gradients_before, strict=True):
        if gradient is None:
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad, gradient)


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
        assert float(total_of_individual_norms(norms)[a]) == pytest.approx(expected, rel=1e-5)


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


def test_members_argument_limits_the_members_that_run():
    ensemble = embens.batch_ensemble(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), 4)
    x, y = torch.randn(4, 3), torch.zeros(4).long()
    criterion = nn.functional.cross_entropy

    all_losses = [m.loss for m in member_gradients(ensemble, x, y, criterion)]
    two_losses = [m.loss for m in member_gradients(ensemble, x, y, criterion, members=2)]

    assert len(all_losses) == 4
    assert two_losses == all_losses[:2]


def test_a_parameter_belongs_to_the_first_layer_that_holds_it():
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    net[2].weight = net[0].weight
    ensemble = embens.last_layer_dropout(net, 2)
    assert shared_layer_names(ensemble) == ["0", "0", "2"]


def test_jackknife_of_a_mean_is_its_standard_error():
    values = torch.randn(9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    means_without_one = []
    for i in range(9):
        means_without_one.append(torch.cat([values[:i], values[i + 1 :]]).mean())

    error = jackknife_error(torch.stack(means_without_one))

    assert error == pytest.approx(float(values.std()) / 3)


def test_jackknife_of_pairs_leaves_out_all_pairs_of_a_member():
    matrix = torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix = matrix + matrix.T
    means_without_one = []
    for a in range(5):
        others = [b for b in range(5) if b != a]
        pairs = [matrix[b, c] for b, c in itertools.permutations(others, 2)]
        means_without_one.append(torch.stack(pairs).mean())

    error = pair_error(matrix)

    assert error == pytest.approx(jackknife_error(torch.stack(means_without_one)))


def test_jackknife_of_one_pair_is_undefined():
    assert math.isnan(pair_error(torch.randn(2, 2)))
