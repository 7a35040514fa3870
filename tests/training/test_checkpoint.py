"""Checkpoints: an interrupted run continues bit for bit."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from collections import deque
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from training import problem
from training.problem import Interrupt, Stop

import embens
from embens.files import read_tree, write_tensors
from embens.training import (
    Accumulate,
    Autocast,
    Batches,
    Callback,
    Checkpoint,
    ClipGradients,
    CSVLog,
    EarlyStopping,
    KeepBest,
    KeepLast,
    Objective,
    ScheduleEveryStep,
    TimeLimit,
    WeightAveraging,
    fit,
)
from embens.training.checkpoint import FORMAT, describe

SETTINGS = {"epochs": 3, "batch_size": 16, "lr": 0.05}


def make() -> embens.EmbeddedEnsemble:
    net = problem.reference(dropout=0.3)
    generator = torch.Generator().manual_seed(1)
    return embens.embed(net, 3, generator=generator)


CALLBACKS = {
    "accumulate": lambda: Accumulate(2),
    "bfloat16": lambda: Autocast(torch.bfloat16),
    "float16": lambda: Autocast(torch.float16),
    "own batches": lambda: Batches("own"),
    "split batches": lambda: Batches("split"),
    "clip": lambda: ClipGradients(0.5),
    "early stopping": lambda: EarlyStopping(1, "loss"),
    "best": lambda: KeepBest(),
    "last": lambda: KeepLast(),
    "mean": lambda: Objective("mean"),
    "chunks": lambda: Objective(chunk=2),
    "every step": lambda: ScheduleEveryStep(),
    "time limit": lambda: TimeLimit(1e6),
    "average": lambda: WeightAveraging(0.5),
}
EXCLUDED = [
    {"own batches", "split batches"},
    {"own batches", "mean"},
    {"own batches", "chunks"},
    {"split batches", "mean"},
    {"split batches", "chunks"},
    {"mean", "chunks"},
    {"bfloat16", "float16"},
]
PAIRS = [pair for pair in itertools.combinations(CALLBACKS, 2) if set(pair) not in EXCLUDED]
SHORT = [pair for number, pair in enumerate(PAIRS) if number % 6 == 0]
"""The pairs that are part of the fast suite."""


def cases():
    yield pytest.param((), id="none")
    for name in CALLBACKS:
        yield pytest.param((name,), id=name)
    for pair in PAIRS:
        marks = [] if pair in SHORT else [pytest.mark.long]
        yield pytest.param(pair, id=" + ".join(pair), marks=marks)


def assert_resumes(folder, names=(), every=None, steps=7, **options):
    """Interrupt a run, continue it, and compare with an uninterrupted one."""
    settings = {"train": problem.data(), **SETTINGS, **options}

    def run(place, *more):
        ensemble = make()
        callbacks = [CALLBACKS[name]() for name in names]
        callbacks += [Checkpoint(folder / place, every), *more]
        return ensemble, fit(ensemble, **settings, callbacks=callbacks)

    whole, expected = run("whole")
    with pytest.raises(Stop):
        run("interrupted", Interrupt(steps))
    again, history = run("interrupted")
    problem.assert_equal(problem.weights(again), problem.weights(whole))
    assert repr(problem.without_time(history)) == repr(problem.without_time(expected))
    assert history.best_epoch == expected.best_epoch
    assert history.stopped == expected.stopped


@pytest.mark.parametrize("names", list(cases()))
def test_every_callback_and_every_pair_resumes_bit_for_bit(names, tmp_path):
    # With accumulated batches or early stopping, only two epochs and four steps are certain.
    is_short = {"accumulate", "early stopping"} & set(names)
    steps, every = (3, 2) if is_short else (7, 3)
    assert_resumes(tmp_path, names, every=every, steps=steps, validation=problem.data(20, 5))


LONG = pytest.mark.long
RUNS = {
    "sgd": {},
    "adam": {"optimizer": optim.Adam, "lr": 1e-3},
    "milestones": {"scheduler": partial(optim.lr_scheduler.MultiStepLR, milestones=[1, 2])},
    "plateau": {"scheduler": partial(optim.lr_scheduler.ReduceLROnPlateau, patience=0)},
    "cosine": {"scheduler": partial(optim.lr_scheduler.CosineAnnealingLR, T_max=4)},
    "data set": {"train": problem.Pairs(*problem.data(), noise=True)},
    "regression": {"train": (problem.data()[0], torch.randn(problem.ROWS, 3))},
}


@pytest.mark.parametrize("every", [pytest.param(None, marks=LONG), pytest.param(1, marks=LONG), 3])
@pytest.mark.parametrize("steps", [pytest.param(0, marks=LONG), 5, pytest.param(8, marks=LONG)])
@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS.keys())
def test_optimizers_schedulers_and_data_sets_resume_bit_for_bit(options, every, steps, tmp_path):
    assert_resumes(tmp_path, every=every, steps=steps, **options)


def test_an_optimizer_of_the_user_resumes_bit_for_bit(tmp_path):
    def run(folder, *more, **rates):
        ensemble = make()
        rates = {"lr": 0.05, "modulation_lr": 0.1, "weight_decay": 0.01} | rates
        optimizer = torch.optim.SGD(ensemble.parameter_groups(**rates), momentum=0.8)
        callbacks = [Checkpoint(tmp_path / folder, every=3), *more]
        options = {"epochs": 3, "batch_size": 16, "optimizer": optimizer}
        fit(ensemble, problem.data(), **options, callbacks=callbacks)
        return problem.weights(ensemble)

    whole = run("whole")
    with pytest.raises(Stop):
        run("interrupted", Interrupt(7))
    problem.assert_equal(run("interrupted"), whole)
    with pytest.raises(ValueError, match="is of a different run: optimizer was"):
        run("interrupted", modulation_lr=0.2)


def remembering(folder, *callbacks, past=None):
    generator = torch.Generator().manual_seed(1)
    ensemble = embens.batch_ensemble(problem.Remembering(past), 3, generator=generator)
    fit(ensemble, problem.data(), **SETTINGS, callbacks=[Checkpoint(folder, 2), *callbacks])
    return ensemble


def test_state_in_attributes_of_the_reference_resumes_bit_for_bit(tmp_path):
    whole = remembering(tmp_path / "whole")
    with pytest.raises(Stop):
        remembering(tmp_path / "interrupted", Interrupt(7))
    again = remembering(tmp_path / "interrupted")
    problem.assert_equal(problem.weights(again), problem.weights(whole))
    x, _ = problem.data(20, 9)
    assert torch.equal(again(x), whole(x))


def test_optimizers_with_different_states_of_matrices_and_vectors_resume(tmp_path):
    assert_resumes(tmp_path, every=2, optimizer=optim.Adafactor, lr=1e-2)


def test_state_that_a_checkpoint_cannot_hold_is_a_warning(tmp_path):
    with pytest.warns(UserWarning, match=r"keeps 'past' \(deque\), which a file cannot hold"):
        remembering(tmp_path, past=deque(maxlen=3))


def test_schedulers_by_step_resume_bit_for_bit(tmp_path):
    scheduler = partial(optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=40)
    assert_resumes(tmp_path, ["every step"], every=3, scheduler=scheduler)


def test_a_callback_with_another_setting_is_a_different_run(tmp_path):
    options = {"train": problem.data(), **SETTINGS}
    callbacks = [ClipGradients(0.5), Checkpoint(tmp_path)]
    fit(make(), **options, callbacks=callbacks)
    with pytest.raises(ValueError, match=r"ClipGradients\.norm was 0\.5, now it is 0\.6"):
        fit(make(), **options, callbacks=[ClipGradients(0.6), Checkpoint(tmp_path)])
    with pytest.raises(ValueError, match=r"ClipGradients\.norm was 0\.5, now it is null"):
        fit(make(), **options, callbacks=[Checkpoint(tmp_path)])
    callbacks = [ClipGradients(0.5), ScheduleEveryStep(), Checkpoint(tmp_path)]
    with pytest.raises(ValueError, match="options was"):
        fit(make(), **options, callbacks=callbacks)
    # Observers, time limits and the frequency of checkpoints do not change the result.
    observers = [TimeLimit(1e6), CSVLog(tmp_path / "log.csv"), Checkpoint(tmp_path, every=2)]
    fit(make(), **options, callbacks=[ClipGradients(0.5), *observers])


class Lazy(Callback):
    """A callback of the user that has no state before the first step."""

    def on_step(self, run):
        self.total = getattr(self, "total", 0) + run.steps

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


def test_a_callback_may_have_no_state_before_the_first_step(tmp_path):
    for stop in (Interrupt(5), None):
        lazy = Lazy()
        callbacks = [lazy, Checkpoint(tmp_path, every=1)]
        if stop is None:
            fit(make(), problem.data(), **SETTINGS, callbacks=callbacks)
            continue
        with pytest.raises(Stop):
            fit(make(), problem.data(), **SETTINGS, callbacks=[*callbacks, stop])
    assert lazy.total == sum(range(1, 13))


def stopped_run(folder: Path) -> list[Path]:
    callbacks = [Checkpoint(folder, every=3), Interrupt(10)]
    with pytest.raises(Stop):
        fit(make(), problem.data(), **SETTINGS, callbacks=callbacks)
    return sorted(folder.iterdir())


@functools.cache
def uninterrupted() -> dict[str, torch.Tensor]:
    ensemble = make()
    fit(ensemble, problem.data(), **SETTINGS)
    return problem.weights(ensemble)


def test_a_loader_resumes_from_the_end_of_an_epoch(tmp_path):
    def loader():
        generator = torch.Generator().manual_seed(3)
        dataset = TensorDataset(*problem.data())
        return DataLoader(dataset, 16, shuffle=True, generator=generator)

    whole, again = make(), make()
    fit(whole, loader(), epochs=4)
    callbacks = [Checkpoint(tmp_path, every=1), Interrupt(10)]
    with pytest.raises(Stop):
        fit(make(), loader(), epochs=4, callbacks=callbacks)
    assert {path.name[5:15] for path in tmp_path.iterdir()} == {"0000000004", "0000000008"}
    fit(again, loader(), epochs=4, callbacks=[Checkpoint(tmp_path, every=1)])
    problem.assert_equal(problem.weights(again), problem.weights(whole))


def test_a_finished_run_is_not_repeated(tmp_path):
    first, second = make(), make()
    data = problem.data(), problem.data(20, 5)
    expected = fit(first, *data, **SETTINGS, callbacks=[Checkpoint(tmp_path)])
    callbacks = [Checkpoint(tmp_path), Interrupt(0)]
    history = fit(second, *data, **SETTINGS, callbacks=callbacks)

    problem.assert_equal(problem.weights(first), problem.weights(second))
    assert history == expected


def test_two_files_are_kept_and_leftovers_removed(tmp_path):
    leftover = tmp_path / f".step-0000000001.safetensors.0123abcd-1-{0:08x}"
    leftover.write_bytes(b"half")
    os.utime(leftover, (0, 0))  # of another machine, long ago
    (tmp_path / "notes.txt").write_text("of the user")
    fit(make(), problem.data(), **SETTINGS, callbacks=[Checkpoint(tmp_path, every=5)])
    names = sorted(path.name for path in tmp_path.iterdir())

    assert names == ["notes.txt", "step-0000000010.safetensors", "step-0000000012.safetensors"]


def test_copies_of_a_user_are_neither_read_nor_removed(tmp_path):
    names = ["step-backup.safetensors", "step-0000000009-copy.safetensors"]
    for name in names:
        (tmp_path / name).write_bytes(b"copy")
    fit(make(), problem.data(), epochs=3, callbacks=[Checkpoint(tmp_path)])
    assert all((tmp_path / name).read_bytes() == b"copy" for name in names)


def damage_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def damage_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [damage_end, damage_middle, empty])
def test_a_damaged_file_is_refused_and_the_one_before_is_used(damage, tmp_path):
    again = make()
    _, last = stopped_run(tmp_path)
    damage(last)
    message = f"refused: {last.name} (is damaged|is not a whole|can't be read)"
    with pytest.warns(UserWarning, match=message):
        fit(again, problem.data(), **SETTINGS, callbacks=[Checkpoint(tmp_path, every=3)])

    problem.assert_equal(problem.weights(again), uninterrupted())


def test_a_refused_file_is_set_aside_and_not_overwritten(tmp_path):
    notes = tmp_path / "step-0000000003.safetensors"
    notes.write_text("notes of the user")
    with pytest.warns(UserWarning, match="checkpoint refused"):
        fit(make(), problem.data(), **SETTINGS, callbacks=[Checkpoint(tmp_path, every=3)])
    aside = tmp_path / "step-0000000003.safetensors.refused-1"

    assert aside.read_text() == "notes of the user"


def test_folders_and_broken_links_with_names_of_checkpoints_are_not_read(tmp_path):
    folder, link = (tmp_path / f"step-000000009{digit}.safetensors" for digit in (8, 9))
    folder.mkdir()
    link.symlink_to(tmp_path / "nowhere")
    ensemble = make()
    fit(ensemble, problem.data(), **SETTINGS, callbacks=[Checkpoint(tmp_path)])

    problem.assert_equal(problem.weights(ensemble), uninterrupted())
    assert folder.is_dir()
    assert link.is_symlink()


def test_foreign_files_are_refused_with_a_reason(tmp_path):
    def place(step: int, tensors: dict, metadata: dict | None) -> None:
        save_file(tensors, tmp_path / f"step-{step:010d}.safetensors", metadata)

    header = {"format": "embens checkpoint", "version": 99}
    torch.save({"a": 1}, tmp_path / "step-0000000098.safetensors")
    place(97, {"a": torch.zeros(2)}, None)
    place(96, {"a": torch.zeros(2)}, {"embens": json.dumps(header)})
    place(95, {"a": torch.zeros(2)}, {"embens": json.dumps({**header, "version": 6})})
    place(94, {"a": torch.zeros(2)}, {"embens": "{"})
    write_tensors(tmp_path / "step-0000000093.safetensors", FORMAT, {"tree": 1}, {})
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    again = make()
    with pytest.warns(UserWarning, match="checkpoint refused") as caught:
        fit(again, problem.data(), **SETTINGS, callbacks=[Checkpoint(tmp_path)])
    messages = [str(w.message) for w in caught]
    expected = [
        "not a whole safetensors file",
        "has no embens header",
        "format version 99, this embens reads 6",
        "another checksum",
        "JSONDecodeError",
        "the tree must be a dict, got 1",
    ]
    for text in expected:
        assert any(text in message for message in messages), text
    assert {"step-0000000008.safetensors", "step-0000000012.safetensors"} < {
        path.name for path in tmp_path.iterdir()
    }
    problem.assert_equal(problem.weights(again), uninterrupted())
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0.04}, "lr was 0.05, now it is 0.04"),
        ({"epochs": 2}, "epochs must be at least 3"),
        ({"seed": 1}, "seed was 0, now it is 1"),
        ({"gamma": 2}, "gamma was null, now it is 2"),
        ({"optimizer": optim.AdamW}, r'optimizer was \["SGD"'),
        ({"criterion": nn.CrossEntropyLoss()}, "criterion was null, now"),
        ({"train": problem.data(50)}, "batches or rows was 60, now it is 50"),
        ({"ensemble": embens.embed(problem.reference(), 4)}, "members was 3, now it is 4"),
        (
            {"ensemble": embens.embed(nn.Sequential(*problem.reference()[:4]), 3)},
            "is of a different run",
        ),
    ],
)
def test_a_checkpoint_of_a_different_run_raises(change, message, tmp_path):
    stopped_run(tmp_path)
    options = {"ensemble": make(), "train": problem.data(), **SETTINGS, **change}
    with pytest.raises(ValueError, match=message):
        fit(**options, callbacks=[Checkpoint(tmp_path)])


def test_a_checkpoint_of_an_ensemble_with_another_law_raises(tmp_path):
    net, shifted = problem.reference(), embens.laws.Shifted(0.0)
    first = embens.batch_ensemble(net, 3, p=0.0)
    others = [
        embens.batch_ensemble(net, 3, p=0.9),
        embens.embed(net, 3, pre=shifted, post=shifted, trainable={"pre": False}),
    ]
    options = {"train": problem.data(), **SETTINGS, "gamma": 1.0}
    fit(first, **options, callbacks=[Checkpoint(tmp_path)])

    for other in others:
        with pytest.raises(ValueError, match="is of a different run"):
            fit(other, **options, callbacks=[Checkpoint(tmp_path)])


def test_a_file_in_place_of_the_folder_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="expected a folder"):
        Checkpoint(tmp_path / "file")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(NotADirectoryError, match="broken link"):
        Checkpoint(tmp_path / "link")
    with pytest.raises(ValueError, match="every must be"):
        Checkpoint(tmp_path, every=0)


def test_a_checkpoint_holds_tensors_and_json_only(tmp_path):
    path, _ = stopped_run(tmp_path)
    assert all(isinstance(value, torch.Tensor) for value in load_file(path).values())
    content = read_tree(path, FORMAT)
    assert content["run"]["members"] == 3
    assert content["state"]["steps"] == 6


def test_a_second_run_on_the_same_folder_raises_and_harms_nothing(tmp_path):
    def second(*_):
        owner = f"is in use by process {os.getpid()} on"
        with pytest.raises(BlockingIOError, match=rf"the checkpoint folder '.*' {owner}"):
            fit(make(), problem.data(), **SETTINGS, callbacks=[Checkpoint(tmp_path)])

    first = make()
    fit(first, problem.data(), **SETTINGS, callbacks=[Checkpoint(tmp_path), second])
    problem.assert_equal(problem.weights(first), uninterrupted())
    assert not (tmp_path / ".lock").exists()


def test_the_lock_is_released_after_an_error(tmp_path):
    stopped_run(tmp_path)
    assert not (tmp_path / ".lock").exists()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (0.5, 0.5),
        (math.nan, "nan"),
        ((1, "a", [True]), [1, "a", [True]]),
        ({"a": (1, 2)}, {"a": [1, 2]}),
        (torch.arange(2), [0, 1]),
        (torch.zeros(40, 40), [40, 40]),
        (torch.bfloat16, "torch.bfloat16"),
        (F.mse_loss, "torch.nn.functional.mse_loss"),
        (
            partial(F.mse_loss, reduction="sum"),
            ["torch.nn.functional.mse_loss", [], [["reduction", "sum"]]],
        ),
        (nn.MSELoss(), ["MSELoss()"]),
        (problem, "module"),
    ],
)
def test_settings_are_described_as_json(value, expected):
    assert describe(value) == expected


SCRIPT = """
import os, signal, sys, time
import torch
from training import problem
import embens
from embens.training import Checkpoint, fit

