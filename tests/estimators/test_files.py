"""Tables in files: the same rows in every pass, bounded memory, the command line."""

from __future__ import annotations

import gc
import json
import tracemalloc
from argparse import ArgumentParser

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from estimators.problems import classes_of, classifier, mixed_table, regressor

from embens.estimators import files, fit_command, load, predict_command
from embens.estimators.heads import Gaussians


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    frame, target = mixed_table(6000)
    frame["target"], frame["kind"], frame["double"] = target, classes_of(target), 2 * target
    found = tmp_path_factory.mktemp("table") / "table.parquet"
    frame.to_parquet(found, row_group_size=700)
    return found


class TestASource:
    def test_deals_out_every_row_once_in_each_epoch_and_never_one_that_is_held_out(self):
        numbered = pa.table(
            {
                "a": np.arange(6000.0),
                "y": np.arange(6000.0),
            }
        )
        source = files.Source(numbered, "y", None, seed=3, held=0.1)
        look = files.first_pass(source, classify=False)
        model = regressor()
        model._learn_classes([], single=True)
        columns, target, _ = source.parts(look.sample)
        files.fitting.learn_columns(model, columns, None)
        model.y_mean_, model.y_std_ = torch.zeros(1).double(), torch.ones(1).double()
        stream = files.Stream(source, model, Gaussians(1), 256)
        held = set(source.parts(look.held)[1][:, 0].tolist())
        epochs = [torch.cat([batch[-1][:, 0] for batch in stream]).tolist() for _ in range(2)]
        for epoch in epochs:
            assert len(epoch) == len(set(epoch))
            assert set(epoch) | held == set(range(6000))
            assert not set(epoch) & held
        assert epochs[0] != epochs[1]
        assert target.shape[1] == 1

    def test_a_fit_from_a_file_learns_what_a_fit_in_memory_does(self, path):
        frame = pd.read_parquet(path)
        X = frame.drop(columns=["target", "kind", "double"])
        streamed = classifier(max_epochs=4).fit_files(
            pa.dataset.dataset(path).to_table(columns=[*X.columns, "kind"]), "kind"
        )
        whole = classifier(max_epochs=4).fit(X, frame["kind"])
        assert streamed.score(X, frame["kind"]) == pytest.approx(
            whole.score(X, frame["kind"]), abs=0.03
        )
        assert streamed.classes_.tolist() == whole.classes_.tolist()

    def test_is_deterministic_and_takes_weights_and_several_targets(self, path):
        X = pd.read_parquet(path).drop(columns=["target", "double", "time"])
        one, two = (
            regressor(max_epochs=1).fit_files(path, ["target", "double"], weight="time").predict(X)
            for _ in "ab"
        )
        np.testing.assert_array_equal(one, two)
        assert one.shape == (6000, 2)

    def test_says_what_is_wrong(self, path, tmp_path):
        with pytest.raises(ValueError, match="no column 'targt'; did you mean 'target'"):
            regressor().fit_files(path, "targt")
        with pytest.raises(FileNotFoundError, match="there is no file"):
            regressor().fit_files(tmp_path / "no.parquet", "a")
        gaps = pa.table({"a": [1.0, 2.0], "y": [None, 1.0]})
        with pytest.raises(ValueError, match="has missing values; remove those rows"):
            regressor().fit_files(gaps, "y")
        (tmp_path / "table.txt").write_text("a")
        with pytest.raises(ValueError, match="expected files of one kind"):
            regressor().fit_files(tmp_path / "table.txt", "a")

    def test_reads_no_more_than_a_buffer_at_a_time(self, tmp_path, monkeypatch):
        """Memory of Python and numpy in a pass does not grow with the file."""
        monkeypatch.setattr(files, "BLOCK", 1000)
        monkeypatch.setattr(files.choices, "LOOK", 1000)
        monkeypatch.setattr(files.choices, "HELD_OUT", 500)
        peaks = []
        small, large = 20_000, 120_000
        for rows in (small, small, large):  # the first time imports
            table = pa.table(
                {f"c{j}": np.random.default_rng(j).normal(size=rows) for j in range(1, 7)}
            )
            path = tmp_path / f"{rows}.parquet"
            pq.write_table(table.append_column("y", table["c1"]), path, row_group_size=1000)
            model = regressor(max_epochs=1, members=1, width=4, batch_size=4096)
            gc.collect()
            tracemalloc.start()
            model.fit_files(path, "y")
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        more = (large - small) * 6 * 4  # bytes, if the columns were kept even as float32
        assert peaks[2] - peaks[1] < more / 3


def test_a_data_frame_is_not_a_file():
    with pytest.raises(TypeError, match=r"a data frame is for fit\(X, y\)"):
        classifier().fit_files(pd.DataFrame({"a": [1.0], "y": [0]}), "y")


def run(command, *arguments):
    parser = ArgumentParser(prog="embens")
    command.add_arguments(parser)
    parser.set_defaults(parser=parser)
    return command.run(parser.parse_args(list(map(str, arguments))))


QUICK = ("--members", 2, "--epochs", 3, "--quiet")


