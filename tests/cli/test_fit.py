"""``embens fit``: a model, its scores and its predictions; bad files end with a clear message."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from estimators.problems import write_table

from embens.cli import main
from embens.cli.fit import choose_task
from embens.estimators import load


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_table(tmp_path_factory.mktemp("table"))


def run(command, *arguments):
    return main([command, *map(str, arguments)])


QUICK = ("--members", 2, "--epochs", 3)


class TestTheCommands:
    def test_fit_writes_a_model_and_predict_uses_it(self, path, tmp_path, capsys):
        frame = pd.read_parquet(path)[:300].drop(columns=["target", "double"])
        frame["empty"] = None
        frame.to_csv(tmp_path / "table.csv", index=False)
        out = tmp_path / "out"
        assert run("fit", tmp_path / "table.csv", "--target", "kind", "--out", out, *QUICK) == 0
        text = capsys.readouterr().out
        assert "classification: the target's type is string" in text
        assert "note: empty has no value at all and is ignored" in text
        scores = json.loads((out / "scores.json").read_text())
        value, low, high = scores["accuracy"]
        assert low <= value <= high
        rows = pd.read_csv(out / "predictions.csv", dtype={"set": str}, keep_default_na=False)
        assert len(rows) == 60
        inside = [t in s.split("|") for t, s in zip(rows["target"], rows["set"], strict=True)]
        assert scores["coverage of 90 % sets"][0] == pytest.approx(np.mean(inside))
        assert (rows["prediction"] == rows["target"]).mean() == pytest.approx(value)
        new = tmp_path / "new.csv.gz"
        assert run("predict", out, tmp_path / "table.csv", "--out", new) == 0
        model, found = load(out / "model.safetensors"), pd.read_csv(new)
        expected = model.predict_proba(frame[model.preprocessing_.names])
        np.testing.assert_allclose(found[[f"p_{c}" for c in model.classes_]], expected, atol=1e-6)

    def test_fit_scores_a_regression_with_intervals_of_the_scores(self, path, tmp_path):
        frame = pd.read_parquet(path)[:400].drop(columns=["kind", "double"])
        frame.to_parquet(tmp_path / "table.parquet")
        out = tmp_path / "out"
        run("fit", tmp_path / "table.parquet", "--target", "target", "--out", out, *QUICK)
        scores = json.loads((out / "scores.json").read_text())
        rows = pd.read_csv(out / "predictions.csv")
        error = rows["target"] - rows["prediction"]
        assert scores["RMSE"][0] == pytest.approx(np.sqrt((error**2).mean()))
        inside = (rows["lower"] <= rows["target"]) & (rows["target"] <= rows["upper"])
        assert scores["coverage of 90 % intervals"][0] == pytest.approx(inside.mean())
        new = tmp_path / "new.parquet"
        run("predict", out / "model.safetensors", tmp_path / "table.parquet", "--out", new)
        assert list(pd.read_parquet(new)) == ["target", "prediction", "std", "lower", "upper"]

    def test_fit_takes_the_choices_of_the_estimators_and_writes_a_card(
        self, path, tmp_path, capsys
    ):
        frame = pd.read_parquet(path)[:300].drop(columns=["kind", "double"])
        frame.to_csv(tmp_path / "table.csv", index=False)
        given = ("--loss", "student", "--transform", "none", "--time-limit", 60, "--no-tune")
        where = (tmp_path / "table.csv", "--target", "target", "--out", tmp_path / "out")
        assert run("fit", *where, *given, "--refit", "--importances", *QUICK) == 0
        model = load(tmp_path / "out" / "model.safetensors")
        assert (model.loss, model.refit, model.time_limit) == ("student", True, 60.0)
        assert "loss 'student'" in (tmp_path / "out" / "card.md").read_text()
        found = pd.read_csv(tmp_path / "out" / "importances.csv", index_col=0)
        assert set(found.index) == {"size", "time", "colour", "open", "grade"}
        assert "size" in capsys.readouterr().out
        with pytest.raises(SystemExit):
            run("fit", path, "--target", "kind", "--drop", "target", "double", *given)
        assert "are for regression" in capsys.readouterr().err

    def test_a_file_that_is_kept_on_the_disk_gives_what_one_in_memory_does(self, path, tmp_path):
        given = ("--target", "kind", *QUICK, "--no-tune", "--quiet")
        for out, more in ((tmp_path / "a", ()), (tmp_path / "b", ("--stream",))):
            run("fit", path, *given, *more, "--out", out)
        for name in ("predictions.csv", "scores.json"):
            assert (tmp_path / "a" / name).read_text() == (tmp_path / "b" / name).read_text()

    @pytest.mark.parametrize(
        ("content", "arguments", "message"),
        [
            ("a,b\n1,2\n" * 1, ("--target", "c"), "no column 'c'"),
            ("a,b\n" + "1,x\n" * 30, ("--target", "b"), "the target is 'x' in every row"),
            ("a,b\n" + "1,\n" * 30, ("--target", "b"), "the target is missing in every row"),
            ("a,b\n", ("--target", "b"), "has no rows"),
            ("b\n" + "1\n" * 30, ("--target", "b"), "no column beside the target"),
            ("a,a,b\n" + "1,2,3\n" * 30, ("--target", "b"), "multiple columns named a"),
            ("a,b\n1\n2,3\n", ("--target", "b"), "can't be read"),
            (
                "a,b\n" + "".join(f"inf,{i % 2}\n" for i in range(30)),
                ("--target", "b"),
                "contains infinity",
            ),
            (
                "a,b\n" + "".join(f"1,name{i}\n" for i in range(30)),
                ("--target", "b"),
                "30 classes in 30 rows",
            ),
            (
                "a,b\n" + "1,2\n" * 30,
                ("--target", "b", "--drop", "x"),
                "there is no column 'x', which --drop names",
            ),
            (
                "a,b\n" + "1,x\n2,y\n" * 30,
                ("--target", "b", "--task", "regression"),
                "regression needs numbers",
            ),
        ],
    )
    def test_bad_files_end_with_a_clear_message(
        self, content, arguments, message, tmp_path, capsys
    ):
        (tmp_path / "bad.csv").write_text(content)
        with pytest.raises(SystemExit):
            run("fit", tmp_path / "bad.csv", *arguments, "--out", tmp_path / "o", *QUICK)
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize("more", [(), ("--stream",)])
    def test_a_file_that_is_not_there_and_a_folder_that_can_not_be_made_are_said(
        self, more, path, tmp_path, capsys
    ):
        with pytest.raises(SystemExit):
            run("fit", tmp_path / "no.csv", "--target", "y", "--out", tmp_path / "o", *more)
        assert "there is no file" in capsys.readouterr().err
        (tmp_path / "taken").write_text("a file")
        out = tmp_path / "taken" / "o"
        with pytest.raises(SystemExit):
            run("fit", path, "--target", "kind", "--out", out, *more, *QUICK)
        assert "taken" in capsys.readouterr().err

    def test_a_thousand_columns_of_text_are_handled_and_said_so(self, tmp_path, capsys):
        rng = np.random.default_rng(0)
        frame = pd.DataFrame(rng.choice(list("abcdefgh"), (60, 1000))).add_prefix("c")
        frame["y"] = rng.choice(["no", "yes"], 60)
        frame.to_csv(tmp_path / "wide.csv", index=False)
        run("fit", tmp_path / "wide.csv", "--target", "y", "--out", tmp_path / "o", *QUICK)
        assert "1000 categorical columns: 4 categories kept of each" in capsys.readouterr().out

    @pytest.mark.parametrize("more", [(), ("--stream",)])
    def test_a_quiet_fit_says_nothing_and_ids_and_dropped_columns_are_no_features(
        self, more, path, tmp_path, capfd
    ):
        frame = pd.read_parquet(path)[:300].drop(columns=["target"])
        frame.insert(0, "key", [f"0{i}" for i in range(300)])
        frame.to_csv(tmp_path / "table.csv", index=False)
        command = (tmp_path / "table.csv", "--target", "kind", "--out", tmp_path, *QUICK, *more)
        run("fit", *command, "--quiet", "--id", "key", "--drop", "double")
        assert capfd.readouterr() == ("", "")
        names = load(tmp_path / "model.safetensors").preprocessing_.names
        assert not {"key", "double", "kind"} & {*names}
        rows = pd.read_csv(tmp_path / "predictions.csv", dtype={"key": str})
        expected = frame.set_index("key")["kind"][rows["key"]]
        assert rows["target"].tolist() == expected.tolist()

    def test_a_header_without_rows_is_said_also_in_parts(self, tmp_path, capsys):
        (tmp_path / "bad.csv").write_text("a,b\n")
        with pytest.raises(SystemExit):
            run("fit", tmp_path / "bad.csv", "--target", "b", "--stream", "--out", tmp_path)
        assert "has no rows" in capsys.readouterr().err


@pytest.mark.parametrize("more", [(), ("--stream",)])
def test_class_weights_are_those_of_the_classes_as_the_file_has_them(more, tmp_path, capsys):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=200), "y": rng.integers(0, 2, 200)})
    frame["word"] = frame["y"].map({0: "a=b", 1: "c"})
    frame.to_csv(tmp_path / "table.csv", index=False)
    for target, given, expected in (
        ("y", ("balanced",), "balanced"),
        ("y", ("0=1", "1=2.5"), {0: 1.0, 1: 2.5}),
        ("word", ("a=b=1", "c=3"), {"a=b": 1.0, "c": 3.0}),
    ):
        command = (tmp_path / "table.csv", "--target", target, "--out", tmp_path, *QUICK, *more)
        assert run("fit", *command, "--class-weight", *given) == 0
        assert load(tmp_path / "model.safetensors").class_weight == expected
    for target, given, message in (
        ("y", ("0:1",), "CLASS=NUMBER for each class"),
        ("y", ("zero=1",), "CLASS=NUMBER for each class"),
        ("y", ("0=-1",), "class_weight: expected numbers ≥ 0"),
        ("y", ("2=1",), "are not in class_weight"),
        ("a", ("0=1",), "--class-weight is for classification"),
    ):
        command = (tmp_path / "table.csv", "--target", target, "--out", tmp_path, *QUICK, *more)
        with pytest.raises(SystemExit):
            run("fit", *command, "--class-weight", *given)
        assert message in capsys.readouterr().err


def test_a_small_table_is_fitted_without_intervals_and_said_so(tmp_path, capsys):
    frame = pd.DataFrame({"a": np.arange(60.0), "y": np.arange(60.0) ** 2})
    frame.to_csv(tmp_path / "table.csv", index=False)
    command = (tmp_path / "table.csv", "--target", "y", "--out", tmp_path, *QUICK)
    assert run("fit", *command, "--test-fraction", 0.01) == 0
    assert "too few rows were held out for intervals" in capsys.readouterr().out
    assert len(pd.read_csv(tmp_path / "predictions.csv")) == 1
    new = tmp_path / "new.csv"
    for coverage, columns in ((0.9, []), (0.5, ["lower", "upper"])):
        run("predict", tmp_path, tmp_path / "table.csv", "--out", new, "--coverage", coverage)
        assert ("too few" in capsys.readouterr().out) == (not columns)
        assert list(pd.read_csv(new)) == ["y", "prediction", "std", *columns]


def test_a_target_that_is_neither_number_nor_label_is_refused_before_the_fit(tmp_path, capsys):
    days = pd.date_range("2020-01-01", periods=60)
    for target in (days, [[1, 2]] * 60):
        pd.DataFrame({"a": range(60), "y": target}).to_parquet(tmp_path / "table.parquet")
        with pytest.raises(SystemExit):
            run("fit", tmp_path / "table.parquet", "--target", "y", "--out", tmp_path)
        assert "expected numbers, text or truth values" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "task", "why"),
    [
        (["a", "b"] * 9, "classification", "the target's type is string, with 2 values"),
        ([1, 2] * 9, "classification", "the target's type is int64, with 2 values"),
        (list(range(30)), "regression", "the target's type is int64, with 30 values"),
        ([0.5, 1.5] * 9, "regression", "the target's type is double, with 2 values"),
    ],
)
def test_the_task_follows_from_the_target(values, task, why):
    column = pa.array(values)
    distinct = column.unique().to_pylist()
    assert choose_task(column.type, distinct, len(values), "auto") == (task, why)
