"""Tables in Parquet, Arrow or CSV files: minibatches of what memory can't hold, or all at once.

A source is read in blocks of rows. Which rows are held out, and which are looked at for bins and
categories, is decided by a number drawn for each row from the seed and its place, so that every
pass agrees. Training reads the blocks in a new order in each epoch and shuffles rows among those of
a buffer; memory is that of the buffer and of the rows held out, however many rows there are.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
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
from embens.estimators.tables import Table, from_frame, is_frame, place, read_target
from embens.files import refusing, write_atomically
from embens.training import randomness
from embens.uncertainty import least_rows

BLOCK = 32_768  # rows that are read at a time
BUFFER = 8  # blocks among which rows are shuffled
CLASSES = 20  # whole numbers with at most so many values are taken for classes
FORMATS = {".parquet": "parquet", ".pq": "parquet", "": "parquet", ".csv": "csv"}
FORMATS |= {".arrow": "ipc", ".feather": "ipc"}


class Source:
    """Rows of files, or of an Arrow table, in blocks; a share is held out, by the seed."""

    def __init__(
        self,
        source: Any,
        target: Any,
        weight: str | None = None,
        *,
        ignore: Sequence[str] = (),
        seed: int,
        held: Any,
    ):
        self.dataset = open_dataset(source)
        self.name = source if isinstance(source, (str, os.PathLike)) else "the source"
        self.single, self.weight, self.seed = isinstance(target, str), weight, seed
        self.targets = [target] if isinstance(target, str) else list(target)
        self.class_weights: list[Any] = []  # of each target, with the classes, once these are known
        names = self.dataset.schema.names
        special = [*self.targets, *([weight] if weight else [])]
        check_columns((*special, *ignore), names)
        if not self.targets or len({*special, *ignore}) < len(special) + len({*ignore}):
            raise ValueError(
                f"expected targets, a weight and columns to ignore that differ from each other; "
                f"got {target!r}, {weight!r} and {list(ignore)}"
            )
        self.columns = [name for name in names if name not in {*special, *ignore}]
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
        usual = 0.0 if self.rows < choices.TINY else min(0.2, choices.HELD_OUT / self.rows)
        self.held = choices.given(held, usual)
        self.looked = min(1.0, self.held + choices.LOOK / self.rows)

    def blocks(self, order: list[int] | None = None) -> Iterator[tuple[Any, Any]]:
        """Yield Arrow tables with a number from 0 to 1 for each row, always the same."""
        for f in range(len(self.fragments)) if order is None else order:
            parts = read(self.fragments[f], self.name, schema=self.dataset.schema, batch_size=BLOCK)
            for b, table in enumerate(parts):
                generator = torch.Generator().manual_seed(randomness.combine(self.seed, f, b))
                yield table, torch.rand(table.num_rows, generator=generator).numpy()

    def parts(self, table: Any, first: int = 0) -> tuple[Table, list[Any], Tensor]:
        """Return columns, targets and weights of a part that begins with a row of that number."""
        import numpy as np

        weights = torch.ones(table.num_rows, dtype=torch.float64)
        if self.weight:
            weights = torch.from_numpy(to_numpy(table.column(self.weight)).astype("float64"))
        targets = [to_numpy(table.column(name)) for name in self.targets]
        for (classes, factors), target in zip(self.class_weights, targets, strict=False):
            weights *= torch.from_numpy(factors[np.searchsorted(classes, target)])
        return from_frame(table.select(self.columns), first), targets, weights

    def held_out(self) -> Any:
        import pyarrow as pa

        parts = [table.filter(pa.array(draws < self.held)) for table, draws in self.blocks()]
        return pa.concat_tables(parts).combine_chunks()


def first_pass(source: Source, class_weight: Any = None, *, classify: bool) -> tuple[Any, ...]:
    """Go through all rows once, and check them before anything is spent.

    Return those to learn from, those held out, the folds of the former, and all classes, whose
    weights the source keeps.
    """
    import numpy as np
    import pyarrow as pa
    from sklearn.utils.class_weight import compute_class_weight

    for name in ([] if classify else source.targets) + [source.weight] * bool(source.weight):
        kind = source.dataset.schema.field(name).type
        if not is_number(kind):
            raise ValueError(f"column {name!r}: expected numbers; its type is {kind}")
    samples, held, folds, first = [], [], [], 0
    counts: list[Counter] = [Counter() for _ in source.targets]
    for table, draws in source.blocks():
        columns, targets, weights = source.parts(table, first)
        columns.check()
        if len(wrong := np.flatnonzero(~((weights >= 0) & weights.isfinite()))):
            raise ValueError(f"a weight is not ≥ 0 in {place(wrong, source.weight, first)}")
        for name, target, known in zip(source.targets, targets, counts, strict=True):
            read_target(target, name, first)
            if classify:
                known.update(dict(zip(*np.unique(target, return_counts=True), strict=True)))
        held.append(table.filter(pa.array(draws < source.held)))
        chosen = (draws >= source.held) & (draws < source.looked)
        samples.append(table.filter(pa.array(chosen)))
        folds.append(folds_of(draws[chosen]))
        first += table.num_rows
    classes = [np.array(sorted(known)) for known in counts]
    if class_weight == "balanced":
        class_weight = [{c: first / (len(known) * known[c]) for c in known} for known in counts]
    if class_weight is not None:
        given = [class_weight] if isinstance(class_weight, dict) else class_weight
        source.class_weights = [
            (labels, compute_class_weight(weights, classes=labels, y=labels))
            for labels, weights in zip(classes, given, strict=True)
        ]
    tables = (pa.concat_tables(parts).combine_chunks() for parts in (samples, held))
    return *tables, torch.cat(folds), classes


def folds_of(draws: Any) -> Tensor:
    """Return the folds of rows, for the statistics of categories, by the rows' numbers."""
    return torch.from_numpy((draws * 2**20).astype("int64") % preprocessing.FOLDS)


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
            mine = draws >= self.source.held
            if mine.any():
                waiting.append(self.encode(table.filter(pa.array(mine)), folds_of(draws[mine])))
            if len(waiting) == BUFFER:
                waiting = yield from self._shuffled(waiting, generator, last=False)
        yield from self._shuffled(waiting, generator, last=True)

    def encode(self, table: Any, folds: Tensor | None = None) -> Tensors:
        columns, target, weights = self.source.parts(table)
        return self.encoding(columns, self.encoding.head.values(target), weights, folds=folds)

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
    weighing, classify = options.class_weight, issubclass(head, Classes)
    sample, held, folds, classes = first_pass(source, weighing, classify=classify)
    if not sample.num_rows:
        raise ValueError(
            f"validation_fraction={source.held} of {source.rows} rows leaves none to train on"
        )
    learnt = head.learn(classes, single=source.single).configured(options)
    learnt = replace(learnt, weighted=source.weight is not None or weighing is not None)
    columns, target, weights = source.parts(sample)
    learnt = learnt.scaled(values := learnt.values(target), weights)
    known = preprocessing.learn(columns, options, weights, learnt.numbers(values), folds)
    encoding = Encoding(known, learnt, mean_weight=float(weights.mean()))
    rows = max(1, round(source.rows * (1 - source.held)))
    stream = Stream(source, encoding, choices.choose_sizes(rows, options).batch_size)
    stop = calibrate = None
    if held.num_rows:
        tensors = stream.encode(held)
        mine = torch.arange(held.num_rows) % learnt.apart == learnt.apart - 1
        stop, calibrate = (tuple(t[part] for t in tensors) for part in (~mine, mine))
    return Prepared(encoding, rows, DataLoader(stream, batch_size=None), stop, calibrate)


