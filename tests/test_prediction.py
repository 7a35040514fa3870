"""Predictions against formulas, for every family, task and kind of data."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import embens
from embens.prediction import Prediction


def reference(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(8, outputs),
    )


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(23, 4, generator=torch.Generator().manual_seed(1))


class Several(nn.Module):
    """Returns logits among other outputs."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = torch.tanh(self.hidden(x))
        return {"logits": self.head(hidden), "hidden": hidden}


def predictions(x) -> dict[str, Prediction]:
    return {
        "classes": embens.predict(embens.batch_ensemble(reference(), 3), x),
        "values": embens.predict(embens.batch_ensemble(reference(1), 3), x, task="regression"),
        "several outputs": embens.predict(embens.batch_ensemble(Several(), 3), x),
    }


def assert_same(actual: Prediction, expected: Prediction) -> None:
    assert type(actual) is Prediction
    assert actual.task == expected.task
    assert torch.equal(actual.members, expected.members)
    assert (actual.outputs is None) == (expected.outputs is None)
    if expected.outputs is not None:
        assert torch.equal(actual["hidden"].members, expected["hidden"].members)


KINDS = pytest.mark.parametrize("kind", ["classes", "values", "several outputs"])


def test_intervals_of_gaussian_members_are_those_of_the_mixture():
    members = torch.tensor([[[0.0, 0.0]], [[10.0, math.log(4.0)]]], dtype=torch.float64)
    prediction = Prediction(members, "gaussian")
    low, high = prediction.interval(0.8)

    def cdf(value):
        return (torch.special.ndtr(value) + torch.special.ndtr((value - 10) / 2)) / 2

    assert cdf(low).item() == pytest.approx(0.1)
    assert cdf(high).item() == pytest.approx(0.9)
    with pytest.raises(ValueError, match="level must be a number between 0 and 1, got 90"):
        prediction.interval(90)
    with pytest.raises(ValueError, match="q must be a number between 0 and 1, got 0"):
        prediction.quantile(0)


@KINDS
def test_lightning_moves_a_prediction(kind, x):
    # What Lightning calls after predict_step.
    apply_func = pytest.importorskip("lightning_utilities.core.apply_func")
    apply = apply_func.apply_to_collection
    prediction = predictions(x)[kind]
    assert_same(apply(prediction, torch.Tensor, torch.Tensor.cpu), prediction)
    moved = apply({"step": [prediction]}, torch.Tensor, lambda t: t.to("meta"))["step"][0]
    assert moved.members.is_meta
    assert not prediction.members.is_meta


@KINDS
def test_a_loader_concatenates_the_rows_of_predictions(kind, x):
    prediction = predictions(x)[kind]
    parts = [predictions(rows)[kind] for rows in x.split(10)]
    (collated,) = DataLoader(parts, batch_size=3)
    torch.testing.assert_close(collated.members, prediction.members)
    assert collated.task == prediction.task
    with pytest.raises(ValueError, match="must have the same task"):
        next(iter(DataLoader([Prediction(x[None]), Prediction(x[None], "gaussian")], 2)))


@KINDS
def test_torch_saves_and_loads_a_prediction(kind, x, tmp_path):
    prediction = predictions(x)[kind]
    torch.save(prediction, tmp_path / "prediction.pt")
    assert_same(torch.load(tmp_path / "prediction.pt"), prediction)


def test_importing_embens_is_enough_to_load_a_prediction(tmp_path):
    torch.save(Prediction(torch.zeros(2, 3, 4)), tmp_path / "prediction.pt")
    program = f"import embens, torch; print(torch.load({str(tmp_path / 'prediction.pt')!r}))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "members of shape (2, 3, 4)" in result.stdout, result.stderr


@pytest.mark.parametrize("function", [embens.predict, embens.evaluate])
def test_the_device_is_that_of_the_ensemble(function, x):
    with pytest.raises(TypeError, match=r"has no argument 'device'\. .*ensemble.to\(device\)"):
        function(embens.batch_ensemble(reference(), 3), x, device="cpu")


