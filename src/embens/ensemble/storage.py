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
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from embens.files import Format, Refused, checksum

if TYPE_CHECKING:
    from embens.ensemble.module import EmbeddedEnsemble

FORMAT = Format("embens ensemble", 3)
FILE, CARD = "ensemble.safetensors", "README.md"


def check_attention(name: str, found: Iterable[str], reference: nn.Module) -> None:
    """Refuse a file in which attention is one layer."""
    old = ("in_proj_weight", "q_proj_weight")
    if any(k.endswith(old) for k in found) > any(k.endswith(old) for k in reference.state_dict()):
        raise Refused(
            f"{name} was written by an earlier version of embens, in which attention was one layer "
            "and not four. Load it with that version, or make the ensemble anew."
        )


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
        mine, theirs = tuple(tensor.shape), tuple(found[key].shape)
        if mine != theirs:
            raise Refused(
                f"{name}: {key!r} has shape {theirs}, the reference needs {mine}; pass a reference "
                "of the architecture that was saved"
            )
        if (kind := found[key].dtype) != tensor.dtype:
            raise Refused(
                f"{name}: {key!r} is of {kind}, in the reference it is of {tensor.dtype}; pass "
                f"reference.to({kind}), and convert the ensemble afterwards"
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
