"""Tidy tables of results, and the manifest that says where they come from.

A table has a row for each row of a cell, with the cell's swept values and what was measured. It
holds every result in the folder that was measured with the present code and setting, whichever run
made it. Results with another number of epochs, of other data or on another device are of another
setting: they stay in the folder and out of the table.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from embens.experiments import contract
from embens.experiments.claims import Table
from embens.experiments.setting import Setting
from embens.experiments.store import Record, Store
from embens.experiments.task import code_version
from embens.files import write_atomically


def tidy(store: Store, name: str, setting: Setting) -> Table:
    """Return the table of an experiment, sorted by what is swept."""
    import pandas

    rows, swept = [], []
    for record in records(store, name, setting):
        if "rows" in record:
            cell = {k: v for k, v in record["cell"].items() if k != "setting"}
            swept = list(cell)
            rows += [{**cell, **row, "seconds": record["seconds"]} for row in record["rows"]]
    table = pandas.DataFrame(rows)
    if not rows:
        return table
    extra = [c for c in ("epoch",) if c in table]
    return table.sort_values([*swept, *extra], kind="stable", ignore_index=True)


def records(store: Store, name: str, setting: Setting) -> list[Record]:
    """Return the records of the present code whose setting is one that the sweep has.

    An experiment may give its cells other settings than the preset's; those are asked for, so that
    nothing else (a trial with fewer epochs, say) can slip in.
    """
    settings = {cell.setting for cell in contract.load(name).cells(setting)}
    wanted = {_text(dataclasses.asdict(one)) for one in settings}
    code = code_version(name)
    return [
        record
        for record in store.records.values()
        if record.get("code") == code
        and {"cell", "seconds"} <= record.keys()
        and _text(record["cell"]["setting"]) in wanted
    ]


def _text(setting: dict[str, Any]) -> str:
    return json.dumps(setting, sort_keys=True)


def manifest(
    name: str, setting: Setting, table: Table, store: Store, **more: Any
) -> dict[str, Any]:
    """Return what is known of where a table comes from."""
    mine = records(store, name, setting)
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
    """Return the commit of the code, marked if it was changed since; None outside a repository.

    A repository in which the library is merely installed does not count.
    """
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
