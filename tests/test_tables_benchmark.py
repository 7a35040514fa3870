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
    rng = np.random.default_rng(0)
    x = rng.normal(size=150)
    when = pd.Timestamp(2020, 1, 1) + pd.to_timedelta(rng.integers(0, 900, 150), unit="D")
    frame = pd.DataFrame({"x": x, "when": when, "text": rng.choice(["a", "b", "c"], 150)})
    frame["text"] = frame["text"].astype(object)
    frame.loc[:9, "x"] = np.nan
    if name == "number":
        return frame, 3 * np.nan_to_num(x) + rng.normal(size=150)
    return frame, np.where(np.nan_to_num(x) > 0, "yes", "no").astype(object)


def test_no_table_is_both_blind_and_for_development():
    assert not set(tables_data.BLIND) & set(tables_data.DEVELOPMENT)
    assert len(tables_data.TABLES) >= 20
    assert len(tables_data.BLIND) >= len(tables_data.TABLES) / 2


@pytest.mark.parametrize("kind", ["classes", "number"])
def test_splits_share_no_rows_and_folds_cover_all(kind):
    _, y = toy(kind)
    all_test_rows = []
    for fold in range(tables.FOLDS):
        fit_rows, is_held_out, test_rows = tables.split(y, 0, fold, 10**6)
        assert not set(fit_rows) & set(test_rows)
        assert len(fit_rows) + len(test_rows) == len(y)
        assert is_held_out.sum() == len(fit_rows) // 5
        all_test_rows += list(test_rows)
    assert sorted(all_test_rows) == list(range(len(y)))


def test_splits_are_limited_and_reproducible():
    _, y = toy("number")
    fit_rows, _, _ = tables.split(y, 1, 0, 40)
    fit_rows_again, _, _ = tables.split(y, 1, 0, 40)
    other_fit_rows, _, _ = tables.split(y, 2, 0, 40)

    assert len(fit_rows) == 40
    assert (fit_rows == fit_rows_again).all()
    assert (fit_rows != other_fit_rows).any()


def test_crps_of_a_sample_is_its_definition():
    rng = np.random.default_rng(0)
    sample, values = rng.normal(size=30), rng.normal(size=7)

    crps = contestants.crps_of_sample(values, sample)

    distance_within_sample = np.abs(sample[:, None] - sample).mean()
    distance_to_values = np.abs(values[:, None] - sample).mean(1)
    np.testing.assert_allclose(crps, distance_to_values - distance_within_sample / 2)


def test_crps_of_a_normal_is_that_of_many_draws():
    sample = 1 + 2 * np.random.default_rng(0).normal(size=200_000)
    values = np.array([-3.0, 0.5, 4.0])
    exact = contestants.crps_of_normal(values, 1.0, 2.0)
    np.testing.assert_allclose(contestants.crps_of_sample(values, sample), exact, atol=0.02)


def test_interval_by_errors_has_its_coverage():
    rng = np.random.default_rng(0)
    interval = contestants.by_errors(np.zeros(20_000), rng.normal(size=2000))
    values = rng.normal(size=20_000)

    is_covered = (interval.low <= values) & (values <= interval.high)

    assert is_covered.mean() == pytest.approx(0.9, abs=0.02)


def test_columns_are_learnt_from_the_fitted_rows_only():
    frame, _ = toy("number")
    new = frame.head(2).assign(text=["z", "a"], x=[np.nan, 1.0])

    filled = contestants.Columns(frame, impute=True)(new)
    codes = contestants.Columns(frame).codes(new)

    assert list(filled["text"]) == ["(missing)", "a"]
    assert filled["x"].tolist() == [frame["x"].median(), 1.0]
    assert filled["x is missing"].tolist() == [1.0, 0.0]
    assert {"when.year", "when.day_of_week"} <= set(filled)
    assert np.isnan(codes["text"].iloc[0])


