"""The callback protocol, and callbacks that act during a run."""

from __future__ import annotations

import csv
import math
import time

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from training import problem

import embens
from embens import laws
from embens.training import (
    Callback,
    Checkpoint,
    ClipGradients,
    CSVLog,
    KeepBest,
    Log,
    TimeLimit,
    WeightAveraging,
    clip_gradients_,
    fit,
)

SETTINGS = {"epochs": 4, "batch_size": 16, "lr": 0.05}


def make():
    return problem.ensemble(dropout=0.3)


def test_a_callback_sees_steps_epochs_and_the_end_and_changes_nothing():
    plain, watched, recorder = make(), make(), problem.Recorder()
    fit(plain, problem.data(), **SETTINGS)
    history = fit(watched, problem.data(), **SETTINGS, callbacks=[recorder])
    problem.assert_equal(problem.weights(plain), problem.weights(watched))
    assert [steps for _, _, steps in recorder.steps] == list(range(1, 17))
    assert [epoch for epoch, _, _ in recorder.steps] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    sizes = [16, 16, 16, 12]
    mean = sum(n * loss for n, loss in zip(sizes, recorder.losses[:4], strict=True)) / 60
    assert mean == pytest.approx(history.epochs[0]["loss"], rel=1e-5)
    assert recorder.rates[0]["lr"] == history.epochs[0]["lr"]
    assert repr(recorder.epochs) == repr(history.epochs)
    assert recorder.ends == [history]


def test_a_function_is_called_after_each_epoch_and_changes_nothing():
    plain, watched, records = make(), make(), []

    def callback(ensemble, record):
        assert ensemble is watched
        torch.rand(())
        records.append(record)

    fit(plain, problem.data(), **SETTINGS)
    history = fit(watched, problem.data(), **SETTINGS, callbacks=[callback])
    problem.assert_equal(problem.weights(plain), problem.weights(watched))
    assert repr(records) == repr(history.epochs)


def test_a_callback_that_changes_training_shares_the_random_generators():
    class Noise(Callback):
        changes_training = True

        def on_gradients(self, run):
            torch.rand(1)

    plain, changed = make(), make()
    fit(plain, problem.data(), **SETTINGS)
    fit(changed, problem.data(), **SETTINGS, callbacks=[Noise()])
    with pytest.raises(AssertionError):
        problem.assert_equal(problem.weights(plain), problem.weights(changed))


class Misspelled(Callback):
    def on_epochs(self, run, record):
        pass


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ([3], "expected objects of a subclass of embens.training.Callback.* got 3"),
        ([problem.Recorder], "expected objects of a subclass"),
        ([Misspelled()], "Misspelled has an unknown on_epochs; did you mean 'on_epoch'"),
        (problem.Recorder(), "expected a list of callbacks, got Recorder"),
    ],
)
def test_objects_that_would_not_be_called_raise(callbacks, message):
    with pytest.raises(TypeError, match=message):
        fit(make(), problem.data(), epochs=1, callbacks=callbacks)


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("every", [None, 3])
@pytest.mark.parametrize("steps", [1, 10])
def test_the_table_of_a_resumed_run_has_every_row_once(every, steps, tmp_path):
    path, whole = tmp_path / "log.csv", tmp_path / "whole.csv"
    callbacks = [Checkpoint(tmp_path / "run", every), CSVLog(path)]
    interrupted = [*callbacks, problem.Interrupt(steps)]
    with pytest.raises(problem.Stop):
        fit(make(), problem.data(), **SETTINGS, callbacks=interrupted)
    if path.exists():
        path.write_text(path.read_text() + "1,2,half a ro")
    callbacks = [Checkpoint(tmp_path / "run", every), CSVLog(path)]
    fit(make(), problem.data(), **SETTINGS, callbacks=callbacks)
    fit(make(), problem.data(), **SETTINGS, callbacks=[CSVLog(whole)])
    rows, expected = rows_of(path), rows_of(whole)
    assert len(rows) == 4
    for row in rows + expected:
        row.pop("seconds", None)
    assert rows == expected


def test_one_table_serves_several_runs_and_a_foreign_file_is_kept(tmp_path):
    table = CSVLog(tmp_path / "log.csv")
    for _ in range(2):
        fit(make(), problem.data(), **SETTINGS, callbacks=[table])
        assert [row["epoch"] for row in rows_of(table.path)] == ["1", "2", "3", "4"]
    other = tmp_path / "data.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="other columns"):
        fit(make(), problem.data(), **SETTINGS, callbacks=[CSVLog(other)])
    assert other.read_text() == "a,b\n1,2\n"


