"""Results on disk, and the tables, claims and figures made from them.

A measured cell is one line of JSON in an append-only file, synced to disk when written. Each line
has a checksum; lines damaged by a crash or a full disk are skipped. A table contains the results of
the present code and setting; other results stay in the folder but not in the table.
"""

import contextlib
import dataclasses
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from reproduction.canvas import draw
from reproduction.claims import Judgement, judge, to_plain
from reproduction.drawing import Figure, complete
from reproduction.grid.cells import (
    Cell,
    cells_of,
    describe,
    load_experiment,
    measured_by,
    pooled_axes,
)
from reproduction.grid.keys import code_version, key_of, setting_to_json
from reproduction.grid.published import borrowed_records, identity_of, published_records
from reproduction.grid.runs import Record
from reproduction.grid.settings import Setting
from reproduction.rows import Frame, MissingCellsError
from reproduction.storage import (
    DamagedFileError,
    checksum,
    finish_writing,
    newest,
    reading,
    seal,
    unseal,
    write_together,
)

EARLIER = "earlier"
"""Name under which tables of the first ``cpu`` preset are published."""
_NOTES = {EARLIER: "earlier preset: 1,000 images, memorised"}
"""Notes in the titles of pictures, by preset."""
_PACKAGES = ("embens", "torch", "numpy", "scikit-learn", "pandas")


