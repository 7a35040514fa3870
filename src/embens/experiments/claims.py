r"""Claims: statements of the paper as statistics with intervals and computed verdicts.

A claim is a statistic :math:`T` of a table and the region in which the statement is true. Its
interval is Student's over the jackknife pseudo-values of the seeds,

.. math::
    T_i = n T - (n - 1) T_{-i}, \qquad \bar T_i \pm t_{n-1} \, s(T_i) / \sqrt{n} ,

where :math:`T_{-i}` leaves all cells of seed :math:`i` out. Where :math:`T` is a mean of one number
per seed this is exactly Student's interval of a mean; with the few seeds that one can afford a
bootstrap would be too narrow. The verdict is *holds* if the whole interval lies in the region,
*does not hold* if none of it does, else *undecided*; also where there are too few seeds, or cells
that the statistic needs are missing.

Statistics that jump (a position of a maximum) are to be taken seed by seed: :func:`per_seed`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
CONFIDENCE = 0.95

Frame = Any
"""A tidy ``pandas.DataFrame`` with a column ``seed``; its annotations confuse type checkers."""

Statistic = Callable[[Frame], float]


class Missing(LookupError):
    """The table lacks what a statistic needs."""


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, and what we measured of it.

    Attributes:
        name: a short name, unique in its experiment.
        value: the statistic; NaN if it could not be computed.
        low: lower end of its interval.
        high: upper end.
        above: the statement is true for values above this.
        below: and below this.
        seeds: how many.
        verdict: ``"holds"``, ``"does not hold"`` or ``"undecided"``.
        note: why it is undecided, where that is not the interval.
        measure: what the number is.
        statement: what is tested, in words.
        paper: what the paper saw.
    """

    name: str
    value: float
    low: float
    high: float
    above: float
    below: float
    seeds: int
    verdict: str
    note: str = ""
    measure: str = ""
    statement: str = ""
    paper: str = ""

    def says(self, statement: str, *, paper: str, measure: str = "") -> Claim:
        """Return the claim with its words."""
        measure = measure or self.measure
        return replace(self, statement=statement, paper=paper, measure=measure)

    @property
    def region(self) -> str:
        """The region in which the statement is true, in words."""
        if math.isinf(self.below):
            return f"above {self.above:g}"
        if math.isinf(self.above):
            return f"below {self.below:g}"
        return f"from {self.above:g} to {self.below:g}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; what is infinite or NaN becomes None."""
        return plain({**asdict(self), "region": self.region})


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it; what is infinite or NaN becomes None."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def judge(
    table: Frame,
    name: str,
    statistic: Statistic,
    *,
    above: float = -math.inf,
    below: float = math.inf,
    measure: str = "",
) -> Claim:
    """Test whether a statistic of a table lies in a region; :meth:`Claim.says` adds the words.

    Example:
        >>> import pandas
        >>> table = pandas.DataFrame({"seed": [0, 1, 2], "gain": [1.0, 1.1, 0.9]})
        >>> claim = judge(table, "gain", lambda t: t["gain"].mean(), above=0)
        >>> claim.verdict, round(claim.low, 3)
        ('holds', 0.752)
    """
    value, low, high, seeds, note = math.nan, math.nan, math.nan, 0, ""
    try:
        value, low, high, seeds = interval(table, statistic)
    except Missing as error:
        note = f"missing: {error}"
    if not note and math.isnan(value):
        note = "the statistic is not defined on this table"
    elif not note and math.isnan(low):
        note = f"{seeds} seed has no interval" if seeds == 1 else "no interval"
    found = verdict(low, high, above, below)
    return Claim(name, value, low, high, above, below, seeds, found, note, measure)


def verdict(low: float, high: float, above: float, below: float) -> str:
    """Return the verdict of an interval on a region.

    Example:
        >>> [verdict(low, low + 1, 0.0, 5.0) for low in (2.0, -0.5, -3.0)]
        ['holds', 'undecided', 'does not hold']
    """
    if math.isnan(low) or math.isnan(high):
        return UNDECIDED
    if above < low and high < below:
        return HOLDS
    return FAILS if high <= above or low >= below else UNDECIDED


def interval(
    table: Frame, statistic: Statistic, confidence: float = CONFIDENCE
) -> tuple[float, float, float, int]:
    """Return a statistic, the ends of its interval over seeds, and the number of seeds."""
    import numpy
    from scipy import stats

    if not len(table):
        raise Missing("the table is empty")
    seeds = sorted(table["seed"].unique())
    count, value = len(seeds), float(statistic(table))
    if count < 2 or math.isnan(value):
        return value, math.nan, math.nan, count
    without = [float(statistic(table[table["seed"] != seed])) for seed in seeds]
    pseudo = count * value - (count - 1) * numpy.array(without)
    centre = float(pseudo.mean())
    half = float(stats.t.ppf((1 + confidence) / 2, count - 1) * stats.sem(pseudo))
    return value, centre - half, centre + half, count


