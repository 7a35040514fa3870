"""One HTML page of all results in a folder.

The page contains the results as JSON and the charting library plotly.js, so that it works from a
file and without a network. The library and the tables are compressed; the browser unpacks a table
when it is opened.
"""

import base64
import csv
import gzip
import io
import json
import warnings
from importlib.resources import files
from pathlib import Path
from typing import Any

from reproduction.figures import NAMES
from reproduction.storage import (
    PENDING,
    DamagedFileError,
    check_distinct,
    check_output,
    checksum,
    newest,
    parse_json,
    reading,
    unseal,
    write_atomically,
)

INPUTS = ("claims.json", "figure.json", "table.csv")
"""Files of results that the manifest has checksums of."""


def collect(folder: str | Path) -> list[dict[str, Any]]:
    """Read the results of all experiments in a folder.

    Args:
        folder: A results folder.

    Returns:
        An entry for each experiment and preset, in the order of the paper: ``name``,
        ``manifest``, ``table``, ``claims`` and ``figure``.

    Raises:
        FileNotFoundError: If there are no results.
        DamagedFileError: If a result does not match its checksums.
    """
    entries = []
    for place in result_folders(Path(folder)):
        entry = _read_entry(place)
        if entry is not None:
            entries.append(entry)
    if not entries:
        raise FileNotFoundError(
            f"{folder} has no results (a manifest.json for each experiment). "
            f"Run `python -m reproduction transition --out {folder}` first."
        )
    order = {name: position for position, name in enumerate(NAMES)}

    def position(entry: dict[str, Any]) -> tuple[int, str]:
        return order.get(entry["name"], len(order)), entry["manifest"]["preset"]

    return sorted(entries, key=position)


def result_folders(folder: Path) -> list[Path]:
    """Return the folders with results inside of a folder."""
    places = set()
    for path in folder.rglob("manifest.json"):
        if path.parent.name == PENDING:
            places.add(path.parent.parent)
        else:
            places.add(path.parent)
    return sorted(places)


def result_files(folder: Path) -> list[Path]:
    """Return the files of all results inside of a folder, which no page may overwrite."""
    files = []
    for place in result_folders(folder):
        for name in (*INPUTS, "manifest.json", "results.jsonl", "figure.png"):
            files.append(newest(place, name))
    return files


def _read_entry(folder: Path) -> dict[str, Any] | None:
    path = newest(folder, "manifest.json")
    try:
        sealed = json.loads(path.read_bytes())
        name = sealed["experiment"]
    except (ValueError, KeyError, TypeError, RecursionError):
        warnings.warn(f"{path} is skipped: it is not a manifest of results.", stacklevel=3)
        return None
    texts = {}
    try:
        manifest = unseal(path.name, sealed)
        checksums = manifest.pop("files")
        for file in INPUTS:
            texts[file] = newest(folder, file).read_bytes().decode(errors="replace")
            if checksum(texts[file]) != checksums[file]:
                raise DamagedFileError(f"{file} does not match its checksum in manifest.json.")
    except (OSError, KeyError, DamagedFileError) as error:
        raise DamagedFileError(
            f"{folder}: {error} The results are damaged, of another version, or of a run that was "
            "interrupted. Run the experiment again, or move the folder away."
        ) from None
    with reading(folder):
        parse_json(json.dumps(manifest))
        if not isinstance(name, str) or not isinstance(manifest["preset"], str):
            raise ValueError("experiment and preset must be texts")
        return {
            "name": name,
            "manifest": manifest,
            "table": list(csv.reader(io.StringIO(texts["table.csv"], newline=""))),
            "claims": parse_json(texts["claims.json"]),
            "figure": parse_json(texts["figure.json"]),
        }


def render(entries: list[dict[str, Any]]) -> str:
    """Return the HTML page of entries from :func:`collect`."""
    packed = [{**entry, "table": _pack(json.dumps(entry["table"]))} for entry in entries]
    plotly = files("plotly").joinpath("package_data/plotly.min.js").read_text(encoding="utf-8")
    # "<" is escaped so that no text can end the script element.
    data = json.dumps(packed, allow_nan=False).replace("<", "\\u003c")
    text = _read_asset("page.html")
    text = text.replace("{{style}}", _read_asset("page.css"))
    text = text.replace("{{script}}", _read_asset("page.js"))
    text = text.replace("{{library}}", _pack(plotly))
    # The data come last, because they may contain any text.
    return text.replace("{{data}}", data)


def write(folder: str | Path, path: str | Path | None = None) -> Path:
    """Write the page of a results folder.

    Args:
        folder: A results folder.
        path: The page; None: ``report.html`` in the folder.

    Returns:
        The path of the page.

    Raises:
        OSError: If the page would replace a folder or a file of the results.
    """
    path = Path(folder) / "report.html" if path is None else Path(path)
    check_distinct(path, result_files(Path(folder)))
    if path.parent.exists():
        check_output(path)
    text = render(collect(folder))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)
    return path


def _read_asset(name: str) -> str:
    return files("reproduction.report").joinpath(name).read_text(encoding="utf-8")


def _pack(text: str) -> str:
    """Return a text compressed and base64-encoded."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
