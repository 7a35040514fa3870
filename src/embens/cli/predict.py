"""``embens predict``: what a fitted model says about the rows of a file.

The file is read and written in parts, so that neither need fit into memory. Rows keep their order,
and beside the predictions the columns that identify them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

from embens.checks import closest
from embens.estimators import files, load, tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``embens predict``."""
    parser.add_argument("model", type=Path, help="model.safetensors, or the folder it is in")
    parser.add_argument("data", type=Path, help="a CSV, Parquet or Arrow file")
    out = Path("predictions.csv")
    parser.add_argument("--out", type=Path, default=out, help="a CSV or Parquet file")
    parser.add_argument("--coverage", type=float, default=0.9, help="of prediction intervals")
    ids = "columns to keep beside the predictions (default: all that the model does not use)"
    parser.add_argument("--id", nargs="*", help=ids)


def run(options: argparse.Namespace) -> int:
    """Predict every row."""
    import pyarrow as pa

    if not 0 < options.coverage < 1:
        options.parser.error(f"--coverage lies between 0 and 1; got {options.coverage}")
    try:
        folder = options.model.is_dir()
        estimator = load(options.model / "model.safetensors" if folder else options.model)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        count = files.write(predict(options, estimator), options.out)
        print(f"wrote {count} rows to {options.out}")
    except pa.ArrowException as error:
        options.parser.error(f"{options.data} can't be read: {str(error).splitlines()[0]}")
    except (ValueError, TypeError, OSError) as error:
        options.parser.error(str(error))
    return 0


def predict(options: argparse.Namespace, estimator: Any) -> Iterator[dict[str, Any]]:
    """Yield the columns to keep and the predictions, a part of the file after another."""
    names, known = estimator.preprocessing_.names, files.open_dataset(options.data).schema.names
    used, there = set(names), set(known)
    for name in names:
        if name not in there:
            raise ValueError(
                f"{options.data.name} has no column {name!r}, which the model needs"
                f"{closest(name, known)}"
            )
    for name in options.id or ():
        files.check_column(name, known, "--id: ")
    ids = [n for n in known if n not in used] if options.id is None else options.id
    beside = files.tables(options.data, ids, text=True) if ids else repeat(None)
    first = 0
    for part, rows in zip(files.tables(options.data, names), beside, strict=bool(ids)):
        tables.from_frame(part, first).check()
        columns = files.predictions(estimator, part, options.coverage)
        kept = {} if rows is None else files.plain(rows)
        if options.id and {*kept} & {*columns}:
            raise ValueError(f"--id: predictions have the names {[*columns]}; rename the column")
        yield {name: kept[name] for name in kept if name not in columns} | columns
        first += part.num_rows
    if not first:
        raise ValueError(f"{options.data.name} has no rows")
