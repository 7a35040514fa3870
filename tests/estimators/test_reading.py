"""Tables of the command line: what is read, what is left out, which task is chosen."""

from __future__ import annotations

import pyarrow as pa
import pytest

from embens.estimators import reading


def test_rows_without_a_finite_target_are_left_out_and_counted():
    table = pa.table({"a": range(13), "y": [None, float("inf"), *map(float, range(11))]})
    columns, target, notes = reading.split_target(table, "y")
    assert columns.column("a").to_pylist() == list(range(2, 13))
    assert target.to_pylist() == list(range(11))
    assert notes == ["2 rows without a (finite) target are left out"]
    with pytest.raises(ValueError, match="no column 'yy'; did you mean 'y'"):
        reading.split_target(table, "yy")


@pytest.mark.parametrize(
    ("values", "task", "why"),
    [
        (["a", "b"] * 9, "classification", "the target's type is string"),
        ([1, 2] * 9, "classification", "the target has 2 whole values"),
        (list(range(30)), "regression", "the target's type is int64, with 30 values"),
        ([0.5, 1.5] * 9, "regression", "the target's type is double, with 2 values"),
    ],
)
def test_the_task_follows_from_the_target(values, task, why):
    assert reading.choose_task(pa.chunked_array([values]), "auto") == (task, why)


@pytest.mark.parametrize("name", ["found.csv", "found.parquet"])
def test_what_is_written_is_read_again(name, tmp_path):
    columns = {"prediction": ["x", "y, z"], "p_x": [0.25, 1 / 3]}
    reading.write(columns, tmp_path / name)
    assert reading.read(tmp_path / name).to_pydict() == columns


def test_a_file_that_is_not_there_or_has_no_rows_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="there is no file"):
        reading.read(tmp_path / "no.csv")
    (tmp_path / "empty.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match="has no rows"):
        reading.read(tmp_path / "empty.csv")
