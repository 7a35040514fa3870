"""Contestants: all ensemble systems that the comparison builds and trains.

Every contestant is a module with outputs ``(member, batch, class)``. Families of embens are
embedded ensembles and trained by :func:`reproduction.training.train`; the systems of
:mod:`reproduction.systems` have separate training loops.
"""

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from embens import (
    EmbeddedEnsemble,
    embed,
    independent,
    last_layer_dropout,
    laws,
    low_rank,
    masksembles,
    mc_dropout,
)
from reproduction.datasets import DataSet
from reproduction.grid.cells import Cell
from reproduction.grid.settings import build_reference, count_parameters
from reproduction.systems.loop import Recipe
from reproduction.systems.loop import train as train_system
from reproduction.systems.mimo import MIMO, member_orders
from reproduction.systems.rank1 import Rank1
from reproduction.systems.snapshots import fast_geometric_ensemble, snapshot_ensemble, swag
from reproduction.training import batch_ensemble, outputs_of, train

ONE, WIDE, SEPARATE = "one network", "one wide network", "separate networks"
FRESH = "MC dropout, fresh"
SNAPSHOTS, FAST_GEOMETRIC, SWAG = "snapshots", "fast geometric", "SWAG"
KINDS = {
    "references": (ONE, WIDE, SEPARATE),
    "BatchEnsembles": (
        "BatchEnsemble p=0",
        "BatchEnsemble p=0.5",
        "BatchEnsemble ±1",
        "repelling u",
    ),
    "masks": (
        "last-layer dropout",
        "MC dropout, fixed",
        FRESH,
        "Masksembles",
        "disjoint masks",
    ),
    "heads": ("own last layers", "MIMO", "MixMo"),
    "stochastic and low rank": ("rank-1", "low rank, multiplied", "low rank, added"),
    "procedures": (SNAPSHOTS, FAST_GEOMETRIC, SWAG),
}
"""Names of the contestants by kind."""
NAMES = [name for names in KINDS.values() for name in names]
PROCEDURES = KINDS["procedures"]
MIXMO_CONCENTRATION = 2.0  # as in the MixMo paper
_BATCH = 1000


class DivergenceError(ArithmeticError):
    """The training of a contestant diverged."""


def build(cell: Cell, name: str) -> nn.Module:
    """Return an untrained contestant with outputs ``(member, batch, class)``.

    Args:
        cell: Its seed, width and number of members determine the contestant.
        name: Name of a contestant that is not a procedure.

    Returns:
        The contestant; single networks are ensembles of one member.
    """
    network, generator = cell.build_reference()
    if name == WIDE:
        network = widened_reference(cell, cell["members"] * count_parameters(network), generator)
    if cell.setting.network == "mlp":
        network = nn.Sequential(nn.Flatten(), network)
    members = cell["members"]
    signs = laws.Signs(0.0)
    if name in (ONE, WIDE):
        return independent(network, 1, generator=generator)
    if name == SEPARATE:
        return independent(network, members, generator=generator)
    if name == "BatchEnsemble p=0":
        return batch_ensemble(network, members, generator=generator)
    if name == "BatchEnsemble p=0.5":
        return batch_ensemble(network, members, p=0.5, generator=generator)
    if name == "BatchEnsemble ±1":
        return embed(network, members, pre=signs, post=signs, generator=generator)
    if name == "repelling u":
        repelling = laws.Correlated(-0.5 / max(1, members - 1))
        return embed(network, members, pre=signs, post=repelling, generator=generator)
    if name == "last-layer dropout":
        return last_layer_dropout(network, members, law=laws.Normal(), generator=generator)
    if name == "MC dropout, fixed":
        return mc_dropout(network, members, fresh=False, generator=generator)
    if name == FRESH:
        return mc_dropout(network, 1, fresh=True, generator=generator)
    if name == "Masksembles":
        return masksembles(network, members, generator=generator)
    if name == "disjoint masks":
        return embed(
            network, members, pre=None, post=laws.Disjoint(), trainable=False, generator=generator
        )
    if name == "own last layers":
        return embed(network, members, pre=None, post=None, own="last", generator=generator)
    if name == "MIMO":
        return MIMO(network, members, generator=generator)
    if name == "MixMo":
        return MIMO(network, members, mixing=MIXMO_CONCENTRATION, generator=generator)
    if name == "rank-1":
        return Rank1(network, members, generator=generator)
    if name == "low rank, multiplied":
        return low_rank(network, members, generator=generator)
    if name == "low rank, added":
        return low_rank(network, members, kind="additive", generator=generator)
    raise ValueError(f"name must be one of {', '.join(NAMES)}, got {name!r}.")


