"""Temperatures, risk and coverage, flags."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from embens import metrics
from embens.prediction import Prediction
from embens.uncertainty import Flags, best_temperature, risk_coverage

GENERATOR = torch.Generator()


def problem(rows: int, *, overconfidence: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits of three members, and classes sampled from their mean probability."""
    generator = GENERATOR.manual_seed(0)
    outputs = 2 * torch.randn(3, rows, 6, generator=generator)
    target = torch.multinomial(outputs.softmax(-1).mean(0), 1, generator=generator)
    return overconfidence * outputs, target[:, 0]


def as_regression(prediction: Prediction) -> Prediction:
    return Prediction(prediction.members[..., 0], "regression")


class TestTemperature:
    def test_the_best_one_inverts_a_known_scale(self):
        generator = torch.Generator().manual_seed(0)
        logits = 2 * torch.randn(1, 20_000, 3, generator=generator, dtype=torch.float64)
        target = torch.multinomial(logits[0].softmax(-1), 1, generator=generator)[:, 0]
        assert best_temperature(3 * logits, target) == pytest.approx(3, rel=0.05)

    def test_it_is_finite_for_a_classifier_without_errors(self):
        outputs = torch.eye(3).repeat(1, 20, 1)
        temperature = best_temperature(outputs, torch.arange(60) % 3)
        assert 0.06 < temperature < 1

    def test_of_one_network_it_is_that_of_scikit_learn(self):
        from sklearn.calibration import CalibratedClassifierCV
        from sklearn.frozen import FrozenEstimator
        from sklearn.linear_model import LogisticRegression

        generator = np.random.default_rng(0)
        X = generator.normal(size=(3000, 4))
        y = (2 * X[:, :3] + generator.normal(size=(3000, 3))).argmax(1)
        model = LogisticRegression(max_iter=500).fit(X[:500], y[:500])
        model.coef_ *= 3.0  # overconfident
        wrapped = CalibratedClassifierCV(FrozenEstimator(model), method="temperature", cv=2)
        expected = wrapped.fit(X[500:], y[500:]).predict_proba(X[:50])
        prediction = Prediction(torch.tensor(model.decision_function(X))[None])
        temperature = Prediction(prediction.members[:, 500:]).temperature(torch.tensor(y[500:]))
        probabilities = prediction.tempered(temperature).probabilities[:50].numpy()
        assert temperature > 2
        assert probabilities == pytest.approx(expected, abs=2e-3)

    def test_calibrated_probabilities_have_a_smaller_log_loss(self):
        outputs, target = problem(2000, overconfidence=3.0)
        held_out, new = Prediction(outputs[:, :1000]), Prediction(outputs[:, 1000:])
        better = new.tempered(held_out.temperature(target[:1000]))
        for metric in (metrics.nll, metrics.expected_calibration_error):
            assert metric(better.members, target[1000:]) < metric(new.members, target[1000:])


class TestRisk:
    def test_it_is_the_expected_loss_over_random_orders_of_ties(self):
        generator = GENERATOR.manual_seed(0)
        losses = torch.rand(12, generator=generator).double()
        scores = torch.randint(4, (12,), generator=generator).double()
        repetitions = 4000
        expected = torch.zeros(12).double()
        for _ in range(repetitions):
            without_ties = scores + 0.5 * torch.rand(12, generator=generator)
            kept = losses[without_ties.argsort()].cumsum(0)
            expected += kept / torch.arange(1, 13) / repetitions
        curve = risk_coverage(losses, scores)

        torch.testing.assert_close(curve.risk, expected, atol=0.03, rtol=0)
        assert curve.risk[-1] == pytest.approx(losses.mean())
        assert curve.area == pytest.approx(float(curve.risk.mean()))
        assert risk_coverage(losses, losses).area < curve.area

    def test_it_is_constant_if_all_rows_tie(self):
        curve = risk_coverage(torch.tensor([0.0, 1.0, 1.0]), torch.zeros(3))
        assert curve.risk.tolist() == pytest.approx([2 / 3] * 3)

    def test_it_is_the_risk_after_rejection(self):
        outputs, target = problem(500)
        prediction = Prediction(outputs)
        curve = prediction.risk_coverage(target)
        kept = ~prediction.reject(0.3)
        assert int(kept.sum()) == 350
        wrong = (prediction.probabilities.argmax(-1) != target).double()
        assert wrong[kept].mean() == pytest.approx(float(curve.risk[349]))
        assert curve.risk[349] < curve.risk[-1]
        other = prediction.risk_coverage(target, metrics.mutual_information)
        assert other.area != curve.area

    def test_for_regression_it_is_the_squared_error_by_variance(self):
        outputs = torch.tensor([[0.0, 1.0, 5.0], [0.0, 3.0, 9.0]])[..., None]
        prediction = Prediction(outputs, "regression")
        curve = prediction.risk_coverage(torch.tensor([1.0, 2.0, 7.0]))
        assert curve.risk.tolist() == pytest.approx([1.0, 0.5, 1 / 3])
        assert prediction.reject(1 / 3).tolist() == [False, False, True]


