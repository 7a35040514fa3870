r"""Scaling laws: how a measured quantity falls or grows with the width.

.. math::
    \langle q(N) \rangle = C\,N^{s}

:func:`scaling` measures a quantity at several widths and seeds, and fits the exponent :math:`s` to
the logarithm of its mean over seeds. The interval is the jackknife's, leaving out one seed at a
time, with Student's quantile: it holds the chance of the draws, not a bend of the curve at small
widths, for which the table has the slope between neighbouring widths.

For the paper's statements, measure with :func:`~embens.finite.gradient_cosines` or
:func:`~embens.finite.ntk_ratio`. Theory predicts for centred laws −1/2 for :math:`|\cos|` in all,
and in the first and last layers, −1 in the layers between, −1 for :math:`\cos^2` and for the ratio;
0 for shifted ones.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embens.finite.gradients import jackknife_error

Measure = Callable[[int, torch.Generator], float]


@dataclass(frozen=True)
class ScalingLaw:
    """A fitted exponent, and the interval that holds it with probability ``level``.

    The table has a row for each width: its mean, the mean's standard error, the slope from the
    width before, and the values of all seeds.
    """

    exponent: float
    interval: tuple[float, float]
    level: float
    table: tuple[dict[str, Any], ...]
    predicted: float | None = None

    @property
    def agrees(self) -> bool | None:
        """Whether the interval holds the predicted exponent; None without one."""
        low, high = self.interval
        return None if self.predicted is None else low <= self.predicted <= high

    def __str__(self) -> str:
        low, high = self.interval
        text = f"exponent {self.exponent:.2f} ({self.level:.0%} interval {low:.2f} … {high:.2f})"
        if self.predicted is not None:
            verdict = "inside" if self.agrees else "outside"
            text += f"; predicted {self.predicted:g}, {verdict}"
        lines = [text, "   width        mean   ± error   slope"]
        for row in self.table:
            slope = "" if row["slope"] is None else f"{row['slope']:8.2f}"
            lines.append(f"{row['width']:8d}  {row['mean']:10.3g}  {row['error']:8.1g}{slope}")
        return "\n".join(lines)


def scaling(
    measure: Measure,
    widths: Sequence[int],
    *,
    seeds: int = 5,
    predicted: float | None = None,
    level: float = 0.95,
    generator: torch.Generator | None = None,
) -> ScalingLaw:
    """Measure a positive quantity over widths and seeds, and fit its exponent.

    Args:
        measure: a function of the width and of a generator, which draws all that is random.
        widths: at least two different ones.
        seeds: how often to measure at each width, at least two.
        predicted: the exponent that theory gives, to be shown beside.
        level: probability with which the interval holds the exponent.
        generator: seeds the generators of all measurements; None: always the same.

    Example:
        >>> law = scaling(lambda width, generator: 3 / width, [8, 16, 32], predicted=-1.0)
        >>> round(law.exponent, 6), law.agrees
        (-1.0, True)
    """
    widths = [int(width) for width in widths]
    if len(set(widths)) < 2 or min(widths) < 1:
        raise ValueError(f"an exponent needs two different widths of at least 1; got {widths}")
    if seeds < 2:
        raise ValueError(f"an interval needs at least two seeds at each width; got {seeds}")
    if not 0 < level < 1:
        raise ValueError(f"level is a probability between 0 and 1; got {level}")
    source = torch.Generator().manual_seed(0) if generator is None else generator
    values = torch.zeros(len(widths), seeds, dtype=torch.float64)
    for seed in range(seeds):
        for i, width in enumerate(widths):
            start = int(torch.randint(2**62, (), generator=source))
            values[i, seed] = float(measure(width, torch.Generator().manual_seed(start)))
    return fit_exponent(widths, values, predicted=predicted, level=level)


def fit_exponent(
    widths: Sequence[int],
    values: Tensor,
    *,
    predicted: float | None = None,
    level: float = 0.95,
) -> ScalingLaw:
    """Fit the exponent to values ``(width, seed)`` that were measured already."""
    from scipy.stats import t

    seeds, x = values.shape[1], torch.tensor(widths, dtype=torch.float64).log()
    means, errors = values.mean(1), values.std(1) / math.sqrt(seeds)
    left_out = (values.sum(1, keepdim=True) - values) / (seeds - 1)  # the means without one seed
    if not bool((left_out > 0).all() and values.isfinite().all()):
        raise ValueError(
            "a power law needs finite values with a positive mean at each width, whichever seed is "
            f"left out; got means {means.tolist()}. Measure a size, such as |cos| or cos², instead "
            "of a signed number, or more seeds."
        )

    def slope(means: Tensor) -> Tensor:
        centred = x - x.mean()
        return centred @ means.log() / centred.square().sum()

    exponent = float(slope(means))
    reach = float(t.ppf((1 + level) / 2, seeds - 1)) * jackknife_error(slope(left_out))
    reach += 1e-12 * (1 + abs(exponent))  # a quantity without chance is exact to rounding
    slopes = [None, *(means.log().diff() / x.diff()).tolist()]  # NaN or infinite for equal widths
    names = ("width", "mean", "error", "slope", "values")
    columns = widths, means.tolist(), errors.tolist(), slopes, values.tolist()
    table: tuple[dict[str, Any], ...] = tuple(
        dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)
    )
    return ScalingLaw(exponent, (exponent - reach, exponent + reach), level, table, predicted)
