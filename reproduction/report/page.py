"""Tables, figures and claims to one HTML page.

It is a template filled with JSON and the charting library itself (plotly.js, as the plotly package
ships it, licence included), so that it works from a file and without a network. The library and the
tables are compressed; a browser unpacks the library once, for all charts, and a table when it is
opened. Nothing is computed here: the page shows what ``embens reproduce`` wrote.
"""

import base64
import csv
import gzip
import io
import json
import re
import warnings
from importlib.resources import files
from pathlib import Path
from typing import Any

from reproduction.figures import NAMES
from embens.files import Refused, checksum, unseal, write_atomically


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
    path, texts = folder / "manifest.json", {}
    try:
        sealed = json.loads(path.read_bytes())
        name = sealed["experiment"]
    except (ValueError, KeyError, TypeError, RecursionError):
        warnings.warn(f"{path} is left out: it is not of `embens reproduce`", stacklevel=3)
        return None
    try:
        manifest = unseal(path.name, sealed)
        sums = manifest.pop("files")
        for file in ("claims.json", "figure.json", "table.csv"):
            texts[file] = (folder / file).read_bytes().decode(errors="replace")
            if checksum(texts[file]) != sums[file]:
                raise Refused(f"{file} has another checksum than manifest.json says")
    except (OSError, KeyError, Refused) as error:
        raise Refused(
            f"{folder}: {error}. It is damaged, of another version, or of a run that was stopped "
            "while it wrote: run `embens reproduce` again, or move the folder away."
        ) from None
    rows = list(csv.reader(io.StringIO(texts["table.csv"], newline="")))
    entry = {"name": name, "manifest": manifest, "table": rows}
    return entry | {kind: json.loads(texts[f"{kind}.json"]) for kind in ("claims", "figure")}


def render(entries: list[dict[str, Any]]) -> str:
    """Return the page of what :func:`collect` gives."""
    packed = [{**entry, "table": _pack(json.dumps(entry["table"]))} for entry in entries]
    parts = {
        "style": _text("page.css"),
        "library": _pack(_text("package_data/plotly.min.js", "plotly")),
        "data": json.dumps(packed, allow_nan=False).replace("<", "\\u003c"),
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


def _text(name: str, package: str = "reproduction.report") -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")


def _pack(text: str) -> str:
    """Return a text compressed, in letters that mean nothing to HTML."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
