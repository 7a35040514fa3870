"""What an experiment is: the names that its module must have.

Each is used by one place: ``cells`` and ``measure`` by the grid, ``claims`` by the verdicts,
``plot`` by the figures. A cell holds its :class:`~embens.experiments.setting.Setting` and whatever
the experiment sweeps, plus a ``seed``; ``measure`` depends on nothing else, and returns one row, or
several (a row for each epoch).
"""

from __future__ import annotations

import difflib
import importlib
from dataclasses import replace
from typing import Any, Protocol

from embens.experiments import NAMES
from embens.experiments.claims import Claim, Table
from embens.experiments.figure import Figure
from embens.experiments.setting import Setting

Row = dict[str, Any]


class Experiment(Protocol):
    """A module of this package.

    Attributes:
        LABEL: of the figure in the paper's source.
        TITLE: one line.
        ABOUT: what is swept and shown, and where it differs from the paper.
    """

    LABEL: str
    TITLE: str
    ABOUT: str

    def cells(self, setting: Setting, *, seeds: int | None = None) -> list[Any]:
        """Return the cells of a preset's sweep; ``seeds`` other than its own."""
        ...

    def measure(self, cell: Any) -> Row | list[Row]:
        """Return the numbers of a cell, in one row or several."""
        ...

    def claims(self, table: Table) -> list[Claim]:
        """Return the paper's claims with their verdicts on a table."""
        ...

    def plot(self, table: Table) -> Figure:
        """Return the paper's panels."""
        ...


def load(name: str) -> Experiment:
    """Return the experiment of this name.

    Example:
        >>> load("transition").LABEL
        'fig:shifting_modulations'
    """
    if name not in NAMES:
        close = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown experiment {name!r}{hint or '.'} There are: {', '.join(NAMES)}.")
    return importlib.import_module(f"embens.experiments.{name.replace('-', '_')}")  # type: ignore[return-value]


def weight(cell: Any) -> float:
    """Return roughly what a cell costs, in units that only compare cells of one experiment."""
    own = getattr(cell, "weight", None)
    if own is not None:
        return float(own)
    setting: Setting = cell.setting
    members, width = getattr(cell, "members", 1), getattr(cell, "width", 1.0)
    step = 16 + members * width if setting.network == "mlp" else members * width**1.5
    return step * setting.epochs * setting.train


def shortened(cell: Any, *, epochs: int = 2, train: int = 512) -> tuple[Any, float]:
    """Return a cell with less training to do, and how many times more the whole one has.

    A cell that has a weight of its own is not mostly training; it is returned as it is.
    """
    if hasattr(cell, "weight"):
        return cell, 1.0
    setting: Setting = cell.setting
    fewer = min(epochs, setting.epochs)
    some = min(train, setting.train) if setting.network == "cnn" else setting.train
    factor = setting.epochs / fewer * setting.train / some
    small = replace(setting, epochs=fewer, train=some, test=min(setting.test, 2 * train))
    return replace(cell, setting=small), factor
