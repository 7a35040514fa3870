r"""Claims: statements of the paper as statistics with intervals and computed verdicts.

A claim is a statistic :math:`T` of a table and the region in which the statement is true. Its
interval is Student's over the jackknife pseudo-values of the seeds,

.. math::
    T_i = n T - (n - 1) T_{-i}, \qquad \bar T_i \pm t_{n-1} \, s(T_i) / \sqrt{n} ,

where :math:`T_{-i}` leaves all cells of seed :math:`i` out. A statistic that jumps from one point
of a curve to another (a minimum, the best M) has draws of seeds (:func:`bootstrap`) instead, and
with their standard deviation :math:`s_B` the interval

.. math::
    T \pm t_{n-1} \, s_B \sqrt{n / (n - 1)} .

Both are Student's interval where :math:`T` is a mean of one number per seed.
"""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
CONFIDENCE = 0.95
DRAWS = 100  # of the bootstrap

Frame = Any
"""A tidy ``pandas.DataFrame`` with a column ``seed``; its annotations confuse type checkers."""


class Missing(LookupError):
    """The table lacks what a statistic needs."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of a table: what statistics are made of. It is equal to itself alone."""

    frame: Frame

    def __getitem__(self, column: str) -> Frame:
        if column not in self.frame:
            raise Missing(f"column {column}")
        return self.frame[column]

    def where(self, **values: Any) -> "Rows":
        """Return the rows with these values; a list, tuple or set means any of them."""
        rows = self
        for column, value in values.items():
            if isinstance(value, float):
                chosen = (rows[column] - value).abs() < 1e-9
            else:
                several = value if isinstance(value, (list, tuple, set)) else [value]
                chosen = rows[column].isin(several)
            rows = rows._some(chosen, f"{column}={value}")
        return rows

    def between(self, column: str, low: float = -math.inf, high: float = math.inf) -> "Rows":
        """Return the rows in which a column lies in a range, its ends included."""
        return self._some(self[column].between(low, high), f"{column} from {low:g} to {high:g}")

    def _some(self, chosen: Frame, what: str) -> "Rows":
        if not chosen.any():
            raise Missing(f"cells with {what}")
        return Rows(self.frame[chosen])

    def first(self, column: str) -> "Rows":
        """Return the rows with the smallest value of a column."""
        return Rows(self.frame[self[column] == self[column].min()])

    def last(self, column: str) -> "Rows":
        """Return the rows with the largest value of a column."""
        return Rows(self.frame[self[column] == self[column].max()])

    def by(self, column: str) -> list[tuple[Any, "Rows"]]:
        """Return each value of a column with its rows."""
        return [(value, Rows(rows)) for value, rows in self.frame.groupby(column)]

    def mean(self, y: str) -> float:
        """Return the mean of a column."""
        return float(self[y].mean())

    def curve(self, x: str, y: str, least: int = 2) -> tuple[list[float], list[float]]:
        """Return the mean of ``y`` for each ``x``, in its order, without undefined means."""
        means = self[y].groupby(self[x]).mean().dropna()
        if len(means) < least:
            raise Missing(f"at least {least} values of {x}")
        return [float(v) for v in means.index], [float(v) for v in means]

    def slope(self, x: str, y: str, *, log_x: bool = True, log_y: bool = False) -> float:
        """Return the slope of the mean of ``y``, per factor 2 of ``x``, or the power of a law."""
        xs, ys = self.curve(x, y)
        if log_y and min(ys) <= 0:
            return math.nan
        both = ((xs, log_x), (ys, log_y))
        return line(*([math.log2(v) if log else v for v in values] for values, log in both))

    def best(self, x: str, y: str = "accuracy") -> float:
        """Return the ``x`` whose mean ``y`` is largest, the smallest of several."""
        xs, ys = self.curve(x, y)
        return xs[ys.index(max(ys))]

    def growth(self, x: str, y: str) -> tuple[list[float], list[float]]:
        """Return ``x`` and how far ``y`` is on its way from its value at 0 to 1, its value at 1."""
        xs, ys = self.between(x, high=0.999).curve(x, y)
        if xs[0] != 0:
            raise Missing(f"cells with {x}=0")
        return [*xs, 1.0], [(v - ys[0]) / (1 - ys[0]) for v in (*ys, 1.0)]

    def halfway(self, x: str, y: str) -> float:
        """Return the first ``x`` at which ``y`` is half-way from its value at 0 to 1."""
        xs, part = self.growth(x, y)
        k = next(k for k, value in enumerate(part) if value >= 0.5)
        step = (0.5 - part[k - 1]) / (part[k] - part[k - 1])
        return xs[k - 1] + step * (xs[k] - xs[k - 1])

    def rise_and_fall(self, x: str, y: str = "accuracy") -> float:
        """Return the smaller of a curve's rise to its best point and its fall from there."""
        _, ys = self.curve(x, y)
        return max(ys) - max(ys[0], ys[-1])


Statistic = Callable[[Rows], float]
Some = Callable[[Rows], Rows]
"""Chooses some of a table's rows."""


def where(**values: Any) -> Some:
    """Return the choice of the rows with these values."""
    return lambda rows: rows.where(**values)


def trend(some: Some, y: str, x: str = "members", **log: bool) -> Statistic:
    """Return the statistic that is the :meth:`Rows.slope` of some of a table's rows."""

    def slope(rows: Rows) -> float:
        return some(rows).slope(x, y, **log)

    of, in_x = y.replace("_", " "), {"members": "M", "masks": "M"}.get(x, x)
    power, per = log.get("log_y", False), "per doubling of" if log.get("log_x", True) else "in"
    slope.__doc__ = f"exponent of {of} in {in_x}" if power else f"slope of {of} {per} {in_x}"
    return slope


