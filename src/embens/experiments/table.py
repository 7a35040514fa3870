"""Tidy tables of results, and the manifest that says where they come from.

A table has a row for each row of a cell, with the cell's swept values and what was measured. It
holds every result in the folder that was measured with the present code and setting, whichever run
made it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from embens.experiments.claims import Table
from embens.experiments.setting import Setting
from embens.experiments.store import Store, write_atomically
from embens.experiments.task import code_version


def tidy(store: Store, name: str, setting: Setting) -> Table:
    """Return the table of an experiment, sorted by what is swept."""
    import pandas

    wanted = json.loads(json.dumps(dataclasses.asdict(setting)))
    code, rows, swept = code_version(name), [], []
    for record in store.records.values():
        if "rows" not in record or record["code"] != code:
            continue
        cell = json.loads(json.dumps(record["cell"]))
        if not _agrees(cell.pop("setting"), wanted):
            continue
        swept = list(cell)
        rows += [{**cell, **row, "seconds": record["seconds"]} for row in record["rows"]]
    table = pandas.DataFrame(rows)
    if not rows:
        return table
    extra = [c for c in ("epoch",) if c in table]
    return table.sort_values([*swept, *extra], kind="stable", ignore_index=True)


def _agrees(setting: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether a cell belongs to a preset; experiments may choose epochs and the like themselves."""
    same = ("preset", "data", "device", "records")
    return all(setting[name] == wanted[name] for name in same)


def manifest(
    name: str, setting: Setting, table: Table, store: Store, **more: Any
) -> dict[str, Any]:
    """Return what is known of where a table comes from."""
    mine = [r for r in store.records.values() if r["code"] == code_version(name)]
    return {
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
        **more,
    }


def commit() -> str | None:
    """Return the commit of the code, marked if it was changed since; None outside a repository."""
    here = Path(__file__).parent
    try:
        found = _git(here, "rev-parse", "--short=12", "HEAD")
        return found + ("+changes" if _git(here, "status", "--porcelain", "--", "src") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    root = folder.parents[2]
    result = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=20
    )
    return result.stdout.strip()


def versions() -> dict[str, str]:
    """Return the versions of what computes."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in ("embens", "torch", "numpy", "scikit-learn", "pandas", "ray"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
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
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def write(folder: Path, table: Table, contents: dict[str, Any]) -> None:
    """Write the table as CSV, and each of the contents as JSON under its name."""
    write_atomically(folder / "table.csv", table.to_csv(index=False, float_format="%.6g"))
    for name, content in contents.items():
        write_atomically(folder / f"{name}.json", json.dumps(content, indent=1))
