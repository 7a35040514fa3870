r"""Rules: how kernels pass through a module, ``propagate(module, state)``.

*Affine layers.* Let :math:`u` be the post-activation modulation before the layer, :math:`U_k = E
u^k`, :math:`\mathcal A` the layer's map of pixels (the identity for a Linear layer), and
:math:`\sigma_w, \sigma_b, g_w, g_b` the numbers of :mod:`embens.theory.weight_law`. With the
kernels :math:`K, P^{com}, P^{ind}` after the activation,

.. math::
    \Sigma_{aa} = \sigma_w^2 U_2\, \mathcal A[K_{aa}] + \sigma_b^2, \quad
    \Theta^{com}_{aa} = U_2\, \mathcal A[g_w K_{aa} + \sigma_w^2 P^{com}_{aa}] + g_b, \quad
    \Theta^{ind}_a = \sigma_w^2\, \mathcal A[T(u) K_{aa} + U_2 P^{ind}_a] ,

and between members the same with :math:`E[u_a u_b]` instead of :math:`U_2`. Here :math:`T(u)` is 1
for trainable modulations and 0 for fixed ones. If every member has its own copy of the layer, the
gains go to :math:`\Theta^{ind}`; if that copy was drawn for each member, nothing passes between
members.

*Activations* of units with a pre-activation modulation :math:`v`, with :math:`F, G, H` of
:mod:`embens.theory.expectations`:

.. math::
    K = F, \quad P^{com} = G\, \Theta^{com}, \quad
    P^{ind}_a = T(v)\, H_{aa} + G_{aa}\, \Theta^{ind}_a .

The paper's Proposition 2 gives the sum of both tangent kernels; they obey the same linear
propagation, so the split is exact.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial, singledispatch

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.pooling import _AdaptiveMaxPoolNd, _MaxPoolNd

from embens.theory import activations
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
from embens.theory.pixels import (
    AVERAGES,
    PixelMap,
    keep_diagonal,
    open_inputs,
    pixel_map,
    pool,
)
from embens.theory.placement import Modulation
from embens.theory.weight_law import WeightLaw, weight_law

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm)


@singledispatch
def propagate(module: nn.Module, state: State) -> State:
    """Return the kernels after a module of the reference from those before it.

    Args:
        module: A module of the plain reference.
        state: Kernels before the module.

    Raises:
        TypeError: If there is no rule for the module.

    To add a rule for a module, register a function of module and state:

    .. code-block:: python

        @embens.theory.propagate.register
        def _(module: MyBlock, state):
            return embens.theory.propagate(module.body, state)
    """
    if not has_rule(module):
        raise unknown(module, state.path)
    return activate(module, activations.dual(module), state)


def has_rule(module: nn.Module) -> bool:
    """Return whether the limit of a module is known."""
    kind = type(module)
    if propagate.dispatch(kind) is not propagate.dispatch(nn.Module):
        return True
    return activations.dual.dispatch(kind) is not activations.dual.dispatch(object)


def unknown(module: nn.Module, path: str) -> TypeError:
    """Return the error for a module without a rule, with the reason and what to do."""
    kind = type(module).__name__
    register = f"give {kind} a rule with embens.theory.propagate.register"
    if isinstance(module, _NORMS):
        reason = "norm layers have no rule here"
        advice = f"Leave it out where the limit is wanted, or {register}"
    elif any(True for _ in module.children()):
        reason = (
            "its forward is code of its own, which is not read (sums, functions like torch.relu)"
        )
        advice = (
            f"Write it as nn.Sequential of layers, poolings and activation modules, or {register}"
        )
    elif _is_elementwise(module):
        reason = "its expectations under a normal law are not"
        advice = f"If it is smooth, call embens.theory.register_activation({kind}); else {register}"
    else:
        reason = "there is no rule for it"
        advice = f"Leave it out, or {register}"
    return TypeError(
        f"the infinite-width limit of {describe(module, path)} is not known: {reason}. {advice}. "
        f"{MEASURE}"
    )


def _is_elementwise(module: nn.Module) -> bool:
    """Return whether a module has no parameters and acts on each number separately."""
    if any(True for _ in module.parameters()):
        return False
    try:
        activations.by_quadrature(module)
    except Exception:  # modules of other kinds raise anything when they get a vector
        return False
    return True


def steps(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of nested ``nn.Sequential`` with their names, in order.

    Args:
        module: A network.
        path: Name of the network.

    Raises:
        TypeError: If a subclass of ``nn.Sequential`` has a forward of its own and no rule.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 1)))
        >>> [name for name, _ in steps(net)]
        ['0', '1.0', '1.1']
    """
    if propagate.dispatch(type(module)) is not _sequence:
        yield path, module
        return
    if type(module).forward is not nn.Sequential.forward:
        raise unknown(module, path)
    for name, child in module.named_children():
        yield from steps(child, f"{path}.{name}" if path else name)


