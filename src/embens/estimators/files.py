"""Tables in Parquet, Arrow or CSV files: minibatches of what memory can't hold, or all at once.

A source is read in blocks of rows. Which rows are held out, and which are looked at for bins and
categories, is decided by a number drawn for each row from the seed and its place, so that every
pass agrees. Training reads the blocks in a new order in each epoch and shuffles rows among those of
a buffer; memory is that of the buffer and of the rows held out, however many rows there are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from embens.checks import closest
from embens.estimators import choices, preprocessing
from embens.estimators.choices import Options
from embens.estimators.heads import Classes, Head
from embens.estimators.pipeline import Encoding, Prepared, Tensors
from embens.estimators.tables import Table, from_frame, is_frame
from embens.files import refusing, write_atomically
from embens.training import randomness

BLOCK = 32_768
"""Rows that are read at a time."""
BUFFER = 8
"""Blocks among which rows are shuffled."""
CLASSES = 20
"""Whole numbers with at most so many values are taken for classes."""
FORMATS = {".parquet": "parquet", ".pq": "parquet", "": "parquet", ".csv": "csv"}
FORMATS |= {".arrow": "ipc", ".feather": "ipc"}


class Source:
    """Rows of files, or of an Arrow table, in blocks; a share is held out, by the seed."""

    def __init__(self, source: Any, target: Any, weight: str | None, *, seed: int, held: Any):
        self.dataset = open_dataset(source)
        self.name = source if isinstance(source, (str, os.PathLike)) else "the source"
        self.single, self.weight, self.seed = isinstance(target, str), weight, seed
        self.targets = [target] if isinstance(target, str) else list(target)
        names = self.dataset.schema.names
        others = [*self.targets, *([weight] if weight else [])]
        for name in others:
            check_column(name, names)
        self.columns = [name for name in names if name not in others]
        if not self.columns:
            raise ValueError("there is no column beside the target")
        self.fragments = []  # what can be read in any order: row groups where there are such
        with refusing(self.name):
            self.rows = self.dataset.count_rows()
            for fragment in self.dataset.get_fragments():
                split = getattr(fragment, "split_by_row_group", None)
                self.fragments += list(split()) if split else [fragment]
        if self.rows == 0:
            raise ValueError("the source has no rows")
        self.held = choices.given(held, min(0.2, choices.HELD_OUT / self.rows))
        self.looked = min(1.0, self.held + choices.LOOK / self.rows)

    def blocks(self, order: list[int] | None = None) -> Iterator[tuple[Any, Any]]:
        """Yield Arrow tables with a number from 0 to 1 for each row, always the same."""
        import pyarrow as pa

        for f in range(len(self.fragments)) if order is None else order:
            with refusing(self.name):
                schema, fragment = self.dataset.schema, self.fragments[f]
                for b, batch in enumerate(fragment.to_batches(schema=schema, batch_size=BLOCK)):
                    batch.validate(full=True)  # Arrow files are mapped as they are
                    if batch.num_rows:
                        seed = randomness.combine(self.seed, f, b)
                        generator = torch.Generator().manual_seed(seed)
                        draws = torch.rand(batch.num_rows, generator=generator).numpy()
                        yield pa.Table.from_batches([batch]), draws

    def parts(self, table: Any) -> tuple[Table, list[Any], Tensor]:
        weights = torch.ones(table.num_rows, dtype=torch.float64)
        if self.weight:
            weights = torch.tensor(to_numpy(table.column(self.weight)).astype("float64"))
        targets = [to_numpy(table.column(name)) for name in self.targets]
        return from_frame(table.select(self.columns)), targets, weights

    def held_out(self) -> Any:
        import pyarrow as pa

        parts = [table.filter(pa.array(draws < self.held)) for table, draws in self.blocks()]
        return pa.concat_tables(parts).combine_chunks()


def first_pass(source: Source, *, classify: bool) -> tuple[Any, Any, list[Any]]:
    """Go through all rows once; return those to learn from, those held out, and all classes."""
    import numpy as np
    import pyarrow as pa
    from pyarrow import compute

    pc: Any = compute
    samples, held = [], []
    classes: list[set] = [set() for _ in source.targets]
    for table, draws in source.blocks():
        for name, known in zip(source.targets, classes, strict=True):
            column = table.column(name)
            if column.null_count:
                raise ValueError(f"the target {name!r} has missing values; remove those rows")
            if classify:
                known.update(pc.unique(column).to_pylist())
            elif not np.isfinite(to_numpy(column).astype("float64")).all():
                raise ValueError(f"the target {name!r} is not finite everywhere; remove those rows")
        held.append(table.filter(pa.array(draws < source.held)))
        chosen = (draws >= source.held) & (draws < source.looked)
        samples.append(table.filter(pa.array(chosen)))
    tables = (pa.concat_tables(parts).combine_chunks() for parts in (samples, held))
    return *tables, [np.array(sorted(known)) for known in classes]


class Stream(IterableDataset):
    """Shuffled minibatches ``(numbers, codes, target)`` of the rows that are not held out."""

    def __init__(self, source: Source, encoding: Encoding, batch_size: int):
        self.source, self.encoding, self.batch_size = source, encoding, batch_size
        self.epoch = 0

    def __iter__(self) -> Iterator[Tensors]:
        import pyarrow as pa

        seed = randomness.combine(self.source.seed, self.epoch, 7)
        generator = torch.Generator().manual_seed(seed)
        self.epoch += 1
        order = torch.randperm(len(self.source.fragments), generator=generator).tolist()
        waiting: list[Tensors] = []
        for table, draws in self.source.blocks(order):
            mine = table.filter(pa.array(draws >= self.source.held))
            if mine.num_rows:
                waiting.append(self.encode(mine))
            if len(waiting) == BUFFER:
                waiting = yield from self._shuffled(waiting, generator, last=False)
        yield from self._shuffled(waiting, generator, last=True)

    def encode(self, table: Any) -> Tensors:
        columns, target, weights = self.source.parts(table)
        return self.encoding(columns, self.encoding.head.values(target), weights)

    def _shuffled(self, blocks: list[Tensors], generator: torch.Generator, *, last: bool) -> Any:
        """Yield minibatches of some blocks; return what is left over."""
        if not blocks:
            return []
        tensors = [torch.cat(parts) for parts in zip(*blocks, strict=True)]
        order = torch.randperm(len(tensors[0]), generator=generator)
        whole = len(order) if last else len(order) // self.batch_size * self.batch_size
        for index in order[:whole].split(self.batch_size):
            yield tuple(t.index_select(0, index) for t in tensors)
        rest = order[whole:]
        return [tuple(t.index_select(0, rest) for t in tensors)] if len(rest) else []


def prepare(source: Source, head: type[Head], options: Options) -> Prepared:
    """Learn from a part of the rows; see :func:`embens.estimators.pipeline.prepare`."""
    sample, held, classes = first_pass(source, classify=issubclass(head, Classes))
    learnt = head.learn(classes, single=source.single)
    learnt = replace(learnt, weighted=source.weight is not None)
    columns, target, weights = source.parts(sample)
    encoding = Encoding(
        preprocessing.learn(columns, options, weights),
        learnt.scaled(learnt.values(target), weights),
        mean_weight=float(weights.mean()),
    )
    rows = max(1, round(source.rows * (1 - source.held)))
    stream = Stream(source, encoding, choices.choose_sizes(rows, options).batch_size)
    stop = calibrate = None
    if held.num_rows:
        stop = stream.encode(held)
        if learnt.separate:
            stop, calibrate = (tuple(t[start::2] for t in stop) for start in (0, 1))
    few = stream.encode(sample.slice(0, 64))
    return Prepared(encoding, rows, DataLoader(stream, batch_size=None), few, stop, calibrate)


def open_dataset(source: Any) -> Any:
    """Return paths, a table or a dataset as pyarrow's dataset."""
    import pyarrow as pa
    import pyarrow.dataset as ds
    from pyarrow import csv

    if isinstance(source, (ds.Dataset, pa.Table)):
        return ds.dataset(source) if isinstance(source, pa.Table) else source
    if is_frame(source):
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
        nulls = csv.ConvertOptions(strings_can_be_null=True, quoted_strings_can_be_null=True)
        form = ds.CsvFileFormat(convert_options=nulls)
    with refusing(paths[0]):
        dataset = ds.dataset(paths if len(paths) > 1 else paths[0], format=form)
        _ = dataset.schema.names  # which may be no text
    return dataset


