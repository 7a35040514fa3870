"""Rank-1 networks against torch.distributions and against the ensemble at the means."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import embens
from reproduction.systems.loop import Recipe, train
from reproduction.systems.rank1 import Rank1


def build(members=3, **options):
    torch.manual_seed(0)
    reference = nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)
    )
    generator = torch.Generator().manual_seed(1)
    return Rank1(reference.double(), members, generator=generator, **options)


def test_without_noise_the_network_is_the_ensemble_at_the_means():
    network = build()
    x = torch.randn(5, 4, dtype=torch.float64)
    with torch.no_grad():
        for log_std in network.log_stds:
            log_std.fill_(-60.0)

    torch.testing.assert_close(network(x), network.ensemble(x))


def test_a_pass_uses_means_plus_standard_deviations_times_noise():
    network = build()
    x = torch.randn(5, 4, dtype=torch.float64)
    torch.manual_seed(3)
    outputs = network(x)
    torch.manual_seed(3)
    drawn = copy.deepcopy(network.ensemble)
    with torch.no_grad():
        for name, log_std in zip(network.names, network.log_stds, strict=True):
            mean = drawn.get_parameter(name)
            mean.add_(log_std.exp() * torch.randn(mean.shape, dtype=mean.dtype))

    torch.testing.assert_close(outputs, drawn(x))


def test_every_pass_draws_also_in_evaluation_mode():
    network = build().eval()
    x = torch.randn(5, 4, dtype=torch.float64)
    assert not torch.equal(network(x), network(x))


def test_the_prior_is_where_modulations_start():
    reference = nn.Sequential(nn.Linear(4, 2000), nn.ReLU(), nn.Linear(2000, 2))
    network = Rank1(reference, 2, prior_std=0.3)
    for normal in network.posterior().values():
        assert torch.allclose(normal.stddev, torch.tensor(0.3))
        error = 0.3 / math.sqrt(normal.mean.numel())
        assert abs(normal.mean.mean() - 1) < 5 * error

    assert len(network.names) == len(list(network.ensemble.individual_parameters())) == 2


def test_kl_is_that_of_torch_distributions():
    network = build(prior_std=0.3)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for log_std in network.log_stds:
            log_std.add_(torch.randn(log_std.shape, generator=generator, dtype=torch.float64))
    prior = torch.distributions.Normal(
        torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
    )
    expected = sum(
        torch.distributions.kl_divergence(normal, prior).sum()
        for normal in network.posterior().values()
    )

    torch.testing.assert_close(network.kl(), expected)


def test_gradients_reach_means_and_standard_deviations():
    network = build()
    x = torch.randn(5, 4, dtype=torch.float64)
    target = torch.arange(5) % 2
    torch.manual_seed(3)
    loss = network.loss(x, target, rows=50)
    torch.manual_seed(3)
    outputs = network(x)
    expected = sum(F.cross_entropy(outputs[a], target) for a in range(3)) + network.kl() / 50
    torch.testing.assert_close(loss, expected)
    loss.backward()
    for parameter in network.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0


def test_groups_hold_every_parameter_once():
    network = build()
    groups = network.parameter_groups(lr=0.3, weight_decay=0.1)
    grouped = [id(parameter) for group in groups for parameter in group["params"]]

    assert sorted(grouped) == sorted(id(parameter) for parameter in network.parameters())
    assert groups[-1]["lr"] == 0.3
    assert groups[-1]["weight_decay"] == 0.0


def test_training_fits_the_data():
    torch.manual_seed(0)
    x = torch.randn(200, 4)
    y = (x[:, 0] > 0).long()
    reference = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    network = Rank1(reference, 3)
    recipe = Recipe(epochs=20, lr=0.1, batch_size=20)
    optimizer = recipe.optimizer(network.parameter_groups(lr=recipe.lr))
    train(partial(network.loss, rows=len(y)), optimizer, (x, y), recipe)

    assert embens.metrics.ensemble_accuracy(network(x), y) > 0.9


def test_a_prior_without_spread_is_rejected():
    with pytest.raises(ValueError, match="prior_std must be positive, got 0"):
        build(prior_std=0)
