import pytest
import torch
import torchmetrics.functional.classification as peer
from sklearn.metrics import brier_score_loss, log_loss

from embens import metrics


def draw(seed, members=5, batch=40, classes=4):
    generator = torch.Generator().manual_seed(seed)
    outputs = 2 * torch.randn(members, batch, classes, generator=generator, dtype=torch.float64)
    return outputs, torch.randint(classes, (batch,), generator=generator)


@pytest.fixture(params=range(3))
def case(request):
    return draw(request.param)


def test_ensemble_accuracy_is_that_of_the_mean_output(case):
    outputs, target = case
    expected = peer.multiclass_accuracy(outputs.mean(0), target, 4, average="micro")
    torch.testing.assert_close(metrics.ensemble_accuracy(outputs, target).float(), expected)


def test_ensemble_accuracy_follows_the_mean_output_where_the_mean_probability_differs():
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


def test_brier_is_two_when_sure_and_wrong():
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
