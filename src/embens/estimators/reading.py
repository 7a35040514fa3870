"""Read and write the tables of the command line: CSV, Parquet or Arrow files.

Whatever is wrong with a file is a ``ValueError`` that says what to do about it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from embens.checks import closest
from embens.estimators.files import open_dataset

CLASSES = 20
"""Whole numbers with at most so many values are taken for classes."""


def read(path: Path) -> Any:
    """Return a file as an Arrow table."""
    import pyarrow as pa

    try:
        table = open_dataset(path).to_table()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowKeyError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} can't be read: {reason}") from None
    if table.num_rows == 0:
        raise ValueError(f"{path.name} has no rows")
    return table


def check_column(name: str, names: list[str]) -> None:
    """Raise where there is no such column."""
    if name not in names:
        raise ValueError(f"there is no column {name!r}{closest(name, names)}")


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

    frame = pandas.DataFrame(columns)
    if path.suffix.lower() in (".parquet", ".pq"):
        frame.to_parquet(path, index=False)
    else:
        frame.to_csv(path, index=False)


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
