"""Choice of learning rates and of the training length (ours: tuning).

Validation log loss against the learning rate for each family, and for networks against the number
of epochs. A family has one rate for all its cells, so its rate is the best on average over a few of
them. The training length is the shortest one whose loss is close to the best.

The test part is not used. ``python -m reproduction record DIR`` writes the choice to
``choices.json``, which the presets read.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

from embens import (
    EmbeddedEnsemble,
    embed,
    independent,
    last_layer_dropout,
    laws,
    low_rank,
    mc_dropout,
    metrics,
)
from reproduction.baselines import with_validation
from reproduction.claims import Claim
from reproduction.drawing import Figure, Panel, curves, shades
from reproduction.grid.cells import Cell, Row, Sweep, sweep, training_cost
from reproduction.grid.settings import (
    DROPOUT,
    LAST_LAYER,
    LOW_RANK,
    MODULATIONS,
    NETWORKS,
    SIGNS,
    load_data,
)
from reproduction.rows import Frame, MissingCellsError
from reproduction.training import outputs_of, train

TOLERANCE = 0.02
"""Log loss that a shorter training may lose against the best length."""
RATES = {
    "quick": (0.003, 0.012, 0.048),
    "cpu": (0.0125, 0.03, 0.075, 0.15),
    "paper": (0.01, 0.04, 0.16),
}
NETWORK_RATES = {**RATES, "cpu": (0.03, 0.06, 0.12, 0.24)}
"""Learning rates of networks; a step of an ensemble with γ=M is up to M times as long."""
LENGTHS = {"quick": 60, "cpu": (15, 20, 30), "gpu": 200, "paper": 1000}
LENGTH = {"quick": 60, "cpu": 15, "gpu": 200, "paper": 1000}
"""Number of epochs at which the rates of the ensembles are compared."""
SEEDS = {"quick": 3, "cpu": 1, "gpu": 1, "paper": 1}
TUNED_CASES = (
    # Family, p, members. A rate must suit both regimes; in the collective one, γ=M multiplies it
    # by M.
    (MODULATIONS, 0.0, 4),
    (MODULATIONS, 0.9, 4),
    (SIGNS, 0.0, 4),
    (SIGNS, 0.9, 4),
    (DROPOUT, 0.0, 4),
    (LAST_LAYER, 0.0, 8),
    (LOW_RANK, 0.0, 4),
)


def _case_sweep(family: str, p: float, members: int) -> Sweep:
    return sweep(family=family, p=p, members=members, length=LENGTH, lr=RATES)


SWEEP = [
    sweep(family=NETWORKS, p=0.0, members=2, length=LENGTHS, lr=NETWORK_RATES),
    *(_case_sweep(*case) for case in TUNED_CASES),
]
CLAIMS: list[Claim] = []


def estimate_cost(cell: Cell) -> float:
    """Return the rough cost of a cell."""
    networks = 1 if cell["family"] == LAST_LAYER else cell["members"]
    setting = replace(cell.setting, epochs=cell["length"])
    return training_cost(replace(cell, setting=setting).with_values(members=networks))


def build(cell: Cell) -> EmbeddedEnsemble:
    """Return the untrained ensemble of a cell."""
    family = cell["family"]
    if family == NETWORKS:
        return cell.build_ensemble(independent)
    if family == DROPOUT:
        return cell.build_ensemble(mc_dropout, law=laws.Normal(), fresh=False)
    if family == LAST_LAYER:
        return cell.build_ensemble(last_layer_dropout, law=laws.Normal())
    if family == LOW_RANK:
        return cell.build_ensemble(low_rank)
    law = laws.Signs(cell["p"]) if family == SIGNS else laws.Shifted(cell["p"])
    return cell.build_ensemble(embed, pre=law, post=law)


def measure(cell: Cell) -> Row:
    """Train one ensemble and return its validation loss; that of networks is a mean over them."""
    cell = replace(cell, setting=replace(cell.setting, epochs=cell["length"]))
    data = with_validation(load_data(cell.setting), cell.seed)
    assert data.validation is not None
    ensemble = build(cell)
    training = train(cell, ensemble, data=data, lr=cell["lr"])
    outputs = outputs_of(ensemble, data.validation.inputs)
    targets = data.validation.targets
    if cell["family"] == NETWORKS:
        loss = float(metrics.member_nll(outputs, targets).mean())
    else:
        loss = float(metrics.nll(outputs, targets))
    return {
        "validation_nll": loss,
        "validation_accuracy": float(metrics.ensemble_accuracy(outputs, targets)),
        "diverged": float(training.diverged),
    }


def choose(table: Frame) -> dict[str, Any]:
    """Return the training length and the best rate of each family.

    Args:
        table: Table of the tuning.

    Returns:
        ``epochs``, ``rates`` by family, and ``validation_nll`` by family and rate.

    Raises:
        MissingCellsError: If a family diverges at all rates, or has no cells.
    """
    # A run that diverged is worse than any finite loss.
    losses = table["validation_nll"].where(table["diverged"] == 0, math.inf)
    means = losses.groupby([table["family"], table["length"], table["lr"]]).mean()
    if NETWORKS not in means:
        raise MissingCellsError(f"cells of the family {NETWORKS}")
    best_by_length = means[NETWORKS].groupby("length").min()
    is_close = best_by_length <= best_by_length.min() + TOLERANCE
    epochs = int(best_by_length[is_close].index.min())
    rates, curves_of_family = {}, {}
    for family in sorted(table["family"].unique()):
        by_rate = means[family].groupby("lr").mean()
        if family == NETWORKS:
            by_rate = means[family][epochs]
        if math.isinf(by_rate.min()):
            raise MissingCellsError(f"a learning rate at which {family} does not diverge")
        rates[family] = float(by_rate.idxmin())
        curves_of_family[family] = {f"{rate:g}": round(loss, 4) for rate, loss in by_rate.items()}
    return {"epochs": epochs, "rates": rates, "validation_nll": curves_of_family}


def plot(table: Frame) -> Figure:
    """Return the loss of networks by length, and of each family by rate."""
    networks = table[table["family"] == NETWORKS]
    ensembles = table[table["family"] != NETWORKS]
    by_length = partial(
        curves, by="length", label="{} epochs", colours=shades(networks["length"], "plasma")
    )
    by_family = partial(curves, by="family", colours=shades(ensembles["family"]))
    labels = ("learning rate", "log loss, validation")
    all_panels = [
        Panel("networks: which length?", *labels, by_length(networks, "lr", "validation_nll"), 10)
    ]
    if len(ensembles):
        ensemble_curves = by_family(ensembles, "lr", "validation_nll")
        all_panels.append(Panel("ensembles: which rate?", *labels, ensemble_curves, 10))
    return Figure(all_panels, columns=2)
