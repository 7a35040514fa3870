"""Values of an ensemble by site and by layer, and copies with fixed masks."""

import copy
from dataclasses import replace
from typing import Any

from torch import Tensor

from embens.ensemble import EmbeddedEnsemble


def individual_tensors(ensemble: EmbeddedEnsemble) -> dict[str, dict[str, Tensor]]:
    """Return all stacked tensors ``(member, ...)``, by site or layer and by name.

    Args:
        ensemble: An ensemble without fresh masks, see :func:`with_fixed_masks`.

    Returns:
        ``"4.post"`` maps to ``{"": values}``; a per-member layer ``"4"`` to its stacked tensors by
        name, for example ``{"weight": ...}``; a low-rank layer to its two factors.
    """
    tensors: dict[str, dict[str, Tensor]] = {}
    for site in ensemble.spec.sites:
        tensors[f"{site.layer}.{site.kind}"] = {"": ensemble.site_values(site)}
    for item in ensemble.spec.per_member:
        stacks = tensors.setdefault(item.module, {})
        for name in item.tensors:
            stacks[name] = ensemble.individual[f"{item.module}.{name}".lstrip(".")]
    for site in ensemble.spec.low_rank:
        factors = tensors.setdefault(site.layer, {})
        for name in ("left", "right"):
            factors[name] = ensemble.individual[f"{site.layer}.{name}"]
    return tensors


def site_values(ensemble: EmbeddedEnsemble, site: Any) -> Tensor:
    """Return the values of a site, ``(member, size)``: the parameter itself if it is trainable.

    Args:
        ensemble: An ensemble without fresh masks, see :func:`with_fixed_masks`.
        site: An element of ``ensemble.spec.sites``.
    """
    return ensemble.site_values(site)


def with_fixed_masks(ensemble: EmbeddedEnsemble) -> EmbeddedEnsemble:
    """Replace fresh masks by fixed ones, drawn once from torch's global generator.

    Args:
        ensemble: Any ensemble; returned as it is if no mask is fresh.

    Returns:
        A copy with the same parameter values, in which every mask is fixed.
    """
    if not any(site.fresh for site in ensemble.spec.sites):
        return ensemble
    reference = copy.deepcopy(ensemble.reference)
    individual = copy.deepcopy(ensemble.individual)
    values = individual.tensors()
    example = next(reference.parameters())
    sites = []
    for site in ensemble.spec.sites:
        if site.fresh:
            values[site.key] = site.law.sample(
                (ensemble.members, site.size),
                dtype=example.dtype,
                device=example.device,
            )
        sites.append(replace(site, fresh=False))
    spec = replace(ensemble.spec, sites=tuple(sites))
    fixed = EmbeddedEnsemble(reference, spec, values)
    fixed.chunk = ensemble.chunk
    return fixed
