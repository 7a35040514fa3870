"""One step of a run: gradients, weights, and the check of losses."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training import problem

import embens
from embens.training import Accumulate, Autocast, Divergence, KeepLast, fit, step


def test_losses_are_checked_every_few_steps_and_the_first_bad_step_is_named(monkeypatch):
    monkeypatch.setattr(step, "CHECK_INTERVAL", 3)
    calls = []

    def exploding(outputs, target):
        calls.append(1)
        return F.cross_entropy(outputs, target) * (math.nan if len(calls) == 2 * 3 + 1 else 1)

    with pytest.raises(Divergence, match="epoch 1 at step 3: the loss is nan"):
        fit(problem.ensemble(), problem.data(), epochs=5, batch_size=4, criterion=exploding)
    assert len(calls) == 3 * 3  # three members, three steps


def test_a_step_is_that_of_a_loop_written_by_hand():
    x, y = problem.data()
    trained, expected = problem.ensemble(), problem.ensemble()
    fit(trained, (x, y), epochs=1, batch_size=len(x), lr=0.1)
    optimizer = torch.optim.SGD(expected.parameter_groups(lr=0.1), momentum=0.9)
    order = torch.arange(len(x))
    embens.objective(expected(x[order]), y[order]).backward()
    optimizer.step()

    for actual, weight in zip(trained.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(actual, weight)


def test_accumulated_batches_make_the_step_of_one_large_batch():
    whole, parts = problem.ensemble(), problem.ensemble()
    options = {"epochs": 2, "lr": 0.1}
    fit(whole, problem.data(), batch_size=60, callbacks=[KeepLast()], **options)
    fit(parts, problem.data(), batch_size=20, callbacks=[Accumulate(3), KeepLast()], **options)

    # Sample orders differ, but each step sees all rows.
    for actual, weight in zip(parts.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(actual, weight)


def test_a_batch_without_labels_changes_no_weight():
    x, y = problem.data()
    ensemble = problem.ensemble()
    before = problem.weights(ensemble)
    optimizer = torch.optim.SGD(ensemble.parameter_groups(weight_decay=0.0))
    history = fit(ensemble, (x, torch.full_like(y, -100)), epochs=1, optimizer=optimizer)

    problem.assert_equal(problem.weights(ensemble), before)
    assert history.epochs[-1]["loss"] == 0


def test_skipped_first_step_leaves_weights_and_no_momentum():
    """The fused SGD of torch creates momentum buffers and fills them in steps only."""

    def overflowing(outputs, target):
        return 1e4 * F.cross_entropy(outputs, target)  # too large for half precision

    ensemble = problem.ensemble()
    before = problem.weights(ensemble)
    optimizer = torch.optim.SGD(ensemble.parameter_groups(), momentum=0.9, fused=True)
    options = {"optimizer": optimizer, "criterion": overflowing}
    callbacks = [Autocast(torch.float16), KeepLast()]
    fit(ensemble, problem.data(), epochs=1, batch_size=60, callbacks=callbacks, **options)

    problem.assert_equal(problem.weights(ensemble), before)
    assert not any(optimizer.state.values())


def test_the_norm_of_all_gradients_is_nan_without_gradients():
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
    assert math.isnan(step.gradient_norm(parameters))
    parameters[0].grad = torch.tensor([3.0, 0.0])
    parameters[1].grad = torch.tensor([4.0])
    assert step.gradient_norm(parameters) == pytest.approx(5.0)