torch.set_num_threads(1)


def train(folder, result):
    net = problem.reference(dropout=0.3)
    ensemble = embens.embed(net, 3, generator=torch.Generator().manual_seed(1))
    history = fit(ensemble, problem.data(), problem.data(20, 5), epochs=50, batch_size=16, lr=0.05,
                  callbacks=[Checkpoint(folder, every=3)])
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
    expected = torch.load(tmp_path / "whole.pt")
    resumed = torch.load(tmp_path / "killed.pt")
    problem.assert_equal(resumed["model"], expected["model"])
    assert torch.equal(resumed["rows"].nan_to_num(-9), expected["rows"].nan_to_num(-9))
    assert not [p for p in (tmp_path / "killed").iterdir() if p.name.startswith(".")]


def test_a_run_continues_from_whichever_checkpoint_is_left(tmp_path):
    stopped_run(tmp_path / "both")
    files = sorted((tmp_path / "both").iterdir())
    for kept in ([0], [1], []):
        folder = tmp_path / f"kept{kept}"
        folder.mkdir()
        for index in kept:
            shutil.copy(files[index], folder)
        again = make()
        fit(again, problem.data(), **SETTINGS, callbacks=[Checkpoint(folder, every=3)])
        problem.assert_equal(problem.weights(again), uninterrupted())


