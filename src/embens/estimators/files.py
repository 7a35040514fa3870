"""Tables in Parquet, Arrow or CSV files, also such as memory can't hold.

Rows that are too many for memory are copied to one Arrow file, uncompressed, and mapped: what is
read of them is in memory as long as there is room for it. What the network sees of them lies in
such a file as well (:meth:`embens.estimators.preprocessing.Preprocessing.encode`), so a fit takes
its minibatches from a disk, and is otherwise that of a table in memory, to the bit.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
from narwhals.dependencies import is_into_dataframe
from pyarrow import csv, parquet
from sklearn.base import is_classifier

from embens.checks import closest
from embens.files import refusing, write_atomically
from embens.uncertainty import least_rows

FORMATS = {".parquet": "parquet", ".pq": "parquet", "": "parquet", ".csv": "csv"}
FORMATS |= {".arrow": "ipc", ".feather": "ipc"}


def open_dataset(source: Any, text: Sequence[str] = ()) -> Any:
    """Return paths, a table or a dataset as pyarrow's dataset.

    With names in ``text`` the fields of a CSV file are not interpreted: those columns are as they
    are written, and others are not to be looked at.
    """
    if isinstance(source, (ds.Dataset, pa.Table)):
        return ds.dataset(source) if isinstance(source, pa.Table) else source
    if is_into_dataframe(source):
        raise TypeError("expected files, or a table of pyarrow; a data frame is for fit(X, y)")
    paths = [source] if isinstance(source, (str, os.PathLike)) else source
    paths = [os.fspath(p) for p in paths]
    for path in paths:
        if not os.path.exists(path):
            raise FileNotFoundError(f"there is no file {path!r}")
    kinds = {os.path.splitext(p)[1].lower() for p in paths}
    kind = kinds.pop() if len(kinds) == 1 else "several kinds"
    if kind not in FORMATS:
        raise ValueError(f"expected files of one kind, .parquet, .arrow or .csv; got {kind}")
    form: Any = FORMATS[kind]
    if form == "csv":
        convert = csv.ConvertOptions(
            column_types=dict.fromkeys(text, pa.string()),
            strings_can_be_null=not text,
            quoted_strings_can_be_null=not text,
        )
        block = csv.ReadOptions(block_size=2**24)  # bytes that are read at a time
        form = ds.CsvFileFormat(convert_options=convert, read_options=block)
    with refusing(paths[0]):
        dataset = ds.dataset(paths if len(paths) > 1 else paths[0], format=form)
        _ = dataset.schema.names  # which may be no text
    return dataset


def read(dataset: Any, **options: Any) -> Iterator[Any]:
    """Yield the batches of a dataset that have rows, as tables; the options are of pyarrow."""
    with refusing(next(iter(getattr(dataset, "files", ())), "the source")):
        for batch in dataset.to_batches(batch_readahead=1, fragment_readahead=1, **options):
            batch.validate(full=True)  # Arrow files are mapped as they are
            if batch.num_rows:
                yield pa.Table.from_batches([batch])


def gather(parts: Iterable[Any], folder: str | os.PathLike[str] | None = None) -> Any:
    """Return parts as one table, which with a folder is a file there, mapped into memory."""
    parts = iter(parts)
    if (first := next(parts, None)) is None:
        raise ValueError("the table has no rows")
    if folder is None:
        return pa.concat_tables([first, *parts])
    path = Path(folder, secrets.token_hex(8))
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, first.schema) as writer:
        for part in itertools.chain([first], parts):
            writer.write_table(part)
    table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
    with contextlib.suppress(OSError):  # elsewhere a file that is mapped can't be removed
        path.unlink()  # it lasts as long as it is mapped: nobody has to tidy up
    return table.unify_dictionaries()


def features(names: Sequence[str], others: Iterable[str]) -> list[str]:
    """Return the names of columns without some others, which must be among them."""
    check_columns(others := set(others), names)
    if not (found := [name for name in names if name not in others]):
        raise ValueError("there is no column beside the target")
    return found


def to_numpy(column: Any) -> Any:
    """Return an Arrow column as an array, decimals as float64 and text as text."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    values = column.to_numpy()
    return np.array(values.tolist()) if values.dtype.kind == "O" else values


def check_columns(wanted: Iterable[str], names: Sequence[str], why: str = "") -> None:
    """Raise where there is no such column, and say why it should be there."""
    known = set(names)
    for name in wanted:
        if name not in known:
            raise ValueError(f"there is no column {name!r}{why}{closest(name, names)}")


def write(parts: Iterable[dict[str, Any]], path: Path) -> int:
    """Write columns, part after part, as CSV, or as Parquet by the name; return their rows."""
    rows, binary = 0, FORMATS.get(path.suffix.lower()) == "parquet"
    compression: Any = "gzip" if path.suffix.lower() == ".gz" else None

    def content(temporary: Path) -> None:
        nonlocal rows
        with ExitStack() as stack:
            stream = stack.enter_context(pa.output_stream(str(temporary), compression))
            writer = None
            for part in map(pa.table, parts):
                kind: Any = parquet.ParquetWriter if binary else csv.CSVWriter
                writer = writer or stack.enter_context(kind(stream, part.schema))
                writer.write_table(part)
                rows += part.num_rows

    write_atomically(path, content)
    return rows


def predictions(estimator: Any, table: Any, coverage: float) -> dict[str, Any]:
    """Return what an estimator says about each row, as columns."""
    if not estimator.head_.single:
        raise ValueError("this model has several targets, a file of predictions only one")
    if is_classifier(estimator):
        chance = estimator.predict_proba(table)
        unsure = estimator.predict_uncertainty(table)
        columns = {"prediction": estimator.classes_[chance.argmax(1)]}
        columns |= {f"p_{c}": chance[:, k] for k, c in enumerate(estimator.classes_)}
        columns |= {"uncertainty": unsure.total, "epistemic": unsure.epistemic}
        if has_scores(estimator, coverage):
            sets = estimator.predict_set(table, coverage)
            columns["set"] = ["|".join(map(str, estimator.classes_[row])) for row in sets]
        return columns
    mean, std = estimator.predict(table, return_std=True)
    columns = {"prediction": mean, "std": std}
    if has_scores(estimator, coverage):
        lower, upper = estimator.predict_interval(table, coverage).T
        columns |= {"lower": lower, "upper": upper}
    return columns


def has_scores(estimator: Any, coverage: float) -> bool:
    """Return whether enough rows were held out for intervals, or sets, of a coverage."""
    scores = estimator.head_.scores
    return scores is not None and len(scores) >= least_rows(coverage)
