"""``embens predict``: what a fitted model says about the rows of a file."""

from __future__ import annotations

import argparse
from pathlib import Path

from embens.checks import closest
from embens.estimators import files, load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``embens predict``."""
    parser.add_argument("model", type=Path, help="model.safetensors, or the folder it is in")
    parser.add_argument("data", type=Path, help="a CSV, Parquet or Arrow file")
    out = Path("predictions.csv")
    parser.add_argument("--out", type=Path, default=out, help="a CSV or Parquet file")
    parser.add_argument("--coverage", type=float, default=0.9, help="of prediction intervals")


def run(options: argparse.Namespace) -> int:
    """Predict every row; columns that the model does not know are left alone."""
    if not 0 < options.coverage < 1:
        options.parser.error(f"--coverage lies between 0 and 1; got {options.coverage}")
    try:
        folder = options.model.is_dir()
        estimator = load(options.model / "model.safetensors" if folder else options.model)
        table, names = files.read(options.data), estimator.preprocessing_.names
        for name in names:
            if name not in (known := table.schema.names):
                raise ValueError(
                    f"{options.data.name} has no column {name!r}, which the model needs"
                    f"{closest(name, known)}"
                )
        columns = files.predictions(estimator, table.select(names), options.coverage)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        files.write(columns, options.out)
        print(f"wrote {table.num_rows} rows to {options.out}")
    except (ValueError, TypeError, OSError) as error:
        options.parser.error(str(error))
    return 0
