"""Bayesian deep ensembles: members by hand, their prior, and their posterior after training."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import embens
from embens import networks, theory


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def reference(width: int = 16, **options) -> nn.Module:
    options = {"bias_std": 0.3, "weight_std": 1.4, "activation": "erf"} | options
    return networks.mlp(3, width, 2, 1, **options)


def inputs(rows: int = 5, seed: int = 1) -> Tensor:
    return torch.randn(rows, 3, generator=seeded(seed))


def test_a_member_is_a_network_plus_its_jacobian_times_a_draw_without_last_layers():
    ensemble, x = embens.bayesian(reference(), 3, generator=seeded()).double(), inputs().double()
    for a in range(3):
        member, net = ensemble.member(a), reference().double()
        with torch.no_grad():
            member.trained.add_(0.1)  # the second part stays where it was
        expected = []
        for numbers in (member.start, member.trained):
            nn.utils.vector_to_parameters(numbers, net.parameters())
            expected.append(net(x).detach())
        nn.utils.vector_to_parameters(member.start, net.parameters())
        rows = []
        for row in x:
            gradients = torch.autograd.grad(net(row[None]).sum(), list(net.parameters()))
            rows.append(torch.cat([g.flatten() for g in gradients]) @ member.star)
        torch.testing.assert_close(member(x), expected[1] + torch.stack(rows)[:, None])
        torch.testing.assert_close(ensemble(x)[a], expected[0] + torch.stack(rows)[:, None])
        last = 16 + 1
        assert (member.star[-last:] == 0).all()
        assert (member.star[:-last] != 0).all()
    assert not torch.equal(ensemble(x)[0], ensemble(x)[1])


def test_it_is_an_ensemble_like_any_other(tmp_path):
    net, x = reference(), inputs()
    before = copy.deepcopy(net.state_dict())
    ensemble = embens.bayesian(net, 4, generator=seeded())
    outputs = ensemble(x)
    for a in range(4):
        torch.testing.assert_close(ensemble.member(a)(x), outputs[a])
    ensemble.save(tmp_path / "file")
    other = reference(generator=seeded(7))
    assert torch.equal(embens.load(tmp_path / "file", other)(x), outputs)
    for again in (pickle.loads(pickle.dumps(ensemble)), copy.deepcopy(ensemble)):
        assert torch.equal(again(x), outputs)
    assert torch.equal(embens.bayesian(net, 4, generator=seeded())(x), outputs)
    own = x.expand(4, *x.shape).clone()
    torch.testing.assert_close(ensemble(own, batch="own"), outputs)
    torch.testing.assert_close(ensemble.subset([2])(x)[0], outputs[2])
    assert ensemble(x[:1]).shape == (4, 1, 1)
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    with pytest.raises(ValueError, match="shape"):
        embens.load(tmp_path / "file", reference(width=8))


def test_the_penalty_is_the_distance_from_the_start_and_the_only_decay():
    ensemble = embens.bayesian(reference(), 3)
    assert ensemble.kl() == 0
    (stack,) = ensemble.individual_parameters()
    with torch.no_grad():
        stack += 0.5
    assert ensemble.kl().item() == pytest.approx(stack.numel() * 0.125, rel=1e-5)
    (group,) = ensemble.parameter_groups(lr=0.1, weight_decay=0.1)
    assert group["weight_decay"] == 0
    x, start = inputs(), stack.detach() - 0.5
    target = ensemble(x).detach()  # nothing pulls but the penalty
    ensemble_step = {"epochs": 1, "lr": 0.2, "optimizer": torch.optim.SGD, "batch_size": 5}
    embens.fit(ensemble, (x, target[0]), each=embens.EachMember(targets=target), **ensemble_step)
    torch.testing.assert_close(stack - start, torch.full_like(start, 0.5 * (1 - 0.2 / 5)))


def test_its_limit_is_the_tangent_kernel_and_members_are_independent():
    net, x = reference(), inputs().double()
    k, plain = theory.kernels(embens.bayesian(net, 4), x), theory.kernels(net, x)
    torch.testing.assert_close(k.nngp.same, plain.ntk_shared.same)
    torch.testing.assert_close(k.ntk_individual.same, plain.ntk_shared.same)
    assert (k.nngp.cross == 0).all()
    assert theory.regime(embens.bayesian(net, 4)).regime is theory.Regime.INDEPENDENT
    separate = theory.kernels(embens.independent(net, 4), x)
    assert (k.nngp.same.diagonal() > separate.nngp.same.diagonal() * 1.2).all()


@pytest.mark.parametrize("activation", ["relu", "erf"])
def test_outputs_at_the_start_have_the_covariance_of_the_limit(activation):
    members, net, x = 600, reference(256, activation=activation), inputs(3)
    with torch.no_grad():
        outputs = embens.bayesian(net, members, generator=seeded())(x)[..., 0].double()
    law = theory.kernels(embens.bayesian(net, 1), x).nngp.same
    errors = ((law.diagonal()[:, None] * law.diagonal() + law.square()) / members).sqrt()
    found = outputs.mT @ outputs / members
    assert ((found - law).abs() < 4 * errors).all()
    without = theory.kernels(net, x).nngp.same
    assert ((found - without).abs() > 6 * errors).any()


def trained(width: int, members: int, noise: float, steps: int) -> tuple[Tensor, ...]:
    """Return outputs of trained members on test data, and mean and covariance of the posterior."""
    net = reference(width, weight_std=1.2, bias_std=0.2)
    x, test = inputs(6), inputs(4, seed=2)
    y = torch.sin(2 * x[:, :1]) + 1.0
    ensemble = embens.bayesian(net, members, generator=seeded())
    noisy = y + noise * torch.randn(members, *y.shape, generator=seeded(3))
    k = theory.kernels(ensemble, torch.cat([x, test])).nngp.same
    parts = [theory.kernels(ensemble, *pair) for pair in ((x, x), (test, x), (test, test))]
    rate = 0.9 * 2 * len(x) / (torch.linalg.eigvalsh(k[:6, :6])[-1].item() / noise**2 + 1)

    def criterion(outputs: Tensor, target: Tensor) -> Tensor:
        return (outputs - target).square() / (2 * noise**2)

    embens.fit(
        *(ensemble, (x, y)),
        epochs=steps,
        lr=rate,
        each=embens.EachMember(targets=noisy),
        criterion=criterion,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
        optimizer=torch.optim.SGD,
    )
    with torch.no_grad():
        outputs = ensemble(test)[..., 0].double()
    mean, covariance = theory.posterior(*parts, y[:, 0], noise)
    return outputs, mean, covariance


def test_trained_members_are_draws_of_the_posterior():
    members = 80
    outputs, mean, covariance = trained(width=192, members=members, noise=0.5, steps=100)
    spread = covariance.diagonal()
    finite = 0.1 * spread.sqrt()  # of the finite width
    assert ((outputs.mean(0) - mean).abs() < 3.5 * (spread / members).sqrt() + finite).all()
    errors = ((spread[:, None] * spread + covariance.square()) / members).sqrt()
    assert ((outputs.mT.cov() - covariance).abs() < 3.5 * errors + 0.05 * spread.max()).all()


@pytest.mark.long
def test_the_error_of_the_posterior_falls_with_the_width():
    errors = []
    for width in (16, 64, 256):
        outputs, mean, covariance = trained(width=width, members=400, noise=0.3, steps=300)
        scale = covariance.diagonal().mean()
        bias = (outputs.mean(0) - mean).square().mean() / scale
        errors.append(float(bias + (outputs.mT.cov() - covariance).abs().mean() / scale))
    assert errors[0] > 1.5 * errors[2]
    assert errors[2] < 0.15


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (networks.mlp(3, 8, 1, parametrization="standard"), "parametrization='ntk'; got Linear"),
        (nn.Linear(3, 1), "layers of embens.networks"),
        (nn.Sequential(networks.Linear(3, 4), nn.BatchNorm1d(4)), "got BatchNorm1d"),
        (nn.Sequential(nn.BatchNorm1d(3, affine=False), networks.Linear(3, 4)), "no buffers"),
        (nn.ReLU(), "a network with parameters"),
    ],
)
def test_other_networks_are_refused(net, message):
    with pytest.raises(ValueError, match=message):
        embens.bayesian(net, 3)
