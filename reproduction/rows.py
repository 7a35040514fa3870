"""Rows of a table, with the operations that statistics are made of."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Frame = Any
"""A tidy ``pandas.DataFrame`` with a column ``seed``. Any, as type checkers misread pandas."""


class MissingCellsError(LookupError):
    """The table lacks cells or columns that a statistic needs."""


# eq=False: statistics are cached by the identity of their rows.
@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a table, with the operations that statistics are made of.

    Attributes:
        frame: The data frame.
    """

    frame: Frame

    def __getitem__(self, column: str) -> Frame:
        if column not in self.frame:
            raise MissingCellsError(f"column {column}")
        return self.frame[column]

    def where(self, **values: Any) -> "Rows":
        """Return the rows with these values.

        Args:
            **values: A value for each column; a list, tuple or set accepts any of its values.

        Returns:
            The rows.

        Raises:
            MissingCellsError: If no rows are left.
        """
        rows = self
        for column, value in values.items():
            if isinstance(value, float):
                mask = (rows[column] - value).abs() < 1e-9
            elif isinstance(value, (list, tuple, set)):
                mask = rows[column].isin(value)
            else:
                mask = rows[column] == value
            rows = rows._masked(mask, f"{column}={value}")
        return rows

    def between(self, column: str, low: float = -math.inf, high: float = math.inf) -> "Rows":
        """Return the rows in which a column lies in a closed range."""
        mask = self[column].between(low, high)
        return self._masked(mask, f"{column} from {low:g} to {high:g}")

    def spanning(self, column: str, low: float, high: float) -> "Rows":
        """Return all rows, if the values of a column reach down to ``low`` and up to ``high``.

        A curve that ends before its maximum cannot show where the maximum is.

        Raises:
            MissingCellsError: If the range of values is smaller.
        """
        if self[column].min() > low or self[column].max() < high:
            raise MissingCellsError(f"{column} from {low:g} or less to {high:g} or more")
        return self

    def _masked(self, mask: Frame, description: str) -> "Rows":
        if not mask.any():
            raise MissingCellsError(f"cells with {description}")
        return Rows(self.frame[mask])

    def first(self, column: str) -> "Rows":
        """Return the rows with the smallest value of a column."""
        return Rows(self.frame[self[column] == self[column].min()])

    def last(self, column: str) -> "Rows":
        """Return the rows with the largest value of a column."""
        return Rows(self.frame[self[column] == self[column].max()])

    def by(self, column: str) -> list[tuple[Any, "Rows"]]:
        """Return each value of a column with its rows."""
        return [(value, Rows(frame)) for value, frame in self.frame.groupby(column)]

    def mean(self, y: str) -> float:
        """Return the mean of a column."""
        return float(self[y].mean())

    def curve(self, x: str, y: str, minimum: int = 2) -> tuple[list[float], list[float]]:
        """Return the mean of ``y`` for each ``x``, in ascending order, without undefined means.

        Args:
            x: Column of the abscissa.
            y: Column of the ordinate.
            minimum: Required number of points.

        Returns:
            The values of ``x`` and the means of ``y``.

        Raises:
            MissingCellsError: If there are too few points.
        """
        means = self[y].groupby(self[x]).mean().dropna()
        if len(means) < minimum:
            raise MissingCellsError(f"at least {minimum} values of {x}")
        return [float(value) for value in means.index], [float(value) for value in means]

    def slope(self, x: str, y: str, *, log_x: bool = True, log_y: bool = False) -> float:
        """Return the slope of the mean of ``y``.

        Args:
            x: Column of the abscissa.
            y: Column of the ordinate.
            log_x: Use the logarithm of ``x`` to base 2: the slope is per doubling.
            log_y: Use the logarithm of ``y``; with ``log_x`` the slope is the exponent of a power
                law.

        Returns:
            The slope; NaN if a logarithm is not defined.
        """
        xs, ys = self.curve(x, y)
        if log_y and min(ys) <= 0:
            return math.nan
        if log_x:
            xs = [math.log2(value) for value in xs]
        if log_y:
            ys = [math.log2(value) for value in ys]
        return fit_slope(xs, ys)

    def best(self, x: str, y: str = "accuracy") -> float:
        """Return the (smallest) ``x`` with the largest mean of ``y``."""
        xs, ys = self.curve(x, y)
        return xs[ys.index(max(ys))]

    def growth(self, x: str, y: str) -> tuple[list[float], list[float]]:
        """Return ``x``, and how far ``y`` has moved from its value at x=0 (fraction 0) to 1 (1).

        The point (1, 1) replaces measurements at x=1, where ``y`` is 1 by definition: for example
        the correlation of equal members.

        Args:
            x: Column of the abscissa, from 0 to 1.
            y: Column of the ordinate.

        Returns:
            The values of ``x`` and the fractions.

        Raises:
            MissingCellsError: If there are no rows with x=0.
        """
        xs, ys = self.between(x, high=0.999).curve(x, y)
        if xs[0] != 0:
            raise MissingCellsError(f"cells with {x}=0")
        fractions = [(value - ys[0]) / (1 - ys[0]) for value in ys]
        return [*xs, 1.0], [*fractions, 1.0]

    def halfway(self, x: str, y: str) -> float:
        """Return the first ``x`` at which ``y`` is halfway from its value at x=0 to 1."""
        xs, fractions = self.growth(x, y)
        # Fractions start with 0 and end with 1, so that the index is at least 1 after the loop.
        index = 0
        while fractions[index] < 0.5:
            index += 1
        step = (0.5 - fractions[index - 1]) / (fractions[index] - fractions[index - 1])
        return xs[index - 1] + step * (xs[index] - xs[index - 1])

    def rise_and_fall(self, x: str, y: str = "accuracy") -> float:
        """Return the smaller of a curve's rise to its maximum and its fall from there."""
        _, ys = self.curve(x, y)
        return max(ys) - max(ys[0], ys[-1])


Selection = Callable[[Rows], Rows]
"""Selects rows of a table."""


def where(**values: Any) -> Selection:
    """Return the selection of the rows with these values; see :meth:`Rows.where`."""
    return lambda rows: rows.where(**values)


def fit_slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the slope of the least-squares line through points.

    Example:
        >>> fit_slope([0.0, 1.0, 2.0], [1.0, 3.0, 5.0])
        2.0
    """
    if len(xs) < 2:
        raise MissingCellsError("at least two points of a line")
    return statistics.linear_regression(xs, ys).slope
