import math

import pytest
import torch
import torchmetrics.functional.classification as peer
from sklearn.calibration import calibration_curve
from sklearn.metrics import roc_auc_score

from embens import metrics


def draw(seed, members=5, batch=200, classes=4, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    outputs = spread * torch.randn(members, batch, classes, generator=generator).double()
    return outputs, torch.randint(classes, (batch,), generator=generator)


@pytest.fixture(params=range(3))
def case(request):
    return draw(request.param)


@pytest.mark.parametrize("bins", [1, 2, 15, 100])
def test_calibration_error_is_that_of_torchmetrics(case, bins):
    outputs, target = case
    expected = peer.multiclass_calibration_error(outputs.softmax(-1).mean(0), target, 4, bins)
    got = metrics.expected_calibration_error(outputs, target, bins=bins)
    torch.testing.assert_close(got.float(), expected, atol=1e-6, rtol=0)


def test_calibration_error_is_the_weighted_gap_of_the_reliability_curve(case):
    outputs, target = case
    curve = metrics.reliability(outputs, target, bins=7)
    gaps = ((curve.accuracy - curve.confidence).abs() * curve.samples).nansum() / 200
    torch.testing.assert_close(metrics.expected_calibration_error(outputs, target, bins=7), gaps)


def test_reliability_is_scikit_learns_curve(case):
    outputs, target = case
    confidence, predicted = outputs.softmax(-1).mean(0).max(-1)
    accuracy, mean = calibration_curve(predicted == target, confidence, n_bins=10)
    curve = metrics.reliability(outputs, target, bins=10)
    filled = curve.samples > 0
    torch.testing.assert_close(curve.accuracy[filled], torch.from_numpy(accuracy))
    torch.testing.assert_close(curve.confidence[filled], torch.from_numpy(mean))
    assert curve.accuracy[~filled].isnan().all()
    assert curve.samples.sum() == 200


def test_certain_predictions_share_the_last_bin():
    outputs = torch.tensor([[[1e4, 0.0], [3.5, 0.0]]])
    curve = metrics.reliability(outputs, torch.tensor([0, 1]))
    assert curve.samples[-1] == 2
    assert curve.accuracy[-1] == 0.5


@pytest.mark.parametrize("bins", [0, -1, 2.5])
def test_bins_must_be_a_positive_integer(case, bins):
    with pytest.raises(ValueError, match=f"bins: expected a positive integer, got {bins}"):
        metrics.expected_calibration_error(*case, bins=bins)


def test_entropies_are_those_of_torch_distributions(case):
    outputs, _ = case
    members = torch.distributions.Categorical(logits=outputs)
    mean = torch.distributions.Categorical(probs=outputs.softmax(-1).mean(0))
    torch.testing.assert_close(metrics.predictive_entropy(outputs), mean.entropy())
    torch.testing.assert_close(metrics.expected_entropy(outputs), members.entropy().mean(0))


def test_mutual_information_is_total_minus_expected_entropy(case):
    outputs, _ = case
    difference = metrics.predictive_entropy(outputs) - metrics.expected_entropy(outputs)
    torch.testing.assert_close(metrics.mutual_information(outputs), difference)


def test_mutual_information_of_equal_members_is_zero():
    outputs = 10 * torch.randn(1, 500, 9, generator=torch.Generator().manual_seed(0))
    information = metrics.mutual_information(outputs.expand(7, -1, -1))
    assert (information >= 0).all()
    torch.testing.assert_close(information, torch.zeros(500), atol=1e-6, rtol=0)


def test_mutual_information_of_sure_and_different_members_is_the_log_of_their_number():
    outputs = 1e4 * torch.eye(5)[:, None, :]
    torch.testing.assert_close(metrics.mutual_information(outputs), torch.tensor([math.log(5)]))
    assert metrics.expected_entropy(outputs).item() == 0


def test_least_confidence_keeps_the_order_of_sure_samples():
    outputs = torch.tensor([[[20.0, 0.0], [30.0, 0.0], [40.0, 0.0]]])
    expected = torch.tensor([-20.0, -30.0, -40.0]).exp()
    torch.testing.assert_close(metrics.least_confidence(outputs), expected, atol=0, rtol=1e-5)


def test_least_confidence_is_one_minus_the_largest_probability(case):
    expected = 1 - case[0].softmax(-1).mean(0).max(-1).values
    torch.testing.assert_close(metrics.least_confidence(case[0]), expected)


SCORES = [metrics.mutual_information, metrics.predictive_entropy, metrics.least_confidence]


@pytest.mark.parametrize("score", SCORES)
def test_ood_auroc_is_that_of_scikit_learn_and_torchmetrics(case, score):
    outputs, _ = case
    other, _ = draw(9, batch=50, spread=0.8)
    marks = torch.tensor([0] * 200 + [1] * 50)
    scores = torch.cat([score(outputs), score(other)])
    got = metrics.ood_auroc(outputs, other, score=score)
    assert got.item() == pytest.approx(roc_auc_score(marks, scores), abs=1e-12)
    ranks = scores.argsort().argsort() / 250  # torchmetrics wants scores between 0 and 1
    assert got.item() == pytest.approx(peer.binary_auroc(ranks, marks).item(), abs=1e-6)


def test_ood_auroc_takes_marks_in_place_of_other_outputs(case):
    outputs, _ = case
    other, _ = draw(9, batch=50, spread=3)
    both = torch.cat([other, outputs], 1)
    marks = torch.tensor([1] * 50 + [0] * 200)
    expected = metrics.ood_auroc(outputs, other)
    assert metrics.ood_auroc(both, marks) == expected
    assert metrics.ood_auroc(both, marks.bool()) == expected


def test_ood_auroc_counts_ties_half():
    outputs = torch.randint(3, (2, 60, 3), generator=torch.Generator().manual_seed(0)).float()
    marks = torch.arange(60) % 3 == 0
    scores = metrics.predictive_entropy(outputs).mul(20).round()
    assert len(scores.unique()) < 15
    got = metrics.ood_auroc(outputs, marks, score=lambda _: scores)
    assert got.item() == pytest.approx(roc_auc_score(marks, scores), abs=1e-7)
    assert metrics.ood_auroc(outputs, marks, score=lambda f: torch.ones(f.shape[1])) == 0.5


def test_ood_auroc_is_zero_or_one_when_scores_are_apart():
    outputs = torch.zeros(2, 4, 2)
    marks = torch.tensor([0, 0, 1, 1])
    assert metrics.ood_auroc(outputs, marks, score=lambda _: marks.float()) == 1
    assert metrics.ood_auroc(outputs, marks, score=lambda _: -marks.float()) == 0


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ([0, 1], TypeError, "target: .* got list; convert with torch.as_tensor"),
        (torch.tensor([0, 1, 1]), ValueError, r"target: expected 2 marks, .* got shape \(3,\)"),
        (torch.tensor([1, 1]), ValueError, r"got the values \[1\]; pass samples of both kinds"),
        (torch.tensor([0, 2]), ValueError, r"got the values \[0, 2\]"),
        (torch.zeros(4, 2, 2), ValueError, r"like outputs, \(3, 2, 2\) but for the batch"),
        (torch.zeros(3, 2, 5), ValueError, r"got \(3, 2, 5\); use the same members and classes"),
    ],
)
def test_ood_auroc_says_what_is_wrong_with_its_target(target, error, message):
    with pytest.raises(error, match=message):
        metrics.ood_auroc(torch.zeros(3, 2, 2), target)


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (lambda f: f.mean(0), r"one value per sample, shape \(2,\), got \(2, 2\)"),
        (lambda f: 1.0, "got float"),
        (lambda f: f[0, :, 0] * torch.nan, "expected numbers, got NaN"),
    ],
)
def test_ood_auroc_says_what_is_wrong_with_a_score(score, message):
    with pytest.raises(ValueError, match=f"score: .*{message}"):
        metrics.ood_auroc(torch.zeros(3, 2, 2), torch.tensor([0, 1]), score=score)