@pytest.mark.parametrize("rows", [b"\xff\xfe\x00", b"epoch,loss\n", b"one,2\n", b"\n"])
def test_a_file_that_no_run_wrote_is_kept(rows, tmp_path):
    path = tmp_path / "log.csv"
    if not rows.startswith(b"\xff"):
        fit(make(), problem.data(), **SETTINGS, callbacks=[CSVLog(path)])
        rows = path.read_bytes() + rows
    path.write_bytes(rows)
    with pytest.raises(ValueError, match="of this run"):
        fit(make(), problem.data(), **SETTINGS, callbacks=[CSVLog(path)])
    assert path.read_bytes() == rows


class Logger:
    def __init__(self):
        self.seen = []

    def log(self, record):
        self.seen.append(record)


class Writer(Logger):
    def add_scalar(self, name, value, step):
        self.seen.append((name, value, step))


def test_loggers_and_writers_get_the_records():
    logger, writer = Logger(), Writer()
    callbacks = [Log(logger), Log(writer)]
    history = fit(make(), problem.data(), **SETTINGS, callbacks=callbacks)
    assert repr(logger.seen) == repr(history.epochs)
    losses = [entry for entry in writer.seen if entry[0] == "loss"]
    assert [step for *_, step in losses] == [1, 2, 3, 4]
    with pytest.raises(TypeError, match=r"log\(dict\) or add_scalar; got list"):
        Log([])


class Counter(Callback):
    steps = 0

    def on_step(self, run):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def test_the_state_of_a_callback_is_saved_in_checkpoints(tmp_path):
    callbacks = [Counter(), Checkpoint(tmp_path, every=3), problem.Interrupt(10)]
    with pytest.raises(problem.Stop):
        fit(make(), problem.data(), **SETTINGS, callbacks=callbacks)
    first, second = Counter(), Counter()
    callbacks = [Checkpoint(tmp_path, every=3), first, second]
    fit(make(), problem.data(), **SETTINGS, callbacks=callbacks)
    assert first.steps == 16
    assert second.steps == 16 - 9  # it has no state in the checkpoint of step 9


def test_the_average_follows_the_recursion():
    ensemble = problem.ensemble()
    means = problem.weights(ensemble)

    class Average(Callback):
        def on_step(self, run):
            for name, weight in problem.weights(run.ensemble).items():
                means[name] += (weight - means[name]) / min(2 * 4, 1 + run.steps / 9)

    callbacks = [WeightAveraging(2.0), Average()]
    fit(ensemble, problem.data(), epochs=12, batch_size=16, lr=0.05, callbacks=callbacks)
    for name, tensor in problem.weights(ensemble).items():
        torch.testing.assert_close(tensor, means[name])


def test_the_average_is_validated_and_its_best_epoch_is_kept():
    train, validation = problem.data(), problem.data(40, 9)

    def run(*callbacks):
        seen = []

        def metric(outputs, target):
            seen.append(outputs.clone())
            return [3, 1, 2, 4][len(seen) - 1]

        ensemble = problem.ensemble()
        callbacks = [KeepBest(metric, maximise=False), *callbacks]
        fit(ensemble, train, validation, epochs=4, batch_size=16, lr=0.05, callbacks=callbacks)
        torch.testing.assert_close(ensemble(validation[0]), seen[1])
        return seen[1]

    difference = run(WeightAveraging(1.0)) - run()
    assert difference.abs().max() > 0.01


def test_statistics_of_norm_layers_are_copied():
    reference = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    )
    buffers = []
    for callbacks in ([], [WeightAveraging(1.0)]):
        generator = torch.Generator().manual_seed(1)
        ensemble = embens.batch_ensemble(reference, 2, generator=generator)
        fit(ensemble, problem.data(), epochs=2, batch_size=20, callbacks=callbacks)
        buffers.append(list(ensemble.buffers()))
    for plain, averaged in zip(*buffers, strict=True):
        torch.testing.assert_close(plain, averaged)


def test_a_loader_of_unknown_length_raises():
    loader = DataLoader(TensorDataset(*problem.data()), 16)
    batches = (batch for batch in loader)
    with pytest.raises(ValueError, match="the length of this loader is unknown"):
        fit(problem.ensemble(), batches, epochs=1, callbacks=[WeightAveraging(1.0)])


def test_a_length_that_is_not_positive_raises():
    with pytest.raises(ValueError, match="epochs must be a number above 0"):
        WeightAveraging(-1.0)


def gradients(ensemble, x, y):
    ensemble.zero_grad()
    embens.objective(ensemble(x), y).backward()
    return {name: p.grad.clone() for name, p in ensemble.named_parameters()}


