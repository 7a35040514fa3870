"""Scores of an ensemble against metrics, scikit-learn and closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import embens
from embens import metrics
from embens.evaluation import evaluate, regression_scores
from embens.inference import predict
from embens.prediction import Prediction

CLASSIFICATION = {
    "accuracy",
    "nll",
    "brier",
    "ece",
    "member_accuracy",
    "disagreement",
    "correctness_correlation",
}
REGRESSION = {"rmse", "nll", "crps", "coverage"}


def ensemble(outputs: int, members: int = 5) -> embens.EmbeddedEnsemble:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, outputs))
    return embens.batch_ensemble(net, members)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(40, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def classes() -> torch.Tensor:
    return torch.randint(3, (40,), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def values() -> torch.Tensor:
    return torch.randn(40, generator=torch.Generator().manual_seed(2))


def test_integer_targets_give_the_classification_metrics(x, classes):
    model = ensemble(3)
    scores = evaluate(model, (x, classes), batch_size=7)
    outputs = predict(model, x).members
    assert scores.keys() == CLASSIFICATION
    assert all(type(score) is float for score in scores.values())
    expected = {
        "accuracy": metrics.ensemble_accuracy(outputs, classes),
        "nll": metrics.nll(outputs, classes),
        "brier": metrics.brier(outputs, classes),
        "ece": metrics.expected_calibration_error(outputs, classes),
        "member_accuracy": metrics.member_accuracy(outputs, classes).mean(),
        "disagreement": metrics.disagreement(outputs),
        "correctness_correlation": metrics.correctness_correlation(outputs, classes),
    }
    assert scores == pytest.approx({name: value.item() for name, value in expected.items()})
    assert model.training


def test_a_single_member_has_no_pairs(x, classes):
    scores = evaluate(ensemble(3, members=1), (x, classes))
    assert math.isnan(scores["disagreement"])
    assert math.isnan(scores["correctness_correlation"])
    assert scores["accuracy"] == scores["member_accuracy"]


@pytest.mark.parametrize("columns", [False, True])
def test_floating_targets_give_the_regression_scores(x, values, columns):
    model = ensemble(1)
    scores = evaluate(model, (x, values[:, None] if columns else values))
    assert scores.keys() == REGRESSION
    prediction = predict(model, x, task="regression")
    mean, std = prediction.mean[:, 0].double(), prediction.std[:, 0].double()
    target = values.double()
    normal = torch.distributions.Normal(mean, std)
    z = (target - mean) / std
    density = torch.distributions.Normal(0.0, 1.0).log_prob(z).exp()
    crps = std * (z * (2 * torch.special.ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi))
    assert scores["rmse"] == pytest.approx((mean - target).square().mean().sqrt().item())
    assert scores["nll"] == pytest.approx(-normal.log_prob(target).mean().item())
    assert scores["crps"] == pytest.approx(crps.mean().item())
    covered = z.abs() <= 1.6448536
    assert scores["coverage"] == covered.double().mean().item()


def test_gaussian_outputs_give_the_scores_of_the_mixture(x, values):
    model = ensemble(2)
    scores = evaluate(model, (x, values), task="gaussian")
    prediction = predict(model, x, task="gaussian")
    means, stds = prediction.components
    weights = torch.distributions.Categorical(torch.ones(40, 5))
    mixture = torch.distributions.MixtureSameFamily(
        weights, torch.distributions.Normal(means.T, stds.T)
    )
    assert scores["nll"] == pytest.approx(-mixture.log_prob(values).mean().item(), rel=1e-5)
    low, high = prediction.interval(0.9)
    covered = (low <= values) & (values <= high)
    assert scores["coverage"] == pytest.approx(covered.double().mean().item())


def test_the_coverage_of_the_true_distribution_is_the_nominal_level():
    generator = torch.Generator().manual_seed(0)
    rows = 4000
    target = 3 + 2 * torch.randn(rows, generator=generator)
    members = torch.tensor([3.0, math.log(4.0)]).expand(2, rows, 2)
    prediction = Prediction(members, "gaussian")
    for level in (0.5, 0.9):
        scores = regression_scores(prediction, target, level)
        error = math.sqrt(level * (1 - level) / rows)
        assert scores["coverage"] == pytest.approx(level, abs=4 * error)

    # The CRPS of a perfect normal forecast is std / √π.
    assert scores["crps"] == pytest.approx(2 / math.sqrt(math.pi), rel=0.05)


def make_sources(x, target):
    data = TensorDataset(x, target)
    return {
        "arrays": (x.double().numpy(), target.numpy()),
        "list": [x, target],
        "data set": data,
        "loader": DataLoader(data, batch_size=9),
        "iterator": iter(DataLoader(data, batch_size=9)),
    }


@pytest.mark.parametrize("kind", make_sources(torch.zeros(2, 4), torch.zeros(2)))
def test_all_kinds_of_data_give_the_same_scores(kind, x, classes, values):
    for model, target in ((ensemble(3), classes), (ensemble(1), values)):
        data = make_sources(x, target)[kind]
        scores = evaluate(model, data, batch_size=9)
        assert scores == pytest.approx(evaluate(model, (x, target)), rel=1e-5)


def test_arrays_of_doubles_are_values(x):
    scores = evaluate(ensemble(1), (x.numpy(), np.zeros(40)))
    assert scores.keys() == REGRESSION


def test_fresh_masks_are_drawn_by_the_generator(x, classes):
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    model = embens.mc_dropout(net, 4, fresh=True)

    def run(seed):
        return evaluate(
            model, (x, classes), members=6, generator=torch.Generator().manual_seed(seed)
        )

    assert run(0) == run(0)
    assert run(0) != run(1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"task": "regresion"}, ValueError, "task: unknown 'regresion'; did you mean 'regression'"),
        ({"task": "gaussian"}, ValueError, r"needs outputs \(…, 2\)"),
        ({"batch_size": 0}, ValueError, "batch_size must be a positive integer, got 0"),
        ({"members": 3}, ValueError, "members=3 needs masks that are resampled"),
        ({"data": torch.zeros(5, 4)}, TypeError, "without a target"),
        ({"data": (torch.zeros(5, 4), torch.zeros(4))}, ValueError, "same number of rows"),
        ({"data": (torch.zeros(5, 4), torch.zeros(5, 2))}, ValueError, r"\(5, 3\), got \(5, 2\)"),
        ({"data": (torch.zeros(5, 4), torch.ones(5) > 0)}, TypeError, r"Convert with target.long"),
        ({"data": (torch.zeros(5, 4), torch.zeros(5, 3)), "level": 2}, ValueError, "level must"),
        ({"bacth_size": 3}, TypeError, "did you mean 'batch_size'"),
    ],
)
def test_invalid_arguments_raise(arguments, error, message, x, classes):
    arguments = {"data": (x, classes), **arguments}
    with pytest.raises(error, match=message):
        evaluate(ensemble(3), **arguments)


def test_a_target_in_an_argument_of_its_own_raises_with_the_fix(x, classes):
    with pytest.raises(
        TypeError, match=r"one argument, got 2 .* Call evaluate\(ensemble, \(x, y\)\)"
    ):
        evaluate(ensemble(3), x, classes)


def test_networks_with_several_outputs_raise(x, classes):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x):
            hidden = torch.relu(self.first(x))
            return hidden, self.second(hidden)

    with pytest.raises(TypeError, match="needs a network with a single output"):
        evaluate(embens.batch_ensemble(Two(), 3), (x, classes))


def test_pairs_of_a_mean_and_a_log_variance_get_a_hint(x, values):
    with pytest.raises(ValueError, match=r"use task='gaussian'\."):
        evaluate(ensemble(2), (x, values))
    assert evaluate(ensemble(2), (x, values), task="gaussian")["coverage"] > 0.5


def test_rows_of_probabilities_raise_with_the_fix(x):
    target = torch.rand(40, 3).softmax(-1)
    with pytest.raises(ValueError, match=r"rows of class probabilities.*target\.argmax\(-1\)"):
        evaluate(ensemble(3), (x, target))
    assert "rmse" in evaluate(ensemble(3), (x, target), task="regression")


@pytest.mark.parametrize("call", [predict, lambda net, x: evaluate(net, (x, x))])
def test_a_network_that_is_no_ensemble_raises_with_the_fix(call, x):
    with pytest.raises(TypeError, match=r"expects an ensemble; got Linear\. Embed it first"):
        call(nn.Linear(4, 2), x)
