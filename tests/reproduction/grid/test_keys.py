"""Keys cover everything that a result depends on, and nothing else."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest

from reproduction import training
from reproduction.figures import NAMES, gain, transition
from reproduction.grid import cells, keys, settings
from reproduction.grid.keys import key_of
from tests.reproduction import problem


def test_the_key_is_of_everything_in_the_cell():
    cell = problem.cells(1)[0]
    keys = {
        key_of(changed)
        for changed in (
            cell,
            cell.with_values(p=0.6),
            cell.with_values(seed=1),
            cell.with_values(members=2),
            replace(cell, setting=replace(cell.setting, threads=2)),
            replace(cell, setting=replace(cell.setting, lr=0.02)),
            replace(cell, setting=replace(cell.setting, device="cuda")),
            replace(cell, setting=replace(cell.setting, records="abc")),
        )
    }

    assert len(keys) == 8
    assert key_of(cell) == key_of(replace(cell))


@pytest.fixture
def version_with(monkeypatch):
    """Return the code version of ``transition`` if something in a module were another."""

    def version_of(module, old, new):
        original = inspect.getsource
        assert old in original(module)

        def getsource(item):
            text = original(item)
            return text.replace(old, new) if item.__module__ == module.__name__ else text

        with monkeypatch.context() as patch:
            patch.setattr(keys.inspect, "getsource", getsource)
            return keys.code_version.__wrapped__("transition")

    return version_of


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (transition, "a distinctive inverted U", "other words"),
        (transition, "return gap_above - gap_below", "return gap_above"),  # a statistic
        (transition, "members[1:]", "members[2:]"),  # a sweep
        (transition, '"""Train one ensemble and score it."""', '"""Other words."""'),
        (transition, "# The coupling depends on p alone", "# Other words"),
        (settings, "for part in (data.train, data.test)", "for part in (data.train,)"),
    ],
)
def test_the_key_ignores_comments_claims_and_figures(version_with, module, old, new):
    assert version_with(module, old, new) == keys.code_version.__wrapped__("transition")


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (transition, "inputs[:8]", "inputs[:9]"),
        (cells, "manual_seed(self.seed)", "manual_seed(self.seed + 1)"),
        (settings, "_read(setting).standardise()", "_read(setting)"),
        (settings, "lr: float = 0.003", "lr: float = 0.004"),
        (training, "float(ensemble.members)", "1.0"),
        (training, "isfinite().all(-1, keepdim=True)", "isfinite()"),
    ],
)
def test_the_key_changes_with_the_code_that_measures(version_with, module, old, new):
    assert version_with(module, old, new) != keys.code_version.__wrapped__("transition")


def test_the_key_changes_with_constants_that_measure_uses_and_with_versions(monkeypatch):
    def version(name):
        return keys.code_version.__wrapped__(name)

    before = {name: version(name) for name in ("transition", "gain")}
    monkeypatch.setattr(transition, "SHIFTS", {"quick": (0.0,)})
    assert version("transition") == before["transition"]
    monkeypatch.setattr(gain, "RATE", {"quick": 2.0})
    assert version("gain") != before["gain"]
    monkeypatch.setattr(keys.torch, "__version__", "1.0")
    assert version("transition") != before["transition"]


@pytest.mark.parametrize("constant", [object(), {"a": lambda x: x}, settings])
def test_objects_without_a_stable_text_raise(monkeypatch, constant):
    monkeypatch.setattr(transition, "regime", constant)
    with pytest.raises(
        TypeError, match="regime cannot be hashed: measuring code may use functions"
    ):
        keys.code_version.__wrapped__("transition")


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_has_a_key(name):
    assert len(keys.code_version.__wrapped__(name)) == 16
