"""A folder of results to report on, from a made-up table."""

from __future__ import annotations

import importlib
from unittest import mock

from reproduction import claims
from reproduction.grid.results import Results, write_summary
from reproduction.grid.settings import PRESETS
from tests.reproduction import battery


def make(out, *names, kind="mixed"):
    """Write what ``python -m reproduction`` would have written."""
    for name in names:
        rows = importlib.import_module(f"tests.reproduction.figures.test_{name}").rows
        table = battery.table(name, rows, kind, seeds=2)
        with mock.patch.object(claims, "BOOTSTRAP_SAMPLES", 5):
            write_summary(Results(out / name / "quick"), name, PRESETS["quick"], table)
    return out
