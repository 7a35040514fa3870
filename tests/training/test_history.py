"""The history of a run."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from training import problem

import embens
from embens.training import KeepLast, fit


def test_a_history_is_two_tables():
    run = fit(problem.ensemble(members=3), problem.data(), problem.data(20, 5), epochs=4)
    assert [row["epoch"] for row in run.epochs] == [1, 2, 3, 4]
    assert [(row["epoch"], row["member"]) for row in run.members[:4]] == [
        *((1, 0), (1, 1), (1, 2)),
        (2, 0),
    ]
    columns = {"epoch", "member", "loss", "accuracy", "validation_loss", "validation_accuracy"}
    assert set(run.members[0]) == columns
    frame = run.to_pandas()
    assert len(frame) == 4
    assert {"loss", "ensemble_accuracy", "correlation", "seconds", "lr"} <= set(frame)
    assert (frame[["gradient_norm_shared", "gradient_norm_individual"]] > 0).all(axis=None)
    members = run.to_pandas("members")
    assert members.shape == (12, 6)
    assert members.groupby("epoch")["loss"].mean().tolist() == pytest.approx(frame["loss"].tolist())
    with pytest.raises(ValueError, match="did you mean 'epochs'"):
        run.to_pandas("epoch")  # type: ignore[arg-type]


def test_gradient_norms_are_those_of_the_first_step():
    x, y = problem.data()
    ensemble = problem.ensemble()
    ensemble.objective(ensemble(x), y).backward()
    shared = torch.cat([p.grad.flatten() for p in ensemble.shared_parameters()]).norm()
    individual = torch.cat([p.grad.flatten() for p in ensemble.individual_parameters()]).norm()
    row = fit(ensemble, (x, y), epochs=1, batch_size=len(y)).epochs[0]
    assert row["gradient_norm_shared"] == pytest.approx(shared.item(), rel=1e-5)
    assert row["gradient_norm_individual"] == pytest.approx(individual.item(), rel=1e-5)


def test_a_history_is_drawn_with_what_it_has(tmp_path):
    history = fit(problem.ensemble(), problem.data(), problem.data(20, 5), epochs=3)
    figure = history.plot()
    loss, accuracy = figure.axes
    assert (loss.get_ylabel(), accuracy.get_ylabel()) == ("loss", "accuracy")
    drawn = [list(line.get_ydata()) for line in loss.lines]
    assert [row["loss"] for row in history.epochs] in drawn
    assert [row["validation_loss"] for row in history.epochs] in drawn
    assert [row["loss"] for row in history.members if row["member"] == 1] in drawn
    figure.savefig(tmp_path / "history.png")
    x, _ = problem.data()
    assert len(fit(problem.ensemble(outputs=1), (x, x.sum(1)), epochs=1).plot().axes) == 1


def test_a_regression_has_the_error_of_its_mean_and_no_accuracies():
    x, _ = problem.data()
    ensemble = problem.ensemble(outputs=1)
    history = fit(ensemble, (x, x.sum(1)), (x, x.sum(1)), epochs=2, callbacks=[KeepLast()])
    scores = embens.evaluate(ensemble, (x, x.sum(1)))
    assert history.epochs[-1]["validation_rmse"] == pytest.approx(scores["rmse"])
    assert "rmse" in history.epochs[0]
    columns = {*history.epochs[0], *history.members[0]}
    assert not [name for name in columns if "accuracy" in name or "correlation" in name]
    assert not any(math.isnan(value) for value in history.epochs[-1].values())


def test_predicted_variances_have_a_log_loss():
    x, _ = problem.data()
    data = (x, x.sum(1))
    ensemble = problem.ensemble(outputs=2)
    options = {"criterion": embens.gaussian_nll, "callbacks": [KeepLast()]}
    last = fit(ensemble, data, data, epochs=2, **options).epochs[-1]
    scores = embens.evaluate(ensemble, data, task="gaussian")
    assert last["validation_rmse"] == pytest.approx(scores["rmse"])
    assert last["validation_nll"] == pytest.approx(scores["nll"])


def test_other_targets_have_a_loss_alone():
    x, y = problem.data()
    probabilities = F.one_hot(y).float()
    row = fit(problem.ensemble(), (x, probabilities), epochs=1).epochs[0]
    assert "rmse" not in row
    criterion = torch.nn.BCEWithLogitsLoss()
    row = fit(problem.ensemble(outputs=1), (x, (y > 0).float()), epochs=1, criterion=criterion)
    row = row.epochs[0]
    assert not {"rmse", "nll", "ensemble_accuracy"} & set(row)


def test_the_metrics_of_a_validation_are_those_of_evaluate():
    ensemble = problem.ensemble()
    callbacks = [KeepLast()]
    last = fit(ensemble, problem.data(), problem.data(20, 5), epochs=2, callbacks=callbacks)
    scores = embens.evaluate(ensemble, problem.data(20, 5))
    assert last.epochs[-1]["validation_nll"] == pytest.approx(scores["nll"])
    assert last.epochs[-1]["validation_ensemble_accuracy"] == pytest.approx(scores["accuracy"])
