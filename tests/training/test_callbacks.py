"""The callback protocol, and callbacks that act during a run."""

from __future__ import annotations

import time

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from training import problem

import embens
from embens.training import (
    Callback,
    Checkpoint,
    KeepBest,
    TimeLimit,
    WeightAveraging,
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
