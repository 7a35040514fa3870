r"""The step of an activation on each kernel.

The first pass, of every input with itself, records the variances before each activation. The pass
over pairs of inputs reads them (:mod:`embens.theory.moments`).

Units with a pending modulation :math:`v` become :math:`\phi(v z)`; those of multiplicative low-rank
members use the dual of :mod:`embens.theory.rank_change`. A modulation that no activation
follows (before a sum, a product or another layer) is settled by the identity as activation.

*Trainable scales of units* (the weights of LayerNorm) add :math:`E[s s' \phi'(s) \phi'(s')]` with
:math:`s = v z`. For positively homogeneous activations that is :math:`F`, and without modulations
it is :math:`H`.
"""

import math
from functools import cache

import torch
from torch import Tensor, nn

from embens.theory import activations
from embens.theory.closed_forms import Homogeneous
from embens.theory.expectations import Dual
from embens.theory.moments import (
    MEASURE,
    PAIRS,
    Moments,
    Recorded,
    State,
    add,
    constant,
    describe,
)
from embens.theory.rank_change import RankDual

LINEAR = activations.dual(nn.Identity())
"""Dual of the identity."""


def activate(module: nn.Module, dual: Dual, state: State) -> State:
    """Return the kernels after an activation.

    Args:
        module: The activation, for messages.
        dual: Its expectations.
        state: Kernels before it.

    Returns:
        Kernels after it; pending modulations are applied.

    Raises:
        ValueError: If the units before it are not Gaussian.
    """
    if state.uneven_tangents:
        raise ValueError(
            f"{describe(module, state.path)} follows a sum with a trainable modulation v or norm "
            "weight, whose tangents vary over units; that has no rule. Fix them: "
            "embed(trainable={'pre': False, 'post': True}) or elementwise_affine=False. " + MEASURE
        )
    if not state.gaussian:
        raise ValueError(
            f"{describe(module, state.path)} acts on units that are not Gaussian: in the limit an "
            "activation needs a Linear or convolution right before it (pooling may lie between). "
            + MEASURE
        )
    if state.trained_scale and state.pre is not None and not isinstance(dual, Homogeneous):
        raise ValueError(
            f"{describe(module, state.path)} follows a modulation v and trainable norm weights, "
            "which has a rule for piecewise linear activations only. Use "
            f"elementwise_affine=False or no v there. {MEASURE}"
        )
    return _step(module, dual, state)


def settle(layer: nn.Module, state: State) -> State:
    """Apply pending modulations v, low-rank members and tangents of scales without an activation.

    Args:
        layer: The layer or operation that comes next, for messages.
        state: Kernels before it.

    Returns:
        The kernels of the modulated units. Random signs keep them Gaussian within a member.
    """
    pre = state.pre
    is_low_rank = state.low_rank is not None
    if pre is None and not is_low_rank and not state.trained_scale:
        return state
    is_trained = bool(state.trained_scale) or (pre is not None and pre.trainable) or is_low_rank
    stays_gaussian = not is_low_rank and (pre is None or pre.marginal.kurtosis <= 1 + 1e-12)
    is_mixed = pre is not None and pre.differs_between_members
    after = _step(layer, LINEAR, state)
    return after.replace(
        gaussian=state.gaussian and stays_gaussian,
        centred=state.centred,
        mixed=state.mixed or is_mixed,
        uneven_tangents=state.uneven_tangents or is_trained,
    )


def _step(module: nn.Module, dual: Dual, state: State) -> State:
    if state.low_rank is not None:
        dual = RankDual(dual, state.low_rank.rank, state.low_rank.scale)
    if state.facts.recording is not None:
        return _activate_and_record(module, dual, state)
    return _activate_pairs(module, state)


def _activate_and_record(module: nn.Module, dual: Dual, state: State) -> State:
    """Pass every input with itself through an activation, and record its variances."""
    assert state.facts.recording is not None
    if state.facts.duals:
        dual = state.facts.duals[state.depth]
    law = None if state.pre is None else state.pre.marginal
    variances = state.equal_pixels(state.covariance).contiguous()
    check_range(module, variances, state)
    state.facts.recording.append(Recorded(dual, law, variances))
    q1, q2 = align_variances(variances, variances, state, paired=True)
    if not state.facts.duals:
        dual = dual.prepare(variances.max().item() or 1.0, law)
    f, _, _ = dual.same(q1, q2, state.covariance, law, with_h=False)
    return _after_activation(state).replace(same=Moments(f))