@propagate.register(nn.Sequential)
def _sequence(module: nn.Sequential, state: State) -> State:
    outer = state.path
    for path, step in steps(module, outer):
        state = propagate(step, state.replace(path=path))
    return state.replace(path=outer)


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


@propagate.register(nn.Flatten)
def _(module: nn.Flatten, state: State) -> State:
    if module.start_dim != 1 or module.end_dim != -1:
        raise TypeError(
            f"{describe(module, state.path)}: only Flatten(1, -1) has a rule; got {module}."
        )
    if state.layout is None:
        return state
    return keep_diagonal(state).replace(flat=True)


@propagate.register(_MaxPoolNd)
@propagate.register(_AdaptiveMaxPoolNd)
def _(module: nn.Module, state: State) -> State:
    raise TypeError(
        f"{describe(module, state.path)}: the maximum of correlated units is not Gaussian and has "
        "no kernel in closed form, so max pooling has no limit here. Use average pooling: "
        f"embens.networks.cnn(pool='average') or nn.AvgPool2d. {MEASURE}"
    )


for _kind, _axes in AVERAGES.items():
    propagate.register(_kind)(partial(pool, axes=_axes))


def activate(module: nn.Module, dual: Dual, state: State) -> State:
    """Return the kernels after an activation.

    Args:
        module: The activation, for messages.
        dual: Its expectations.
        state: Kernels before it.

    Raises:
        ValueError: If the units before it are not Gaussian.
    """
    if not state.gaussian:
        raise ValueError(
            f"{describe(module, state.path)} acts on units that are not Gaussian: in the limit an "
            "activation needs a Linear or convolution right before it (pooling may lie between). "
            + MEASURE
        )
    if state.facts.recording is not None:
        return _activate_and_record(module, dual, state)
    return _activate_pairs(state)


def _activate_and_record(module: nn.Module, dual: Dual, state: State) -> State:
    """Pass every input with itself through an activation, and record its variances."""
    assert state.facts.recording is not None
    if state.facts.duals:
        dual = state.facts.duals[state.depth]
    law = None if state.pre is None else state.pre.marginal
    variances = state.equal_pixels(state.covariance).contiguous()
    _check_range(module, variances, state)
    state.facts.recording.append(Recorded(dual, law, variances))
    q1, q2 = _align_variances(variances, variances, state, paired=True)
    if not state.facts.duals:
        dual = dual.prepare(variances.max().item() or 1.0, law)
    f, _, _ = dual.same(q1, q2, state.covariance, law, with_h=False)
    return _after_activation(state).replace(same=Moments(f))


