"""Make docs/performance.md from the stored results: `python -m benchmarks.page`.

Nothing on that page is written by hand; a test makes it again and compares.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.timing import RESULTS

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
SECTIONS = {
    "A training step": "cnn cnn-channels-last mlp small transformer transformer-autocast overhead",
    "Cheap members": "last-layer last-layer-channels-last collapse mimo",
    "Other families, and pretrained networks": "low-rank rank1 adapters "
    "pretrained-embed pretrained-numbers pretrained-adapters",
    "Memory": "memory memory-steps memory-transformer",
    "Around the step": "fit imports",
    "Kernels": "theory-mlp finite-cnn finite-cnn-one finite-mlp finite-mlp-narrow finite-memory",
}
HEAD = """# Performance

How fast embens is, and how much memory it takes, beside other libraries and code written by hand.
A number is a multiple of the unit that its table names: *smaller is better*, 1.00 is as fast as
the unit. Contestants and unit were measured in turns within one run; a number is the median over
rounds, in brackets the quartiles. *Limit* is what arithmetic or memory allow at best, *bar* what
we had set ourselves before. Where other programs disturbed a run, its line says so: differences
smaller than the quartiles are not settled.

This page is made by `python -m benchmarks.page` from `benchmarks/results`; `make bench` measures
all of it again, `make bench ARGS=--short` with few rounds. They are meant to take an hour and ten
minutes on two quiet cores; neither has been timed as a whole yet.
"""


def table(row: dict) -> str:
    """Return one comparison as Markdown."""
    machine = row["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items() if k != "embens")
    title = row["title"][0].upper() + row["title"][1:]
    lines = [f"### {title}", "", f"| | × {row['unit']} |", "|---|---|"]
    for result in row["results"]:
        low, high = result["quartiles"] or (None, None)
        spread = "" if low is None else f" ({low:.2f}–{high:.2f})"
        name = f"**{result['name']}**" if result["ours"] else result["name"]
        lines.append(f"| {name} | {result['ratio']:.2f}{spread} |")
    about = row["reference"] or "One measurement"
    met = "met" if row["reached"] else "missed"
    lines += [
        f"| *limit: {row['limit_reason']}* | {row['limit']:.2f} |",
        f"| *bar* | {row['bar']:.2f}, {met} |",
        "",
        f"{about[0].upper()}{about[1:]}. {machine['date']}, commit "
        f"{machine.get('commit', 'not kept')}, {machine['processor']}, {machine['threads']} of "
        f"{machine['cores']} cores; {versions}.",
        "",
    ]
    return "\n".join(lines)


def page() -> str:
    """Return the whole page."""
    rows = {p.stem: json.loads(p.read_text()) for p in RESULTS.glob("*.json")}
    rows = {name: row for name, row in rows.items() if "results" in row}
    known = " ".join(SECTIONS.values()).split()
    sections = SECTIONS | {"More": " ".join(sorted(rows.keys() - set(known)))}
    parts = [HEAD]
    for title, names in sections.items():
        found = [table(rows[name]) for name in names.split() if name in rows]
        parts += [f"## {title}\n", *found] if found else []
    return "\n".join(parts)


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())
    print(f"wrote {PAGE.name}")


if __name__ == "__main__":
    main()
