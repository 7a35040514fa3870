r"""Rules: how kernels pass through a module.

``propagate(module, state)`` is dispatched on the module's type. An affine layer with a
post-activation modulation :math:`u` before it and weights of law :math:`(\sigma_w, \sigma_b)`:

.. math::
    \Sigma_{aa} &= \sigma_w^2 U_2\, \mathcal A[K_{aa}] + \sigma_b^2, &
    \Sigma_{ab} &= \sigma_w^2 U_1^2\, \mathcal A[K_{ab}] + \sigma_b^2 \\
    \Theta^{com}_{aa} &= U_2\, \mathcal A[g_w K_{aa} + \sigma_w^2 P_{aa}] + g_b, &
    \Theta^{com}_{ab} &= U_1^2\, \mathcal A[g_w K_{ab} + \sigma_w^2 P_{ab}] + g_b \\
    \Theta^{ind}_a &= \sigma_w^2\, \mathcal A[T(u) K_{aa} + U_2 P^{ind}_a]

with :math:`U_k = E u^k` and :math:`\mathcal A` what the layer does to pixels (nothing in a Linear).
An activation of units with a pre-activation modulation :math:`v`, with :math:`F, G, H` of
:mod:`embens.theory.duals`:

.. math::
    K = F, \quad P^{com} = G\, \Theta^{com}, \quad P^{ind} = T(v)\, H_{aa} + G_{aa}\, \Theta^{ind}

To add a rule for a module of yours, register a function of module and state:

.. code-block:: python

    @embens.theory.propagate.register
    def _(module: MyBlock, state):
        return embens.theory.propagate(module.body, state)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache, singledispatch

import torch
from torch import Tensor, nn

from embens.ensemble.layers import Modulated, Modulation, Once
from embens.laws import Law
from embens.theory import duals
from embens.theory.duals import Dual
from embens.theory.limit.pixels import PixelMap, open_inputs, pixel_map
from embens.theory.limit.state import PAIRS, Moments, Recorded, State, describe, diagonal_of
from embens.theory.limit.weights import WeightLaw, weight_law


@singledispatch
def propagate(module: nn.Module, state: State) -> State:
    """Return the kernels after a module from those before it."""
    try:
        dual = duals.dual(module)
    except TypeError:
        raise TypeError(
            f"the infinite-width limit of {describe(module, state.path)} is not known. If it acts "
            f"on each unit alone, call embens.theory.register_activation({type(module).__name__}); "
            "else register a function of module and state with embens.theory.propagate.register."
        ) from None
    return activate(module, dual, state)


def steps(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of nested sequences, by name and in their order."""
    if isinstance(module, Once):
        yield from steps(module.module, path)
    elif propagate.dispatch(type(module)) is _sequence:
        if type(module).forward is not nn.Sequential.forward:
            raise TypeError(
                f"{describe(module, path)} is an nn.Sequential with a forward of its own, so its "
                "limit is not known; register a rule with embens.theory.propagate.register."
            )
        for name, child in module.named_children():
            yield from steps(child, f"{path}.{name}" if path else name)
    else:
        yield path, module


@propagate.register(nn.Sequential)
@propagate.register(Once)
def _sequence(module: nn.Module, state: State) -> State:
    outer = state.path
    for path, step in steps(module, outer):
        state = propagate(step, state.replace(path=path))
    return state.replace(path=outer)


@propagate.register(Modulated)
def _(module: Modulated, state: State) -> State:
    return affine(module.inner(), state, module.post).replace(pre=module.pre)


@propagate.register(nn.Linear)
def _(module: nn.Linear, state: State) -> State:
    return affine(module, state)


@propagate.register(nn.Identity)
def _(module: nn.Identity, state: State) -> State:
    return state


@propagate.register(nn.Dropout)
@propagate.register(nn.Dropout2d)
def _(module: nn.Dropout, state: State) -> State:
    if module.p and module.training:
        raise ValueError(
            f"{describe(module, state.path)} drops units afresh at each pass in training mode, so "
            "outputs have no limit. Call .eval(), or use embens.mc_dropout for masks that members "
            "keep."
        )
    return state


def activate(module: nn.Module, dual: Dual, state: State) -> State:
    """Return the kernels after an activation."""
    if not state.gaussian:
        raise ValueError(
            f"{describe(module, state.path)} acts on units that are not Gaussian: in the limit an "
            "activation needs a Linear or convolution right before it (pooling may lie between)."
        )
    law = None if state.pre is None else state.pre.law
    after = state.replace(depth=state.depth + 1, gaussian=False, pre=None, cross=None)
    covariance = state.covariance
    if state.recording is not None:
        variances = covariance
        if state.layout == PAIRS:
            variances = diagonal_of(covariance, state.spatial).contiguous()
        _check_range(module, variances, state)
        state.recording.append(Recorded(variances, dual, law))
        spread = _spread(variances, variances, state, paired=True)
        return after.replace(same=Moments(dual.same(*spread, covariance, law, with_h=False)[0]))
    assert state.records is not None
    (first, dual, _), (second, _, _) = (record[state.depth] for record in state.records)
    if state.aligned:
        covariance = _with_exact_diagonal(covariance, first, state)
    trains = state.tracked and state.pre is not None and is_trainable(state.pre)
    f, g, h = dual.same(*_spread(first, second, state), covariance, law, with_h=trains)
    individual = h
    if state.individual is not None:
        passed = g * state.individual
        individual = passed if h is None else passed.add_(h)
    same = Moments(f, None if state.same.ntk is None else g.mul_(state.same.ntk))
    after = after.replace(same=same, individual=individual)
    if not state.tracked or (state.cross is None and _keeps_alike(law)):
        return after

    def crossed() -> Moments:
        before = Moments(covariance, state.same.ntk) if state.cross is None else state.crossed
        c = _constant(0.0, covariance) if before.nngp is None else before.nngp
        f, g = dual.cross(*_spread(first, second, state, between=True), c, law)
        return Moments(f, None if before.ntk is None else g.mul_(before.ntk))

    return after.replace(cross=cache(crossed))


