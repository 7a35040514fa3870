"""Checkpoints: a run that is stopped anywhere ends as if it had not been."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import optim
from torch.utils.data import DataLoader, TensorDataset
from training import problem

import embens
from embens.files import read_tree, write_tensors
from embens.training import fit
from embens.training.checkpoint import FORMAT, Checkpoints


class Stop(Exception):
    pass


def criterion(outputs, target):
    """Cross-entropy one member at a time, as ``stopping`` has it, so that bits can be compared."""
    return torch.nn.functional.cross_entropy(outputs, target)


def stopping(after: int):
    """Return a criterion that stops the run at some call."""
    calls = []

    def stop(outputs, target):
        calls.append(1)
        if len(calls) > after:
            raise Stop
        return criterion(outputs, target)

    stop.__module__, stop.__qualname__ = criterion.__module__, criterion.__qualname__
    return stop


def make() -> embens.EmbeddedEnsemble:
    net = problem.reference(dropout=0.3)
    generator = torch.Generator().manual_seed(1)
    return embens.embed(net, 3, generator=generator)


SETTINGS = {"epochs": 4, "batch_size": 16, "lr": 0.05, "criterion": criterion}
RUNS = {
    "sgd": {},
    "validation": {"validation": problem.data(20, 5), "patience": 3},
    "adam": {"optimizer": optim.Adam, "lr": 1e-3},
    "milestones": {"scheduler": partial(optim.lr_scheduler.MultiStepLR, milestones=[1, 2])},
    "plateau": {"scheduler": partial(optim.lr_scheduler.ReduceLROnPlateau, patience=0)},
    "cosine": {"scheduler": partial(optim.lr_scheduler.CosineAnnealingLR, T_max=4)},
    "by step": {
        "scheduler": partial(optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=40),
        "schedule_by": "step",
    },
    "clipped": {"clip": 0.5},
    "averaged": {"average": 0.5},
    "accumulated": {"accumulate": 3, "batch_size": 4},
    "bfloat16": {"autocast": torch.bfloat16},
    "float16": {"autocast": torch.float16, "optimizer": optim.Adam, "lr": 1e-3},
    "bfloat16 in chunks": {"autocast": torch.bfloat16, "chunk": 2, "clip": 1.0},
    "own batches": {"batch": "own"},
    "chunks": {"chunk": 2},
    "data set": {"train": list(zip(*problem.data(), strict=True))},
}


REPEATS = ("milestones", "cosine", "bfloat16", "chunks")  # what others of the runs have in them


@pytest.mark.parametrize("every", [pytest.param(None, marks=pytest.mark.long), 3])
@pytest.mark.parametrize(
    "options",
    [pytest.param(v, id=k, marks=[pytest.mark.long] * (k in REPEATS)) for k, v in RUNS.items()],
)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(options, every, tmp_path):
    options = {"train": problem.data(), **SETTINGS, **options}
    if isinstance(options["train"], list):
        options["train"] = _Items(options["train"])
    whole = make()
    expected = fit(whole, checkpoint=tmp_path / "whole", every=every, **options)
    for moment in (1, 20, 31, 40):  # calls of the criterion: three for each of 16 steps
        folder = tmp_path / str(moment)
        stopped = options | {"criterion": stopping(moment)}
        with pytest.raises(Stop):
            fit(make(), checkpoint=folder, every=every, **stopped)
        again = make()
        found = fit(again, checkpoint=folder, every=every, **options)
        problem.assert_equal(problem.weights(again), problem.weights(whole))
        assert repr(problem.without_time(found)) == repr(problem.without_time(expected))
        assert found.best_epoch == expected.best_epoch


class _Items:
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def test_a_loader_goes_on_from_its_last_epoch(tmp_path):
    def loader():
        generator = torch.Generator().manual_seed(3)
        dataset = TensorDataset(*problem.data())
        return DataLoader(dataset, 16, shuffle=True, generator=generator)

    whole, again = make(), make()
    fit(whole, loader(), epochs=4, criterion=criterion)
    with pytest.raises(Stop):
        fit(make(), loader(), epochs=4, criterion=stopping(31), checkpoint=tmp_path, every=1)
    assert {path.name[5:15] for path in tmp_path.iterdir()} == {"0000000004", "0000000008"}
    fit(again, loader(), epochs=4, criterion=criterion, checkpoint=tmp_path, every=1)
    problem.assert_equal(problem.weights(again), problem.weights(whole))


def test_a_run_that_is_done_is_not_done_again(tmp_path):
    first, second = make(), make()
    options = {**SETTINGS, "checkpoint": tmp_path, "validation": problem.data(20, 5)}
    expected = fit(first, problem.data(), **options)
    found = fit(second, problem.data(), **options | {"criterion": stopping(0)})
    problem.assert_equal(problem.weights(first), problem.weights(second))
    assert found == expected


def test_two_files_are_kept_and_leftovers_removed(tmp_path):
    leftover = tmp_path / f".step-0000000001.safetensors.0123abcd-1-{0:08x}"
    leftover.write_bytes(b"half")
    os.utime(leftover, (0, 0))  # of another machine, long ago
    other = tmp_path / "notes.txt"
    other.write_text("not ours")
    fit(make(), problem.data(), **SETTINGS, checkpoint=tmp_path, every=3)
    names = sorted(path.name[:15] for path in tmp_path.glob("step-*"))
    assert names == ["step-0000000015", "step-0000000016"]
    assert sorted(p.name for p in tmp_path.iterdir() if "step" not in p.name) == ["notes.txt"]


def stopped_run(folder: Path) -> list[Path]:
    with pytest.raises(Stop):
        fit(
            *(make(), problem.data()),
            **SETTINGS | {"criterion": stopping(31)},
            checkpoint=folder,
            every=3,
        )
    return sorted(folder.iterdir())


def damage_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def damage_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def test_a_copy_that_someone_made_is_neither_read_nor_removed(tmp_path):
    checkpoints = Checkpoints(tmp_path, {})
    names = ["step-backup.safetensors", "step-0000000009-copy.safetensors"]
    for name in names:
        (tmp_path / name).write_bytes(b"mine")
    assert checkpoints.load_last() is None
    fit(problem.ensemble(), problem.data(), epochs=3, checkpoint=tmp_path, progress=False)
    assert all((tmp_path / name).read_bytes() == b"mine" for name in names)


@pytest.mark.parametrize("damage", [damage_end, damage_middle, empty])
def test_a_damaged_file_is_refused_and_the_one_before_is_used(damage, tmp_path):
    whole, again = make(), make()
    fit(whole, problem.data(), **SETTINGS)
    _, last = stopped_run(tmp_path)
    damage(last)
    refused = f"refused: {last.name} (is damaged|is not a whole|can't be read)"
    with pytest.warns(UserWarning, match=refused):
        fit(again, problem.data(), **SETTINGS, checkpoint=tmp_path, every=3)
    problem.assert_equal(problem.weights(again), problem.weights(whole))


def test_foreign_files_are_refused_with_a_reason(tmp_path):
    def place(step: int, tensors: dict, metadata: dict | None) -> None:
        save_file(tensors, tmp_path / f"step-{step:010d}.safetensors", metadata)

    header = {"format": "embens checkpoint", "version": 99}
    old = tmp_path / "step-0000000099-0123456789abcdef.safetensors"  # the name that version 2 has
    save_file({}, old, {"embens": json.dumps({**header, "version": 2})})
    torch.save({"a": 1}, tmp_path / "step-0000000098.safetensors")
    place(97, {"a": torch.zeros(2)}, None)
    place(96, {"a": torch.zeros(2)}, {"embens": json.dumps(header)})
    place(95, {"a": torch.zeros(2)}, {"embens": json.dumps({**header, "version": 4})})
    place(94, {"a": torch.zeros(2)}, {"embens": "{"})
    write_tensors(tmp_path / "step-0000000093.safetensors", FORMAT, {"tree": 1}, {})
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    whole, again = make(), make()
    fit(whole, problem.data(), **SETTINGS)
    with pytest.warns(UserWarning, match="checkpoint refused") as caught:
        fit(again, problem.data(), **SETTINGS, checkpoint=tmp_path)
    messages = [str(w.message) for w in caught]
    expected = [
        "format version 2, this embens reads 4",
        "not a whole safetensors file",
        "has no embens header",
        "format version 99, this embens reads 4",
        "another checksum",
        "JSONDecodeError",
        "TypeError",
    ]
    assert [any(e in m for m in messages) for e in expected] == [True] * 7
    assert {"step-0000000012.safetensors", "step-0000000016.safetensors"} < {
        path.name for path in tmp_path.iterdir()
    }
    problem.assert_equal(problem.weights(again), problem.weights(whole))
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0.04}, "lr was 0.05, now it is 0.04"),
        ({"epochs": 5}, "epochs was 4, now it is 5"),
        ({"seed": 1}, "seed was 0, now it is 1"),
        ({"gamma": 2}, "gamma was 3.0, now it is 2.0"),
        ({"optimizer": optim.AdamW}, 'optimizer was {"name": "SGD"'),
        (
            {"criterion": torch.nn.CrossEntropyLoss()},
            'criterion was ".*test_checkpoint.criterion", now',
        ),
        ({"train": problem.data(50)}, "batches or rows was 60, now it is 50"),
        ({"ensemble": embens.embed(problem.reference(), 4)}, "members was 3, now it is 4"),
    ],
)
def test_a_checkpoint_of_a_different_run_is_an_error(change, message, tmp_path):
    stopped_run(tmp_path)
    options = {"ensemble": make(), "train": problem.data(), **SETTINGS, **change}
    with pytest.raises(ValueError, match=message):
        fit(**options, checkpoint=tmp_path)
    wider = embens.embed(torch.nn.Sequential(*problem.reference()[:4]), 3)
    with pytest.raises(ValueError, match="is of a different run"):
        fit(wider, problem.data(), **SETTINGS, checkpoint=tmp_path)


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="expected a folder"):
        fit(make(), problem.data(), epochs=1, checkpoint=tmp_path / "file")


def test_a_checkpoint_holds_tensors_and_json_alone(tmp_path):
    path = Checkpoints(tmp_path, {"a": 1}).save(7, {"x": torch.ones(3), "y": [1, "z"]})
    assert next(iter(load_file(path).values())).tolist() == [1, 1, 1]
    content = read_tree(path, FORMAT)
    assert content["run"] == {"a": 1}
    assert content["state"]["y"] == [1, "z"]


def test_a_second_run_on_a_folder_is_told_who_has_it_and_harms_nothing(tmp_path):
    def second(*_):
        whose = f"is in use by process {os.getpid()} on"
        with pytest.raises(BlockingIOError, match=rf"the checkpoint folder '.*' {whose}"):
            fit(make(), problem.data(), **SETTINGS, checkpoint=tmp_path)

    whole, first = make(), make()
    fit(whole, problem.data(), **SETTINGS)
    fit(first, problem.data(), **SETTINGS, checkpoint=tmp_path, callbacks=[second])
    problem.assert_equal(problem.weights(first), problem.weights(whole))
    assert not (tmp_path / ".lock").exists()


SCRIPT = """
import os, signal, sys, time
import torch
from training import problem
import embens
from embens.training import fit

