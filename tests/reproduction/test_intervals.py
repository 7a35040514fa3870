"""Confidence intervals over seeds."""

from __future__ import annotations

import math

import numpy
import pandas
import pytest
from scipy import stats

from reproduction.intervals import bootstrap, interval


def seeds(*values):
    return pandas.DataFrame({"seed": range(len(values)), "y": values})


def test_the_interval_of_a_mean_is_students():
    values = [1.0, 2.0, 4.0, 3.5, 0.5]
    value, low, high, count = interval(seeds(*values), lambda t: t["y"].mean())
    expected = stats.t.interval(
        0.95, len(values) - 1, loc=numpy.mean(values), scale=stats.sem(values)
    )

    assert count == 5
    assert value == pytest.approx(numpy.mean(values))
    assert (low, high) == pytest.approx(expected)


def test_the_interval_covers_a_ratio_of_means_as_often_as_its_level():
    generator = numpy.random.default_rng(0)
    covered, runs = 0, 400
    for _ in range(runs):
        table = pandas.DataFrame(
            {
                "seed": range(8),
                "x": generator.normal(2.0, 0.3, 8),
                "y": generator.normal(6.0, 0.5, 8),
            }
        )
        _, low, high, _ = interval(table, lambda t: t["y"].mean() / t["x"].mean())
        covered += low < 3.0 < high
    error = math.sqrt(0.95 * 0.05 / runs)

    assert abs(covered / runs - 0.95) < 5 * error


PEAKED = numpy.array([0.90, 0.93, 0.95, 0.953, 0.94, 0.90])


def simulate_accuracies(generator, truth, seeds=5):
    """Return a table of accuracies against M: the truth, noise of each cell and of each seed."""
    noise_of_cells = generator.normal(0, 0.012, (seeds, len(truth)))
    noise_of_seeds = generator.normal(0, 0.01, (seeds, 1))
    rows = []
    for seed, accuracies in enumerate(truth + noise_of_cells + noise_of_seeds):
        for doublings, accuracy in enumerate(accuracies):
            rows.append({"seed": seed, "members": 2**doublings, "accuracy": accuracy})
    return pandas.DataFrame(rows)


@pytest.mark.parametrize(
    ("name", "statistic", "truth"),
    [
        ("minimum", lambda t: min(t.curve("members", "accuracy")[1]), 0.90),
        ("rise and fall", lambda t: t.rise_and_fall("members"), 0.053),
        ("best M", lambda t: math.log2(t.best("members")), 3.0),
    ],
)
def test_the_bootstrap_covers_statistics_that_jump(name, statistic, truth):
    generator = numpy.random.default_rng(1)
    runs, covered = 40, 0
    for _ in range(runs):
        table = simulate_accuracies(generator, PEAKED)
        _, low, high, _ = interval(table, statistic, samples=bootstrap(table, 25))
        covered += low <= truth <= high
    error = math.sqrt(0.95 * 0.05 / runs)

    assert covered / runs > 0.95 - 3 * error  # the jackknife of the best M covers 0.84


def test_the_jackknife_of_a_best_m_covers_it_less_often_than_its_level():
    # The reason for the bootstrap of statistics that jump.
    generator = numpy.random.default_rng(1)
    flat = numpy.array([0.90, 0.93, 0.95, 0.951, 0.9505, 0.95])
    runs, covered = 40, 0
    for _ in range(runs):
        table = simulate_accuracies(generator, flat)
        _, low, high, _ = interval(table, lambda t: math.log2(t.best("members")))
        covered += low <= 3.0 <= high

    assert covered / runs < 0.85


def test_the_bootstrap_of_a_mean_is_about_students():
    values = [1.0, 2.0, 4.0, 3.5, 0.5]
    table = seeds(*values)

    _, low, high, _ = interval(table, lambda t: t["y"].mean())
    bootstrapped = interval(table, lambda t: t["y"].mean(), samples=bootstrap(table))
    again = interval(table, lambda t: t["y"].mean(), samples=bootstrap(table))

    assert bootstrapped[1:3] == pytest.approx((low, high), abs=0.15 * (high - low))
    assert bootstrapped == again


def test_a_bootstrap_sample_has_all_rows_of_its_seeds_and_renumbers_the_seeds():
    table = pandas.DataFrame({"seed": [7, 7, 9, 9], "y": [1.0, 2.0, 3.0, 4.0]})

    samples = list(bootstrap(table))

    values = {tuple(rows["y"]) for rows in samples}
    assert values == {(1, 2, 1, 2), (1, 2, 3, 4), (3, 4, 1, 2), (3, 4, 3, 4)}
    for rows in samples:
        assert list(rows["seed"]) == [0, 0, 1, 1]


def test_all_cells_of_a_seed_are_left_out_together():
    table = pandas.DataFrame({"seed": [0, 0, 0, 1, 1, 1], "y": [1.0, 1.0, 1.0, 3.0, 3.0, 3.0]})
    together = interval(table, lambda t: t["y"].mean())
    assert together[1:3] == pytest.approx(interval(seeds(1.0, 3.0), lambda t: t["y"].mean())[1:3])
