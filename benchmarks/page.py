"""Write docs/performance.md from the stored results: ``python -m benchmarks.page``.

A test compares the page with the results, so it is never edited by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.rows import RESULTS
from embens.files import write_atomically

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
CODE_WORDS = ("torch.compile", "predict_proba", "nll")
"""Names of functions at the beginning of titles."""
HEAD = """# Performance

Speed and memory of embens, compared with other libraries and with code written by hand. All values
are ratios: *smaller is better*. For example, 1.05 relative to *8 × reference* means that a training
step of eight members takes 1.05 times as long as eight steps of the plain network. A training step
is forward, loss and backward.

The reference and the contestants alternate within one run. A value is the median over rounds, with
quartiles in brackets; differences smaller than the quartiles are not significant. Rounds in which
other processes used the processor are counted as *disturbed*. The *limit* counts arithmetic or
memory alone. Small networks spend most of their time on calls, which members share, so that they
can be faster than the limit. `make bench` measures all rows, `make bench ARGS=--bars` those with a
bar for releases, and `ARGS=--short` takes few rounds.
"""
COMPILED = """`torch.compile` makes one program of the folded graph. It joins modulations,
activations and their gradients, so that the values of a layer are read and written fewer times, and
saves the calls between operations. The products of matrices stay the same. A compiled training step
takes {fastest:.2f} to {slowest:.2f} of the time of the eager one.
"""
"""What compilation changes; the values are those of the rows that compare with the eager step."""


def main() -> None:
    """Write the page."""
    write_atomically(PAGE, page())
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
            parts.append(f"## {title}\n")
            if title == "torch.compile":
                parts.append(compiled(rows))
            parts += tables
    parts.append(machines(rows))
    return "\n".join(parts)


def compiled(rows: dict[str, dict[str, Any]]) -> str:
    """Return what `torch.compile` gains over the eager step; "" without results."""
    ratios = []
    for name in SECTIONS["torch.compile"]:
        if name.endswith("-eager") and name in rows:
            ratios.append(rows[name]["results"][0]["ratio"])
    if not ratios:
        return ""
    return COMPILED.format(fastest=min(ratios), slowest=max(ratios))


def summary(rows: dict[str, dict[str, Any]]) -> str:
    """Return a table of the main rows: embens, and the fastest of the others."""
    lines = [
        "## In short",
        "",
        "| work | embens | fastest of the others | relative to |",
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
        lines.append(f"| {title_of(row)} | **{ours['ratio']:.2f}** | {fastest} | {row['unit']} |")
    return "\n".join([*lines, ""])


def table(row: dict[str, Any]) -> str:
    """Return one row of the benchmark as a Markdown table, with a line about its run."""
    unit = row["unit"] if row["unit"] == "GiB" else f"relative to {row['unit']}"
    lines = [f"| {title_of(row)} | {unit} |", "|---|---|"]
    for result in row["results"]:
        lines.append(table_line(result))
    if row["limit"] and row["limit_reason"]:
        lines.append(f"| *limit: {row['limit_reason']}* | {row['limit']:.2f} |")
    run = capitalise(row["reference"] or "one measurement")
    machine = row["machine"]
    lines += ["", f"{run}. {machine['threads']} of {machine['cores']} cores.", ""]
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


def machines(rows: dict[str, dict[str, Any]]) -> str:
    """Return a table of dates, commits, processors and versions."""
    runs: dict[tuple[str, ...], int] = {}
    for row in rows.values():
        machine = row["machine"]
        versions = []
        for package, version in machine["versions"].items():
            if package != "embens":
                versions.append(f"{package} {version}")
        commit = machine.get("commit", "unknown")
        run = (machine["date"], commit, machine["processor"], ", ".join(versions))
        runs[run] = runs.get(run, 0) + 1
    lines = [
        "## Machines and versions",
        "",
        "A plus sign marks a commit with local changes. `benchmarks/results` has the details of",
        "every table. This page is generated from it by `python -m benchmarks.page`.",
        "",
        "| date | commit | processor | versions | tables |",
        "|---|---|---|---|---|",
    ]
    for run, count in sorted(runs.items(), reverse=True):
        lines.append(f"| {' | '.join(run)} | {count} |")
    return "\n".join([*lines, ""])


def title_of(row: dict[str, Any]) -> str:
    """Return the title of a row, with a function at its beginning as code."""
    title = row["title"]
    for word in CODE_WORDS:
        if title.startswith(word):
            return f"`{word}`{title[len(word) :]}"
    return capitalise(title)


def capitalise(text: str) -> str:
    """Return a text with a capital first letter."""
    return text[0].upper() + text[1:]


if __name__ == "__main__":
    main()
