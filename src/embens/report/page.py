"""Tables, figures and claims to one HTML page.

The page is a template filled with one JSON document and the charting library itself (plotly.js, as
the plotly package ships it, licence included), so that it works from a file and without a network.
Nothing is computed here: the page shows what ``embens reproduce`` wrote.
"""

from __future__ import annotations

import base64
import csv
import html
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from embens.experiments import NAMES
from embens.files import write_atomically

_MANIFEST = frozenset("about cell_seconds cells label preset setting title versions".split())


def collect(folder: str | Path) -> list[dict[str, Any]]:
    """Return what the folder has of each experiment, in the order of the paper."""
    paths = sorted(Path(folder).rglob("manifest.json"))
    found = [entry for path in paths if (entry := _read(path.parent)) is not None]
    if not found:
        raise FileNotFoundError(
            f"{folder}: expected results of `embens reproduce` (a manifest.json in a folder of "
            "each experiment); got none. Run `embens reproduce transition --out "
            f"{folder}` first."
        )
    order = {name: k for k, name in enumerate(NAMES)}
    return sorted(found, key=lambda e: (order.get(e["name"], len(order)), e["manifest"]["preset"]))


def _read(folder: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        entry = {
            "name": manifest["experiment"],
            "manifest": manifest,
            "claims": json.loads((folder / "claims.json").read_text()),
            "figure": json.loads((folder / "figure.json").read_text()),
        }
        with (folder / "table.csv").open(newline="") as file:
            columns, *rows = csv.reader(file)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # a run that has not come to its first table, or a manifest of something else
    if missing := _MANIFEST - manifest.keys():
        raise ValueError(
            f"{folder / 'manifest.json'} has no {', '.join(sorted(missing))}: it is damaged, or of "
            "another version. Run `embens reproduce` again, or move the folder away."
        )
    entry["table"] = {"columns": columns, "rows": rows}
    picture = folder / "figure.png"
    if picture.exists():
        encoded = base64.b64encode(picture.read_bytes()).decode()
        entry["picture"] = f"data:image/png;base64,{encoded}"
    return entry


def render(entries: list[dict[str, Any]], title: str = "Embedded ensembles: reproduction") -> str:
    """Return the page of what :func:`collect` gives."""
    parts = {
        "title": html.escape(title),
        "style": _text("page.css"),
        "library": _library(),
        "data": json.dumps(entries, allow_nan=False).replace("<", "\\u003c"),
        "script": _text("page.js"),
    }
    pieces = re.split(r"\{\{(\w+)\}\}", _text("page.html"))  # text, name, text, name, …, text
    return "".join(parts[piece] if k % 2 else piece for k, piece in enumerate(pieces))


def write(folder: str | Path, path: str | Path | None = None) -> Path:
    """Write the page of a folder, by default into it; return where it is."""
    path = Path(folder) / "report.html" if path is None else Path(path)
    page = render(collect(folder))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page)
    return path


def _text(name: str, package: str = "embens.report") -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")


def _library() -> str:
    return _text("package_data/plotly.min.js", "plotly").replace("</script", "<\\/script")
