"""Runs that end early, by patience or by time."""

from __future__ import annotations

import pytest
import torch
from training import problem

from embens.training import Checkpoint, EarlyStopping, KeepBest, KeepLast, TimeLimit, fit


def metric_of(values, seen):
    def metric(outputs, target):
        seen.append(outputs.clone())
        return values[len(seen) - 1]

    return metric


def test_patience_stops_and_the_best_weights_are_kept():
    train, validation, seen = problem.data(), problem.data(40, 9), []
    metric = metric_of([0.3, 0.7, 0.7, 0.1, 0.9, 0.2], seen)
    ensemble = problem.ensemble()
    callbacks = [EarlyStopping(2, metric, maximise=True)]
    history = fit(ensemble, train, validation, epochs=6, lr=0.05, callbacks=callbacks)
    assert history.stopped == "patience"
    assert history.best_epoch == 2
    assert [row["metric"] for row in history.epochs] == [0.3, 0.7, 0.7, 0.1]
    torch.testing.assert_close(ensemble(validation[0]), seen[1])


def test_the_last_weights_can_be_kept():
    train, validation, seen = problem.data(), problem.data(40, 9), []
    metric = metric_of([0.3, 0.7, 0.7, 0.1, 0.9, 0.2], seen)
    ensemble = problem.ensemble()
    callbacks = [KeepBest(metric, maximise=False), KeepLast()]
    history = fit(ensemble, train, validation, epochs=6, callbacks=callbacks)
    assert (history.stopped, history.best_epoch) == ("epochs", 4)
    torch.testing.assert_close(ensemble(validation[0]), seen[5])


def test_early_stopping_needs_validation_data():
    with pytest.raises(ValueError, match="EarlyStopping needs validation data"):
        fit(problem.ensemble(), problem.data(), epochs=1, callbacks=[EarlyStopping(3)])


@pytest.mark.parametrize("patience", [0, -1])
def test_a_patience_below_one_raises(patience):
    with pytest.raises(ValueError, match="patience must be"):
        EarlyStopping(patience)


def test_a_time_limit_ends_the_first_epoch_and_the_run_can_continue(tmp_path):
    train, validation = problem.data(), problem.data(40, 9)
    ensemble, settings = problem.ensemble(), {"epochs": 3, "batch_size": 16}
    callbacks = [TimeLimit(1e-9), Checkpoint(tmp_path)]
    history = fit(ensemble, train, validation, **settings, callbacks=callbacks)
    assert (history.stopped, history.best_epoch, len(history.epochs)) == ("time", 1, 1)
    continued = fit(ensemble, train, validation, **settings, callbacks=[Checkpoint(tmp_path)])
    assert len(continued.epochs) == 3
    last = fit(ensemble, train, epochs=1, batch_size=16, callbacks=[TimeLimit(1e-9)])
    assert last.stopped == "time"


def test_a_run_of_many_time_limits_equals_an_uninterrupted_one(tmp_path):
    settings = {"epochs": 3, "batch_size": 16, "seed": 1}
    whole = problem.ensemble()
    expected = fit(whole, problem.data(), **settings)
    for _ in range(50):
        again = problem.ensemble()
        callbacks = [Checkpoint(tmp_path), TimeLimit(1e-9)]
        history = fit(again, problem.data(), **settings, callbacks=callbacks)
        if history.stopped == "epochs":
            break
    assert (history.stopped, len(history.epochs)) == ("epochs", len(expected.epochs))
    problem.assert_equal(problem.weights(again), problem.weights(whole))


def test_a_limit_that_is_not_positive_raises():
    with pytest.raises(ValueError, match="seconds must be a number above 0"):
        TimeLimit(0)
