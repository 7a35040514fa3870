"""Published tables as results, so that a later run measures only the missing cells.

A published folder has a table and a manifest, but no file of records. Its rows are the results of
their cells if the manifest has the present setting and the present version of the measuring code.
Numbers have the six digits of the table.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from reproduction.grid.cells import Cell, cells_of
from reproduction.grid.keys import code_version, key_of, setting_to_json, to_json
from reproduction.grid.runs import Record
from reproduction.grid.settings import Setting
from reproduction.rows import Frame
from reproduction.storage import DamagedFileError, checksum, newest, reading, unseal


def identity_of(name: str, setting: Setting) -> dict[str, Any]:
    """Return the entries of a manifest by which published rows are recognised.

    Args:
        name: Name of the experiment.
        setting: Setting of the run.

    Returns:
        ``cell_setting``, the setting of the cells, and ``codes`` by experiment.
    """
    cells = cells_of(name, setting, [0])
    codes = {cell.experiment: code_version(cell.experiment) for cell in cells}
    return {"cell_setting": setting_to_json(cells[0].setting), "codes": codes}


def published_records(folder: Path, name: str, setting: Setting) -> list[Record]:
    """Return the results of all cells in the published table of an experiment.

    Args:
        folder: Folder of the experiment and preset.
        name: Name of the experiment.
        setting: Setting of the run.

    Returns:
        The records; empty without a table of the present setting and code.

    Raises:
        DamagedFileError: If the table or the manifest does not match its checksum.
    """
    published = _read(folder)
    if published is None:
        return []
    _, table = published
    with reading(newest(folder, "table.csv")):
        seeds = [int(seed) for seed in sorted(table["seed"].unique())]
        return list(_matching_records(*published, cells_of(name, setting, seeds)))


def borrowed_records(folder: Path, cells: Sequence[Cell]) -> list[Record]:
    """Return the results of some cells in the published table of any experiment.

    Args:
        folder: Folder of the experiment and preset.
        cells: Cells of the baselines.

    Returns:
        The records; a damaged table has none.
    """
    try:
        published = _read(folder)
        if published is None:
            return []
        with reading(newest(folder, "table.csv")):
            return list(_matching_records(*published, cells))
    except DamagedFileError:
        return []


def _read(folder: Path) -> tuple[dict[str, Any], Frame] | None:
    """Return manifest and table of a folder; None if it has none."""
    import pandas

    manifest_path, table_path = newest(folder, "manifest.json"), newest(folder, "table.csv")
    if not manifest_path.exists() or not table_path.exists():
        return None
    with reading(manifest_path):
        manifest = unseal(str(manifest_path), json.loads(manifest_path.read_bytes()))
        expected_checksum = manifest["files"]["table.csv"]
    with reading(table_path):
        if checksum(table_path.read_text()) != expected_checksum:
            raise DamagedFileError(f"{table_path} does not match the checksum in its manifest.")
        return manifest, pandas.read_csv(table_path, dtype={"gamma": str})


def _matching_records(
    manifest: dict[str, Any], table: Frame, cells: Sequence[Cell]
) -> Iterator[Record]:
    """Yield the records of the cells that the table contains."""
    codes = manifest.get("codes", {})
    by_experiment: dict[str, list[Cell]] = {}
    for cell in cells:
        if codes.get(cell.experiment) != code_version(cell.experiment):
            continue
        if manifest["cell_setting"] == setting_to_json(cell.setting):
            by_experiment.setdefault(cell.experiment, []).append(cell)
    # Baselines come first: their measured columns can have the names of an experiment's axes.
    for name in sorted(by_experiment, key=lambda name: name == manifest["experiment"]):
        rows_of_cells = [(cell, _rows_of(table, cell)) for cell in by_experiment[name]]
        rows_of_cells = [(cell, rows) for cell, rows in rows_of_cells if len(rows)]
        index = [label for _, rows in rows_of_cells for label in rows.index]
        # Columns of other experiments are empty in these rows.
        columns = table.loc[index].dropna(axis="columns", how="all").columns
        for cell, rows in rows_of_cells:
            quantities = [name for name in columns if name not in cell.values and name != "seconds"]
            yield {
                "key": key_of(cell),
                "code": code_version(cell.experiment),
                "cell": json.loads(json.dumps(to_json(cell))),
                "rows": rows[quantities].astype(float).to_dict("records"),
                "seconds": float(rows["seconds"].iloc[0]),
            }
        table = table.drop(index)


def _rows_of(table: Frame, cell: Cell) -> Frame:
    """Return the rows with the values of a cell."""
    for axis, value in cell.values.items():
        if axis not in table:
            return table.iloc[:0]
        column = table[axis]
        if isinstance(value, str):
            table = table[column == value]
        else:
            table = table[(column - value).abs() < 1e-6 * max(1.0, abs(value))]
    return table