def to_numpy(column: Any) -> Any:
    """Return an Arrow column as an array."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return column.to_numpy()


def check_column(name: str, names: list[str]) -> None:
    """Raise where there is no such column."""
    if name not in names:
        raise ValueError(f"there is no column {name!r}{closest(name, names)}")


def read(path: Path) -> Any:
    """Return a file as an Arrow table."""
    dataset = open_dataset(path)
    with refusing(path):
        table = dataset.to_table()
        table.validate(full=True)
    if table.num_rows == 0:
        raise ValueError(f"{path.name} has no rows")
    return table


def split_target(table: Any, target: str) -> tuple[Any, Any, list[str]]:
    """Return columns and target without the rows whose target is missing, and what was done."""
    from pyarrow import compute, types

    pc: Any = compute
    check_column(target, table.schema.names)
    known = table.column(target).is_valid()
    if types.is_floating(table.column(target).type):
        known = pc.and_(known, pc.fill_null(pc.is_finite(table.column(target)), False))
    kept, notes = table.filter(known), []
    if kept.num_rows < table.num_rows:
        lost = table.num_rows - kept.num_rows
        notes.append(f"{lost} rows without a (finite) target are left out")
    if kept.num_rows < 10:
        raise ValueError(f"{kept.num_rows} rows have a target; at least 10 are needed")
    if kept.num_columns < 2:
        raise ValueError("there is no column beside the target")
    return kept.drop_columns([target]), kept.column(target), notes


def choose_task(column: Any, task: str) -> tuple[str, str]:
    """Return "classification" or "regression", and why."""
    from pyarrow import types

    kind, values, why = column.type, len(column.unique()), "as asked for"
    numbers = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    if task == "auto" and not numbers:
        task, why = "classification", f"the target's type is {kind}"
    elif task == "auto" and types.is_integer(kind) and values <= CLASSES:
        task, why = "classification", f"the target has {values} whole values"
    elif task == "auto":
        task, why = "regression", f"the target's type is {kind}, with {values} values"
    if task == "regression" and not numbers:
        raise ValueError(
            f"the target's type is {kind}: regression needs numbers. Pass --task classification, "
            "or another --target"
        )
    if values < 2:
        only = column[0].as_py()
        raise ValueError(f"the target is {only!r} in every row: there is nothing to learn")
    if task == "classification" and values > column.length() / 2:
        raise ValueError(
            f"the target has {values} classes in {column.length()} rows, which is hardly a class; "
            "pass --task regression for numbers, or another --target"
        )
    return task, why


def write(columns: dict[str, Any], path: Path) -> None:
    """Write columns as CSV, or as Parquet by the name."""
    import pandas

    suffix, frame = path.suffix.lower(), pandas.DataFrame(columns)
    if suffix in (".parquet", ".pq"):
        save: Any = partial(frame.to_parquet, index=False)
    else:  # pandas does not see the ending in the name of what is not whole yet
        compression = "gzip" if suffix == ".gz" else None
        save = partial(frame.to_csv, index=False, compression=compression)
    write_atomically(path, save)


def predictions(estimator: Any, table: Any, coverage: float) -> dict[str, Any]:
    """Return what an estimator says about each row, as columns."""
    from sklearn.base import is_classifier

    if is_classifier(estimator):
        chance = estimator.predict_proba(table)
        unsure = estimator.predict_uncertainty(table)
        columns = {"prediction": estimator.classes_[chance.argmax(1)]}
        columns |= {f"p_{c}": chance[:, k] for k, c in enumerate(estimator.classes_)}
        return columns | {"uncertainty": unsure.total, "epistemic": unsure.epistemic}
    mean, std = estimator.predict(table, return_std=True)
    columns = {"prediction": mean, "std": std}
    if estimator.scores_ is not None:
        lower, upper = estimator.predict_interval(table, coverage).T
        columns |= {"lower": lower, "upper": upper}
    return columns
