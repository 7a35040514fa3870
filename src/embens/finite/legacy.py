"""The functions of ``adapter`` for the core with wrapped layers; delete it with that core."""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn


def applies(ensemble: Any) -> bool:
    """Return whether an ensemble has the core with wrapped layers."""
    return hasattr(ensemble, "individuals")


def plain_reference(ensemble: Any) -> nn.Module:
    """Return the reference network without member wrappers."""
    from embens.ensemble.wrapping import without_members

    return without_members(ensemble.network)


def per_member(ensemble: Any) -> tuple[Any, ...]:
    """Return the per-member layers."""
    return ensemble.plan.own


def individual_tensors(ensemble: Any) -> dict[str, dict[str, Tensor]]:
    """Return all stacked tensors by site or layer, and by name."""
    return {name: module.tensors() for name, module in ensemble.individuals.items()}


def with_fixed_masks(ensemble: Any) -> Any:
    """Return a copy whose fresh masks are drawn once."""
    from embens.ensemble.layers import Modulation

    fixed = copy.deepcopy(ensemble)
    module: Any
    for module in fixed.individuals.values():
        if isinstance(module, Modulation) and module.fresh:
            with torch.no_grad():
                module.values = module.draw()
            module.fresh = False
            module.redrawn = False
    sites = tuple(replace(site, fresh=False) for site in fixed.plan.sites)
    fixed.plan = replace(fixed.plan, sites=sites)
    return fixed
