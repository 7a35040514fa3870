"""Forward and backward passes of one batch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from training import problem

import embens
from embens.training import Options
from embens.training.batches import Minibatch, batches_of
from embens.training.passes import Passes

x, y = problem.data(12)
BATCH = Minibatch((x,), y, 12, 12)


def gradients(ensemble):
    return [p.grad.clone() for p in ensemble.parameters()]


@pytest.mark.parametrize("chunk", [None, 1, 2, 3])
@pytest.mark.parametrize("criterion", [None, F.cross_entropy, lambda o, t: F.cross_entropy(o, t)])
@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_gradients_and_losses_are_those_of_the_objective(chunk, criterion, weight):
    ensemble = problem.ensemble()
    expected = embens.objective(ensemble(x), y, criterion)
    (weight * expected).backward()
    expected_gradients = gradients(ensemble)
    ensemble.zero_grad()
    passes = Passes(ensemble, Options(chunk=chunk), criterion)
    objective, result = passes.train(BATCH, weight, "batch", inspect=False)
    torch.testing.assert_close(objective, weight * expected.detach())
    torch.testing.assert_close(result.losses.sum(), expected.detach())
    torch.testing.assert_close(result.outputs, ensemble(x).detach())
    for gradient, expected_gradient in zip(gradients(ensemble), expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient)


def test_evaluation_covers_all_rows_in_order():
    ensemble = problem.ensemble().eval()
    passes = Passes(ensemble, Options(), None)
    results = list(passes.evaluate(batches_of((x, y), 5, seed=None), ensemble))
    assert [result.rows for result in results] == [5, 5, 2]
    outputs = torch.cat([result.outputs for result in results], 1)
    torch.testing.assert_close(outputs, ensemble(x))


def test_the_default_criterion_is_chosen_once_and_restored_by_name():
    passes = Passes(problem.ensemble(), Options(), None)
    assert passes.criterion_name() is None
    passes.train(BATCH, 1.0, "batch", inspect=False)
    assert passes.criterion_name() == "cross_entropy"
    other = Passes(problem.ensemble(), Options(), None)
    other.restore_criterion("cross_entropy")
    assert other.criterion is F.cross_entropy
