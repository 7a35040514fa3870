"""Cells: everything that one measurement depends on.

A cell has the setting of a preset, the values of the swept axes, and a seed.
"""

import importlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from torch import nn

from embens import EmbeddedEnsemble
from reproduction.grid.settings import Setting, build_reference, of_preset

Row = dict[str, float]
"""One row of a table: measured quantities by name."""

# Defaults by preset, for experiments without a reason for other values.
MEMBERS = {
    "quick": (1, 2, 4, 8, 16, 32),
    "cpu": (1, 2, 4, 8, 16),
    "gpu": (1, 2, 5, 10, 20),
    "paper": (1, 2, 5, 10, 20, 40),
}
SEEDS = {"quick": 5, "cpu": 3, "gpu": 1, "paper": 3}
TUNINGS = ("tuning", "compare-rates")
"""Experiments that choose learning rates on validation data; they have no published figure."""
PARTS = ("baselines", "few-networks")
"""Modules that only measure cells which experiments sweep."""


@dataclass(frozen=True)
class Cell:
    """Everything that one measurement depends on.

    Attributes:
        setting: Data, network and training.
        values: Values of the swept axes and the seed, by name. ``cell["p"]`` reads one of them.
        experiment: Name of the experiment whose ``measure`` function measures the cell.
        checkpoints: Folder for the state of unfinished training runs; empty: none. The result does
            not depend on it.
    """

    setting: Setting
    values: dict[str, Any]
    experiment: str = ""
    checkpoints: str = field(default="", compare=False)

    def __getitem__(self, axis: str) -> Any:
        if axis not in self.values:
            raise KeyError(f"the cell has no axis {axis!r}; it has {', '.join(self.values)}.")
        return self.values[axis]

    @property
    def seed(self) -> int:
        """Seed of the weights, the members, and the order of samples."""
        return self["seed"]

    @property
    def width(self) -> float:
        """Relative width of the reference network; 1 if it is not swept."""
        return self.values.get("width", 1.0)

    def with_values(self, **values: Any) -> "Cell":
        """Return the cell with other values of some axes."""
        return replace(self, values={**self.values, **values})

    def shortened(self, *, epochs: int = 2, train: int = 512) -> "Cell":
        """Return the cell with fewer epochs, training images and test samples, for tests."""
        setting = self.setting
        if setting.network != "mlp":
            train_samples = min(train, setting.train)
        else:
            train_samples = setting.train
        setting = replace(
            setting,
            epochs=min(epochs, setting.epochs),
            train=train_samples,
            test=min(setting.test, 2 * train),
        )
        values = dict(self.values)
        if "length" in values:  # a swept number of epochs
            values["length"] = min(epochs, values["length"])
        return replace(self, setting=setting, values=values)

    def build_reference(self) -> tuple[nn.Module, torch.Generator]:
        """Return the reference network of the seed, and the generator to draw members with."""
        generator = torch.Generator().manual_seed(self.seed)
        return build_reference(self.setting, self.width, generator=generator), generator

    def build_ensemble(
        self, family: Callable[..., EmbeddedEnsemble], **options: Any
    ) -> EmbeddedEnsemble:
        """Return an untrained ensemble with the cell's number of members.

        Args:
            family: A function such as :func:`embens.embed`.
            **options: Further arguments of the family.

        Returns:
            The ensemble.
        """
        network, generator = self.build_reference()
        return family(network, self["members"], generator=generator, **options)


Sweep = Callable[[Setting], list[Cell]]
"""Returns the cells of a setting."""


def sweep(experiment: str = "", **axes: Any) -> Sweep:
    """Return a function that lists a cell for each combination of axis values.

    Args:
        experiment: The experiment that measures the cells; by default the one that sweeps them.
        **axes: One value, a sequence of values, or a mapping from presets to either.

    Returns:
        A function from a setting to its cells, with seed 0.

    Example:
        >>> cells = sweep(p=(0.0, 0.5), members={"quick": 8})(Setting())
        >>> [cell["p"] for cell in cells], cells[0]["members"]
        ([0.0, 0.5], 8)
    """

    def list_cells(setting: Setting) -> list[Cell]:
        choices = [_axis_values(axis, setting.preset) for axis in axes.values()]
        cells = []
        for combination in itertools.product(*choices):
            values = dict(zip(axes, combination, strict=True))
            cells.append(Cell(setting, {**values, "seed": 0}, experiment))
        return cells

    return list_cells


