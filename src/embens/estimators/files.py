"""Tables that don't fit into memory: minibatches from Parquet, Arrow or CSV files.

A source is read by pyarrow in blocks of rows. Which rows are held out, and which are looked at for
bins and categories, is decided by a number drawn for each row from the seed and the row's place
alone, so that every pass agrees without a list. Training reads the blocks in a new order in each
epoch and shuffles rows among the blocks of a buffer; memory is that of the buffer and of the rows
held out, however many rows there are, and the same for any number of members.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from embens.checks import closest
from embens.estimators import choices, fitting
from embens.estimators.tables import FrameTable, Table, from_frame, is_frame
from embens.training import randomness

if TYPE_CHECKING:
    from embens.estimators.base import TableEnsemble

BLOCK = 32_768
"""Rows that are read at a time."""
BUFFER = 8
"""Blocks among which rows are shuffled."""


class Source:
    """Rows of files, or of an Arrow table, in blocks.

    Args:
        source: a path, a list of paths, or a dataset or table of pyarrow.
        target: the name, or names, of the target's columns.
        weight: the name of a column of weights.
        seed: decides which rows are held out.
        held: the share of rows to hold out.
    """

    def __init__(
        self, source: Any, target: Any, weight: str | None, *, seed: int, held: float | None
    ):
        self.dataset = open_dataset(source)
        self.targets = [target] if isinstance(target, str) else list(target)
        self.single = isinstance(target, str)
        self.weight = weight
        names = self.dataset.schema.names
        for name in [*self.targets, *([weight] if weight else [])]:
            if name not in names:
                raise ValueError(f"there is no column {name!r}{closest(name, names)}")
        self.columns = [n for n in names if n not in self.targets and n != weight]
        if not self.columns:
            raise ValueError("there is no column beside the target")
        self.rows = self.dataset.count_rows()
        if self.rows == 0:
            raise ValueError("the source has no rows")
        self.seed = seed
        share = min(0.2, choices.HELD_OUT / self.rows) if held is None else held
        self.held = share
        self.looked = min(1.0, share + choices.LOOK / self.rows)
        self.fragments = _fragments(self.dataset)

    def blocks(self, order: list[int] | None = None) -> Iterator[tuple[Any, Tensor]]:
        """Yield Arrow tables with a number from 0 to 1 for each row, always the same."""
        import pyarrow as pa

        for f in range(len(self.fragments)) if order is None else order:
            batches = self.fragments[f].to_batches(schema=self.dataset.schema, batch_size=BLOCK)
            for b, batch in enumerate(batches):
                if batch.num_rows:
                    seed = randomness.combine(self.seed, f, b)
                    draws = torch.rand(
                        batch.num_rows, generator=torch.Generator().manual_seed(seed)
                    )
                    yield pa.Table.from_batches([batch]), draws

    def parts(self, table: Any) -> tuple[Table, Any, Tensor | None]:
        """Return the columns, the target and the weights of an Arrow table."""
        import numpy as np

        target = np.column_stack([_plain(table.column(n)) for n in self.targets])
        weights = None
        if self.weight:
            weights = torch.tensor(_plain(table.column(self.weight)).astype("float64"))
        return from_frame(table.select(self.columns)), target, weights


class Look(NamedTuple):
    """What the first pass brings along: rows to learn from, rows held out, all classes."""

    sample: Any
    held: Any
    classes: list[Any]


def first_pass(source: Source, classify: bool) -> Look:
    """Go through all rows once."""
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
            elif not np.isfinite(_plain(column).astype("float64")).all():
                raise ValueError(f"the target {name!r} is not finite everywhere; remove those rows")
        draws = draws.numpy()
        held.append(table.filter(pa.array(draws < source.held)))
        chosen = (draws >= source.held) & (draws < source.looked)
        samples.append(table.filter(pa.array(chosen)))
    return Look(
        pa.concat_tables(samples).combine_chunks(),
        pa.concat_tables(held).combine_chunks(),
        [np.array(sorted(known)) for known in classes] if classify else [],
    )


class Stream(IterableDataset):
    """Shuffled minibatches ``(numbers, codes, target)`` of the rows that are not held out."""

    def __init__(self, source: Source, estimator: TableEnsemble, head: Any, batch_size: int):
        self.source, self.estimator, self.head = source, estimator, head
        self.batch_size, self.epoch = batch_size, 0
        self.dtype = torch.float32
        self.mean_weight = 1.0

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        seed = randomness.combine(self.source.seed, self.epoch, 7)
        generator = torch.Generator().manual_seed(seed)
        self.epoch += 1
        order = torch.randperm(len(self.source.fragments), generator=generator).tolist()
        waiting: list[tuple[Tensor, ...]] = []
        for table, draws in self.source.blocks(order):
            import pyarrow as pa

            mine = table.filter(pa.array((draws >= self.source.held).numpy()))
            if mine.num_rows:
                waiting.append(self.encode(mine))
            if len(waiting) == BUFFER:
                waiting = yield from self._shuffled(waiting, generator, last=False)
        yield from self._shuffled(waiting, generator, last=True)

    def encode(self, table: Any) -> tuple[Tensor, ...]:
        """Return the tensors of an Arrow table."""
        columns, target, weights = self.source.parts(table)
        values = self.estimator._to_target(self.estimator._target_values(target))
        inputs = self.estimator.preprocessing_.encode(columns, self.dtype)
        weights = None if weights is None else weights / self.mean_weight
        return (*inputs, self.head.pack(values, weights, self.dtype))

    def _shuffled(self, blocks: list, generator: torch.Generator, *, last: bool) -> Any:
        """Yield minibatches of some blocks; return what is left over for the next ones."""
        if not blocks:
            return []
        tensors = [torch.cat(parts) for parts in zip(*blocks, strict=True)]
        order = torch.randperm(len(tensors[0]), generator=generator)
        whole = len(order) if last else len(order) // self.batch_size * self.batch_size
        for index in order[:whole].split(self.batch_size):
            yield tuple(t.index_select(0, index) for t in tensors)
        rest = order[whole:]
        return [tuple(t.index_select(0, rest) for t in tensors)] if len(rest) else []


def fit_files(estimator: TableEnsemble, source: Any, target: Any, weight: str | None) -> None:
    """Fit an estimator to files; see :meth:`embens.estimators.base.TableEnsemble.fit_files`."""
    from sklearn.base import is_classifier
    from sklearn.utils.validation import validate_data

    seed = fitting.draw_seed(estimator)
    rows = _open(estimator, source, target, weight, seed)
    look = first_pass(rows, is_classifier(estimator))
    columns, sample_target, weights = rows.parts(look.sample)
    assert isinstance(columns, FrameTable)
    validate_data(estimator, look.sample.select(rows.columns), skip_check_array=True)
    estimator._learn_classes(look.classes, single=rows.single)
    values = estimator._target_values(sample_target)
    fitting.learn_columns(estimator, columns, weights)
    estimator._scale_target(values, weights)
    head = estimator._make_head(weight is not None)
    sizes = estimator._sizes(max(1, round(rows.rows * (1 - rows.held))))
    stream = Stream(rows, estimator, head, sizes.batch_size)
    if weights is not None:
        stream.mean_weight = float(weights.mean())
    few = stream.encode(look.sample.slice(0, 64))
    fitting.build(estimator, head, sizes, stream.dtype, seed)
    fitting.diagnose(estimator, head, sizes, few, seed)
    stop = calibrate = held_values = None
    if look.held.num_rows:
        held = stream.encode(look.held)
        held_values = estimator._target_values(rows.parts(look.held)[1])
        half = estimator._separate_calibration
        stop = tuple(t[::2] if half else t for t in held)
        calibrate = tuple(t[1::2] for t in held) if half else None
    loader = DataLoader(stream, batch_size=None)
    fitting.run(estimator, head, sizes, loader, stop, seed)
    fitting.finish(
        estimator,
        head,
        stop,
        calibrate,
        None if held_values is None else held_values[:: 2 if calibrate else 1],
        None if held_values is None else held_values[1::2],
    )


def held_out_rows(estimator: TableEnsemble, source: Any, target: Any) -> tuple[Any, Any]:
    """Return the columns and the target that :func:`fit_files` held out, read again.

    Args:
        estimator: with a whole number as ``random_state``.
        source: as it was fitted to.
        target: the same.
    """
    import pyarrow as pa

    rows = _open(estimator, source, target, None, fitting.draw_seed(estimator))
    parts = [t.filter(pa.array((d < rows.held).numpy())) for t, d in rows.blocks()]
    table = pa.concat_tables(parts).combine_chunks()
    return table.select(rows.columns), table.column(rows.targets[0])


def _open(
    estimator: TableEnsemble, source: Any, target: Any, weight: str | None, seed: int
) -> Source:
    share = estimator.validation_fraction
    return Source(source, target, weight, seed=seed, held=None if share == "auto" else share)


def open_dataset(source: Any) -> Any:
    """Return paths, a table or a dataset as pyarrow's dataset."""
    import os

    import pyarrow as pa
    import pyarrow.dataset as ds

    if isinstance(source, ds.Dataset):
        return source
    if isinstance(source, pa.Table):
        return ds.dataset(source)
    if is_frame(source):
        raise TypeError("expected files, or a table of pyarrow; a data frame is for fit(X, y)")
    paths = [source] if isinstance(source, (str, os.PathLike)) else list(source)
    paths = [os.fspath(p) for p in paths]
    for path in paths:
        if not os.path.exists(path):
            raise FileNotFoundError(f"there is no file {path!r}")
    kinds = {os.path.splitext(p)[1].lower() for p in paths}
    known = {".parquet": "parquet", ".pq": "parquet", ".arrow": "ipc", ".feather": "ipc"}
    known |= {".csv": "csv", "": "parquet"}
    kind = kinds.pop() if len(kinds) == 1 else "several kinds"
    if kind not in known:
        raise ValueError(f"expected files of one kind, .parquet, .arrow or .csv; got {kind}")
    form: Any = known[kind]
    if form == "csv":
        from pyarrow import csv

        options = csv.ConvertOptions(strings_can_be_null=True, quoted_strings_can_be_null=True)
        form = ds.CsvFileFormat(convert_options=options)
    return ds.dataset(paths if len(paths) > 1 else paths[0], format=form)


def _fragments(dataset: Any) -> list[Any]:
    """Return the parts that can be read in any order: row groups where there are such."""
    found = []
    for fragment in dataset.get_fragments():
        split = getattr(fragment, "split_by_row_group", None)
        found += list(split()) if split else [fragment]
    return found


def _plain(column: Any) -> Any:
    """Return an Arrow column as numpy's."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return column.to_numpy()
