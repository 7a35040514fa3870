r"""The step of an activation on a sum of units with random factors.

Units are :math:`s = \sum_k v_k z_k` with independent normal addends :math:`z_k`. Given the factors
they are normal, within a member with the covariance :math:`\sum_k t_k \Sigma_k`, :math:`t_k =
v_k^2`, and between members with :math:`\sum_k x_k \Sigma_{k,ab}`, :math:`x_k = v_{k,a} v_{k,b}`.
So each expectation is a sum over nodes of the factors, in which :math:`F, G, H` are those without
a modulation at the covariances of the sum:

.. math::
    F = E_v[F(\dots)], \qquad
    \Theta^{com} = \sum_k E_v[t_k\, G(\dots)]\, \Theta^{com}_k, \qquad
    \Theta^{com}_{ab} = \sum_k E_v[x_k\, G(\dots)]\, \Theta^{com}_{k,ab} .

Tangents of a trained :math:`v_k` need :math:`E[z_k z_k' \phi'(s) \phi'(s')]`. Stein's lemma gives
it from derivatives of :math:`G`, with :math:`q, q', c` the variances and the covariance of the
addend :math:`z_k` and :math:`Q, Q', C` those of the sum:

.. math::
    E[z_k z_k' \phi' \phi'] = c\, G + t_k D_k, \qquad
    D_k = 2 q c\, \partial_Q G + 2 q' c\, \partial_{Q'} G + (q q' + c^2)\, \partial_C G .

Matrices of low rank (:mod:`embens.theory.rank_change`) have :math:`t = 1 + |b|^2`, :math:`x = 1`
and tangents :math:`(r + t - 1)\, c\, G + (t - 1)\, D`. A trainable scale of some addends has the
shared tangent :math:`c\, G + D` of their sum, at :math:`t_k c_k` and :math:`x_k c_k`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from embens.laws import Correlated, Joint, Law
from embens.theory.closed_forms import Homogeneous
from embens.theory.expectations import Dual, slope_along
from embens.theory.law_nodes import law_nodes
from embens.theory.moments import MEASURE, Addend, Moments, Recorded, State, constant, describe
from embens.theory.pending import add_kernels, addends_of
from embens.theory.rank_change import row_nodes

MOST_NODES = 2**15
"""Largest number of combinations of factors that are summed up."""

_WIDTH = 0.002  # of normal nodes around 0, where the size of a factor has a kink
_NEGLIGIBLE = 1e-15  # weight of combinations that are left out
_NEGLIGIBLE_MOMENT = 1e-13  # second moment of values of v that are left out


class Factor(NamedTuple):
    """A value of the factor of one addend, in both inputs of a pair.

    Attributes:
        weight: Its probability, or quadrature weight.
        first: Factor of the variance of the first input.
        second: Factor of the variance of the second input.
        between: Factor of the covariance.
    """

    weight: float
    first: float
    second: float
    between: float


class Kernel(NamedTuple):
    """Variances of both inputs and their covariance."""

    first: Tensor
    second: Tensor
    covariance: Tensor

    def times(self, factor: Factor) -> Kernel:
        """Return the kernel of units with a factor."""
        return Kernel(
            factor.first * self.first,
            factor.second * self.second,
            factor.between * self.covariance,
        )


Combination = tuple[float, tuple[Factor, ...]]
"""A weight, and one factor for each addend."""


def activate_sum(module: nn.Module, dual: Dual, state: State) -> State:
    """Return the kernels after an activation of a sum.

    Args:
        module: The activation, for messages.
        dual: Its expectations.
        state: Kernels before it.

    Raises:
        TypeError: If the law of the factors needs too many nodes.
    """
    facts = state.facts
    addends = addends_of(state)
    within = _combinations(module, state, [factors_within(addend) for addend in addends])
    # The first pass records one entry for each addend and then one for their sum (see _record).
    depth = state.depth + len(addends)
    after = state.replace(
        depth=depth + 1,
        gaussian=False,
        centred=False,
        pre=None,
        low_rank=None,
        scales=frozenset(),
        addends=(),
        cross=None,
        individual=None,
    )
    if facts.recording is not None:
        return after.replace(same=_record(dual, state, within))
    kernels = _kernels_within(state, addends)
    dual = facts.duals[depth]
    sums = _Sums(dual, addends, kernels, [addend.same for addend in addends])
    same, individual = sums.compute(within, tracked=facts.tracked)
    after = after.replace(same=same, individual=individual)
    if not facts.tracked or not any(_differs(addend) for addend in addends):
        return after

    def cross() -> Moments:
        pairs = _combinations(module, state, [factors_between(module, a) for a in addends])
        moments = [addend.crossed for addend in addends]
        between = _Sums(dual, addends, _kernels_between(state, moments), moments)
        return between.compute(pairs, tracked=True, between=True)[0]

    return after.replace(cross=cache(cross))


def _differs(addend: Addend) -> bool:
    """Return True if two members have different units."""
    differs = addend.pre is not None and addend.pre.differs_between_members
    return addend.cross is not None or addend.low_rank is not None or differs


def _record(dual: Dual, state: State, combinations: list[Combination]) -> Moments:
    """Pass every input with itself through the activation, and record variances of addends."""
    recording = state.facts.recording
    assert recording is not None
    addends = addends_of(state)
    variances = [state.equal_pixels(addend.covariance).contiguous() for addend in addends]
    # The dual is prepared for a range of variances, so it needs the largest one of the sum.
    largest = [0.0] * len(addends)
    for _, factors in combinations:
        for index, factor in enumerate(factors):
            largest[index] = max(largest[index], factor.first)
    bound = sum(factor * part for factor, part in zip(largest, variances, strict=True))
    assert isinstance(bound, Tensor)
    if state.facts.duals:
        dual = state.facts.duals[state.depth + len(addends)]
    for part in variances:
        recording.append(Recorded(dual, None, part))
    recording.append(Recorded(dual, None, bound))
    if not state.facts.duals:
        dual = dual.prepare(bound.max().item() or 1.0, None)
    kernels = []
    for part, addend in zip(variances, addends, strict=True):
        first, second = state.align(part, part, paired=True)
        kernels.append(Kernel(first, second, addend.covariance))
    sums = _Sums(dual, addends, kernels, [addend.same for addend in addends])
    return sums.compute(combinations, tracked=False)[0]


def _kernels_within(state: State, addends: Sequence[Addend]) -> list[Kernel]:
    facts = state.facts
    kernels = []
    for index, addend in enumerate(addends):
        variances1 = facts.variances[0][state.depth + index]
        variances2 = facts.variances[1][state.depth + index]
        covariance = addend.covariance
        if facts.aligned:
            covariance = state.with_exact_diagonal(covariance, variances1)
        kernels.append(Kernel(*state.align(variances1, variances2), covariance))
    return kernels


def _kernels_between(state: State, moments: Sequence[Moments]) -> list[Kernel]:
    facts = state.facts
    zero = constant(0.0, state.covariance)
    kernels = []
    for index, moment in enumerate(moments):
        variances1 = facts.variances[0][state.depth + index]
        variances2 = facts.variances[1][state.depth + index]
        covariance = zero if moment.nngp is None else moment.nngp
        kernels.append(Kernel(*state.align(variances1, variances2, between=True), covariance))
    return kernels


class _Sums:
    """Expectations of an activation, summed over combinations of factors.

    Args:
        dual: Expectations of the activation, without a modulation.
        addends: The addends.
        kernels: Their kernels.
        moments: Their kernels within or between members, for tangents.
    """

    def __init__(
        self,
        dual: Dual,
        addends: Sequence[Addend],
        kernels: Sequence[Kernel],
        moments: Sequence[Moments],
    ):
        self.dual = dual
        self.addends = addends
        self.kernels = kernels
        self.moments = moments
        self.scales = sorted(frozenset().union(*(addend.scales for addend in addends)))

    def compute(
        self, combinations: Sequence[Combination], *, tracked: bool, between: bool = False
    ) -> tuple[Moments, Tensor | None]:
        """Return the kernels after the activation, and the tangent kernel of individual parameters.

        Args:
            combinations: Combinations of factors.
            tracked: Compute tangent kernels.
            between: True for kernels between members, which have no individual parameters.
        """
        nngp: Tensor | None = None
        ntk: Tensor | None = None
        individual: Tensor | None = None
        for weight, factors in combinations:
            parts = [k.times(factor) for k, factor in zip(self.kernels, factors, strict=True)]
            total = _total(parts)
            q1, q2, c = total
            f, g, _ = self.dual.same(q1, q2, c, None, with_h=False)
            if isinstance(self.dual, Homogeneous) and not (q1.any() or q2.any()):
                g = torch.full_like(g, self.dual.at_zero**2)  # all factors are 0
            nngp = add_kernels(nngp, weight * f)
            if not tracked:
                continue
            slopes = _Slopes(self.dual, total, weight, weight * g)
            ntk = add_kernels(ntk, self._shared(slopes, parts, factors))
            if not between:
                individual = add_kernels(individual, self._individual(slopes, factors))
        return Moments(nngp, ntk), individual

    def _shared(
        self, slopes: _Slopes, parts: Sequence[Kernel], factors: Sequence[Factor]
    ) -> Tensor | None:
        """Return the tangents of shared parameters for one combination."""
        tangents: Tensor | None = None
        for moments, factor in zip(self.moments, factors, strict=True):
            if moments.ntk is not None:
                tangents = add_kernels(tangents, factor.between * moments.ntk)
        if tangents is not None:
            tangents = tangents * slopes.g
        for name in self.scales:
            scaled = []
            for part, addend in zip(parts, self.addends, strict=True):
                if name in addend.scales:
                    scaled.append(part)
            group = _total(scaled)
            tangents = add_kernels(tangents, group.covariance * slopes.g + slopes.along(group))
        return tangents

    def _individual(self, slopes: _Slopes, factors: Sequence[Factor]) -> Tensor | None:
        """Return the tangents of individual parameters for one combination."""
        tangents: Tensor | None = None
        for addend, kernel, factor in zip(self.addends, self.kernels, factors, strict=True):
            if addend.individual is not None:
                propagated = factor.between * addend.individual * slopes.g
                tangents = add_kernels(tangents, propagated)
            if addend.low_rank is not None:
                size = factor.between - 1
                level = addend.low_rank.rank + size
            elif addend.pre is not None and addend.pre.trainable:
                size, level = factor.between, 1.0
            else:
                continue
            trained = level * kernel.covariance * slopes.g
            if size:
                trained = trained + size * slopes.along(kernel)
            tangents = add_kernels(tangents, trained)
        return tangents


class _Slopes:
    """Derivatives of G by the kernel of a sum, computed when they are needed."""

    def __init__(self, dual: Dual, total: Kernel, weight: float, g: Tensor):
        self._dual = dual
        self._total = total
        self._weight = weight
        self.g = g
        """G times the weight of the combination."""

    def along(self, part: Kernel) -> Tensor:
        """Return D of an addend, times the weight of the combination."""
        by_first, by_second, by_covariance = self._derivatives
        q1, q2, c = part
        d = (q1 * q2 + c * c) * by_covariance
        return d + 2 * c * (q1 * by_first + q2 * by_second)

    @cached_property
    def _derivatives(self) -> tuple[Tensor, Tensor, Tensor]:
        """Derivatives of G by both variances and the covariance."""
        q1, q2, c = self._total
        by_first = self._differentiate(lambda value: Kernel(value, q2, c), q1)
        by_second = self._differentiate(lambda value: Kernel(q1, value, c), q2)
        by_covariance = self._differentiate(lambda value: Kernel(q1, q2, value), c)
        return by_first, by_second, by_covariance

    def _differentiate(self, kernel: Callable[[Tensor], Kernel], value: Tensor) -> Tensor:
        def slope(value: Tensor) -> Tensor:
            q1, q2, c = kernel(value)
            return self._dual.same(q1, q2, c, None, with_h=False)[1]

        value = value.contiguous()
        return self._weight * slope_along(slope, value, torch.ones_like(value))


def _total(kernels: Sequence[Kernel]) -> Kernel:
    """Return the kernel of a sum of independent units."""
    total = kernels[0]
    for kernel in kernels[1:]:
        first, second, covariance = kernel
        total = Kernel(total.first + first, total.second + second, total.covariance + covariance)
    return total


# --- Nodes of the factors ------------------------------------------------------------------------


def factors_within(addend: Addend) -> list[Factor]:
    """Return the values of a factor within a member."""
    if addend.low_rank is not None:
        # t is |b|² here, as in embens.theory.rank_change; the factor is 1 + |b|².
        rows = row_nodes(addend.low_rank.rank, addend.low_rank.scale)
        return [Factor(weight, 1 + t, 1 + t, 1 + t) for t, weight in rows]
    if addend.pre is None:
        return [Factor(1.0, 1.0, 1.0, 1.0)]
    factors = []
    for size, plus, minus in _law_rows(addend.pre.marginal):
        square = size * size
        factors.append(Factor(plus + minus, square, square, square))
    return factors


def factors_between(module: nn.Module, addend: Addend) -> list[Factor]:
    """Return the values of a factor in two members.

    Raises:
        TypeError: If the law of a pair of members has no short list of values.
    """
    if addend.low_rank is not None:
        rows = row_nodes(addend.low_rank.rank, addend.low_rank.scale)
        pairs = itertools.product(rows, rows)
        return [Factor(w1 * w2, 1 + t1, 1 + t2, 1.0) for (t1, w1), (t2, w2) in pairs]
    pre = addend.pre
    if pre is None or not pre.differs_between_members:
        return factors_within(addend)
    if isinstance(pre.law, Correlated):
        raise TypeError(
            f"{describe(module, '')} follows a sum of units that are modulated by {pre.law}, which "
            f"has no rule. Use another law for v, or pre=None. {MEASURE}"
        )
    if isinstance(pre.law, Joint):
        values = zip(*(part.tolist() for part in pre.law.pair_quadrature(pre.members)), strict=True)
        return _merge([Factor(w, v1 * v1, v2 * v2, v1 * v2) for v1, v2, w in values])
    factors = []
    rows = _law_rows(pre.law)
    for (v1, plus1, minus1), (v2, plus2, minus2) in itertools.product(rows, rows):
        squares = v1 * v1, v2 * v2
        equal_sign = plus1 * plus2 + minus1 * minus2
        opposite_sign = plus1 * minus2 + minus1 * plus2
        factors.append(Factor(equal_sign, *squares, v1 * v2))
        factors.append(Factor(opposite_sign, *squares, -v1 * v2))
    return _merge(factors)


def _law_rows(law: Law) -> list[tuple[float, float, float]]:
    """Return sizes of v with the weights of both signs, without large ones that hardly occur."""
    rows = law_nodes(law, _WIDTH).rows()
    return [row for row in rows if (row[1] + row[2]) * (1 + row[0] ** 2) > _NEGLIGIBLE_MOMENT]


def _merge(factors: list[Factor]) -> list[Factor]:
    """Return factors in which equal values have one weight."""
    weights: dict[tuple[float, float, float], float] = {}
    for weight, *values in factors:
        key = (values[0], values[1], values[2] + 0.0)  # -0.0 becomes 0.0
        weights[key] = weights.get(key, 0.0) + weight
    return [Factor(weight, *values) for values, weight in weights.items() if weight > 0]


def _combinations(
    module: nn.Module, state: State, lists: Sequence[list[Factor]]
) -> list[Combination]:
    """Return all combinations of the factors of the addends.

    Raises:
        TypeError: If there are too many.
    """
    count = math.prod(len(factors) for factors in lists)
    if count > MOST_NODES:
        many = sum(len(factors) > 1 for factors in lists)
        raise TypeError(
            f"{describe(module, state.path)} follows a sum of {many} streams with random factors v "
            f"or low-rank members, whose law has {count:,} nodes; the limit sums up at most "
            f"{MOST_NODES:,}. Use laws with few values, such as laws.Signs, or pre=None. {MEASURE}"
        )
    combinations = []
    for factors in itertools.product(*lists):
        weight = math.prod(factor.weight for factor in factors)
        if weight > _NEGLIGIBLE:
            combinations.append((weight, factors))
    return combinations
