"""``embens fit``: from a file to a model, with scores on rows that it has not seen.

A part of the rows is set aside before anything is fitted; scores on it come with 95 % intervals by
resampling its rows.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import compute, types
from sklearn.base import is_classifier

from embens import estimators
from embens.cli.specification import share
from embens.estimators import choices, files, gaussians, regressor, tables
from embens.files import write_atomically

RESAMPLES = 400
CLASSES = 20  # whole numbers with at most so many values are taken for classes
BLOCK = 65_536  # rows that are copied at a time


def add_arguments(add: Callable[..., object]) -> None:
    """Add the options of ``embens fit``."""
    add("data", type=Path, help="a CSV, Parquet or Arrow file")
    add("--target", required=True, help="the column to predict")
    add("--task", choices=("auto", "classification", "regression"), default="auto")
    add("--out", type=Path, default=Path("embens-fit"), help="folder for results")
    add("--family", choices=choices.FAMILIES, default="batch_ensemble")
    add("--members", type=int, help="how many (default: 16)")
    add("--p", type=float, help="0: independent, 1: equal members")
    add("--categorical", nargs="*", help="names of such columns")
    add("--drop", nargs="*", default=[], help="columns to leave out")
    add("--epochs", type=int, help="at most (default: chosen)")
    add("--test-fraction", type=share, default=0.2, help="of rows to score with")
    add("--coverage", type=share, default=0.9, help="of prediction intervals")
    add("--seed", type=int, default=0)
    add("--threads", type=int)
    add("--id", help="a column that identifies rows, no feature (default: id)")
    add("--class-weight", nargs="+", help="balanced, or CLASS=NUMBER for each class")
    add("--loss", choices=choices.CHOICES["loss"], help="of a regression (default: quantile)")
    transforms = choices.CHOICES["target_transform"]
    add("--transform", choices=transforms, help="of a regression's target (default: auto)")
    add("--time-limit", type=float, help="seconds for the fit (default: none)")
    add("--no-tune", dest="tune", action="store_false", help="no race for dropout and weight decay")
    add("--refit", action="store_true", help="at the end, fit the rows that were held out too")
    add("--importances", action="store_true", help="of columns, by shuffling; takes a while")
    add("--stream", action="store_true", help="read the file in parts, for what memory can't hold")
    add("--quiet", action="store_true", help="print nothing but errors")


def run(options: argparse.Namespace) -> None:
    """Run ``embens fit``."""
    pc: Any = compute
    options.say = (lambda *text: None) if options.quiet else print
    options.out.mkdir(parents=True, exist_ok=True)  # before anything is spent
    dataset = files.open_dataset(options.data)
    ids, apart = set_apart(options, dataset.schema.names)
    columns = files.features(dataset.schema.names, [options.target, *apart])
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        folder = place if options.stream else None
        table = files.gather(files.read(dataset, columns=[*columns, options.target]), folder)
        column, features = table.column(options.target), table.select(columns)
        floating = pa.types.is_floating(column.type)
        known = pc.fill_null(pc.is_finite(column), False) if floating else column.is_valid()
        rows = np.flatnonzero(known)
        y = files.to_numpy(column.take(rows))
        values, codes = np.unique(y, return_inverse=True)
        task, why = choose_task(column.type, values.tolist(), table.num_rows, options.task)
        options.say(f"{table.num_rows} rows, {len(columns)} columns; {task}: {why}")
        estimator = make_estimator(options, task, column.type)
        tables.from_frame(features).check()
        if len(rows) < 10:
            raise ValueError(f"{len(rows)} rows have a target; at least 10 are needed")
        if lost := table.num_rows - len(rows):
            options.say(f"note: {lost} rows without a (finite) target are left out")
        generator = torch.Generator().manual_seed(options.seed)
        groups = torch.from_numpy(codes) if task == "classification" else None
        split = choices.split(len(rows), options.test_fraction, groups=groups, generator=generator)
        train, test = split.train.numpy(), split.stop.numpy()
        if folder is None:
            estimator.fit(features.take(rows[train]), y[train])
        else:
            blocks = np.split(rows[train], range(BLOCK, len(train), BLOCK))
            estimator.fit_files(files.gather(map(table.take, blocks), folder), options.target)
        kept = files.open_dataset(options.data, ids).to_table(columns=ids).take(rows[test])
        beside = {"row": rows[test], **dict(zip(ids, kept.columns, strict=True))}
        finish(options, estimator, features.take(rows[test]), y[test], beside)


def set_apart(options: argparse.Namespace, names: list[str]) -> tuple[list[str], list[str]]:
    """Return the column of row ids, if there is one, and all columns that are no features."""
    files.check_columns([options.target], names)
    others = [name for name in names if name != options.target]
    files.check_columns(options.drop, others, ", which --drop names")
    files.check_columns([options.id] * bool(options.id), others, ", which --id names")
    kept = {options.target, *options.drop, *(options.categorical or ())}
    usual = [name for name in names if name.lower() == "id" and name not in kept][:1]
    if options.id is None and usual:
        options.say(f"note: column {usual[0]!r} identifies rows and is no feature; see --id")
    ids = usual if options.id is None else [options.id] * bool(options.id)
    return ids, [*dict.fromkeys((*options.drop, *ids))]


def make_estimator(options: argparse.Namespace, task: str, kind: Any) -> Any:
    """Return the estimator that the options ask for; ``kind`` is Arrow's type of the target."""
    name = "Classifier" if task == "classification" else "Regressor"
    given = {"members": options.members, "p": options.p, "max_epochs": options.epochs}
    given |= {"time_limit": options.time_limit, "tune": options.tune, "refit": options.refit}
    given |= {"loss": options.loss, "target_transform": options.transform}
    given |= {"categorical_features": options.categorical, "n_jobs": options.threads}
    given |= {"class_weight": class_weight(options.class_weight, kind)}
    given = {name: value for name, value in given.items() if value is not None}
    if task == "regression" and "class_weight" in given:
        raise ValueError("--class-weight is for classification, and this is a regression")
    if task == "classification" and {"loss", "target_transform"} & {*given}:
        raise ValueError("--loss and --transform are for regression; this is a classification")
    make = getattr(estimators, f"EmbeddedEnsemble{name}")
    return make(options.family, random_state=options.seed, verbose=1 - options.quiet, **given)


