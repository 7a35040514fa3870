"""A folder of results to report on, from a made-up table."""

from __future__ import annotations

import importlib

from experiments import battery

from embens.experiments.results import Results, folder_of, write
from embens.experiments.setting import PRESETS


def make(out, *names, kind="mixed"):
    """Write what ``embens reproduce`` would have written."""
    for name in names:
        rows = importlib.import_module(f"experiments.test_{name}").rows
        table = battery.table(name, rows, kind, seeds=2)
        write(Results(folder_of(out, name, "quick")), name, PRESETS["quick"], table)
    return out