def affine(layer: nn.Module, state: State, post: Modulation | None = None) -> State:
    """Return the kernels after an affine layer, with a modulation before it if there is one."""
    if state.pre is not None:  # no activation came since: v has the identity for one
        state = activate(layer, duals.dual(nn.Identity()), state)
    law = weight_law(layer, finite=state.inputs is not None, path=state.path)
    if state.inputs is not None:
        if post is not None and not state.drawn:
            raise TypeError(
                f"the input modulation of {describe(layer, state.path)} lies inside a module "
                "with a rule of its own, where it can't be read; put the first layer into "
                "nn.Sequential."
            )
        state, post = open_inputs(layer, state), None  # its modulation is in the inputs
    first, second = (1.0, 1.0) if post is None else (post.law.mean**2, post.law.second_moment)
    apply = pixel_map(layer, state)

    def moments(before: Moments, moment: float) -> Moments:
        return _affine_moments(before, moment, law, apply, tracked=state.tracked)

    same, cross, individual = moments(state.same, second), None, None
    shared = (law.bias_variance, law.bias_gain)
    biases = Moments(*(_constant(b, same.nngp) if b else None for b in shared))  # type: ignore[arg-type]
    if state.tracked:
        if state.cross is not None or not (post is None or _keeps_alike(post.law)):
            cross = cache(lambda: moments(state.crossed, first) if first else biases)
        if state.individual is not None:
            individual = state.individual * (law.weight_variance * second)
        if post is not None and is_trainable(post):
            source = state.covariance * law.weight_variance
            individual = source if individual is None else individual.add_(source)
        individual = None if individual is None else apply(individual)
    after = state.replace(same=same, cross=cross, individual=individual, gaussian=True)
    # A Linear after a Flatten has summed over the pixels.
    return after.replace(layout=None, spatial=0, flat=False) if state.flat else after


def _affine_moments(
    before: Moments, moment: float, law: WeightLaw, apply: PixelMap, *, tracked: bool
) -> Moments:
    """Return the moments after an affine layer; its modulation multiplies by ``moment``."""
    assert before.nngp is not None
    kernel = apply(before.nngp)
    nngp = signal = kernel * (moment * law.weight_variance)
    if law.bias_variance:
        nngp = signal + law.bias_variance
    if not tracked:
        return Moments(nngp)
    ntk = signal
    if law.weight_gain != law.weight_variance:
        ntk = kernel * (moment * law.weight_gain)
    if before.ntk is not None:
        ntk = torch.add(ntk, apply(before.ntk), alpha=moment * law.weight_variance)
    if law.bias_gain:
        ntk = ntk + law.bias_gain
    return Moments(nngp, ntk)


def _constant(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=like.dtype, device=like.device).expand(like.shape)


def _keeps_alike(law: Law | None) -> bool:
    """Whether members draw equal modulations from this law."""
    return law is None or law.variance == 0


def is_trainable(modulation: Modulation) -> bool:
    """Return whether a modulation is trained, rather than a fixed mask."""
    return isinstance(modulation.values, nn.Parameter) and modulation.values.requires_grad


def _spread(
    first: Tensor, second: Tensor, state: State, *, paired: bool = False, between: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the variances of ``x1`` and ``x2`` shaped to go with a kernel.

    Args:
        first: variances ``(*member, n1, *pixels)``.
        second: variances ``(*member, n2, *pixels)``.
        state: gives the layout.
        paired: every input goes with itself, rather than with all.
        between: the kernel has two member axes.
    """
    pixels = 0 if state.layout is None else state.spatial
    if between and first.dim() > 1 + pixels:
        first, second = first.unsqueeze(1), second.unsqueeze(0)
    if not paired:
        first, second = first.unsqueeze(-1 - pixels), second.unsqueeze(-2 - pixels)
    if state.layout == PAIRS:
        first = first.reshape(*first.shape, *(1,) * pixels)
        split = second.dim() - pixels
        second = second.reshape(*second.shape[:split], *(1,) * pixels, *second.shape[split:])
    return first, second


def _with_exact_diagonal(covariance: Tensor, variances: Tensor, state: State) -> Tensor:
    """Return covariances whose entries of an input with itself are its variances to the last bit.

    Small angles are the square root of a rounding error otherwise.
    """
    pixels = 0 if state.layout is None else state.spatial
    members = variances.dim() - 1 - pixels
    covariance = covariance.clone()
    own = covariance.diagonal(dim1=members, dim2=members + 1)  # inputs come last
    if state.layout == PAIRS:
        own = diagonal_of(own.movedim(-1, members), pixels)
    else:
        own = own.movedim(-1, members)
    own.copy_(variances)
    return covariance


def _check_range(module: nn.Module, variances: Tensor, state: State) -> None:
    """Raise where a deep network has made the signal too large or too small for numbers."""
    largest = variances.max().item()
    if math.isfinite(largest) and not 0 < largest < torch.finfo(variances.dtype).tiny * 1e16:
        return
    flows, change = ("underflows", "larger") if math.isfinite(largest) else ("overflows", "smaller")
    raise ValueError(
        f"the variance of units {flows} before {describe(module, state.path)}, after "
        f"{state.depth} activations, each of which changes it by a factor. Use a {change} "
        "weight_std (sqrt(2) keeps the variance under ReLU), modulations with E u² = E v² = 1, or "
        "fewer layers."
    )
