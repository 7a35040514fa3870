"""The benchmark on tables: its splits, scores and file of results, on tiny data, without peers."""

from __future__ import annotations

import numpy as np
import pytest

tables = pytest.importorskip("benchmarks.tables", reason="benchmarks are not part of a package")
pd = pytest.importorskip("pandas")
contestants = pytest.importorskip("benchmarks.tables_contestants")
tables_data = pytest.importorskip("benchmarks.tables_data")
reports = pytest.importorskip("benchmarks.tables_report")


def toy(name: str):
    """A table with a number, text, a date and gaps; its target is classes or a number."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=150)
    when = pd.Timestamp(2020, 1, 1) + pd.to_timedelta(draw.integers(0, 900, 150), unit="D")
    frame = pd.DataFrame({"x": x, "when": when, "text": draw.choice(["a", "b", "c"], 150)})
    frame["text"] = frame["text"].astype(object)
    frame.loc[:9, "x"] = np.nan
    if name == "number":
        return frame, 3 * np.nan_to_num(x) + draw.normal(size=150)
    return frame, np.where(np.nan_to_num(x) > 0, "yes", "no").astype(object)


def test_no_table_is_both_blind_and_for_development():
    assert not set(tables_data.BLIND) & set(tables_data.DEVELOPMENT)
    assert len(tables_data.TABLES) >= 20
    assert len(tables_data.BLIND) >= len(tables_data.TABLES) / 2


@pytest.mark.parametrize("kind", ["classes", "number"])
def test_splits_share_no_rows_and_folds_cover_all(kind):
    y = toy(kind)[1]
    tested = []
    for fold in range(tables.FOLDS):
        fit, held, test = tables.split(y, 0, fold, 10**6)
        assert not set(fit) & set(test)
        assert len(fit) + len(test) == len(y)
        assert held.sum() == len(fit) // 5
        tested += list(test)
    assert sorted(tested) == list(range(len(y)))
    assert (tables.split(y, 1, 0, 40)[0] == tables.split(y, 1, 0, 40)[0]).all()
    assert len(tables.split(y, 1, 0, 40)[0]) == 40


def test_crps_of_a_sample_is_its_definition():
    draw = np.random.default_rng(0)
    sample, values = draw.normal(size=30), draw.normal(size=7)
    within = np.abs(sample[:, None] - sample).mean()
    wanted = np.abs(values[:, None] - sample).mean(1) - within / 2
    np.testing.assert_allclose(contestants.crps_of_sample(values, sample), wanted)


def test_crps_of_a_normal_is_that_of_many_draws():
    sample = 1 + 2 * np.random.default_rng(0).normal(size=200_000)
    values = np.array([-3.0, 0.5, 4.0])
    exact = contestants.crps_of_normal(values, 1.0, 2.0)
    np.testing.assert_allclose(contestants.crps_of_sample(values, sample), exact, atol=0.02)


def test_an_interval_by_errors_covers_what_it_says():
    draw = np.random.default_rng(0)
    said = contestants.by_errors(np.zeros(20_000), draw.normal(size=2000))
    truth = draw.normal(size=20_000)
    assert abs(np.mean((said.low <= truth) & (truth <= said.high)) - 0.9) < 0.02


def test_columns_are_learnt_from_the_fitted_rows_alone():
    frame = toy("number")[0]
    new = frame.head(2).assign(text=["z", "a"], x=[np.nan, 1.0])
    columns = contestants.Columns(frame, impute=True)
    found = columns(new)
    assert list(found["text"]) == ["(missing)", "a"]
    assert found["x"].tolist() == [frame["x"].median(), 1.0]
    assert found["x is missing"].tolist() == [1.0, 0.0]
    assert {"when.year", "when.day_of_week"} <= set(found)
    assert np.isnan(contestants.Columns(frame).codes(new)["text"].iloc[0])


def test_scores_of_classes_are_scikit_learns():
    from sklearn.metrics import accuracy_score, log_loss

    draw = np.random.default_rng(0)
    y = draw.choice(["a", "b", "c"], 60).astype(object)
    chance = draw.dirichlet([1.0, 1.0, 1.0], 60)
    members = np.stack([chance, chance[:, ::-1]])
    model = contestants.Model(lambda X: chance, members=lambda X: members)
    part = contestants.Part(pd.DataFrame(index=range(60)), y, np.zeros(60, bool))
    found = tables.score_classes(chance, model, None, y, part)
    assert found["log_loss"] == pytest.approx(log_loss(y, chance))
    assert found["accuracy"] == accuracy_score(y, np.array(["a", "b", "c"])[chance.argmax(1)])
    both = [log_loss(y, p) for p in members]
    assert found["member_loss"] == pytest.approx(np.mean(both), rel=1e-5)


@pytest.mark.filterwarnings("ignore:Columns read as seconds")
@pytest.mark.parametrize("kind", ["classes", "number"])
@pytest.mark.parametrize("name", ["random_forest", "small"])
def test_a_fit_gives_a_row_of_all_scores(kind, name, monkeypatch):
    def small(part, seed):
        return contestants.embens(part, seed, members=2, width=16, max_epochs=30, tune=False)

    monkeypatch.setitem(contestants.CONTESTANTS, "small", small)
    row = tables.measure(tables.Cell(kind, name, 0, 1, 95), load=toy)
    assert (row.fitted, row.tested, row.kind) == (95, 50, kind)
    wanted = {"classes": ("log_loss", "accuracy", "calibration"), "number": ("crps", "rmse")}[kind]
    assert all(np.isfinite(getattr(row, score)) for score in wanted)
    assert (row.member_loss is None) == (name == "random_forest")
    if kind == "classes":
        assert row.log_loss < np.log(2)
    else:
        assert 0.6 < row.coverage <= 1


def test_results_are_appended_and_known_again(tmp_path):
    path = tmp_path / "blind.csv"
    cell = tables.Cell("ames", "tabm", 2, 1, 1000)
    tables.append(path, tables.Row(**vars(cell), log_loss=0.5))
    tables.append(path, tables.Row(**vars(cell) | {"fold": 2}, problem="over the limit"))
    rows = tables.read(path)
    assert cell.key in tables.keys(rows)
    assert [r["problem"] for r in rows] == ["", "over the limit"]


def test_bars_are_read_off_the_means():
    fits = pd.DataFrame(
        [
            {"kind": kind, "table": table, "contestant": name, loss: value, other: 0.5}
            | {"member_loss": 1.2 * value, "parameters": size, "fit_seconds": size}
            for kind, table, loss, other in (
                ("classes", "a", "log_loss", "accuracy"),
                ("number", "b", "crps", "rmse"),
            )
            for name, value, size in (("embens", 1.0, 1), ("separate", 1.1, 16), ("tabm", 1.2, 4))
        ]
    )
    fits = fits.reindex(columns=[*fits, "calibration", "coverage", "width", "predict_seconds"])
    means = reports.average(fits.assign(memory=1.0))
    board = pd.DataFrame({"elo": [1100.0, 1000.0], "elo-": 10.0}, index=["embens", "tabm"])
    loss = reports.losses(means)
    elo, tabm, separate, gain = reports.bars(means, loss, [(loss, board)])
    assert "place 1 of 2" in elo
    assert "2 of 2 (100 %): **met**" in tabm
    assert "ratio 0.909" in separate
    assert "parameters × 0.06, bar 0.2: **met**" in separate
    assert "0.167 against 0.167, 1.00: **met**" in gain