class Results:
    """The results of one experiment in a folder, for one writer at a time.

    Args:
        folder: The folder; it is created if missing.

    Attributes:
        folder: The folder.
        path: The file of records.
        records: The latest record of each cell, by key.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        finish_writing(self.folder)
        self.path = self.folder / "results.jsonl"
        self.records: dict[str, Record] = {}
        for record in _read_records(self.path):
            self.records[record["key"]] = record

    def add(self, record: Record) -> None:
        """Write a record to disk.

        Args:
            record: The record of a cell, with its ``key``.

        Raises:
            OSError: If the record could not be written, for example to a full disk.
        """
        line = json.dumps(seal(record)).encode()
        with self.path.open("ab") as file:
            # The leading newline ends a line that a crash or a full disk left incomplete.
            file.write(b"\n" + line + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.records[record["key"]] = json.loads(json.dumps(record))

    def adopt(self, records: Iterable[Record]) -> None:
        """Add published records to those in memory; results of this folder come first."""
        for record in records:
            if "rows" not in self.records.get(record["key"], {}):
                self.records[record["key"]] = record

    def borrow(self, cells: Sequence[Cell]) -> None:
        """Copy results of cells that other experiments measured or published for this preset.

        Args:
            cells: The cells.
        """
        missing = {key_of(cell): cell for cell in cells}
        for key in list(missing):
            if "rows" in self.records.get(key, {}):
                del missing[key]
        preset = self.folder.name
        for folder in sorted(self.folder.parent.parent.glob(f"*/{preset}")):
            if not missing:
                return
            records = list(_read_records(folder / self.path.name))
            records += borrowed_records(folder, list(missing.values()))
            for record in records:
                if record["key"] in missing and "rows" in record:
                    del missing[record["key"]]
                    self.add(record)


def open_results(folder: Path, name: str, setting: Setting) -> Results:
    """Return the results in a folder, including those of a published table.

    Args:
        folder: Folder of the experiment and preset.
        name: Name of the experiment.
        setting: Setting of the run.

    Returns:
        The results.

    Raises:
        DamagedFileError: If the table of the folder is damaged.
    """
    results = Results(folder)
    results.adopt(published_records(folder, name, setting))
    return results


def _read_records(path: Path) -> Iterator[Record]:
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            record = unseal("line", json.loads(line))
        except (ValueError, RecursionError, AttributeError, TypeError):
            continue  # damaged: the cell is measured again
        if _is_record(record):
            yield record


def _is_record(record: Record) -> bool:
    """Return whether the entries of a record have their types."""
    rows, seconds = record.get("rows"), record.get("seconds", 0.0)
    if not isinstance(record.get("key"), str) or not isinstance(record.get("code", ""), str):
        return False
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
        return False
    cell = record.get("cell", {"setting": {}})
    if not isinstance(cell, dict) or not isinstance(cell.get("setting"), dict):
        return False
    values = [value for axis, value in cell.items() if axis != "setting"]
    if "error" in record:
        return isinstance(record["error"], str) and all(map(_is_scalar, values))
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return False
    for row in rows:
        values += row.values()
    return all(map(_is_scalar, values))


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def make_table(results: Results, name: str, setting: Setting) -> Frame:
    """Return the table of an experiment, sorted by the swept axes.

    Args:
        results: Results of the experiment.
        name: Name of the experiment.
        setting: Setting of the run.

    Returns:
        A data frame with the axes, the measured quantities and ``seconds``.

    Raises:
        DamagedFileError: If a column has numbers and texts.
    """
    import pandas

    rows = []
    axes: dict[str, None] = {}  # in order of appearance
    for record in current_records(results, name, setting):
        if "rows" not in record:
            continue
        values = {axis: value for axis, value in record["cell"].items() if axis != "setting"}
        axes.update(dict.fromkeys(values))
        for row in record["rows"]:
            rows.append({**values, **row, "seconds": record["seconds"]})
    table = pandas.DataFrame(rows)
    for column in table:
        types = {isinstance(value, str) for value in table[column].dropna()}
        if len(types) > 1:
            raise DamagedFileError(f"{results.path} has numbers and texts for {column!r}.")
    return table.sort_values(list(axes), kind="stable", ignore_index=True)


def current_records(results: Results, name: str, setting: Setting) -> list[Record]:
    """Return the records of the present code and setting, those of other modules' cells last.

    Args:
        results: Results of the experiment.
        name: Name of the experiment.
        setting: Setting of the run.

    Returns:
        The records, including failed cells.
    """
    settings = {cell.setting for cell in cells_of(name, setting, [0])}
    wanted_settings = [setting_to_json(each) for each in settings]
    records = []
    for measuring in measured_by(name):
        for record in results.records.values():
            is_complete = {"cell", "seconds"} <= record.keys()
            if is_complete and record.get("code") == code_version(measuring):
                records.append(record)
    return [record for record in records if record["cell"]["setting"] in wanted_settings]


def count_outdated(results: Results, name: str) -> int:
    """Return the number of results of other code, or of other versions of embens or torch."""
    current = {code_version(measuring) for measuring in measured_by(name)}
    return sum(record.get("code") not in current for record in results.records.values())


def write_summary(
    results: Results, name: str, setting: Setting, table: Frame, seconds: float | None = None
) -> list[Judgement]:
    """Write the table, claims, figure and manifest of an experiment.

    Args:
        results: Results of the experiment.
        name: Name of the experiment.
        setting: Setting of the run.
        table: Table of :func:`make_table`.
        seconds: Duration of the run.

    Returns:
        The judged claims.
    """
    records = current_records(results, name, setting)
    manifest = {
        "experiment": name,
        "preset": setting.preset,
        "setting": dataclasses.asdict(setting),
        "code": code_version(name),
        **identity_of(name, setting),
        **origin(),
        "rows": len(table),
        "cells": sum("rows" in record for record in records),
        "failed": sum("error" in record for record in records),
        "cell_seconds": round(sum(record["seconds"] for record in records), 1),
        "run_seconds": None if seconds is None else round(seconds, 1),
    }
    csv = table.to_csv(index=False, float_format="%.6g")
    return _write_files(results.folder, manifest, table, csv)


def read_table(folder: Path) -> Frame:
    """Return the table that was written to a folder."""
    import pandas

    return pandas.read_csv(newest(folder, "table.csv"), dtype={"gamma": str})


def redraw(folder: Path) -> list[Judgement]:
    """Judge and draw an existing table with the present claims and figures.

    Args:
        folder: Folder with ``manifest.json`` and ``table.csv``.

    Returns:
        The judged claims.
    """
    finish_writing(folder)
    with reading(folder):
        manifest = unseal("manifest.json", json.loads((folder / "manifest.json").read_bytes()))
        csv = (folder / "table.csv").read_text()
        return _write_files(folder, manifest, read_table(folder), csv)


def _write_files(folder: Path, manifest: dict[str, Any], table: Frame, csv: str) -> list[Judgement]:
    experiment = load_experiment(manifest["experiment"])
    description = describe(experiment.__doc__)
    judgements = judge(experiment.CLAIMS, table, pooled_axes(manifest["experiment"]))
    table.attrs["guessing"] = math.log(count_classes(manifest["setting"]))
    title = description["title"]
    if manifest["preset"] in _NOTES:
        title += f" ({_NOTES[manifest['preset']]})"
    figure = dataclasses.replace(make_figure(experiment, table), title=title)
    texts = {
        "table.csv": csv,
        "claims.json": json.dumps([judgement.to_dict() for judgement in judgements], indent=1),
        "figure.json": json.dumps(to_plain(dataclasses.asdict(figure))),
    }
    checksums = {file: checksum(text) for file, text in texts.items()}
    manifest = {**manifest, **description, "files": checksums}
    texts["manifest.json"] = json.dumps(seal(manifest), indent=1)
    pictures = {"figure.png": partial(draw, figure)}
    if hasattr(experiment, "summary"):
        pictures["summary.png"] = partial(draw, experiment.summary(table))
    write_together(folder, {**texts, **pictures})
    return judgements


def make_figure(experiment: ModuleType, table: Frame) -> Figure:
    """Return the figure of a table; it has no panels if an unfinished run lacks their cells."""
    try:
        return complete(experiment.plot(table))
    except MissingCellsError:
        return Figure([])


def count_classes(setting: dict[str, Any]) -> int:
    """Return the number of classes of a setting in a manifest."""
    if setting["data"] == "digits":
        return 10
    return 20 if setting["labels"] == "coarse" else 100


def origin() -> dict[str, Any]:
    """Return the commit, the versions of the packages, and the machine without its name."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        versions[package] = version(package)
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    machine = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpus": gpus,
    }
    return {"commit": commit(), "versions": versions, "machine": machine}


def _processor() -> str:
    with contextlib.suppress(OSError, IndexError):
        after_key = Path("/proc/cpuinfo").read_text().split("model name", 1)[1]
        return after_key.partition("\n")[0].strip("\t :")
    return platform.processor()


def commit() -> str | None:
    """Return the commit of the repository, marked if files changed; None outside of git."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+changes"]
    try:
        output = subprocess.check_output(
            command, cwd=root, text=True, timeout=20, stderr=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return output.strip()
