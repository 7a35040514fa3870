"""What a diagnosis measures, and its budget."""

from __future__ import annotations

import itertools
import time

import pytest
from finite.diagnosed import X, Y, batch_ensemble

from embens.finite import Budget, diagnose


def test_it_keeps_its_budget_of_memory():
    ensemble = batch_ensemble(members=8)
    numbers = 4 * sum(p.numel() for p in ensemble.shared_parameters())
    report = diagnose(ensemble, X, Y, budget=Budget(memory=6 * numbers))
    assert len(report.losses) == 3
    assert report.rows < 60
    assert "the budget allowed 3 members" in report.notes[0]
    assert len(diagnose(ensemble, X, Y).losses) == 8


def test_it_keeps_its_budget_of_samples_and_members():
    report = diagnose(batch_ensemble(members=8), X, Y, budget=Budget(samples=20, members=5))
    assert report.cosines.shape == (5, 5)
    assert report.rows == 20
    assert report.members == 8


def test_what_is_measured_does_not_depend_on_the_clock(monkeypatch):
    ensemble = batch_ensemble(members=4)
    quick = diagnose(ensemble, X, Y).to_dict()
    clock = itertools.count(0.0, 1000.0)
    for name in ("perf_counter", "monotonic", "time", "process_time"):
        monkeypatch.setattr(time, name, lambda: next(clock))
    assert diagnose(ensemble, X, Y).to_dict() == quick


@pytest.mark.parametrize(
    ("counts", "error", "message"),
    [
        ({"samples": 0}, ValueError, "samples must be at least 1; got 0"),
        ({"members": 2.0}, TypeError, "members must be a whole number; got 2.0"),
        ({"rate_samples": -1}, ValueError, "rate_samples must be at least 0"),
        ({"memory": float("nan")}, ValueError, "memory must be a number of bytes"),
        ({"memory": "3"}, TypeError, "memory must be a number of bytes; got '3'"),
    ],
)
def test_a_budget_that_is_no_count_is_refused(counts, error, message):
    with pytest.raises(error, match=message):
        Budget(**counts)
