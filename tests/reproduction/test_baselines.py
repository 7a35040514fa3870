"""Baselines: separate networks at their best rate, measured once for all experiments."""

from __future__ import annotations

import math
from dataclasses import replace

import pandas
import pytest

from reproduction import baselines
from reproduction.claims import HOLDS, judge
from reproduction.figures import ablation
from reproduction.grid import runs
from reproduction.grid.cells import Cell, cells_of
from reproduction.grid.engines import inline
from reproduction.grid.results import Results, count_outdated, make_table
from reproduction.rows import Rows
from tests.reproduction import problem
from tests.reproduction.battery import check_measurement

SMALL = Cell(problem.SETTING, {"width": 0.5, "networks": 8, "seed": 0}, "baselines")


def test_a_cell_has_a_row_for_each_number_of_networks():
    check_measurement(SMALL)
    rows = baselines.measure(SMALL)
    assert [row["members"] for row in rows] == [1, 2, 4, 8]
    assert math.isnan(rows[0]["correlation"])
    assert rows[3]["parameters"] == 8 * rows[0]["parameters"]
    assert len({row["rate"] for row in rows}) == 1


def test_without_a_recorded_rate_the_best_on_held_out_samples_is_used(monkeypatch):
    cell = replace(SMALL, setting=replace(problem.SETTING, epochs=3))
    trainings = []

    def train(cell, networks, rate, data):
        trained = original(cell, networks, rate, data)
        trainings.append((networks, rate, data, trained))
        return trained

    original = baselines.train_separate
    monkeypatch.setattr(baselines, "train_separate", train)
    (chosen,) = {row["rate"] for row in baselines.measure(cell)}
    *trials, (networks, rate, data, _) = trainings
    assert (networks, rate, len(data.train.targets)) == (8, chosen, 64)
    losses = {}
    for networks, rate, held_out, trained in trials:
        part = held_out.validation
        assert (networks, len(held_out.train.targets), len(part.targets)) == (2, 52, 12)
        outputs = trained.ensemble(part.inputs).detach()
        losses[rate] = float(-outputs.log_softmax(-1)[:, range(12), part.targets].mean())
    assert list(losses) == [factor * cell.setting.lr for factor in baselines.FACTORS]
    assert chosen == min(losses, key=losses.get)


def test_a_rate_at_which_networks_diverge_is_not_chosen(monkeypatch):
    second = 4 * SMALL.setting.lr

    def train(cell, networks, rate, data):
        return replace(original(cell, networks, second, data), diverged=rate != second)

    original = baselines.train_separate
    monkeypatch.setattr(baselines, "train_separate", train)
    assert baselines.measure(SMALL)[0]["rate"] == second


def test_a_recorded_rate_is_used_as_it_is():
    setting = replace(problem.SETTING, rates=(("networks", 0.007), ("signs", 0.2)))
    tuned = replace(SMALL, setting=setting)
    assert {row["rate"] for row in baselines.measure(tuned)} == {0.007}
    assert baselines.estimate_cost(tuned) < baselines.estimate_cost(SMALL)


def test_experiments_share_baselines(tmp_path, monkeypatch):
    folders = {name: tmp_path / name / "quick" for name in ("transition", "ablation")}
    assert runs.run("transition", [SMALL], Results(folders["transition"]), inline) == (1, [])
    results = Results(folders["ablation"])
    assert runs.run("ablation", [SMALL], results, inline) == (0, [])
    monkeypatch.setattr(ablation, "SWEEP", [lambda setting: [SMALL]])
    assert len(make_table(results, "ablation", problem.SETTING)) == 4
    assert count_outdated(results, "ablation") == 0


def test_the_columns_of_an_experiment_come_before_those_of_baselines(tmp_path):
    results = Results(tmp_path / "transition" / "quick")
    cells = [SMALL.with_values(width=1.0), *problem.cells(1)]
    runs.run("transition", cells, results, inline)
    table = make_table(results, "transition", problem.SETTING)

    assert list(table)[:5] == ["law", "p", "members", "gamma", "seed"]
    assert len(table) == 5


def test_narrowing_a_sweep_keeps_its_baselines():
    cells = cells_of("transition", problem.SETTING, [0])
    selected = runs.select(cells, p=[0.9], members=[2])
    assert [cell.experiment for cell in selected] == [*["transition"] * 3, "baselines"]


def made_up():
    rows = [
        {"seed": s, "p": p, "members": m, "accuracy": 0.9 + 0.01 * (p == 0.0), "width": math.nan}
        for s in range(4)
        for p in (0.0, 1.0)
        for m in (1, 8)
    ]
    rows += [
        {"seed": s, "members": m, "networks": 8, "width": w, "accuracy": 0.8 + 0.01 * m * w}
        for s in range(4)
        for m in (1, 2, 8)
        for w in (1.0, 2.0)
    ]
    return pandas.DataFrame(rows)


def test_lines_are_one_network_for_all_m_and_separate_ones():
    one, separate = baselines.lines(made_up(), "accuracy")
    assert (one.label, one.x) == ("one network", [1.0, 8.0])
    assert one.y == pytest.approx([0.81, 0.81])
    assert (separate.x, separate.y) == ([2.0, 8.0], pytest.approx([0.82, 0.88]))
    assert baselines.lines(made_up(), "accuracy", width=2.0)[0].y == pytest.approx([0.82, 0.82])
    assert baselines.lines(made_up().drop(columns="networks"), "accuracy") == []


def test_eight_members_are_compared_with_networks_of_their_width():
    better, as_good = judge(
        baselines.claims(lambda rows: baselines.ensemble_rows(rows).where(p=0.0)), made_up()
    )
    assert (better.value, better.verdict) == (pytest.approx(0.10), HOLDS)
    assert as_good.value == pytest.approx(0.03)
    assert (
        len(baselines.ensemble_rows(Rows(made_up())).frame)
        + len(baselines.baseline_rows(Rows(made_up())).frame)
        == 40
    )


def test_members_are_as_many_as_there_are_up_to_eight():
    table = made_up()
    table["members"] = table["members"].where(table["p"].isna() | (table["members"] < 8), 2)
    more = table[(table["p"] == 0.0) & (table["members"] == 2)].assign(members=16, accuracy=0.5)
    table = pandas.concat([table, more])
    better, as_good = judge(
        baselines.claims(lambda rows: baselines.ensemble_rows(rows).where(p=0.0)), table
    )

    assert (better.value, as_good.value) == (pytest.approx(0.10), pytest.approx(0.09))
