"""Passes through batches, and checks of the data before the first step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from training import problem

import embens
from embens.losses import member_losses
from embens.optim import total_cross_entropy
from embens.training import Batches, Options, fit
from embens.training.batches import Minibatch, batches_of
from embens.training.passes import Passes
from embens.training.tally import Tally

x, y = problem.data()
BATCH = Minibatch((x,), y, 60, 60)


def gradients(ensemble):
    return [p.grad.clone() for p in ensemble.parameters()]


@pytest.mark.parametrize("chunk", [None, 1, 2, 3])
@pytest.mark.parametrize("criterion", [None, F.cross_entropy, lambda o, t: F.cross_entropy(o, t)])
@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_gradients_and_losses_are_those_of_the_objective(chunk, criterion, weight):
    ensemble = problem.ensemble()
    expected = embens.objective(ensemble(x), y, criterion)
    (weight * expected).backward()
    expected_gradients = gradients(ensemble)
    ensemble.zero_grad()
    passes = Passes(ensemble, Options(chunk=chunk), criterion)
    objective, result = passes.train(BATCH, weight, "batch", inspect=False)
    torch.testing.assert_close(objective, weight * expected.detach())
    tally = Tally(ensemble.members)
    tally.add(result)
    losses = torch.tensor(tally.summary()["member_loss"])
    torch.testing.assert_close(losses, member_losses(ensemble(x), y, criterion).detach())
    torch.testing.assert_close(losses.sum(), expected.detach())
    torch.testing.assert_close(result.outputs, ensemble(x).detach())
    for gradient, expected_gradient in zip(gradients(ensemble), expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient)


def test_evaluation_covers_all_rows_in_order():
    ensemble = problem.ensemble().eval()
    passes = Passes(ensemble, Options(), None)
    results = list(passes.evaluate(batches_of((x, y), 25, seed=None), ensemble))
    assert [result.rows for result in results] == [25, 25, 10]
    outputs = torch.cat([result.outputs for result in results], 1)
    torch.testing.assert_close(outputs, ensemble(x))


def test_the_default_criterion_is_chosen_once_and_restored_by_name():
    passes = Passes(problem.ensemble(), Options(), None)
    assert passes.criterion_name() is None
    passes.train(BATCH, 1.0, "batch", inspect=False)
    assert passes.criterion_name() == "cross_entropy"
    other = Passes(problem.ensemble(), Options(), None)
    other.restore_criterion("cross_entropy")
    assert other.criterion is F.cross_entropy


def broken(values, *, rows=(3, 7), value=math.nan):
    values = values.clone()
    values[list(rows)] = value
    return values


BROKEN = {
    "inputs": ((broken(x), y), "inputs have NaN in rows 3, 7"),
    "infinite": ((broken(x, value=math.inf), y), "inputs have infinite .* in rows 3, 7"),
    "labels": ((x, broken(y, value=3)), "labels must be from 0 to 2.*got 3 in rows 3, 7"),
    "negative": (
        (x, broken(y, value=-1)),
        "labels must be from 0 to 2.*got -1 in rows 3, 7.*-100 marks",
    ),
}


@pytest.mark.parametrize("where", ["train", "validation"])
@pytest.mark.parametrize(("data", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_rows_are_named_before_a_step(data, message, where):
    ensemble = problem.ensemble()
    before = problem.weights(ensemble)
    arguments = {"train": (x, y), "validation": None} | {where: data}

    with pytest.raises(ValueError, match=f"{where}: {message}"):
        fit(ensemble, **arguments, epochs=2, batch_size=16)
    problem.assert_equal(before, problem.weights(ensemble))


@pytest.mark.parametrize("where", ["train", "validation"])
@pytest.mark.parametrize(("data", "message"), BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("wrap", [TensorDataset, problem.Pairs])
def test_broken_rows_of_a_loader_are_named_with_their_batch(data, message, where, wrap):
    order = torch.arange(60).roll(21)  # rows 3 and 7 are in the second batch of 16
    data = tuple(t[order] for t in data)
    loader = DataLoader(wrap(*data), 16)
    ensemble, recorder = problem.ensemble(), problem.Recorder()
    arguments = {"train": (x, y), "validation": None} | {where: loader}

    message = message.replace("3, 7", "8, 12")
    with pytest.raises(ValueError, match=f"{where}: batch 2: {message}"):
        fit(ensemble, **arguments, epochs=2, batch_size=16, callbacks=[recorder])
    assert len(recorder.steps) == (1 if where == "train" else 4)


def test_targets_with_gaps_are_refused_unless_the_criterion_leaves_them_out():
    target = broken(x.sum(1))
    with pytest.raises(ValueError, match="train: targets have NaN in rows 3, 7, and the loss is"):
        fit(problem.ensemble(outputs=1), (x, target), epochs=1)

    def masked(outputs, target):
        return (outputs[:, 0] - target)[target.isfinite()].square().mean()

    history = fit(problem.ensemble(outputs=1), (x, target), epochs=2, criterion=masked)
    assert math.isfinite(history.epochs[-1]["loss"])


def test_inputs_that_the_network_is_made_for_may_be_infinite():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x, mask):
            return self.head(torch.relu(self.body(x)) * mask.softmax(-1))

    mask = torch.zeros(60, 8)
    mask[:, 4:] = -math.inf
    history = fit(embens.batch_ensemble(Masked(), 2), ((x, mask), y), epochs=2)
    assert math.isfinite(history.epochs[-1]["loss"])


def test_labels_to_leave_out_play_no_part():
    ignored = broken(y, rows=range(40, 60), value=-100)
    ensemble = problem.ensemble()
    history = fit(ensemble, DataLoader(TensorDataset(x, ignored), 20), epochs=3)
    assert math.isfinite(history.epochs[-1]["loss"])


@pytest.mark.parametrize(
    ("callbacks", "rows", "batch_size"),
    [([], 33, 16), ([Batches("own")], 33, 16), ([Batches("split")], 36, 32)],
)
def test_a_last_batch_that_is_too_small_for_batch_norm_raises_before_a_step(
    callbacks, rows, batch_size
):
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    ensemble = embens.batch_ensemble(net, 3)
    before = problem.weights(ensemble)
    options = {"epochs": 1, "batch_size": batch_size, "callbacks": callbacks}

    with pytest.raises(ValueError, match=r"train: the last of .* BatchNorm.*drop_last=True"):
        fit(ensemble, (x[:rows], y[:rows]), **options)
    problem.assert_equal(before, problem.weights(ensemble))


def test_a_small_batch_of_a_loader_raises_when_it_arrives():
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    ensemble, rows = embens.batch_ensemble(net, 3), TensorDataset(x[:33], y[:33])
    with pytest.raises(ValueError, match=r"train: batch 3 has 1 rows, and BatchNorm"):
        fit(ensemble, DataLoader(rows, 16), epochs=1)
    fit(ensemble, DataLoader(rows, 16, drop_last=True), epochs=1)


def test_a_small_last_batch_is_fine_without_batch_norm():
    history = fit(problem.ensemble(), (x[:33], y[:33]), epochs=1, batch_size=16)
    assert len(history.epochs) == 1


@pytest.mark.parametrize("classes", [3, 40])
def test_the_total_cross_entropy_is_the_sum_over_members(classes):
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(4, 10, classes, generator=generator)
    target = torch.randint(classes, (10,), generator=generator)
    target[0] = -100
    loss, log_probabilities = total_cross_entropy(outputs, target)

    torch.testing.assert_close(loss, member_losses(outputs, target).sum())
    torch.testing.assert_close(log_probabilities, outputs.log_softmax(-1).movedim(2, 1))


def test_a_column_of_labels_raises_with_the_fix():
    with pytest.raises(ValueError, match="Squeeze a column of classes"):
        fit(problem.ensemble(), (x, y[:, None]), epochs=1)


def test_one_hot_labels_and_a_wrong_number_of_labels_raise_with_the_fix():
    outputs = torch.zeros(4, 10, 3)
    one_hot = torch.zeros(10, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"one-hot rows, target\.argmax\(1\)"):
        member_losses(outputs, one_hot)
    with pytest.raises(ValueError, match=r"got \(7,\)\.$"):
        member_losses(outputs, one_hot[:7, 0])


def test_integer_targets_of_a_regression_raise_with_the_fix():
    with pytest.raises(ValueError, match=r"at least two outputs, got 1\. Pass target\.float\(\)"):
        fit(problem.ensemble(outputs=1), (x, y), epochs=1)
