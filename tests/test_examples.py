"""The examples run without errors and draw at least one figure."""

from __future__ import annotations

import runpy

import pytest
from pages import ROOT

EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_draws(name, tmp_path, monkeypatch):
    import matplotlib.pyplot as plt

    monkeypatch.chdir(tmp_path)
    plt.switch_backend("agg")
    try:
        runpy.run_path(str(EXAMPLES[name]), run_name="__main__")
        assert plt.get_fignums()
    finally:
        plt.close("all")
