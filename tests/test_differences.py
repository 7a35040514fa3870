"""Paired differences against simulated tables."""

from __future__ import annotations

import math

import numpy
import torch

from embens.differences import Comparison, Difference, paired_differences, paired_interval


def test_the_interval_covers_the_mean_over_rows_and_training_runs():
    generator = numpy.random.default_rng(0)
    seeds, rows, repeats = 4, 40, 400
    covered = 0
    for _ in range(repeats):
        run_effects = generator.normal(0, 0.3, (seeds, 1))
        row_effects = generator.normal(0, 1, (1, rows))
        table = 0.5 + run_effects + row_effects + generator.normal(0, 1, (seeds, rows))
        low, high = paired_interval(torch.from_numpy(table))
        covered += low < 0.5 < high
    # Three standard errors of a binomial proportion; the interval is slightly conservative.
    tolerance = 3 * math.sqrt(0.95 * 0.05 / repeats)

    assert 0.95 - tolerance < covered / repeats < 0.99


def test_rows_alone_would_cover_too_seldom_if_runs_differ():
    generator = numpy.random.default_rng(0)
    table = generator.normal(0, 1, (3, 1)) + generator.normal(0, 0.1, (3, 1000))
    low, high = paired_interval(torch.from_numpy(table))
    single_low, single_high = paired_interval(torch.from_numpy(table[:1]))
    assert high - low > 10 * (single_high - single_low)


def test_differences_are_those_to_the_first_candidate():
    values = {
        "one": {"accuracy": torch.tensor([[0.0, 1.0, 0.0]])},
        "two": {"accuracy": torch.tensor([[1.0, 1.0, 0.0]])},
        "three": {"accuracy": torch.tensor([[0.0, 1.0, 0.0]])},
    }
    second, third = paired_differences(values)

    assert (second.candidate, second.baseline, second.metric) == ("two", "one", "accuracy")
    assert math.isclose(second.value, 1 / 3, rel_tol=1e-6)
    assert second.low < second.value < second.high
    assert (third.value, third.low, third.high) == (0.0, 0.0, 0.0)


def test_the_text_marks_clear_differences_and_separates_quality_from_cost():
    scores = {
        "one": {"accuracy": 0.5, "nll": 1.0, "disagreement": math.nan, "parameters": 123456.0},
        "two": {"accuracy": 0.7, "nll": 0.9, "disagreement": 0.25, "parameters": 1234567.0},
    }
    differences = [
        Difference("two", "one", "accuracy", 0.2, 0.1, 0.3),
        Difference("two", "one", "nll", -0.1, -0.3, 0.1),
    ]
    quality, cost, compared, legend = str(Comparison(scores, differences, seeds=1)).split("\n\n")

    assert [line.split() for line in quality.splitlines()] == [
        ["quality", "accuracy", "nll"],
        ["one", "0.5", "1"],
        ["two", "0.7", "0.9"],
    ]
    assert [line.split() for line in cost.splitlines()[1:]] == [
        ["one", "123,456"],
        ["two", "1,234,567"],
    ]
    assert compared.splitlines()[1].split() == ["two", "+0.2", "±", "0.1*", "-0.1", "±", "0.2"]
    assert "another run may differ more" in legend
    assert "another run" not in str(Comparison(scores, differences, seeds=2))
