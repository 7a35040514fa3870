"""Write docs/performance.md from the stored results: ``python -m benchmarks.page``.

A test compares the page with the results, so it is never edited by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.rows import RESULTS

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
SECTIONS = {
    "Training steps": [
        "cnn",
        "cnn-channels-last",
        "mlp",
        "small",
        "transformer",
        "transformer-autocast",
        "overhead",
    ],
    "torch.compile": [
        "compile-small",
        "compile-small-eager",
        "compile-mlp",
        "compile-mlp-eager",
        "compile-transformer",
        "compile-transformer-eager",
    ],
    "Last-layer dropout": ["last-layer", "last-layer-channels-last", "collapse"],
    "Other families and pretrained networks": [
        "masks",
        "low-rank",
        "adapters",
        "pretrained-embed",
        "pretrained-parameters",
        "pretrained-adapters",
    ],
    "Memory": ["memory-chunks", "memory"],
    "fit, predict and import": ["fit-mlp", "fit-cnn", "predict", "imports"],
    "Kernels": [
        "theory-mlp",
        "theory-cnn",
        "theory-memory",
        "finite-cnn",
        "finite-cnn-one",
        "finite-mlp",
        "finite-mlp-narrow",
        "finite-memory",
    ],
}
SUMMARY = (
    "cnn",
    "mlp",
    "small",
    "transformer",
    "overhead",
    "last-layer",
    "memory-chunks",
    "fit-mlp",
    "fit-cnn",
    "predict",
    "imports",
    "theory-mlp",
    "finite-cnn",
)
HEAD = """# Performance

Speed and memory of embens, compared with other libraries and with code written by hand. Every
number is a multiple of the unit of its table: *smaller is better*, and 1.00 equals the unit. The
unit and the contestants alternate within one run. A number is the median over rounds, with
quartiles in brackets. The *limit* is the best value that arithmetic or memory allow. Differences
smaller than the quartiles are not significant.

`make bench` measures all rows, `make bench ARGS=--short` with few rounds. This page is generated
from `benchmarks/results` by `python -m benchmarks.page`.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())
    print(f"wrote {PAGE.name}")


def page() -> str:
    """Return the whole page."""
    rows = {}
    for path in RESULTS.glob("*.json"):
        row = json.loads(path.read_text())
        if "results" in row:
            rows[path.stem] = row
    parts = [HEAD, summary(rows)]
    for title, names in SECTIONS.items():
        tables = [table(rows[name]) for name in names if name in rows]
        if tables:
            parts += [f"## {title}\n", *tables]
    return "\n".join(parts)


def summary(rows: dict[str, dict[str, Any]]) -> str:
    """Return a table of the main rows: embens, and the fastest of the others."""
    lines = [
        "## In short",
        "",
        "| work | unit | embens | fastest of the others |",
        "|---|---|---|---|",
    ]
    for name in SUMMARY:
        if name not in rows:
            continue
        row = rows[name]
        ours = next(result for result in row["results"] if result["ours"])
        others = [result for result in row["results"] if not result["ours"]]
        fastest = "–"
        if others:
            best = min(others, key=lambda result: result["ratio"])
            fastest = f"{best['ratio']:.2f} ({best['name']})"
        title = capitalise(row["title"])
        lines.append(f"| {title} | {row['unit']} | **{ours['ratio']:.2f}** | {fastest} |")
    return "\n".join([*lines, ""])


def table(row: dict[str, Any]) -> str:
    """Return one row of the benchmark as a Markdown table."""
    lines = [f"### {capitalise(row['title'])}", ""]
    lines += [f"| | × {row['unit']} |", "|---|---|"]
    for result in row["results"]:
        lines.append(table_line(result))
    if row["limit"] and row["limit_reason"]:
        lines.append(f"| *limit: {row['limit_reason']}* | {row['limit']:.2f} |")
    lines += ["", describe_run(row), ""]
    return "\n".join(lines)


def table_line(result: dict[str, Any]) -> str:
    """Return the line of one contestant."""
    name = result["name"]
    if result["ours"]:
        name = f"**{name}**"
    ratio = f"{result['ratio']:.2f}"
    if result["quartiles"] is not None:
        low, high = result["quartiles"]
        ratio += f" ({low:.2f}–{high:.2f})"
    return f"| {name} | {ratio} |"


def describe_run(row: dict[str, Any]) -> str:
    """Return a sentence on the unit and one on the machine."""
    machine = row["machine"]
    versions = []
    for package, version in machine["versions"].items():
        if package != "embens":
            versions.append(f"{package} {version}")
    unit = capitalise(row["reference"] or "one measurement")
    commit = machine.get("commit", "unknown")
    return (
        f"{unit}. {machine['date']}, commit {commit}, {machine['processor']}, "
        f"{machine['threads']} of {machine['cores']} cores; {', '.join(versions)}."
    )


def capitalise(text: str) -> str:
    """Return a text with a capital first letter."""
    return text[0].upper() + text[1:]


if __name__ == "__main__":
    main()
