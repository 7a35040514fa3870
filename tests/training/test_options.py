"""Callbacks that set options of the loop, early stopping and the schedule."""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import nn
from training import problem

import embens
from embens import metrics
from embens.training import (
    Accumulate,
    Autocast,
    Batches,
    Checkpoint,
    Compile,
    EarlyStopping,
    KeepBest,
    KeepLast,
    Objective,
    ScheduleEveryStep,
    fit,
    linear_decay,
)

CHUNKS = {"whole": [], "chunks": [Objective(chunk=2)]}
chunks = pytest.mark.parametrize("chunked", CHUNKS.values(), ids=CHUNKS.keys())


def assert_close(first, second):
    for name, tensor in problem.weights(first).items():
        torch.testing.assert_close(second.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)


def test_a_backward_pass_in_chunks_gives_the_same_weights_and_history():
    whole, chunked = problem.ensemble(members=5), problem.ensemble(members=5)
    settings = {"epochs": 2, "batch_size": 16}
    first = fit(whole, problem.data(), **settings)
    second = fit(chunked, problem.data(), **settings, callbacks=[Objective(chunk=2)])

    assert_close(whole, chunked)
    for a, b in zip(first.members, second.members, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["accuracy"] == pytest.approx(b["accuracy"], abs=0.05)


def test_chunks_choose_the_default_criterion_for_regression():
    x, _ = problem.data()
    whole, chunked = problem.ensemble(outputs=1), problem.ensemble(outputs=1)
    settings = {"epochs": 2, "batch_size": 16}
    fit(whole, (x, x.sum(1)), **settings)
    fit(chunked, (x, x.sum(1)), **settings, callbacks=[Objective(chunk=2)])

    assert_close(whole, chunked)


@pytest.mark.parametrize("of", ["mean", "moments"])
def test_joint_objectives_are_trained(of):
    x, y = problem.data()
    if of == "moments":
        ensemble, target = problem.ensemble(outputs=2), x.sum(1)
    else:
        ensemble, target = problem.ensemble(), y
    options = {"epochs": 10, "batch_size": 16, "lr": 0.05, "callbacks": [Objective(of=of)]}
    history = fit(ensemble, (x, target), **options)

    assert history.epochs[-1]["loss"] < history.epochs[0]["loss"]


@chunks
def test_accumulated_batches_equal_one_larger_batch(chunked):
    """Also if the last step has fewer batches, and the last batch fewer rows."""
    whole, parts = problem.ensemble(), problem.ensemble()
    first = fit(whole, problem.data(), epochs=3, batch_size=21, callbacks=chunked)
    callbacks = [*chunked, Accumulate(3)]
    second = fit(parts, problem.data(), epochs=3, batch_size=7, callbacks=callbacks)

    assert_close(whole, parts)
    assert second.epochs[-1]["loss"] == pytest.approx(first.epochs[-1]["loss"], rel=1e-4)


class RecordingLinear(nn.Linear):
    """Record the types of the outputs."""

    types: ClassVar[set[torch.dtype]] = set()

    def forward(self, x):
        output = super().forward(x)
        self.types.add(output.dtype)
        return output


def train_recording_network(callbacks):
    """Return the last loss, and the types of the last layer's outputs."""
    RecordingLinear.types.clear()
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), RecordingLinear(16, 3))
    generator = torch.Generator().manual_seed(1)
    ensemble = embens.batch_ensemble(reference, 3, generator=generator)
    history = fit(ensemble, problem.data(), epochs=3, batch_size=16, callbacks=callbacks)
    assert {parameter.dtype for parameter in ensemble.parameters()} == {torch.float32}
    return history.epochs[-1]["loss"], set(RecordingLinear.types)


@chunks
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_trains_like_full_precision_up_to_rounding(dtype, chunked):
    expected_loss, expected_types = train_recording_network(chunked)
    loss, types = train_recording_network([*chunked, Autocast(dtype)])

    assert expected_types == {torch.float32}
    assert types == {dtype}
    assert loss == pytest.approx(expected_loss, rel=0.03)
    assert loss != expected_loss