def test_targets_may_be_arrays():
    numpy = pytest.importorskip("numpy")
    outputs = torch.randn(3, 40, 2, generator=torch.Generator().manual_seed(0))
    classes = torch.arange(40) % 2
    prediction = Prediction(outputs)
    sets = prediction.conformal_sets(prediction, numpy.asarray(classes))
    assert sets.covered(numpy.asarray(classes)) == sets.covered(classes)
    assert prediction.temperature(numpy.asarray(classes)) == prediction.temperature(classes)
    values = Prediction(outputs[..., 0], "regression")
    array = numpy.linspace(-1.0, 1.0, 40)
    intervals = values.conformal_intervals(values, array)
    assert intervals.covered(array) == intervals.covered(torch.as_tensor(array))


class TestConformalIntervals:
    """Intervals have their coverage for any network."""

    def noisy(self, rows: int, seed: int, task: str = "regression"):
        generator = torch.Generator().manual_seed(seed)
        target = torch.randn(rows, generator=generator) * 3
        # Members are too certain: their spread is a tenth of the noise.
        members = 0.1 * torch.randn(8, rows, 1, generator=generator)
        if task == "gaussian":
            members = torch.cat([members, torch.full_like(members, -4.0)], -1)
        return Prediction(members, task), target

    @pytest.mark.parametrize("task", ["regression", "gaussian"])
    @pytest.mark.parametrize("coverage", [0.5, 0.9])
    def test_their_coverage_is_the_promised_one(self, task, coverage):
        held_out, target = self.noisy(1000, 0, task)
        prediction, new_target = self.noisy(4000, 1, task)
        intervals = prediction.conformal_intervals(held_out, target, coverage)
        # Standard errors of the calibration rows and of the new rows.
        error = math.sqrt(coverage * (1 - coverage) * (1 / 1000 + 1 / 4000))
        assert intervals.covered(new_target) == pytest.approx(coverage, abs=4 * error)
        low, high = prediction.interval(coverage)
        inside = (low.flatten() <= new_target) & (new_target <= high.flatten())
        assert inside.double().mean() < coverage / 2  # without the margin

    def test_the_margin_is_negative_for_members_that_are_too_uncertain(self):
        held_out, target = self.noisy(500, 0)
        wide = Prediction(held_out.members * 1000, "regression")
        assert wide.conformal_intervals(wide, target, 0.9).margin < 0

    def test_invalid_arguments_raise(self):
        prediction, target = self.noisy(20, 0)
        classes = Prediction(torch.zeros(2, 20, 3))
        with pytest.raises(ValueError, match=r"one value per row, got a mean of shape \(20, 3\)"):
            classes.conformal_intervals(classes, target)
        with pytest.raises(ValueError, match=r"target must have 20 values.*got shape \(19,\)"):
            prediction.conformal_intervals(prediction, target[1:])
        with pytest.raises(ValueError, match="needs at least 99 held-out rows"):
            prediction.conformal_intervals(prediction, target, 0.99)
        with pytest.raises(ValueError, match="held_out must have the task"):
            prediction.conformal_intervals(Prediction(prediction.members), target)


def test_probabilities_of_a_single_output_raise_with_the_fix():
    with pytest.raises(ValueError, match="For a regression pass task='regression' to predict"):
        _ = Prediction(torch.randn(2, 3, 1)).probabilities


def test_probabilities_of_images_need_classes_on_the_last_axis():
    outputs = torch.randn(2, 3, 4, 5, 5)  # (member, batch, class, height, width)
    with pytest.raises(ValueError, match=r"flatten\(1, -2\) if classes are axis 2"):
        _ = Prediction(outputs).probabilities
    rows = Prediction(outputs.movedim(2, -1).flatten(1, -2))
    expected = outputs.softmax(2).mean(0).movedim(1, -1).reshape(-1, 4)
    torch.testing.assert_close(rows.probabilities, expected)


def test_logits_have_no_intervals():
    prediction = Prediction(torch.randn(4, 5, 3))
    for ask in (
        prediction.interval,
        lambda: prediction.quantile(0.5),
        lambda: prediction.components,
    ):
        with pytest.raises(ValueError, match="task='regression' to predict; for classes use conf"):
            ask()
    # One value per row has no classes.
    assert Prediction(torch.randn(4, 5, 1)).interval()[0].shape == (5, 1)
    assert Prediction(torch.randn(4, 5, 3), "regression").interval()[0].shape == (5, 3)
