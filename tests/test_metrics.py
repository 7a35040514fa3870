"""One battery over every metric, then each against its formula and a peer."""

import inspect
import math
import typing
import warnings

import jaxtyping
import numpy
import pytest
import torch
import torchmetrics.functional.classification as peer
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score
from torch import Tensor

from embens import metrics

FUNCTIONS = [
    function
    for name, function in inspect.getmembers(metrics, inspect.isfunction)
    if function.__module__ == "embens.metrics" and not name.startswith("_")
]
PAIRS = (metrics.correctness_correlation, metrics.disagreement)
LABELLED = [
    metrics.brier,
    metrics.correctness_correlation,
    metrics.ensemble_accuracy,
    metrics.expected_calibration_error,
    metrics.member_accuracy,
    metrics.member_nll,
    metrics.nll,
    metrics.reliability,
]
every = pytest.mark.parametrize("metric", FUNCTIONS, ids=lambda f: f.__name__)
labelled = pytest.mark.parametrize("metric", LABELLED, ids=lambda f: f.__name__)


def example(members=4, batch=20, classes=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    outputs = 2 * torch.randn(members, batch, classes, generator=generator, dtype=torch.float64)
    target = torch.arange(batch) % 2  # also flags samples of both kinds for ood_auroc
    return outputs.to(dtype), target


def tensors(result):
    return [result] if isinstance(result, Tensor) else list(result)


@every
def test_returns_the_shapes_it_promises(metric):
    outputs, target = example()
    hints = typing.get_type_hints(metric, localns=vars(jaxtyping))
    result = metric(outputs, target)
    if metric is metrics.reliability:
        assert [len(values) for values in result] == [15, 15, 15]
        return
    with jaxtyping.jaxtyped("context"):
        assert isinstance(outputs, hints["outputs"])
        assert isinstance(result, hints["return"])


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_computes_in_float32_at_least(metric, dtype):
    outputs, target = example(dtype=dtype)
    exact = tensors(metric(outputs.double(), target))

    for got, expected in zip(tensors(metric(outputs, target)), exact, strict=True):
        assert got.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(
            got.double(), expected, atol=2e-6, rtol=2e-5, equal_nan=metric is metrics.reliability
        )


@every
def test_is_the_same_under_no_grad_and_keeps_its_arguments(metric):
    outputs, target = example()
    before = outputs.clone(), target.clone()
    free = tensors(metric(outputs, target))
    outputs.requires_grad_()
    with torch.no_grad():
        fixed = tensors(metric(outputs, target))
    recorded = tensors(metric(outputs, target))

    for a, b, c in zip(free, fixed, recorded, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(a, c.detach(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(outputs, before[0])
    assert torch.equal(target, before[1])


@pytest.mark.parametrize("metric", [f for f in FUNCTIONS if f not in PAIRS])
@pytest.mark.parametrize(("members", "batch"), [(1, 20), (4, 2), (1, 2)])
def test_accepts_a_single_member_and_a_small_batch(metric, members, batch):
    outputs, target = example(members, batch)
    for values in tensors(metric(outputs, target)):
        assert metric is metrics.reliability or values.isfinite().all()


@pytest.mark.parametrize("metric", [f for f in LABELLED if f not in PAIRS])
def test_accepts_a_single_sample(metric):
    outputs, target = example(batch=1)
    for values in tensors(metric(outputs, target)):
        assert metric is metrics.reliability or values.isfinite().all()


@every
def test_is_not_nan_where_probabilities_are_zero(metric):
    outputs = torch.tensor([1e4, -1e4, 3e38, -3e38]).outer(torch.tensor([1.0, -1.0]))
    outputs = outputs.expand(3, 4, 2) * torch.tensor([1.0, 1.0, -1.0])[:, None, None]
    for values in tensors(metric(outputs, torch.tensor([0, 0, 1, 1]))):
        assert metric is metrics.reliability or not values.isnan().any()


@every
@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda x: x.tolist(), TypeError, "got list. Convert with torch.as_tensor"),
        (lambda x: x.argmax(-1), TypeError, "got torch.int64. Pass logits"),
        (lambda x: x[0], ValueError, r"got shape \(20, 2\). For a single model add the member"),
        (lambda x: x[None], ValueError, r"got shape \(1, 4, 20, 2\)"),
        (lambda x: x[:, :0], ValueError, r"got the empty shape \(4, 0, 2\). Pass at least one"),
        (lambda x: x[:0], ValueError, r"got the empty shape \(0, 20, 2\)"),
        (lambda x: x[..., :1], ValueError, "got a single class .* For one logit z"),
        (lambda x: x / 0, ValueError, "got 160 values that are NaN or infinite"),
        (lambda x: x * torch.nan, ValueError, "Did the training diverge"),
    ],
)
def test_raises_for_invalid_outputs(metric, spoil, error, message):
    outputs, target = example()
    with pytest.raises(error, match=f"outputs must be finite floating logits .*{message}"):
        metric(spoil(outputs), target)


@labelled
@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda y: y.tolist(), TypeError, "got list. Convert with torch.as_tensor"),
        (lambda y: y.float(), TypeError, r"got torch.float32\. For values .* use embens.evaluate"),
        (lambda y: y.bool(), TypeError, "got torch.bool"),
        (lambda y: y[:, None], ValueError, r"got shape \(20, 1\). Squeeze a column"),
        (lambda y: y[1:], ValueError, r"got shape \(19,\)"),
        (lambda y: y + 1, ValueError, "got indices from 1 to 2"),
        (lambda y: -100 * y, ValueError, "got indices from -100 to 0"),
    ],
)
def test_raises_for_an_invalid_target(metric, spoil, error, message):
    outputs, target = example()
    expected = r"target must be 20 class indices from 0 to 1, shape \(20,\)"
    with pytest.raises(error, match=f"{expected}, {message}"):
        metric(outputs, spoil(target))


