"""The contract of every experiment of ``reproduction/figures``.

The test of an experiment subclasses `Battery` with two functions that make up the rows of a cell:
one confirms every claim, the other contradicts it. A table in which half of the seeds are of
either kind must leave every claim undecided.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from dataclasses import replace
from functools import partial
from typing import ClassVar

import pandas
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

from reproduction import claims
from reproduction.canvas import make_canvas
from reproduction.claims import FAILS, HOLDS, UNDECIDED, judge
from reproduction.drawing import Figure
from reproduction.grid.cells import cells_of, cost_of, load_experiment, pooled_axes
from reproduction.grid.keys import key_of
from reproduction.grid.results import make_figure
from reproduction.grid.runs import measure
from reproduction.grid.settings import PRESETS, with_fingerprint

UNFINISHED = (
    "first half",
    pytest.param("ends", marks=pytest.mark.long),
    pytest.param("one member", marks=pytest.mark.long),
    pytest.param("no baselines", marks=pytest.mark.long),
)


def select_unfinished(table, part):
    """Return the part of a table with two seeds that a stopped run may have measured."""
    if part == "first half":
        table = table.head(len(table) // 2)
    elif part == "ends" and "members" in table:
        # The largest cells run first: the second seed lacks the small ones.
        table = table[(table["seed"] == 0) | (table["members"] > 2)]
    elif part == "one member" and "members" in table:
        table = table[table["members"] == table["members"].min()]
    elif part == "no baselines" and "networks" in table:
        table = table[table["networks"].isna()]
    return table.reset_index(drop=True)


def baseline_rows(cell, noise, *, accuracy, nll):
    """Return rows of separate networks."""
    accuracy += 0.001 * math.log2(cell.width) + noise(0.0001)
    rows = []
    for members in (1, 2, 4, 8):
        row = {
            "members": members,
            "accuracy": accuracy,
            "member_accuracy": accuracy,
            "member_train_accuracy": accuracy,
            "nll": nll,
            "parameters": 2000.0 * members * cell.width**2,
            "correlation": 0.3 if members > 1 else math.nan,
        }
        rows.append(row)
    return rows


def bump(members, top, height=0.005, peak=8):
    """Return an inverted U in log M."""
    return top - height * (math.log2(members) - math.log2(peak)) ** 2


def cheapest_cells(name):
    """Return the cheapest cell with several members for each combination of text values."""
    cheapest = {}
    for cell in sorted(cells_of(name, PRESETS["quick"]), key=cost_of):
        has_several_members = cell.values.get("members", 2) > 1
        draws_fresh_masks = cell.values.get("kind", "").startswith("fresh")
        if has_several_members or draws_fresh_masks:
            texts = [value for value in cell.values.values() if isinstance(value, str)]
            cheapest.setdefault((cell.experiment, *texts), cell)
    return list(cheapest.values())


def measure_rows(cell):
    """Return the rows of an experiment's measurement as a list."""
    rows = load_experiment(cell.experiment).measure(cell)
    if isinstance(rows, dict):
        return [rows]
    return rows


def without_columns(rows, columns):
    """Return copies of the rows without some columns."""
    copies = []
    for row in rows:
        copies.append({name: value for name, value in row.items() if name not in columns})
    return copies


def check_measurement(cell):
    """Check that the rows of a cell exist, are plain, and are possible."""
    outcome = measure(cell)

    assert "error" not in outcome, outcome["error"]
    assert outcome["rows"]
    for row in outcome["rows"]:
        assert any(math.isfinite(value) for value in row.values()), row
        for name, value in row.items():
            assert isinstance(value, (int, float)), name
            if "accuracy" in name and not math.isnan(value):
                assert 0 <= value <= 1, name
    json.dumps(outcome["rows"])


def check_figure(figure):
    """Check that colours have one meaning, titles differ, and early ends have a reason."""
    assert len({panel.title for panel in figure.panels}) == len(figure.panels)
    labels = {}  # by colour and style
    for panel in figure.panels:
        assert panel.title, panel
        assert len({curve.label for curve in panel.curves}) == len(panel.curves), panel.title
        lines = [curve for curve in panel.curves if curve.style == "line"]
        last = max((curve.x[-1] for curve in lines), default=0)
        for curve in panel.curves:
            label = labels.setdefault((curve.colour, curve.style), curve.label)
            assert label == curve.label, (panel.title, label, curve.label)
            is_against_members = panel.x_label.endswith(" M") and curve.style == "line"
            if is_against_members and curve.x[-1] < last:
                assert curve.ends, (panel.title, curve.label)


