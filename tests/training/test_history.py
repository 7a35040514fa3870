"""The history of a run."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from training import problem

import embens
from embens.training import KeepLast, fit


def test_history_has_a_row_per_epoch_and_a_row_per_epoch_and_member():
    history = fit(problem.ensemble(members=3), problem.data(), problem.data(20, 5), epochs=4)

    assert [row["epoch"] for row in history.epochs] == [1, 2, 3, 4]
    first_rows = [(row["epoch"], row["member"]) for row in history.members[:4]]
    assert first_rows == [(1, 0), (1, 1), (1, 2), (2, 0)]
    columns = {"epoch", "member", "loss", "accuracy", "validation_loss", "validation_accuracy"}
    assert set(history.members[0]) == columns


def test_history_is_converted_to_two_frames():
    history = fit(problem.ensemble(members=3), problem.data(), problem.data(20, 5), epochs=4)

    epochs = history.to_pandas()
    members = history.to_pandas("members")

    assert len(epochs) == 4
    assert {"loss", "ensemble_accuracy", "correlation", "seconds", "lr"} <= set(epochs)
    assert (epochs["gradient_norm_shared"] > 0).all()
    assert (epochs["gradient_norm_individual"] > 0).all()
    assert members.shape == (12, 6)
    mean_losses = members.groupby("epoch")["loss"].mean()
    assert mean_losses.tolist() == pytest.approx(epochs["loss"].tolist())


def test_unknown_table_raises_value_error():
    history = fit(problem.ensemble(), problem.data(), epochs=1)
    with pytest.raises(ValueError, match="did you mean 'epochs'"):
        history.to_pandas("epoch")  # type: ignore[arg-type]


def norm_of_gradients(parameters):
    return torch.cat([parameter.grad.flatten() for parameter in parameters]).norm().item()


def test_gradient_norms_are_those_of_the_first_step():
    x, y = problem.data()
    ensemble = problem.ensemble()
    ensemble.objective(ensemble(x), y).backward()
    shared = norm_of_gradients(ensemble.shared_parameters())
    individual = norm_of_gradients(ensemble.individual_parameters())

    row = fit(ensemble, (x, y), epochs=1, batch_size=len(y)).epochs[0]

    assert row["gradient_norm_shared"] == pytest.approx(shared, rel=1e-5)
    assert row["gradient_norm_individual"] == pytest.approx(individual, rel=1e-5)


def test_history_of_a_classifier_is_plotted(tmp_path):
    history = fit(problem.ensemble(), problem.data(), problem.data(20, 5), epochs=3)

    figure = history.plot()

    loss, accuracy = figure.axes
    assert loss.get_ylabel() == "loss"
    assert accuracy.get_ylabel() == "accuracy"
    lines = [list(line.get_ydata()) for line in loss.lines]
    assert [row["loss"] for row in history.epochs] in lines
    assert [row["validation_loss"] for row in history.epochs] in lines
    assert [row["loss"] for row in history.members if row["member"] == 1] in lines
    figure.savefig(tmp_path / "history.png")


def test_plot_of_a_regression_has_no_accuracies():
    x, _ = problem.data()
    history = fit(problem.ensemble(outputs=1), (x, x.sum(1)), epochs=1)

    assert len(history.plot().axes) == 1


def test_regression_has_the_error_of_its_mean_and_no_accuracies():
    x, _ = problem.data()
    data = (x, x.sum(1))
    ensemble = problem.ensemble(outputs=1)

    history = fit(ensemble, data, data, epochs=2, callbacks=[KeepLast()])

    last = history.epochs[-1]
    assert last["validation_rmse"] == pytest.approx(embens.evaluate(ensemble, data)["rmse"])
    assert "rmse" in history.epochs[0]
    for column in {*history.epochs[0], *history.members[0]}:
        assert "accuracy" not in column
        assert "correlation" not in column
    assert not any(math.isnan(value) for value in last.values())


def test_predicted_variances_have_a_log_loss():
    x, _ = problem.data()
    data = (x, x.sum(1))
    ensemble = problem.ensemble(outputs=2)
    options = {"criterion": embens.gaussian_nll, "callbacks": [KeepLast()]}
    last = fit(ensemble, data, data, epochs=2, **options).epochs[-1]
    scores = embens.evaluate(ensemble, data, task="gaussian")

    assert last["validation_rmse"] == pytest.approx(scores["rmse"])
    assert last["validation_nll"] == pytest.approx(scores["nll"])


def test_targets_of_probabilities_have_a_loss_only():
    x, y = problem.data()
    row = fit(problem.ensemble(), (x, F.one_hot(y).float()), epochs=1).epochs[0]

    assert "loss" in row
    assert "rmse" not in row


def test_binary_targets_have_a_loss_only():
    x, y = problem.data()
    data = (x, (y > 0).float())
    criterion = torch.nn.BCEWithLogitsLoss()

    row = fit(problem.ensemble(outputs=1), data, epochs=1, criterion=criterion).epochs[0]

    assert "loss" in row
    assert not {"rmse", "nll", "ensemble_accuracy"} & set(row)


def test_validation_metrics_are_those_of_evaluate():
    ensemble = problem.ensemble()
    validation = problem.data(20, 5)

    history = fit(ensemble, problem.data(), validation, epochs=2, callbacks=[KeepLast()])

    last = history.epochs[-1]
    scores = embens.evaluate(ensemble, validation)
    assert last["validation_nll"] == pytest.approx(scores["nll"])
    assert last["validation_ensemble_accuracy"] == pytest.approx(scores["accuracy"])
