r"""Rules: how kernels pass through a module, ``propagate(module, state)``.

An affine layer with a post-activation modulation :math:`u` before it and weights of law
:math:`(\sigma_w, \sigma_b)` with gains :math:`(g_w, g_b)`, with :math:`U_k = E u^k` and what the
layer does to pixels, :math:`\mathcal A` (nothing in a Linear):

.. math::
    \Sigma_{aa} = \sigma_w^2 U_2\, \mathcal A[K_{aa}] + \sigma_b^2, \quad
    \Theta^{com}_{aa} = U_2\, \mathcal A[g_w K_{aa} + \sigma_w^2 P_{aa}] + g_b, \quad
    \Theta^{ind}_a = \sigma_w^2\, \mathcal A[T(u) K_{aa} + U_2 P^{ind}_a]

and between members the same with :math:`E[u_a u_b]` for :math:`U_2`. Of a layer of the members'
own, the gains go to :math:`\Theta^{ind}`; if it was drawn for each, nothing passes between members.
An activation of units with a
pre-activation modulation :math:`v`, with :math:`F, G, H` of :mod:`embens.theory.duals`:

.. math::
    K = F, \quad P^{com} = G\, \Theta^{com}, \quad P^{ind} = T(v)\, H_{aa} + G_{aa}\, \Theta^{ind}
"""

import math
from collections.abc import Iterator
from functools import cache, partial, singledispatch
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.pooling import _AdaptiveMaxPoolNd, _MaxPoolNd

from embens.ensemble.layers import Modulated, Modulation, Once, Stochastic
from embens.ensemble.lowrank import LowRank
from embens.ensemble.own import Own
from embens.networks import Parametrized
from embens.reading.layers import NORMS
from embens.theory import duals
from embens.theory.duals import Dual
from embens.theory.duals.expectations import tells_apart
from embens.theory.limit.pixels import keep_diagonal, mixes_pixels, open_inputs, pixel_map, pool
from embens.theory.limit.state import (
    MEASURE,
    PAIRS,
    Moments,
    Recorded,
    State,
    constant,
    describe,
    plain_module,
    plus,
)

AVERAGES = {
    1: (nn.AvgPool1d, nn.AdaptiveAvgPool1d),
    2: (nn.AvgPool2d, nn.AdaptiveAvgPool2d),
    3: (nn.AvgPool3d, nn.AdaptiveAvgPool3d),
}
"""Average poolings, by the number of pixel axes."""


@singledispatch
def propagate(module: nn.Module, state: State) -> State:
    """Return the kernels after a module from those before it.

    To add a rule for a module of yours, register a function of module and state:

    .. code-block:: python

        @embens.theory.propagate.register
        def _(module: MyBlock, state):
            return embens.theory.propagate(module.body, state)
    """
    if not has_rule(module):
        raise unknown(module, state.path)
    return activate(module, duals.dual(module), state)


def has_rule(module: nn.Module) -> bool:
    """Return whether the limit of a module is known, or that of the reference's in its place."""
    kind = type(plain_module(module))
    known = ((propagate, nn.Module), (duals.dual, object))
    return any(rules.dispatch(kind) is not rules.dispatch(base) for rules, base in known)


def unknown(module: nn.Module, path: str) -> TypeError:
    """Return the error for a module without a rule: what the user wrote, and what to do."""
    plain = plain_module(module)
    kind = type(plain).__name__
    own = f"give {kind} a rule with embens.theory.propagate.register"
    if isinstance(plain, NORMS):
        why = "norm layers have no rule here"
        advice = f"Leave it out where the limit is wanted, or {own}"
    elif any(True for _ in plain.children()):
        why = "its forward is code of its own, which is not read (sums, functions like torch.relu)"
        advice = f"Write it as nn.Sequential of layers, poolings and activation modules, or {own}"
    elif not any(True for _ in plain.parameters()) and _acts_alone(plain):
        why = "its expectations under a normal law are not"
        advice = f"If it is smooth, call embens.theory.register_activation({kind}); else {own}"
    else:
        why, advice = "there is no rule for it", f"Leave it out, or {own}"
    where = describe(module, path)
    return TypeError(
        f"the infinite-width limit of {where} is not known: {why}. {advice}. {MEASURE}"
    )


def _acts_alone(module: nn.Module) -> bool:
    try:
        duals.by_quadrature(module)
    except Exception:  # whatever other modules do with a vector
        return False
    return True


