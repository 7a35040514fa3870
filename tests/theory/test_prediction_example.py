"""The example that predicts an ensemble before it trains one."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "predict_before_training.py"


def test_predicts_and_trains_and_draws_both(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    import matplotlib.pyplot as plt

    spec = importlib.util.spec_from_file_location("predict_before_training", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    figure = example.main(width=256, out=tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    assert len(figure.axes) == 4
    plt.close(figure)
    printed = capsys.readouterr().out
    assert "p = 0.0: independent (coupling 0)" in printed
    assert "p = 0.9: collective" in printed
    errors = [float(line.split()[2]) for line in printed.splitlines() if "% off" in line]
    assert len(errors) == 2
    assert max(errors) < 25  # per cent, at this small width
