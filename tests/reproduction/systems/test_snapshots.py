"""Which networks are kept, the learning rates of the papers, and the moments of SWAG."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

import embens
from reproduction.systems.loop import Recipe, constant, train_network
from reproduction.systems.snapshots import (
    WeightMoments,
    cosine_rate,
    cycle_position,
    fast_geometric_ensemble,
    snapshot_ensemble,
    swag,
    triangular_rate,
)

PROCEDURES = [snapshot_ensemble, fast_geometric_ensemble, swag]


def make_data(rows=60):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(rows, 4, generator=generator)
    return inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()


def make_network():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def flat(network):
    return parameters_to_vector(network.parameters()).detach()


def path_of(network, recipe, rate):
    """Return the weights after each step of a run."""
    network = copy.deepcopy(network)
    path = []

    def keep(finished_steps):
        path.append(flat(network).clone())

    train_network(network, make_data(), recipe, rate=rate, after_step=keep)
    return path


def test_cycles_cover_the_run_and_differ_by_at_most_one_step():
    for steps in range(2, 30):
        for cycles in range(1, steps // 2 + 1):
            positions = [cycle_position(step, steps, cycles) for step in range(steps)]
            ends = [length for position, length in positions if position == length]
            assert len(ends) == cycles
            assert sum(ends) == steps
            assert max(ends) - min(ends) <= 1


def test_rates_are_those_of_the_papers():
    length = 10
    for t in range(1, length + 1):
        # Huang et al. 2017, equation 2, within a cycle.
        expected = (math.cos(math.pi * ((t - 1) % length) / length) + 1) / 2
        assert cosine_rate(t, length) == pytest.approx(expected)
        # Garipov et al. 2018, section 4, with α₁ = 1 and α₂ = 0.01.
        part = t / length
        if part <= 0.5:
            expected = (1 - 2 * part) + 2 * part * 0.01
        else:
            expected = (2 - 2 * part) * 0.01 + (2 * part - 1)
        assert triangular_rate(t, length) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("procedure", "rate", "kept_steps"),
    [
        (snapshot_ensemble, cosine_rate, [7, 14, 20]),
        (fast_geometric_ensemble, triangular_rate, [3, 10, 17]),
    ],
)
def test_members_are_the_networks_at_the_lowest_rates(procedure, rate, kept_steps):
    recipe = Recipe(epochs=5, batch_size=16, lr=0.05)  # 20 steps in cycles of 7, 7, 6
    ensemble = procedure(make_network(), make_data(), 3, recipe)

    def scheduled(step, steps):
        return rate(*cycle_position(step, steps, 3))

    path = path_of(make_network(), recipe, scheduled)
    assert ensemble.members == 3
    for a, step in enumerate(kept_steps):
        assert torch.equal(flat(ensemble.member(a)), path[step - 1])


@pytest.mark.parametrize("procedure", PROCEDURES)
def test_procedures_return_different_members_and_keep_the_network(procedure):
    network = make_network()
    before = copy.deepcopy(network.state_dict())
    inputs, target = make_data()
    recipe = Recipe(epochs=9, batch_size=10, lr=0.05)
    train_network(network, (inputs, target), recipe)
    trained = copy.deepcopy(network.state_dict())
    ensemble = procedure(network, (inputs, target), 3, recipe).eval()
    again = procedure(network, (inputs, target), 3, recipe).eval()
    outputs = ensemble(inputs)

    assert not torch.equal(before["0.weight"], trained["0.weight"])
    torch.testing.assert_close(network.state_dict(), trained)
    assert outputs.shape == (3, 60, 3)
    assert outputs.std(0).min() > 0
    assert torch.equal(again(inputs), outputs)
    assert embens.metrics.ensemble_accuracy(outputs, target) > 0.8
    assert all(parameter.grad is None for parameter in ensemble.parameters())


def test_moments_are_those_of_the_whole_path():
    path = torch.randn(8, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moments = WeightMoments(path[0], rank=3)
    for weights in path[1:]:
        moments.update(weights)
    running_means = torch.stack([path[: i + 1].mean(0) for i in range(8)])

    torch.testing.assert_close(moments.mean, path.mean(0))
    torch.testing.assert_close(moments.variance, path.var(0, correction=0))
    torch.testing.assert_close(torch.stack(moments.deviations), (path - running_means)[-3:])


def test_draws_have_half_of_each_covariance():
    generator = torch.Generator().manual_seed(0)
    path = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    moments = WeightMoments(path[0], rank=3)
    for weights in path[1:]:
        moments.update(weights)
    draws = torch.stack([moments.sample(generator) for _ in range(4000)])
    columns = torch.stack(moments.deviations)
    covariance = (torch.diag(moments.variance) + columns.T @ columns / 2) / 2
    variances = covariance.diagonal()
    errors = ((variances[:, None] * variances + covariance.square()) / 4000).sqrt()

    assert ((draws.mean(0) - moments.mean).abs() < 4.5 * (variances / 4000).sqrt()).all()
    assert ((draws.T.cov() - covariance).abs() < 4.5 * errors).all()


def test_swag_collects_the_start_and_the_end_of_each_epoch():
    recipe = Recipe(epochs=4, batch_size=16, lr=0.05, seed=2)
    network = nn.Linear(4, 3)
    ensemble = swag(network, make_data(), 2, recipe, rank=3)
    ends_of_epochs = path_of(network, recipe, constant)[3::4]
    moments = WeightMoments(flat(network), rank=3)
    for weights in ends_of_epochs:
        moments.update(weights)
    generator = torch.Generator().manual_seed(2)

    for a in range(2):
        torch.testing.assert_close(flat(ensemble.member(a)), moments.sample(generator))


def test_drawn_members_have_norm_statistics_of_the_training_data():
    inputs, target = make_data()
    recipe = Recipe(epochs=3, batch_size=60, lr=0.05)
    ensemble = swag(make_network(), (inputs, target), 2, recipe)
    for member in ensemble.networks:
        hidden = member[0](inputs)
        torch.testing.assert_close(member[1].running_mean, hidden.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(member[1].running_var, hidden.var(0), rtol=1e-4, atol=1e-5)
        assert member[1].momentum == 0.1


def test_invalid_arguments_raise():
    with pytest.raises(ValueError, match="each of the 7 cycles needs at least two steps, got 5"):
        snapshot_ensemble(make_network(), make_data(), 7, Recipe(epochs=5, batch_size=60))
    with pytest.raises(ValueError, match="epochs must be at least 2"):
        swag(make_network(), make_data(), 2, Recipe(epochs=1))
    with pytest.raises(ValueError, match="rank must be at least 2, got 1"):
        swag(make_network(), make_data(), 2, Recipe(epochs=3), rank=1)
