"""A folder for one ensemble: its file, and a card that says what it is, for people and for hubs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embens.ensemble.module import EmbeddedEnsemble

FILE, CARD = "ensemble.safetensors", "README.md"
TEXT = """---
library_name: embens
tags: [ensemble, uncertainty, {family}]
{base_model}---

# {members} members in one {network}

{about}

| | |
|---|---|
| family | `{family}` |
| members | {members} |
| numbers of the members' own | {own:,} |
| parameters that they share | {common:,}, {where} |
| where members differ | {places} |
{results}
```python
import embens

reference = ...  # {reference}
ensemble = embens.load("{folder}", reference)
prediction = embens.predict(ensemble, inputs)  # .probabilities, .entropy, .mutual_information, …
```
"""


def write_card(
    ensemble: EmbeddedEnsemble,
    folder: Path,
    *,
    shared: bool,
    base: str,
    results: Mapping[str, Any],
    about: str,
) -> None:
    """Write the card of an ensemble whose file has its shared parameters, or has not."""
    plan = ensemble.plan
    network = type(ensemble.network).__name__
    laws = ", ".join(dict.fromkeys(repr(site.law) for site in plan.sites))
    ranks = ", ".join(dict.fromkeys(f"rank {s.rank}, {s.kind}" for s in plan.low_rank))
    places = [
        f"{len(plan.sites)} modulations ({laws})" if plan.sites else "",
        f"{len(plan.low_rank)} matrices of low rank ({ranks})" if plan.low_rank else "",
        f"{len(plan.own)} modules of their own" if plan.own else "",
    ]
    rows = "".join(f"| {name} | {value:.4g} |\n" for name, value in results.items())
    text = TEXT.format(
        family=plan.family,
        base_model=f"base_model: {base}\n" if base else "",
        members=ensemble.members,
        network=network,
        about=about or "An embedded ensemble: one network whose weights all members share.",
        own=sum(p.numel() for p in ensemble.individual_parameters()),
        common=sum(p.numel() for p in ensemble.shared_parameters()),
        where="in this folder" if shared else f"not here: those of {base or 'the reference'}",
        places=", ".join(filter(None, places)) or "nowhere",
        results=f"\n| result | |\n|---|---|\n{rows}" if rows else "",
        reference=f"a {network}" + ("" if shared else f" with the weights of {base or 'training'}"),
        folder=folder.name,
    )
    (folder / CARD).write_text(text)
