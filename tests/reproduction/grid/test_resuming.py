"""Cells that are killed in the middle of training continue bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from reproduction import baselines
from reproduction.grid import runs
from reproduction.grid.cells import Cell
from reproduction.grid.engines import inline, local, visible_gpus
from reproduction.grid.results import Results
from reproduction.grid.settings import PRESETS
from reproduction.training import MemberTest, checkpoint_folder
from tests.reproduction import problem

ROOT = Path(__file__).parents[3]
EPOCHS = 40
SETTINGS = {
    "cpu": replace(PRESETS["cpu"], channels=(4, 4, 8, 8), rates=()),
    # As on a GPU: bfloat16, channels last, members in chunks.
    "gpu": replace(PRESETS["gpu"], channels=(4, 4, 8, 8), chunk=1, augment=4),
}


def cell_of(preset, epochs=EPOCHS):
    setting = replace(
        SETTINGS[preset], epochs=epochs, train=96, validation=0, test=32, batch_size=32, image=16
    )
    values = {"gamma": "M", "width": 1.0, "members": 2, "seed": 0}
    return Cell(setting, values, "trajectories")


def run(preset, folder, epochs=EPOCHS):
    """Measure one cell, which may have been interrupted before."""
    results = Results(folder)
    runs.run("trajectories", [cell_of(preset, epochs)], results, inline)
    (record,) = results.records.values()
    assert "error" not in record, record
    return record["rows"]


def kill_in_the_middle(preset, folder):
    script = (
        "import sys; from pathlib import Path; from tests.reproduction.grid import test_resuming;"
        "test_resuming.run(sys.argv[1], Path(sys.argv[2]))"
    )
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(ROOT / "tests")])
    process = subprocess.Popen(
        [sys.executable, "-c", script, preset, str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
    )
    end = time.monotonic() + 120
    while len(list(folder.rglob("step-*.safetensors"))) < 2:
        assert process.poll() is None, "the process ended before it was killed"
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("preset", SETTINGS)
def test_a_killed_cell_continues_bit_for_bit(preset, small_cifar, tmp_path, monkeypatch):
    kill_in_the_middle(preset, tmp_path / "killed")
    assert not Results(tmp_path / "killed").records
    epochs = []
    original = MemberTest.on_epoch

    def count(self, run, record):
        epochs.append(record["epoch"])
        original(self, run, record)

    monkeypatch.setattr(MemberTest, "on_epoch", count)
    resumed = run(preset, tmp_path / "killed")
    assert 1 not in epochs
    assert epochs[-1] == EPOCHS
    assert not list((tmp_path / "killed").rglob("step-*"))
    uninterrupted = run(preset, tmp_path / "whole")
    assert len(resumed) == EPOCHS
    assert resumed == uninterrupted


@pytest.mark.parametrize("preset", SETTINGS)
def test_finished_trainings_of_a_stopped_cell_are_not_repeated(
    preset, small_cifar, tmp_path, monkeypatch
):
    # Baselines without a recorded rate train four times: three rates, and the best one again.
    setting = replace(cell_of(preset, epochs=2).setting, rates=(), train=32)
    values = {"width": 1.0, "networks": 8, "seed": 0}
    cell = Cell(setting, values, "baselines", checkpoints=str(tmp_path))
    epochs = []
    original = MemberTest.on_epoch

    def stop_in_the_third_training(self, run, record):
        epochs.append(record["epoch"])
        original(self, run, record)
        if len(epochs) == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(MemberTest, "on_epoch", stop_in_the_third_training)
    with pytest.raises(KeyboardInterrupt):
        baselines.measure(cell)
    resumed = baselines.measure(cell)
    # The stopped epoch is repeated: its state is written after the callbacks.
    assert epochs == [1, 2, 1, 2, 1, 2, *[2, 1, 2]]
    assert str(resumed) == str(baselines.measure(replace(cell, checkpoints="")))


def test_digits_are_not_worth_a_checkpoint(tmp_path, small_cifar):
    assert runs.with_checkpoints(problem.cells(1)[0], tmp_path).checkpoints == ""
    cell = runs.with_checkpoints(cell_of("cpu"), tmp_path)
    assert cell.checkpoints.startswith(str(tmp_path.resolve()))
    assert cell == cell_of("cpu")


def test_each_training_of_a_cell_has_a_folder(tmp_path):
    cell = replace(problem.cells(1)[0].with_values(members=2), checkpoints=str(tmp_path))
    ensembles = [cell.with_values(seed=seed).build_ensemble(_family) for seed in (0, 0, 1)]
    names = [checkpoint_folder(cell, ensemble, "facts") for ensemble in ensembles]
    assert names[0] == names[1] != names[2]
    assert checkpoint_folder(cell, ensembles[0], "other facts") != names[0]


def _family(network, members, generator):
    from embens import batch_ensemble

    return batch_ensemble(network, members, generator=generator)


class ReportsGPU(Cell):
    """A cell whose measurement writes which GPU its process sees."""

    def __getitem__(self, axis):
        if axis == "gamma":
            gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            (Path(self["mark"]) / f"{self['members']}").write_text(gpu)
            time.sleep(0.5)  # so that one worker does not measure all cells
        return super().__getitem__(axis)


def test_each_worker_sees_one_gpu(tmp_path):
    cells = [problem.cell_of(m, kind=ReportsGPU, mark=str(tmp_path)) for m in (1, 2, 3, 4)]
    outcomes = list(local(cells, workers=2, gpus=["3", "5"]))
    assert len(outcomes) == 4
    assert {path.read_text() for path in tmp_path.iterdir()} == {"3", "5"}


def test_gpus_are_those_that_the_environment_allows(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-7")
    assert visible_gpus() == ["2", "GPU-7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert visible_gpus() == ["0", "1"]
