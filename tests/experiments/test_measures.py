"""Each experiment measures, at its smallest; and the paper's preset for one epoch."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import replace

import pytest
import torch
from experiments import problem

from embens.experiments import NAMES, contract
from embens.experiments.setting import PRESETS, data_set, fingerprint, reference
from embens.experiments.task import make_task, perform


def kinds(cells):
    """Return the smallest cell with several members of each kind."""
    found = {}
    for cell in sorted(cells, key=contract.weight):
        if getattr(cell, "members", 2) > 1 or getattr(cell, "kind", "").startswith("fresh"):
            words = tuple(v for v in vars(cell).values() if isinstance(v, str))
            found.setdefault(words, cell)
    return list(found.values())


def check(rows):
    """Rows are there, plain, and possible."""
    assert rows
    for row in rows:
        assert all(isinstance(v, (int, float)) for v in row.values()), row
        accuracies = [v for k, v in row.items() if "accuracy" in k]
        assert all(0 <= v <= 1 for v in accuracies if not math.isnan(v))
        assert any(math.isfinite(v) for v in row.values())
    json.dumps(rows)


@pytest.mark.parametrize("name", NAMES)
def test_the_quick_preset_measures_every_kind_of_cell(name):
    experiment = contract.load(name)
    for cell in kinds(experiment.cells(PRESETS["quick"])):
        small, factor = contract.shortened(cell, epochs=1)
        assert factor >= 1
        done = perform(make_task(name, small))
        assert done.error is None, done.error
        check(done.rows)


@pytest.mark.parametrize("name", ["transition", "theorems", "ntk-at-init", "gradients"])
def test_a_measurement_depends_on_its_cell_alone(name):
    cell, _ = contract.shortened(kinds(contract.load(name).cells(PRESETS["quick"]))[0], epochs=1)
    first = contract.load(name).measure(cell)
    torch.randn(3)
    assert str(contract.load(name).measure(cell)) == str(first)


@pytest.fixture(scope="module")
def paper(tmp_path_factory):
    folder = problem.write_cifar(tmp_path_factory.mktemp("cifar"), train=256, test=32)
    patch = pytest.MonkeyPatch()
    patch.setenv("EMBENS_DATA", str(folder))
    setting = replace(PRESETS["paper"], epochs=1, validation=0, train=256)
    yield fingerprint(setting)
    patch.undo()


def test_the_paper_s_network_is_the_paper_s(paper):
    network = reference(paper)
    sizes = [tuple(p.shape) for p in network.parameters()]
    assert sizes == [
        (64, 3, 3, 3), (128, 64, 3, 3), (256, 128, 3, 3), (512, 256, 3, 3), (100, 512)
    ]  # fmt: skip
    held = replace(PRESETS["paper"], validation=10_000)
    assert (held.train, held.validation, held.batch_size, held.lr) == (40_000, 10_000, 128, 0.01)
    assert (held.epochs, held.labels, held.image) == (1000, "fine", 32)


@pytest.mark.parametrize("name", NAMES)
def test_one_epoch_of_the_paper_preset_on_256_images(name, paper):
    smallest = min(contract.load(name).cells(paper), key=contract.weight)
    if name == "cost":
        smallest = replace(smallest, turns=1)  # times repeated steps; one will do
    done = perform(make_task(name, smallest))
    assert done.error is None, done.error
    check(done.rows)


@pytest.mark.parametrize("name", NAMES)
def test_one_epoch_of_the_cpu_preset_on_128_images(name, paper):
    here = fingerprint(replace(PRESETS["cpu"], epochs=1, train=128))
    smallest = min(contract.load(name).cells(here), key=contract.weight)
    if name == "cost":
        smallest = replace(smallest, turns=1)
    done = perform(make_task(name, smallest))
    assert done.error is None, done.error
    check(done.rows)


def test_a_part_of_the_paper_s_data_is_held_out(paper):
    setting = replace(paper, validation=10_000, records="")
    data = data_set(setting)
    assert len(data.validation.targets) == 51  # a fifth at most, of a small folder
    assert len(data.train.targets) == 205
    assert data.classes == 100


def test_other_records_have_another_fingerprint(paper, tmp_path, monkeypatch):
    folder = problem.write_cifar(tmp_path / "other", train=255, test=32)
    monkeypatch.setenv("EMBENS_DATA", str(folder))
    assert fingerprint(paper).records != paper.records
    assert fingerprint(PRESETS["quick"]) == PRESETS["quick"]


def test_cells_are_frozen_and_plain():
    for name in NAMES:
        cell = contract.load(name).cells(PRESETS["quick"])[0]
        json.dumps(dataclasses.asdict(cell))
        with pytest.raises(dataclasses.FrozenInstanceError):
            cell.seed = 3
