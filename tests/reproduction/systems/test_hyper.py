"""Greedy selection by hand, and members trained with their hyperparameters alone."""

import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import embens
from embens import metrics
from reproduction.systems.hyper import (
    MemberSettings,
    hyper_batch_ensemble,
    hyper_deep_ensemble,
    random_recipes,
    select,
    squared_error,
)
from reproduction.systems.loop import Recipe, train_network


def make_outputs(seed=0, classes=3, members=6):
    generator = torch.Generator().manual_seed(seed)
    outputs = 3 * torch.randn(members, 40, classes, generator=generator)
    return outputs, torch.randint(classes, (40,), generator=generator)


def make_reference():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))


def make_data(rows=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 4, generator=generator)
    return inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()


@pytest.mark.parametrize("seed", range(4))
def test_classes_are_selected_by_the_log_loss_of_the_mean_probability(seed):
    outputs, target = make_outputs(seed)
    probabilities = outputs.double().softmax(-1)
    expected = []
    total = torch.zeros_like(probabilities[0])
    for count in range(1, 6):
        losses = [
            F.nll_loss(((total + candidate) / count).log(), target) for candidate in probabilities
        ]
        best = int(torch.stack(losses).argmin())
        expected.append(best)
        total = total + probabilities[best]
    chosen = select(outputs, target, size=5)

    assert chosen == expected
    assert metrics.nll(outputs[chosen], target) <= metrics.member_nll(outputs, target).min()


def test_selection_by_hand_for_squared_errors():
    # Means of the choices: 1.5 is closest to 0 alone; then (1.5 − 2) / 2, then (1.5 − 2 + 1.5) / 3
    # against (1.5 − 2 − 2) / 3 and (1.5 − 2 + 4) / 3.
    outputs = torch.tensor([[[4.0]], [[1.5]], [[-2.0]]])
    target = torch.tensor([0.0])
    assert select(outputs, target, size=3) == [1, 2, 1]
    assert select(outputs, target[:, None], size=3) == [1, 2, 1]
    torch.testing.assert_close(squared_error(outputs[[1, 2]], target), torch.tensor(0.0625))


def test_a_pair_is_at_best_the_best_of_all_pairs():
    outputs, target = make_outputs()
    chosen = metrics.nll(outputs[select(outputs, target, size=2)], target)
    pairs = itertools.combinations_with_replacement(range(6), 2)
    best = min(metrics.nll(outputs[list(pair)], target) for pair in pairs)
    assert chosen >= best - 1e-6


def test_of_equal_members_the_first_is_chosen():
    outputs, target = make_outputs(members=3)
    chosen = select(outputs, target, size=6)
    twins = outputs[[0, 0, 1, 1, 2, 2]]
    assert select(twins, target, size=6) == [2 * a for a in chosen]


def test_any_metric_may_be_minimised():
    outputs, target = make_outputs()

    def spread(outputs, target):
        return outputs.std(0, correction=0).sum()

    assert select(outputs, target, 3, spread) == [0, 0, 0]


def test_selection_rejects_invalid_arguments():
    outputs, target = make_outputs()
    with pytest.raises(ValueError, match="size must be a positive integer, got 0"):
        select(outputs, target, 0)
    with pytest.raises(ValueError, match="outputs must be finite"):
        select(outputs * math.nan, target, 2)
    with pytest.raises(ValueError, match="metric must return numbers, got NaN"):
        select(outputs, target, 2, lambda outputs, target: math.nan)


def test_random_recipes_stay_within_their_ranges():
    recipe = Recipe(epochs=3, lr=0.1, weight_decay=1e-3)
    recipes = random_recipes(recipe, 200, spread=4.0, generator=torch.Generator().manual_seed(0))
    for name, centre in (("lr", 0.1), ("weight_decay", 1e-3)):
        exponents = [math.log(getattr(varied, name) / centre, 4.0) for varied in recipes]
        assert -1 <= min(exponents) < -0.9
        assert 0.9 < max(exponents) <= 1
    smoothing = [varied.label_smoothing for varied in recipes]

    assert 0 <= min(smoothing) < 0.02
    assert 0.18 < max(smoothing) <= 0.2
    assert {varied.epochs for varied in recipes} == {3}


def test_a_hyper_deep_ensemble_drops_bad_hyperparameters():
    useful = Recipe(epochs=10, batch_size=20, lr=0.1)
    useless = replace(useful, lr=1e-6)
    validation = make_data(seed=1)
    ensemble = hyper_deep_ensemble(
        make_reference(),
        make_data(),
        validation,
        3,
        [useless, useful],
        generator=torch.Generator().manual_seed(0),
    )
    outputs = ensemble(validation[0])

    assert outputs.shape == (3, 60, 3)
    assert metrics.member_accuracy(outputs, validation[1]).min() > 0.7


def train_single_member(a, recipe, settings):
    """Train member a of separate networks alone, with its hyperparameters."""
    ensemble = embens.independent(make_reference(), 3, generator=torch.Generator().manual_seed(2))
    member = ensemble.member(a)
    single = replace(
        recipe,
        lr=recipe.lr * settings.rates[a],
        weight_decay=settings.weight_decay[a],
        label_smoothing=settings.label_smoothing[a],
    )
    train_network(member, make_data(), single)
    return member


def test_members_that_share_nothing_train_as_if_alone():
    recipe = Recipe(epochs=3, batch_size=20, lr=0.05, weight_decay=0.0)
    settings = MemberSettings((1.0, 0.3, 2.0), (0.0, 0.01, 0.1), (0.1, 0.0, 0.4))
    ensemble = embens.independent(make_reference(), 3, generator=torch.Generator().manual_seed(2))
    hyper_batch_ensemble(ensemble, make_data(), recipe, settings)
    inputs, _ = make_data()
    for a in range(3):
        expected = train_single_member(a, recipe, settings)
        torch.testing.assert_close(ensemble(inputs)[a], expected(inputs), rtol=1e-4, atol=1e-5)


def test_equal_settings_are_usual_training_of_a_batch_ensemble():
    inputs, target = make_data()
    ensemble = embens.batch_ensemble(
        make_reference(), 3, generator=torch.Generator().manual_seed(0)
    )
    expected = copy.deepcopy(ensemble)
    recipe = Recipe(epochs=1, batch_size=60, lr=0.05)
    settings = MemberSettings((1.0,) * 3, (0.0,) * 3, (0.0,) * 3)
    hyper_batch_ensemble(ensemble, (inputs, target), recipe, settings)

    optimizer = recipe.optimizer(expected.parameter_groups(lr=0.05))
    embens.objective(expected(inputs), target).backward()
    optimizer.step()
    torch.testing.assert_close(ensemble(inputs), expected(inputs))


def test_settings_need_one_value_per_member():
    ensemble = embens.batch_ensemble(make_reference(), 3)
    settings = MemberSettings((1.0,) * 2, (0.0,) * 3, (0.0,) * 3)
    with pytest.raises(ValueError, match=r"rates must have one value per member \(3\), got 2"):
        hyper_batch_ensemble(ensemble, make_data(), Recipe(epochs=1), settings)
