"""A folder of results to report on, from a made-up table."""

from __future__ import annotations

import importlib
from unittest import mock

from reproduction import claims
from reproduction.grid.results import Results, write_summary
from reproduction.grid.settings import PRESETS


def make(out, *names, kind="mixed"):
    """Write the files that ``python -m reproduction`` writes for the experiments."""
    for name in names:
        module = importlib.import_module(f"tests.reproduction.figures.test_{name}")
        battery = getattr(module, f"Test{name.title()}")
        table = battery.make_table(kind, seeds=2)
        with mock.patch.object(claims, "BOOTSTRAP_SAMPLES", 5):
            write_summary(Results(out / name / "quick"), name, PRESETS["quick"], table)
    return out
