r"""Claims: statements of the paper as statistics with confidence intervals and verdicts.

A claim is a statistic :math:`T` of a table and the region in which the statement is true. How its
interval is computed depends on the experiment.

*Pooled residuals* (experiments with ``POOLED = True``: a sweep of many cells with few seeds). The
value that seed :math:`s` gives in cell :math:`c` is

.. math::
    y_{cs} = \mu_c + a_s + e_{cs} .

**Assumptions.** The residuals :math:`e_{cs}` are independent, with the same distribution in all
cells in which the same quantities are defined. The effect :math:`a_s` of a seed is the same in
these cells. Then all cells together estimate the variance of the residuals, with
:math:`(C - 1)(n - 1)` degrees of freedom for :math:`C` cells and :math:`n` seeds, where a single
cell has :math:`n - 1`. If the spread differs between cells, the interval is too narrow for
statistics of the noisiest cells and too wide for the others. The variances :math:`V_e` and
:math:`V_a` of :math:`T` come from tables with redrawn residuals, and from tables with the effect of
each seed (:mod:`reproduction.pooling`), and

.. math::
    T \pm t_\nu \sqrt{V_e + V_a}, \qquad
    \nu = \frac{(V_e + V_a)^2}{V_e^2 / ((C - 1)(n - 1)) + V_a^2 / (n - 1)} .

The mean of the redrawn values minus :math:`T` estimates the bias of statistics that choose the
largest of several noisy values (the best M, the rise to a maximum). Its square is added to the
variance of such statistics. If the variance over seeds is so much larger than :math:`V_e + V_a`
that the assumptions must be wrong (an F test at 10 %), the interval of the seeds is used instead.
A table in which some cells lack a seed has no interval of the seeds, and the test is left out.

**Coverage.** Effects of seeds cancel in differences between cells and in slopes. Simulated
intervals of these cover the truth in 91 to 97 % of all sweeps. Effects do not cancel in the value
of a cell or a mean of values. With two or three seeds their variance is poorly estimated, and if it
is large, only 83 to 93 % of these intervals cover the truth.

*Seeds* (all other experiments). Student's interval of the jackknife pseudo-values over seeds,

.. math::
    T_i = n T - (n - 1) T_{-i}, \qquad \bar T_i \pm t_{n-1} \, s(T_i) / \sqrt{n} ,

where :math:`T_{-i}` leaves out all cells of seed :math:`i`. A statistic that jumps from one point
of a curve to another uses the standard deviation :math:`s_B` over bootstrap samples of the seeds,

.. math::
    T \pm t_{n-1} \, s_B \sqrt{n / (n - 1)} .

Both equal Student's interval if :math:`T` is the mean of one value per seed.
"""

import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from reproduction.intervals import BOOTSTRAP_SAMPLES, Statistic, bootstrap, interval, pooled_ends
from reproduction.pooling import PooledTables
from reproduction.rows import Frame, MissingCellsError, Rows, Selection, fit_slope

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"


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
    """Return the exponent of the best ``x`` in the width, as a mean over seeds.

    It is not defined if a wider network was measured up to a smaller ``x`` than a narrower one, or
    if neighbouring values of ``x`` are so far apart that a moderate growth cannot be seen.
    Seeds that lack the largest ``x`` do not count, because their best one may be larger.
    """

    def exponent(rows: Rows) -> float:
        selected = selection(rows)
        largest = [float(of_width[x].max()) for _, of_width in selected.by("width")]
        if largest != sorted(largest):
            raise MissingCellsError(f"as many {x} at every width")
        _check_resolution(selected, x)
        exponents = []
        for _, rows_of_seed in selected.by("seed"):
            if rows_of_seed[x].max() < selected[x].max():
                continue
            log_widths, log_best = [], []
            for width, rows_of_width in rows_of_seed.by("width"):
                log_widths.append(math.log2(width))
                log_best.append(math.log2(rows_of_width.best(x)))
            exponents.append(fit_slope(log_widths, log_best))
        return statistics.fmean(exponents)

    return exponent


COARSEST = 2.5
"""Largest ratio of neighbouring numbers of members at which a best one is compared."""


