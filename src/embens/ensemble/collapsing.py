"""The mean of the members as one plain network, where it exists."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embens.ensemble.extraction import plain_network
from embens.ensemble.parametrizations import evaluated_tensors
from embens.ensemble.weights import member_tensors
from embens.graph.reading import Flow, read_flow
from embens.graph.snapshots import HOOKS
from embens.graph.watching import watch_flow

if TYPE_CHECKING:
    from embens.ensemble.module import EmbeddedEnsemble


def collapse(ensemble: "EmbeddedEnsemble", example_input: Any = None) -> nn.Module:
    """Return one plain network whose output is the mean of the members' outputs.

    It exists where the output is affine in the weights in which members differ, as in last-layer
    dropout. The network with the mean of these weights has the mean output.

    Args:
        ensemble: The ensemble.
        example_input: See :func:`embens.embed`; needed if the code cannot be traced.

    Returns:
        A copy of the reference with the mean of the members' weights.

    Raises:
        ValueError: If the mean is not one network.

    Example:
        >>> from embens import last_layer_dropout
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> ensemble = last_layer_dropout(net, members=4)
        >>> x = torch.ones(5, 4)
        >>> torch.allclose(ensemble.collapse()(x), ensemble(x).mean(0), atol=1e-5)
        True
    """
    flow = ensemble.flow
    if example_input is not None:
        flow = watch_flow(ensemble.reference, example_input)
    elif flow is None:
        flow = read_flow(ensemble.reference)
    reason = _why_not_collapsible(ensemble, flow)
    if reason:
        raise ValueError(
            f"this ensemble cannot be collapsed: {reason}. The mean of the members is one network "
            "only if the output is linear in the modulations (last-layer dropout)."
        )
    with torch.no_grad():
        computed = evaluated_tensors(ensemble.reference)
        means: dict[str, Tensor] = {}
        values = ensemble.sample_values()
        for a in range(ensemble.members):
            member_values = {name: stack.detach()[a] for name, stack in values.items()}
            tensors = member_tensors(
                ensemble.reference, ensemble.layers, ensemble.spec, member_values, computed
            )
            for name, tensor in tensors.items():
                means[name] = means.get(name, 0) + tensor / ensemble.members
        return plain_network(ensemble, {**computed, **means}, {})


def _why_not_collapsible(ensemble: "EmbeddedEnsemble", flow: Flow) -> str:
    """Return why the mean of the members' outputs is not one network's; "" if it is."""
    spec = ensemble.spec
    for name, module in ensemble.reference.named_modules():
        if any(vars(module)[hooks] for hooks in HOOKS):
            return f"{name or 'the reference'!r} has a hook"
    if spec.separate:
        return "its members are separate networks"
    if any(site.fresh for site in spec.sites):
        return "its modulations are drawn at each pass"
    differing = {site.layer for site in (*spec.sites, *spec.low_rank)}
    for item in spec.per_member:
        if item.module not in ensemble.layers:
            return f"members have separate tensors in {item.module!r}"
        differing.add(item.module)
    for name in differing:
        if not ensemble.layers[name].mergeable:
            return f"the layer {name!r} computes its weight"
        chained = flow.upstream.get(name, set()) & differing
        if chained:
            return f"the weights of {min(chained)!r} and {name!r} multiply each other"
    if not flow.outputs:
        return "the data flow after the modulated layers is unknown; pass example_input"
    for trail in flow.outputs:
        nonlinear = (trail.upstream & differing) - trail.affine
        if nonlinear:
            return f"the output is not linear in the output of {min(nonlinear)!r}"
    return ""
