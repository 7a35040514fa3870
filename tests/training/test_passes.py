"""Data that will not do are refused before a step; clipping bounds the norm of a member's view."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training import problem

import embens
from embens import laws
from embens.training import clip_gradients_, fit

x, y = problem.data()


def broken(values, *, rows=(3, 7), value=math.nan):
    values = values.clone()
    values[list(rows)] = value
    return values


BROKEN = {
    "inputs": ((broken(x), y), "inputs have NaN in rows 3, 7"),
    "infinite": ((broken(x, value=math.inf), y), "inputs have infinite numbers in rows 3, 7"),
    "labels": ((x, broken(y, value=3)), "expected classes from 0 to 2.*got 3 in rows 3, 7"),
    "negative": (
        (x, broken(y, value=-1)),
        "expected classes from 0 to 2.*got -1 in rows 3, 7.*-100 marks",
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
    ensemble, steps = problem.ensemble(), []
    arguments = {"train": (x, y), "validation": None} | {where: loader}

    class Steps:
        def on_step(self, ensemble, record):
            steps.append(record["step"])

    message = message.replace("3, 7", "8, 12")
    with pytest.raises(ValueError, match=f"{where}: batch 2: {message}"):
        fit(ensemble, **arguments, epochs=2, batch_size=16, callbacks=[Steps()])
    assert len(steps) == (1 if where == "train" else 4)


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


@pytest.mark.parametrize("batch", ["same", "own", "split"])
def test_a_last_batch_that_is_too_small_for_batch_norm_is_refused_before_a_step(batch):
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    ensemble = embens.batch_ensemble(net, 3)
    before = problem.weights(ensemble)
    rows = 33 + (3 if batch == "split" else 0)
    with pytest.raises(ValueError, match=r"train: the last of .* BatchNorm.*drop_last=True"):
        fit(ensemble, (x[:rows], y[:rows]), epochs=1, batch_size=16 if rows == 33 else 32,
            batch=batch)  # fmt: skip
    problem.assert_equal(before, problem.weights(ensemble))
    loader = DataLoader(TensorDataset(x[:33], y[:33]), 16)
    with pytest.raises(ValueError, match=r"train: batch 3 has 1 rows, and BatchNorm"):
        fit(ensemble, loader, epochs=1)
    fit(ensemble, DataLoader(TensorDataset(x[:33], y[:33]), 16, drop_last=True), epochs=1)
    assert len(fit(problem.ensemble(), (x[:33], y[:33]), epochs=1, batch_size=16).epochs) == 1


def gradients(ensemble, x, y):
    ensemble.zero_grad()
    embens.objective(ensemble(x), y).backward()
    return {name: p.grad.clone() for name, p in ensemble.named_parameters()}


@pytest.mark.parametrize("gamma", [None, 2.0, 0.0])
def test_no_members_norm_exceeds_the_bound_and_factors_are_those_of_the_formula(gamma):
    x, y = problem.data()
    ensemble = problem.ensemble(members=4)
    before = gradients(ensemble, x, y)
    factor = {None: 1.0, 2.0: 0.5, 0.0: 0.0}[gamma]
    shared = {id(p) for p in ensemble.shared_parameters()}
    norms = []
    for a in range(4):
        total = 0.0
        for name, p in ensemble.named_parameters():
            mine = factor * before[name] if id(p) in shared else before[name][a]
            total += float(mine.square().sum())
        norms.append(math.sqrt(total))
    bound = sorted(norms)[1]
    found = clip_gradients_(ensemble, bound, gamma=gamma)
    torch.testing.assert_close(found, torch.tensor(norms))
    scales = [min(1.0, bound / norm) for norm in norms]
    for name, p in ensemble.named_parameters():
        if id(p) in shared:
            expected = min(scales) * before[name]
        else:
            expected = torch.stack([c * g for c, g in zip(scales, before[name], strict=True)])
        torch.testing.assert_close(p.grad, expected)


def steps(members, trainable=True, **options):
    """Train equal members, and return the first one's numbers."""
    options = {"lr": 0.5, "weight_decay": 0.0, "epochs": 2, "batch_size": 16} | options
    net = problem.reference().double()
    ensemble = embens.embed(
        net, members, pre=laws.Constant(), post=laws.Constant(), trainable=trainable
    )
    x, y = problem.data()
    fit(ensemble, (x.double(), y), **options)
    return problem.weights(ensemble.member(0))


@pytest.mark.parametrize("trainable", [True, False])
def test_equal_members_are_clipped_as_one_alone(trainable):
    one, eight = steps(1, trainable, clip=0.1), steps(8, trainable, clip=0.1)
    free = steps(1, trainable)
    for name in one:
        torch.testing.assert_close(one[name], eight[name])
    assert any((one[name] - free[name]).abs().max() > 0.01 for name in one)


def test_a_loose_bound_changes_nothing_and_a_wrong_one_is_refused():
    first, second = steps(3), steps(3, clip=1e6)
    problem.assert_equal(first, second)
    for bound in (0, -1.0, math.nan):
        with pytest.raises(ValueError, match="clip must be a number above 0"):
            steps(2, clip=bound)
