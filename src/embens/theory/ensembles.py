"""Access to the parts of an ensemble that the theory needs: reference, layers, drawn values."""

import copy

from torch import Tensor, nn

from embens.ensemble import EmbeddedEnsemble
from embens.graph.reading import Flow, detached_state, read_flow
from embens.sites import Site, find_layers
from embens.spec import PerMember


def plain_reference(ensemble: EmbeddedEnsemble) -> nn.Module:
    """Return the reference without modulations.

    Per-member layers have the tensors of the first member.
    """
    reference = ensemble.reference
    if not ensemble.spec.per_member:
        return reference
    reference = copy.deepcopy(reference, detached_state(reference))
    for item in ensemble.spec.per_member:
        module = reference.get_submodule(item.module)
        for name in item.tensors:
            stack = ensemble.individual[f"{item.module}.{name}".lstrip(".")]
            vars(module).pop(name, None)
            first = stack.detach()[0].clone()
            if isinstance(stack, nn.Parameter):
                parameter = nn.Parameter(first, stack.requires_grad)
                module.register_parameter(name, parameter)
            else:
                module.register_buffer(name, first)
    return reference


def site_values(ensemble: EmbeddedEnsemble, site: Site) -> Tensor:
    """Return the values of a site, ``(member, size)``, without gradients.

    Raises:
        ValueError: If the values are resampled at each pass.
    """
    return ensemble.site_values(site).detach()


def per_member(ensemble: EmbeddedEnsemble) -> tuple[PerMember, ...]:
    """Return the modules of which every member has a copy, as a whole or of some tensors."""
    return ensemble.spec.per_member


def drawn_members(ensemble: EmbeddedEnsemble) -> int:
    """Return the number of members that the values were drawn for; a subset has fewer."""
    return ensemble.spec.sampled or ensemble.members


def has_repeated_members(ensemble: EmbeddedEnsemble) -> bool:
    """Return True if a member occurs twice, as it may in a subset."""
    return ensemble.spec.has_repeated_members


def parameter_layers(reference: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of the parameter layers of a network by the layers' names."""
    layers = find_layers(reference)
    modules = {}
    for name, layer in layers.items():
        modules[name] = reference.get_submodule(layer.module)
    return modules


def data_flow(reference: nn.Module) -> Flow:
    """Return which parameter layers of a network come first and last."""
    return read_flow(reference)
