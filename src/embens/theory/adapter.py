"""What the theory needs to know of an ensemble beyond its public interface.

The theory reads the plain reference and the specification of the ensemble. This file is the only
one in the package that looks into the ensemble's implementation.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from embens import reading
from embens.ensemble.layers import Modulated
from embens.ensemble.wrapping import walk, without_members

if TYPE_CHECKING:
    from embens.ensemble import EmbeddedEnsemble
    from embens.ensemble.plan import OwnTensors, Site


class DataFlow(Protocol):
    """Order of the parameter layers of a network.

    Attributes:
        first: Names of layers with no parameter layer before them.
        last: Names of layers with no parameter layer after them.
        guesses: Remarks on parts of the network that could not be read.
    """

    first: Collection[str]
    last: Collection[str]
    guesses: Sequence[str]


def plain_reference(ensemble: EmbeddedEnsemble) -> nn.Module:
    """Return the reference network without modulations, with the user's module types and names."""
    reference = without_members(ensemble.network)
    for item in per_member(ensemble):
        module = reference.get_submodule(item.module)
        for name in item.tensors:
            stack = getattr(module, name)
            if isinstance(stack, nn.Parameter):
                first = nn.Parameter(stack.detach()[0], stack.requires_grad)
                setattr(module, name, first)
    return reference


def site_values(ensemble: EmbeddedEnsemble, site: Site) -> Tensor:
    """Return the values of a site, ``(member, size)``.

    Raises:
        ValueError: If the values are resampled at each pass.
    """
    if site.fresh:
        raise ValueError(
            f"the {site.kind} modulations of {site.layer!r} are resampled at each pass, so members "
            "have no values. Use fresh=False for a fixed set of masks."
        )
    for name, module in walk(ensemble.network):
        if name == site.layer and isinstance(module, Modulated):
            modulation: Any = getattr(module, site.kind)
            return modulation.values.detach()
    raise KeyError(f"the ensemble has no {site.kind} modulation at {site.layer!r}")


def per_member(ensemble: EmbeddedEnsemble) -> Sequence[OwnTensors]:
    """Return the modules of which every member has a copy, as a whole or of some tensors."""
    return ensemble.plan.own


def drawn_members(ensemble: EmbeddedEnsemble) -> int:
    """Return the number of members that the values were drawn for; a subset has fewer."""
    return ensemble.plan.drawn


def has_repeated_members(ensemble: EmbeddedEnsemble) -> bool:
    """Return whether a member occurs twice, as a subset may have it."""
    return ensemble.plan.repeats


def parameter_layers(reference: nn.Module) -> dict[str, nn.Module]:
    """Return the parameter layers of a network by name."""
    return reading.parameter_layers(reference)


def data_flow(reference: nn.Module) -> DataFlow:
    """Return which parameter layers of a network come first and last."""
    return reading.read(reference)
