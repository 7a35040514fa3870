"""The training loop of the estimators: schedule, average, best epoch, divergence."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tabular.problems import classes_of, classifier, fitted, mixed_table, regressor
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import embens
from embens.tabular import descent
from embens.training import History


def test_the_rate_rises_in_the_first_epoch_and_falls_along_a_cosine():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = LambdaLR(optimizer, descent.cosine_schedule(5, 4, math.inf))
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    steps = np.arange(20)
    final = descent.FINAL_RATE
    cosine = final + (1 - final) * (1 + np.cos(np.pi * steps / 20)) / 2

    np.testing.assert_allclose(rates, np.minimum(1, (steps + 1) / 5) * cosine)


def test_the_rate_rises_in_a_tenth_of_the_time_if_there_is_none_for_an_epoch(monkeypatch):
    clock = iter([100.0, 100.0, 100.5, 101.0])
    monkeypatch.setattr(descent.time, "monotonic", lambda: next(clock))
    factor = descent.cosine_schedule(1000, 4, 10.0)

    assert factor(0) == pytest.approx(0.001)
    assert factor(1) == pytest.approx(0.5, rel=0.01)
    assert factor(1) == factor(1)  # the same for all groups of parameters
    assert factor(2) == pytest.approx(1.0, rel=0.03)


def test_the_running_average_is_that_of_torch(monkeypatch):
    steps = []

    class CheckedDescent(descent.Descent):
        def _update_average(self):
            if self.steps == 0:
                horizon = 2 * len(self.batches)

                def update(averages, parameters, count):
                    decay = 1 - 1 / min(horizon, 1 + int(count) / 9)
                    get_ema_multi_avg_fn(decay)(averages, parameters, count)

                self.expected = AveragedModel(self.ensemble, multi_avg_fn=update)
            super()._update_average()
            self.expected.update_parameters(self.ensemble)
            torch.testing.assert_close(
                list(self.average.parameters()), list(self.expected.module.parameters())
            )
            steps.append(self.steps)

    monkeypatch.setattr(descent, "Descent", CheckedDescent)
    X, target = mixed_table(200)
    regressor(max_epochs=10).fit(X, target)
    assert steps == list(range(1, 31))


def test_a_run_that_diverges_is_repeated_with_a_lower_rate(monkeypatch):
    rates, run_once = [], descent.run_once

    def diverges_twice(ensemble, prepared, sizes, *arguments):
        rates.append(sizes.lr)
        if len(rates) < 3:
            raise embens.Divergence("not finite.", History([], []))
        return run_once(ensemble, prepared, sizes, *arguments)

    monkeypatch.setattr(descent, "run_once", diverges_twice)
    x, target = mixed_table(200)
    y = classes_of(target)
    with pytest.warns(UserWarning, match="Trying again with lr="):
        model = classifier(lr=0.016, tune=False).fit(x, y)
    assert rates == [0.016, 0.004, 0.001]
    assert model.predict(x).shape == y.shape


def test_a_loss_that_is_not_finite_is_a_divergence(monkeypatch):
    monkeypatch.setattr(descent, "ATTEMPTS", 1)
    X, target = mixed_table(60)
    for epochs in (1, 5):
        with pytest.raises(embens.Divergence, match="diverged in epoch"):
            regressor(lr=1e38, loss="squared", max_epochs=epochs).fit(X, target)


def test_patience_ends_a_run_after_the_best_epoch():
    X, _ = mixed_table(200)
    noise = np.random.default_rng(0).normal(size=200)
    model = regressor(patience=2, max_epochs=1000, lr=0.05)
    model.fit(X, noise)

    assert model.run_.stopped == "patience"
    assert len(model.run_.epochs) == model.run_.best_epoch + 2


def test_short_epochs_are_validated_together(monkeypatch):
    monkeypatch.setattr(descent, "VALIDATED_STEPS", 8)
    X, target = mixed_table(200)  # 160 training rows: three steps of an epoch
    history = regressor(max_epochs=10, patience=100).fit(X, target).run_

    assert [row["epoch"] for row in history.epochs if "metric" in row] == [3, 6, 9, 10]
    metrics = {row["epoch"]: row["metric"] for row in history.epochs if "metric" in row}
    assert history.best_epoch == min(metrics, key=metrics.get)


def test_patience_limits_the_epochs_between_validations(monkeypatch):
    monkeypatch.setattr(descent, "VALIDATED_STEPS", 1000)
    X, target = mixed_table(200)
    history = regressor(max_epochs=10, patience=8).fit(X, target).run_

    assert [row["epoch"] for row in history.epochs if "metric" in row] == [2, 4, 6, 8, 10]


def test_a_history_has_a_row_for_each_epoch_and_member():
    history = fitted()[0].run_
    assert [row["epoch"] for row in history.epochs] == list(range(1, len(history.epochs) + 1))
    assert len(history.members) == 4 * len(history.epochs)
    first = [row["loss"] for row in history.members if row["epoch"] == 1]
    assert np.mean(first) == pytest.approx(history.epochs[0]["loss"], rel=1e-6)
    assert history.epochs[-1]["loss"] < history.epochs[0]["loss"]


def test_verbose_prints_a_line_for_each_epoch(capsys):
    X, target = mixed_table(60)
    regressor(max_epochs=3, verbose=1).fit(X, target)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
