"""Tables in files: the same rows in every pass, bounded memory."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from estimators.problems import classifier, regressor, write_table
from sklearn.utils.class_weight import compute_sample_weight

from embens.estimators import files, preprocessing
from embens.estimators.choices import Options
from embens.estimators.gaussians import Gaussians
from embens.estimators.pipeline import Encoding


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_table(tmp_path_factory.mktemp("table"))


class TestASource:
    def test_deals_out_every_row_once_in_each_epoch_and_never_one_that_is_held_out(self):
        numbered = pa.table(
            {
                "a": np.arange(6000.0),
                "y": np.arange(6000.0),
            }
        )
        source = files.Source(numbered, "y", None, seed=3, held=0.1)
        sample, rows, *_ = files.first_pass(source, classify=False)
        columns, target, _ = source.parts(sample)
        known = preprocessing.learn(columns, Options())
        stream = files.Stream(source, Encoding(known, Gaussians(1)), 256)
        held = set(source.parts(rows)[1][0].tolist())
        assert source.held_out().equals(rows)
        epochs = [torch.cat([batch[-1][:, 0] for batch in stream]).tolist() for _ in range(2)]
        for epoch in epochs:
            assert len(epoch) == len(set(epoch))
            assert set(epoch) | held == set(range(6000))
            assert not set(epoch) & held
        assert epochs[0] != epochs[1]
        assert len(target) == 1

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
        with pytest.raises(ValueError, match="missing in row 0 of column 'y'"):
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
    assert files.choose_task(column.type, distinct, len(values), "auto") == (task, why)


@pytest.mark.parametrize("name", ["found.csv", "found.parquet"])
def test_what_is_written_is_read_again(name, tmp_path):
    columns = {"prediction": ["x", "y, z"], "p_x": [0.25, 1 / 3]}
    parts = [{key: values[i : i + 1] for key, values in columns.items()} for i in range(2)]
    assert files.write(parts, tmp_path / name) == 2
    assert files.open_dataset(tmp_path / name).to_table().to_pydict() == columns


def test_a_file_that_is_not_there_or_has_no_rows_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        files.open_dataset(tmp_path / "no.csv")
    (tmp_path / "empty.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match="has no rows"):
        classifier().fit_files(tmp_path / "empty.csv", "b")


@pytest.mark.parametrize("weights", ["balanced", {"low": 3.0, "high": 0.5}])
def test_class_weights_of_a_file_are_those_of_a_column_of_weights(weights, path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK", 700)  # the first block lacks a class
    frame = pd.read_parquet(path)[:1500].drop(columns=["target", "double"]).sort_values("kind")
    X = frame.drop(columns="kind")
    frame["w"] = compute_sample_weight(weights, frame["kind"])
    table = pa.Table.from_pandas(frame, preserve_index=False)
    ours = classifier(max_epochs=2, class_weight=weights).fit_files(table, "kind", ignore=["w"])
    theirs = classifier(max_epochs=2).fit_files(table, "kind", weight="w")
    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(X), rtol=1e-5)


def test_a_refit_of_files_is_refused_before_they_are_read(tmp_path):
    with pytest.raises(ValueError, match="refit=True needs all rows in memory"):
        classifier(refit=True).fit_files(tmp_path / "not there", "target")
