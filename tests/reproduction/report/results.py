"""A folder of results to report on, from a made-up table."""

from __future__ import annotations

import importlib

from tests.reproduction import battery

from reproduction.grid.results import Results, write
from reproduction.grid.settings import PRESETS


def make(out, *names, kind="mixed"):
    """Write what ``embens reproduce`` would have written."""
    for name in names:
        rows = importlib.import_module(f"experiments.test_{name}").rows
        table = battery.table(name, rows, kind, seeds=2)
        write(Results(out / name / "quick"), name, PRESETS["quick"], table)
    return out
