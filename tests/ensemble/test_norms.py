"""Norm layers in an ensemble: whose statistics, whose scale and shift."""

from __future__ import annotations

import pytest
import torch
from reference import member_by_hand
from torch import nn

import embens
from embens import laws


def network(norm: type[nn.Module] = nn.BatchNorm2d, **kwargs) -> nn.Sequential:
    size = (4,) if norm is not nn.GroupNorm else (2, 4)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), norm(*size, **kwargs), nn.SiLU(), nn.Flatten(), nn.Linear(16, 2)
    )


def batches(count: int = 3) -> torch.Tensor:
    return torch.randn(count, 6, 3, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("chunk", [1, 2, 3])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_by_default_every_member_has_the_statistics_of_a_network_trained_alone(chunk, momentum):
    reference = network(momentum=momentum)
    ensemble = embens.batch_ensemble(reference, 3)
    alone = [member_by_hand(reference, ensemble, a) for a in range(3)]
    for x in batches():
        outputs = ensemble(x, chunk=chunk)
        for a in range(3):
            torch.testing.assert_close(outputs[a], alone[a](x), rtol=1e-4, atol=1e-5)
    ensemble.eval()
    x = batches(1)[0]
    for a in range(3):
        torch.testing.assert_close(ensemble(x)[a], alone[a].eval()(x), rtol=1e-4, atol=1e-5)
        member = ensemble.member(a)
        assert type(member[1]) is nn.BatchNorm2d
        torch.testing.assert_close(member[1].running_var, alone[a][1].running_var)
        assert member[1].num_batches_tracked == 3
    assert not torch.allclose(alone[0][1].running_var, alone[1][1].running_var)
    names = dict(ensemble.named_parameters())
    assert sum("1.module" in n for n in names) == 2, "scale and shift are shared"
    shared = {id(p) for p in ensemble.shared_parameters()}
    assert all(id(p) in shared for n, p in names.items() if "1.module" in n)


def test_shared_statistics_are_one_set_that_members_update_in_turn():
    reference = network()
    ensemble = embens.batch_ensemble(reference, 3)
    shared = embens.embed(reference, 3, norm_statistics="shared")
    state = {k: v for k, v in ensemble.state_dict().items() if "running" not in k}
    state = {k: v for k, v in state.items() if "tracked" not in k}
    shared.load_state_dict(state, strict=False)
    norm = next(m for m in shared.modules() if isinstance(m, nn.BatchNorm2d))
    mean = norm.running_mean.clone()
    x = batches(1)[0]
    shared(x)
    assert norm.num_batches_tracked == 3
    by_hand = [member_by_hand(reference, shared, a) for a in range(3)]
    for a in range(3):
        z = by_hand[a][0](x)
        mean = 0.9 * mean + 0.1 * z.mean((0, 2, 3))
    torch.testing.assert_close(norm.running_mean, mean)


def test_per_member_scale_and_shift_are_individual_parameters_starting_from_the_reference():
    reference = network()
    with torch.no_grad():
        reference[1].weight.uniform_(0.5, 2)
    ensemble = embens.embed(reference, 3, norm_affine="member")
    stacked = [p for n, p in ensemble.named_parameters() if n.endswith("1.module.weight")]
    assert [tuple(p.shape) for p in stacked] == [(3, 4)]
    assert torch.equal(stacked[0][2], reference[1].weight)
    individual = {id(p) for p in ensemble.individual_parameters()}
    assert id(stacked[0]) in individual
    with torch.no_grad():
        stacked[0][1] += 1
    x = batches(1)[0]
    ensemble.eval()
    for a in range(3):
        torch.testing.assert_close(ensemble(x)[a], ensemble.member(a)(x))


@pytest.mark.parametrize("norm", [nn.GroupNorm, nn.InstanceNorm2d])
@pytest.mark.parametrize("affine", ["shared", "member"])
def test_norms_without_statistics_are_the_same_in_both_modes(norm, affine):
    kwargs = {"affine": True} if norm is nn.InstanceNorm2d else {}
    ensemble = embens.embed(network(norm, **kwargs), 3, norm_affine=affine)
    x = batches(1)[0]
    outputs = ensemble(x)
    torch.testing.assert_close(ensemble.eval()(x), outputs)
    for a in range(3):
        torch.testing.assert_close(outputs[a], ensemble.member(a)(x))


@pytest.mark.parametrize("affine", ["shared", "member"])
def test_layer_norm_works_in_any_place(affine):
    reference = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2))
    ensemble = embens.embed(reference, 3, norm_affine=affine)
    x = torch.randn(5, 3)
    for chunk in (1, 3):
        for a in range(3):
            torch.testing.assert_close(ensemble(x, chunk=chunk)[a], ensemble.member(a)(x))


def test_a_norm_before_the_first_modulation_stays_one():
    reference = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    ensemble = embens.batch_ensemble(reference, 3)
    ensemble(torch.randn(5, 3))
    norm = next(m for m in ensemble.modules() if isinstance(m, nn.BatchNorm1d))
    assert norm.running_mean.shape == (3,)
    assert norm.num_batches_tracked == 1


def test_per_member_statistics_matter_because_modulations_change_the_scale():
    """The reason for the default: with one set, evaluation differs from training for all."""
    reference = network()
    gaps = {}
    for statistics in ("member", "shared"):
        law = laws.Normal()
        generator = torch.Generator().manual_seed(1)
        ensemble = embens.embed(
            reference, 4, pre=law, post=law, norm_statistics=statistics, generator=generator
        )
        x = batches(1)[0]
        for _ in range(100):
            outputs = ensemble(x)
        gaps[statistics] = (ensemble.eval()(x) - outputs).abs().mean().item()
    assert gaps["member"] < 0.2 * gaps["shared"]
