"""systems: its battery, and what its parts do."""

from __future__ import annotations

from dataclasses import replace

import pandas
import pytest
import torch

from reproduction import contestants
from reproduction.drawing import Curve
from reproduction.figures import systems
from reproduction.grid.cells import Cell, cells_of
from reproduction.grid.settings import PRESETS
from reproduction.problems import load_problem
from tests.reproduction.battery import Battery


def rows(c, true, noise):
    is_batch_ensemble = c["system"] == "BatchEnsemble p=0"
    other = c["system"] == systems.SEPARATE
    better = (0.2 if true else 0.4) if is_batch_ensemble else (0.21 if other else 0.3)
    return {
        "nll": better + noise(0.001),
        "shifted_nll": 2 * better + noise(0.001),
        "auroc": 1 - better + noise(0.001),
        "training": 1.0 + len(c["system"]),
        "tuning": 3.0,
        "inference": 2.0,
        "parameters": 1.5,
    }


class TestSystems(Battery):
    name, rows = "systems", staticmethod(rows)
    timed = ("training", "tuning", "inference")


SETTING = cells_of("systems", PRESETS["quick"], [0])[0].setting


def cell_of(system, members, width):
    swept = {"system": system, "members": members, "width": width, "seed": 0}
    return Cell(SETTING, swept)


def test_classes_that_are_left_out_are_in_no_train_or_test_sample():
    problem = load_problem(SETTING)
    known = set(range(8))
    assert set(problem.data.train.targets.tolist()) == known
    assert set(problem.data.test.targets.tolist()) == known
    assert len(problem.unknown) + len(problem.data.test.targets) == SETTING.test


@pytest.mark.parametrize("kind", ["noise", "blur", "contrast"])
def test_a_stronger_disturbance_changes_images_more(kind):
    images = torch.randn(20, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    changes = [
        float((systems.disturb(images, kind, s, torch.Generator().manual_seed(1)) - images).norm())
        for s in systems.STRENGTHS
    ]
    assert 0 < changes[0] < changes[1] < changes[2]


def test_blur_and_contrast_keep_constant_images():
    flat = torch.full((2, 1, 8, 8), 0.7)
    for kind in ("blur", "contrast"):
        torch.testing.assert_close(systems.disturb(flat, kind, 1.0, torch.Generator()), flat)


def test_the_pareto_front_leaves_out_dominated_points():
    kinds = [Curve("a", [1.0, 2.0], [3.0, 4.0], names=["x", "y"]), Curve("b", [3.0], [1.0])]
    front = systems.pareto_front([kinds[0], replace(kinds[1], names=["z"])])
    assert (front.x, front.y, front.names) == ([1.0, 3.0], [3.0, 1.0], ["x", "z"])


def test_training_costs_include_the_choice_of_the_rate():
    made = []
    for name in contestants.NAMES:
        cell = cell_of(name, 4, 4.0)
        for _ in range(2):
            made.append({"system": name, **rows(cell, True, lambda std: 0.0)})
    panel = systems.plot(pandas.DataFrame(made)).panels[0]
    assert [curve.label for curve in panel.curves] == [*contestants.KINDS, "Pareto front"]
    references = panel.curves[0]
    assert references.names == list(contestants.KINDS["references"])
    assert references.x == [4.0 + len(name) for name in references.names]
