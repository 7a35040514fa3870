"""The contract of every experiment: a test file has its name and a made-up table.

A function of a cell makes up the rows of its measurement, such that the claims are true or false. A
table with half of the seeds of either kind must leave every claim undecided.
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


def table(name, rows, kind, seeds=6):
    """Return a table of the quick sweep; ``kind`` is "true", "false" or "mixed"."""
    made = []
    for cell in cells_of(name, PRESETS["quick"], range(seeds)):
        is_true = kind == "true" or (kind == "mixed" and cell.seed % 2 == 0)
        gauss = random.Random(str(cell.values)).gauss
        make = baseline_rows if cell.experiment == "baselines" else rows
        rows_of_cell = make(cell, is_true, partial(gauss, 0))
        if isinstance(rows_of_cell, dict):
            rows_of_cell = [rows_of_cell]
        made += [{**cell.values, **row} for row in rows_of_cell]
    return pandas.DataFrame(made)


UNFINISHED = (
    "first half",
    pytest.param("ends", marks=pytest.mark.long),
    pytest.param("one member", marks=pytest.mark.long),
    pytest.param("no baselines", marks=pytest.mark.long),
)


def unfinished(table, part):
    """Return what a stopped run may have left of a table with two seeds."""
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


def baseline_rows(cell, true, noise):
    """Return networks that every ensemble beats, or that none beats."""
    accuracy = (0.3 if true else 0.99) + 0.001 * math.log2(cell.width) + noise(0.0001)
    made = []
    for members in (1, 2, 4, 8):
        row = {
            "members": members,
            "accuracy": accuracy,
            "member_accuracy": accuracy,
            "member_train_accuracy": accuracy,
            "nll": 9.0 if true else 0.0,
            "parameters": 2000.0 * members * cell.width**2,
            "correlation": 0.3 if members > 1 else math.nan,
        }
        made.append(row)
    return made


def bump(members, top, height=0.005, peak=8):
    """Return an inverted U in log M."""
    return top - height * (math.log2(members) - math.log2(peak)) ** 2


def kinds(name):
    """Return the cheapest cell with several members for each combination of text values."""
    cheapest = {}
    for cell in sorted(cells_of(name, PRESETS["quick"]), key=cost_of):
        is_fresh = cell.values.get("kind", "").startswith("fresh")
        if cell.values.get("members", 2) > 1 or is_fresh:
            texts = [value for value in cell.values.values() if isinstance(value, str)]
            cheapest.setdefault((cell.experiment, *texts), cell)
    return list(cheapest.values())


def check(cell):
    """Check that the rows of a cell exist, are plain, and are possible."""
    outcome = measure(cell)
    assert "error" not in outcome, outcome["error"]
    assert outcome["rows"]
    for row in outcome["rows"]:
        assert all(isinstance(value, (int, float)) for value in row.values()), row
        assert any(math.isfinite(value) for value in row.values())
        for name, value in row.items():
            if "accuracy" in name and not math.isnan(value):
                assert 0 <= value <= 1
    json.dumps(outcome["rows"])


def check_figure(figure):
    """Check that colours have one meaning, titles differ, and early ends have a reason."""
    meanings = {}
    for panel in figure.panels:
        assert panel.title, panel
        assert len({curve.label for curve in panel.curves}) == len(panel.curves), panel.title
        for curve in panel.curves:
            label = meanings.setdefault((curve.colour, curve.style), curve.label)
            assert label == curve.label, (panel.title, label, curve.label)
        last = max(max(curve.x, default=0) for curve in panel.curves)
        for curve in panel.curves:
            is_against_members = panel.x_label.endswith(" M") and curve.style != "points"
            if is_against_members and curve.x[-1] < last:
                assert curve.ends, (panel.title, curve.label)
    assert len({panel.title for panel in figure.panels}) == len(figure.panels)


def check_layout(canvas):
    """Check that no panel, title or legend overlaps another or is clipped."""
    agg = FigureCanvasAgg(canvas)
    agg.draw()
    renderer = agg.get_renderer()
    boxes = {"title": canvas.get_suptitle() and canvas._suptitle.get_window_extent(renderer)}
    boxes["legend"] = canvas.legends and canvas.legends[0].get_window_extent(renderer)
    for axes in canvas.axes:
        boxes[axes.get_title()] = axes.get_tightbbox(renderer)
    boxes = {name: box for name, box in boxes.items() if box}
    page = canvas.bbox.padded(1)
    for name, box in boxes.items():
        assert page.x0 <= box.x0 < box.x1 <= page.x1, name
        assert page.y0 <= box.y0 < box.y1 <= page.y1, name
    for (name, box), (other, later) in itertools.combinations(boxes.items(), 2):
        assert not box.overlaps(later), (name, other)


class Battery:
    """Tests of one experiment.

    Attributes:
        name: Name of the experiment.
        rows: Makes up the rows of a cell.
        contradicting: Number of seeds, half of each kind, that must leave claims undecided.
        never_true: Statements that are false whenever the others are true.
        weak: Statements that need more seeds than the tables have: a table that contradicts them
            may leave them undecided.
        timed: Columns of times, which differ between measurements.
        fast: Values of cells that make their measurement fast.
        draws: Number of bootstrap samples of a table.
    """

    name = ""
    rows = None
    contradicting = 4
    never_true = ()
    weak = ()
    timed = ()
    fast: ClassVar = {}
    draws = 10

    @pytest.fixture(autouse=True)
    def few_draws(self, monkeypatch):
        monkeypatch.setattr(claims, "BOOTSTRAP_SAMPLES", self.draws)

    def claims(self, kind, seeds=6):
        made = table(self.name, self.rows, kind, seeds)
        return judge(load_experiment(self.name).CLAIMS, made, pooled_axes(self.name))

    def test_claims_hold_of_a_table_that_the_paper_would_recognise(self):
        for claim in self.claims("true"):
            assert claim.verdict == (FAILS if claim.statement in self.never_true else HOLDS), claim

    def test_claims_do_not_hold_of_a_table_that_contradicts_the_paper(self):
        for claim in self.claims("false"):
            accepted = {FAILS, UNDECIDED} if claim.statement in self.weak else {FAILS}
            assert claim.verdict in accepted, claim

    def test_claims_are_undecided_where_seeds_contradict_each_other(self):
        for claim in self.claims("mixed", self.contradicting):
            assert claim.statement in self.never_true or claim.verdict == UNDECIDED, claim

    def test_one_seed_decides_nothing(self):
        for claim in self.claims("true", 1):
            assert claim.verdict == UNDECIDED, claim
            assert claim.note

    def test_a_claim_whose_cells_are_missing_says_so(self):
        made = table(self.name, self.rows, "true", 2)
        for claim in judge(load_experiment(self.name).CLAIMS, made.head(1)):
            assert claim.verdict == UNDECIDED, claim
            assert claim.note, claim

    def test_statements_are_unique_and_other_texts_are_there(self):
        claims = load_experiment(self.name).CLAIMS
        assert len({c.statement for c in claims}) == len(claims)
        assert all(c.statement and c.paper and c.measure for c in claims)

    def test_a_table_becomes_a_picture_in_which_nothing_overlaps(self):
        figure = load_experiment(self.name).plot(table(self.name, self.rows, "true", 2))
        assert isinstance(figure, Figure)
        assert all(panel.curves for panel in figure.panels)
        assert all(len(c.x) == len(c.y) for panel in figure.panels for c in panel.curves)
        check_figure(figure)
        check_layout(make_canvas(figure))

    @pytest.mark.parametrize("part", UNFINISHED)
    def test_an_unfinished_table_is_judged_and_drawn(self, part, monkeypatch):
        monkeypatch.setattr(claims, "BOOTSTRAP_SAMPLES", 2)
        whole = table(self.name, self.rows, "true", 2)
        made = unfinished(whole, part)
        if len(made) == len(whole):
            pytest.skip("the table has no such cells")
        experiment = load_experiment(self.name)
        for claim in judge(experiment.CLAIMS, made, pooled_axes(self.name)):
            assert claim.note or not math.isnan(claim.low), claim
        check_figure(make_figure(experiment, made))

    def test_every_preset_has_a_sweep_of_distinct_cells_with_several_seeds(self):
        for setting in PRESETS.values():
            cells = cells_of(self.name, setting)
            assert len({key_of(cell) for cell in cells}) == len(cells)
            assert len({cell.seed for cell in cells}) >= (1 if setting.preset == "gpu" else 3)
            assert {c.seed for c in cells_of(self.name, setting, range(2))} == {0, 1}

    def test_cells_are_frozen_and_plain(self):
        cell = cells_of(self.name, PRESETS["quick"])[0]
        json.dumps(dataclasses.asdict(cell))
        with pytest.raises(dataclasses.FrozenInstanceError):
            cell.values = {}

    def test_the_quick_preset_measures_every_kind_of_cell(self):
        for cell in kinds(self.name):
            small = cell.shortened(epochs=1).with_values(**self.fast)
            assert cost_of(small) <= cost_of(cell)
            check(small)

    def test_a_measurement_depends_on_its_cell_alone(self):
        if self.name == "cost":
            pytest.skip("times differ from one measurement to the next")
        cell = kinds(self.name)[0].shortened(epochs=1)

        def measured():
            rows = load_experiment(cell.experiment).measure(cell)
            rows = [rows] if isinstance(rows, dict) else rows
            return str([{k: v for k, v in row.items() if k not in self.timed} for row in rows])

        first_rows = measured()
        torch.randn(3)
        assert measured() == first_rows

    @pytest.mark.parametrize("preset", ["paper", "cpu"])
    def test_one_epoch_of_the_other_presets_on_some_images(self, preset, small_cifar):
        setting = replace(PRESETS[preset], epochs=1, validation=0, train=32, batch_size=16)
        smallest = min(cells_of(self.name, with_fingerprint(setting)), key=cost_of)
        check(smallest.with_values(**self.fast))
