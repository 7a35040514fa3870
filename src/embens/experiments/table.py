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
from embens.experiments.claims import Claim, Frame
from embens.experiments.figure import draw
from embens.experiments.job import code_version
from embens.experiments.results import Record, Results
from embens.experiments.setting import Setting
from embens.files import checksum, seal, write_atomically


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
    experiment = contract.load(name)
    claims, figure = experiment.claims(table), experiment.plot(table)
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
        "label": experiment.LABEL,
        "title": experiment.TITLE,
        "about": experiment.ABOUT,
        "run_seconds": seconds and round(seconds, 1),
    }
    texts = {
        "table.csv": table.to_csv(index=False, float_format="%.6g"),
        "claims.json": json.dumps([claim.to_dict() for claim in claims], indent=1),
        "figure.json": json.dumps(figure.to_dict()),
    }
    manifest["files"] = {file: checksum(text, {}) for file, text in texts.items()}
    texts["manifest.json"] = json.dumps(seal(manifest), indent=1)
    for file, text in texts.items():
        write_atomically(results.folder / file, text)
    draw(figure, results.folder / "figure.png")
    return claims


def commit() -> str | None:
    """Return the commit of the code, marked if it was changed since; None if it is installed."""
    here = Path(__file__).parent
    try:
        _git(here, "ls-files", "--error-unmatch", Path(__file__).name)
        found = _git(here, "rev-parse", "--short=12", "HEAD")
        return found + ("+changes" if _git(here.parent, "status", "--porcelain", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=20
    ).stdout.strip()


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

    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
    }
    if torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return found


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
