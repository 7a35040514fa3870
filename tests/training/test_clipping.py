"""Clipping: the norm of a member's view, whatever the number of members."""

from __future__ import annotations

import math

import pytest
import torch
from training import problem

import embens
from embens import laws
from embens.training import clip_gradients_, fit


def gradients(ensemble, x, y):
    ensemble.zero_grad()
    embens.objective(ensemble(x), y).backward()
    return {name: p.grad.clone() for name, p in ensemble.named_parameters()}


@pytest.mark.parametrize("gamma", [None, 2.0, 0.0])
def test_no_members_norm_exceeds_the_bound_and_factors_are_those_of_the_formula(gamma):
    x, y = problem.data()
    ensemble = problem.ensemble(members=4)
    before = gradients(ensemble, x, y)
    factor = {None: 1.0, 2.0: 0.5, 0.0: 0.0}[gamma]
    shared = {id(p) for p in ensemble.shared_parameters()}
    norms = []
    for a in range(4):
        total = 0.0
        for name, p in ensemble.named_parameters():
            mine = factor * before[name] if id(p) in shared else before[name][a]
            total += float(mine.square().sum())
        norms.append(math.sqrt(total))
    bound = sorted(norms)[1]
    found = clip_gradients_(ensemble, bound, gamma=gamma)
    torch.testing.assert_close(found, torch.tensor(norms))
    scales = [min(1.0, bound / norm) for norm in norms]
    for name, p in ensemble.named_parameters():
        if id(p) in shared:
            expected = min(scales) * before[name]
        else:
            expected = torch.stack([c * g for c, g in zip(scales, before[name], strict=True)])
        torch.testing.assert_close(p.grad, expected)


def steps(members, trainable=True, **options):
    """Train equal members, and return the first one's numbers."""
    options = {"lr": 0.5, "weight_decay": 0.0, "epochs": 2, "batch_size": 16} | options
    net = problem.reference().double()
    ensemble = embens.embed(
        net, members, pre=laws.Constant(), post=laws.Constant(), trainable=trainable
    )
    x, y = problem.data()
    fit(ensemble, (x.double(), y), **options)
    return problem.weights(ensemble.member(0))


@pytest.mark.parametrize("trainable", [True, False])
def test_equal_members_are_clipped_as_one_alone(trainable):
    one, eight = steps(1, trainable, clip=0.1), steps(8, trainable, clip=0.1)
    free = steps(1, trainable)
    for name in one:
        torch.testing.assert_close(one[name], eight[name])
    assert any((one[name] - free[name]).abs().max() > 0.01 for name in one)


def test_a_loose_bound_changes_nothing_and_a_wrong_one_is_refused():
    first, second = steps(3), steps(3, clip=1e6)
    problem.assert_equal(first, second)
    for bound in (0, -1.0, math.nan):
        with pytest.raises(ValueError, match="clip must be a number above 0"):
            steps(2, clip=bound)