def _activate_pairs(state: State) -> State:
    """Pass pairs of inputs through an activation, with the variances that were recorded."""
    facts, pre = state.facts, state.pre
    dual = facts.duals[state.depth]
    variances1 = facts.variances[0][state.depth]
    variances2 = facts.variances[1][state.depth]
    covariance = state.covariance
    if facts.aligned:
        covariance = _with_exact_diagonal(covariance, variances1, state)
    law = None if pre is None else pre.marginal
    q1, q2 = _align_variances(variances1, variances2, state)
    with_h = facts.tracked and pre is not None and pre.trainable
    f, g, h = dual.same(q1, q2, covariance, law, with_h=with_h)
    individual = None if state.individual is None else g * state.individual
    ntk = None if state.same.ntk is None else g.mul_(state.same.ntk)
    after = _after_activation(state)
    after = after.replace(same=Moments(f, ntk), individual=add(individual, h))
    differ = state.cross is not None or (pre is not None and pre.differs_between_members)
    if not (facts.tracked and differ):
        return after

    def cross() -> Moments:
        before = state.crossed
        if state.cross is None:
            before = Moments(covariance, state.same.ntk)
        c = constant(0.0, covariance) if before.nngp is None else before.nngp
        q1, q2 = _align_variances(variances1, variances2, state, between=True)
        if pre is None:
            f, g = dual.cross(q1, q2, c, None)
        else:
            f, g = dual.joint(q1, q2, c, pre.law, pre.members)
        return Moments(f, None if before.ntk is None else g.mul_(before.ntk))

    return after.replace(cross=cache(cross))


def _after_activation(state: State) -> State:
    return state.replace(
        depth=state.depth + 1, gaussian=False, pre=None, cross=None, individual=None
    )


@propagate.register(nn.Linear)
@propagate.register(_ConvNd)
def affine(layer: nn.Module, state: State) -> State:
    """Return the kernels after an affine layer and the modulation before it.

    Args:
        layer: A Linear layer or a convolution of the reference.
        state: Kernels before it.

    Raises:
        TypeError: If members differ by matrices of low rank, or an input modulation can't be read.
    """
    placement = state.placement(layer)
    if placement.low_rank:
        raise TypeError(
            f"{describe(layer, state.path)} differs between members by matrices of low rank, "
            "whose limit is not known: they are no small change of an infinitely wide layer. "
            "embens.finite has the kernels of this network."
        )
    if state.pre is not None:
        # No activation followed the last layer, so v modulates linear units.
        state = activate(layer, activations.dual(nn.Identity()), state)
    law = weight_law(layer, finite=state.inputs is not None, path=state.path)
    post = placement.post
    if state.inputs is not None:
        if post is not None and not state.facts.input_members:
            raise TypeError(
                f"the input modulation of {describe(layer, state.path)} lies inside a module "
                "with a rule of its own, where it can't be read; put the first layer into "
                "nn.Sequential."
            )
        state = open_inputs(layer, state)
        post = None  # its drawn values are in the inputs
    step = _AffineStep(law, pixel_map(layer, state), post, placement.copies, state.facts.tracked)
    same = step.within(state)
    after = state.replace(same=same, cross=None, individual=None, gaussian=True, pre=placement.pre)
    if state.facts.tracked:
        cross = step.between(state, same)
        after = after.replace(cross=cross, individual=step.individual(state))
    if state.flat:  # the layer has summed over the pixels
        after = after.replace(layout=None, spatial=0, flat=False)
    return after


