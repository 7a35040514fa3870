"""Probabilities of logits against float64 formulas; the checks are tested with every metric."""

import math

import pytest
import torch

import embens
from embens.logits import (
    check_labelled,
    check_outputs,
    log_mean_probability,
    log_probabilities,
)


@pytest.fixture
def outputs():
    return 3 * torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(0))


def test_log_probabilities_are_those_of_a_softmax(outputs):
    torch.testing.assert_close(log_probabilities(outputs).exp(), outputs.softmax(-1))


def test_the_mean_probability_is_that_over_members(outputs):
    expected = outputs.double().softmax(-1).mean(0)
    torch.testing.assert_close(log_mean_probability(outputs.double()).exp(), expected)


def test_logarithms_are_finite_where_probabilities_underflow():
    outputs = torch.tensor([[[3e38, -3e38]]])
    assert outputs.log_softmax(-1).isinf().any()
    assert log_probabilities(outputs).isfinite().all()
    assert log_mean_probability(outputs).isfinite().all()


def test_small_probabilities_keep_their_logarithms():
    outputs = torch.tensor([[[0.0, -200.0]], [[0.0, -300.0]]])
    expected = -200 - math.log(2)
    assert log_mean_probability(outputs)[0, 1].item() == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_checked_logits_have_at_least_single_precision(outputs, dtype):
    checked = check_outputs(outputs.to(dtype))
    assert checked.dtype == torch.promote_types(dtype, torch.float32)


def test_checked_labels_are_int64(outputs):
    target = torch.tensor([0, 1, 2, 0, 1, 2], dtype=torch.uint8)
    _, checked = check_labelled(outputs, target)
    assert checked.dtype == torch.int64
    with pytest.raises(ValueError, match="got indices from 1 to 3"):
        check_labelled(outputs, target + 1)


def test_a_prediction_is_refused_with_its_members():
    prediction = embens.Prediction(torch.zeros(2, 3, 4))
    with pytest.raises(TypeError, match=r"got Prediction\. Pass prediction\.members\."):
        embens.metrics.nll(prediction, torch.zeros(3, dtype=torch.int64))
