"""Results on disk, and the tables and files that are made of them.

A finished cell is one line of JSON in an append-only file, written at once and synced; it has a
checksum, so that what a crash or a full disk leaves of one is skipped. A table has every result in
the folder that was measured with the present code and setting. Results with another number of
epochs, of other data or on another device stay in the folder and out of the table.
"""

import contextlib
import dataclasses
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from reproduction.grid import cells as contract
from reproduction.claims import Claim, Frame, judge, plain
from reproduction.drawing import draw
from reproduction.grid.runs import Record, code_version
from reproduction.grid.settings import Setting
from embens.files import checksum, seal, unseal, write_atomically


class Results:
    """The results of one experiment in a folder, which is made if missing; one run writes."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / "results.jsonl"
        self.records: dict[str, Record] = {r["key"]: r for r in _read(self.path)}  # the last ones

    def add(self, record: Record) -> None:
        """Write a record; it is on the disk when this returns, or an ``OSError`` is raised."""
        with self.path.open("ab") as file:
            # What a crash or a full disk left of the line before is ended first.
            file.write(b"\n" + json.dumps(seal(record)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.records[record["key"]] = json.loads(json.dumps(record))

    def borrow(self, keys: Iterable[str]) -> None:
        """Take over what other experiments in the same folder have measured of these cells."""
        missing = {key for key in keys if "rows" not in self.records.get(key, {})}
        others = self.folder.parent.parent.glob(f"*/{self.folder.name}/{self.path.name}")
        for record in (r for path in others if missing for r in _read(path)):
            if record["key"] in missing and "rows" in record:
                missing.discard(record["key"])
                self.add(record)


def _read(path: Path) -> Iterator[Record]:
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            record = unseal("the line", json.loads(line))
        except (ValueError, RecursionError, AttributeError, TypeError):
            continue
        found = isinstance(record.get("rows"), list) or isinstance(record.get("error"), str)
        if found and isinstance(record.get("key"), str):
            yield record


def tidy(results: Results, name: str, setting: Setting) -> Frame:
    """Return the table of an experiment, sorted by what is swept."""
    import pandas

    rows, swept = [], {}
    for record in records(results, name, setting):
        if "rows" in record:
            cell = {k: v for k, v in record["cell"].items() if k != "setting"}
            swept |= cell
            rows += [{**cell, **row, "seconds": record["seconds"]} for row in record["rows"]]
    return pandas.DataFrame(rows).sort_values([*swept], kind="stable", ignore_index=True)


def records(results: Results, name: str, setting: Setting) -> list[Record]:
    """Return the records of the present code with a setting of the sweep, its own cells first."""
    settings = {cell.setting for cell in contract.cells(name, setting, [0])}
    wanted = [json.loads(json.dumps(dataclasses.asdict(one))) for one in settings]
    found = [
        record
        for record in results.records.values()
        if record.get("code") in _codes(name)
        and {"cell", "seconds"} <= record.keys()
        and record["cell"]["setting"] in wanted
    ]
    return sorted(found, key=lambda record: record["code"] != code_version(name))


def count_others(results: Results, name: str) -> int:
    """Return how many results are of other code, or of another version of embens or torch."""
    return sum(r.get("code") not in _codes(name) for r in results.records.values())


def _codes(name: str) -> set[str]:
    return {code_version(name), code_version("fair")}


def write(
    results: Results, name: str, setting: Setting, table: Frame, seconds: float | None = None
) -> list[Claim]:
    """Write a table of :func:`tidy`, its claims, figure and origin; return the claims."""
    mine = records(results, name, setting)
    manifest = {
        "experiment": name,
        "preset": setting.preset,
        "setting": dataclasses.asdict(setting),
        "code": code_version(name),
        **origin(),
        "rows": len(table),
        "cells": sum("rows" in r for r in mine),
        "failed": sum("error" in r for r in mine),
        "cell_seconds": round(sum(r["seconds"] for r in mine), 1),
        "run_seconds": seconds and round(seconds, 1),
    }
    text = table.to_csv(index=False, float_format="%.6g")
    return _write(results.folder, manifest, table, {"table.csv": text})


def redraw(folder: Path) -> list[Claim]:
    """Judge and draw a table that was written before, with the claims and figures of today."""
    import pandas

    manifest = unseal("manifest.json", json.loads((folder / "manifest.json").read_bytes()))
    table = pandas.read_csv(folder / "table.csv", dtype={"gamma": str})
    return _write(folder, manifest, table, {"table.csv": (folder / "table.csv").read_text()})


def _write(folder: Path, manifest: dict, table: Frame, texts: dict[str, str]) -> list[Claim]:
    experiment = contract.load(manifest["experiment"])
    words = contract.describe(experiment.__doc__)
    claims = judge(experiment.CLAIMS, table)
    figure = dataclasses.replace(experiment.plot(table), title=words["title"])
    texts["claims.json"] = json.dumps([claim.to_dict() for claim in claims], indent=1)
    texts["figure.json"] = json.dumps(plain(dataclasses.asdict(figure)))
    manifest |= {**words, "files": {file: checksum(text) for file, text in texts.items()}}
    texts["manifest.json"] = json.dumps(seal(manifest), indent=1)
    for file, text in texts.items():
        write_atomically(folder / file, text)
    draw(figure, folder / "figure.png")
    return claims


def origin() -> dict[str, Any]:
    """Return the commit, the versions of what computes, and the machine, without its name."""
    packages = ("embens", "torch", "numpy", "scikit-learn", "pandas")
    processor = platform.processor()
    with contextlib.suppress(OSError, IndexError):
        named = Path("/proc/cpuinfo").read_text().split("model name", 1)[1]
        processor = named.partition("\n")[0].strip("\t :")
    machine = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor,
        "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }
    versions = {"python": platform.python_version(), **{name: version(name) for name in packages}}
    return {"commit": commit(), "versions": versions, "machine": machine}


def commit() -> str | None:
    """Return the commit of the code, marked if it was changed since; None if it is installed."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+changes"]
    try:
        options = {"cwd": root, "text": True, "timeout": 20, "stderr": subprocess.DEVNULL}
        return subprocess.check_output(command, **options).strip()
    except (OSError, subprocess.SubprocessError):
        return None
