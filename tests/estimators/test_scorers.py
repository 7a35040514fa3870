"""Scorers of distributions."""

from __future__ import annotations

import numpy as np
import pytest
from estimators.problems import fitted

from embens.estimators import neg_crps, neg_nll


@pytest.mark.parametrize("scorer", [neg_nll, neg_crps])
def test_a_weight_counts_like_equal_rows_in_a_score(scorer):
    model, X, y = fitted("regressor")
    weights = np.arange(len(y)) % 3
    rows = np.repeat(np.arange(len(y)), weights)
    repeated = scorer(model, X.iloc[rows], y[rows])
    assert scorer(model, X, y, sample_weight=weights) == pytest.approx(repeated, rel=1e-6)


def test_a_classifier_is_told_which_scorer_is_its_own():
    model, X, y = fitted("classifier")
    with pytest.raises(TypeError, match="neg_log_loss"):
        neg_crps(model, X, y)