@labelled
def test_accepts_any_integer_type_of_target(metric):
    outputs, target = example()
    for dtype in (torch.uint8, torch.int32):
        for a, b in zip(
            tensors(metric(outputs, target)),
            tensors(metric(outputs, target.to(dtype))),
            strict=True,
        ):
            torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.parametrize("metric", [f for f in FUNCTIONS if f not in LABELLED])
def test_needs_no_target_if_it_is_not_used(metric):
    outputs, target = example()
    if metric is metrics.ood_auroc:
        return
    assert inspect.signature(metric).parameters["target"].default is None
    assert torch.equal(metric(outputs), metric(outputs, target))


# --- predictions -----------------------------------------------------------------------------


def draw(seed, members=5, batch=200, classes=4, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    outputs = spread * torch.randn(members, batch, classes, generator=generator).double()
    return outputs, torch.randint(classes, (batch,), generator=generator)


@pytest.fixture(params=range(3))
def case(request):
    return draw(request.param)


def test_ensemble_accuracy_is_that_of_the_mean_output(case):
    outputs, target = case
    expected = peer.multiclass_accuracy(outputs.mean(0), target, 4, average="micro")
    torch.testing.assert_close(metrics.ensemble_accuracy(outputs, target).float(), expected)


def test_ensemble_accuracy_uses_the_mean_output_not_the_mean_probability():
    outputs = torch.tensor([[[9.0, 0.0]], [[0.0, 4.0]], [[0.0, 4.0]]])
    assert outputs.softmax(-1).mean(0).argmax(-1).item() == 1
    assert metrics.ensemble_accuracy(outputs, torch.tensor([0])) == 1


def test_ensemble_accuracy_of_bfloat16_takes_the_mean_in_float32():
    outputs = torch.tensor([[[256.0, 255.0]], [[0.0, 0.0]], [[0.0, 1.5]]], dtype=torch.bfloat16)
    assert metrics.ensemble_accuracy(outputs, torch.tensor([1])) == 1


def test_member_accuracy_is_that_of_each_member(case):
    outputs, target = case
    expected = [peer.multiclass_accuracy(f, target, 4, average="micro") for f in outputs]
    torch.testing.assert_close(
        metrics.member_accuracy(outputs, target).float(), torch.stack(expected)
    )


def test_nll_is_the_log_loss_of_the_mean_probability(case):
    outputs, target = case
    expected = log_loss(target, outputs.softmax(-1).mean(0), labels=range(4))
    assert metrics.nll(outputs, target).item() == pytest.approx(expected, rel=1e-12)


def test_member_nll_is_the_cross_entropy_of_each_member(case):
    outputs, target = case
    expected = torch.stack([torch.nn.functional.cross_entropy(f, target) for f in outputs])
    torch.testing.assert_close(metrics.member_nll(outputs, target), expected)
    assert metrics.nll(outputs, target) <= expected.mean()


def test_nll_stays_exact_where_probabilities_underflow():
    outputs = torch.tensor([[[1000.0, 0.0]], [[3000.0, 0.0]]])
    expected = 1000 + torch.tensor(2.0).log()
    torch.testing.assert_close(metrics.nll(outputs, torch.tensor([1])), expected)


def test_brier_is_scikit_learns(case):
    outputs, target = case
    probability = outputs.softmax(-1).mean(0)
    expected = brier_score_loss(target, probability, labels=range(4), scale_by_half=False)
    assert metrics.brier(outputs, target).item() == pytest.approx(expected, rel=1e-12)


def test_brier_is_two_for_a_confident_error():
    assert metrics.brier(torch.tensor([[[1e4, 0.0]]]), torch.tensor([1])) == 2


@pytest.mark.parametrize("metric", [metrics.nll, metrics.member_nll, metrics.brier])
def test_proper_scores_are_differentiable(metric):
    outputs, target = draw(0, members=2, batch=3)
    outputs.requires_grad_()
    assert torch.autograd.gradcheck(lambda f: metric(f, target), outputs)


@pytest.mark.parametrize("metric", [metrics.nll, metrics.brier])
def test_gradients_stay_finite_where_probabilities_are_zero(metric):
    outputs = torch.tensor([[[1e4, 0.0]], [[0.0, 1e4]]], requires_grad=True)
    metric(outputs, torch.tensor([1])).backward()
    assert outputs.grad.isfinite().all()


# --- diversity -------------------------------------------------------------------------------


@pytest.fixture(params=range(3))
def correlated(request):
    generator = torch.Generator().manual_seed(request.param)
    shared = torch.randn(30, 3, generator=generator)
    outputs = shared + torch.randn(6, 30, 3, generator=generator)
    return outputs, torch.randint(3, (30,), generator=generator)


def outputs_of(correct):
    """Return two-class outputs with this correctness, and the target."""
    correct = torch.as_tensor(correct, dtype=torch.float32)
    return torch.stack([correct, 1 - correct], -1), torch.zeros(correct.shape[1], dtype=torch.int64)


def mean_over_pairs(matrix):
    members = len(matrix)
    return sum(matrix[a][b] for a in range(members) for b in range(members) if a != b) / (
        members * (members - 1)
    )


def test_correlation_is_the_mean_pearson_coefficient_over_pairs(correlated):
    outputs, target = correlated
    correct = (outputs.argmax(-1) == target).double()
    expected = mean_over_pairs(numpy.corrcoef(correct.numpy()))
    got = metrics.correctness_correlation(outputs, target).item()
    assert got == pytest.approx(expected, abs=1e-6)


def test_correlation_of_equal_members_is_one_and_of_opposite_ones_minus_one():
    row = [1, 1, 0, 1, 0]
    assert metrics.correctness_correlation(*outputs_of([row] * 7)) == pytest.approx(1)
    opposite = [1 - value for value in row]
    assert metrics.correctness_correlation(*outputs_of([row, opposite])) == pytest.approx(-1)


def test_correlation_leaves_out_members_with_constant_correctness():
    rows = [[1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 1]]
    alone = metrics.correctness_correlation(*outputs_of(rows))
    joined = metrics.correctness_correlation(*outputs_of([*rows, [1] * 4, [0] * 4]))
    assert joined == pytest.approx(alone.item())
    assert joined == pytest.approx(mean_over_pairs(numpy.corrcoef(rows)))


@pytest.mark.parametrize(
    ("rows", "remaining"),
    [([[1, 1], [0, 0]], "0 of 2"), ([[1, 0], [0, 0], [1, 1]], "1 of 3"), ([[1, 0]], "1 of 1")],
)
def test_correlation_without_a_pair_is_nan_with_a_warning(rows, remaining):
    outputs, target = outputs_of(rows)
    with pytest.warns(
        RuntimeWarning, match=f"correctness_correlation is NaN: .* got {remaining} members"
    ):
        assert metrics.correctness_correlation(outputs, target).isnan()


def test_the_warning_points_at_the_caller():
    outputs, target = outputs_of([[1, 0]])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        metrics.correctness_correlation(outputs, target)
        metrics.disagreement(outputs)

    assert [warning.filename for warning in caught] == [__file__, __file__]


def test_correlation_does_not_depend_on_the_order_of_members(correlated):
    outputs, target = correlated
    torch.testing.assert_close(
        metrics.correctness_correlation(outputs.flip(0), target),
        metrics.correctness_correlation(outputs, target),
    )


def test_disagreement_is_the_mean_fraction_over_pairs(correlated):
    outputs, _ = correlated
    predicted = outputs.argmax(-1)
    matrix = [[(a != b).float().mean().item() for b in predicted] for a in predicted]
    assert metrics.disagreement(outputs).item() == pytest.approx(mean_over_pairs(matrix))


def test_disagreement_runs_from_zero_to_one():
    assert metrics.disagreement(torch.eye(3).expand(4, 3, 3)) == 0
    assert metrics.disagreement(torch.eye(3)[:, None, :]) == 1


def test_disagreement_of_one_member_is_nan_with_a_warning(correlated):
    with pytest.warns(RuntimeWarning, match="disagreement is NaN: .* got 1"):
        assert metrics.disagreement(correlated[0][:1]).isnan()


# --- uncertainty -----------------------------------------------------------------------------


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


def test_a_confidence_of_one_belongs_to_the_last_bin():
    outputs = torch.tensor([[[1e4, 0.0], [3.5, 0.0]]])
    curve = metrics.reliability(outputs, torch.tensor([0, 1]))
    assert curve.samples[-1] == 2
    assert curve.accuracy[-1] == 0.5


@pytest.mark.parametrize("bins", [0, -1, 2.5])
def test_bins_must_be_a_positive_integer(case, bins):
    with pytest.raises(ValueError, match=f"bins must be a positive integer, got {bins}"):
        metrics.expected_calibration_error(*case, bins=bins)


def test_entropies_are_those_of_torch_distributions(case):
    outputs, _ = case
    mean = torch.distributions.Categorical(probs=outputs.softmax(-1).mean(0))
    torch.testing.assert_close(metrics.predictive_entropy(outputs), mean.entropy())


def test_mutual_information_is_total_minus_expected_entropy(case):
    outputs, _ = case
    members = torch.distributions.Categorical(logits=outputs).entropy().mean(0)
    difference = metrics.predictive_entropy(outputs) - members
    torch.testing.assert_close(metrics.mutual_information(outputs), difference)


def test_mutual_information_of_equal_members_is_zero():
    outputs = 10 * torch.randn(1, 500, 9, generator=torch.Generator().manual_seed(0))
    information = metrics.mutual_information(outputs.expand(7, -1, -1))
    assert (information >= 0).all()
    torch.testing.assert_close(information, torch.zeros(500), atol=1e-6, rtol=0)


def test_mutual_information_of_confident_and_different_members_is_log_members():
    outputs = 1e4 * torch.eye(5)[:, None, :]
    torch.testing.assert_close(metrics.mutual_information(outputs), torch.tensor([math.log(5)]))


def test_least_confidence_orders_confident_samples():
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
    flags = torch.tensor([0] * 200 + [1] * 50)
    scores = torch.cat([score(outputs), score(other)])
    got = metrics.ood_auroc(outputs, other, score=score)
    assert got.item() == pytest.approx(roc_auc_score(flags, scores), abs=1e-12)
    ranks = scores.argsort().argsort() / 250  # torchmetrics wants scores between 0 and 1
    assert got.item() == pytest.approx(peer.binary_auroc(ranks, flags).item(), abs=1e-6)


def test_ood_auroc_accepts_flags_in_place_of_other_outputs(case):
    outputs, _ = case
    other, _ = draw(9, batch=50, spread=3)
    both = torch.cat([other, outputs], 1)
    flags = torch.tensor([1] * 50 + [0] * 200)
    expected = metrics.ood_auroc(outputs, other)

    assert metrics.ood_auroc(both, flags) == expected
    assert metrics.ood_auroc(both, flags.bool()) == expected


def test_ood_auroc_counts_ties_half():
    outputs = torch.randint(3, (2, 60, 3), generator=torch.Generator().manual_seed(0)).float()
    flags = torch.arange(60) % 3 == 0
    scores = metrics.predictive_entropy(outputs).mul(20).round()
    assert len(scores.unique()) < 15
    got = metrics.ood_auroc(outputs, flags, score=lambda _: scores)
    assert got.item() == pytest.approx(roc_auc_score(flags, scores), abs=1e-7)
    assert metrics.ood_auroc(outputs, flags, score=lambda f: torch.ones(f.shape[1])) == 0.5


def test_ood_auroc_is_zero_or_one_if_scores_are_separated():
    outputs = torch.zeros(2, 4, 2)
    flags = torch.tensor([0, 0, 1, 1])
    assert metrics.ood_auroc(outputs, flags, score=lambda _: flags.float()) == 1
    assert metrics.ood_auroc(outputs, flags, score=lambda _: -flags.float()) == 0


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ([0, 1], TypeError, "target must be a tensor, got list"),
        (torch.tensor([0, 1, 1]), ValueError, r"target must be 2 flags, .* got shape \(3,\)"),
        (torch.tensor([1, 1]), ValueError, r"with both values, got .* the values \[1\]"),
        (torch.tensor([0, 2]), ValueError, r"the values \[0, 2\]"),
        (torch.zeros(4, 2, 2), ValueError, r"logits \(3, other, 2\) like outputs"),
        (torch.zeros(3, 2, 5), ValueError, r"like outputs, got shape \(3, 2, 5\)"),
    ],
)
def test_ood_auroc_raises_for_an_invalid_target(target, error, message):
    with pytest.raises(error, match=message):
        metrics.ood_auroc(torch.zeros(3, 2, 2), target)


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (lambda f: f.mean(0), r"one number per sample, shape \(2,\), got shape \(2, 2\)"),
        (lambda f: f[0, :, 0] * torch.nan, "one number per sample.* got NaN"),
    ],
)
def test_ood_auroc_raises_for_an_invalid_score(score, message):
    with pytest.raises(ValueError, match=f"score must return {message}"):
        metrics.ood_auroc(torch.zeros(3, 2, 2), torch.tensor([0, 1]), score=score)


def test_calibration_error_has_a_gradient_where_bins_are_empty():
    outputs = torch.randn(3, 20, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    metrics.expected_calibration_error(outputs, torch.zeros(20, dtype=torch.long)).backward()
    assert outputs.grad is not None
    assert outputs.grad.isfinite().all()
    assert outputs.grad.any()
