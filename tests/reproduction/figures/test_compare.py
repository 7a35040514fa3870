"""compare: its battery, and what its parts do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.reproduction.battery import Battery

from reproduction.figures import compare
from reproduction.grid import cells as contract
from reproduction.drawing import Curve
from reproduction.grid.settings import PRESETS


def rows(c, true, noise):
    mine = c["system"] == "BatchEnsemble p=0"
    other = c["system"] == compare.SEPARATE
    better = (0.2 if true else 0.4) if mine else (0.21 if other else 0.3)
    return {
        "nll": better + noise(0.001),
        "shifted_nll": 2 * better + noise(0.001),
        "auroc": 1 - better + noise(0.001),
        "training": 1.0 + len(c["system"]),
        "tuning": 3.0,
        "inference": 2.0,
        "parameters": 1.5,
    }


class TestCompare(Battery):
    name, rows = "compare", staticmethod(rows)
    timed = ("training", "tuning", "inference")


SETTING = cells_of("compare", PRESETS["quick"], [0])[0].setting


def cell_of(system, members, width):
    swept = {"system": system, "members": members, "width": width, "seed": 0}
    return Cell(SETTING, swept)


def test_classes_that_are_left_out_are_in_no_train_or_test_row():
    data, unknown = compare.problem(SETTING)
    assert set(data.train.targets.tolist()) == set(data.test.targets.tolist()) == set(range(8))
    assert len(unknown) + len(data.test.targets) == SETTING.test


@pytest.mark.parametrize("kind", ["noise", "blur", "contrast"])
def test_a_stronger_disturbance_changes_images_more(kind):
    images = torch.randn(20, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    changes = [
        float((compare.disturb(images, kind, s, torch.Generator().manual_seed(1)) - images).norm())
        for s in compare.STRENGTHS
    ]
    assert 0 < changes[0] < changes[1] < changes[2]


def test_blur_and_contrast_keep_what_is_constant():
    flat = torch.full((2, 1, 8, 8), 0.7)
    for kind in ("blur", "contrast"):
        torch.testing.assert_close(compare.disturb(flat, kind, 1.0, torch.Generator()), flat)


def test_the_wide_network_has_the_parameters_of_the_separate_ones():
    cell = cell_of(compare.WIDE, 4, 4.0)
    counts = [
        sum(p.numel() for p in compare.make(cell.with_values(system=system)).parameters())
        for system in (compare.WIDE, compare.SEPARATE)
    ]
    assert abs(counts[0] / counts[1] - 1) < 0.05


@pytest.mark.parametrize("system", [s for s in compare.SYSTEMS if s not in compare.PATHS])
def test_every_system_is_made_with_its_members(system):
    cell = cell_of(system, 3, 1.0)
    outputs = compare.make(cell)(torch.zeros(2, 1, 8, 8))
    assert outputs.shape[1:] == (2, 10)
    alone = system in (compare.ONE, compare.WIDE, "MC dropout, fresh")
    assert len(outputs) == (1 if alone else 3)


def test_the_front_leaves_out_what_costs_more_and_is_worse():
    kinds = [Curve("a", [1.0, 2.0], [3.0, 4.0], names=["x", "y"]), Curve("b", [3.0], [1.0])]
    front = compare.front([kinds[0], replace(kinds[1], names=["z"])])
    assert (front.x, front.y, front.names) == ([1.0, 3.0], [3.0, 1.0], ["x", "z"])


def test_every_system_is_of_one_kind_and_training_costs_count_the_choice_of_the_rate():
    pandas = pytest.importorskip("pandas")
    assert len(set(compare.SYSTEMS)) == len(compare.SYSTEMS) == 21
    cells = [cell_of(system, 4, 4.0) for system in compare.SYSTEMS]
    table = pandas.DataFrame(
        {"system": c["system"]} | rows(c, True, lambda std: 0.0) for c in cells for _ in range(2)
    )
    panel = compare.plot(table).panels[0]
    assert [c.label for c in panel.curves] == [*compare.systems(), "Pareto front"]
    references = panel.curves[0]
    assert references.names == list(compare.systems()["references"])
    assert references.x == [4.0 + len(name) for name in references.names]
