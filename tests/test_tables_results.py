"""Published results on tables: computed again from the file of all fits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize

reports = pytest.importorskip("benchmarks.tables_report", reason="benchmarks are not in a package")
pd = pytest.importorskip("pandas")

ROOT = Path(__file__).parents[1]
BLIND = ROOT / "benchmarks" / "results" / "tables" / "blind.csv"


@pytest.fixture(scope="module")
def fits():
    return pd.read_csv(BLIND)


def test_the_published_report_is_that_of_the_published_fits(fits):
    published = BLIND.with_suffix(".md").read_text().rstrip().splitlines()
    assert published[:-2] == reports.body(fits).splitlines()  # then the machine


def test_the_guide_shows_the_results_of_the_published_fits(fits):
    text = (ROOT / "docs" / "how-to" / "tables.md").read_text()
    assert reports.headline(fits) in text
    for _, part in fits.groupby("rows"):
        assert reports.comparison(reports.average(part)) in text


def test_the_readme_quotes_the_published_fits(fits):
    text = (ROOT / "README.md").read_text()
    part = fits[fits["rows"] == 1000]
    means = reports.average(part)
    board = reports.leaderboard(reports.boards(reports.losses(means))[0])
    assert board.index[0] == reports.OURS
    assert f"first of {len(board)} methods by Elo" in text
    coverage = means.xs(reports.OURS, level="contestant")["coverage"].dropna()
    intervals = f"contain {100 * coverage.mean():.1f} % of the targets ({len(coverage)} tables)"
    assert intervals in text
    means = reports.average(fits[fits["rows"] == reports.TIMED_ROWS])
    seconds = means["fit_seconds"].unstack("contestant").groupby("table").first()
    ratios = (seconds[reports.OURS] / seconds["catboost"]).dropna()
    typical = np.exp(np.log(ratios).mean())
    assert f"{typical:.1f} × CatBoost at 5,000 rows" in text


def test_the_table_of_bars_is_that_of_the_published_fits(fits):
    text = (ROOT / "benchmarks" / "README.md").read_text()
    for rows, part in fits.groupby("rows"):
        means = reports.average(part)
        ranked = reports.with_failures(reports.losses(means), part[part["problem"].notna()])
        for bar, result, met in reports.bars(means, ranked, rows):
            assert f"| {bar} | {result} | {met} |" in text


def test_every_fit_of_ours_has_its_commit_and_no_cell_is_there_twice(fits):
    ours = fits[fits["contestant"] == reports.OURS]
    assert ours["code"].notna().all()
    assert not ours["code"].str.contains("dirty").any()
    cells = fits[["table", "contestant", "repeat", "fold", "rows"]]
    assert not cells.duplicated().any()


def test_elo_maximises_the_likelihood_of_a_bradley_terry_model():
    draw = np.random.default_rng(0)
    loss = draw.normal(size=(60, 4)) + np.array([0.0, 0.3, 0.6, 1.0])
    won = reports.wins(loss).sum(0)

    def negative_log_likelihood(ratings):
        difference = np.log(10) / 400 * (ratings[:, None] - ratings[None, :])
        total = np.log1p(np.exp(-difference)) * won
        return total[~np.eye(4, dtype=bool)].sum()

    best = minimize(negative_log_likelihood, np.zeros(4)).x
    np.testing.assert_allclose(reports.elo(won), 1000 + best - best.mean(), atol=0.5)


def test_the_leaderboard_counts_wins_and_ties():
    loss = pd.DataFrame({"embens": [1.0, 1.0, 2.0], "tabm": [2.0, 1.0, 1.0], "xgboost": [3.0] * 3})
    board = reports.leaderboard(loss, rounds=20)
    assert board.loc["embens", "winrate"] == pytest.approx((1.5 + 3) / 6)
    assert board.loc["embens", "elo"] == pytest.approx(board.loc["tabm", "elo"])
    assert board.loc["xgboost", "rank"] == 3
    assert (board["low"] <= board["elo"]).all()
    assert (board["elo"] <= board["high"]).all()


def test_a_failed_fit_loses_to_all_others():
    loss = pd.DataFrame({"embens": [1.0], "tabm": [2.0]}, index=["a"])
    failed = pd.DataFrame({"table": ["a"], "contestant": ["embens"]})
    board = reports.leaderboard(reports.with_failures(loss, failed), rounds=2)
    assert board.index[0] == "tabm"