# What statistics are made of


def per_seed(table: Frame, statistic: Statistic) -> float:
    """Return the mean over seeds of a statistic of one seed's rows."""
    values = [float(statistic(rows)) for _, rows in table.groupby("seed")]
    return sum(values) / len(values) if values else math.nan


def select(table: Frame, **values: Any) -> Frame:
    """Return the rows with these values; a list, tuple or set means any of them."""
    for column, value in values.items():
        if column not in table:
            raise Missing(f"column {column}")
        if isinstance(value, (list, tuple, set)):
            chosen = table[column].isin(list(value))
        elif isinstance(value, float):
            chosen = (table[column] - value).abs() < 1e-9
        else:
            chosen = table[column] == value
        table = table[chosen]
        if not len(table):
            raise Missing(f"cells with {column}={value}")
    return table


def between(table: Frame, column: str, low: float = -math.inf, high: float = math.inf) -> Frame:
    """Return the rows in which a column lies in a range, its ends included."""
    rows = table[table[column].between(low, high)]
    if not len(rows):
        raise Missing(f"cells with {column} from {low:g} to {high:g}")
    return rows


def first(table: Frame, column: str) -> Frame:
    """Return the rows with the smallest value of a column."""
    return table[table[column] == table[column].min()]


def last(table: Frame, column: str) -> Frame:
    """Return the rows with the largest value of a column."""
    return table[table[column] == table[column].max()]


def curve(table: Frame, x: str, y: str) -> tuple[list[float], list[float]]:
    """Return the mean of ``y`` for each ``x``, in the order of ``x``, without undefined means."""
    if x not in table or y not in table:
        raise Missing(f"column {x if x not in table else y}")
    means = table.groupby(x)[y].mean().dropna()
    if len(means) < 2:
        raise Missing(f"at least two values of {x}")
    return [float(v) for v in means.index], [float(v) for v in means.to_numpy()]


def mean(table: Frame, y: str) -> float:
    """Return the mean of a column."""
    if y not in table:
        raise Missing(f"column {y}")
    return float(table[y].mean())


def slope(table: Frame, x: str, y: str, *, log_x: bool = True, log_y: bool = False) -> float:
    """Return the least-squares slope of the mean of ``y``; by default per factor 2 of ``x``.

    With ``log_y`` as well it is the exponent of a power law.

    Example:
        >>> import pandas
        >>> table = pandas.DataFrame({"width": [1, 2, 4], "cosine": [1.0, 0.5, 0.25]})
        >>> slope(table, "width", "cosine", log_y=True)
        -1.0
    """
    xs, ys = curve(table, x, y)
    xs = [math.log2(v) for v in xs] if log_x else xs
    if log_y and min(ys) <= 0:
        return math.nan
    return line(xs, [math.log2(v) for v in ys] if log_y else ys)


def trend(rows: Callable[[Frame], Frame], y: str, x: str = "members", **options: bool) -> Statistic:
    """Return the statistic that is the :func:`slope` of some of a table's rows."""
    return lambda table: slope(rows(table), x, y, **options)


def line(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the slope of the least-squares line through some points."""
    if len(xs) < 2:
        raise Missing("at least two points of a line")
    return statistics.linear_regression(xs, ys).slope


def growth_of_best(table: Frame, x: str = "members") -> float:
    """Return the exponent with which the most accurate ``x`` grows with width, mean over seeds."""

    def of_seed(rows: Frame) -> float:
        widths = [(width, best(mine, x, "accuracy")) for width, mine in rows.groupby("width")]
        return line(*([math.log2(v) for v in values] for values in zip(*widths, strict=True)))

    return per_seed(table, of_seed)


def best(table: Frame, x: str, y: str) -> float:
    """Return the ``x`` whose mean ``y`` is largest, the smallest of several."""
    xs, ys = curve(table, x, y)
    return xs[ys.index(max(ys))]


def rise_and_fall(table: Frame, x: str, y: str) -> float:
    """Return how much of an inverted U a curve is: the smaller of its rise and its fall.

    Rise: from the first point to the best one; fall: from there to the last one. 0 for a curve
    whose best point is at an end.
    """
    _, ys = curve(table, x, y)
    return min(max(ys) - ys[0], max(ys) - ys[-1])
