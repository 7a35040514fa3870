"""The two tables of a run."""

from __future__ import annotations

import pytest
import torch
from training import problem

from embens.training import fit


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