def _check_resolution(rows: Rows, x: str) -> None:
    values = sorted(float(value) for value in rows[x].unique())
    for smaller, larger in itertools.pairwise(values):
        if larger > COARSEST * smaller:
            raise MissingCellsError(f"cells with {x} between {smaller:g} and {larger:g}")


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement of the paper, and how it is tested.

    Attributes:
        statement: The statement, as a sentence.
        measure: Description of the statistic.
        statistic: Function of the table.
        above: Lower end of the region in which the statement is true.
        below: Upper end of the region.
        paper: The paper's result.
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

    def judge(
        self, table: Frame, samples: Sequence[Rows] = (), pooled: PooledTables | None = None
    ) -> "Judgement":
        """Test the claim on a table.

        Args:
            table: The table.
            samples: Bootstrap samples of the table, for a statistic that jumps.
            pooled: Tables with redrawn residuals; None uses the seeds alone.

        Returns:
            The measured value, its interval and the verdict.
        """
        estimate = _Estimate()
        note = ""
        try:
            estimate = self._estimate(table, samples, pooled)
            if pooled is not None:
                estimate = self._with_pooled_ends(estimate, pooled)
        except MissingCellsError as error:
            note = f"missing: {error}"
        return Judgement(
            statement=self.statement,
            measure=self.measure,
            paper=self.paper,
            above=self.above,
            below=self.below,
            region=self.region,
            value=estimate.value,
            low=estimate.low,
            high=estimate.high,
            seeds=estimate.seeds,
            verdict=verdict(estimate.low, estimate.high, self.above, self.below),
            note=note or estimate.describe_gap(),
            method=estimate.method,
        )

    def _estimate(
        self, table: Frame, samples: Sequence[Rows], pooled: PooledTables | None
    ) -> "_Estimate":
        """Return the value with the interval of the seeds."""
        if pooled is not None and not pooled.is_complete:
            # Cells that lack some seeds have no interval of the seeds.
            value = float(self.statistic(Rows(table)))
            return _Estimate(value, seeds=pooled.seeds, method="pooled")
        value, low, high, seeds = interval(table, self.statistic, samples=samples)
        return _Estimate(value, low, high, seeds)

    def _with_pooled_ends(self, estimate: "_Estimate", pooled: PooledTables) -> "_Estimate":
        """Replace the interval of the seeds by that of pooled residuals, if it is known."""
        if not pooled.is_complete:
            if not pooled.knows_noise_of(self.statistic, estimate.value):
                return replace(estimate, note="the noise of some cells is not known")
            low, high = self._pooled_ends(estimate.value, None, pooled)
            return replace(estimate, low=low, high=high)
        if math.isnan(estimate.low):
            return estimate
        seed_ends = (estimate.low, estimate.high)
        low, high = self._pooled_ends(estimate.value, seed_ends, pooled)
        if (low, high) == seed_ends:
            return estimate
        return replace(estimate, low=low, high=high, method="pooled")

    def _pooled_ends(
        self, value: float, seed_ends: tuple[float, float] | None, pooled: PooledTables
    ) -> tuple[float, float]:
        return pooled_ends(self.statistic, value, seed_ends, pooled, jumps=self.jumps)


@dataclass(frozen=True)
class _Estimate:
    """A statistic with its interval.

    Attributes:
        value: The statistic; NaN if it could not be computed.
        low: Lower end of its interval.
        high: Upper end of its interval.
        seeds: Number of seeds.
        method: ``"pooled"`` or ``"seeds"``, the source of the interval.
        note: Reason why there is no interval, if it is known.
    """

    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    seeds: int = 0
    method: str = "seeds"
    note: str = ""

    def describe_gap(self) -> str:
        """Return the reason for a missing value or interval; empty if there are both."""
        if math.isnan(self.value):
            return "the statistic is not defined on this table"
        if self.seeds == 1:
            return "one seed gives no interval"
        if math.isnan(self.low):
            return self.note or "no interval"
        return self.note


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A claim with its measured value, interval and verdict.

    Attributes:
        statement: The statement, as a sentence.
        measure: Description of the statistic.
        paper: The paper's result.
        above: Lower end of the region in which the statement is true.
        below: Upper end of the region.
        region: The region in words.
        value: The statistic; NaN if it could not be computed.
        low: Lower end of its interval.
        high: Upper end of its interval.
        seeds: Number of seeds.
        verdict: ``"holds"``, ``"does not hold"`` or ``"undecided"``.
        note: Why there is no value or interval; empty if there are both.
        method: ``"pooled"`` or ``"seeds"``, the source of the interval.
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
    method: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; infinite and NaN values become None."""
        return to_plain(asdict(self))


def judge(
    claims: Sequence[Claim], table: Frame, pooled_axes: Sequence[str] = ()
) -> list[Judgement]:
    """Test claims on a table.

    Args:
        claims: The claims.
        table: The table.
        pooled_axes: Axes of the sweep whose cells are pooled; empty for intervals of the seeds.

    Returns:
        A judgement for each claim.
    """
    if pooled_axes and len(table) and table["seed"].nunique() > 1:
        pooled = PooledTables.draw(table, pooled_axes, BOOTSTRAP_SAMPLES)
    else:
        pooled = None
    samples: Sequence[Rows] = ()
    if any(claim.jumps for claim in claims):
        samples = bootstrap(table, BOOTSTRAP_SAMPLES)
    return [claim.judge(table, samples if claim.jumps else (), pooled) for claim in claims]


def to_plain(value: Any) -> Any:
    """Return a value in the types of JSON; infinite and NaN values become None."""
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
