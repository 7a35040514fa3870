"""Gradients that are clipped member by member."""

from __future__ import annotations

import math

import pytest
import torch
from training import problem

import embens
from embens import laws
from embens.training import ClipGradients, clip_gradients_, fit


def gradients(ensemble, x, y):
    ensemble.zero_grad()
    embens.objective(ensemble(x), y).backward()
    return {name: p.grad.clone() for name, p in ensemble.named_parameters()}


@pytest.mark.parametrize("gamma", [None, 2.0, 0.0])
def test_clipped_gradients_follow_the_formula(gamma):
    x, y = problem.data()
    ensemble = problem.ensemble(members=4)
    before = gradients(ensemble, x, y)
    factor = {None: 1.0, 2.0: 0.5, 0.0: 0.0}[gamma]
    shared = {id(p) for p in ensemble.shared_parameters()}
    expected_norms = []
    for a in range(4):
        total = 0.0
        for name, p in ensemble.named_parameters():
            gradient = factor * before[name] if id(p) in shared else before[name][a]
            total += float(gradient.square().sum())
        expected_norms.append(math.sqrt(total))
    bound = sorted(expected_norms)[1]
    norms = clip_gradients_(ensemble, bound, gamma=gamma)
    torch.testing.assert_close(norms, torch.tensor(expected_norms))
    scales = [min(1.0, bound / norm) for norm in expected_norms]
    for name, p in ensemble.named_parameters():
        if id(p) in shared:
            expected = min(scales) * before[name]
        else:
            expected = torch.stack([c * g for c, g in zip(scales, before[name], strict=True)])
        torch.testing.assert_close(p.grad, expected)


def train(members, trainable=True, callbacks=()):
    """Train equal members and return the weights of the first one."""
    ensemble = embens.embed(
        problem.reference().double(),
        members,
        pre=laws.Constant(),
        post=laws.Constant(),
        trainable=trainable,
    )
    groups = ensemble.parameter_groups(lr=0.5, weight_decay=0.0)
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    x, y = problem.data()
    fit(
        ensemble, (x.double(), y), epochs=2, batch_size=16, optimizer=optimizer, callbacks=callbacks
    )
    return problem.weights(ensemble.member(0))


@pytest.mark.parametrize("trainable", [True, False])
def test_equal_members_are_clipped_like_a_single_one(trainable):
    one = train(1, trainable, [ClipGradients(0.1)])
    eight = train(8, trainable, [ClipGradients(0.1)])
    free = train(1, trainable)

    for name in one:
        torch.testing.assert_close(one[name], eight[name])
    assert any((one[name] - free[name]).abs().max() > 0.01 for name in one)


def test_a_loose_bound_changes_nothing():
    problem.assert_equal(train(3), train(3, callbacks=[ClipGradients(1e6)]))


@pytest.mark.parametrize("norm", [0, -1.0, math.nan])
def test_a_bound_that_is_not_positive_raises(norm):
    with pytest.raises(ValueError, match="norm must be a number above 0"):
        ClipGradients(norm)


def test_the_gamma_of_fit_is_used_unless_the_callback_has_one():
    runs = [
        {"gamma": 2.0, "callbacks": [ClipGradients(0.1)]},
        {"gamma": 2.0, "callbacks": [ClipGradients(0.1, gamma=2.0)]},
        {"gamma": 2.0, "callbacks": [ClipGradients(0.1, gamma=0.0)]},
    ]
    weights = []
    for options in runs:
        ensemble = problem.ensemble()
        fit(ensemble, problem.data(), epochs=1, batch_size=16, **options)
        weights.append(problem.weights(ensemble))

    problem.assert_equal(weights[0], weights[1])
    with pytest.raises(AssertionError):
        problem.assert_equal(weights[0], weights[2])
