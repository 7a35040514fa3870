"""Read and write the tables of the command line: CSV, Parquet or Arrow files, by pyarrow.

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
    except FileNotFoundError:
        raise ValueError(f"there is no file {str(path)!r}") from None
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowKeyError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} can't be read: {reason}") from None
    names = table.schema.names
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise ValueError(f"{path.name} has several columns {', '.join(twice[:5])}; rename them")
    if table.num_rows == 0:
        raise ValueError(f"{path.name} has no rows")
    return table


def split_target(table: Any, target: str) -> tuple[Any, Any, list[str]]:
    """Return columns and target without the rows whose target is missing, and what was done."""
    from pyarrow import compute

    pc: Any = compute

    if target not in table.schema.names:
        raise ValueError(f"there is no column {target!r}{closest(target, table.schema.names)}")
    column = table.column(target)
    known = pc.is_valid(column)
    notes = []
    if str(column.type) in ("float", "double"):
        known = pc.and_(known, pc.fill_null(pc.is_finite(column), False))
    lost = table.num_rows - (pc.sum(known).as_py() or 0)
    if lost:
        notes.append(f"{lost} rows without a (finite) target are left out")
        table = table.filter(known)
    if table.num_rows < 10:
        raise ValueError(f"{table.num_rows} rows have a target; at least 10 are needed")
    if len(table.schema.names) < 2:
        raise ValueError("there is no column beside the target")
    return table.drop_columns([target]), table.column(target), notes


def choose_task(column: Any, task: str) -> tuple[str, str]:
    """Return "classification" or "regression", and why."""
    import pyarrow as pa
    from pyarrow import compute

    pc: Any = compute

    values = len(pc.unique(column))
    kind = column.type
    numbers = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    if task == "auto":
        whole = pa.types.is_integer(kind)
        if not numbers:
            task, why = "classification", f"the target's type is {kind}"
        elif whole and values <= CLASSES:
            task, why = "classification", f"the target has {values} whole values"
        else:
            task, why = "regression", f"the target's type is {kind}, with {values} values"
    else:
        why = "as asked for"
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
    import pyarrow as pa

    table = pa.table(columns)
    if path.suffix.lower() in (".parquet", ".pq"):
        import pyarrow.parquet as pq

        pq.write_table(table, path)
    else:
        from pyarrow import csv

        csv.write_csv(table, str(path))


def predictions(estimator: Any, table: Any, coverage: float) -> dict[str, Any]:
    """Return what an estimator says about each row, as columns."""
    from sklearn.base import is_classifier

    if is_classifier(estimator):
        chance = estimator.predict_proba(table)
        unsure = estimator.predict_uncertainty(table)
        columns = {"prediction": estimator.classes_[chance.argmax(1)].tolist()}
        columns |= {f"p_{c}": chance[:, k] for k, c in enumerate(estimator.classes_)}
        return columns | {"uncertainty": unsure.total, "epistemic": unsure.epistemic}
    mean, std = estimator.predict(table, return_std=True)
    columns = {"prediction": mean, "std": std}
    if getattr(estimator, "scores_", None) is not None:
        interval = estimator.predict_interval(table, coverage)
        columns |= {"lower": interval[:, 0], "upper": interval[:, 1]}
    return columns