def _activate_pairs(module: nn.Module, state: State) -> State:
    """Pass pairs of inputs through an activation, with the variances that were recorded."""
    facts = state.facts
    pre = state.pre
    dual = facts.duals[state.depth]
    variances1 = facts.variances[0][state.depth]
    variances2 = facts.variances[1][state.depth]
    covariance = state.covariance
    if facts.aligned:
        covariance = _with_exact_diagonal(covariance, variances1, state)
    law = None if pre is None else pre.marginal
    q1, q2 = align_variances(variances1, variances2, state)
    is_low_rank = state.low_rank is not None
    trains_v = facts.tracked and (is_low_rank or (pre is not None and pre.trainable))
    trains_scale = facts.tracked and bool(state.trained_scale)
    is_homogeneous = isinstance(dual, Homogeneous)
    with_h = trains_v or (trains_scale and not is_homogeneous)
    f, g, h = dual.same(q1, q2, covariance, law, with_h=with_h)
    individual = None if state.individual is None else g * state.individual
    # This is the last use of g, so that it may be overwritten.
    ntk = None if state.same.ntk is None else g.mul_(state.same.ntk)
    if trains_scale:
        tangents = f if is_homogeneous else h
        assert tangents is not None
        ntk = add(ntk, state.trained_scale * tangents)
    if trains_v:  # h may also have been computed for the tangents of scales alone
        individual = add(individual, h)
    after = _after_activation(state)
    after = after.replace(same=Moments(f, ntk), individual=individual)
    members_differ = state.cross is not None or is_low_rank
    if pre is not None and pre.differs_between_members:
        members_differ = True
    if not facts.tracked or not members_differ:
        return after
    before = Moments(covariance, state.same.ntk)
    return after.replace(cross=cache(lambda: _activate_between(module, state, before)))


def _activate_between(module: nn.Module, state: State, same: Moments) -> Moments:
    """Return the kernels between two members after an activation.

    Args:
        module: The activation, for messages.
        state: Kernels before it.
        same: Kernels within a member before it; members that are still equal have these.
    """
    facts = state.facts
    pre = state.pre
    dual = facts.duals[state.depth]
    before = same if state.cross is None else state.crossed
    is_coupled = before.nngp is not None
    if state.mixed and dual is not LINEAR and is_coupled:
        raise ValueError(
            f"{describe(module, state.path)} acts on a sum of streams that were modulated by "
            "v. Between members they are a mixture of Gaussians, which has no rule. Modulate "
            f"the inputs of layers only (pre=None). {MEASURE}"
        )
    assert same.nngp is not None
    c = constant(0.0, same.nngp) if before.nngp is None else before.nngp
    variances1 = facts.variances[0][state.depth]
    variances2 = facts.variances[1][state.depth]
    q1, q2 = align_variances(variances1, variances2, state, between=True)
    tangents = None
    if pre is not None:
        f, g = dual.joint(q1, q2, c, pre.law, pre.members)
    elif state.trained_scale and not isinstance(dual, Homogeneous):
        f, g, tangents = dual.same(q1, q2, c, None, with_h=True)
    else:
        f, g = dual.cross(q1, q2, c, None)
    ntk = None if before.ntk is None else g.mul_(before.ntk)
    if state.trained_scale:
        ntk = add(ntk, state.trained_scale * (f if tangents is None else tangents))
    return Moments(f, ntk)


def _after_activation(state: State) -> State:
    return state.replace(
        depth=state.depth + 1,
        gaussian=False,
        centred=False,
        mixed=False,
        trained_scale=0.0,
        pre=None,
        low_rank=None,
        cross=None,
        individual=None,
    )


def align_variances(
    first: Tensor,
    second: Tensor,
    state: State,
    *,
    paired: bool = False,
    between: bool = False,
) -> tuple[Tensor, Tensor]:
    """Insert axes into variances ``(*member, n, *pixel)`` so that they broadcast with a kernel.

    Args:
        first: Variances of ``x1``.
        second: Variances of ``x2``.
        state: The state that holds the kernel.
        paired: True if the kernel is that of every input with itself.
        between: True if the kernel has two member axes.

    Returns:
        Views of both variances.
    """
    pixels = state.spatial
    has_members = first.dim() > 1 + pixels
    if between and has_members:
        first = first.unsqueeze(1)
        second = second.unsqueeze(0)
    if not paired:
        first = first.unsqueeze(-1 - pixels)
        second = second.unsqueeze(-2 - pixels)
    if state.layout == PAIRS:
        no_pixels = (1,) * pixels
        first = first.reshape(*first.shape, *no_pixels)
        axis = second.dim() - pixels
        leading = second.shape[:axis]
        trailing = second.shape[axis:]
        second = second.reshape(*leading, *no_pixels, *trailing)
    return first, second


def _with_exact_diagonal(covariance: Tensor, variances: Tensor, state: State) -> Tensor:
    """Replace entries of an input with itself by its variance, so that its angle is exactly 0."""
    members = variances.dim() - 1 - state.spatial
    covariance = covariance.clone()
    diagonal = covariance.diagonal(dim1=members, dim2=members + 1).movedim(-1, members)
    state.equal_pixels(diagonal).copy_(variances)
    return covariance


def check_range(module: nn.Module, variances: Tensor, state: State) -> None:
    """Raise where a deep network has made the signal too large or too small for its dtype."""
    largest = variances.max().item()
    smallest_normal = torch.finfo(variances.dtype).tiny
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
