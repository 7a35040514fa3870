"""Confidence intervals of statistics; :mod:`reproduction.claims` explains the formulas."""

import math
from collections.abc import Callable, Sequence

from reproduction.pooling import PooledTables, pooled_error
from reproduction.rows import Frame, MissingCellsError, Rows

CONFIDENCE = 0.95
MODEL_CONFIDENCE = 0.9
"""Quantile of the ratio of both variances above which residuals are not pooled."""
BOOTSTRAP_SAMPLES = 60

Statistic = Callable[[Rows], float]
"""A function of the rows of a table."""


def interval(
    table: Frame, statistic: Statistic, *, samples: Sequence[Rows] = ()
) -> tuple[float, float, float, int]:
    """Return a statistic with its confidence interval over seeds.

    Args:
        table: The table.
        statistic: The statistic.
        samples: Bootstrap samples of the table; without them the jackknife is used.

    Returns:
        The value, the ends of the interval (NaN if undefined), and the number of seeds.

    Raises:
        MissingCellsError: If the table lacks cells of the statistic.
    """
    import numpy
    from scipy import stats

    if not len(table):
        raise MissingCellsError("the table is empty")
    seeds = sorted(table["seed"].unique())
    count = len(seeds)
    value = float(statistic(Rows(table)))
    if count < 2 or math.isnan(value):
        return value, math.nan, math.nan, count
    if samples:
        spread = float(numpy.nanstd([statistic(rows) for rows in samples]))
        centre = value
        error = spread * math.sqrt(count / (count - 1))
    else:
        without_seed = [float(statistic(Rows(table[table["seed"] != seed]))) for seed in seeds]
        pseudo_values = count * value - (count - 1) * numpy.array(without_seed)
        centre = float(pseudo_values.mean())
        error = float(stats.sem(pseudo_values))
    half_width = _student(count - 1) * error
    return value, centre - half_width, centre + half_width, count


def pooled_ends(
    statistic: Statistic,
    value: float,
    seed_ends: tuple[float, float] | None,
    pooled: PooledTables,
    *,
    jumps: bool,
) -> tuple[float, float]:
    """Return the interval of a statistic from pooled residuals.

    Args:
        statistic: The statistic.
        value: Its value.
        seed_ends: Ends of the interval from the seeds alone; None if cells lack seeds.
        pooled: Redrawn tables.
        jumps: Whether the statistic can jump between points of a curve.

    Returns:
        The ends; those of the seeds alone if the seeds contradict the model of pooled residuals.
    """
    from scipy import stats

    error = pooled_error(statistic, value, pooled)
    if math.isnan(error.variance):
        return seed_ends or (math.nan, math.nan)
    if seed_ends is not None:
        seed_degrees = pooled.seeds - 1
        seed_error = (seed_ends[1] - seed_ends[0]) / 2 / _student(seed_degrees)
        largest_ratio = float(stats.f.ppf(MODEL_CONFIDENCE, seed_degrees, error.degrees))
        if seed_error**2 > largest_ratio * error.variance:
            return seed_ends
    variance = error.variance
    if jumps:
        variance += error.bias**2
    half_width = _student(error.degrees) * math.sqrt(variance)
    return value - half_width, value + half_width


def _student(degrees: float) -> float:
    """Return the quantile of Student's distribution for a two-sided interval."""
    from scipy import stats

    return float(stats.t.ppf((1 + CONFIDENCE) / 2, degrees))


def bootstrap(table: Frame, count: int = BOOTSTRAP_SAMPLES) -> list[Rows]:
    """Return bootstrap samples of a table: as many seeds, drawn with replacement and renumbered."""
    import numpy
    import pandas

    frames = [frame for _, frame in table.groupby("seed")]
    generator = numpy.random.default_rng(0)
    draws = generator.integers(len(frames), size=(count, len(frames)))
    samples = []
    for draw in draws:
        renumbered = [frames[index].assign(seed=seed) for seed, index in enumerate(draw)]
        samples.append(Rows(pandas.concat(renumbered)))
    return samples
