r"""The step of an activation on each kernel.

The first pass, of every input with itself, records the variances before each activation. The pass
over pairs of inputs reads them (:mod:`embens.theory.moments`).

Units with a pending modulation :math:`v` become :math:`\phi(v z)`, with the expectations of
:mod:`embens.theory.expectations`. Sums of units with different factors, and units of low-rank
members, are mixtures (:mod:`embens.theory.mixture`).

*Trainable scales of units* (the weights of LayerNorm) add :math:`E[s s' \phi'(s) \phi'(s')]` with
:math:`s = v z`. For positively homogeneous activations that is :math:`F`, and without modulations
it is :math:`H`.
"""

import math
from functools import cache

from torch import Tensor, finfo, nn

from embens.theory import activations
from embens.theory.closed_forms import Homogeneous
from embens.theory.expectations import Dual
from embens.theory.mixture import activate_sum
from embens.theory.moments import MEASURE, Moments, Recorded, State, add, constant, describe

LINEAR = activations.dual(nn.Identity())
"""Dual of the identity."""


def activate(module: nn.Module, dual: Dual, state: State) -> State:
    """Return the kernels after an activation.

    Args:
        module: The activation, for messages.
        dual: Its expectations.
        state: Kernels before it.

    Returns:
        Kernels after it; factors that waited are applied.

    Raises:
        ValueError: If the units before it are not Gaussian.
    """
    if not state.gaussian:
        raise ValueError(
            f"{describe(module, state.path)} acts on units that are not Gaussian: in the limit an "
            "activation needs a Linear or convolution right before it (pooling may lie between). A "
            "residual sum needs that of both streams, and a depthwise convolution a dense one "
            f"after it. {MEASURE}"
        )
    if state.facts.recording is not None:
        check_range(module, state.equal_pixels(state.covariance), state)
    # With a pending v, the tangents of scales have a factor v v' inside the expectation of H, which
    # the dual does not compute. For homogeneous activations they are F.
    needs_scales = bool(state.scales) and state.pre is not None
    if state.addends or state.low_rank or (needs_scales and not isinstance(dual, Homogeneous)):
        return activate_sum(module, dual, state)
    if state.facts.recording is not None:
        return _activate_and_record(dual, state)
    return _activate_pairs(state)


def _activate_and_record(dual: Dual, state: State) -> State:
    """Pass every input with itself through an activation, and record its variances."""
    assert state.facts.recording is not None
    if state.facts.duals:
        dual = state.facts.duals[state.depth]
    law = None if state.pre is None else state.pre.marginal
    variances = state.equal_pixels(state.covariance).contiguous()
    state.facts.recording.append(Recorded(dual, law, variances))
    q1, q2 = state.align(variances, variances, paired=True)
    if not state.facts.duals:
        dual = dual.prepare(variances.max().item() or 1.0, law)
    f, _, _ = dual.same(q1, q2, state.covariance, law, with_h=False)
    return _after_activation(state).replace(same=Moments(f))


def _activate_pairs(state: State) -> State:
    """Pass pairs of inputs through an activation, with the variances that were recorded."""
    facts = state.facts
    pre = state.pre
    dual = facts.duals[state.depth]
    variances1 = facts.variances[0][state.depth]
    variances2 = facts.variances[1][state.depth]
    covariance = state.covariance
    if facts.aligned:
        covariance = state.with_exact_diagonal(covariance, variances1)
    law = None if pre is None else pre.marginal
    q1, q2 = state.align(variances1, variances2)
    trains_v = facts.tracked and pre is not None and pre.trainable
    scales = len(state.scales) if facts.tracked else 0
    is_homogeneous = isinstance(dual, Homogeneous)
    with_h = trains_v or (scales > 0 and not is_homogeneous)
    f, g, h = dual.same(q1, q2, covariance, law, with_h=with_h)
    individual = None if state.individual is None else g * state.individual
    # This is the last use of g, so that it may be overwritten.
    ntk = None if state.same.ntk is None else g.mul_(state.same.ntk)
    if scales:
        tangents = f if is_homogeneous else h
        assert tangents is not None
        ntk = add(ntk, scales * tangents)
    if trains_v:  # h may also have been computed for the tangents of scales alone
        individual = add(individual, h)
    after = _after_activation(state)
    after = after.replace(same=Moments(f, ntk), individual=individual)
    differs = pre is not None and pre.differs_between_members
    if not facts.tracked or (state.cross is None and not differs):
        return after
    before = Moments(covariance, state.same.ntk)
    return after.replace(cross=cache(lambda: _activate_between(state, before)))


def _activate_between(state: State, same: Moments) -> Moments:
    """Return the kernels between two members after an activation.

    Args:
        state: Kernels before it.
        same: Kernels within a member before it; members that are still equal have these.
    """
    facts = state.facts
    pre = state.pre
    dual = facts.duals[state.depth]
    before = same if state.cross is None else state.crossed
    assert same.nngp is not None
    c = constant(0.0, same.nngp) if before.nngp is None else before.nngp
    variances1 = facts.variances[0][state.depth]
    variances2 = facts.variances[1][state.depth]
    q1, q2 = state.align(variances1, variances2, between=True)
    tangents = None
    if pre is not None:
        f, g = dual.joint(q1, q2, c, pre.law, pre.members)
    elif state.scales and not isinstance(dual, Homogeneous):
        f, g, tangents = dual.same(q1, q2, c, None, with_h=True)
    else:
        f, g = dual.cross(q1, q2, c, None)
    ntk = None if before.ntk is None else g.mul_(before.ntk)
    if state.scales:
        ntk = add(ntk, len(state.scales) * (f if tangents is None else tangents))
    return Moments(f, ntk)


def _after_activation(state: State) -> State:
    return state.replace(
        depth=state.depth + 1,
        gaussian=False,
        centred=False,
        scales=frozenset(),
        pre=None,
        cross=None,
        individual=None,
    )


def check_range(module: nn.Module, variances: Tensor, state: State) -> None:
    """Raise where a deep network has made the signal too large or too small for its dtype."""
    largest = variances.max().item()
    smallest_normal = finfo(variances.dtype).tiny
    if not math.isfinite(largest):
        problem = "overflows"
        change = "smaller"
    elif 0 < largest < 1e16 * smallest_normal:
        problem = "underflows"
        change = "larger"
    else:
        return
    raise ValueError(
        f"the variance of units {problem} before {describe(module, state.path)}, after "
        f"{state.depth} activations, each of which changes it by a factor. Use a {change} "
        "weight_std (sqrt(2) keeps the variance under ReLU), modulations with E u² = E v² = 1, or "
        "fewer layers."
    )
