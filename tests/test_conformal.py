"""Conformal quantiles, sets and intervals."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch

from embens.conformal import conformal_quantile
from embens.prediction import Prediction


def test_the_quantile_has_the_conformal_rank():
    scores = torch.rand(99, generator=torch.Generator().manual_seed(0))
    quantile = conformal_quantile(scores, 0.9)
    assert int((scores <= quantile).sum()) == 90  # ⌈100 · 0.9⌉


def test_the_coverage_over_many_calibration_sets_is_exact():
    generator = torch.Generator().manual_seed(0)
    rounds, rows = 4000, 30
    scores = torch.rand(rounds, rows + 1, generator=generator)
    covered = [float(s[-1] <= conformal_quantile(s[:-1], 0.8)) for s in scores]
    error = math.sqrt(0.8 * 0.2 / rounds)
    expected = math.ceil(31 * 0.8) / 31  # exact for scores without ties

    assert np.mean(covered) == pytest.approx(expected, abs=4 * error)


def test_too_few_rows_for_a_coverage_raise():
    with pytest.raises(ValueError, match="needs at least 19 held-out rows, got 18"):
        conformal_quantile(torch.rand(18), 0.95)
    with pytest.raises(ValueError, match="between 0 and 1"):
        conformal_quantile(torch.rand(18), 90)


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.95])
def test_sets_are_those_of_mapie(coverage):
    from sklearn.base import BaseEstimator, ClassifierMixin

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mapie = pytest.importorskip("mapie.classification")
    generator = torch.Generator().manual_seed(0)
    outputs = 2 * torch.randn(3, 400, 6, generator=generator)
    target = torch.multinomial(outputs.softmax(-1).mean(0), 1, generator=generator)[:, 0]
    table = Prediction(outputs).probabilities.double()
    table = (table / table.sum(1, keepdim=True)).numpy()

    class Lookup(ClassifierMixin, BaseEstimator):
        classes_ = np.arange(6)

        def fit(self, X, y):
            return self

        def __sklearn_is_fitted__(self):
            return True

        def predict_proba(self, X):
            return table[X[:, 0]]

        def predict(self, X):
            return self.predict_proba(X).argmax(1)

    rows = np.arange(400)[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        conformal = mapie.SplitConformalClassifier(
            Lookup(), confidence_level=coverage, conformity_score="lac", prefit=True
        ).conformalize(rows[:200], target[:200].numpy())
        _, sets = conformal.predict_set(rows[200:])
    held_out, new = Prediction(outputs[:, :200]), Prediction(outputs[:, 200:])
    result = new.conformal_sets(held_out, target[:200], coverage)
    assert np.array_equal(result.sets.numpy(), sets[:, :, 0])
    assert torch.equal(result.sizes, result.sets.sum(1))
    inside = result.sets[torch.arange(200), target[200:]]
    assert result.covered(target[200:]) == pytest.approx(inside.double().mean())
