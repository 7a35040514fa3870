"""Standard errors by the jackknife: an estimate is made again without each of its parts."""

from __future__ import annotations

import math

from torch import Tensor


def jackknife_error(without: Tensor) -> float:
    """Return the standard error of an estimate, from the estimates that leave out one part each.

    Example:
        >>> values = Tensor([1.0, 2.0, 6.0])  # of a mean it is the usual one, std / sqrt(n)
        >>> without = (values.sum() - values) / 2
        >>> round(jackknife_error(without), 6) == round(float(values.std()) / 3**0.5, 6)
        True
    """
    count = len(without)
    spread = float((without - without.mean()).square().sum())
    return math.sqrt((count - 1) / count * spread)


def pair_error(matrix: Tensor) -> float:
    """Return the error of the mean over pairs of members, leaving out one member at a time.

    Args:
        matrix: symmetric, with a row for each member; its diagonal does not count.

    Returns:
        The error; NaN for fewer than three members, of which nothing is known.
    """
    count = len(matrix)
    if count < 3:
        return math.nan
    total = matrix.sum() - matrix.trace()
    of_member = matrix.sum(0) - matrix.diagonal()
    return jackknife_error((total - 2 * of_member) / ((count - 1) * (count - 2)))
