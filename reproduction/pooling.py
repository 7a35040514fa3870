"""Tables with redrawn residuals, for confidence intervals that pool all cells of a sweep.

The model and its assumptions are explained in :mod:`reproduction.claims`. Residuals are drawn from
all cells of a *stratum*: cells with the same axes and the same number of rows, in which the same
columns are defined. Columns that are equal for all seeds are ignored. A residual consists of all
rows and columns of one cell and seed, so that quantities that belong together stay together.

Exceptions:

- A *partial* cell lacks some seeds. It gets residuals of the complete cells of its stratum, and the
  effects of its seeds relative to the mean effect of all seeds.
- A stratum without a complete cell gets the residuals of another stratum in which at least the same
  columns are defined. Without such a stratum the noise of its cells is not known, and statistics
  that depend on them have no interval.
- Cells in which a run diverged keep their values.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from reproduction.rows import Frame, MissingCellsError, Rows

LOGARITHMIC = ("loss", "train_loss", "early_loss")
"""Columns of positive values whose relative residuals are pooled."""


@dataclass(frozen=True)
class PooledTables:
    """Redrawn tables of a sweep.

    Attributes:
        residual_tables: Cell means with redrawn residuals.
        seed_tables: For each seed, cell means with the effect of this seed.
        residual_degrees: Degrees of freedom of the variance of residuals.
        seeds: Number of seeds.
        is_complete: Whether all cells have all seeds, apart from those in which a run diverged.
        known: The rows of the cells whose noise is known; None if it is known for all cells.
    """

    residual_tables: list[Rows]
    seed_tables: list[Rows]
    residual_degrees: int
    seeds: int
    is_complete: bool = True
    known: Rows | None = None

    @classmethod
    def draw(cls, table: Frame, axes: Sequence[str], samples: int) -> "PooledTables":
        """Redraw a table.

        Args:
            table: The table, with a column ``seed``.
            axes: Columns that identify a cell, apart from the seed.
            samples: Number of tables with redrawn residuals.

        Returns:
            The tables. The same table always gives the same draws.
        """
        import numpy

        generator = numpy.random.default_rng(0)
        strata, unknown = _make_strata(table, axes)
        seeds = table["seed"].nunique()
        residual_tables = []
        for _ in range(samples):
            changes = [stratum.draw_residuals(generator) for stratum in strata]
            residual_tables.append(_changed_table(table, strata, changes))
        seed_tables = []
        for seed in range(seeds):
            changes = [stratum.with_seed_effect(seed) for stratum in strata]
            seed_tables.append(_changed_table(table, strata, changes))
        degrees = sum((stratum.cells - 1) * (stratum.seeds - 1) for stratum in strata)
        is_complete = not unknown and not any(stratum.partial for stratum in strata)
        known = Rows(table.drop(index=table.index[unknown])) if unknown else None
        return cls(residual_tables, seed_tables, max(1, degrees), seeds, is_complete, known)

    def knows_noise_of(self, statistic: Callable[[Rows], float], value: float) -> bool:
        """Return whether a statistic depends only on cells whose noise is known.

        Such a statistic has the same value without the other cells.

        Args:
            statistic: The statistic.
            value: Its value on the measured table.
        """
        if self.known is None:
            return True
        try:
            return float(statistic(self.known)) == value
        except MissingCellsError:
            return False


Change = tuple[Any, Any]
"""Positions in the table, and the values of its columns there."""


@dataclass(frozen=True)
class _PartialCell:
    """A cell that was not measured with all seeds.

    Attributes:
        positions: Positions in the table ``(seed, row)``.
        seeds: Positions of its seeds among all seeds.
        means: Means over its seeds ``(row, column)``.
    """

    positions: Any
    seeds: list[int]
    means: Any


@dataclass(frozen=True)
class _Stratum:
    """Cells in which the same quantities are defined.

    Attributes:
        positions: Positions of the cells with all seeds in the table ``(cell, seed, row)``.
        columns: Measured columns.
        means: Means over seeds ``(cell, row, column)``.
        residuals: Residuals without seed effects ``(cell, seed, row, column)``, scaled such that
            their variance is unbiased.
        effects: Effects of seeds ``(seed, row, column)``.
        partial: Cells without some of the seeds.
    """

    positions: Any
    columns: list[str]
    means: Any
    residuals: Any
    effects: Any
    partial: list[_PartialCell]

    @property
    def cells(self) -> int:
        return self.positions.shape[0]

    @property
    def seeds(self) -> int:
        return self.positions.shape[1]

    def draw_residuals(self, generator: Any) -> list[Change]:
        """Return cell means plus residuals drawn from all cells and seeds of the stratum."""
        flat = self.residuals.reshape(-1, *self.residuals.shape[2:])
        picked = generator.integers(len(flat), size=(self.cells, self.seeds))
        changes = [(self.positions, self.means[:, None] + flat[picked])]
        if not self.partial:
            return changes
        # The mean of a complete cell contains the effects of all seeds. The rows of a partial cell
        # differ from it by the effects of their seeds relative to that mean.
        inflation = math.sqrt(self.seeds / (self.seeds - 1))
        effects = inflation * self.effects[generator.integers(self.seeds, size=self.seeds)]
        effects = effects - effects.mean(axis=0)
        for cell in self.partial:
            picked = generator.integers(len(flat), size=len(cell.seeds))
            changes.append((cell.positions, cell.means + flat[picked] + effects[cell.seeds]))
        return changes

    def with_seed_effect(self, seed: int) -> list[Change]:
        """Return cell means plus the effect of one seed, in the rows of every seed."""
        changes = [(self.positions, self.means[:, None] + self.effects[seed])]
        for cell in self.partial:
            changes.append((cell.positions, cell.means + self.effects[seed]))
        return changes


def _make_strata(table: Frame, axes: Sequence[str]) -> tuple[list[_Stratum], list[int]]:
    """Return the strata of a table, and the positions of cells whose noise is not known.

    Cells that keep their values, because a run diverged, are in neither.
    """
    import numpy

    axes = [axis for axis in axes if axis in table and axis != "seed"]
    numeric = table.select_dtypes("number").columns
    columns = [column for column in numeric if column not in (*axes, "seed", "diverged")]
    columns = _noisy_columns(table, axes, columns)
    values = _to_pooled_scale(table, columns)
    complete, partial = _group_cells(table, axes, values)
    unknown: list[int] = []
    for key in partial.keys() - complete.keys():
        cells = partial.pop(key)
        similar_key = _find_similar_stratum(key, complete)
        if similar_key is None:
            for cell in cells:
                unknown += [int(position) for position in cell.positions.flat]
        else:
            partial[similar_key] = partial.get(similar_key, []) + cells
    strata = []
    for key, positions in complete.items():
        cells = partial.get(key, [])
        strata.append(_make_stratum(numpy.stack(positions), columns, values, cells))
    return strata, unknown


def _noisy_columns(table: Frame, axes: Sequence[str], columns: list[str]) -> list[str]:
    """Return the columns that differ between seeds; the others have no residuals.

    Such a column, for example a number of parameters or a quantity of the theory, may be measured
    in some cells only. It must not separate these from cells with the same noise.
    """
    if not axes or not columns:
        return columns
    by_cell = table.groupby(list(axes), dropna=False)[columns]
    spread = (by_cell.max() - by_cell.min()).max()
    scale = table[columns].abs().max()
    return [column for column in columns if spread[column] > 1e-9 * scale[column]]


def _group_cells(
    table: Frame, axes: Sequence[str], values: Any
) -> tuple[dict[Any, list[Any]], dict[Any, list[_PartialCell]]]:
    """Return the positions of cells with all seeds, and the other cells, both by stratum.

    The key of a stratum says which axes a cell has, how many rows, and which columns are defined in
    them. So baselines, which lack the axes of an experiment, are a stratum of their own.
    """
    import numpy

    diverged = numpy.zeros(len(table))
    if "diverged" in table:
        diverged = table["diverged"].fillna(0.0).to_numpy()
    seeds = sorted(table["seed"].unique())
    complete: dict[Any, list[Any]] = {}
    partial: dict[Any, list[_PartialCell]] = {}
    for cell_key, by_seed in _positions_of_cells(table, axes).items():
        row_counts = {len(positions) for positions in by_seed.values()}
        if len(row_counts) > 1:
            continue  # a run ended early, so that its rows cannot be compared with other seeds
        indices = [index for index, seed in enumerate(seeds) if seed in by_seed]
        positions = numpy.array([by_seed[seeds[index]] for index in indices])
        if diverged[positions].any():
            continue
        is_defined = numpy.isfinite(values[positions]).all(axis=0)
        has_axes = tuple(value is not None for value in cell_key)
        key = (has_axes, is_defined.shape, is_defined.tobytes())
        if len(indices) == len(seeds):
            complete.setdefault(key, []).append(positions)
        else:
            cell = _PartialCell(positions, indices, values[positions].mean(axis=0))
            partial.setdefault(key, []).append(cell)
    return complete, partial


def _positions_of_cells(
    table: Frame, axes: Sequence[str]
) -> dict[tuple[Any, ...], dict[Any, list[int]]]:
    """Return the positions of the rows of each cell by seed; cells are named by their axes."""
    positions_of_cell: dict[Any, dict[Any, list[int]]] = {}
    cell_keys = table[axes].astype(object).where(table[axes].notna(), None)
    for position, (cell, seed) in enumerate(
        zip(cell_keys.itertuples(index=False, name=None), table["seed"], strict=True)
    ):
        positions_of_cell.setdefault(cell, {}).setdefault(seed, []).append(position)
    return positions_of_cell


def _find_similar_stratum(key: Any, complete: dict[Any, list[Any]]) -> Any:
    """Return the key of the largest stratum with complete cells that can lend its residuals.

    All columns that are defined in the stratum of ``key`` must be defined there. None if there is
    no such stratum.
    """
    import numpy

    has_axes, shape, defined = key
    needed = numpy.frombuffer(defined, dtype=bool)
    similar = []
    for other in complete:
        other_axes, other_shape, other_defined = other
        offered = numpy.frombuffer(other_defined, dtype=bool)
        is_same_kind = (other_axes, other_shape) == (has_axes, shape)
        if is_same_kind and (offered | ~needed).all():
            similar.append(other)
    return max(similar, key=lambda other: len(complete[other]), default=None)


def _make_stratum(
    positions: Any, columns: list[str], values: Any, partial: list[_PartialCell]
) -> _Stratum:
    """Split the values of complete cells into means, effects of seeds, and residuals."""
    import numpy

    cells, seeds = positions.shape[:2]
    measured = values[positions]
    means = measured.mean(axis=1)
    deviations = measured - means[:, None]
    effects = deviations.mean(axis=0)
    residuals = deviations - effects
    # Deviations from estimated means are too small; these factors make variances unbiased.
    inflation = math.sqrt(seeds / (seeds - 1))
    if cells > 1:
        residuals = residuals * inflation * math.sqrt(cells / (cells - 1))
        # Residuals also make means over cells vary. Remove this part from the effects of seeds.
        residual_part = residuals.var(axis=(0, 1)) / cells
        total = inflation**2 * effects.var(axis=0)
        with numpy.errstate(invalid="ignore", divide="ignore"):
            share = numpy.where(total > 0, 1 - residual_part / total, 0.0)
        effects = effects * numpy.sqrt(numpy.clip(share, 0.0, 1.0))
    return _Stratum(positions, columns, means, residuals, effects, partial)


def _changed_table(table: Frame, strata: list[_Stratum], changes: list[list[Change]]) -> Rows:
    """Return the table with changed values of the measured columns."""
    import numpy

    changed = table.copy()
    if not strata:
        return Rows(changed)
    columns = strata[0].columns
    values = _to_pooled_scale(table, columns)
    for changes_of_stratum in changes:
        for positions, change in changes_of_stratum:
            values[positions] = change
    for number, column in enumerate(columns):
        if column in LOGARITHMIC:
            values[:, number] = numpy.exp(values[:, number])
    changed[columns] = values
    return Rows(changed)


def _to_pooled_scale(table: Frame, columns: list[str]) -> Any:
    """Return the values of columns, or their logarithms."""
    import numpy

    values = table[columns].to_numpy(dtype=float, copy=True)
    for number, column in enumerate(columns):
        if column in LOGARITHMIC:
            values[:, number] = numpy.log(numpy.maximum(values[:, number], 1e-12))
    return values


@dataclass(frozen=True)
class PooledError:
    """Error of a statistic from pooled residuals.

    Attributes:
        variance: Variance of the statistic; NaN if it is not defined on redrawn tables.
        degrees: Degrees of freedom of the variance.
        bias: Mean over redrawn tables minus the value.
    """

    variance: float
    degrees: float
    bias: float


def pooled_error(
    statistic: Callable[[Rows], float], value: float, pooled: PooledTables
) -> PooledError:
    """Return the error of a statistic.

    Args:
        statistic: The statistic.
        value: Its value on the measured table.
        pooled: Redrawn tables.

    Returns:
        The error, by the formulas of :mod:`reproduction.claims`.
    """
    import numpy

    redrawn = numpy.array([statistic(rows) for rows in pooled.residual_tables], dtype=float)
    shifted = numpy.array([statistic(rows) for rows in pooled.seed_tables], dtype=float)
    redrawn, shifted = redrawn[numpy.isfinite(redrawn)], shifted[numpy.isfinite(shifted)]
    if len(redrawn) < 2 or len(shifted) < 2:
        return PooledError(math.nan, math.nan, math.nan)
    residual_variance = float(redrawn.var(ddof=1))
    # The statistic depends on the mean effect of all seeds, which has a smaller variance than one.
    seed_variance = float(shifted.var(ddof=1)) / pooled.seeds
    variance = residual_variance + seed_variance
    degrees = 1.0
    if variance > 0:
        degrees = variance**2 / (
            residual_variance**2 / pooled.residual_degrees + seed_variance**2 / (pooled.seeds - 1)
        )
    return PooledError(variance, degrees, float(redrawn.mean()) - value)