@pytest.mark.parametrize("source", ["tensors", "loader"])
def test_a_finished_run_continues_with_more_epochs(source, tmp_path):
    def train():
        if source == "tensors":
            return problem.data()
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*problem.data()), 16)

    ensemble = make()
    history = fit(ensemble, train(), epochs=2, batch_size=16, callbacks=[Checkpoint(tmp_path)])
    before = problem.weights(ensemble)
    longer = fit(make(), train(), epochs=2, batch_size=16, callbacks=[Checkpoint(tmp_path)])
    assert len(longer.epochs) == 2
    ensemble = make()
    longer = fit(ensemble, train(), epochs=6, batch_size=16, callbacks=[Checkpoint(tmp_path)])
    assert problem.without_time(longer)[:2] == problem.without_time(history)[:2]
    assert [row["epoch"] for row in longer.epochs] == [1, 2, 3, 4, 5, 6]
    assert any(not torch.equal(before[name], t) for name, t in problem.weights(ensemble).items())
    # From then on the schedule is that of six epochs.
    whole = fit(make(), train(), epochs=6, batch_size=16)
    assert [r["lr"] for r in longer.epochs[2:]] == [r["lr"] for r in whole.epochs[2:]]


def test_an_extended_run_with_a_constant_rate_equals_one_long_run(tmp_path):
    options = {"train": problem.data(), "batch_size": 16, "scheduler": constant_rate}
    whole, parts = make(), make()
    fit(whole, epochs=4, **options)
    fit(make(), epochs=2, callbacks=[Checkpoint(tmp_path)], **options)
    fit(parts, epochs=4, callbacks=[Checkpoint(tmp_path)], **options)

    problem.assert_equal(problem.weights(parts), problem.weights(whole))


def constant_rate(optimizer):
    return optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)


def test_a_run_whose_rates_drift_from_gamma_continues(tmp_path):
    def make_scheduler(optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4, eta_min=0.05)

    arguments = {"lr": 0.1, "scheduler": make_scheduler, "callbacks": [Checkpoint(tmp_path)]}
    with pytest.warns(UserWarning, match="so gamma changes"):
        fit(problem.ensemble(p=0.9), problem.data(), epochs=4, **arguments)
    ensemble = problem.ensemble(p=0.9)
    # A checkpoint that is refused is a warning, and warnings are errors here.
    history = fit(ensemble, problem.data(), epochs=4, **arguments)
    assert len(history.epochs) == 4
