"""``embens fit``: from a file to a model, with scores on rows that it has not seen.

A part of the rows is set aside before anything is fitted; scores on it come with 95 % intervals by
resampling its rows.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from embens import estimators
from embens.estimators import choices, files, mixture, pipeline, regressor
from embens.files import refusing, write_atomically

if TYPE_CHECKING:
    import numpy as np

RESAMPLES = 400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``embens fit``."""
    parser.add_argument("data", type=Path, help="a CSV, Parquet or Arrow file")
    parser.add_argument("--target", required=True, help="the column to predict")
    parser.add_argument("--task", choices=("auto", "classification", "regression"), default="auto")
    parser.add_argument("--out", type=Path, default=Path("embens-fit"), help="folder for results")
    parser.add_argument("--family", choices=choices.FAMILIES, default="batch_ensemble")
    parser.add_argument("--members", type=int, default=None, help="how many (default: chosen)")
    parser.add_argument("--p", type=float, default=None, help="0: independent, 1: equal members")
    parser.add_argument("--categorical", nargs="*", default=None, help="names of such columns")
    parser.add_argument("--drop", nargs="*", default=[], help="columns to leave out")
    parser.add_argument("--epochs", type=int, default=None, help="at most (default: chosen)")
    parser.add_argument("--test-fraction", type=float, default=0.2, help="of rows to score with")
    parser.add_argument("--coverage", type=float, default=0.9, help="of prediction intervals")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=None)
    stream = "read the file in parts, for what memory can't hold"
    parser.add_argument("--stream", action="store_true", help=stream)
    parser.add_argument("--quiet", action="store_true", help="no progress")


def run(options: argparse.Namespace) -> int:
    """Run ``embens fit``; return its exit code."""
    if not 0 < options.test_fraction < 0.9:
        options.parser.error(f"--test-fraction lies between 0 and 0.9; got {options.test_fraction}")
    if not 0 < options.coverage < 1:
        options.parser.error(f"--coverage lies between 0 and 1; got {options.coverage}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)  # before anything is spent
        (fit_streaming if options.stream else fit_in_memory)(options)
    except (ValueError, TypeError, OSError) as error:
        options.parser.error(str(error))
    return 0


def make_estimator(options: argparse.Namespace, task: str) -> Any:
    """Return the estimator that the options ask for."""
    name = "Classifier" if task == "classification" else "Regressor"
    kind = getattr(estimators, f"EmbeddedEnsemble{name}")
    given = {"members": options.members, "p": options.p, "max_epochs": options.epochs}
    given |= {"categorical_features": options.categorical, "n_jobs": options.threads}
    given = {name: value for name, value in given.items() if value is not None}
    return kind(options.family, random_state=options.seed, verbose=1 - options.quiet, **given)


def fit_in_memory(options: argparse.Namespace) -> None:
    """Fit to a file as a whole."""
    table, target, notes = files.split_target(files.read(options.data), options.target)
    for name in options.drop:
        if name not in table.schema.names:
            raise ValueError(f"--drop: there is no column {name!r}")
    table = table.drop_columns(options.drop)
    task, why = files.choose_task(target, options.task)
    print(f"{table.num_rows} rows, {table.num_columns} columns; {task}: {why}")
    estimator = make_estimator(options, task)
    generator = torch.Generator().manual_seed(options.seed)
    order = torch.randperm(table.num_rows, generator=generator).numpy()
    count = max(1, round(options.test_fraction * table.num_rows))
    test, train = order[:count], order[count:]
    y = _values(target)
    estimator.fit(table.take(train), y[train])
    for note in [*notes, *estimator.preprocessing_.notes]:
        print(f"note: {note}")
    print(estimator.diagnosis_)
    finish(options, estimator, table.take(test), y[test], {"row": test})


def fit_streaming(options: argparse.Namespace) -> None:
    """Fit to a file in parts; the scores are those of the rows that the fit itself held out."""
    dataset = files.open_dataset(options.data)
    files.check_column(options.target, dataset.schema.names)
    with refusing(options.data):
        column = dataset.head(10_000, columns=[options.target]).column(0)
        rows = dataset.count_rows()
    task, why = files.choose_task(column, options.task)
    print(f"{rows} rows; {task}: {why}, judging by the first rows")
    estimator = make_estimator(options, task)
    estimator.fit_files(options.data, options.target)
    for note in estimator.preprocessing_.notes:
        print(f"note: {note}")
    seed = pipeline.draw_seed(options.seed)
    source = files.Source(options.data, options.target, None, seed=seed, held="auto")
    held = source.held_out()
    where = "rows that the fit held out, and stopped and calibrated by"
    table, y = held.select(source.columns), _values(held.column(options.target))
    finish(options, estimator, table, y, {}, where=where)


def finish(
    options: argparse.Namespace,
    estimator: Any,
    table: Any,
    y: np.ndarray,
    columns: dict[str, Any],
    where: str = "rows that were set aside",
) -> None:
    """Print the scores, and write model, scores and predictions."""
    columns |= {"target": y}
    scores = {}
    if len(y):
        columns |= files.predictions(estimator, table, options.coverage)
        scores = score(estimator, table, y, columns, options)
    width = max(map(len, scores), default=0)
    print(f"on {where} (95 % interval):" if scores else "too few rows to score with")
    for name, (value, low, high) in scores.items():
        print(f"  {name:<{width}}  {value:.4g}   {low:.4g} to {high:.4g}")
    estimator.save(options.out / "model.safetensors")
    write_atomically(options.out / "scores.json", json.dumps(scores, indent=1) + "\n")
    files.write(columns, options.out / "predictions.csv")
    print(f"wrote model.safetensors, scores.json, predictions.csv to {options.out}")


def score(
    estimator: Any, table: Any, y: np.ndarray, columns: dict[str, Any], options: argparse.Namespace
) -> dict[str, tuple[float, float, float]]:
    """Return scores with the ends of their intervals."""
    import numpy as np
    from sklearn.base import is_classifier

    if is_classifier(estimator):
        chance = np.stack([columns[f"p_{c}"] for c in estimator.classes_], 1)
        right = np.where(estimator.classes_ == y[:, None], chance, 0.0).sum(1)
        rows = {"accuracy": (columns["prediction"] == y).astype(float)}
        rows["log loss"] = -np.log(right.clip(1e-15))
    else:
        error = y - columns["prediction"]
        rows = {
            "RMSE": error**2,
            "MAE": np.abs(error),
            "NLL": -regressor.score_rows(mixture.log_density, estimator, table, y),
            "CRPS": regressor.score_rows(mixture.crps, estimator, table, y),
        }
        if "lower" in columns:
            name = f"coverage of {100 * options.coverage:g} % intervals"
            rows[name] = ((columns["lower"] <= y) & (y <= columns["upper"])).astype(float)
    generator = torch.Generator().manual_seed(options.seed)
    draws = [torch.randint(len(y), y.shape, generator=generator) for _ in range(RESAMPLES)]
    found = {}
    for name, values in rows.items():
        means = np.array([values.mean(), *(values[draw].mean() for draw in draws)])
        means = np.sqrt(means) if name == "RMSE" else means
        low, high = np.quantile(means[1:], [0.025, 0.975])
        found[name] = (float(means[0]), float(low), float(high))
    return found


def _values(column: Any) -> np.ndarray:
    import numpy as np
    import pyarrow as pa

    if pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    values = files.to_numpy(column)
    return np.array(values.tolist()) if values.dtype.kind == "O" else values
