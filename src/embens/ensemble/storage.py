"""Ensembles in files: one safetensors file with a JSON header, no pickle.

The file holds every tensor of the ensemble (the reference's weights, modulations, masks, running
statistics), as JSON in its metadata the plan (members, sites, laws), and a checksum over both.
Nothing in it is ever executed; loading (:func:`embens.load`) needs the reference's architecture
from the user. A file without the shared parameters has their checksums instead, and needs the
reference's weights as well.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from embens.files import Format, Refused, checksum

if TYPE_CHECKING:
    from embens.ensemble.module import EmbeddedEnsemble

FORMAT = Format("embens ensemble", 3)
FILE, CARD = "ensemble.safetensors", "README.md"


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
    for key in sorted(found.keys() ^ expected.keys()):
        where = "the reference" if key in found else "the file"
        raise Refused(
            f"{name}: there is no tensor {key!r} in {where}; pass a reference of the architecture "
            "that was saved (attention of version 0.2 is read by that version alone)"
        )
    for key, tensor in expected.items():
        mine, theirs = (f"of shape {tuple(t.shape)}, {t.dtype}" for t in (tensor, found[key]))
        if mine != theirs:
            raise Refused(
                f"{name}: {key!r} is {theirs} there, in the reference {mine}; pass one of the "
                f"architecture that was saved, as reference.to({found[key].dtype})"
            )
    broken = [key for key, tensor in found.items() if tensor.isnan().any()]
    if broken:
        warnings.warn(f"{name} was saved with NaN in {', '.join(broken[:5])}", stacklevel=3)


def card(ensemble: EmbeddedEnsemble, base: str, results: Mapping[str, float], whole: bool) -> str:
    """Return what an ensemble in a folder is, for people and for hubs; is its file ``whole``?"""
    plan, network = ensemble.plan, type(ensemble.network).__name__
    kinds = [repr(s.law) for s in plan.sites] + [f"rank {s.rank}, {s.kind}" for s in plan.low_rank]
    kinds += [f"own {o.module!r}" for o in plan.own]
    own, common = (
        sum(p.numel() for p in parameters)
        for parameters in (ensemble.individual_parameters(), ensemble.shared_parameters())
    )
    where = "in the file" if whole else f"not in the file: those of {base or 'the reference'}"
    rows = {"family": plan.family, "members differ by": ", ".join(dict.fromkeys(kinds))}
    rows |= {"their own numbers": f"{own:,}", "shared parameters": f"{common:,}, {where}"}
    return "\n".join(
        [
            *("---", "library_name: embens", f"tags: [ensemble, uncertainty, {plan.family}]"),
            *([f"base_model: {json.dumps(base)}"] if base else []),
            *("---", "", f"# {plan.members} members in one {network}", "", "| | |", "|---|---|"),
            *(f"| {name} | {value} |" for name, value in {**rows, **results}.items()),
            *("", "```python", "import embens", ""),
            f"reference = ...  # a {network}"
            + ("" if whole else f" with the weights of {base or 'the trained network'}"),
            "ensemble = embens.load(folder, reference)  # this folder",
            *("prediction = embens.predict(ensemble, inputs)", "```", ""),
        ]
    )
