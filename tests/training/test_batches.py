"""Data in any form, and the batches that are made of them."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from training import problem

import embens
from embens import metrics
from embens.training import Batches, Callback, KeepBest, KeepLast, Objective, fit, linear_decay
from embens.training.batches import batches_of


class Stream(IterableDataset):
    def __iter__(self):
        return iter(problem.Pairs(*problem.data())[i] for i in range(problem.ROWS))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x, y: TensorDataset(x, y),
        lambda x, y: problem.Pairs(x, y),
        lambda x, y: [x, y],
    ],
    ids=["TensorDataset", "Dataset", "list"],
)
def test_data_in_any_form_gives_the_same_result(wrap):
    expected, found = problem.ensemble(), problem.ensemble()
    first = fit(expected, problem.data(), problem.data(30, 5), epochs=2, batch_size=16)
    second = fit(found, wrap(*problem.data()), wrap(*problem.data(30, 5)), epochs=2, batch_size=16)
    problem.assert_equal(problem.weights(expected), problem.weights(found))
    assert repr(problem.without_time(first)) == repr(problem.without_time(second))


def test_a_loader_is_used_as_it_is():
    x, y = problem.data()
    loader = DataLoader(TensorDataset(x, y), batch_size=20)
    ensemble, expected = problem.ensemble(), problem.ensemble()
    validation = DataLoader(TensorDataset(x, y), 7)
    fit(ensemble, loader, validation, epochs=2, callbacks=[KeepLast()])
    optimizer = torch.optim.SGD(expected.parameter_groups(), momentum=0.9, fused=True)
    scheduler = linear_decay(2)(optimizer)
    for _ in range(2):
        for inputs, target in loader:
            optimizer.zero_grad()
            embens.objective(expected(inputs), target).backward()
            optimizer.step()
        scheduler.step()
    problem.assert_equal(problem.weights(ensemble), problem.weights(expected))


def test_shuffling_loaders_and_streams_are_deterministic():
    def run(data):
        ensemble = problem.ensemble()
        fit(ensemble, data, epochs=2, batch_size=16)
        return problem.weights(ensemble)

    def loader():
        return DataLoader(TensorDataset(*problem.data()), 16, shuffle=True)

    problem.assert_equal(run(loader()), run(loader()))
    problem.assert_equal(run(Stream()), run(Stream()))


def test_several_inputs_are_passed_to_the_reference():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(2, 8)
            self.head = nn.Linear(8, 3)

        def forward(self, a, b):
            return self.head(torch.relu(self.first(a) + self.second(b)))

    x, y = problem.data()
    ensemble = embens.batch_ensemble(Sum(), 2)
    forms = {
        "flat": (x, x[:, :2], y),
        "nested": ((x, x[:, :2]), y),
        "items": problem.Pairs(list(zip(x, x[:, :2], strict=True)), y),
    }
    found = []
    for form in forms.values():
        twin = copy.deepcopy(ensemble)
        history = fit(twin, form, form, epochs=3, lr=0.05, batch_size=16)
        assert history.epochs[-1]["loss"] < history.epochs[0]["loss"]
        found.append(problem.weights(twin))
    problem.assert_equal(found[0], found[1])
    problem.assert_equal(found[0], found[2])


def test_own_batches_are_different_orders_of_the_same_rows():
    own = batches_of(problem.data(), 16, seed=0, members=3)
    orders = own.order(0)
    assert orders.shape == (3, problem.ROWS)
    assert all(torch.equal(o.sort().values, torch.arange(problem.ROWS)) for o in orders)
    assert not torch.equal(orders[0], orders[1])
    (x,), y, rows, total, _ = next(own.epoch(0))
    assert x.shape == (3, 16, 4)
    assert y.shape == (3, 16)
    assert (rows, total) == (16, 16)
    assert torch.equal(x[1], problem.data()[0][orders[1, :16]])


@pytest.mark.parametrize("start", [0, 1, 5])
def test_tensors_and_data_sets_give_the_same_batches(start):
    x, y = problem.data()
    whole = list(batches_of((x, y), 7, seed=3).epoch(2, start))
    single = list(batches_of(problem.Pairs(x, y), 7, seed=3).epoch(2, start))
    assert len(whole) == len(single) == 9 - start
    for first, second in zip(whole, single, strict=True):
        assert torch.equal(first.inputs[0], second.inputs[0])
        assert torch.equal(first.target, second.target)


class Heads(nn.Module):
    """Two inputs by name, two outputs by name (or in a tuple)."""

    def __init__(self, as_tuple=False):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(4, 8), nn.Linear(2, 8)
            self.label, self.value = nn.Linear(8, 3), nn.Linear(8, 1)
        self.as_tuple = as_tuple

    def forward(self, a, b):
        hidden = torch.relu(self.first(a) + self.second(b))
        outputs = {"label": self.label(hidden), "value": self.value(hidden)}
        return tuple(outputs.values()) if self.as_tuple else outputs


def both(outputs, target):
    label, value = outputs if isinstance(outputs, tuple) else outputs.values()
    classes, numbers = target if isinstance(target, tuple | list) else target.values()
    error = (value[:, 0] - numbers).square().mean()
    return torch.nn.functional.cross_entropy(label, classes) + error


x, y = problem.data()
z, numbers = x[:, :2].contiguous(), x.sum(1)
INPUTS = {"tuple": (x, z), "list": [x, z], "dict": {"b": z, "a": x}}
TARGETS = {"tuple": (y, numbers), "dict": {"classes": y, "numbers": numbers}}


MODES = {
    "same": [],
    "own": [Batches("own")],
    "split": [Batches("split")],
    "chunks": [Objective(chunk=2)],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS.keys())
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())
def test_inputs_outputs_and_targets_may_be_nested(inputs, target, mode):
    """Against a hand-written loop over the same rows."""
    generator = torch.Generator().manual_seed(1)
    fitted = embens.batch_ensemble(Heads(isinstance(inputs, tuple)), 3, generator=generator)
    expected, data = copy.deepcopy(fitted), (inputs, target)
    callbacks = MODES[mode]
    history = fit(fitted, data, epochs=2, batch_size=16, criterion=both, callbacks=callbacks)
    optimizer = torch.optim.SGD(expected.parameter_groups(), momentum=0.9, fused=True)
    scheduler = linear_decay(2)(optimizer)
    batch = "same" if mode == "chunks" else mode
    members = 3 if batch == "own" else None
    for epoch in range(2):
        order = batches_of((x, y), 16, seed=0, members=members).order(epoch)
        for rows in order.split(16, -1):
            optimizer.zero_grad()
            outputs = expected(x[rows], z[rows], batch=batch)
            pair = (y[rows], numbers[rows])
            embens.objective(outputs, pair, both, batch=batch, members=3).backward()
            optimizer.step()
        scheduler.step()
    assert math.isfinite(history.epochs[-1]["loss"])
    for name, tensor in problem.weights(expected).items():
        torch.testing.assert_close(fitted.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)


def test_trees_work_in_loaders_data_sets_validation_and_metrics():
    rows = [({"a": x[i], "b": z[i]}, (y[i], numbers[i])) for i in range(len(y))]
    seen = []

    def metric(outputs, target):
        seen.append((outputs["label"].shape, outputs["value"].shape, target[0].shape))
        return metrics.nll(outputs["label"], target[0])

    found = []
    for rowwise in (DataLoader(rows, 16), problem.Pairs(*zip(*rows, strict=True)), Passing(rows)):
        ensemble = embens.batch_ensemble(Heads(), 3, generator=torch.Generator().manual_seed(1))
        callbacks = [KeepBest(metric, maximise=False)]
        options = {"criterion": both, "batch_size": 16, "callbacks": callbacks}
        history = fit(ensemble, rowwise, rowwise, epochs=2, **options)
        assert history.epochs[-1]["metric"] > 0
        found.append(problem.weights(ensemble))
    assert set(seen) == {((3, 60, 3), (3, 60, 1), (60,))}
    problem.assert_equal(found[0], found[2])


class Passing:
    """Anything that can be iterated again and again is a loader."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(DataLoader(self.rows, 16))


