"""The history of a run, the metrics of an epoch, and progress."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from training import problem

import embens
from embens import metrics
from embens.training import KeepLast, fit
from embens.training import history as histories
from embens.training.history import Tally


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


def outputs_and_target(rows: int = 50):
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(4, rows, 3, generator=generator)
    return outputs, torch.randint(3, (rows,), generator=generator)


@pytest.mark.parametrize("buffer", [1, 100, 2**20])
def test_a_tally_agrees_with_the_metrics(buffer, monkeypatch):
    monkeypatch.setattr(histories, "BUFFER_SIZE", buffer)
    outputs, target = outputs_and_target()
    tally = Tally(4)
    for rows in torch.arange(50).split(15):
        losses = torch.stack([F.cross_entropy(o[rows], target[rows]) for o in outputs])
        tally.add(losses, outputs[:, rows], target[rows], len(rows))
    summary = tally.summary()
    assert summary["member_loss"] == pytest.approx(metrics.member_nll(outputs, target).tolist())
    assert summary["loss"] == pytest.approx(metrics.member_nll(outputs, target).mean().item())
    accuracies = metrics.member_accuracy(outputs, target).tolist()
    assert summary["member_accuracy"] == pytest.approx(accuracies)
    expected = metrics.ensemble_accuracy(outputs, target).item()
    assert summary["ensemble_accuracy"] == pytest.approx(expected)
    expected = metrics.correctness_correlation(outputs, target).item()
    assert summary["correlation"] == pytest.approx(expected, abs=1e-6)


def test_members_that_are_always_right_leave_the_correlation():
    outputs, target = outputs_and_target()
    outputs[0] = 100 * F.one_hot(target, 3)
    tally = Tally(4)
    tally.add(torch.zeros(4), outputs, target, 50)
    expected = metrics.correctness_correlation(outputs[1:], target).item()
    assert tally.summary()["correlation"] == pytest.approx(expected, abs=1e-6)
    single = Tally(1)
    single.add(torch.zeros(1), outputs[1:2], target, 50)
    assert math.isnan(single.summary()["correlation"])


def test_ignored_labels_are_not_counted():
    outputs, target = outputs_and_target()
    ignored = target.clone()
    ignored[:20] = -100
    tally = Tally(4)
    tally.add(torch.zeros(4), outputs, ignored, 50)
    expected = metrics.member_accuracy(outputs[:, 20:], target[20:]).tolist()
    assert tally.summary()["member_accuracy"] == pytest.approx(expected)


def test_a_split_batch_is_counted_by_the_rows_of_each_member():
    outputs, target = outputs_and_target(10)
    tally = Tally(4, "split")
    mixed = torch.stack([outputs[i % 4, i] for i in range(10)])
    losses = [F.cross_entropy(mixed[a::4], target[a::4]) for a in range(4)]
    tally.add(torch.stack(losses), mixed, target, 10)
    tally.add(torch.stack(losses[:2]), mixed[:2], target[:2], 2)
    summary = tally.summary()
    assert tally.sums["rows"].tolist() == [4, 4, 2, 2]
    assert summary["member_loss"] == pytest.approx(torch.stack(losses).tolist())
    right = (mixed.argmax(-1) == target).double()
    again = torch.cat([right, right[:2]])
    expected = [torch.cat([right[a::4], again[10:][a : a + 1]]).mean().item() for a in range(4)]
    assert summary["member_accuracy"] == pytest.approx(expected)


def test_the_log_loss_is_that_of_the_mean_probability():
    outputs, target = outputs_and_target()
    target[:20] = -100
    tally = Tally(4)
    for rows in torch.arange(50).split(15):
        tally.add(torch.zeros(4), outputs[:, rows], target[rows], len(rows))
    expected = metrics.nll(outputs[:, 20:], target[20:]).item()
    assert tally.summary()["nll"] == pytest.approx(expected)


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


@pytest.mark.parametrize("ignored", [0, 7])
def test_losses_that_are_left_out_are_cross_entropies_of_the_outputs(ignored):
    generator = torch.Generator().manual_seed(0)
    complete, deferred = Tally(4), Tally(4)
    for rows in (20, 13):
        outputs = torch.randn(4, rows, 3, generator=generator)
        target = torch.randint(3, (rows,), generator=generator)
        target[:ignored] = -100
        losses = torch.stack([F.cross_entropy(output, target) for output in outputs])
        complete.add(losses, outputs, target, rows)
        deferred.add(None, outputs, target, rows)
    expected = complete.summary()
    for name, value in deferred.summary().items():
        assert value == pytest.approx(expected[name], rel=1e-6)


def test_sums_do_not_depend_on_when_they_are_counted():
    generator = torch.Generator().manual_seed(0)
    late, early = Tally(4), Tally(4)
    for ignored in (0, 3, 0):
        outputs = torch.randn(4, 20, 3, generator=generator)
        target = torch.randint(3, (20,), generator=generator)
        target[:ignored] = -100
        for tally in (late, early):
            tally.add(None, outputs, target, 20)
        early.flush()
    assert late.summary() == early.summary()


def test_batches_with_and_without_losses_can_be_mixed():
    outputs = torch.zeros(2, 3, 2)
    tally = Tally(2)
    tally.add(torch.tensor([1.0, 5.0]), outputs, torch.tensor([0, 1, 1]), 3)
    tally.add(None, outputs, torch.tensor([0, 1, 1]), 3)
    expected = [(1 + math.log(2)) / 2, (5 + math.log(2)) / 2]
    assert tally.summary()["member_loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("batch", ["same", "own"])
def test_the_first_of_several_largest_outputs_is_the_answer(batch):
    outputs = torch.tensor([[[1.0, 1.0, 0.0], [0.0, 2.0, 2.0], [3.0, 0.0, 0.0]]])
    target = torch.tensor([1, 1, 0])
    tally = Tally(1, batch)
    tally.add(torch.zeros(1), outputs, target if batch == "same" else target[None], 3)
    assert tally.summary()["member_accuracy"] == [pytest.approx(2 / 3)]


@pytest.mark.parametrize("batch", ["same", "own", "split"])
def test_answers_are_those_of_argmax(batch):
    generator = torch.Generator().manual_seed(0)
    shape = (30, 5) if batch == "split" else (3, 30, 5)
    # All outputs of the second case are tied.
    for values in (torch.randn(shape, generator=generator), torch.zeros(shape)):
        rows = shape[:-1] if batch != "same" else (30,)
        target = torch.randint(5, rows, generator=generator)
        tally = Tally(3, batch)
        tally.add(torch.zeros(3), values, target, 30)
        answers = values.argmax(-1) == target
        if batch == "split":
            expected = [answers[a::3].double().mean().item() for a in range(3)]
        else:
            expected = answers.double().mean(1).tolist()
        assert tally.summary()["member_accuracy"] == pytest.approx(expected)
