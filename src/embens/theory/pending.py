r"""Factors of units that wait for the next activation, and sums of such units.

Units are normal given their factors: a modulation :math:`v`, the size of a row of low-rank
matrices, or a trainable scale. A factor *waits* while the kernels are those without it. It is
applied by the next activation, or by :func:`settle` before any other operation.

A sum of streams :math:`s = \sum_k v_k z_k` has the addends :math:`z_k`, whose factors wait, because
an activation of :math:`s` needs the law of all factors (:mod:`embens.theory.mixture`). Any other
operation needs the kernels of the sum only. The state of a sum has them with the factors,

.. math::
    \Sigma_{aa} = \sum_k E[v_k^2]\, \Sigma_{k,aa}, \qquad
    \Sigma_{ab} = \sum_k E[v_{k,a} v_{k,b}]\, \Sigma_{k,ab},

and likewise those of tangents, to which a trained :math:`v_k` adds :math:`\Sigma_{k,aa}`.
"""

from __future__ import annotations

from functools import cache

from torch import Tensor

from embens.theory.moments import Addend, Moments, State, constant


def addends_of(state: State) -> tuple[Addend, ...]:
    """Return the addends of units; units that are not a sum are the only one."""
    if state.addends:
        return state.addends
    addend = Addend(
        same=state.same,
        cross=state.cross,
        individual=state.individual,
        pre=state.pre,
        low_rank=state.low_rank,
        scales=state.scales,
    )
    return (addend,)


def settle(state: State) -> State:
    """Apply the factors that wait.

    Args:
        state: Kernels of units before a layer, a product or another operation.

    Returns:
        Kernels of the units with their factors, which are not Gaussian.
    """
    if not state.waits:
        return state
    if not state.addends:
        state = with_addends(state, addends_of(state))
    return state.replace(gaussian=False, addends=())


def with_addends(state: State, addends: tuple[Addend, ...]) -> State:
    """Return a state whose units are the sum of some addends.

    Args:
        state: The state that has the axes of these units.
        addends: The addends; those without a factor become one.
    """
    merged = _merge_constant(addends)
    total = _apply_factor(merged[0])
    for addend in merged[1:]:
        total = _sum(total, _apply_factor(addend))
    return state.replace(
        same=total.same,
        cross=total.cross,
        individual=total.individual,
        pre=None,
        low_rank=None,
        scales=frozenset(),
        addends=merged if any(addend.waits for addend in merged) else (),
    )


def _merge_constant(addends: tuple[Addend, ...]) -> tuple[Addend, ...]:
    """Return addends in which all that have no factor are summed up."""
    constants = [addend for addend in addends if not addend.waits]
    waiting = [addend for addend in addends if addend.waits]
    if not constants:
        return tuple(waiting)
    total = constants[0]
    for addend in constants[1:]:
        total = _sum(total, addend)
    return (total, *waiting)


def _sum(a: Addend, b: Addend) -> Addend:
    """Return the sum of two addends without factors."""
    cross = None
    if a.cross is not None or b.cross is not None:
        cross = cache(lambda: add_moments(a.crossed, b.crossed))
    return Addend(
        same=add_moments(a.same, b.same),
        cross=cross,
        individual=add_kernels(a.individual, b.individual),
    )


def _apply_factor(addend: Addend) -> Addend:
    """Return the kernels of units with their factor."""
    if not addend.waits:
        return addend
    pre, low_rank = addend.pre, addend.low_rank
    # E[v²] within a member and E[v_a v_b] between members. Low-rank matrices replace v² by
    # 1 + |b|², where E|b|² = scale², and v_a v_b by 1 (embens.theory.rank_change).
    moment = pair_moment = 1.0
    trained = 0.0  # weight of the covariance in the tangents of the factor
    if pre is not None:
        moment, pair_moment = pre.second_moment, pre.pair_moment
        trained = float(pre.trainable)
    elif low_rank is not None:
        moment = 1 + low_rank.scale**2
        trained = low_rank.rank + low_rank.scale**2
    count = len(addend.scales)  # each scale adds the covariance to the shared tangents

    def scaled(before: Moments, factor: float) -> Moments:
        after = before.map(lambda kernel: factor * kernel)
        if not count or after.nngp is None:
            return after
        return Moments(after.nngp, add_kernels(after.ntk, count * after.nngp))

    individual = None
    if addend.individual is not None:
        individual = moment * addend.individual
    if trained:
        individual = add_kernels(individual, trained * addend.covariance)
    cross = None
    differs = low_rank is not None or (pre is not None and pre.differs_between_members)
    if addend.cross is not None or differs:
        cross = cache(lambda: scaled(addend.crossed, pair_moment))
    return Addend(same=scaled(addend.same, moment), cross=cross, individual=individual)


def trained_bias(like: Tensor) -> Addend:
    """Return the addend of a trainable bias of units that is 0 at the start."""
    return Addend(Moments(constant(0.0, like), constant(1.0, like)))


def add_moments(first: Moments, second: Moments) -> Moments:
    """Return the sum of two pairs of kernels, in which None is zero."""
    return Moments(add_kernels(first.nngp, second.nngp), add_kernels(first.ntk, second.ntk))


def add_kernels(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return the sum of two kernels, in which None is zero; neither is changed."""
    if first is None or second is None:
        return second if first is None else first
    return first + second
