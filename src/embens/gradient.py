r"""The gradient of parameters that members share.

Every member's loss :math:`L_a` should reach its own modulations as it is, and the shared
parameters as :math:`\frac{\gamma(M)}{M} \sum_a \partial L_a`. Both come from one backward pass: a
pass uses the shared parameters through :class:`_Share`, which is the identity, and whose backward
multiplies by the :class:`GradientScale` of that pass. It is 1 until the backward pass of an
objective sets it, so that any other loss has its ordinary gradient, and a penalty on the
parameters themselves is never scaled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class GradientScale:
    """What the gradient of the shared parameters of one pass is multiplied by."""

    def __init__(self, ensemble: nn.Module, tensor: Tensor | None = None):
        self.ensemble = ensemble
        self.tensor = tensor
        self.value = 1.0
        self.claimed = False

    def claim(self, value: float) -> None:
        """Set the scale for the backward pass that is running."""
        if self.claimed and self.value != value:
            raise RuntimeError(
                f"one backward pass asks for two gradient scales ({self.value:g} and {value:g}) of "
                "the same outputs: objectives with different gamma can't be added. Call backward "
                "for each of them, or use outputs of separate passes."
            )
        if not self.claimed:
            torch.autograd.Variable._execution_engine.queue_callback(self._release)
        self._set(value, True)

    def _release(self) -> None:
        self._set(1.0, False)

    def _set(self, value: float, claimed: bool) -> None:
        self.value, self.claimed = value, claimed
        if self.tensor is not None:
            self.tensor.data.fill_(value)


class _Share(torch.autograd.Function):
    """The identity on all shared parameters at once, with a scaled gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(scale: Any, *parameters: Tensor) -> tuple[Tensor, ...]:
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        scale = inputs[0]
        ctx.set_materialize_grads(False)
        if isinstance(scale, Tensor):
            ctx.save_for_backward(scale)
            ctx.scale = None
        else:
            ctx.scale = scale

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        if ctx.scale is None:
            (factor,) = ctx.saved_tensors
        else:
            factor = ctx.scale.value
            if factor == 1.0:
                return None, *grad_outputs
        return None, *(None if g is None else g * factor for g in grad_outputs)


class _Objective(torch.autograd.Function):
    """The mean of the members' losses, whose gradient is that of their sum.

    Its backward pass claims the gradient scale of the pass that the losses come from.
    """

    @staticmethod
    def forward(ctx: Any, losses: Tensor, scale: GradientScale | None, factor: float) -> Tensor:
        ctx.scale, ctx.factor, ctx.size = scale, factor, losses.shape
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None, None]:
        if ctx.scale is not None:
            ctx.scale.claim(ctx.factor)
        return grad_outputs[0].expand(ctx.size), None, None


def combine_losses(losses: Tensor, scale: GradientScale | None, factor: float) -> Tensor:
    """Return the mean of the members' losses; its gradient is that of the objective."""
    return _Objective.apply(losses, scale, factor)  # type: ignore[return-value]


Holders = list[tuple[nn.Module, str]]


class SharedThrough:
    """A context in which modules use their shared parameters through a gradient scale.

    Args:
        scale: of this pass; a tensor where the pass is being compiled.
        holders: the modules that hold shared parameters, and the names under which they do.
    """

    def __init__(self, scale: GradientScale | Tensor, holders: Holders):
        self.scale = scale
        self.holders = holders
        self.originals: list[nn.Parameter | None] = []

    def __enter__(self) -> None:
        originals = [module._parameters[name] for module, name in self.holders]
        unique = {id(p): p for p in originals if p is not None and p.requires_grad}
        if not unique:
            return
        aliases = dict(zip(unique, _Share.apply(self.scale, *unique.values()), strict=True))
        self.originals = originals
        for (module, name), parameter in zip(self.holders, originals, strict=True):
            module._parameters[name] = aliases.get(id(parameter), parameter)  # type: ignore[assignment]

    def __exit__(self, *error: object) -> None:
        if self.originals:
            for (module, name), parameter in zip(self.holders, self.originals, strict=True):
                module._parameters[name] = parameter


def find_scale(outputs: Tensor) -> GradientScale | None:
    """Return the gradient scale of the pass that outputs come from, also after other operations."""
    direct = getattr(outputs, "gradient_scale", None)
    if direct is not None:
        return direct
    seen: set[Any] = set()
    level = [outputs.grad_fn]
    while level:
        following = []
        for node in level:
            if node is None or node in seen:
                continue
            seen.add(node)
            scale = getattr(node, "scale", None)
            if isinstance(scale, GradientScale) and isinstance(node, _Share._backward_cls):
                return scale
            following.extend(parent for parent, _ in node.next_functions)
        level = following
    return None


Gamma = float | int | Callable[[int], float] | None


def gradient_factor(gamma: Gamma, members: int, natural: float) -> float:
    r"""Return :math:`\gamma(M)/M`."""
    value = natural if gamma is None else gamma(members) if callable(gamma) else gamma
    try:
        value = float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"gamma must be a number, a function of the number of members, or None; got {gamma!r}"
        ) from None
    if not 0 <= value < float("inf"):
        raise ValueError(f"gamma must be finite and not negative; got {value}")
    return value / members