class TestTheCommands:
    def test_fit_writes_a_model_and_predict_uses_it(self, path, tmp_path, capsys):
        frame = pd.read_parquet(path)[:300].drop(columns=["target", "double"])
        frame["empty"] = None
        frame.to_csv(tmp_path / "table.csv", index=False)
        out = tmp_path / "out"
        assert (
            run(fit_command, tmp_path / "table.csv", "--target", "kind", "--out", out, *QUICK) == 0
        )
        text = capsys.readouterr().out
        assert "classification: the target's type is string" in text
        assert "note: empty has no value at all and is ignored" in text
        scores = json.loads((out / "scores.json").read_text())
        value, low, high = scores["accuracy"]
        assert low <= value <= high
        rows = pd.read_csv(out / "predictions.csv")
        assert len(rows) == 60
        assert (rows["prediction"] == rows["target"]).mean() == pytest.approx(value)
        new = tmp_path / "new.csv"
        assert run(predict_command, out, tmp_path / "table.csv", "--out", new) == 0
        model, found = load(out / "model.safetensors"), pd.read_csv(new)
        expected = model.predict_proba(frame[model.preprocessing_.names])
        np.testing.assert_allclose(found[[f"p_{c}" for c in model.classes_]], expected, atol=1e-6)

    def test_fit_scores_a_regression_with_intervals_of_the_scores(self, path, tmp_path):
        frame = pd.read_parquet(path)[:400].drop(columns=["kind", "double"])
        frame.to_parquet(tmp_path / "table.parquet")
        out = tmp_path / "out"
        run(fit_command, tmp_path / "table.parquet", "--target", "target", "--out", out, *QUICK)
        scores = json.loads((out / "scores.json").read_text())
        rows = pd.read_csv(out / "predictions.csv")
        error = rows["target"] - rows["prediction"]
        assert scores["RMSE"][0] == pytest.approx(np.sqrt((error**2).mean()))
        inside = (rows["lower"] <= rows["target"]) & (rows["target"] <= rows["upper"])
        assert scores["coverage of 90 % intervals"][0] == pytest.approx(inside.mean())
        new = tmp_path / "new.parquet"
        run(predict_command, out / "model.safetensors", tmp_path / "table.parquet", "--out", new)
        assert list(pd.read_parquet(new)) == ["prediction", "std", "lower", "upper"]

    def test_fit_can_read_a_file_in_parts(self, path, tmp_path, capsys):
        out = tmp_path / "out"
        run(fit_command, path, "--target", "kind", "--stream", "--out", out, *QUICK)
        assert "log loss" in capsys.readouterr().out
        model = load(out / "model.safetensors")
        assert model.n_features_in_ == 7
        rows = pd.read_csv(out / "predictions.csv")
        scores = json.loads((out / "scores.json").read_text())
        right = (rows["prediction"] == rows["target"]).mean()
        low, high = scores["accuracy"][1:]
        assert scores["accuracy"][0] == pytest.approx(right)
        assert low <= right <= high
        assert low < high

    @pytest.mark.parametrize(
        ("content", "arguments", "message"),
        [
            ("a,b\n1,2\n" * 1, ("--target", "c"), "no column 'c'"),
            ("a,b\n" + "1,x\n" * 30, ("--target", "b"), "the target is 'x' in every row"),
            ("a,b\n" + "1,\n" * 30, ("--target", "b"), "0 rows have a target"),
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
            ("a,b\n" + "1,2\n" * 30, ("--target", "b", "--drop", "x"), "--drop: there is no"),
            (
                "a,b\n" + "1,x\n2,y\n" * 30,
                ("--target", "b", "--task", "regression"),
                "regression needs numbers",
            ),
            (
                "a,b\n" + "1,2.5\n2,inf\n" * 30,
                ("--target", "b", "--task", "regression", "--stream"),
                "not finite",
            ),
        ],
    )
    def test_bad_files_end_with_a_clear_message(
        self, content, arguments, message, tmp_path, capsys
    ):
        (tmp_path / "bad.csv").write_text(content)
        with pytest.raises(SystemExit):
            run(fit_command, tmp_path / "bad.csv", *arguments, "--out", tmp_path / "o", *QUICK)
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize("more", [(), ("--stream",)])
    def test_a_file_that_is_not_there_and_a_folder_that_can_not_be_made_are_said(
        self, more, path, tmp_path, capsys
    ):
        with pytest.raises(SystemExit):
            run(fit_command, tmp_path / "no.csv", "--target", "y", "--out", tmp_path / "o", *more)
        assert "there is no file" in capsys.readouterr().err
        (tmp_path / "taken").write_text("a file")
        out = tmp_path / "taken" / "o"
        with pytest.raises(SystemExit):
            run(fit_command, path, "--target", "kind", "--out", out, *more, *QUICK)
        assert "taken" in capsys.readouterr().err

    def test_predict_names_the_column_that_is_missing(self, path, tmp_path, capsys):
        model = regressor(max_epochs=1).fit(pd.DataFrame({"a": np.arange(60.0)}), np.arange(60.0))
        model.save(tmp_path / "model")
        with pytest.raises(SystemExit):
            run(predict_command, tmp_path / "model", path)
        assert "no column 'a', which the model needs" in capsys.readouterr().err

    def test_a_thousand_columns_of_text_are_handled_and_said_so(self, tmp_path, capsys):
        rng = np.random.default_rng(0)
        frame = pd.DataFrame(rng.choice(list("abcdefgh"), (60, 1000))).add_prefix("c")
        frame["y"] = rng.choice(["no", "yes"], 60)
        frame.to_csv(tmp_path / "wide.csv", index=False)
        run(fit_command, tmp_path / "wide.csv", "--target", "y", "--out", tmp_path / "o", *QUICK)
        assert "1000 categorical columns: 4 categories kept of each" in capsys.readouterr().out
