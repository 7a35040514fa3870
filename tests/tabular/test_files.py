"""Tables in files: what they give in memory, with the rows on a disk."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from estimators.problems import classifier, regressor, write_table

from embens.estimators import files, preprocessing


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_table(tmp_path_factory.mktemp("table"))


class TestAFitFromFiles:
    def test_is_a_fit_in_memory_to_the_bit(self, path):
        frame = pd.read_parquet(path)
        X = frame.drop(columns=["target", "kind", "double"])
        given = {"ignore": ["target", "double"]}
        streamed = classifier(max_epochs=2, tune=True).fit_files(path, "kind", **given)
        whole = classifier(max_epochs=2, tune=True).fit(X, frame["kind"])
        np.testing.assert_array_equal(streamed.predict_proba(X), whole.predict_proba(X))
        assert streamed.classes_.tolist() == whole.classes_.tolist()

    def test_takes_several_targets_and_columns_to_ignore(self, path):
        X = pd.read_parquet(path).drop(columns=["target", "double", "time"])
        model = regressor(max_epochs=1)
        model.fit_files(path, ["target", "double"], ignore=["time"])
        assert model.predict(X).shape == (6000, 2)

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

    def test_keeps_the_rows_and_what_the_network_sees_of_them_in_files(self, path, monkeypatch):
        seen = []
        before = preprocessing.Preprocessing.encode

        def encode(*arguments):
            seen.append([t.untyped_storage().filename for t in before(*arguments)])
            return before(*arguments)

        monkeypatch.setattr(preprocessing.Preprocessing, "encode", encode)
        regressor(max_epochs=1).fit_files(path, "target", ignore=["kind", "double"])
        assert len(seen) == 3
        assert all(name for names in seen for name in names)
        assert not any(Path(name).exists() for names in seen for name in names)

    def test_a_table_that_is_mapped_takes_no_memory(self, path, tmp_path):
        kept = files.gather(files.read(files.open_dataset(path)))
        before = pa.total_allocated_bytes()
        parts = files.read(files.open_dataset(path), batch_size=500)
        mapped = files.gather(parts, tmp_path)
        deadline = time.monotonic() + 30  # readers let go of what they have a moment later
        while pa.total_allocated_bytes() - before >= 0.2 * kept.nbytes:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert mapped.combine_chunks().equals(kept.combine_chunks())


def test_a_data_frame_is_not_a_file():
    with pytest.raises(TypeError, match=r"a data frame is for fit\(X, y\)"):
        classifier().fit_files(pd.DataFrame({"a": [1.0], "y": [0]}), "y")


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
