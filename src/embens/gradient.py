r"""The gradient of parameters that members share.

Every member's loss :math:`L_a` should reach its own modulations as it is, and the shared
parameters as :math:`\frac{\gamma(M)}{M} \sum_a \partial L_a`. Both come from one backward pass: a
pass uses the shared parameters through :class:`_Share`, which is the identity, and whose backward
multiplies by the :class:`GradientScale` of that pass. It is 1 until the backward pass of an
objective sets it, so that any other loss has its ordinary gradient, and a penalty on the
parameters themselves is never scaled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map


class GradientScale:
    """What the gradient of the shared parameters of one pass is multiplied by."""

    def __init__(self, ensemble: nn.Module, tensor: Tensor | None = None):
        self.ensemble = ensemble
        self.tensor = tensor
        self.value = 1.0
        self.claimed = False
        self.arrived: dict[int, list[Tensor]] = {}

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

    def watch(self, outputs: Tensor) -> Tensor:
        """Return the outputs such that a backward pass fails if another loss uses them as well."""
        key = id(outputs)
        if key not in self.arrived:
            self.arrived[key] = []
            outputs.register_hook(lambda total: self._check(total, self.arrived[key]))
        return _Watched.apply(outputs, self.arrived[key])  # type: ignore[return-value]

    def _check(self, total: Tensor, arrived: list[Tensor]) -> None:
        if not self.claimed or self.value == 1.0:
            return
        if len(arrived) == 1 and arrived[0].data_ptr() == total.data_ptr():
            return
        if not arrived or not torch.allclose(sum(arrived), total):  # type: ignore[arg-type]
            raise RuntimeError(
                "an objective and another loss use the same outputs in one backward pass, and the "
                f"objective's gradient scale ({self.value:g}) would apply to both. Call backward "
                "for each of them, or run the ensemble again for the other loss."
            )

    def _release(self) -> None:
        self._set(1.0, False)
        for arrived in self.arrived.values():
            arrived.clear()

    def _set(self, value: float, claimed: bool) -> None:
        self.value, self.claimed = value, claimed
        if self.tensor is not None:
            self.tensor.data.fill_(value)


class _Watched(torch.autograd.Function):
    """The identity, which keeps the gradient that arrives."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, arrived: list[Tensor]) -> Tensor:
        ctx.arrived = arrived
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        ctx.arrived.append(grad_outputs[0])
        return grad_outputs[0], None


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

    Its backward pass claims the gradient scale of the passes that the losses come from.
    """

    @staticmethod
    def forward(losses: Tensor, scales: list[GradientScale], factor: float) -> Tensor:
        return losses.mean()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        losses, ctx.scales, ctx.factor = inputs
        ctx.size = losses.shape

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None, None]:
        for scale in ctx.scales:
            scale.claim(ctx.factor)
        return grad_outputs[0].expand(ctx.size), None, None


def combine_losses(losses: Tensor, scales: list[GradientScale], factor: float) -> Tensor:
    """Return the mean of the members' losses; its gradient is that of the objective."""
    return _Objective.apply(losses, scales, factor)  # type: ignore[return-value]


def watch(outputs: Any, factor: float) -> Any:
    """Make sure that a gradient scale which matters reaches no other loss on these outputs."""

    def watched(value: Any) -> Any:
        scale = getattr(value, "gradient_scale", None)
        return value if scale is None or not value.requires_grad else scale.watch(value)

    return outputs if factor == 1.0 else tree_map(watched, outputs)


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


def find_scales(outputs: Any) -> list[GradientScale]:
    """Return the gradient scales of the passes that outputs come from, through any operations."""
    found: dict[int, GradientScale] = {}
    seen: set[Any] = set()
    level: list[Any] = []
    for leaf in tree_leaves(outputs):
        direct = getattr(leaf, "gradient_scale", None)
        if direct is not None:
            found[id(direct)] = direct
        elif isinstance(leaf, Tensor):
            level.append(leaf.grad_fn)
    while level:
        node = level.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        scale = getattr(node, "scale", None)
        if isinstance(scale, GradientScale) and isinstance(node, _Share._backward_cls):
            found[id(scale)] = scale
        else:
            level.extend(parent for parent, _ in node.next_functions)
    return list(found.values())
