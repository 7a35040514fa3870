"""Write claims.md: judge and draw the tables in this folder anew, and list their claims.

python docs/reproduction/claims.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reproduction.grid.results import redraw
from embens.files import write_atomically
from reproduction.report.page import collect

FOLDER = Path(__file__).parent
_SQUARES = {"holds": "🟩", "does not hold": "🟥", "undecided": "🟨"}
_COLUMNS = ("verdict", "statement", "measured", "true if", "the paper")


def markdown(entries: list[dict[str, Any]]) -> str:
    """Return the page of what :func:`reproduction.report.page.collect` gives of this folder."""
    summary, sections = [], []
    for entry in entries:
        manifest, claims = entry["manifest"], entry["claims"]
        name = f"{entry['name']} {manifest['preset']}"
        squares = "".join(_SQUARES[claim["verdict"]] for claim in claims)
        seeds = max((claim["seeds"] for claim in claims), default=0)
        cells, minutes = manifest["cells"], round(manifest["cell_seconds"] / 60)
        link = f"[{name}](#{name.replace(' ', '-')})"
        summary.append(_row(link, squares, cells, seeds, minutes))
        picture = f"./{name.replace(' ', '/')}/figure.png"
        sections += ["", f"## {name}", "", manifest["about"], ""]
        sections += [f"![{manifest['title']}]({picture})", ""]
        sections += [_row(*_COLUMNS), _row(*"-----")]
        for c in claims:
            ends = ["?" if c[k] is None else f"{c[k]:.3g}" for k in ("value", "low", "high")]
            measured = f"{c['measure']}: {c['note'] or '{} [{}, {}]'.format(*ends)}"
            cells = (f"**{c['verdict']}**", c["statement"], measured, c["region"], c["paper"])
            sections.append(_row(*cells))
    head = [
        "# Claims of the paper, as measured\n\nWritten by `claims.py`; not edited by hand.",
        "\nOne square for each claim: 🟩 holds, 🟥 does not hold, 🟨 undecided.\n",
        _row("experiment", "claims", "cells", "seeds", "core minutes"),
        _row(*"-----"),
    ]
    return "\n".join([*head, *summary, *sections, ""])


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    for manifest in sorted(FOLDER.rglob("manifest.json")):
        redraw(manifest.parent)
    write_atomically(FOLDER / "claims.md", markdown(collect(FOLDER)))