def steps(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of nested sequences, by name and in their order."""
    if isinstance(module, Once):
        yield from steps(module.module, path)
    elif propagate.dispatch(type(module)) is _sequence:
        if type(module).forward is not nn.Sequential.forward:
            raise unknown(module, path)
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
    if isinstance(module.pre or module.post, Stochastic):
        raise TypeError(
            f"the modulations of {describe(module.inner(), state.path)} are drawn anew at each "
            "pass around trainable means, so outputs have no limit; take batch_ensemble for it."
        )
    return affine(module.inner(), state, module.post).replace(pre=module.pre)


@propagate.register(Own)
def _(module: Own, state: State) -> State:
    layer = module.plain(0, {})
    if propagate.dispatch(type(layer)) is not affine:
        raise TypeError(
            f"the infinite-width limit of {describe(layer, state.path)}, of which every member has "
            "its own, is not known; only Linear layers and convolutions have one."
        )
    return affine(layer, state, own="drawn" if module.drawn else "copied")


@propagate.register(LowRank)
def _(module: LowRank, state: State) -> State:
    raise TypeError(
        f"{describe(module.inner(), state.path)} differs between members by matrices of low rank, "
        "whose limit is not known: they are no small change of an infinitely wide layer. "
        "embens.finite has the kernels of this network."
    )


@propagate.register(nn.Identity)
def _(module: nn.Identity, state: State) -> State:
    return state


@propagate.register(_DropoutNd)
def _(module: _DropoutNd, state: State) -> State:
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
            "activation needs a Linear or convolution right before it (pooling may lie between). "
            + MEASURE
        )
    pre = state.pre
    law = None if pre is None else pre.law.marginal(pre.drawn)
    after = state.replace(depth=state.depth + 1, gaussian=False, pre=None, cross=None)
    covariance = state.covariance
    if state.recording is not None:
        variances = state.equal_pixels(covariance).contiguous()
        _check_range(module, variances, state)
        state.recording.append(Recorded(dual, law, variances))
        spread = _spread(variances, variances, state, paired=True)
        return after.replace(same=Moments(dual.same(*spread, covariance, law, with_h=False)[0]))
    dual = state.duals[state.depth]
    first, second = (variances[state.depth] for variances in state.variances)
    if state.aligned:
        covariance = _with_exact_diagonal(covariance, first, state)
    trains = state.tracked and pre is not None and is_trainable(pre)
    f, g, h = dual.same(*_spread(first, second, state), covariance, law, with_h=trains)
    passed = None if state.individual is None else g * state.individual
    same = Moments(f, None if state.same.ntk is None else g.mul_(state.same.ntk))
    after = after.replace(same=same, individual=plus(passed, h))
    if not state.tracked or (state.cross is None and not (pre and tells_apart(pre.law))):
        return after

    def crossed() -> Moments:
        before = Moments(covariance, state.same.ntk) if state.cross is None else state.crossed
        c = constant(0.0, covariance) if before.nngp is None else before.nngp
        law, members = (None, 1) if pre is None else (pre.law, pre.drawn)
        f, g = dual.joint(*_spread(first, second, state, between=True), c, law, members)
        return Moments(f, None if before.ntk is None else g.mul_(before.ntk))

    return after.replace(cross=cache(crossed))


def affine(
    layer: nn.Module, state: State, post: Modulation | None = None, *, own: str = ""
) -> State:
    """Return the kernels after an affine layer, with a modulation before it if there is one.

    ``own``: "drawn" or "copied" where every member has its own copy of the layer.
    """
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
    first = 1.0 if post is None else post.law.pair_moment(post.drawn)
    second = 1.0 if post is None else post.law.second_moment
    apply = pixel_map(layer, state)

    def gained(kernel: Tensor, moment: float) -> Tensor:
        ntk = kernel * (moment * law.weight_gain)
        return ntk + law.bias_gain if law.bias_gain else ntk

    def moments(before: Moments, moment: float) -> Moments:
        if before.nngp is None:  # of members that nothing couples
            return biases
        kernel = apply(before.nngp)
        nngp = kernel * (moment * law.weight_variance)
        if law.bias_variance:
            nngp = nngp + law.bias_variance
        if not state.tracked:
            return Moments(nngp)
        passed = None
        if before.ntk is not None:
            passed = apply(before.ntk) * (moment * law.weight_variance)
        return Moments(nngp, plus(passed, None if own else gained(kernel, moment)))

    same, cross, individual = moments(state.same, second), None, None
    shared = (law.bias_variance, 0.0 if own else law.bias_gain)
    biases = Moments(*(constant(b, same.nngp) if b else None for b in shared))  # type: ignore[arg-type]
    if state.tracked:
        if state.cross is not None or (post is not None and tells_apart(post.law)):
            cross = cache(lambda: moments(state.crossed, first) if first else biases)
        if state.individual is not None:
            individual = state.individual * (law.weight_variance * second)
        if post is not None and is_trainable(post):
            individual = plus(individual, state.covariance * law.weight_variance)
        individual = None if individual is None else apply(individual)
        if own:
            individual = plus(individual, gained(apply(state.covariance), 1.0))
        if own == "drawn":
            cross = Moments
    after = state.replace(same=same, cross=cross, individual=individual, gaussian=True)
    # A Linear after a Flatten has summed over the pixels.
    return after.replace(layout=None, spatial=0, flat=False) if state.flat else after


class WeightLaw(NamedTuple):
    r"""Second moments of a layer's parameters, and the gains of their gradients.

    With :math:`N` inputs of one output, :math:`\sigma_w^2 = N\,\mathrm{Var}\,W` and
    :math:`\sigma_b^2 = \mathrm{Var}\,b`. Gains, squared gradients of an output divided by the mean
    squared input, are the same for ``"ntk"``. For ``"standard"`` and ``"xavier"`` they are 1 and
    :math:`1/N` (0 but for the network's inputs): gradients grow with :math:`N`, the limit exists
    with layer rates :math:`\propto 1/N`, which are in the gains. ``"xavier"`` is taken at the
    layer's own ratio of fan-in and fan-out. Frozen parameters have gain 0.
    """

    weight_variance: float
    bias_variance: float
    weight_gain: float
    bias_gain: float


def weight_law(layer: nn.Module, *, finite: bool, path: str = "") -> WeightLaw:
    r"""Return the law of the weights of a Linear or convolution.

    Layers of :mod:`embens.networks` carry it. Torch's own are taken to be as torch draws them
    (uniform, :math:`\sigma_w^2 = 1/3`), if their weights look like that. ``finite`` says whether
    its inputs are the network's, of which there are finitely many.
    """
    weight, bias = layer.weight, layer.bias
    fan_in = weight[0].numel()  # type: ignore[index]
    if isinstance(layer, Parametrized):
        weight_variance, bias_variance = layer.weight_std**2, layer.bias_std**2
        if layer.parametrization == "xavier":
            fan_out = layer.weight.numel() // layer.weight.shape[1]
            weight_variance *= 2 * fan_in / (fan_in + fan_out)
        ntk = layer.parametrization == "ntk"
    else:
        if not _looks_like_torchs(weight, fan_in):
            raise ValueError(
                f"the law of the weights of {describe(layer, path)} is not known: they are not as "
                "torch draws them (trained, or initialised in another way). The limit belongs to "
                "an initialisation: build the network with embens.networks.mlp, cnn, Linear and "
                f"Conv2d, which carry theirs. {MEASURE}"
            )
        weight_variance, bias_variance = 1 / 3, 1 / (3 * fan_in) if finite else 0.0
        ntk = False
    scale = 0.0 if not finite else 1 / fan_in
    gains = (weight_variance, bias_variance) if ntk else (1.0, scale)
    return WeightLaw(
        weight_variance=weight_variance,
        bias_variance=0.0 if bias is None else bias_variance,
        weight_gain=gains[0] * bool(weight.requires_grad),  # type: ignore[union-attr]
        bias_gain=0.0 if bias is None else gains[1] * bool(bias.requires_grad),  # type: ignore[union-attr]
    )


def _looks_like_torchs(weight, fan_in: int) -> bool:
    """Return whether weights can be uniform on ±1/√N: their size, and their second moment."""
    scaled = weight.detach().double() * math.sqrt(fan_in)
    if not scaled.abs().max() <= 1 + 1e-6:
        return False
    error = math.sqrt(4 / 45 / scaled.numel())  # standard deviation of the mean of a square
    return abs(scaled.square().mean().item() - 1 / 3) < 6 * error


def is_trainable(modulation: Modulation) -> bool:
    """Return whether a modulation is trained, rather than a fixed mask."""
    return isinstance(modulation.values, nn.Parameter) and modulation.values.requires_grad


def _spread(
    first: Tensor, second: Tensor, state: State, *, paired: bool = False, between: bool = False
) -> tuple[Tensor, Tensor]:
    """Return variances ``(*member, n, *pixels)`` of ``x1`` and ``x2`` shaped to go with a kernel.

    ``paired``: every input goes with itself, not with all; ``between``: there are two member axes.
    """
    pixels = state.spatial
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
    """Make entries of an input with itself its variances: else small angles are rounding errors."""
    members = variances.dim() - 1 - state.spatial
    covariance = covariance.clone()
    own = covariance.diagonal(dim1=members, dim2=members + 1).movedim(-1, members)
    state.equal_pixels(own).copy_(variances)
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


def count_poolings(network: nn.Module) -> int:
    """Return how many modules of a network average over pixels."""
    kinds = sum(AVERAGES.values(), ())
    return sum(isinstance(m, kinds) and mixes_pixels(m) for m in network.modules())


@propagate.register(nn.Flatten)
def _(module: nn.Flatten, state: State) -> State:
    if module.start_dim != 1 or module.end_dim != -1:
        raise TypeError(
            f"{describe(module, state.path)}: only Flatten(1, -1) has a rule; got {module}."
        )
    return state if state.layout is None else keep_diagonal(state).replace(flat=True)


@propagate.register(_MaxPoolNd)
@propagate.register(_AdaptiveMaxPoolNd)
def _(module: nn.Module, state: State) -> State:
    raise TypeError(
        f"{describe(module, state.path)}: the maximum of correlated units is not Gaussian and has "
        "no kernel in closed form, so max pooling has no limit here. Use average pooling: "
        f"embens.networks.cnn(pool='average') or nn.AvgPool2d. {MEASURE}"
    )


propagate.register(nn.Linear, affine)
propagate.register(_ConvNd, affine)
for _axes, _kinds in AVERAGES.items():
    for _kind in _kinds:
        propagate.register(_kind)(partial(pool, axes=_axes))
