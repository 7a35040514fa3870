"""The history of a run, the metrics of an epoch, and progress."""

from __future__ import annotations

import math
import sys

import pytest
import torch
import torch.nn.functional as F
from training import problem

from embens import metrics
from embens.training import fit
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


def test_there_is_no_output_unless_it_is_requested(capsys):
    fit(problem.ensemble(), problem.data(), epochs=2)
    assert capsys.readouterr() == ("", "")
    fit(problem.ensemble(), problem.data(), problem.data(), epochs=2, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(":")[0] for line in err.splitlines()] == ["epoch 1/2", "epoch 2/2"]
    assert "validation accuracy" in err


def test_a_terminal_shows_progress_with_and_without_rich(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fit(problem.ensemble(), problem.data(), epochs=2)
    assert "epoch 2/2" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    fit(problem.ensemble(), problem.data(), epochs=2)
    assert "epoch 2/2" in capsys.readouterr().err
    fit(problem.ensemble(), problem.data(), epochs=2, progress=False)
    assert capsys.readouterr().err == ""
