"""Bayesian deep ensembles against explicit Jacobians and the posterior of linearised networks."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from embens import networks
from reproduction.systems.loop import Recipe
from reproduction.systems.ntkgp import NTKGPMember, bayesian_deep_ensemble


def make_reference(width=16, outputs=1):
    return networks.mlp(
        3, width, 2, outputs, activation="erf", weight_std=1.4, bias_std=0.3
    ).double()


def make_inputs(rows=5, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, generator=generator, dtype=torch.float64)


def jacobian(network, x):
    """Return the Jacobian of a network, ``(batch · class, parameter)``."""
    names = [name for name, _ in network.named_parameters()]

    def evaluate(*parameters):
        return functional_call(network, dict(zip(names, parameters, strict=True)), (x,)).flatten()

    blocks = torch.autograd.functional.jacobian(evaluate, tuple(network.parameters()))
    return torch.cat([block.flatten(1) for block in blocks], dim=1)


def flat(network):
    return nn.utils.parameters_to_vector(network.parameters()).detach()


@pytest.mark.parametrize("outputs", [1, 2])
def test_delta_is_the_jacobian_times_the_direction(outputs):
    member = NTKGPMember(make_reference(outputs=outputs), generator=torch.Generator())
    x = make_inputs()
    expected = (jacobian(member.initial, x) @ flat(member.direction)).view(5, outputs)
    torch.testing.assert_close(member.delta(x), expected)
    torch.testing.assert_close(member(x), member.network(x) + expected)
    with torch.no_grad():
        torch.testing.assert_close(member.delta(x), expected)


def test_the_direction_is_zero_in_the_last_layer_only():
    member = NTKGPMember(make_reference())
    for name, parameter in member.direction.named_parameters():
        if name.startswith("4."):
            assert (parameter == 0).all()
        else:
            assert (parameter != 0).all()


def test_delta_stays_and_the_network_moves():
    member = NTKGPMember(make_reference())
    x = make_inputs()
    delta = member.delta(x)
    before = member(x).detach()
    assert member.penalty() == 0
    with torch.no_grad():
        for parameter in member.network.parameters():
            parameter.add_(0.5)
    assert torch.equal(member.delta(x), delta)
    assert not torch.allclose(member(x), before)
    count = sum(parameter.numel() for parameter in member.network.parameters())
    assert member.penalty().item() == pytest.approx(count / 8)


def test_the_loss_is_the_negative_log_posterior_per_sample():
    member = NTKGPMember(make_reference(outputs=2))
    x = make_inputs()
    target = torch.zeros(5, 2, dtype=torch.float64)
    with torch.no_grad():
        for parameter in member.network.parameters():
            parameter.add_(0.1)
    squares = (member(x) - target).square().sum()
    distance = (flat(member.network) - flat(member.initial)).square().sum()
    expected = (squares / (2 * 0.7**2) + distance / 2) / 5

    torch.testing.assert_close(member.loss(x, target, noise_std=0.7, rows=5), expected)


def test_initial_outputs_have_the_covariance_of_the_tangent_kernel():
    members = 400
    x = make_inputs(3)
    generator = torch.Generator().manual_seed(0)
    reference = make_reference(width=48)
    ensemble = [NTKGPMember(reference, generator=generator) for _ in range(members)]
    with torch.no_grad():
        outputs = torch.stack([member(x)[:, 0] for member in ensemble])
    # E[J Jᵀ] is the tangent kernel of finite networks, here averaged over 50 of them.
    kernels = []
    for member in ensemble[:50]:
        rows = jacobian(member.initial, x)
        kernels.append(rows @ rows.T)
    kernel = torch.stack(kernels).mean(0)
    covariance = outputs.T @ outputs / members
    scale = kernel.diagonal()[:, None] * kernel.diagonal() + kernel.square()

    assert ((covariance - kernel).abs() < 4 * (scale / members).sqrt()).all()


def test_trained_members_are_where_the_linearised_network_ends():
    noise_std = 0.7
    rows = 6
    x = make_inputs(rows)
    test = make_inputs(4, seed=2)
    y = torch.sin(2 * x[:, :1])
    reference = make_reference(width=256)
    # Full-batch gradient descent at a stable rate for the kernel's largest eigenvalue.
    features = jacobian(reference, x)
    largest = torch.linalg.eigvalsh(features @ features.T)[-1].item()
    lr = 1.5 * rows / (largest / noise_std**2 + 1)
    recipe = Recipe(epochs=150, lr=lr, momentum=0.0, weight_decay=9.0, batch_size=rows, seed=3)
    ensemble = bayesian_deep_ensemble(reference, (x, y), 3, recipe, noise_std=noise_std)

    generator = torch.Generator().manual_seed(3)
    for member in ensemble.networks:
        fresh = NTKGPMember(reference, generator=generator)
        noise = torch.randn(y.shape, generator=generator, dtype=y.dtype)
        torch.testing.assert_close(fresh.initial.state_dict(), member.initial.state_dict())
        noisy = y + noise_std * noise
        train_features = jacobian(fresh.network, x)
        test_features = jacobian(fresh.network, test)
        kernel = train_features @ train_features.T + noise_std**2 * torch.eye(rows).double()
        residual = noisy - fresh(x)
        moved = test_features @ train_features.T @ torch.linalg.solve(kernel, residual)
        expected = (fresh(test) + moved).detach()
        # The linearisation error falls with the width; the shift is of order one.
        error = (member(test) - expected).square().mean().sqrt()
        assert error < 0.15 * moved.square().mean().sqrt()


@pytest.mark.parametrize(
    "reference",
    [
        networks.mlp(3, 8, 1, parametrization="standard"),
        nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)),
        nn.Sequential(networks.Linear(3, 4), nn.BatchNorm1d(4), networks.Linear(4, 1)),
    ],
)
def test_other_parametrizations_are_rejected(reference):
    with pytest.raises(ValueError, match="parametrization='ntk'"):
        NTKGPMember(reference)


def test_targets_without_noise_are_rejected():
    with pytest.raises(ValueError, match="noise_std must be positive, got 0"):
        bayesian_deep_ensemble(
            make_reference(), (make_inputs(), make_inputs()), 2, Recipe(epochs=1), noise_std=0
        )
