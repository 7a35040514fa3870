"""Access to the parts of an ensemble that its public interface does not show yet.

Everything in this room reads members through these functions, so a new executor changes one file.
"""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from embens.ensemble import EmbeddedEnsemble
from embens.ensemble.layers import Modulation
from embens.ensemble.wrapping import without_members


def plain_reference(ensemble: EmbeddedEnsemble) -> nn.Module:
    """Return the reference network without member wrappers.

    Args:
        ensemble: any ensemble.

    Returns:
        A module that holds the very parameters that members share, under the reference's names.
    """
    return without_members(ensemble.network)


def per_member(ensemble: EmbeddedEnsemble) -> tuple[Any, ...]:
    """Return the per-member layers, items with ``.module``, ``.tensors`` and ``.drawn``.

    Args:
        ensemble: any ensemble.
    """
    return ensemble.plan.own


def individual_tensors(ensemble: EmbeddedEnsemble) -> dict[str, dict[str, Tensor]]:
    """Return all stacked tensors ``(member, ...)``, by site or layer and by name.

    Args:
        ensemble: any ensemble.

    Returns:
        ``"4.post"`` maps to ``{"": values}``; a per-member layer ``"4"`` to its stacked tensors by
        name, for example ``{"weight": ...}``; a low-rank layer to its two factors.
    """
    return {name: module.tensors() for name, module in ensemble.individuals.items()}


def site_values(ensemble: EmbeddedEnsemble, site: Any) -> Tensor:
    """Return the values of a site, ``(member, size)``: the parameter itself if it is trainable.

    Args:
        ensemble: an ensemble without fresh masks, see :func:`with_fixed_masks`.
        site: an element of ``ensemble.spec.sites``.
    """
    return individual_tensors(ensemble)[f"{site.layer}.{site.kind}"][""]


def with_fixed_masks(ensemble: EmbeddedEnsemble) -> EmbeddedEnsemble:
    """Return an ensemble whose fresh masks are drawn once, from torch's global generator.

    Args:
        ensemble: any ensemble; returned as it is if no mask is fresh.

    Returns:
        An ensemble with the same parameters' values, in which every mask is a fixed buffer.
    """
    if not any(site.fresh for site in ensemble.spec.sites):
        return ensemble
    fixed = copy.deepcopy(ensemble)
    for module in fixed.individuals.values():
        if isinstance(module, Modulation) and module.fresh:
            with torch.no_grad():
                module.values = module.draw()
            module.fresh = False
            module.redrawn = False
    sites = tuple(replace(site, fresh=False) for site in fixed.plan.sites)
    fixed.plan = replace(fixed.plan, sites=sites)
    return fixed
