"""The claims of a results folder as a Markdown page, for a repository.

Like the HTML page it computes nothing: verdicts and numbers are those that ``embens reproduce``
wrote, pictures are linked where they lie.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

from embens.experiments.results import folder_of
from embens.files import write_atomically
from embens.report.page import collect

_SQUARES = {"holds": "🟩", "does not hold": "🟥", "undecided": "🟨"}


def text(folder: str | Path, beside: str | Path) -> str:
    """Return the page of a results folder, to lie in the folder ``beside``."""
    entries = collect(folder)
    lines = [
        "# Claims of the paper, as measured",
        "",
        "Written by `embens report`; not edited by hand.",
        "",
        "One square for each claim: 🟩 holds, 🟥 does not hold, 🟨 undecided.",
        "",
        "| experiment | preset | claims | hold | do not | open | cells | seeds | core minutes |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_summary(entry) for entry in entries),
    ]
    for entry in entries:
        picture = folder_of(folder, entry["name"], entry["manifest"]["preset"]) / "figure.png"
        address = Path(os.path.relpath(picture, beside)).as_posix() if picture.exists() else None
        lines += ["", *_section(entry, address)]
    return "\n".join(lines) + "\n"


def _summary(entry: dict[str, Any]) -> str:
    count = Counter(claim["verdict"] for claim in entry["claims"])
    name, manifest = entry["name"], entry["manifest"]
    seeds = max((claim["seeds"] for claim in entry["claims"]), default=0)
    cells = [
        f"[{name}](#{name}-{manifest['preset']})", manifest["preset"],
        "".join(_SQUARES[claim["verdict"]] for claim in entry["claims"]),
        *(count[verdict] for verdict in _SQUARES), manifest["cells"], seeds,
        round(manifest["cell_seconds"] / 60),
    ]  # fmt: skip
    return _row(cells)


def _section(entry: dict[str, Any], picture: str | None) -> list[str]:
    manifest = entry["manifest"]
    lines = [f"## {entry['name']} {manifest['preset']}", "", manifest["about"], ""]
    if picture is not None:
        lines += [f"![{manifest['title']}]({picture})", ""]
    lines += ["| verdict | statement | measured | true if | the paper |", "|---|---|---|---|---|"]
    lines += [
        _row([f"**{c['verdict']}**", c["statement"], _number(c), c["region"], c["paper"]])
        for c in entry["claims"]
    ]
    return lines


def _number(claim: dict[str, Any]) -> str:
    if claim.get("note") or claim["value"] is None:
        return f"{claim['measure']}: {claim.get('note') or 'not computed'}"
    low, high = (("?" if v is None else f"{v:.3g}") for v in (claim["low"], claim["high"]))
    return f"{claim['measure']}: {claim['value']:.3g} [{low}, {high}]"


def _row(cells: list[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def write(folder: str | Path, path: str | Path) -> Path:
    """Write the page of a results folder; return where it is."""
    path = Path(path)
    page = text(folder, path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page)
    return path