def test_the_rate_of_false_alarms_is_bounded():
    generator = GENERATOR.manual_seed(0)
    held_out, new = torch.randn(2, 4000, generator=generator)
    rate = Flags(new, held_out, 0.1).flagged.double().mean()

    # The standard error of the rate, including that of the threshold.
    assert float(rate) == pytest.approx(0.1, abs=4 * 0.0067)
    assert Flags(new + 5, held_out, 0.1).flagged.double().mean() > 0.95


def test_flags_use_the_mutual_information_or_the_given_score():
    outputs, _ = problem(400)
    confident, uncertain = Prediction(3 * outputs), Prediction(0.1 * outputs)
    assert confident.flag(confident, 0.05).flagged.double().mean() <= 0.05
    assert uncertain.flag(confident, 0.05, metrics.predictive_entropy).flagged.all()
    agreeing = Prediction(outputs[:1].expand(3, -1, -1) + 0.01 * outputs)
    assert Prediction(outputs).flag(agreeing, 0.05).flagged.double().mean() > 0.9
    single = Prediction(outputs[:1])  # a single member has no mutual information
    assert torch.equal(single.flag(single).scores, single.entropy)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p, y: p.reject(2), "fraction must be a number from 0 to 1"),
        (lambda p, y: p.flag(p, 0), "rate must be a number between 0 and 1"),
        (lambda p, y: p.tempered(-1), "temperature must be a number above 0"),
        (lambda p, y: p.temperature(y[:-1]), "a tensor with 100 rows, got 99"),
        (
            lambda p, y: p.risk_coverage(y.tolist()),
            "a tensor with 100 rows, got list",
        ),
        (lambda p, y: p.conformal_sets(p, y, 0.999), "needs at least 999 held-out rows"),
        (
            lambda p, y: p.flag(Prediction(p.members[..., :3])),
            "held_out must have the task and the output shape",
        ),
        (lambda p, y: p.risk_coverage(y - 1), "got indices from -1 to"),
        (lambda p, y: p.conformal_sets(p, y[:, None]), r"got shape \(100, 1\)"),
        (lambda p, y: Prediction(p.members / 0).conformal_sets(p, y), "NaN or infinite"),
        (lambda p, y: p.conformal_sets(p, y).covered(y[:5]), "one class per row"),
        (
            lambda p, y: as_regression(p).flag(
                Prediction(0 * as_regression(p).members / 0, "regression")
            ),
            "NaN",
        ),
        (
            lambda p, y: Prediction(p.members[:1, :, 0], "regression").reject(0.1),
            "The variance of all rows is 0",
        ),
        (
            lambda p, y: Prediction(p.members, "regression").reject(0.1),
            "one uncertainty for each",
        ),
    ],
)
def test_invalid_arguments_raise(call, message):
    outputs, target = problem(100)
    with pytest.raises((TypeError, ValueError), match=message):
        call(Prediction(outputs), target)
