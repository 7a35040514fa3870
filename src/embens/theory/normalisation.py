r"""Rules of norm layers over units: LayerNorm, RMSNorm and GroupNorm.

Each input's units are divided by the root of their mean square, which in the limit is
:math:`E[v^2]\, \Sigma_{aa}(x, x)`. It is the same for all members, so

.. math::
    \Sigma_{ab}(x, x') \to \frac{\Sigma_{ab}(x, x')}
        {\sqrt{(E[v^2]\, \Sigma_{aa}(x, x) + \epsilon)\, (E[v^2]\, \Sigma_{aa}(x', x') + \epsilon)}}

and tangent kernels likewise: gradients of the divisor are averages over units and vanish. A norm
over channels and pixels uses the mean of :math:`\Sigma_{aa}` over pixels. Groups of channels count
as wide. LayerNorm and GroupNorm subtract the mean of units, which must be 0 in the limit.
"""

import torch
from torch import Tensor, nn

from embens.theory.activation_step import LINEAR, check_range
from embens.theory.moments import MEASURE, Recorded, State, describe
from embens.theory.pending import addends_of, trained_bias, with_addends
from embens.theory.recursion import propagate


@propagate.register(nn.LayerNorm)
@propagate.register(nn.GroupNorm)
@propagate.register(nn.RMSNorm)
def normalise(module: nn.Module, state: State) -> State:
    """Return the kernels after a norm layer over units.

    Args:
        module: The norm layer.
        state: Kernels before it.

    Raises:
        ValueError: If units are not centred where the layer subtracts their mean.
        TypeError: If its trainable parameters have no rule, or it normalises each unit.
    """
    name = describe(module, state.path)
    if not isinstance(module, nn.RMSNorm) and not state.centred:
        raise ValueError(
            f"{name} subtracts the mean of units that is not 0 in the limit. Put it right after a "
            f"Linear or a convolution, or use nn.RMSNorm. {MEASURE}"
        )
    if isinstance(module, nn.GroupNorm) and module.num_groups == module.num_channels > 1:
        raise TypeError(f"{name} normalises each unit, which has no limit. Use fewer groups.")
    _require_initial_values(module, name)
    factor1, factor2 = _factors(module, state)
    first, second = state.align(factor1, factor2, paired=state.facts.recording is not None)
    scales = first * second
    members1, members2 = state.align(factor1, factor2, between=True)
    after = state.map(
        lambda kernel: kernel * scales,
        between=lambda kernel: kernel * (members1 * members2),
    )
    after = after.replace(depth=state.depth + 1)
    return _train(module, after)


def _factors(module: nn.Module, state: State) -> tuple[Tensor, Tensor]:
    """Return the factors of both sets of inputs; variances are recorded, then read."""
    facts = state.facts
    moment = state.pending_moment
    epsilon: float | None = module.eps  # type: ignore[assignment]
    if epsilon is None:
        epsilon = torch.finfo(state.covariance.dtype).eps
    if facts.recording is not None:
        variances = state.equal_pixels(state.covariance) * moment
        if _covers_pixels(module, state) and state.spatial:
            pixels = tuple(range(-state.spatial, 0))
            variances = variances.mean(pixels, keepdim=True).expand_as(variances)
        variances = variances.contiguous()
        check_range(module, variances, state)
        facts.recording.append(Recorded(LINEAR, None, variances))
        factor = (variances + epsilon).rsqrt()
        return factor, factor
    variances1 = facts.variances[0][state.depth]
    variances2 = facts.variances[1][state.depth]
    return (variances1 + epsilon).rsqrt(), (variances2 + epsilon).rsqrt()


def _covers_pixels(module: nn.Module, state: State) -> bool:
    """Return True if a norm layer averages over pixels as well as over units."""
    if isinstance(module, nn.GroupNorm):
        return True
    axes = len(module.normalized_shape)  # type: ignore[arg-type]
    if axes == 1 and (state.features_last or not state.spatial or state.flat):
        return state.flat
    if axes == 1 + state.spatial:
        return True
    raise ValueError(
        f"{describe(module, state.path)} must normalise over all units: (features,) of tokens, or "
        f"(channels, pixels…) of images; got normalized_shape={module.normalized_shape}."
    )


def _require_initial_values(module: nn.Module, name: str) -> None:
    """Raise unless weights are 1 and biases are 0, as torch initialises them."""
    for tensor, value in ((module.weight, 1.0), (getattr(module, "bias", None), 0.0)):
        if isinstance(tensor, Tensor) and not bool((tensor == value).all()):
            raise TypeError(
                f"{name} has weights and biases that are not 1 and 0, so the law of its parameters "
                "is not known. The limit belongs to an initialisation."
            )


def _train(module: nn.Module, state: State) -> State:
    """Add the tangents of trainable weights and biases."""
    weight = module.weight
    bias = getattr(module, "bias", None)
    is_scaled = isinstance(weight, Tensor) and weight.requires_grad
    is_shifted = isinstance(bias, Tensor) and bias.requires_grad
    if not is_scaled and not is_shifted:
        return state
    if state.placement(module).copies:
        raise TypeError(
            f"{describe(module, state.path)} has trainable parameters of each member, which have "
            f"no rule. Use elementwise_affine=False. {MEASURE}"
        )
    if is_scaled:
        state = _add_scale(state)
    if is_shifted:
        state = _add_bias(state)
    return state


def _add_scale(state: State) -> State:
    """Add a trainable scale of units, named after the norm layer."""
    scale = frozenset([state.path])
    if not state.addends:
        return state.replace(scales=state.scales | scale)
    addends = [addend.replace(scales=addend.scales | scale) for addend in state.addends]
    return with_addends(state, tuple(addends))


def _add_bias(state: State) -> State:
    """Add a trainable bias of units that is 0 at the start."""
    bias = trained_bias(state.covariance)
    if state.addends or state.pre is not None or state.low_rank is not None:
        return with_addends(state, (*addends_of(state), bias))
    # Tangents of the bias add to those of units without a factor.
    plain = state.replace(scales=frozenset())
    shifted = with_addends(plain, (*addends_of(plain), bias))
    return shifted.replace(scales=state.scales)