def check_layout(canvas):
    """Check that no panel, title or legend overlaps another or is clipped."""
    agg = FigureCanvasAgg(canvas)
    agg.draw()
    boxes = list_boxes(canvas, agg.get_renderer())

    page = canvas.bbox.padded(1)
    for name, box in boxes.items():
        assert page.x0 <= box.x0 < box.x1 <= page.x1, name
        assert page.y0 <= box.y0 < box.y1 <= page.y1, name
    for (name, box), (other_name, other_box) in itertools.combinations(boxes.items(), 2):
        assert not box.overlaps(other_box), (name, other_name)


def list_boxes(canvas, renderer):
    """Return the bounding boxes of a canvas by the title of their part."""
    boxes = {}
    if canvas.get_suptitle():
        boxes["title"] = canvas._suptitle.get_window_extent(renderer)
    if canvas.legends:
        boxes["legend"] = canvas.legends[0].get_window_extent(renderer)
    for axes in canvas.axes:
        boxes[axes.get_title()] = axes.get_tightbbox(renderer)
    return boxes


class Battery:
    """Tests of one experiment.

    Attributes:
        name: Name of the experiment.
        contradicting_seeds: Number of seeds, half of each kind, that must leave claims undecided.
        never_true: Statements that are false whenever the others are true.
        weak: Statements that need more seeds than the tables have: a table that contradicts them
            may leave them undecided.
        timed: Columns of times, which differ between measurements.
        fast: Values of cells that make their measurement fast.
        draws: Number of bootstrap samples of a table.
    """

    name = ""
    contradicting_seeds = 4
    never_true = ()
    weak = ()
    timed = ()
    fast: ClassVar = {}
    draws = 10

    @staticmethod
    def confirming_rows(cell, noise):
        """Return rows of a cell that confirm the claims; ``noise(std)`` draws from N(0, std²)."""
        raise NotImplementedError

    @staticmethod
    def contradicting_rows(cell, noise):
        """Return rows of a cell that contradict the claims."""
        raise NotImplementedError

    @classmethod
    def make_table(cls, kind, seeds=6):
        """Return a table of the quick sweep: "confirming", "contradicting" or "mixed"."""
        table_rows = []
        for cell in cells_of(cls.name, PRESETS["quick"], range(seeds)):
            confirms = kind == "confirming" or (kind == "mixed" and cell.seed % 2 == 0)
            for row in cls._make_rows(cell, confirms):
                table_rows.append({**cell.values, **row})
        return pandas.DataFrame(table_rows)

    @classmethod
    def _make_rows(cls, cell, confirms):
        noise = partial(random.Random(str(cell.values)).gauss, 0)
        if cell.experiment == "baselines" and confirms:
            return baseline_rows(cell, noise, accuracy=0.3, nll=9.0)  # every ensemble is better
        if cell.experiment == "baselines":
            return baseline_rows(cell, noise, accuracy=0.99, nll=0.0)  # no ensemble is better
        if confirms:
            rows = cls.confirming_rows(cell, noise)
        else:
            rows = cls.contradicting_rows(cell, noise)
        if isinstance(rows, dict):
            return [rows]
        return rows

    @classmethod
    def judge_table(cls, kind, seeds=6):
        """Return the judged claims of a made-up table."""
        table = cls.make_table(kind, seeds)
        return judge(load_experiment(cls.name).CLAIMS, table, pooled_axes(cls.name))

    @pytest.fixture(autouse=True)
    def few_bootstrap_samples(self, monkeypatch):
        monkeypatch.setattr(claims, "BOOTSTRAP_SAMPLES", self.draws)

    def test_claims_hold_of_a_table_that_confirms_them(self):
        for claim in self.judge_table("confirming"):
            if claim.statement in self.never_true:
                assert claim.verdict == FAILS, claim
            else:
                assert claim.verdict == HOLDS, claim

    def test_claims_fail_of_a_table_that_contradicts_them(self):
        for claim in self.judge_table("contradicting"):
            if claim.statement in self.weak:
                assert claim.verdict in (FAILS, UNDECIDED), claim
            else:
                assert claim.verdict == FAILS, claim

    def test_claims_are_undecided_where_seeds_contradict_each_other(self):
        for claim in self.judge_table("mixed", self.contradicting_seeds):
            if claim.statement not in self.never_true:
                assert claim.verdict == UNDECIDED, claim

    def test_one_seed_decides_nothing(self):
        for claim in self.judge_table("confirming", seeds=1):
            assert claim.verdict == UNDECIDED, claim
            assert claim.note

    def test_claims_without_cells_are_undecided_and_have_a_note(self):
        table = self.make_table("confirming", seeds=2)

        for claim in judge(load_experiment(self.name).CLAIMS, table.head(1)):
            assert claim.verdict == UNDECIDED, claim
            assert claim.note, claim

    def test_claims_have_unique_statements_and_all_texts(self):
        claims = load_experiment(self.name).CLAIMS

        statements = {claim.statement for claim in claims}
        assert len(statements) == len(claims)
        for claim in claims:
            assert claim.statement
            assert claim.paper
            assert claim.measure

    def test_picture_has_curves_and_no_overlaps(self):
        table = self.make_table("confirming", seeds=2)

        figure = load_experiment(self.name).plot(table)

        assert isinstance(figure, Figure)
        for panel in figure.panels:
            assert panel.curves
            for curve in panel.curves:
                assert len(curve.x) == len(curve.y)
        check_figure(figure)
        check_layout(make_canvas(figure))

    @pytest.mark.parametrize("part", UNFINISHED)
    def test_unfinished_table_is_judged_and_drawn(self, part, monkeypatch):
        monkeypatch.setattr(claims, "BOOTSTRAP_SAMPLES", 2)
        whole = self.make_table("confirming", seeds=2)
        table = select_unfinished(whole, part)
        if len(table) == len(whole):
            pytest.skip("the table has no such cells")
        experiment = load_experiment(self.name)

        for claim in judge(experiment.CLAIMS, table, pooled_axes(self.name)):
            assert claim.note or not math.isnan(claim.low), claim
        check_figure(make_figure(experiment, table))

    @pytest.mark.parametrize("preset", PRESETS)
    def test_presets_have_distinct_cells_with_several_seeds(self, preset):
        cells = cells_of(self.name, PRESETS[preset])

        least_seeds = 1 if preset == "gpu" else 3
        assert len({key_of(cell) for cell in cells}) == len(cells)
        assert len({cell.seed for cell in cells}) >= least_seeds
        cells_with_two_seeds = cells_of(self.name, PRESETS[preset], range(2))
        assert {cell.seed for cell in cells_with_two_seeds} == {0, 1}

    def test_cells_are_frozen_and_plain(self):
        cell = cells_of(self.name, PRESETS["quick"])[0]

        json.dumps(dataclasses.asdict(cell))
        with pytest.raises(dataclasses.FrozenInstanceError):
            cell.values = {}

    def test_every_kind_of_cell_is_measured(self):
        for cell in cheapest_cells(self.name):
            small = cell.shortened(epochs=1).with_values(**self.fast)
            assert cost_of(small) <= cost_of(cell)
            check_measurement(small)

    def test_measurement_depends_on_its_cell_only(self):
        if self.name == "cost":
            pytest.skip("times differ from one measurement to the next")
        cell = cheapest_cells(self.name)[0].shortened(epochs=1)

        first = without_columns(measure_rows(cell), self.timed)
        torch.randn(3)
        second = without_columns(measure_rows(cell), self.timed)

        assert str(first) == str(second)  # as texts, because nan != nan

    @pytest.mark.parametrize("preset", ["paper", "cpu"])
    def test_other_presets_train_for_one_epoch_on_a_few_images(self, preset, small_cifar):
        setting = replace(PRESETS[preset], epochs=1, validation=0, train=32, batch_size=16)
        smallest = min(cells_of(self.name, with_fingerprint(setting)), key=cost_of)
        check_measurement(smallest.with_values(**self.fast))