torch.set_num_threads(1)


def train(folder, result):
    net = problem.reference(dropout=0.3)
    ensemble = embens.embed(net, 3, generator=torch.Generator().manual_seed(1))
    history = fit(ensemble, problem.data(), problem.data(20, 5), epochs=50, batch_size=16, lr=0.05,
                  checkpoint=folder, every=3)
    rows = [[r["loss"], r["validation_loss"], r["correlation"]] for r in history.epochs]
    torch.save({"model": ensemble.state_dict(), "rows": torch.tensor(rows)}, result)


def start(*arguments):
    process = os.fork()  # nothing was computed yet, so there are no threads to lose
    if process == 0:
        try:
            train(*arguments)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return process


folder = sys.argv[1]
whole = start(f"{folder}/whole", f"{folder}/whole.pt")
assert os.waitpid(whole, 0)[1] == 0
kills, delay = 0, 0.02
while True:
    process = start(f"{folder}/killed", f"{folder}/killed.pt")
    deadline = time.monotonic() + delay
    done = 0
    while not done and (kills == 12 or time.monotonic() < deadline):
        time.sleep(0.002)
        done, status = os.waitpid(process, os.WNOHANG)
    if done:
        break
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    kills, delay = kills + 1, delay + 0.017
assert status == 0, status
print(kills)
"""


@pytest.mark.skipif(os.name != "posix", reason="there is no SIGKILL")
def test_a_run_killed_at_any_moment_and_started_again_gives_the_same_bits(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 3
    expected, found = (torch.load(tmp_path / f"{name}.pt") for name in ("whole", "killed"))
    problem.assert_equal(found["model"], expected["model"])
    assert torch.equal(found["rows"].nan_to_num(-9), expected["rows"].nan_to_num(-9))
    assert not [p for p in (tmp_path / "killed").iterdir() if p.name.startswith(".")]


def test_killing_between_any_two_files_leaves_a_good_one(tmp_path):
    """At every moment the folder holds a whole checkpoint: whatever is left of it, the run ends."""
    whole = make()
    fit(whole, problem.data(), **SETTINGS)
    stopped_run(tmp_path / "both")
    for keep in ([0], [1], []):
        folder = tmp_path / f"keep{keep}"
        folder.mkdir()
        files = sorted((tmp_path / "both").iterdir())
        for index in keep:
            shutil.copy(files[index], folder)
        again = make()
        fit(again, problem.data(), **SETTINGS, checkpoint=folder, every=3)
        problem.assert_equal(problem.weights(again), problem.weights(whole))


def test_a_checkpoint_of_an_ensemble_with_another_law_is_refused(tmp_path):
    net = problem.reference()
    fit(embens.batch_ensemble(net, 3, p=0.0), problem.data(), **SETTINGS, gamma=1.0,
        checkpoint=tmp_path)  # fmt: skip
    for other in (
        embens.batch_ensemble(net, 3, p=0.9),
        embens.embed(net, 3, pre=embens.laws.Shifted(0.0), post=embens.laws.Shifted(0.0),
                     trainable={"pre": False}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="is of a different run"):
            fit(other, problem.data(), **SETTINGS, gamma=1.0, checkpoint=tmp_path)
