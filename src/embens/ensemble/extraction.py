"""Members as plain networks."""

import operator
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


def member(ensemble: "EmbeddedEnsemble", a: int) -> nn.Module:
    """Return member ``a`` as a plain module with the same outputs.

    Its layers are torch layers with the member's weights. Modulations cannot be merged into a layer
    that computes its weight in its forward; hooks scale its input and output instead.

    Args:
        ensemble: The ensemble.
        a: Index of the member; negative indices count from the end.

    Returns:
        A copy of the reference with the member's weights.

    Raises:
        IndexError: If there is no such member.
        ValueError: If modulations are drawn at each pass.

    Example:
        >>> from embens import batch_ensemble
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> ensemble = batch_ensemble(net, members=4)
        >>> x = torch.ones(5, 4)
        >>> torch.allclose(ensemble.member(3)(x), ensemble(x)[3], atol=1e-5)
        True
    """
    index = index_of_member(ensemble, a)
    if any(site.fresh for site in ensemble.spec.sites):
        raise ValueError(
            "modulations that are drawn at each pass belong to no member. Use fresh=False for a "
            "fixed set."
        )
    return plain_member(ensemble, index, ensemble.sample_values())


def index_of_member(ensemble: "EmbeddedEnsemble", a: Any) -> int:
    """Return the index of a member from 0.

    Args:
        ensemble: The ensemble.
        a: The index, which may be counted from the end.
    """
    if isinstance(a, bool) or not hasattr(a, "__index__"):
        raise TypeError(f"the index of a member must be an integer, got {a!r}.")
    index = operator.index(a)
    if not -ensemble.members <= index < ensemble.members:
        raise IndexError(f"member {index} does not exist, there are {ensemble.members} members.")
    return index % ensemble.members


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