@pytest.mark.parametrize("batch", ["same", "own", "split"])
def test_batches_can_be_common_own_or_split(batch):
    ensemble = problem.ensemble()
    callbacks = [] if batch == "same" else [Batches(batch)]
    options = {"epochs": 30, "batch_size": 16, "lr": 0.05, "callbacks": callbacks}
    history = fit(ensemble, problem.data(), **options)
    assert metrics.ensemble_accuracy(ensemble(problem.data()[0]), problem.data()[1]) > 0.8
    assert len(history.members) == 90
    assert history.members[-1]["accuracy"] > 0.6
    last = history.epochs[-1]
    assert math.isnan(last["correlation"]) == (batch != "same")
    assert math.isnan(last["ensemble_accuracy"]) == (batch != "same")


def test_the_scheduler_can_step_with_the_optimizer():
    recorder = problem.Recorder()
    scheduler = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    options = {"epochs": 2, "batch_size": 20, "lr": 0.1}
    callbacks = [ScheduleEveryStep(), recorder]
    fit(problem.ensemble(), problem.data(), **options, scheduler=scheduler, callbacks=callbacks)
    rates = [rates["modulation_lr"] for rates in recorder.rates]
    assert rates == pytest.approx([0.1 * 0.5 ** (step + 1) for step in range(6)])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    with pytest.raises(ValueError, match="ReduceLROnPlateau needs a metric per epoch"):
        fit(problem.ensemble(), problem.data(), **options, scheduler=plateau, callbacks=callbacks)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(torch.__version__ < (2, 10), reason="compiling needs torch 2.10")  # type: ignore[operator]
@pytest.mark.parametrize("rows", [48, pytest.param(60, marks=pytest.mark.long)])  # 60: two shapes
def test_a_compiled_run_resumes_to_the_same_bits(rows, tmp_path, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    plain, whole, again = (problem.ensemble() for _ in range(3))
    options = {"train": problem.data(rows), "epochs": 2, "batch_size": 16}
    fit(plain, **options)
    fit(whole, **options, callbacks=[Compile()])
    assert_close(plain, whole)
    callbacks = [Compile(), Checkpoint(tmp_path, every=1)]
    with pytest.raises(problem.Stop):
        fit(problem.ensemble(), **options, callbacks=[*callbacks, problem.Interrupt(4)])
    torch._dynamo.reset()
    fit(again, **options, callbacks=callbacks)
    problem.assert_equal(problem.weights(again), problem.weights(whole))


@pytest.mark.parametrize("metric", ["accuracy", "nll", "brier", "ece"])
def test_the_best_epoch_of_a_named_metric_is_that_of_evaluate(metric):
    ensemble, validation = problem.ensemble(), problem.data(20, 5)
    history = fit(ensemble, problem.data(), validation, epochs=4, callbacks=[KeepBest(metric)])
    values = [row["metric"] for row in history.epochs]
    best = max(values) if metric == "accuracy" else min(values)

    assert values[history.best_epoch - 1] == best
    assert embens.evaluate(ensemble, validation)[metric] == pytest.approx(best, rel=1e-5)


def test_the_metrics_of_a_regression_have_names():
    x, _ = problem.data()
    data = (x, x.sum(1))
    history = fit(problem.ensemble(outputs=1), data, data, epochs=3, callbacks=[KeepBest("rmse")])
    row = history.epochs[history.best_epoch - 1]

    assert row["metric"] == row["validation_rmse"]
    for metric in ("nll", "accuracy", "brier", "ece"):
        with pytest.raises(ValueError, match=f"{metric}' is not defined .* history has loss, rmse"):
            fit(problem.ensemble(outputs=1), data, data, epochs=1, callbacks=[KeepBest(metric)])


def test_metrics_have_their_directions():
    train, validation = problem.data(), problem.data(40, 9)
    for metric, best in (("accuracy", max), ("loss", min), (metrics.nll, min)):
        callbacks = [KeepBest(metric)]
        history = fit(problem.ensemble(), train, validation, epochs=5, lr=0.1, callbacks=callbacks)
        values = [row["metric"] for row in history.epochs]
        assert history.best_epoch == values.index(best(values)) + 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Accumulate(0), "batches must be"),
        (lambda: Autocast(torch.float64), "dtype: unknown torch.float64"),
        (lambda: Batches("spilt"), "kind: unknown 'spilt'; did you mean 'split'"),
        (lambda: Objective(of="maen"), "of: unknown 'maen'; did you mean 'mean'"),
        (lambda: Objective(chunk=0), "chunk must be"),
        (lambda: KeepBest(lambda o, t: 0.0), "pass maximise=True or False"),
        (lambda: KeepBest("acuracy"), "metric: unknown 'acuracy'; did you mean 'accuracy'"),
        (lambda: EarlyStopping(2, "los"), "metric: unknown 'los'; did you mean 'loss'"),
    ],
)
def test_wrong_settings_raise_when_the_callback_is_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ([Objective(chunk=2), Batches("own")], r"Objective\(chunk=…\) cannot be combined"),
        ([Objective("mean", chunk=2)], r"Objective\(chunk=…\) cannot be combined"),
        ([Objective("mean"), Batches("own")], "needs the same rows for all members"),
        ([Compile(), Objective(chunk=2)], "needs all members at once"),
        ([KeepBest("loss"), EarlyStopping(2, "accuracy")], "two metrics"),
        ([Accumulate(2), Accumulate(3)], "callbacks has 2 Accumulate; pass one"),
    ],
)
def test_options_that_exclude_one_another_raise(callbacks, message):
    with pytest.raises(ValueError, match=message):
        fit(problem.ensemble(), problem.data(), problem.data(), epochs=1, callbacks=callbacks)


