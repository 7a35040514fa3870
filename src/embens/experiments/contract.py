"""What an experiment is: the names that its module must have, and what all cells have in common.

A cell is all that one measurement depends on: a preset's setting, what is swept, and a seed.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar, Protocol, Self, TypeVar

import torch
from torch import nn

from embens import laws
from embens.checks import closest
from embens.embedding import families
from embens.ensemble import EmbeddedEnsemble
from embens.experiments import NAMES
from embens.experiments.claims import Claim, Frame
from embens.experiments.figure import Figure
from embens.experiments.setting import Setting, reference

Row = dict[str, float]
# By preset, for experiments that have no reason for others.
MEMBERS = {"quick": (1, 2, 4, 8, 16, 32), "cpu": (1, 2, 4, 8, 16), "paper": (1, 2, 5, 10, 20, 40)}
SEEDS = {"quick": 5, "cpu": 3, "paper": 3}
batch_ensemble = partial(families.batch_ensemble, law=laws.Shifted)
"""The paper's, with modulations N(p, 1 − p²)."""


@dataclass(frozen=True, kw_only=True)
class CellBase:
    """What every cell has; an experiment's own ``Cell`` adds the fields that it sweeps."""

    owner: ClassVar[str] = ""  # the module that measures it, if not the experiment's own
    setting: Setting
    seed: int = 0

    @property
    def weight(self) -> float:
        """Roughly what it costs, in units that only compare cells of one experiment."""
        return self.cost(getattr(self, "members", 1), getattr(self, "width", 1.0))

    def cost(self, members: float, width: float) -> float:
        """Return roughly what it costs to train so many members at a width."""
        step = 16 + members * width if self.setting.network == "mlp" else members * width**1.5
        return step * self.setting.epochs * self.setting.train

    def swept(self) -> dict[str, Any]:
        """Return everything but the setting, the seed at the end."""
        names = [f.name for f in fields(self) if f.name not in ("setting", "seed")]
        return {name: getattr(self, name) for name in (*names, "seed")}

    def shortened(self, *, epochs: int = 2, train: int = 512) -> Self:
        """Return the cell with less to train."""
        setting = self.setting
        some = min(train, setting.train) if setting.network == "cnn" else setting.train
        test = min(setting.test, 2 * train)
        small = replace(setting, epochs=min(epochs, setting.epochs), train=some, test=test)
        return replace(self, setting=small)

    def draw(self) -> tuple[nn.Module, torch.Generator]:
        """Return the reference network of this seed, and the generator to draw members with."""
        generator = torch.Generator().manual_seed(self.seed)
        width = getattr(self, "width", 1.0)
        return reference(self.setting, width, generator=generator), generator

    def make(self, family: Callable[..., EmbeddedEnsemble], **options: Any) -> EmbeddedEnsemble:
        """Return the untrained ensemble of a family, with the cell's members."""
        network, generator = self.draw()
        members: int = getattr(self, "members")  # noqa: B009 - not every cell has them
        return family(network, members, generator=generator, **options)


AnyCell = TypeVar("AnyCell", bound=CellBase)


def product(cell: type[AnyCell], setting: Setting, **axes: Iterable[Any]) -> list[AnyCell]:
    """Return a cell for each combination of the values of its fields."""
    combinations = itertools.product(*axes.values())
    return [cell(setting=setting, **dict(zip(axes, c, strict=True))) for c in combinations]


class Experiment(Protocol):
    """A module of this package, with the docstring that :func:`describe` reads.

    It may also have ``SEEDS``, their number for each preset.
    """

    # The cells of a preset's sweep for one seed; the numbers of a cell, in one row or several (one
    # for each epoch, say); the paper's claims with their verdicts; the paper's panels.
    def cells(self, setting: Setting) -> list[Any]: ...
    def measure(self, cell: Any) -> Row | list[Row]: ...
    def claims(self, table: Frame) -> list[Claim]: ...
    def plot(self, table: Frame) -> Figure: ...


def describe(text: str | None) -> dict[str, str]:
    r"""Return an experiment's title, its label in the paper, and what it is about.

    The first line of its docstring has the first two, the next paragraph is the third, for readers
    of its page; what comes after that is for readers of the code.

    Example:
        >>> describe("Widths (fig:widths).\n\nAll of them.\n\nHow they are made.")
        {'title': 'Widths', 'label': 'fig:widths', 'about': 'All of them.'}
    """
    first, about, *_ = inspect.cleandoc(text or "").split("\n\n")
    title, _, label = first.removesuffix(".").removesuffix(")").rpartition(" (")
    return {"title": title, "label": label, "about": " ".join(about.split())}


def load(name: str) -> Experiment:
    """Return the experiment of this name.

    Example:
        >>> load("transition").__name__
        'embens.experiments.transition'
    """
    if name not in NAMES:
        raise ValueError(f"unknown experiment {name!r}{closest(name, NAMES)}")
    return module(name)


def module(name: str) -> Any:
    """Return the module of an experiment, or of cells that several of them have."""
    return importlib.import_module(f"embens.experiments.{name.replace('-', '_')}")


def cells(name: str, setting: Setting, seeds: Iterable[int] | None = None) -> list[Any]:
    """Return all cells of an experiment: its sweep for each of these seeds, or the preset's."""
    experiment = load(name)
    sweep = experiment.cells(setting)
    if seeds is None:
        seeds = range(getattr(experiment, "SEEDS", SEEDS)[setting.preset])
    return [replace(cell, seed=seed) for seed in seeds for cell in sweep]