def test_scores_of_classes_are_those_of_scikit_learn():
    from sklearn.metrics import accuracy_score, log_loss

    rng = np.random.default_rng(0)
    y = rng.choice(["a", "b", "c"], 60).astype(object)
    probabilities = rng.dirichlet([1.0, 1.0, 1.0], 60)
    members = np.stack([probabilities, probabilities[:, ::-1]])
    model = contestants.Model(lambda X: probabilities, members=lambda X: members)
    part = contestants.Part(pd.DataFrame(index=range(60)), y, np.zeros(60, bool))

    scores = tables.score_classes(probabilities, model, None, y, part)

    labels = np.array(["a", "b", "c"])[probabilities.argmax(1)]
    member_losses = [log_loss(y, probabilities_of_member) for probabilities_of_member in members]
    assert scores["log_loss"] == pytest.approx(log_loss(y, probabilities))
    assert scores["accuracy"] == accuracy_score(y, labels)
    assert scores["member_loss"] == pytest.approx(np.mean(member_losses), rel=1e-5)


SCORES = {"classes": ("log_loss", "accuracy", "calibration"), "number": ("crps", "rmse")}


@pytest.mark.filterwarnings("ignore:Columns read as seconds")
@pytest.mark.parametrize("kind", ["classes", "number"])
@pytest.mark.parametrize("name", ["random_forest", "small"])
def test_a_fit_gives_a_row_of_all_scores(kind, name, monkeypatch):
    def small(part, seed):
        return contestants.embens(part, seed, members=2, width=16, max_epochs=30, tune=False)

    monkeypatch.setitem(contestants.CONTESTANTS, "small", small)

    row = tables.measure(tables.Cell(kind, name, 0, 1, 95), load=toy)

    assert row.fitted == 95
    assert row.tested == 50
    assert row.kind == kind
    for score in SCORES[kind]:
        assert np.isfinite(getattr(row, score))
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


def test_a_line_that_a_killed_process_left_incomplete_is_measured_again(tmp_path):
    path = tmp_path / "blind.csv"
    cell = tables.Cell("ames", "tabm", 2, 1, 1000)
    rows = [tables.Row(**vars(cell) | {"fold": fold}, log_loss=0.5) for fold in range(3)]
    for row in rows:
        tables.append(path, row)
    whole = path.read_text()
    path.write_text(whole[:-20])

    assert len(tables.keys(tables.read(path))) == 2
    tables.append(path, rows[2])
    assert path.read_text() == whole


def make_fits(kind, table, loss, score):
    """Return rows of three contestants, in the order of their losses."""
    fits = []
    for contestant, value, size in (
        ("embens", 1.0, 1),
        ("separate", 1.1, 16),
        ("catboost", 1.2, 4),
    ):
        fit = {
            "kind": kind,
            "table": table,
            "contestant": contestant,
            "repeat": 0,
            "fold": 0,
            loss: value,
            score: value,
            "member_loss": 1.2 * value,
            "parameters": size,
            "fit_seconds": size,
        }
        fits.append(fit)
    return fits


def test_only_splits_of_all_contestants_are_compared():
    fits = make_fits("classes", "a", "log_loss", "accuracy")
    hard_split = {**fits[0], "fold": 1, "log_loss": 9.0}
    frame = pd.DataFrame([*fits, hard_split])
    columns = dict.fromkeys([*frame, *reports.SCORES, *reports.COSTS])
    means = reports.average(frame.reindex(columns=list(columns)))

    assert means.xs("embens", level="contestant")["log_loss"].tolist() == [1.0]


def test_bars_are_read_off_the_means():
    fits = make_fits("classes", "a", "log_loss", "accuracy")
    fits += make_fits("number", "b", "crps", "rmse")
    frame = pd.DataFrame(fits)
    frame = frame.reindex(columns=[*frame, "calibration", "coverage", "width", "predict_seconds"])
    means = reports.average(frame.assign(memory=1.0))

    bars = reports.bars(means, reports.losses(means), 5000)
    results = {bar: (result, met) for bar, result, met in bars}

    classes = results["log loss lower than catboost on ≥ 50 % of classes"]
    assert classes == ("1 of 1, ratio 0.833", "met")
    assert results["rmse lower than catboost on ≥ 60 % of numbers"] == classes
    elo, _ = results["Elo first, or in the interval of the first"]
    assert elo.startswith("place 1 of 3 on 2")
    separate, _ = results["loss no worse than of separate networks, ≤ 1/5 of the parameters"]
    assert "ratio 0.909" in separate
    assert "parameters × 0.06" in separate
    seconds = results["CPU time of a fit ÷ catboost ≤ 3"]
    assert seconds == ("0.2 (all fits together), 0.2 (geometric mean over tables)", "met")
    assert "× 0.833" in reports.comparison(means)