def test_a_name_that_the_reference_does_not_have_is_said():
    ensemble = embens.batch_ensemble(Heads(), 2)
    with pytest.raises(TypeError, match=r"inputs 'a', 'c'.*\(a, b\)"):
        fit(ensemble, ({"a": x, "c": z}, TARGETS["tuple"]), epochs=1, criterion=both)


class Nothing(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize("where", ["train", "validation"])
@pytest.mark.parametrize(
    "empty",
    [
        lambda: (x[:0], y[:0]),
        lambda: problem.Pairs(x[:0], y[:0]),
        lambda: DataLoader(TensorDataset(x[:0], y[:0])),
        lambda: DataLoader(TensorDataset(x[:3], y[:3]), 16, drop_last=True),
        lambda: Nothing(),
        lambda: iter(()),
    ],
    ids=["tensors", "data set", "loader", "drop_last", "stream", "iterator"],
)
def test_nothing_to_train_or_validate_on_is_said(where, empty):
    data, steps = empty(), []
    known = hasattr(data, "__len__")

    class Steps(Callback):
        def on_step(self, run):
            steps.append(run.steps)

    arguments = {"train": (x, y), "validation": None} | {where: data}
    with pytest.raises(ValueError, match=f"{where}: expected at least one"):
        fit(problem.ensemble(), **arguments, epochs=1, callbacks=[Steps()])
    assert not steps or (where == "validation" and not known)


def test_an_iterator_that_is_used_up_is_said():
    with pytest.raises(ValueError, match=r"it gave none\. An iterator can be used once"):
        fit(problem.ensemble(), iter(DataLoader(TensorDataset(x, y), 16)), epochs=2)


class Named(nn.Module):
    """A network that is called, and answers, as those of transformers."""

    def __init__(self):
        super().__init__()
        self.inside = problem.reference()

    def forward(self, x, scale=None):
        return {"logits": self.inside(x if scale is None else scale * x), "hidden": x}


def test_dicts_with_labels_are_data_and_logits_among_outputs_are_what_is_trained():
    x, y = problem.data()
    columns = {"x": x, "scale": torch.ones(len(y), 1), "labels": y}
    rows = [{name: column[i] for name, column in columns.items()} for i in range(len(y))]

    def make(network: nn.Module) -> embens.EmbeddedEnsemble:
        generator = torch.Generator().manual_seed(3)
        return embens.batch_ensemble(network, 3, generator=generator)

    expected = make(problem.reference())
    first = fit(expected, (x, y), (x, y), epochs=2, batch_size=16)
    for form in (columns, rows, DataLoader(rows, 16)):
        found = make(Named())
        second = fit(found, form, columns, epochs=2, batch_size=16)
        assert second.epochs[-1]["validation_ensemble_accuracy"] > 0  # NaN if these were no classes
        if not isinstance(form, DataLoader):  # which has another order
            weights = problem.weights(found).items()
            renamed = {re.sub("inside[./]", "", name): tensor for name, tensor in weights}
            problem.assert_equal(problem.weights(expected), renamed)
            assert repr(problem.without_time(first)) == repr(problem.without_time(second))
    prediction = embens.predict(found, {"x": x})
    torch.testing.assert_close(prediction.probabilities, prediction["logits"].probabilities)
    with pytest.raises(TypeError, match=r"or dicts with 'labels'; got a dict of \['x', 'y'\]"):
        fit(found, {"x": x, "y": y}, epochs=1)


@pytest.mark.parametrize("start", [0, 2])
def test_small_data_have_the_same_batches_as_large_data(start, monkeypatch):
    data = (torch.randn(23, 4), torch.arange(23), torch.rand(23))
    options = {"seed": 3, "counts": (1, 1)}
    small = list(batches_of(data, 5, **options).epoch(1, start))
    monkeypatch.setattr("embens.training.batches.SMALL_DATA", 0)
    large = list(batches_of(data, 5, **options).epoch(1, start))
    assert len(small) == 5 - start
    for first, second in zip(small, large, strict=True):
        assert (first.rows, first.total) == (second.rows, second.total)
        assert torch.equal(first.inputs[0], second.inputs[0])
        assert torch.equal(first.target, second.target)
        assert torch.equal(first.weight, second.weight)


def test_a_list_of_batches_raises_with_the_fix():
    x, y = problem.data(40)
    batches = [(x[:20], y[:20]), (x[20:], y[20:])]
    message = "takes 1 input, got 2"
    with pytest.raises(ValueError, match=message):
        fit(problem.ensemble(), batches, epochs=1)
    with pytest.raises(ValueError, match=message):
        embens.evaluate(problem.ensemble(), batches)
