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
        data = problem.Pairs(*problem.data())
        for i in range(problem.ROWS):
            yield data[i]


@pytest.mark.parametrize("wrap", [TensorDataset, problem.Pairs, lambda x, y: [x, y]])
def test_data_in_any_form_gives_the_same_result(wrap):
    train, validation = problem.data(), problem.data(30, 5)
    expected = problem.ensemble()
    ensemble = problem.ensemble()

    expected_history = fit(expected, train, validation, epochs=2, batch_size=16)
    history = fit(ensemble, wrap(*train), wrap(*validation), epochs=2, batch_size=16)

    problem.assert_equal(problem.weights(expected), problem.weights(ensemble))
    # As texts, because nan != nan.
    assert repr(problem.without_time(history)) == repr(problem.without_time(expected_history))


def train_by_hand(ensemble, batches, epochs, compute_loss):
    """Train as `fit` does by default; ``compute_loss(batch)`` takes one of ``batches(epoch)``."""
    optimizer = torch.optim.SGD(ensemble.parameter_groups(), momentum=0.9, fused=True)
    scheduler = linear_decay(epochs)(optimizer)
    for epoch in range(epochs):
        for batch in batches(epoch):
            optimizer.zero_grad()
            compute_loss(batch).backward()
            optimizer.step()
        scheduler.step()


def test_loader_is_used_as_it_is():
    data = TensorDataset(*problem.data())
    loader = DataLoader(data, batch_size=20)
    ensemble = problem.ensemble()
    fit(ensemble, loader, DataLoader(data, 7), epochs=2, callbacks=[KeepLast()])

    expected = problem.ensemble()

    def compute_loss(batch):
        inputs, target = batch
        return embens.objective(expected(inputs), target)

    train_by_hand(expected, lambda epoch: loader, 2, compute_loss)

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


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(2, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, a, b):
        return self.head(torch.relu(self.first(a) + self.second(b)))


def test_several_inputs_are_passed_to_the_reference():
    a, y = problem.data()
    b = a[:, :2]
    rows = problem.Pairs(list(zip(a, b, strict=True)), y)
    ensemble = embens.batch_ensemble(Sum(), 2)

    weights = []
    for data in [(a, b, y), ((a, b), y), rows]:
        copy_of_ensemble = copy.deepcopy(ensemble)
        history = fit(copy_of_ensemble, data, data, epochs=3, lr=0.05, batch_size=16)
        assert history.epochs[-1]["loss"] < history.epochs[0]["loss"]
        weights.append(problem.weights(copy_of_ensemble))

    problem.assert_equal(weights[0], weights[1])
    problem.assert_equal(weights[0], weights[2])


def test_batches_per_member_are_different_orders_of_the_same_rows():
    x, y = problem.data()
    batches = batches_of((x, y), 16, seed=0, members=3)

    orders = batches.order(0)
    batch = next(batches.epoch(0))

    assert orders.shape == (3, problem.ROWS)
    for order in orders:
        assert torch.equal(order.sort().values, torch.arange(problem.ROWS))
    assert not torch.equal(orders[0], orders[1])
    assert batch.inputs[0].shape == (3, 16, 4)
    assert batch.target.shape == (3, 16)
    assert batch.rows == 16
    assert batch.total == 16
    assert torch.equal(batch.inputs[0][1], x[orders[1, :16]])
    assert torch.equal(batch.target[1], y[orders[1, :16]])


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
            self.first = nn.Linear(4, 8)
            self.second = nn.Linear(2, 8)
            self.label = nn.Linear(8, 3)
            self.value = nn.Linear(8, 1)
        self.as_tuple = as_tuple

    def forward(self, a, b):
        hidden = torch.relu(self.first(a) + self.second(b))
        label, value = self.label(hidden), self.value(hidden)
        if self.as_tuple:
            return label, value
        return {"label": label, "value": value}


def sum_of_losses(outputs, target):
    """A criterion for two outputs and two targets in a tuple, list or dict."""
    if isinstance(outputs, dict):
        outputs = tuple(outputs.values())
    if isinstance(target, dict):
        target = tuple(target.values())
    label, value = outputs
    classes, numbers = target
    error = (value[:, 0] - numbers).square().mean()
    return torch.nn.functional.cross_entropy(label, classes) + error


x, y = problem.data()
z, numbers = x[:, :2].contiguous(), x.sum(1)
INPUTS = {"tuple": (x, z), "list": [x, z], "dict": {"b": z, "a": x}}
TARGETS = {"tuple": (y, numbers), "dict": {"classes": y, "numbers": numbers}}


@pytest.mark.parametrize(
    ("batch", "callbacks"),
    [
        ("same", []),
        ("own", [Batches("own")]),
        ("split", [Batches("split")]),
        ("same", [Objective(chunk=2)]),
    ],
    ids=["same", "own", "split", "chunks"],
)
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS.keys())
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())
def test_fit_with_nested_inputs_outputs_and_targets_equals_a_plain_loop(
    inputs, target, batch, callbacks
):
    generator = torch.Generator().manual_seed(1)
    network = Heads(as_tuple=isinstance(inputs, tuple))
    ensemble = embens.batch_ensemble(network, 3, generator=generator)
    expected = copy.deepcopy(ensemble)

    history = fit(
        ensemble,
        (inputs, target),
        epochs=2,
        batch_size=16,
        criterion=sum_of_losses,
        callbacks=callbacks,
    )

    orders = batches_of((x, y), 16, seed=0, members=3 if batch == "own" else None)

    def compute_loss(rows):
        outputs = expected(x[rows], z[rows], batch=batch)
        targets = (y[rows], numbers[rows])
        return embens.objective(outputs, targets, sum_of_losses, batch=batch, members=3)

    train_by_hand(expected, lambda epoch: orders.order(epoch).split(16, -1), 2, compute_loss)

    assert math.isfinite(history.epochs[-1]["loss"])
    for name, tensor in problem.weights(expected).items():
        torch.testing.assert_close(ensemble.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)