def test_the_schedule_is_constant_then_linear():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.01)
    scheduler = linear_decay(1000)(optimizer)
    rates = []
    for _ in range(1000):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()

    assert rates[:501] == [0.01] * 501
    assert rates[750] == pytest.approx((0.01 + 1e-4) / 2)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)


@pytest.mark.parametrize("options", [{"hold": 2}, {"final": -0.1}])
def test_fractions_outside_zero_and_one_raise(options):
    with pytest.raises(ValueError, match="between 0 and 1"):
        linear_decay(10, **options)


def metric_of(values, seen):
    def metric(outputs, target):
        seen.append(outputs.clone())
        return values[len(seen) - 1]

    return metric


def test_patience_stops_and_the_best_weights_are_kept():
    train, validation, seen = problem.data(), problem.data(40, 9), []
    metric = metric_of([0.3, 0.7, 0.7, 0.1, 0.9, 0.2], seen)
    ensemble = problem.ensemble()
    callbacks = [EarlyStopping(2, metric, maximise=True)]
    history = fit(ensemble, train, validation, epochs=6, lr=0.05, callbacks=callbacks)

    assert history.stopped == "patience"
    assert history.best_epoch == 2
    assert [row["metric"] for row in history.epochs] == [0.3, 0.7, 0.7, 0.1]
    torch.testing.assert_close(ensemble(validation[0]), seen[1])


def test_the_last_weights_can_be_kept():
    train, validation, seen = problem.data(), problem.data(40, 9), []
    metric = metric_of([0.3, 0.7, 0.7, 0.1, 0.9, 0.2], seen)
    ensemble = problem.ensemble()
    callbacks = [KeepBest(metric, maximise=False), KeepLast()]
    history = fit(ensemble, train, validation, epochs=6, callbacks=callbacks)

    assert (history.stopped, history.best_epoch) == ("epochs", 4)
    torch.testing.assert_close(ensemble(validation[0]), seen[5])


def test_early_stopping_needs_validation_data():
    with pytest.raises(ValueError, match="EarlyStopping needs validation data"):
        fit(problem.ensemble(), problem.data(), epochs=1, callbacks=[EarlyStopping(3)])


@pytest.mark.parametrize("patience", [0, -1])
def test_a_patience_below_one_raises(patience):
    with pytest.raises(ValueError, match="patience must be"):
        EarlyStopping(patience)
