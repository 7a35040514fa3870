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
from embens.cli.specification import share
from embens.estimators import choices, files, mixture, pipeline, regressor, tables
from embens.files import write_atomically

if TYPE_CHECKING:
    import numpy as np

RESAMPLES = 400
ENOUGH = 10_000  # distinct values of a target that are looked at


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``embens fit``."""
    add = parser.add_argument
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


def run(options: argparse.Namespace) -> int:
    """Run ``embens fit``; return its exit code."""
    options.say = (lambda *text: None) if options.quiet else print
    options.out.mkdir(parents=True, exist_ok=True)  # before anything is spent
    dataset = files.open_dataset(options.data)
    ids, apart = set_apart(options, dataset.schema.names)
    given = {"ignore": apart, "seed": pipeline.draw_seed(options.seed), "held": "auto"}
    source, texts = (
        files.Source(data, options.target, **given)
        for data in (dataset, files.open_dataset(options.data, ids))
    )
    kind, values = dataset.schema.field(options.target).type, {}
    if not files.is_number(kind) and not files.is_label(kind):
        raise ValueError(f"the target's type is {kind}; expected numbers, text or truth values")
    for part in files.read(dataset, options.data, columns=[options.target]):
        found = part.column(0).unique().to_pylist()
        values |= dict.fromkeys(v for v in found if not tables.is_missing(v))
        if len(values) > ENOUGH:
            break
    task, why = files.choose_task(kind, [*values], source.rows, options.task)
    options.say(f"{source.rows} rows, {len(source.columns)} columns; {task}: {why}")
    estimator = make_estimator(options, task, kind)
    if options.stream:
        estimator.fit_files(dataset, options.target, ignore=apart)
        held, kept, columns = source.held_out(), texts.held_out().select(ids), {}
        where = "rows that the fit held out, and stopped and calibrated by"
    else:
        test = fit_in_memory(options, source, estimator)
        held, kept = (s.dataset.take(test) for s in (source, texts))
        columns, where = {"row": test}, "rows that were set aside"
    columns |= dict(zip(ids, kept.select(ids).columns, strict=True))
    y = files.to_numpy(held.column(options.target))
    finish(options, estimator, held.select(source.columns), y, columns, where)
    return 0


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
    import pyarrow as pa

    if given is None or given == ["balanced"]:
        return given and "balanced"
    try:
        pairs = {text.rpartition("=")[0]: float(text.rpartition("=")[2]) for text in given}
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        return dict(zip(pa.array(pairs).cast(kind).to_pylist(), pairs.values(), strict=True))
    except ValueError as error:
        expected = "'balanced', or CLASS=NUMBER for each class"
        raise ValueError(f"--class-weight: expected {expected}; got {given}: {error}") from None


def fit_in_memory(options: argparse.Namespace, source: files.Source, estimator: Any) -> Any:
    """Fit to rows that have a target, but for some to score with; return these rows' numbers."""
    import numpy as np
    import pyarrow as pa
    from pyarrow import compute, types
    from sklearn.base import is_classifier

    pc: Any = compute
    table = pa.concat_tables(files.read(source.dataset, options.data))
    tables.from_frame(table.select(source.columns)).check()
    column = table.column(options.target)
    known = column.is_valid()
    if types.is_floating(column.type):
        known = pc.and_(known, pc.fill_null(pc.is_finite(column), False))
    rows = np.flatnonzero(known)
    if len(rows) < 10:
        raise ValueError(f"{len(rows)} rows have a target; at least 10 are needed")
    if lost := table.num_rows - len(rows):
        options.say(f"note: {lost} rows without a (finite) target are left out")
    y, groups = files.to_numpy(column.take(rows)), None
    if is_classifier(estimator):
        groups = torch.from_numpy(np.unique(y, return_inverse=True)[1])
    generator = torch.Generator().manual_seed(options.seed)
    train, test, _ = choices.split(
        len(rows), options.test_fraction, groups=groups, generator=generator
    )
    train, test = train.numpy(), test.numpy()
    estimator.fit(table.select(source.columns).take(rows[train]), y[train])
    return rows[test]


def finish(
    options: argparse.Namespace,
    estimator: Any,
    table: Any,
    y: np.ndarray,
    columns: dict[str, Any],
    where: str,
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
    width = max(map(len, scores), default=0)
    options.say(f"on {where} (95 % interval):" if scores else "too few rows to score with")
    for name, (value, low, high) in scores.items():
        options.say(f"  {name:<{width}}  {value:.4g}   {low:.4g} to {high:.4g}")
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
    import numpy as np
    from sklearn.base import is_classifier

    if is_classifier(estimator):
        chance = np.stack([columns[f"p_{c}"] for c in estimator.classes_], 1)
        right = np.where(estimator.classes_ == y[:, None], chance, 0.0).sum(1)
        rows = {"accuracy": (columns["prediction"] == y).astype(float)}
        rows["log loss"] = -np.log(right.clip(1e-15))
        if "set" in columns:
            inside = [
                str(c) in found.split("|") for c, found in zip(y, columns["set"], strict=True)
            ]
            rows[f"coverage of {100 * options.coverage:g} % sets"] = np.array(inside, dtype=float)
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
