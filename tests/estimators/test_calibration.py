"""Conformal quantiles and temperatures."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from embens.estimators.calibration import best_scale, conformal_quantile
from embens.estimators.heads import Classes


class TestConformal:
    def test_the_quantile_is_the_smallest_score_that_enough_scores_do_not_exceed(self):
        scores = torch.rand(99, generator=torch.Generator().manual_seed(0))
        found = conformal_quantile(scores, 0.9)
        assert int((scores <= found).sum()) == 90  # ⌈100 · 0.9⌉

    def test_intervals_cover_as_promised_over_many_calibration_sets(self):
        generator = torch.Generator().manual_seed(0)
        rounds, rows = 4000, 30
        scores = torch.rand(rounds, rows + 1, generator=generator)
        covered = [float(s[-1] <= conformal_quantile(s[:-1], 0.8)) for s in scores]
        error = math.sqrt(0.8 * 0.2 / rounds)
        expected = math.ceil(31 * 0.8) / 31  # exactly, for scores that don't tie
        assert np.mean(covered) == pytest.approx(expected, abs=4 * error)

    def test_too_few_rows_for_a_coverage_are_an_error_that_counts(self):
        with pytest.raises(ValueError, match="needs at least 19 held-out rows; there are 18"):
            conformal_quantile(torch.rand(18), 0.95)
        with pytest.raises(ValueError, match="between 0 and 1"):
            conformal_quantile(torch.rand(18), 90)


def test_the_best_temperature_undoes_one_that_was_put_in():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(1, 20_000, 3, generator=generator, dtype=torch.float64)
    codes = torch.multinomial(logits[0].softmax(-1), 1, generator=generator)
    head = Classes((np.arange(3),))
    target = head.pack(codes, None, torch.float64)
    assert best_scale(lambda t: head.metric(3 * logits / t, target)) == pytest.approx(3, rel=0.05)
