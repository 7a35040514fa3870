"""A job measures its cell; its key is of all that the numbers depend on."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
from experiments import problem

from embens import laws
from embens.experiments import contract, job, mc_dropout, setting, training, transition
from embens.experiments.job import Done, make_job, perform


def test_the_key_is_of_everything_in_the_cell():
    cell = problem.cells(1)[0]
    keys = {
        make_job("transition", changed).key
        for changed in (
            cell,
            replace(cell, p=0.6),
            replace(cell, seed=1),
            replace(cell, members=2),
            replace(cell, setting=replace(cell.setting, threads=2)),
            replace(cell, setting=replace(cell.setting, lr=0.02)),
            replace(cell, setting=replace(cell.setting, device="cuda")),
            replace(cell, setting=replace(cell.setting, records="abc")),
        )
    }
    assert len(keys) == 8
    assert make_job("transition", cell).key == make_job("transition", replace(cell)).key


def test_the_threads_of_a_cell_are_set_and_put_back():
    import torch

    before = torch.get_num_threads()
    cell = problem.cells(1)[0]
    done = perform(make_job("transition", replace(cell, setting=replace(cell.setting, threads=2))))
    assert done.error is None
    assert torch.get_num_threads() == before


def test_a_measurement_that_raises_gives_its_text():
    done = perform(make_job("transition", problem.bad()))
    assert isinstance(done, Done)
    assert done.rows is None
    assert "Traceback" in (done.error or "")


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
            patch.setattr(job.inspect, "getsource", getsource)
            return job.code_version.__wrapped__("transition")

    return version_of


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (transition, "a distinctive inverted U", "other words"),
        (transition, "_gap(_above(t)) - _gap(_below(t))", "_gap(_above(t))"),  # a statistic
        (transition, "members=members[1:]", "members=members[2:]"),  # a sweep
        (transition, '"""Train one ensemble."""', '"""Other words."""'),
        (transition, "# it depends on p alone", "# other words"),
        (setting, "_read(setting)\n    for part", "_read(setting)\n    for other"),  # fingerprint
    ],
)
def test_the_key_does_not_change_with_what_changes_no_number(version_with, module, old, new):
    assert version_with(module, old, new) == job.code_version.__wrapped__("transition")


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (transition, 'if cell.gamma == "M" else 1.0', 'if cell.gamma == "M" else 2.0'),
        (transition, "    members: int\n    gamma: str", "    members: int = 2\n    gamma: str"),
        (contract, "manual_seed(self.seed)", "manual_seed(self.seed + 1)"),
        (setting, "_read(setting).standardise()", "_read(setting)"),
        (setting, "lr: float = 0.003", "lr: float = 0.004"),
        (training, 'keep="last"', 'keep="best"'),
        (training, "isfinite().all(-1, keepdim=True)", "isfinite()"),
    ],
)
def test_the_key_changes_with_the_code_that_measures(version_with, module, old, new):
    assert version_with(module, old, new) != job.code_version.__wrapped__("transition")


def test_the_key_changes_with_constants_that_measure_uses_and_with_versions(monkeypatch):
    def version(name):
        return job.code_version.__wrapped__(name)

    before = {name: version(name) for name in ("transition", "mc-dropout")}
    monkeypatch.setattr(transition, "SHIFTS", {"quick": (0.0,)})
    assert version("transition") == before["transition"]
    monkeypatch.setattr(mc_dropout, "KINDS", {"fresh shifted": laws.Normal(1.0, 0.2)})
    assert version("mc-dropout") != before["mc-dropout"]
    monkeypatch.setattr(job.torch, "__version__", "1.0")
    assert version("transition") != before["transition"]


@pytest.mark.parametrize("constant", [object(), {"a": lambda x: x}, training])
def test_what_has_no_hash_is_refused(monkeypatch, constant):
    monkeypatch.setattr(transition, "regime", constant)
    with pytest.raises(TypeError, match="regime: code that measures may use functions, classes"):
        job.code_version.__wrapped__("transition")


@pytest.mark.parametrize("name", contract.NAMES)
def test_every_experiment_has_a_key(name):
    assert len(job.code_version.__wrapped__(name)) == 16
