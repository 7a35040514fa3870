"""Ensembles in files: one safetensors file with a JSON header, no pickle.

The file holds every tensor of the ensemble (the reference's weights, modulations, masks, running
statistics), as JSON in its metadata the plan (members, sites, laws), and a checksum over both.
Nothing in it is ever executed; loading (:func:`embens.load`) needs the reference's architecture
from the user. A file without the shared parameters has their checksums instead, and needs the
reference's weights as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from torch import Tensor

from embens.files import Format, Refused, checksum

FORMAT = Format("embens ensemble", 3)


def check_shared(name: str, found: dict[str, str], shared: Mapping[str, Tensor]) -> None:
    """Check the parameters of a reference against the checksums of a file without them."""
    expected = fingerprints(shared)
    other = [key for key, _ in set(found.items()) ^ set(expected.items())]
    if other:
        raise Refused(
            f"{name} holds the members' numbers alone, and the reference has other weights "
            f"({min(other)!r}) than they were saved for. Pass the checkpoint that they belong to; "
            "where training has changed shared weights, save the whole ensemble."
        )


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the checksum of each tensor."""
    return {name: checksum("", {"": t.detach().cpu()}) for name, t in tensors.items()}


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
