"""What every experiment has to pass: a test file for it is its name and a table made up for it.

The table is made by a function of a cell, which returns the rows that its measurement would, such
that the paper's claims are true of them, or false. A table whose seeds are half of one kind and
half of the other has to leave every claim undecided.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from dataclasses import replace

import pandas
import pytest
import torch

from reproduction import claims
from reproduction.claims import FAILS, HOLDS, UNDECIDED, judge
from reproduction.drawing import Figure, draw
from reproduction.grid.cells import cells_of, cost_of, load_experiment
from reproduction.grid.keys import key_of
from reproduction.grid.runs import measure
from reproduction.grid.settings import PRESETS, with_fingerprint


def table(name, rows, kind, seeds=6):
    """Return a table of the quick sweep; ``kind`` is "true", "false" or "mixed"."""
    found = []
    for cell in cells_of(name, PRESETS["quick"], range(seeds)):
        true = {"true": True, "false": False, "mixed": cell.seed % 2 == 0}[kind]
        swept = cell.values
        noise = random.Random(str(swept)).gauss
        make = baseline_rows if cell.experiment == "baselines" else rows
        made = make(cell, true, lambda s, noise=noise: noise(0, s))
        found += [{**swept, **row} for row in ([made] if isinstance(made, dict) else made)]
    return pandas.DataFrame(found)


def baseline_rows(cell, true, noise):
    """Return networks that any ensemble beats, or none."""
    accuracy = (0.3 if true else 0.99) + 0.001 * math.log2(cell["width"]) + noise(0.0001)
    measured = dict.fromkeys(("accuracy", "member_accuracy", "member_train_accuracy"), accuracy)
    return [
        {
            "members": m,
            **measured,
            "nll": 9.0 if true else 0.0,
            "parameters": 2000.0 * m * cell["width"] ** 2,
        }
        | {"correlation": 0.3 if m > 1 else math.nan}
        for m in (1, 2, 4, 8)
    ]


def bump(members, top, height=0.005, peak=8):
    """Return an inverted U in log M."""
    return top - height * (math.log2(members) - math.log2(peak)) ** 2


def kinds(name):
    """Return the smallest cell with several members of each kind, of the quick preset."""
    found = {}
    for cell in sorted(cells_of(name, PRESETS["quick"]), key=cost_of):
        if cell.values.get("members", 2) > 1 or cell.values.get("kind", "").startswith("fresh"):
            words = (cell.experiment, *(v for v in cell.values.values() if isinstance(v, str)))
            found.setdefault(words, cell)
    return list(found.values())


def check(cell):
    """Rows of a cell are there, plain, and possible."""
    done = measure(cell)
    assert "error" not in done, done["error"]
    assert done["rows"]
    for row in done["rows"]:
        assert all(isinstance(v, (int, float)) for v in row.values()), row
        accuracies = [v for k, v in row.items() if "accuracy" in k]
        assert all(0 <= v <= 1 for v in accuracies if not math.isnan(v))
        assert any(math.isfinite(v) for v in row.values())
    json.dumps(done["rows"])


def check_figure(figure):
    """A colour and a style mean one thing in a figure; titles differ; curves that stop say why."""
    meanings = {}
    for panel in figure.panels:
        assert panel.title, panel
        assert len({c.label for c in panel.curves}) == len(panel.curves), panel.title
        for curve in panel.curves:
            label = meanings.setdefault((curve.colour, curve.style), curve.label)
            assert label == curve.label, (panel.title, label, curve.label)
        last = max(max(c.x, default=0) for c in panel.curves)
        for curve in panel.curves:
            if curve.style != "points" and panel.x_label.endswith(" M") and curve.x[-1] < last:
                assert curve.ends, (panel.title, curve.label)
    assert len({panel.title for panel in figure.panels}) == len(figure.panels)


class Battery:
    """Tests of one experiment.

    Attributes:
        name: of the experiment.
        rows: makes up the rows of a cell.
        contradicting: how many seeds, half of each kind, decide nothing. (Powers of means are
            ruled by the larger of contradicting seeds; two of them say nothing.)
        never_true: statements that are false of every table of which the others are true.
        timed: columns that are times, which differ from one measurement to the next.
    """

    name = ""
    rows = None
    contradicting = 4
    never_true = ()
    timed = ()

    @pytest.fixture(autouse=True)
    def few_draws(self, monkeypatch):
        monkeypatch.setattr(claims, "BOOTSTRAP_SAMPLES", 20)

    def claims(self, kind, seeds=6):
        made = table(self.name, self.rows, kind, seeds)
        return judge(load_experiment(self.name).CLAIMS, made)

    def test_claims_hold_of_a_table_that_the_paper_would_recognise(self):
        for claim in self.claims("true"):
            assert claim.verdict == (FAILS if claim.statement in self.never_true else HOLDS), claim

    def test_claims_do_not_hold_of_a_table_that_contradicts_the_paper(self):
        for claim in self.claims("false"):
            assert claim.verdict == FAILS, claim

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
        claims = self.claims("true", 2)
        assert len({c.statement for c in claims}) == len(claims)
        assert all(c.statement and c.paper and c.measure for c in claims)

    def test_a_table_becomes_a_picture(self, tmp_path):
        figure = load_experiment(self.name).plot(table(self.name, self.rows, "true", 2))
        assert isinstance(figure, Figure)
        assert all(panel.curves for panel in figure.panels)
        assert all(len(c.x) == len(c.y) for panel in figure.panels for c in panel.curves)
        check_figure(figure)
        draw(figure, tmp_path / "figure.png")
        assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")

    def test_every_preset_has_a_sweep_of_distinct_cells_with_several_seeds(self):
        for setting in PRESETS.values():
            cells = cells_of(self.name, setting)
            assert len({key_of(cell) for cell in cells}) == len(cells)
            assert len({cell.seed for cell in cells}) >= 3
            assert {c.seed for c in cells_of(self.name, setting, range(2))} == {0, 1}

    def test_cells_are_frozen_and_plain(self):
        cell = cells_of(self.name, PRESETS["quick"])[0]
        json.dumps(dataclasses.asdict(cell))
        with pytest.raises(dataclasses.FrozenInstanceError):
            cell.values = {}

    def test_the_quick_preset_measures_every_kind_of_cell(self):
        for cell in kinds(self.name):
            small = cell.shortened(epochs=1)
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

        found = measured()
        torch.randn(3)
        assert measured() == found

    @pytest.mark.parametrize(("preset", "train"), [("paper", 256), ("cpu", 128)])
    def test_one_epoch_of_the_other_presets_on_some_images(self, preset, train, small_cifar):
        here = with_fingerprint(replace(PRESETS[preset], epochs=1, validation=0, train=train))
        smallest = min(cells_of(self.name, here), key=cost_of)
        if self.name == "cost":
            smallest = smallest.with_values(turns=1)  # times repeated steps; one will do
        check(smallest)
