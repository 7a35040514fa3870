"""Members as plain networks."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embens.ensemble.copies import MemberCopy
from embens.ensemble.parametrizations import evaluated_tensors
from embens.ensemble.weights import member_tensors, modulations_by_layer
from embens.graph.reading import copy_module

if TYPE_CHECKING:
    from embens.ensemble.module import EmbeddedEnsemble


def plain_member(
    ensemble: "EmbeddedEnsemble",
    a: int,
    values: Mapping[str, Tensor],
    *,
    share_parameters: bool = False,
) -> nn.Module:
    """Return a member as a plain network.

    Args:
        ensemble: The ensemble.
        a: Index of the member.
        values: Values of the members by name, members first.
        share_parameters: See :func:`plain_network`.

    Returns:
        A copy of the reference with the member's weights.
    """
    ensemble.refresh_layers()
    member_values: dict[str, Tensor] = {}
    tied: dict[int, Tensor] = {}  # tied tensors of a member stay tied
    for name, stack in values.items():
        member_values[name] = tied.setdefault(id(stack), stack.detach()[a])
    reference, spec = ensemble.reference, ensemble.spec
    with torch.no_grad():
        computed = evaluated_tensors(reference)
        tensors = member_tensors(reference, ensemble.layers, spec, member_values, computed)
        ensemble.merged.check_hidden(tensors)
        return plain_network(
            ensemble,
            {**computed, **tensors},
            modulations_by_layer(spec, member_values),
            ensemble.merged.member_attributes()[a],
            share_parameters=share_parameters,
        )


def plain_network(
    ensemble: "EmbeddedEnsemble",
    tensors: Mapping[str, Tensor],
    scales: dict[str, tuple[Tensor | None, Tensor | None]],
    attributes: Mapping[str, dict[str, Any]] | None = None,
    *,
    share_parameters: bool = False,
) -> nn.Module:
    """Return a copy of the reference with some tensors replaced.

    All tensors are cloned, except parameters with ``share_parameters``.

    Args:
        ensemble: The ensemble.
        tensors: Tensors to replace, by name.
        scales: Modulations of layers that are scaled by hooks.
        attributes: Attributes that the member's code has assigned, by module.
        share_parameters: Whether parameters share the memory of the given ones instead of being
            cloned.

    Returns:
        A network whose parametrized layers are plain ones.
    """
    copied = MemberCopy(ensemble, plain=True)
    copied.set_attributes(attributes or {})
    copied.bind(tensors, scales)
    requires_grad = _gradient_flags(ensemble)
    replaced: dict[int, Any] = {}
    for name, module in copied.module.named_modules():
        for key, tensor in module._parameters.items():
            if tensor is None or id(tensor) in replaced:
                continue
            parameter = tensor.detach()
            if not share_parameters:
                parameter = parameter.clone()
            flag = requires_grad.get(f"{name}.{key}".lstrip("."), True)
            replaced[id(tensor)] = nn.Parameter(parameter, flag)
        for buffer in module._buffers.values():
            if buffer is not None and id(buffer) not in replaced:
                replaced[id(buffer)] = buffer.detach().clone()
    return copy_module(copied.module, replaced)


def _gradient_flags(ensemble: "EmbeddedEnsemble") -> dict[str, bool]:
    """Return which parameters of a member are trained, by their names in the reference."""
    flags = {}
    for name, parameter in ensemble.reference.named_parameters():
        flags[name] = parameter.requires_grad
    for name, stack in ensemble.individual.tensors().items():
        flags[name] = stack.requires_grad
    return flags
