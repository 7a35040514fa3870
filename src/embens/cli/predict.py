"""``embens predict``: what a fitted model says about the rows of a file.

The file is read and written in parts, so that neither need fit into memory. Rows keep their order,
and beside the predictions the columns that identify them.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from embens.cli.specification import share
from embens.estimators import files, load, pipeline, tables


def add_arguments(add: Callable[..., object]) -> None:
    """Add the options of ``embens predict``."""
    add("model", type=Path, help="model.safetensors, or the folder it is in")
    add("data", type=Path, help="a CSV, Parquet or Arrow file")
    add("--out", type=Path, default=Path("predictions.csv"), help="a CSV or Parquet file")
    add("--coverage", type=share, default=0.9, help="of prediction intervals and sets")
    add("--id", nargs="*", help="columns to keep (default: all that the model does not use)")


def run(options: argparse.Namespace) -> None:
    """Predict every row."""
    folder = options.model.is_dir()
    estimator = load(options.model / "model.safetensors" if folder else options.model)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    count = files.write(predict(options, estimator), options.out)
    if not files.has_scores(estimator, options.coverage):
        print("note: too few rows were held out for intervals or sets of this coverage")
    print(f"wrote {count} rows to {options.out}")


def predict(options: argparse.Namespace, estimator: Any) -> Iterator[dict[str, Any]]:
    """Yield the columns to keep and the predictions, a part of the file after another."""
    dataset, names = files.open_dataset(options.data), estimator.preprocessing_.names
    known, used, first = dataset.schema.names, set(names), 0
    files.check_columns(names, known, ", which the model needs")
    files.check_columns(options.id or (), known, ", which --id names")
    ids = [n for n in known if n not in used] if options.id is None else options.id
    texts = files.open_dataset(options.data, ids)
    parts, beside = (
        files.read(data, columns=columns, batch_size=pipeline.BLOCK)
        for data, columns in ((dataset, names), (texts, ids))
    )
    for part, kept in zip(parts, beside, strict=True):
        if part.num_rows != kept.num_rows:
            raise RuntimeError("the two readings of the file differ; did it change meanwhile?")
        tables.from_frame(part, first).check()
        columns = files.predictions(estimator, part, options.coverage)
        if options.id and {*ids} & {*columns}:
            raise ValueError(f"--id: predictions have the names {[*columns]}; rename the column")
        yield dict(zip(ids, kept.columns, strict=True)) | columns
        first += part.num_rows
    if not first:
        raise ValueError(f"{options.data.name} has no rows")
