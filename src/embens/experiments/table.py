"""Tidy tables of results, and the files that are made of them.

A table has a row for each row of a cell, with the cell's swept values and what was measured. It
holds every result in the folder that was measured with the present code and setting, whichever run
made it. Results with another number of epochs, of other data or on another device are of another
setting: they stay in the folder and out of the table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from embens.experiments import contract
from embens.experiments.claims import Claim, Frame, plain
from embens.experiments.figure import draw
from embens.experiments.job import code_version
from embens.experiments.results import Record, Results
from embens.experiments.setting import Setting
from embens.files import checksum, seal, unseal, write_atomically


def tidy(results: Results, name: str, setting: Setting) -> Frame:
    """Return the table of an experiment, sorted by what is swept."""
    import pandas

    rows, swept = [], {}
    for record in records(results, name, setting):
        if "rows" in record:
            cell = {k: v for k, v in record["cell"].items() if k != "setting"}
            swept |= cell
            rows += [{**cell, **row, "seconds": record["seconds"]} for row in record["rows"]]
    table = pandas.DataFrame(rows)
    if not rows:
        return table
    order = [*swept, "epoch"] if "epoch" in table else [*swept]
    return table.sort_values(order, kind="stable", ignore_index=True)


def records(results: Results, name: str, setting: Setting) -> list[Record]:
    """Return the records of the present code with a setting of the sweep, its own cells first."""
    settings = {cell.setting for cell in contract.load(name).cells(setting)}
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
    """Write a table beside its results, its claims, its figure and where it comes from.

    Returns the claims. ``table`` is as :func:`tidy` gives it, ``seconds`` what the run took.
    """
    mine = records(results, name, setting)
    manifest = {
        "experiment": name,
        "preset": setting.preset,
        "setting": dataclasses.asdict(setting),
        "code": code_version(name),
        "commit": commit(),
        "versions": versions(),
        "machine": machine(),
        "rows": len(table),
        "cells": sum("rows" in r for r in mine),
        "failed": sum("error" in r for r in mine),
        "cell_seconds": round(sum(r["seconds"] for r in mine), 1),
        "run_seconds": seconds and round(seconds, 1),
    }
    text = table.to_csv(index=False, float_format="%.6g")
    return _write(results.folder, manifest, table, {"table.csv": text})


def redraw(folder: Path) -> list[Claim]:
    """Judge and draw a table that was written before, with the claims and figures of today.

    The table stays as it is, and so does what the manifest says of its measurement.
    """
    import pandas

    manifest = unseal("manifest.json", json.loads((folder / "manifest.json").read_bytes()))
    table = pandas.read_csv(folder / "table.csv", dtype={"gamma": str})
    return _write(folder, manifest, table, {"table.csv": (folder / "table.csv").read_text()})


def _write(
    folder: Path, manifest: dict[str, Any], table: Frame, texts: dict[str, str]
) -> list[Claim]:
    experiment = contract.load(manifest["experiment"])
    words = contract.describe(experiment.__doc__)
    claims = experiment.claims(table)
    figure = dataclasses.replace(experiment.plot(table), title=words["title"])
    texts["claims.json"] = json.dumps([claim.to_dict() for claim in claims], indent=1)
    texts["figure.json"] = json.dumps(plain(dataclasses.asdict(figure)))
    manifest |= {**words, "files": {file: checksum(text, {}) for file, text in texts.items()}}
    texts["manifest.json"] = json.dumps(seal(manifest), indent=1)
    for file, text in texts.items():
        write_atomically(folder / file, text)
    draw(figure, folder / "figure.png")
    return claims


def commit() -> str | None:
    """Return the commit of the code, marked if it was changed since; None if it is installed."""
    here = Path(__file__)

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=here.parent, capture_output=True, text=True, check=True, timeout=20
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)
        changed = git("status", "--porcelain", "..")
        return git("rev-parse", "--short=12", "HEAD") + "+changes" * bool(changed)
    except (OSError, subprocess.SubprocessError):
        return None


def versions() -> dict[str, str]:
    """Return the versions of what computes."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in ("embens", "torch", "numpy", "scikit-learn", "pandas", "ray"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def machine() -> dict[str, Any]:
    """Return what the machine is, without its name."""
    import torch

    processor = platform.processor()
    with contextlib.suppress(OSError, IndexError):
        named = Path("/proc/cpuinfo").read_text().split("model name", 1)[1]
        processor = named.partition("\n")[0].strip("\t :")
    system = f"{platform.system()} {platform.machine()}"
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found = {"system": system, "processor": processor, "cores": os.cpu_count()}
    return found | ({"gpus": gpus} if gpus else {})
