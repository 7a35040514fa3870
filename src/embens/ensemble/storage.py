"""Ensembles in files: one safetensors file with a JSON header, no pickle.

The file holds every tensor of the ensemble (the reference's weights, modulations, masks, running
statistics), as JSON in its metadata the plan (members, sites, laws), and a checksum over both.
Nothing in it is ever executed; loading (:func:`embens.load`) needs the reference's architecture
from the user.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping

from torch import Tensor

from embens.ensemble.plan import Plan
from embens.files import Format, Refused, read_tensors, refusing, write_tensors
from embens.laws import Law

FORMAT = Format("embens ensemble", 3)


def write(path: str | os.PathLike[str], plan: Plan, tensors: Mapping[str, Tensor]) -> None:
    """Write a plan and the tensors of its ensemble to one file."""
    write_tensors(path, FORMAT, {"plan": plan.to_dict()}, tensors)


def read(
    path: str | os.PathLike[str], laws: Iterable[type[Law]] = ()
) -> tuple[Plan, dict[str, Tensor]]:
    """Return the plan and the tensors of a file that :func:`write` wrote."""
    header, tensors = read_tensors(path, FORMAT)
    with refusing(path):
        return Plan.from_dict(header["plan"], laws), tensors


def check_tensors(name: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Check the tensors of a file against those that the ensemble needs."""
    for missing in expected.keys() - found.keys():
        raise Refused(f"{name} has no tensor {missing!r}, which the reference needs")
    for extra in found.keys() - expected.keys():
        raise Refused(f"{name} has a tensor {extra!r}, which the reference has no place for")
    for key, tensor in expected.items():
        mine, theirs = ((tuple(t.shape), t.dtype) for t in (tensor, found[key]))
        if mine[0] != theirs[0]:
            raise Refused(
                f"{name}: {key!r} has shape {theirs[0]}, the reference needs {mine[0]}; pass a "
                "reference of the architecture that was saved"
            )
        if mine[1] != theirs[1]:
            raise Refused(
                f"{name}: {key!r} is of {theirs[1]}, in the reference it is of {mine[1]}; pass the "
                f"reference in the type that was saved, as by reference.to({theirs[1]}), and "
                "convert the ensemble afterwards"
            )
    broken = [key for key, tensor in found.items() if tensor.isnan().any()]
    if broken:
        warnings.warn(f"{name} was saved with NaN in {', '.join(broken[:5])}", stacklevel=3)
