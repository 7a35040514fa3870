"""Tests of ``python -m reproduction demo`` at a small size."""

import numpy as np
import pytest

from reproduction import __main__ as command_line
from reproduction import demo


@pytest.fixture
def small(monkeypatch):
    """Make both parts small, with intervals of known coverage."""
    monkeypatch.setattr(demo, "SPLITS", 2)
    monkeypatch.setattr(demo, "SEEDS", (0,))
    monkeypatch.setattr(demo, "MEANS", (0.0, 1.0))
    monkeypatch.setattr(demo, "MEMBERS", 3)
    monkeypatch.setattr(demo, "EPOCHS", 3)

    def fit_wide(x, y, x_test, seed):
        prediction = np.full(len(x_test), y.mean())
        return prediction, prediction - 1e6, prediction + 1e6

    monkeypatch.setattr(demo, "fit_ensemble", fit_wide)


def test_the_demo_writes_one_page_with_two_pictures(small, tmp_path, capsys):
    assert command_line.main(["demo", "--out", str(tmp_path / "results")]) == 0
    page = (tmp_path / "results" / "demo.html").read_text()
    assert page.count("<img ") == 2
    assert "docs/tutorial.md" in page
    assert "<td>embens, 16 members</td><td>100 %</td>" in page
    printed = capsys.readouterr().out
    assert "gradient boosting" in printed
    assert "demo.html" in printed


def test_members_with_mean_one_are_one_model(small):
    independent, collective = demo.measure_regimes()
    assert collective.member_loss == pytest.approx(collective.ensemble_loss, rel=1e-4)
    assert independent.ensemble_loss < independent.member_loss


def test_coverage_is_the_fraction_of_rows_inside(small, monkeypatch):
    def fit_half(x, y, x_test, seed):
        prediction = np.full(len(x_test), np.median(y))
        return prediction, prediction - 1e6, prediction

    monkeypatch.setattr(demo, "fit_ensemble", fit_half)
    (ours, *_) = demo.measure_intervals()
    assert ours.coverage == pytest.approx([0.5, 0.5], abs=0.1)
