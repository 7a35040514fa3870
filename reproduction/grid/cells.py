"""What an experiment is: what all cells have in common, and how the ensemble of one is trained.

A cell is all that one measurement depends on: a preset's setting, what is swept, and a seed.
"""

import importlib
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from embens import laws, metrics
from reproduction.datasets import DataSet
from embens.embedding import families
from embens.ensemble import EmbeddedEnsemble
from reproduction.grid.settings import Setting, count_parameters, data_set, reference
from embens.prediction import predict
from embens.training.loop import fit
from embens.training.trainer import Divergence

Row = dict[str, float]
# By preset, for experiments that have no reason for others.
MEMBERS = {"quick": (1, 2, 4, 8, 16, 32), "cpu": (1, 2, 4, 8, 16), "paper": (1, 2, 5, 10, 20, 40)}
SEEDS = {"quick": 5, "cpu": 3, "paper": 3}
batch_ensemble = partial(families.batch_ensemble, law=laws.Shifted)
"""The paper's, with modulations N(p, 1 − p²)."""


@dataclass(frozen=True)
class Cell:
    """All that one measurement depends on; what is swept, the seed too, are attributes of it."""

    setting: Setting
    swept: dict[str, Any]
    experiment: str = ""  # whose module measures it

    def __getattr__(self, name: str) -> Any:
        swept = vars(self).get("swept", {})
        if name not in swept:
            raise AttributeError(f"{name}: the cell has {[*swept]}")
        return swept[name]

    @property
    def weight(self) -> float:
        """Roughly what it costs, in units that only compare cells of one sweep."""
        return getattr(load(self.experiment), "weight", weight)(self)

    def but(self, **values: Any) -> Self:
        """Return the cell with other values of what is swept."""
        return replace(self, swept={**self.swept, **values})

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
        return family(network, self.members, generator=generator, **options)


def sweep(experiment: str = "", **axes: Any) -> Callable[[Setting], list[Cell]]:
    """Return a function of a setting: a cell for each combination of values of these axes.

    An axis has one value, or several; a mapping from presets has those of the setting's. Cells are
    of the experiment that sweeps them, unless another one measures them.
    """

    def cells(setting: Setting) -> list[Cell]:
        values = []
        for axis in axes.values():
            some = axis[setting.preset] if isinstance(axis, dict) else axis
            values.append([some] if isinstance(some, (str, int, float)) else some)
        swept = (dict(zip(axes, each, strict=True)) for each in itertools.product(*values))
        return [Cell(setting, {**each, "seed": 0}, experiment) for each in swept]

    return cells


def weight(cell: Cell) -> float:
    """Return roughly what a cell costs where its members are trained.

    Layers take time of their own, and channels; their products count where there are many.
    """
    setting, members, width = cell.setting, cell.members, getattr(cell, "width", 1.0)
    images = 1 + members * width * (1 + width * setting.channels[0] / 64)
    step = 16 + members * width if setting.network == "mlp" else images
    return step * setting.epochs * setting.train


def describe(text: str | None) -> dict[str, str]:
    """Return an experiment's title and its label in the paper (first line), and what it is about.

    That is the second paragraph, for readers of its page; what follows is for readers of the code.
    """
    first, about, *_ = inspect.cleandoc(text or "").split("\n\n")
    title, _, label = first.removesuffix(".").removesuffix(")").rpartition(" (")
    return {"title": title, "label": label, "about": " ".join(about.split())}


def load(name: str) -> Any:
    """Return the module of an experiment, or of cells that several of them have."""
    return importlib.import_module(f"embens.experiments.{name.replace('-', '_')}")


