r"""Claims: statements of the paper as statistics with confidence intervals and verdicts.

A claim is a statistic :math:`T` of a table and the region in which the statement is true. By
default its interval is Student's interval of the jackknife pseudo-values over seeds,

.. math::
    T_i = n T - (n - 1) T_{-i}, \qquad \bar T_i \pm t_{n-1} \, s(T_i) / \sqrt{n} ,

where :math:`T_{-i}` leaves out all cells of seed :math:`i`. The jackknife is unreliable for a
statistic that jumps from one point of a curve to another (a minimum, the best M). Such a statistic
uses the standard deviation :math:`s_B` over bootstrap samples of the seeds instead,

.. math::
    T \pm t_{n-1} \, s_B \sqrt{n / (n - 1)} .

Both equal Student's interval if :math:`T` is the mean of one value per seed.
"""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from reproduction.rows import Frame, MissingCellsError, Rows, Selection, fit_slope

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
CONFIDENCE = 0.95
BOOTSTRAP_SAMPLES = 100

Statistic = Callable[[Rows], float]
"""A function of the rows of a table."""


def slope(
    selection: Selection, y: str, x: str = "members", *, log_x: bool = True, log_y: bool = False
) -> Statistic:
    """Return the statistic :meth:`Rows.slope` of selected rows."""
    return lambda rows: selection(rows).slope(x, y, log_x=log_x, log_y=log_y)


def difference(y: str, selection: Selection, other: Selection) -> Statistic:
    """Return the statistic "mean of a column over one selection minus that over another"."""
    return lambda rows: selection(rows).mean(y) - other(rows).mean(y)


def rise_and_fall(selection: Selection, x: str = "members") -> Statistic:
    """Return the statistic :meth:`Rows.rise_and_fall` of the accuracy of selected rows."""
    return lambda rows: selection(rows).rise_and_fall(x)


def growth_of_best(selection: Selection, x: str = "members") -> Statistic:
    """Return the exponent of the best ``x`` in the width, as a mean over seeds."""

    def exponent(rows: Rows) -> float:
        exponents = []
        for _, rows_of_seed in selection(rows).by("seed"):
            log_widths, log_best = [], []
            for width, rows_of_width in rows_of_seed.by("width"):
                log_widths.append(math.log2(width))
                log_best.append(math.log2(rows_of_width.best(x)))
            exponents.append(fit_slope(log_widths, log_best))
        return statistics.fmean(exponents)

    return exponent


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement of the paper, and how it is tested.

    Attributes:
        statement: What is tested.
        measure: What the statistic is.
        statistic: Function of the table.
        above: The statement is true for values above this,
        below: and below this.
        paper: What the paper reports.
        jumps: The statistic can jump between points of a curve, so it needs the bootstrap.
    """

    statement: str
    measure: str
    statistic: Statistic
    above: float = -math.inf
    below: float = math.inf
    paper: str = "–"
    jumps: bool = False

    @property
    def region(self) -> str:
        """The region in which the statement is true, in words."""
        if math.isinf(self.below):
            return f"above {self.above:g}"
        if math.isinf(self.above):
            return f"below {self.below:g}"
        return f"from {self.above:g} to {self.below:g}"

    def judge(self, table: Frame, samples: Sequence[Rows] = ()) -> "Judgement":
        """Test the claim on a table.

        Args:
            table: The table.
            samples: Bootstrap samples of the table, for a statistic that jumps.

        Returns:
            The measured value, its interval and the verdict.
        """
        value = low = high = math.nan
        seeds = 0
        note = ""
        try:
            value, low, high, seeds = interval(table, self.statistic, samples=samples)
        except MissingCellsError as error:
            note = f"missing: {error}"
        else:
            if math.isnan(value):
                note = "the statistic is not defined on this table"
            elif seeds == 1:
                note = "one seed gives no interval"
            elif math.isnan(low):
                note = "no interval"
        return Judgement(
            statement=self.statement,
            measure=self.measure,
            paper=self.paper,
            above=self.above,
            below=self.below,
            region=self.region,
            value=value,
            low=low,
            high=high,
            seeds=seeds,
            verdict=verdict(low, high, self.above, self.below),
            note=note,
        )


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A claim with its measured value, interval and verdict.

    Attributes:
        statement: What is tested.
        measure: What the statistic is.
        paper: What the paper reports.
        above: The statement is true for values above this,
        below: and below this.
        region: The region in words.
        value: The statistic; NaN if it could not be computed.
        low: Lower end of its interval.
        high: Upper end of its interval.
        seeds: Number of seeds.
        verdict: ``"holds"``, ``"does not hold"`` or ``"undecided"``.
        note: Why there is no value or interval.
    """

    statement: str
    measure: str
    paper: str
    above: float
    below: float
    region: str
    value: float
    low: float
    high: float
    seeds: int
    verdict: str
    note: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; infinite and NaN values become None."""
        return to_plain(asdict(self))


def judge(claims: Sequence[Claim], table: Frame) -> list[Judgement]:
    """Test claims on a table.

    Args:
        claims: The claims.
        table: The table.

    Returns:
        A judgement for each claim.
    """
    samples: Sequence[Rows] = ()
    if any(claim.jumps for claim in claims):
        samples = bootstrap(table)
    return [claim.judge(table, samples if claim.jumps else ()) for claim in claims]


def to_plain(value: Any) -> Any:
    """Return a value as JSON can hold it; infinite and NaN values become None."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


def verdict(low: float, high: float, above: float, below: float) -> str:
    """Return the verdict of an interval on a region.

    Args:
        low: Lower end of the interval.
        high: Upper end of the interval.
        above: Lower end of the region.
        below: Upper end of the region.

    Returns:
        "holds" if the interval lies inside the region, "does not hold" if it lies outside,
        otherwise "undecided".

    Example:
        >>> verdict(0.2, 0.3, above=0.0, below=1.0)
        'holds'
    """
    if math.isnan(low) or math.isnan(high):
        return UNDECIDED
    if above < low and high < below:
        return HOLDS
    if high <= above or low >= below:
        return FAILS
    return UNDECIDED


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
    half_width = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * error
    return value, centre - half_width, centre + half_width, count


def bootstrap(table: Frame) -> list[Rows]:
    """Return bootstrap samples of a table: as many seeds, drawn with replacement and renumbered."""
    import numpy
    import pandas

    frames = [frame for _, frame in table.groupby("seed")]
    generator = numpy.random.default_rng(0)
    draws = generator.integers(len(frames), size=(BOOTSTRAP_SAMPLES, len(frames)))
    samples = []
    for draw in draws:
        renumbered = [frames[index].assign(seed=seed) for seed, index in enumerate(draw)]
        samples.append(Rows(pandas.concat(renumbered)))
    return samples
