"""Sample weights and class weights."""

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from training import problem

import embens
from embens.losses import squared_error
from embens.training import Batches, KeepBest, Objective, fit
from embens.training.weighting import WeightedTarget, weighted

X, Y = problem.data(24)
W = torch.arange(24) % 3
REPEATED = torch.arange(24).repeat_interleave(W)


def train(data, **options) -> dict[str, torch.Tensor]:
    ensemble = problem.ensemble(outputs=options.pop("outputs", 3))
    fit(ensemble, data, epochs=3, batch_size=100, lr=0.1, **options)
    return problem.weights(ensemble)


def assert_close(first, second) -> None:
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=1e-6)


VALUES = X.sum(1)
PROBLEMS = {
    "classes": (Y, {}),
    "classes, loss of torch": (Y, {"criterion": nn.CrossEntropyLoss(label_smoothing=0.1)}),
    "classes, function of torch": (
        Y,
        {"criterion": functools.partial(F.cross_entropy, label_smoothing=0.1)},
    ),
    "classes, own loss": (
        Y,
        {"criterion": lambda o, t: F.cross_entropy(o, t, reduction="none") ** 2},
    ),
    "chunks": (Y, {"callbacks": [Objective(chunk=2)]}),
    "loss of the mean": (Y, {"callbacks": [Objective("mean")]}),
    "values": (VALUES, {"outputs": 1}),
    "values, loss of torch": (VALUES, {"outputs": 1, "criterion": nn.HuberLoss()}),
    "values, function of torch": (VALUES, {"outputs": 1, "criterion": F.l1_loss}),
    "variances": (VALUES, {"outputs": 2, "criterion": embens.gaussian_nll}),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_row_of_weight_two_counts_as_two_rows(name):
    target, options = PROBLEMS[name]
    repeated = train((X[REPEATED], target[REPEATED]), **dict(options))
    assert_close(train((X, target, W.float()), **dict(options)), repeated)


def test_labels_to_ignore_do_not_count():
    target = Y.clone()
    target[::4] = -100
    repeated = train((X[REPEATED], target[REPEATED]))
    assert_close(train((X, target, W)), repeated)


SOURCES = {
    "arrays": lambda: (X.numpy().astype(np.float64), Y.numpy(), W.numpy()),
    "data set": lambda: TensorDataset(X, Y, W),
    "items": lambda: ItemsWithWeights(),
    "loader": lambda: DataLoader(TensorDataset(X, Y, W), 24),
    "nested": lambda: ((X,), Y, W),
    "named inputs": lambda: ({"input": X}, Y, W),
}


@pytest.mark.parametrize("name", SOURCES)
def test_weights_come_with_every_kind_of_data(name):
    assert_close(train(SOURCES[name]()), train((X, Y, W)))


class ItemsWithWeights(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int):
        return X[index], Y[index], W[index]


@pytest.mark.parametrize("kind", ["own", "split"])
def test_members_with_other_rows_have_the_weights_of_their_rows(kind):
    equal = torch.full((24,), 5.0)
    options = {"callbacks": [Batches(kind)]}
    assert_close(train((X, Y, equal), **options), train((X, Y), **options))


def test_validation_losses_are_weighted_and_metrics_are_not():
    ensemble = problem.ensemble()
    options = {"epochs": 1, "callbacks": [KeepBest("loss")]}
    row = fit(ensemble, (X, Y, W), (X, Y, W), **options).epochs[0]
    outputs = ensemble(X)
    losses = [F.cross_entropy(o, Y, reduction="none") @ W.float() / W.sum() for o in outputs]
    assert row["validation_loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    scores = embens.evaluate(ensemble, (X, Y, W))
    assert scores == embens.evaluate(ensemble, (X, Y))
    assert row["validation_nll"] == pytest.approx(scores["nll"], rel=1e-5)
    data_set = TensorDataset(X, Y, W)
    torch.testing.assert_close(embens.predict(ensemble, data_set).members, outputs.detach())


def test_class_weights_are_those_of_the_criterion():
    class_weight = torch.tensor([1.0, 2.0, 0.5])
    criterion = nn.CrossEntropyLoss(weight=class_weight)
    assert_close(train((X, Y), criterion=criterion), train((X, Y, class_weight[Y])))
    with pytest.raises(ValueError, match=r"cannot be combined\. Multiply .*class_weight\[y\]"):
        train((X, Y, W), criterion=criterion)


def test_a_batch_without_weight_has_no_gradient():
    outputs = torch.randn(3, 2, requires_grad=True)
    target = WeightedTarget(torch.tensor([0, 1, 1]), torch.zeros(3))
    loss = weighted(F.cross_entropy)(outputs, target)
    loss.backward()

    assert loss == 0
    assert not outputs.grad.any()


def test_positions_of_a_row_share_its_weight():
    outputs, target = torch.randn(2, 3, 5), torch.tensor([[0, 1, 2, 0, -100], [1, 1, 1, 1, 1]])
    weight = torch.tensor([3.0, 1.0])
    losses = [F.cross_entropy(o[None], t[None]) for o, t in zip(outputs, target, strict=True)]
    expected = (3 * losses[0] + losses[1]) / 4
    actual = weighted(F.cross_entropy)(outputs, WeightedTarget(target, weight))

    torch.testing.assert_close(actual, expected)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, z):
        return self.last(torch.relu(self.first(x + z)))


class Optional(Two):
    def forward(self, x, z=None):
        return super().forward(x, 0.0 if z is None else z)


def test_several_inputs_are_not_taken_for_weights():
    generator = torch.Generator().manual_seed(0)
    ensemble = embens.batch_ensemble(Two(), 2, generator=generator)
    fit(ensemble, (X, X, Y), epochs=1)
    fit(ensemble, ((X, X), Y, W), epochs=1)
    ensemble = embens.batch_ensemble(Optional(), 2, generator=generator)
    fit(ensemble, (X, X, Y), epochs=1)  # the last element holds classes
    with pytest.raises(TypeError, match=r"ambiguous.*takes 1 or 2 inputs.*\(\(x,\), y, w\)"):
        fit(ensemble, (X, Y, W.float()), epochs=1)
    fit(ensemble, ((X,), Y, W.float()), epochs=1)


@pytest.mark.parametrize(
    ("weight", "criterion", "message"),
    [
        (-W, None, "one finite, non-negative number for each row"),
        (W / 0.0, None, "one finite, non-negative number for each row"),
        (W[1:], None, "same number of rows"),
        (W, lambda o, t: F.cross_entropy(o, t), r"returns 24 losses, one for each row, got shape"),
    ],
)
def test_invalid_weights_and_criteria_raise(weight, criterion, message):
    with pytest.raises(ValueError, match=message):
        train((X, Y, weight), criterion=criterion)


def test_squared_errors_are_weighted_means():
    outputs, target = torch.tensor([[1.0], [5.0]]), torch.zeros(2)
    packed = WeightedTarget(target, torch.tensor([3.0, 1.0]))
    assert weighted(squared_error)(outputs, packed) == 7