@pytest.mark.parametrize("gamma", [None, 2.0, 0.0])
def test_clipped_gradients_follow_the_formula(gamma):
    x, y = problem.data()
    ensemble = problem.ensemble(members=4)
    before = gradients(ensemble, x, y)
    factor = {None: 1.0, 2.0: 0.5, 0.0: 0.0}[gamma]
    shared = {id(p) for p in ensemble.shared_parameters()}
    expected_norms = []
    for a in range(4):
        total = 0.0
        for name, p in ensemble.named_parameters():
            gradient = factor * before[name] if id(p) in shared else before[name][a]
            total += float(gradient.square().sum())
        expected_norms.append(math.sqrt(total))
    bound = sorted(expected_norms)[1]
    norms = clip_gradients_(ensemble, bound, gamma=gamma)
    torch.testing.assert_close(norms, torch.tensor(expected_norms))
    scales = [min(1.0, bound / norm) for norm in expected_norms]
    for name, p in ensemble.named_parameters():
        if id(p) in shared:
            expected = min(scales) * before[name]
        else:
            expected = torch.stack([c * g for c, g in zip(scales, before[name], strict=True)])
        torch.testing.assert_close(p.grad, expected)


def train(members, trainable=True, callbacks=()):
    """Train equal members and return the weights of the first one."""
    ensemble = embens.embed(
        problem.reference().double(),
        members,
        pre=laws.Constant(),
        post=laws.Constant(),
        trainable=trainable,
    )
    groups = ensemble.parameter_groups(lr=0.5, weight_decay=0.0)
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    x, y = problem.data()
    fit(
        ensemble, (x.double(), y), epochs=2, batch_size=16, optimizer=optimizer, callbacks=callbacks
    )
    return problem.weights(ensemble.member(0))


@pytest.mark.parametrize("trainable", [True, False])
def test_equal_members_are_clipped_like_a_single_one(trainable):
    one = train(1, trainable, [ClipGradients(0.1)])
    eight = train(8, trainable, [ClipGradients(0.1)])
    free = train(1, trainable)
    for name in one:
        torch.testing.assert_close(one[name], eight[name])
    assert any((one[name] - free[name]).abs().max() > 0.01 for name in one)


def test_a_loose_bound_changes_nothing():
    problem.assert_equal(train(3), train(3, callbacks=[ClipGradients(1e6)]))


@pytest.mark.parametrize("norm", [0, -1.0, math.nan])
def test_a_bound_that_is_not_positive_raises(norm):
    with pytest.raises(ValueError, match="norm must be a number above 0"):
        ClipGradients(norm)


def test_the_gamma_of_fit_is_used_unless_the_callback_has_one():
    runs = [
        {"gamma": 2.0, "callbacks": [ClipGradients(0.1)]},
        {"gamma": 2.0, "callbacks": [ClipGradients(0.1, gamma=2.0)]},
        {"gamma": 2.0, "callbacks": [ClipGradients(0.1, gamma=0.0)]},
    ]
    weights = []
    for options in runs:
        ensemble = problem.ensemble()
        fit(ensemble, problem.data(), epochs=1, batch_size=16, **options)
        weights.append(problem.weights(ensemble))
    problem.assert_equal(weights[0], weights[1])
    with pytest.raises(AssertionError):
        problem.assert_equal(weights[0], weights[2])


def test_a_time_limit_ends_the_first_epoch_and_the_run_can_continue(tmp_path):
    train, validation = problem.data(), problem.data(40, 9)
    ensemble, settings = problem.ensemble(), {"epochs": 3, "batch_size": 16}
    callbacks = [TimeLimit(1e-9), Checkpoint(tmp_path)]
    history = fit(ensemble, train, validation, **settings, callbacks=callbacks)
    assert (history.stopped, history.best_epoch, len(history.epochs)) == ("time", 1, 1)
    continued = fit(ensemble, train, validation, **settings, callbacks=[Checkpoint(tmp_path)])
    assert len(continued.epochs) == 3
    last = fit(ensemble, train, epochs=1, batch_size=16, callbacks=[TimeLimit(1e-9)])
    assert last.stopped == "time"


def test_a_run_of_many_time_limits_equals_an_uninterrupted_one(tmp_path):
    settings = {"epochs": 3, "batch_size": 16, "seed": 1}
    whole = problem.ensemble()
    expected = fit(whole, problem.data(), **settings)
    for _ in range(50):
        again = problem.ensemble()
        callbacks = [Checkpoint(tmp_path), TimeLimit(1e-9)]
        history = fit(again, problem.data(), **settings, callbacks=callbacks)
        if history.stopped == "epochs":
            break
    assert (history.stopped, len(history.epochs)) == ("epochs", len(expected.epochs))
    problem.assert_equal(problem.weights(again), problem.weights(whole))


def test_a_limit_that_is_not_positive_raises():
    with pytest.raises(ValueError, match="seconds must be a number above 0"):
        TimeLimit(0)


def test_the_time_limit_includes_the_preparation_of_the_data():
    class SlowRows(problem.Pairs):
        def __len__(self):
            time.sleep(0.2)
            return super().__len__()

    history = fit(
        problem.ensemble(), SlowRows(*problem.data()), epochs=50, callbacks=[TimeLimit(0.1)]
    )
    assert history.stopped == "time"
    assert len(history.epochs) == 1
