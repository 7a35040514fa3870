"""Make docs/performance.md from the stored results: `python -m benchmarks.page`.

The page has no text written by hand; a test compares it with the results.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.timing import RESULTS

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
SECTIONS = {
    "A training step": "cnn cnn-channels-last mlp small transformer transformer-autocast overhead",
    "Cheap members": "last-layer last-layer-channels-last collapse",
    "Low-rank members and pretrained networks": "low-rank adapters "
    "pretrained-embed pretrained-numbers pretrained-adapters",
    "Memory": "memory memory-steps memory-transformer",
    "Around the step": "fit imports",
    "Kernels": "theory-mlp finite-cnn finite-cnn-one finite-mlp finite-mlp-narrow finite-memory",
}
HEAD = """# Performance

Speed and memory of embens, compared with other libraries and hand-written code.

Each table names its unit, and a number is a multiple of it: *smaller is better*. All candidates
of a table and the unit were measured alternately in one run. A number is the median over rounds,
with quartiles in brackets; differences smaller than the quartiles are not significant. *Limit* is
the smallest value that arithmetic or memory allow, *target* a value that was fixed before
measuring. Below each table are the time of the unit, the number of rounds, the fraction of rounds
that other processes disturbed, the date, the commit, the machine and the versions. Results from
before 2026-11-18 were measured with version 0.2.

`make bench` repeats all measurements, `make bench ARGS=--short` with few rounds. `python -m
benchmarks.page` writes this page from the results in `benchmarks/results`.
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
    lines += [
        f"| *limit: {row['limit_reason']}* | {row['limit']:.2f} |",
        f"| *target* | {row['bar']:.2f} |",
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