@dataclass(frozen=True)
class _AffineStep:
    """An affine layer with the modulation before it, as it acts on each kernel.

    Attributes:
        law: Variances and gains of the layer's parameters.
        apply: Its map of pixels.
        post: The modulation before it.
        copies: Whether members have copies of it; see :class:`Placement`.
        tracked: Whether tangent kernels are computed.
    """

    law: WeightLaw
    apply: PixelMap
    post: Modulation | None
    copies: str
    tracked: bool

    def within(self, state: State) -> Moments:
        """Return the kernels within a member."""
        moment = 1.0 if self.post is None else self.post.second_moment
        return self._transform(state.same, moment)

    def between(self, state: State, same: Moments) -> Callable[[], Moments] | None:
        """Return a function that computes the kernels between members.

        Args:
            state: Kernels before the layer.
            same: Kernels within a member after it.

        Returns:
            None where the kernels between members are those within a member.
        """
        if self.copies == "drawn":
            return Moments  # nothing in common
        differs = self.post is not None and self.post.differs_between_members
        if state.cross is None and not differs:
            return None
        moment = 1.0 if self.post is None else self.post.pair_moment

        def cross() -> Moments:
            # A centred modulation needs no kernels between members before it.
            if moment == 0:
                return self._biases(same)
            before = state.crossed
            if before.nngp is None:
                return self._biases(same)
            return self._transform(before, moment)

        return cache(cross)

    def individual(self, state: State) -> Tensor | None:
        """Return the tangent kernel of individual parameters."""
        moment = 1.0 if self.post is None else self.post.second_moment
        kernel = None
        if state.individual is not None:
            kernel = state.individual * (self.law.weight_variance * moment)
        if self.post is not None and self.post.trainable:
            kernel = add(kernel, state.covariance * self.law.weight_variance)
        if kernel is not None:
            kernel = self.apply(kernel)
        if self.copies:
            kernel = add(kernel, self.law.gradients(self.apply(state.covariance), 1.0))
        return kernel

    def _transform(self, before: Moments, moment: float) -> Moments:
        """Return the kernels after the layer; ``moment`` is that of the modulation."""
        assert before.nngp is not None
        kernel = self.apply(before.nngp)
        nngp = kernel * (moment * self.law.weight_variance)
        if self.law.bias_variance:
            nngp = nngp + self.law.bias_variance
        if not self.tracked:
            return Moments(nngp)
        ntk = None
        if before.ntk is not None:
            ntk = self.apply(before.ntk) * (moment * self.law.weight_variance)
        if not self.copies:
            ntk = add(ntk, self.law.gradients(kernel, moment))
        return Moments(nngp, ntk)

    def _biases(self, same: Moments) -> Moments:
        """Return what members have in common after inputs that have nothing in common."""
        like = same.nngp
        assert like is not None
        gain = 0.0 if self.copies else self.law.bias_gain
        nngp = constant(self.law.bias_variance, like) if self.law.bias_variance else None
        ntk = constant(gain, like) if gain else None
        return Moments(nngp, ntk)


def _align_variances(
    first: Tensor, second: Tensor, state: State, *, paired: bool = False, between: bool = False
) -> tuple[Tensor, Tensor]:
    """Insert axes into variances ``(*member, n, *pixel)`` so that they broadcast with a kernel.

    Args:
        first: Variances of ``x1``.
        second: Variances of ``x2``.
        state: The state that holds the kernel.
        paired: Whether the kernel is that of every input with itself.
        between: Whether the kernel has two member axes.

    Returns:
        Views of both variances.
    """
    pixels = state.spatial
    has_members = first.dim() > 1 + pixels
    if between and has_members:
        first, second = first.unsqueeze(1), second.unsqueeze(0)
    if not paired:
        first, second = first.unsqueeze(-1 - pixels), second.unsqueeze(-2 - pixels)
    if state.layout == PAIRS:
        no_pixels = (1,) * pixels
        first = first.reshape(*first.shape, *no_pixels)
        leading = second.shape[: second.dim() - pixels]
        second = second.reshape(*leading, *no_pixels, *second.shape[second.dim() - pixels :])
    return first, second


def _with_exact_diagonal(covariance: Tensor, variances: Tensor, state: State) -> Tensor:
    """Replace entries of an input with itself by its variance, so that its angle is exactly 0."""
    members = variances.dim() - 1 - state.spatial
    covariance = covariance.clone()
    diagonal = covariance.diagonal(dim1=members, dim2=members + 1).movedim(-1, members)
    state.equal_pixels(diagonal).copy_(variances)
    return covariance


def _check_range(module: nn.Module, variances: Tensor, state: State) -> None:
    """Raise where a deep network has made the signal too large or too small for its dtype."""
    largest = variances.max().item()
    smallest_normal = torch.finfo(variances.dtype).tiny
    if not math.isfinite(largest):
        problem, change = "overflows", "smaller"
    elif 0 < largest < 1e16 * smallest_normal:
        problem, change = "underflows", "larger"
    else:
        return
    raise ValueError(
        f"the variance of units {problem} before {describe(module, state.path)}, after "
        f"{state.depth} activations, each of which changes it by a factor. Use a {change} "
        "weight_std (sqrt(2) keeps the variance under ReLU), modulations with E u² = E v² = 1, or "
        "fewer layers."
    )
