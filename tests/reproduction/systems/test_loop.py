"""The training loop against steps written by hand."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from reproduction.systems.loop import Recipe, constant, linear_decay, shuffle, train, train_network


def make_data(rows=10):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(rows, 3, generator=generator)
    return inputs, torch.arange(rows) % 2


def test_a_run_is_sgd_on_shuffled_batches_with_the_scheduled_rate():
    torch.manual_seed(0)
    network = nn.Linear(3, 2)
    expected = copy.deepcopy(network)
    inputs, target = make_data()
    recipe = Recipe(epochs=2, lr=0.1, batch_size=4, weight_decay=0.01, momentum=0.9, seed=5)
    train_network(network, (inputs, target), recipe)

    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    generator = torch.Generator().manual_seed(5)
    step = 0
    for _ in range(2):
        order = torch.randperm(10, generator=generator)
        for rows in (order[:4], order[4:8], order[8:]):
            optimizer.param_groups[0]["lr"] = 0.1 * linear_decay(step, 6)
            optimizer.zero_grad()
            F.cross_entropy(expected(inputs[rows]), target[rows]).backward()
            optimizer.step()
            step += 1
    torch.testing.assert_close(network.state_dict(), expected.state_dict())


def test_parameter_groups_keep_the_ratio_of_their_rates():
    weights = [torch.zeros((), requires_grad=True) for _ in range(2)]
    recipe = Recipe(epochs=1, lr=1.0, batch_size=10, momentum=0.0, weight_decay=0.0)
    groups = [{"params": weights[:1], "lr": 0.5}, {"params": weights[1:], "lr": 0.25}]
    data = make_data()
    train(lambda x, y: sum(weights), recipe.optimizer(groups), data, recipe, rate=constant)

    assert [weight.item() for weight in weights] == [-0.5, -0.25]


def test_the_callback_counts_finished_steps():
    finished = []
    recipe = Recipe(epochs=3, batch_size=4)
    train_network(nn.Linear(3, 2), make_data(), recipe, after_step=finished.append)
    assert finished == list(range(1, 10))
    assert recipe.steps(10) == 9


def test_label_smoothing_is_that_of_torch():
    outputs = torch.randn(6, 3)
    target = torch.arange(6) % 3
    loss = Recipe(epochs=1, label_smoothing=0.2).loss(outputs, target)

    torch.testing.assert_close(loss, F.cross_entropy(outputs, target, label_smoothing=0.2))
    with pytest.raises(ValueError, match="needs criterion=None"):
        Recipe(epochs=1, label_smoothing=0.2, criterion=F.mse_loss).loss(outputs, target)


def test_floating_targets_select_the_squared_error():
    outputs = torch.randn(6, 1)
    target = torch.randn(6)
    loss = Recipe(epochs=1).loss(outputs, target)
    torch.testing.assert_close(loss, (outputs[:, 0] - target).square().mean())


def test_an_infinite_loss_stops_the_run():
    network = nn.Linear(3, 1)
    inputs, _ = make_data()
    recipe = Recipe(epochs=50, lr=1e6)
    with pytest.raises(ArithmeticError, match="smaller learning rate"):
        train_network(network, (inputs, inputs[:, 0]), recipe)


def test_shuffle_is_a_permutation():
    order = shuffle(20, torch.Generator().manual_seed(0))
    assert sorted(order.tolist()) == list(range(20))
