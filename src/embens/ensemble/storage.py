"""Ensembles in files: one safetensors file with a JSON header, no pickle.

The file holds every tensor of the ensemble (the reference's weights, modulations, masks, running
statistics) and, as JSON in its metadata, the plan: members, sites, laws. Nothing in it is ever
executed; loading (:func:`embens.load`) needs the reference's architecture from the user.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from embens.ensemble.plan import Plan
from embens.files import read_tensors, write_tensors
from embens.laws import Law


def write(path: str | os.PathLike[str], plan: Plan, tensors: Mapping[str, Tensor]) -> None:
    """Write a plan and the tensors of its ensemble to one file."""
    write_tensors(path, tensors, {"embens": plan.to_json()})


def read(
    path: str | os.PathLike[str], laws: Iterable[type[Law]] = ()
) -> tuple[Plan, dict[str, Tensor]]:
    """Return the plan and the tensors of a file that :func:`write` wrote."""
    path = Path(path)
    metadata, tensors = read_tensors(path)
    if "embens" not in metadata:
        raise ValueError(
            f"{path.name} was not written by ensemble.save: it has tensors but no embens header"
        )
    try:
        plan = Plan.from_json(metadata["embens"], laws)
    except (TypeError, KeyError, AttributeError, IndexError, json.JSONDecodeError) as error:
        raise ValueError(f"{path.name} has a damaged embens header: {error!r}") from None
    stacks = [t for name, t in tensors.items() if name.endswith(".values") and t.numel()]
    if any(len(t) != plan.members for t in stacks):
        raise ValueError(f"{path.name}: header and tensors disagree on the number of members")
    return plan, tensors


def check_tensors(
    name: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    """Check the tensors of a file against those that the ensemble needs."""
    for missing in expected.keys() - found.keys():
        raise ValueError(f"{name} has no tensor {missing!r}, which the reference needs")
    for extra in found.keys() - expected.keys():
        raise ValueError(f"{name} has a tensor {extra!r}, which the reference has no place for")
    for key, tensor in expected.items():
        if found[key].shape != tensor.shape:
            raise ValueError(
                f"{name}: {key!r} has shape {tuple(found[key].shape)}, the reference needs "
                f"{tuple(tensor.shape)}; pass a reference of the architecture that was saved"
            )
