"""The card of an ensemble in a folder: what it is, for people and for hubs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from embens.ensemble.module import EmbeddedEnsemble

FILE, CARD = "ensemble.safetensors", "README.md"


def card(ensemble: EmbeddedEnsemble, base: str, results: Mapping[str, float], whole: bool) -> str:
    """Return the text for an ensemble whose file has the shared parameters, or has not."""
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
