"""Write claims.md: judge and draw the tables in this folder, and list their claims.

Run from the repository root: ``python -m docs.reproduction.claims``
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from reproduction.grid.cells import cells_of
from reproduction.grid.results import redraw
from reproduction.grid.settings import PRESETS, Setting
from reproduction.report.page import collect
from reproduction.storage import write_atomically

FOLDER = Path(__file__).parent
VERDICTS = ("holds", "does not hold", "undecided")
HEAD = """# Claims of the paper, as measured

Written by `claims.py`; do not edit by hand.

The table counts the claims of each experiment by verdict. `earlier` is the first version of the
preset `cpu`: 1,000 images that the networks memorise. It is weak evidence. `n of m cells` is a run
that has not measured the whole sweep: claims without their cells are undecided.
"""


def markdown(entries: list[dict[str, Any]]) -> str:
    """Return the page of entries from :func:`reproduction.report.page.collect`."""
    lines = [HEAD, table_row("experiment", *VERDICTS, "cells", "seeds", "core minutes")]
    lines.append(table_row("-", *["-:"] * (len(VERDICTS) + 3)))
    for entry in entries:
        lines.append(summary_row(entry))
    for entry in entries:
        lines += section(entry)
    return "\n".join([*lines, ""])


def title_of(entry: dict[str, Any]) -> str:
    return f"{entry['name']} {entry['manifest']['preset']}"


def summary_row(entry: dict[str, Any]) -> str:
    manifest, claims, title = entry["manifest"], entry["claims"], title_of(entry)
    link = f"[{title}](#{title.replace(' ', '-')})"
    verdicts = [claim["verdict"] for claim in claims]
    counts = [verdicts.count(verdict) for verdict in VERDICTS]
    seeds = max((claim["seeds"] for claim in claims), default=0)
    minutes = round(manifest["cell_seconds"] / 60)
    return table_row(link, *counts, manifest["cells"], seeds, minutes)


def section(entry: dict[str, Any]) -> list[str]:
    manifest, title = entry["manifest"], title_of(entry)
    picture = f"./{title.replace(' ', '/')}/figure.png"
    lines = ["", f"## {title}", "", manifest["about"], "", run_text(entry), ""]
    lines += [f"![{manifest['title']}]({picture})", ""]
    lines.append(table_row("verdict", "statement", "measured", "true if", "the paper"))
    lines.append(table_row("-", "-", "-", "-", "-"))
    for claim in entry["claims"]:
        verdict = f"**{claim['verdict']}**"
        measured = f"{claim['measure']}: {value_text(claim)}"
        row = table_row(verdict, claim["statement"], measured, claim["region"], claim["paper"])
        lines.append(row)
    return lines


def run_text(entry: dict[str, Any]) -> str:
    """Return which cells were measured: the values of all axes, the seeds, and the processor."""
    header, *rows = entry["table"]
    texts = []
    for axis in axes_of(entry):
        found = {row[header.index(axis)] for row in rows} - {""}
        if axis == "seed":
            texts.append(seeds_text(found))
        else:
            texts.append(f"{axis} {', '.join(sorted(found, key=by_number))}")
    processor = entry["manifest"]["machine"]["processor"]
    return f"Measured ({count_text(entry)}): {'; '.join(texts)}. Last processor: {processor}."


def seeds_text(found: set[str]) -> str:
    """Return seeds as a range if they are consecutive."""
    seeds = sorted(int(seed) for seed in found)
    if len(seeds) > 1 and seeds[-1] - seeds[0] == len(seeds) - 1:
        return f"seeds {seeds[0]}–{seeds[-1]}"
    return f"seeds {', '.join(map(str, seeds))}"


def axes_of(entry: dict[str, Any]) -> list[str]:
    """Return the swept axes that are columns of the table, with the seed."""
    axes: dict[str, None] = {}
    for cell in cells_of(entry["name"], Setting(), [0]):
        axes.update(dict.fromkeys(cell.values))
    return [axis for axis in axes if axis in entry["table"][0]]


def by_number(value: str) -> tuple[float, str]:
    """Return a key that sorts numbers by their values, before other texts."""
    try:
        return float(value), ""
    except ValueError:
        return math.inf, value


def count_text(entry: dict[str, Any]) -> str:
    """Return the number of measured cells, and that of the whole sweep if it is larger."""
    manifest = entry["manifest"]
    cells, preset = manifest["cells"], manifest["preset"]
    if preset not in PRESETS:
        return f"{cells} cells"
    planned = len(cells_of(entry["name"], PRESETS[preset]))
    return f"{cells} of {planned} cells" if cells < planned else f"{cells} cells"


def value_text(claim: dict[str, Any]) -> str:
    if claim["note"]:
        return claim["note"]
    numbers = []
    for name in ("value", "low", "high"):
        number = claim[name]
        numbers.append("?" if number is None else f"{number:.3g}")
    value, low, high = numbers
    return f"{value} [{low}, {high}]"


def table_row(*cells: object) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    for manifest in sorted(FOLDER.rglob("manifest.json")):
        redraw(manifest.parent)
    write_atomically(FOLDER / "claims.md", markdown(collect(FOLDER)))