class Iterable:
    """Anything that can be iterated again and again is a loader."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(DataLoader(self.rows, 16))


def test_nested_rows_work_in_loaders_data_sets_validation_and_metrics():
    rows = [({"a": x[i], "b": z[i]}, (y[i], numbers[i])) for i in range(len(y))]
    inputs_of_rows, targets_of_rows = zip(*rows, strict=True)
    shapes = []

    def metric(outputs, target):
        classes, _ = target
        shapes.append((outputs["label"].shape, outputs["value"].shape, classes.shape))
        return metrics.nll(outputs["label"], classes)

    weights = []
    for data in [
        DataLoader(rows, 16),
        Iterable(rows),
        problem.Pairs(inputs_of_rows, targets_of_rows),
    ]:
        ensemble = embens.batch_ensemble(Heads(), 3, generator=torch.Generator().manual_seed(1))
        history = fit(
            ensemble,
            data,
            data,
            epochs=2,
            batch_size=16,
            criterion=sum_of_losses,
            callbacks=[KeepBest(metric, maximise=False)],
        )
        assert history.epochs[-1]["metric"] > 0
        weights.append(problem.weights(ensemble))

    assert set(shapes) == {((3, 60, 3), (3, 60, 1), (60,))}
    problem.assert_equal(weights[0], weights[1])  # the data set is shuffled


def test_unknown_name_of_an_input_raises_type_error():
    ensemble = embens.batch_ensemble(Heads(), 2)
    with pytest.raises(TypeError, match=r"inputs 'a', 'c'.*\(a, b\)"):
        fit(ensemble, ({"a": x, "c": z}, TARGETS["tuple"]), epochs=1, criterion=sum_of_losses)


class EmptyStream(IterableDataset):
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
        EmptyStream,
        lambda: iter(()),
    ],
    ids=["tensors", "data set", "loader", "drop_last", "stream", "iterator"],
)
def test_empty_data_raise_value_error(where, empty):
    data = empty()
    steps = []

    class RecordSteps(Callback):
        def on_step(self, run):
            steps.append(run.steps)

    arguments = {"train": (x, y), "validation": None}
    arguments[where] = data
    with pytest.raises(ValueError, match=f"{where}: expected at least one"):
        fit(problem.ensemble(), **arguments, epochs=1, callbacks=[RecordSteps()])

    # Only a stream for validation is found to be empty after training.
    if where == "train" or hasattr(data, "__len__"):
        assert not steps


def test_exhausted_iterator_raises_value_error():
    with pytest.raises(ValueError, match=r"it gave none\. An iterator can be used once"):
        fit(problem.ensemble(), iter(DataLoader(TensorDataset(x, y), 16)), epochs=2)


class Named(nn.Module):
    """A network with the arguments and outputs of those of transformers."""

    def __init__(self):
        super().__init__()
        self.inside = problem.reference()

    def forward(self, x, scale=None):
        if scale is not None:
            x = scale * x
        return {"logits": self.inside(x), "hidden": x}


def embed_with_seed(network: nn.Module) -> embens.EmbeddedEnsemble:
    return embens.batch_ensemble(network, 3, generator=torch.Generator().manual_seed(3))


def make_labelled_columns():
    x, y = problem.data()
    return {"x": x, "scale": torch.ones(len(y), 1), "labels": y}


def make_labelled_rows():
    columns = make_labelled_columns()
    rows = []
    for i in range(problem.ROWS):
        rows.append({name: column[i] for name, column in columns.items()})
    return rows


@pytest.mark.parametrize("make_data", [make_labelled_columns, make_labelled_rows])
def test_logits_are_trained_on_the_labels_of_dicts(make_data):
    x, y = problem.data()
    expected = embed_with_seed(problem.reference())
    expected_history = fit(expected, (x, y), (x, y), epochs=2, batch_size=16)

    ensemble = embed_with_seed(Named())
    history = fit(ensemble, make_data(), make_labelled_columns(), epochs=2, batch_size=16)

    weights = {}
    for name, tensor in problem.weights(ensemble).items():
        weights[re.sub("inside[./]", "", name)] = tensor
    problem.assert_equal(problem.weights(expected), weights)
    assert repr(problem.without_time(history)) == repr(problem.without_time(expected_history))


def test_loader_of_dicts_with_labels_is_used():
    ensemble = embed_with_seed(Named())
    loader = DataLoader(make_labelled_rows(), 16)

    history = fit(ensemble, loader, make_labelled_columns(), epochs=2)

    # NaN if the labels were not recognised as classes.
    assert history.epochs[-1]["validation_ensemble_accuracy"] > 0
    prediction = embens.predict(ensemble, {"x": problem.data()[0]})
    torch.testing.assert_close(prediction.probabilities, prediction["logits"].probabilities)


def test_dict_without_labels_raises_type_error():
    x, y = problem.data()
    with pytest.raises(TypeError, match=r"or dicts with 'labels'; got a dict of \['x', 'y'\]"):
        fit(embed_with_seed(Named()), {"x": x, "y": y}, epochs=1)


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