def class_weight(given: list[str] | None, kind: Any) -> Any:
    """Return "balanced", or a weight for each class as the target's type writes it."""
    if given is None or given == ["balanced"]:
        return given and "balanced"
    try:
        pairs = {text.rpartition("=")[0]: float(text.rpartition("=")[2]) for text in given}
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        return dict(zip(pa.array(pairs).cast(kind).to_pylist(), pairs.values(), strict=True))
    except ValueError as error:
        expected = "'balanced', or CLASS=NUMBER for each class"
        raise ValueError(f"--class-weight: expected {expected}; got {given}: {error}") from None


def choose_task(kind: Any, values: Sequence[Any], rows: int, task: str) -> tuple[str, str]:
    """Return "classification" or "regression", and why, by the type and values of a target."""
    number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    if not number and (types.is_temporal(kind) or types.is_nested(kind) or types.is_binary(kind)):
        raise ValueError(f"the target's type is {kind}; expected numbers, text or truth values")
    why = "as asked for"
    if task == "auto":
        few = types.is_integer(kind) and len(values) <= CLASSES
        task = "regression" if number and not few else "classification"
        why = f"the target's type is {kind}, with {len(values)} values"
    if task == "regression" and not number:
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


def finish(
    options: argparse.Namespace, estimator: Any, table: Any, y: np.ndarray, columns: dict[str, Any]
) -> None:
    """Say what was found, and the scores; write model, scores and predictions."""
    for note in estimator.preprocessing_.notes:
        options.say(f"note: {note}")
    columns |= {"target": y}
    scores = {}
    if len(y):
        columns |= files.predictions(estimator, table, options.coverage)
        if "lower" not in columns and "set" not in columns:
            options.say("note: too few rows were held out for intervals or sets of this coverage")
        scores = score(estimator, table, y, columns, options)
    aside = "on rows that were set aside (95 % interval):"
    options.say(aside if scores else "too few rows to score with")
    for name, (value, low, high) in scores.items():
        options.say(f"  {name:<{max(map(len, scores))}}  {value:.4g}   {low:.4g} to {high:.4g}")
    if options.importances and len(y):
        found = estimator.importances(table, y)
        options.say(found[:10].to_string(float_format="{:.4g}".format))
        write_atomically(options.out / "importances.csv", found.to_csv())
    estimator.save(options.out / "model.safetensors")
    estimator.model_card(options.out / "card.md")
    write_atomically(options.out / "scores.json", json.dumps(scores, indent=1) + "\n")
    files.write([columns], options.out / "predictions.csv")
    options.say(f"wrote model.safetensors, card.md, scores.json, predictions.csv to {options.out}")


def score(
    estimator: Any, table: Any, y: np.ndarray, columns: dict[str, Any], options: argparse.Namespace
) -> dict[str, tuple[float, float, float]]:
    """Return scores with the ends of their intervals."""
    coverage = f"coverage of {100 * options.coverage:g} %"
    if is_classifier(estimator):
        chance = np.stack([columns[f"p_{c}"] for c in estimator.classes_], 1)
        right = np.where(estimator.classes_ == y[:, None], chance, 0.0).sum(1)
        rows = {"accuracy": columns["prediction"] == y, "log loss": -np.log(right.clip(1e-15))}
        if "set" in columns:
            sets = zip(y, columns["set"], strict=True)
            rows[f"{coverage} sets"] = np.array([str(c) in found.split("|") for c, found in sets])
    else:
        error = y - columns["prediction"]
        rows = {
            "RMSE": error**2,
            "MAE": np.abs(error),
            "NLL": -regressor.score_rows(gaussians.log_density, estimator, table, y),
            "CRPS": regressor.score_rows(gaussians.crps, estimator, table, y),
        }
        if "lower" in columns:
            rows[f"{coverage} intervals"] = (columns["lower"] <= y) & (y <= columns["upper"])
    generator = torch.Generator().manual_seed(options.seed)
    draws = [torch.randint(len(y), y.shape, generator=generator) for _ in range(RESAMPLES)]
    found = {}
    for name, values in rows.items():
        means = np.array([values.mean(), *(values[draw].mean() for draw in draws)])
        means = np.sqrt(means) if name == "RMSE" else means
        low, high = np.quantile(means[1:], [0.025, 0.975])
        found[name] = (float(means[0]), float(low), float(high))
    return found
