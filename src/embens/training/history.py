"""The history of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from embens.checks import check_choice

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class History:
    """The result of :func:`embens.fit`.

    Training columns are measured during the epoch, while the weights change. Undefined values are
    NaN: a correlation without pairs, the rate of a group that does not exist. A regression has no
    accuracies.

    Attributes:
        members: One row per epoch and member with ``epoch``, ``member``, ``loss``, ``accuracy``
            and, with validation data, ``validation_loss`` and ``validation_accuracy``.
        epochs: One row per epoch with ``epoch``, ``loss`` (mean over members) and the metrics of
            the ensemble: ``ensemble_accuracy``, ``nll`` (of the mean probability) and
            ``correlation`` (of correctness between members) for classification; ``rmse`` for
            regression, with ``nll`` (of the mixture) where members predict variances. The same
            columns with the prefix ``validation_``, ``metric`` (selects the best epoch), ``lr``
            (rate of the shared parameters, gamma included), ``modulation_lr``,
            ``gradient_norm_shared`` and ``gradient_norm_individual`` (at the first step of the
            epoch) and ``seconds``.
        best_epoch: The epoch with the best metric; None without validation data.
        stopped: Why the run ended: "epochs", "patience", "time", or the reason that a callback
            passed to ``run.stop``.

    Example:
        >>> history = History([], [{"epoch": 1, "loss": 0.5}])
        >>> history.epochs[-1]["loss"]
        0.5
    """

    members: list[dict[str, Any]] = field(repr=False)
    epochs: list[dict[str, Any]] = field(repr=False)
    best_epoch: int | None = None
    stopped: str = "epochs"

    def to_pandas(self, table: Literal["epochs", "members"] = "epochs") -> pandas.DataFrame:
        """Return one of the two tables as a data frame.

        Args:
            table: "epochs" (one row per epoch) or "members" (one row per epoch and member).

        Returns:
            The table, with the columns of the attribute of the same name.

        Raises:
            ValueError: If there is no such table.

        Example:
            >>> History([], [{"epoch": 1, "loss": 0.5}]).to_pandas().loc[0, "loss"].item()
            0.5
        """
        import pandas

        check_choice("table", table, ("epochs", "members"))
        return pandas.DataFrame(getattr(self, table))

    def plot(self) -> Figure:
        """Plot losses and, for classification, accuracies.

        Thin lines are members, thick lines the ensemble. Validation is dashed. A vertical line
        marks the best epoch.

        Returns:
            A figure of matplotlib.

        Example:
            >>> history = History([{"epoch": 1, "loss": 0.5}], [{"epoch": 1, "loss": 0.5}])
            >>> len(history.plot().axes)  # losses only
            1
        """
        from matplotlib.figure import Figure

        columns = {"loss": "loss"}
        if any("ensemble_accuracy" in row for row in self.epochs):
            columns["accuracy"] = "ensemble_accuracy"
        figure = Figure(figsize=(5.0 * len(columns), 3.5), layout="constrained")
        for position, (member_column, ensemble_column) in enumerate(columns.items(), 1):
            axes = figure.add_subplot(
                1, len(columns), position, xlabel="epoch", ylabel=member_column
            )
            self._draw(axes, member_column, ensemble_column, "", "-", "training")
            self._draw(axes, member_column, ensemble_column, "validation_", "--", "validation")
            if self.best_epoch is not None:
                axes.axvline(self.best_epoch, color="grey", lw=0.5)
            axes.legend()
        return figure

    def _draw(
        self,
        axes: Any,
        member_column: str,
        ensemble_column: str,
        prefix: str,
        style: str,
        label: str,
    ) -> None:
        """Draw a column of all members, and the column of the ensemble."""
        epochs = [row["epoch"] for row in self.epochs]
        members = len(self.members) // max(len(epochs), 1)
        for a in range(members):
            rows = self.members[a::members]
            values = [row.get(prefix + member_column, math.nan) for row in rows]
            axes.plot(epochs, values, "C0" + style, lw=0.5, alpha=0.5)
        values = [row.get(prefix + ensemble_column, math.nan) for row in self.epochs]
        axes.plot(epochs, values, "k" + style, label=label)


def make_history(
    records: Sequence[dict[str, Any]], best_epoch: int | None, stopped: str
) -> History:
    """Build the two tables from the records of a run.

    Args:
        records: One dict per epoch; lists hold one value per member.
        best_epoch: The epoch with the best metric, if any.
        stopped: Why the run ended.

    Returns:
        The history, whose member table has the columns ``member_…`` without this prefix.

    Example:
        >>> record = {"epoch": 1, "loss": 0.5, "member_loss": [0.4, 0.6]}
        >>> make_history([record], None, "epochs").members
        [{'epoch': 1, 'member': 0, 'loss': 0.4}, {'epoch': 1, 'member': 1, 'loss': 0.6}]
    """
    epochs, members = [], []
    for record in records:
        epochs.append(epoch_row(record))
        columns = {}
        for name, value in record.items():
            if isinstance(value, list):
                # "validation_member_loss" becomes "validation_loss".
                columns[name.replace("member_", "")] = value
        for a in range(len(columns["loss"])):
            row = {"epoch": record["epoch"], "member": a}
            for name, values in columns.items():
                row[name] = values[a]
            members.append(row)
    return History(members, epochs, best_epoch, stopped)


def epoch_row(record: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a record that are not lists: a row of ``History.epochs``.

    Args:
        record: Columns of one epoch; lists hold one value per member.

    Example:
        >>> epoch_row({"epoch": 1, "loss": 0.5, "member_loss": [0.4, 0.6]})
        {'epoch': 1, 'loss': 0.5}
    """
    return {name: value for name, value in record.items() if not isinstance(value, list)}
