r"""Rules: how kernels pass through a module, ``propagate(module, state)``.

*Affine layers.* Let :math:`u` be the post-activation modulation before the layer, :math:`U_k = E
u^k`, :math:`\mathcal A` the layer's map of pixels (the identity for a Linear layer), and
:math:`\sigma_w, \sigma_b, g_w, g_b` the values of :mod:`embens.theory.weight_law`. With the
kernels :math:`K, P^{com}, P^{ind}` after the activation,

.. math::
    \Sigma_{aa} = \sigma_w^2 U_2\, \mathcal A[K_{aa}] + \sigma_b^2, \quad
    \Theta^{com}_{aa} = U_2\, \mathcal A[g_w K_{aa} + \sigma_w^2 P^{com}_{aa}] + g_b, \quad
    \Theta^{ind}_a = \sigma_w^2\, \mathcal A[T(u) K_{aa} + U_2 P^{ind}_a] ,

and between members the same with :math:`E[u_a u_b]` instead of :math:`U_2`. Here :math:`T(u)` is 1
for trainable modulations and 0 for fixed ones. If every member has a copy of the layer, the
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

from collections.abc import Iterator
from functools import partial, singledispatch

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.pooling import _AdaptiveMaxPoolNd, _MaxPoolNd

from embens.theory import activations
from embens.theory.activation_step import activate
from embens.theory.affine_step import AffineStep
from embens.theory.moments import MEASURE, State, describe
from embens.theory.pending import settle
from embens.theory.pixels import (
    AVERAGES,
    is_depthwise,
    keep_diagonal,
    kernel_of_inputs,
    pixel_map,
    pool,
    upsample,
)
from embens.theory.rank_change import change_rank
from embens.theory.weight_law import weight_law

_NORMS = (_NormBase, nn.LocalResponseNorm)


@singledispatch
def propagate(module: nn.Module, state: State) -> State:
    """Return the kernels after a module of the reference from those before it.

    To add a rule for a module, register a function of module and state.

    Args:
        module: A module of the plain reference.
        state: Kernels before the module.

    Returns:
        Kernels after the module.

    Raises:
        TypeError: If there is no rule for the module.

    Example:
        >>> import torch
        >>> from embens import networks, theory
        >>> class Block(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.body = nn.Sequential(networks.Linear(4, 4, weight_std=2.0), nn.ReLU())
        ...
        ...     def forward(self, x):
        ...         return self.body(x)
        >>> @theory.propagate.register
        ... def block_rule(module: Block, state: State) -> State:
        ...     return theory.propagate(module.body, state)
        >>> net = nn.Sequential(Block(), networks.Linear(4, 1))
        >>> theory.kernels(net, torch.ones(1, 4)).nngp.same  # 2² / 2
        tensor([[2.]], dtype=torch.float64)
    """
    if not has_rule(module):
        raise unknown_limit(module, state.path)
    return activate(module, activations.dual(module), state)


def has_rule(module: nn.Module) -> bool:
    """Return True if the limit of a module is known."""
    kind = type(module)
    if propagate.dispatch(kind) is not propagate.dispatch(nn.Module):
        return True
    return activations.dual.dispatch(kind) is not activations.dual.dispatch(object)


def unknown_limit(module: nn.Module, path: str) -> TypeError:
    """Return the error for a module without a rule, with the reason and the fix."""
    kind = type(module).__name__
    register = f"give {kind} a rule with embens.theory.propagate.register"
    if isinstance(module, _NORMS):
        reason = "norm layers over the batch or neighbours have no rule"
        advice = f"Leave it out where the limit is wanted, or {register}"
    elif any(isinstance(part, nn.MultiheadAttention) for part in module.modules()):
        reason = "its attention divides scores by the root of the width, so they stay random"
        advice = (
            "Write it with Linear layers and F.scaled_dot_product_attention(…, scale=1 / width), "
            f"or {register}"
        )
    elif any(True for _ in module.children()):
        reason = "its forward is custom code that cannot be traced, or a block of torch"
        advice = f"Write it with layers and activation modules, or {register}"
    elif _is_elementwise(module):
        reason = "it has no dual"
        advice = f"If it is smooth, call embens.theory.register_activation({kind}); else {register}"
    else:
        reason = "there is no rule for it"
        advice = f"Leave it out, or {register}"
    return TypeError(
        f"the infinite-width limit of {describe(module, path)} is not known: {reason}. {advice}. "
        f"{MEASURE}"
    )


def _is_elementwise(module: nn.Module) -> bool:
    """Return True if a module has no parameters and acts elementwise."""
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
        TypeError: If a subclass of ``nn.Sequential`` overrides forward and has no rule.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 1)))
        >>> [name for name, _ in steps(net)]
        ['0', '1.0', '1.1']
    """
    if propagate.dispatch(type(module)) is not _sequence:
        yield path, module
        return
    if type(module).forward is not nn.Sequential.forward:
        raise unknown_limit(module, path)
    # named_children leaves out a module that occurs again, such as one activation for all layers.
    for name, child in module.named_modules(remove_duplicate=False):
        if name and "." not in name:
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
    return keep_diagonal(state).replace(flat=True, features_last=False)


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
propagate.register(nn.Upsample)(upsample)


@propagate.register(nn.Linear)
@propagate.register(_ConvNd)
def affine(layer: nn.Module, state: State) -> State:
    """Return the kernels after an affine layer and the modulation before it.

    Args:
        layer: A Linear layer or a convolution of the reference.
        state: Kernels before it.

    Returns:
        Kernels after it, with the modulation of its output pending.

    Raises:
        TypeError: If members' matrices of low rank have no limit, or an input modulation can't be
            read.
    """
    placement = state.placement(layer)
    # No activation followed the last layer: v modulates linear units.
    state = settle(state)
    is_first = state.inputs is not None
    law = weight_law(layer, finite=is_first, path=state.path)
    post = placement.post
    if is_first:
        if post is not None and not state.facts.input_members:
            raise TypeError(
                f"the input modulation of {describe(layer, state.path)} lies inside a module "
                "with a user's rule, where it cannot be read; put the first layer into "
                "nn.Sequential."
            )
        state = kernel_of_inputs(layer, state)
        post = None  # its drawn values are in the inputs
    step = AffineStep(
        layer=layer,
        law=law,
        apply=pixel_map(layer, state),
        post=post,
        copies=placement.copies,
        tracked=state.facts.tracked,
    )
    same = step.within(state)
    after = state.replace(
        same=same,
        cross=None,
        individual=None,
        gaussian=True,
        centred=True,
        sources=frozenset([state.path]),
        pre=placement.pre,
    )
    if is_depthwise(layer):
        # A unit has the weights of one input unit only, so it is a mixture of Gaussians.
        after = after.replace(gaussian=False, sources=after.sources | state.sources)
    if state.facts.tracked:
        cross = step.between(state, same)
        after = after.replace(cross=cross, individual=step.individual(state))
    if placement.low_rank is not None:
        after = change_rank(placement.low_rank, step, state, after, is_first=is_first)
    if state.flat:  # the layer has summed over the pixels
        after = after.replace(layout=None, spatial=0, flat=False)
    return after
