"""The battery of the experiment systems, its disturbances and its pictures."""

from __future__ import annotations

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

SETTING = cells_of("systems", PRESETS["quick"], [0])[0].setting
BEST = "BatchEnsemble p=0"


class TestSystems(Battery):
    name = "systems"
    timed = ("training", "tuning", "inference")

    @staticmethod
    def confirming_rows(cell, noise):
        return make_row(cell, noise, losses={BEST: 0.2, systems.SEPARATE: 0.21})

    @staticmethod
    def contradicting_rows(cell, noise):
        return make_row(cell, noise, losses={BEST: 0.4, systems.SEPARATE: 0.21})


def make_row(cell, noise, losses):
    loss = losses.get(cell["system"], 0.3)
    return {
        "nll": loss + noise(0.001),
        "shifted_nll": 2 * loss + noise(0.001),
        "auroc": 1 - loss + noise(0.001),
        "training": 1.0 + len(cell["system"]),
        "tuning": 3.0,
        "inference": 2.0,
        "parameters": 1.5,
    }


def test_unknown_classes_are_in_no_train_or_test_sample():
    known_classes = set(range(8))

    problem = load_problem(SETTING)

    assert set(problem.data.train.targets.tolist()) == known_classes
    assert set(problem.data.test.targets.tolist()) == known_classes
    assert len(problem.unknown) + len(problem.data.test.targets) == SETTING.test


@pytest.mark.parametrize("kind", ["noise", "blur", "contrast"])
def test_stronger_disturbance_changes_images_more(kind):
    images = torch.randn(20, 3, 8, 8, generator=torch.Generator().manual_seed(0))

    changes = []
    for strength in systems.STRENGTHS:
        generator = torch.Generator().manual_seed(1)
        disturbed = systems.disturb(images, kind, strength, generator)
        changes.append(float((disturbed - images).norm()))

    assert 0 < changes[0] < changes[1] < changes[2]


@pytest.mark.parametrize("kind", ["blur", "contrast"])
def test_blur_and_contrast_keep_constant_images(kind):
    constant = torch.full((2, 1, 8, 8), 0.7)

    disturbed = systems.disturb(constant, kind, 1.0, torch.Generator())

    torch.testing.assert_close(disturbed, constant)


def test_pareto_front_leaves_out_dominated_points():
    first = Curve("a", [1.0, 2.0], [3.0, 4.0], names=["x", "y"])
    second = Curve("b", [3.0], [1.0], names=["z"])

    front = systems.pareto_front([first, second])

    assert front.x == [1.0, 3.0]
    assert front.y == [3.0, 1.0]
    assert front.names == ["x", "z"]


def test_training_costs_include_the_choice_of_the_rate():
    rows = []
    for name in contestants.NAMES:
        swept = {"system": name, "members": 4, "width": 4.0, "seed": 0}
        row = TestSystems.confirming_rows(Cell(SETTING, swept), noise=lambda std: 0.0)
        rows += [{"system": name, **row}] * 2

    panel = systems.plot(pandas.DataFrame(rows)).panels[0]

    assert [curve.label for curve in panel.curves] == [*contestants.KINDS, "Pareto front"]
    references = panel.curves[0]
    assert references.names == list(contestants.KINDS["references"])
    tuning = 3.0
    assert references.x == [1.0 + len(name) + tuning for name in references.names]