def _axis_values(axis: Any, preset: str) -> Sequence[Any]:
    if isinstance(axis, dict):
        axis = of_preset(axis, preset)
    if isinstance(axis, (str, int, float)):
        return [axis]
    return axis


def cells_of(name: str, setting: Setting, seeds: Iterable[int] | None = None) -> list[Cell]:
    """Return all cells of an experiment.

    Args:
        name: Name of the experiment.
        setting: Setting of a preset. The experiment may change it (``CHANGES``).
        seeds: The seeds; None uses the number of seeds of the preset.

    Returns:
        The cells of the sweep for each seed.
    """
    experiment = load_experiment(name)
    changes = getattr(experiment, "CHANGES", {})
    setting = replace(setting, **changes.get(setting.preset, {}))
    if seeds is None:
        counts = {**SEEDS, **getattr(experiment, "SEEDS", {})}
        seeds = range(of_preset(counts, setting.preset))
    swept = []
    for list_cells in experiment.SWEEP:
        for cell in list_cells(setting):
            swept.append(replace(cell, experiment=cell.experiment or name))
    return [cell.with_values(seed=seed) for seed in seeds for cell in swept]


def measured_by(name: str) -> list[str]:
    """Return the names under which the cells of an experiment are measured, its name first."""
    names = {cell.experiment for cell in cells_of(name, Setting(), [0])}
    return [name, *sorted(names - {name})]


def pooled_axes(name: str) -> tuple[str, ...]:
    """Return the axes of an experiment that pools residuals, without the seed; else nothing."""
    experiment = load_experiment(name)
    if not getattr(experiment, "POOLED", False):
        return ()
    axes: dict[str, None] = {}
    for list_cells in experiment.SWEEP:
        # The axes are the same in every preset, and quick has cells of every sweep.
        for cell in list_cells(Setting())[:1]:
            axes.update(dict.fromkeys(cell.values))
    return tuple(axis for axis in axes if axis != "seed")


def cost_of(cell: Cell) -> float:
    """Return the rough cost of a cell, in units that only compare cells of one experiment."""
    experiment = load_experiment(cell.experiment)
    estimate = getattr(experiment, "estimate_cost", training_cost)
    return estimate(cell)


def training_cost(cell: Cell) -> float:
    """Return the rough cost of training the members of a cell."""
    setting = cell.setting
    members, width = cell["members"], cell.width
    if setting.network == "mlp":
        # Small layers: a constant time per step, and a time proportional to the units.
        step = 16 + members * width
    else:
        step = 1 + members * width * (1 + width * setting.channels[0] / 64)
    return step * setting.epochs * setting.train


def load_experiment(name: str) -> ModuleType:
    """Return the module of an experiment, of a tuning, or of a part of experiments."""
    module = name.replace("-", "_")
    if name in (*PARTS, *TUNINGS):
        return importlib.import_module(f"reproduction.{module}")
    return importlib.import_module(f"reproduction.figures.{module}")


def describe(docstring: str | None) -> dict[str, str]:
    r"""Split the docstring of an experiment into the texts of its page.

    The first line is the title with the label of the paper's figure in parentheses. The second
    paragraph is the description for readers of the page. Further paragraphs are for readers of the
    code.

    Args:
        docstring: Docstring of an experiment.

    Returns:
        ``title``, ``label`` and ``about``.

    Example:
        >>> describe("Width (fig:width).\n\nAccuracy against\nwidth.")
        {'title': 'Width', 'label': 'fig:width', 'about': 'Accuracy against width.'}
    """
    paragraphs = inspect.cleandoc(docstring or "").split("\n\n")
    title, _, label = paragraphs[0].removesuffix(".").removesuffix(")").rpartition(" (")
    return {"title": title, "label": label, "about": " ".join(paragraphs[1].split())}