def open_dataset(source: Any, text: Sequence[str] = ()) -> Any:
    """Return paths, a table or a dataset as pyarrow's dataset.

    With names in ``text`` the fields of a CSV file are not interpreted: those columns are as they
    are written, and others are not to be looked at.
    """
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


def read(dataset: Any, name: Any, **options: Any) -> Iterator[Any]:
    """Yield the batches of a dataset, or of a fragment of one, that have rows, as tables."""
    import pyarrow as pa

    with refusing(name):
        for batch in dataset.to_batches(**options):
            batch.validate(full=True)  # Arrow files are mapped as they are
            if batch.num_rows:
                yield pa.Table.from_batches([batch])


def to_numpy(column: Any) -> Any:
    """Return an Arrow column as an array, decimals as float64 and text as text."""
    import numpy as np
    import pyarrow as pa

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


def is_number(kind: Any) -> bool:
    """Return whether numbers are of this type of Arrow's."""
    from pyarrow import types

    return types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)


def is_label(kind: Any) -> bool:
    """Return whether a type of Arrow's is text, truth values, categories, or nothing known."""
    from pyarrow import types

    text = types.is_string(kind) or types.is_large_string(kind) or types.is_dictionary(kind)
    return text or types.is_boolean(kind) or types.is_null(kind)


def choose_task(kind: Any, values: Sequence[Any], rows: int, task: str) -> tuple[str, str]:
    """Return "classification" or "regression", and why, by the type and values of a target."""
    from pyarrow import types

    why = "as asked for"
    if task == "auto":
        few = types.is_integer(kind) and len(values) <= CLASSES
        task = "regression" if is_number(kind) and not few else "classification"
        why = f"the target's type is {kind}, with {len(values)} values"
    if task == "regression" and not is_number(kind):
        raise ValueError(
            f"the target's type is {kind}: regression needs numbers. Pass --task classification, "
            "or another --target"
        )
    if len(values) < 2:
        only = repr(values[0]) if values else "missing"
        raise ValueError(f"the target is {only} in every row: there is nothing to learn")
    if task == "classification" and len(values) > rows / 2:
        raise ValueError(
            f"the target has {len(values)} classes in {rows} rows, which is hardly a class; "
            "pass --task regression for numbers, or another --target"
        )
    return task, why


def write(parts: Iterable[dict[str, Any]], path: Path) -> int:
    """Write columns, part after part, as CSV, or as Parquet by the name; return their rows."""
    import pyarrow as pa
    from pyarrow import csv, parquet

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
    from sklearn.base import is_classifier

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
