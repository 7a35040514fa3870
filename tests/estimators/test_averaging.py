"""The course of training: what is averaged, how the rate falls, and when a run ends."""

from __future__ import annotations

import time
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from estimators.problems import classes_of, classifier, mixed_table
from torch import nn

import embens
from embens.estimators import averaging
from embens.estimators.averaging import Averaging, Enough


def make(losses=None, **changes):
    ensemble = embens.batch_ensemble(nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)), 2)
    judge = None if losses is None else lambda _: (next(losses), [1.0, 3.0])
    given = {"steps": 5, "epochs": 4, "patience": 2} | changes
    return ensemble, Averaging(ensemble, judge, **given)


def test_the_average_is_the_recursion_written_by_hand():
    ensemble, course = make()
    weight = course.weights[0]
    by_hand = weight.detach().clone()
    for step in range(1, 31):
        with torch.no_grad():
            weight.add_(1.0)
        course.on_step(ensemble, {})
        by_hand += (weight.detach() - by_hand) / min(2 * 5, 1 + step / 9)
        torch.testing.assert_close(course.average[0], by_hand)


def test_the_rate_rises_in_the_first_epoch_and_falls_along_a_cosine():
    ensemble, course = make()
    optimizer = torch.optim.SGD(ensemble.parameters(), lr=1.0)
    scheduler = course.scheduler(optimizer)
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        course.on_step(ensemble, {})
        scheduler.step()
    done = np.arange(20) / 20
    fall = averaging.FLOOR + (1 - averaging.FLOOR) * (1 + np.cos(np.pi * done)) / 2
    np.testing.assert_allclose(rates, np.minimum(1, (np.arange(20) + 1) / 5) * fall)


def test_the_best_average_is_kept_and_patience_ends_the_run():
    ensemble, course = make(iter([3.0, 2.0, 2.5, 2.6]))
    averages = []
    for epoch in range(1, 5):
        with torch.no_grad():
            course.weights[0].add_(1.0)
        course.on_step(ensemble, {})
        before = course.weights[0].detach().clone()
        averages.append(course.average[0].clone())
        enough = pytest.raises(Enough, match="patience") if epoch == 4 else nullcontext()
        with enough:
            course.on_epoch(ensemble, {"epoch": epoch})
        torch.testing.assert_close(course.weights[0], before)
    assert (course.history.best_epoch, course.history.stopped) == (2, "patience")
    torch.testing.assert_close(course.best[0], averages[1])
    assert [row["metric"] for row in course.history.epochs] == [3.0, 2.0, 2.5, 2.6]
    assert course.history.epochs[0]["validation_loss"] == 2.0


def test_time_ends_a_run_also_within_its_first_epoch():
    ensemble, course = make(iter([3.0]), seconds=1e-9)
    with pytest.raises(Enough, match="time"):
        course.on_step(ensemble, {"epoch": 1})
    assert course.history.stopped == "time"
    assert course.history.best_epoch == 1


def test_a_fit_keeps_its_time_limit():
    X, target = mixed_table(3000)
    began = time.monotonic()
    model = classifier(time_limit=4.0, max_epochs=100_000, patience=100_000, tune=True)
    model.fit(X, classes_of(target))
    assert model.run_.stopped == "time"
    assert 2.0 < time.monotonic() - began < 30  # a guard, also on a busy machine