def cells(name: str, setting: Setting, seeds: Iterable[int] | None = None) -> list[Cell]:
    """Return all cells of an experiment: its sweep for each of these seeds, or the preset's."""
    experiment = load(name)
    if setting.preset == "quick":
        setting = replace(setting, **getattr(experiment, "QUICK", {}))
    swept = [cell for part in experiment.SWEEP for cell in part(setting)]
    seeds = range(getattr(experiment, "SEEDS", SEEDS)[setting.preset]) if seeds is None else seeds
    swept = [replace(cell, experiment=cell.experiment or name) for cell in swept]
    return [cell.but(seed=seed) for seed in seeds for cell in swept]


@dataclass(frozen=True)
class Training:
    """An ensemble that was trained."""

    ensemble: EmbeddedEnsemble  # with its last weights
    data: DataSet
    diverged: bool  # the run ended before its time
    trace: list[Row]  # of each epoch: members' mean loss and, if asked for, their test accuracy

    def evaluate(self) -> Row:
        """Return the paper's four measures, and what goes with them."""
        outputs = run(self.ensemble, self.data.test.inputs)
        fitted, target = run(self.ensemble, self.data.train.inputs), self.data.train.targets
        return {
            **score(outputs, self.data.test.targets),
            "member_train_accuracy": float(metrics.member_accuracy(fitted, target).mean()),
            "train_accuracy": float(metrics.ensemble_accuracy(fitted, target)),
            "train_loss": float(metrics.member_nll(fitted, target).mean()),
            "parameters": float(count_parameters(self.ensemble)),
            "diverged": float(self.diverged),
        }


def train(
    cell: Cell,
    ensemble: EmbeddedEnsemble,
    *,
    data: DataSet | None = None,
    gamma: float | None = None,
    lr: float | None = None,
    modulation_lr: float | None = None,
    test_each_epoch: bool = False,
) -> Training:
    """Train in place, as the paper does: momentum 0.9, rate constant, then linearly to 1 %.

    The cell has the setting, and the seed of the order of samples and of fresh masks. ``gamma`` is
    :math:`M` by default, and ``lr`` the setting's; so are the data. A run that diverges is a
    result: it is marked, and measured with its last finite weights.
    """
    setting = cell.setting
    data = data_set(setting) if data is None else data
    try:
        history = fit(
            ensemble,
            tuple(data.train),
            tuple(data.test) if test_each_epoch else None,
            epochs=setting.epochs,
            batch_size=setting.batch_size,
            lr=setting.lr if lr is None else lr,
            modulation_lr=modulation_lr,
            weight_decay=setting.weight_decay,
            gamma=float(ensemble.members) if gamma is None else gamma,
            keep="last",
            seed=cell.seed,
            progress=False,
        )
        diverged = False
    except Divergence as error:
        history, diverged = error.history, True
    trace = [{"epoch": row["epoch"], "loss": row["loss"]} for row in history.epochs]
    if test_each_epoch:
        for row in trace:
            mine = [m["validation_accuracy"] for m in history.members if m["epoch"] == row["epoch"]]
            row["member_accuracy"] = sum(mine) / len(mine)
    return Training(ensemble, data, diverged, trace)


def run(ensemble: EmbeddedEnsemble, inputs: Tensor, draws: int | None = None) -> Tensor:
    """Return the outputs in evaluation mode, ``(member, batch, class)``.

    ``draws`` is how many masks to draw, where they are fresh. Outputs that overflow, though weights
    are finite, say nothing: all classes become equal.
    """
    outputs = predict(ensemble, inputs, members=draws).members
    return outputs.where(outputs.isfinite().all(-1, keepdim=True), 0.0)


def score(outputs: Tensor, target: Tensor) -> Row:
    """Return accuracy of ensemble and members, correlation and likelihood on test data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # one member, or members always right
        correlation = float(metrics.correctness_correlation(outputs, target))
    return {
        "accuracy": float(metrics.ensemble_accuracy(outputs, target)),
        "member_accuracy": float(metrics.member_accuracy(outputs, target).mean()),
        "correlation": correlation,
        "nll": float(metrics.nll(outputs, target)),
    }