def less(y: str, some: Some, other: Some) -> Statistic:
    """Return the statistic that is the mean of a column over some rows less that over others."""
    return lambda rows: some(rows).mean(y) - other(rows).mean(y)


def inverted_u(some: Some, x: str = "members") -> Statistic:
    """Return the statistic that is the :meth:`Rows.rise_and_fall` of accuracy, over some rows."""

    def rise_and_fall(rows: Rows) -> float:
        """Smaller of rise to the best M and fall to the largest."""
        return some(rows).rise_and_fall(x)

    return rise_and_fall


def growth_of_best(some: Some, x: str = "members") -> Statistic:
    """Return the statistic that says how the best ``x`` grows with the width."""

    def growth(rows: Rows) -> float:
        """Exponent of best M in width, mean over seeds."""
        exponents = []
        for _, mine in some(rows).by("seed"):
            points = [(math.log2(w), math.log2(each.best(x))) for w, each in mine.by("width")]
            exponents.append(line(*zip(*points, strict=True)))
        return statistics.fmean(exponents)

    return growth


def line(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the slope of the least-squares line through some points."""
    if len(xs) < 2:
        raise Missing("at least two points of a line")
    return statistics.linear_regression(xs, ys).slope


@dataclass(frozen=True)
class Claim:
    """A statement of the paper: a statistic, the region in which it is true, what we measured."""

    statistic: Statistic
    above: float = -math.inf  # the statement is true for values above this
    below: float = math.inf  # and below this
    jumps: bool = False  # from one point of a curve to another, so that it has a bootstrap
    statement: str = ""  # what is tested, in words, which are its name
    paper: str = "–"  # what the paper saw
    measure: str = ""  # what the number is
    value: float = math.nan  # of the statistic; NaN if it could not be computed
    low: float = math.nan  # ends of its interval
    high: float = math.nan
    seeds: int = 0
    verdict: str = UNDECIDED  # or "holds", "does not hold"
    note: str = ""  # why it is undecided, where that is not the interval

    def says(self, statement: str, paper: str = "–", measure: str = "") -> "Claim":
        """Return the claim with its words; the measure's may be the statistic's docstring."""
        words = getattr(self.statistic, "func", self.statistic).__doc__ or ""  # a partial's own
        measure = measure or words.partition("\n")[0].rstrip(".")
        return replace(self, statement=statement, paper=paper, measure=measure)

    def judge(self, table: Frame, draws: Sequence[Rows] = ()) -> "Claim":
        """Return the claim with what a table says of it."""
        try:
            value, low, high, seeds = interval(table, self.statistic, draws=draws)
        except Missing as error:
            return replace(self, note=f"missing: {error}")
        note = ""
        if math.isnan(value):
            note = "the statistic is not defined on this table"
        elif math.isnan(low):
            note = f"{seeds} seed has no interval" if seeds == 1 else "no interval"
        found = verdict(low, high, self.above, self.below)
        measured = {"value": value, "low": low, "high": high, "seeds": seeds}
        return replace(self, **measured, verdict=found, note=note)

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
        values = {k: v for k, v in vars(self).items() if k not in ("statistic", "jumps")}
        return plain({**values, "region": self.region})


def judge(claims: Sequence[Claim], table: Frame) -> list[Claim]:
    """Return the claims with what a table says of each."""
    draws = bootstrap(table) if any(claim.jumps for claim in claims) else ()
    return [claim.judge(table, draws if claim.jumps else ()) for claim in claims]


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it; what is infinite or NaN becomes None."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


def verdict(low: float, high: float, above: float, below: float) -> str:
    """Return the verdict of an interval on a region: whether all, none or some of it lies there."""
    if math.isnan(low) or math.isnan(high):
        return UNDECIDED
    if above < low and high < below:
        return HOLDS
    return FAILS if high <= above or low >= below else UNDECIDED


def interval(
    table: Frame, statistic: Statistic, *, draws: Sequence[Rows] = ()
) -> tuple[float, float, float, int]:
    """Return a statistic, the ends of its interval over seeds, and the number of seeds."""
    import numpy
    from scipy import stats

    if not len(table):
        raise Missing("the table is empty")
    seeds = sorted(table["seed"].unique())
    count, value = len(seeds), float(statistic(Rows(table)))
    if count < 2 or math.isnan(value):
        return value, math.nan, math.nan, count
    if draws:
        spread = float(numpy.nanstd([statistic(rows) for rows in draws]))
        centre, error = value, spread * math.sqrt(count / (count - 1))
    else:
        without = [float(statistic(Rows(table[table["seed"] != seed]))) for seed in seeds]
        pseudo = count * value - (count - 1) * numpy.array(without)
        centre, error = float(pseudo.mean()), float(stats.sem(pseudo))
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * error
    return value, centre - half, centre + half, count


def bootstrap(table: Frame) -> list[Rows]:
    """Return tables of as many seeds, drawn with replacement and numbered anew."""
    import numpy
    import pandas

    seeds = [rows for _, rows in table.groupby("seed")]
    draws = numpy.random.default_rng(0).integers(len(seeds), size=(DRAWS, len(seeds)))
    numbered = ((seeds[k].assign(seed=number) for number, k in enumerate(draw)) for draw in draws)
    return [Rows(pandas.concat(some)) for some in numbered]