def widened_reference(cell: Cell, parameters: int, generator: torch.Generator) -> nn.Module:
    """Return a reference network with about a given number of parameters."""
    width = cell.width
    network = build_reference(cell.setting, width, generator=generator)
    # The number of parameters grows with a power of the width between 1 and 2.
    for _ in range(6):
        width *= math.sqrt(parameters / count_parameters(network))
        network = build_reference(cell.setting, width, generator=generator)
    return network


def train_contestant(cell: Cell, name: str, data: DataSet, lr: float) -> nn.Module:
    """Build and train a contestant.

    Args:
        cell: Its setting and seed determine the run.
        name: Name of the contestant.
        data: Its train part is used.
        lr: Learning rate.

    Returns:
        The trained contestant.

    Raises:
        DivergenceError: If the training diverges.
    """
    with torch.random.fork_rng():
        # MixMo and rank-1 draw from the global generator in training.
        torch.manual_seed(cell.seed)
        try:
            if name in PROCEDURES:
                return _train_procedure(cell, name, data, lr)
            contestant = build(cell, name)
            if isinstance(contestant, EmbeddedEnsemble):
                _train_embedded(cell, contestant, data, lr)
            else:
                assert isinstance(contestant, (MIMO, Rank1))
                _train_system(cell, contestant, data, lr)
        except ArithmeticError as error:
            raise DivergenceError(f"{name} diverged at the learning rate {lr:g}.") from error
    return contestant


def _train_embedded(cell: Cell, ensemble: EmbeddedEnsemble, data: DataSet, lr: float) -> None:
    training = train(cell, ensemble, data=data, lr=lr, gamma=ensemble.natural_gamma)
    if training.diverged:
        raise ArithmeticError("the loss is not finite")


def _train_system(cell: Cell, system: MIMO | Rank1, data: DataSet, lr: float) -> None:
    recipe = recipe_of(cell, lr)
    inputs, targets = data.train
    system.train()
    if isinstance(system, MIMO):
        optimizer = recipe.optimizer(system.parameters())
        order = partial(member_orders, members=system.members)
        train_system(system.loss, optimizer, (inputs, targets), recipe, order=order)
    else:
        optimizer = recipe.optimizer(system.parameter_groups(lr, recipe.weight_decay))
        loss = partial(system.loss, rows=len(targets))
        train_system(loss, optimizer, (inputs, targets), recipe)


def _train_procedure(cell: Cell, name: str, data: DataSet, lr: float) -> nn.Module:
    """Train one network and collect members on its way."""
    setting = cell.setting
    network = build(cell, ONE)
    assert isinstance(network, EmbeddedEnsemble)
    if name != SNAPSHOTS:
        # Fast geometric ensembles and SWAG start from a trained network: half of the epochs.
        setting = replace(setting, epochs=max(1, setting.epochs // 2))
        cell = replace(cell, setting=setting)
        _train_embedded(cell, network, data, lr)
    procedures = {
        SNAPSHOTS: snapshot_ensemble,
        FAST_GEOMETRIC: fast_geometric_ensemble,
        SWAG: swag,
    }
    members = cell["members"]
    recipe = replace(recipe_of(cell, lr), epochs=max(members, setting.epochs))
    return procedures[name](network.member(0), tuple(data.train), members, recipe)


def recipe_of(cell: Cell, lr: float) -> Recipe:
    """Return the hyperparameters of a cell for the loops of :mod:`reproduction.systems`."""
    setting = cell.setting
    return Recipe(
        epochs=setting.epochs,
        lr=lr,
        batch_size=setting.batch_size,
        weight_decay=setting.weight_decay,
        seed=cell.seed,
    )


def predict_contestant(cell: Cell, name: str, contestant: nn.Module, inputs: Tensor) -> Tensor:
    """Return the outputs of a contestant in evaluation mode.

    Args:
        cell: Its seed determines random masks; its number of members is that of the fresh masks.
        name: Name of the contestant.
        contestant: The trained contestant.
        inputs: The inputs.

    Returns:
        Outputs ``(member, batch, class)``.
    """
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(cell.seed)
        if isinstance(contestant, EmbeddedEnsemble):
            draws = cell["members"] if name == FRESH else None
            return outputs_of(contestant, inputs, draws=draws)
        contestant.eval()
        outputs = [contestant(batch) for batch in inputs.split(_BATCH)]
        return torch.cat(outputs, dim=1)
