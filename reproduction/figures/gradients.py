"""Gradients of members at initialisation (fig:Gradients_at_init).

Left, histogram of the norms of members' gradients (log10), with modulations at hidden sites and
also at inputs and outputs. Centre and right, mean |cos| between the gradients of two members
against the relative width, in total and by layer, for N(0, 1) and N(1/√2, 1/2).

The paper reads |cos| ∝ 1/width from its plot; the theory has the exponents −1/2 in total, −1 in
inner layers and −1 for cos², because the first and the last layer's gradients overlap more.
"""

import math

import torch
from torch import Tensor

from reproduction.claims import Claim, Frame, Rows, trend, where
from reproduction.grid.cells import Cell, Row, batch_ensemble, sweep
from reproduction.drawing import Curve, Figure, Panel, curves
from reproduction.grid.settings import data_set
from embens.finite import gradient_cosines, gradient_norms

KINDS = {"centred": 0.0, "shifted": math.sqrt(0.5), "input and output": 0.0}
PARTS = {"total": "#1f77b4", "first": "#2ca02c", "inner": "#d62728", "last": "#9467bd"}

WIDTHS = {
    "quick": (1.0, 2.0, 4.0, 8.0, 16.0, 32.0),
    "cpu": (0.5, 1.0, 2.0, 4.0, 8.0),
    "paper": (0.125, 0.25, 0.5, 1.0, 2.0, 4.0),
}
SEEDS = {"quick": 30, "cpu": 10, "paper": 20}

SWEEP = [
    sweep(kind=["centred", "shifted"], width=WIDTHS, members=8, samples=64),
    sweep(kind="input and output", width=1.0, members=8, samples=64),
]


def weight(cell: Cell) -> float:
    """Return roughly what a cell costs: nothing is trained."""
    return 1 + cell.width**2 / 16


def some_samples(cell: Cell, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return as many train samples as the cell says, drawn at random."""
    inputs, targets = data_set(cell.setting).train
    chosen = torch.randperm(len(targets), generator=generator)[: cell.samples]
    return inputs[chosen], targets[chosen]


def measure(cell: Cell) -> list[Row]:
    """Return a row for each member: its gradient's norm, and its cosines with the others."""
    network, generator = cell.draw()
    sites = "all" if cell.kind == "input and output" else "hidden"
    p = KINDS[cell.kind]
    ensemble = batch_ensemble(network, cell.members, p=p, sites=sites, generator=generator)
    x, y = some_samples(cell, generator)
    norms = gradient_norms(ensemble, x, y).total
    layers: list[Tensor] = list(gradient_cosines(ensemble, x, y, by_layer=True).values())  # type: ignore
    total = gradient_cosines(ensemble, x, y)
    parts = {"total": [total], "first": layers[:1], "inner": layers[1:-1], "last": layers[-1:]}
    rows = []
    for a, norm in enumerate(norms):
        row = {"member": float(a), "norm": float(norm)}
        others = torch.arange(cell.members) != a
        for part, matrices in parts.items():
            cosines = torch.stack([matrix[a].cpu()[others] for matrix in matrices])
            row[f"cos_{part}"] = float(cosines.abs().mean())
            row[f"cos2_{part}"] = float(cosines.square().mean())
        rows.append(row)
    return rows


def _spread(rows: Rows, kind: str) -> float:
    norms = rows.where(kind=kind, width=1.0)["norm"].clip(lower=1e-30).map(math.log10)
    return float(norms.quantile(0.95) - norms.quantile(0.05))


def _exponent_of_deviation(rows: Rows) -> float:
    """Exponent of the standard deviation in the width."""
    means = rows.where(kind="centred").frame.groupby("width").mean(numeric_only=True).reset_index()
    variance = (means["cos2_total"] - means["cos_total"] ** 2).clip(lower=1e-30)
    return Rows(means.assign(deviation=variance**0.5)).slope("width", "deviation", log_y=True)


_POWER, _INVERSE, _ROOT = "falls as 1/width", "|cos| ∝ 1/width", "|cos| ∝ width^−1/2"
_EXPONENTS = (
    ("centred", "cos_total", -math.inf, -0.25, "|cos| falls as a power of width when centred"),
    ("shifted", "cos_total", -0.15, math.inf, "|cos| stays when shifted"),
    ("centred", "cos_total", -1.2, -0.8, f"{_INVERSE}, as the paper says"),
    ("centred", "cos_total", -0.7, -0.3, f"{_ROOT}, as the theory says"),
    ("centred", "cos_inner", -1.2, -0.8, f"{_INVERSE} in inner layers (theory)"),
    ("centred", "cos_first", -0.7, -0.3, f"{_ROOT} in the first layer (theory)"),
    ("centred", "cos_last", -0.7, -0.3, f"{_ROOT} in the last layer (theory)"),
    ("centred", "cos2_total", -1.3, -0.7, "cos² ∝ 1/width (theory)"),
)
CLAIMS = [
    Claim(lambda t: _spread(t, "input and output") - _spread(t, "centred"), above=1.0).says(
        "input and output modulations spread gradient norms by an order of magnitude",
        "increase of the spread by several orders of magnitude",
        "decades from the 5 % to the 95 % quantile, difference",
    ),
    *(
        Claim(trend(where(kind=kind), column, "width", log_y=True), low, high).says(
            statement,
            "not orthogonal in general" if kind == "shifted" else _POWER,
            f"exponent in the width, {kind} modulations",
        )
        for kind, column, low, high, statement in _EXPONENTS
    ),
    Claim(_exponent_of_deviation, below=-0.25).says(
        "the standard deviation of |cos| falls as well", _POWER
    ),
]


def plot(table: Frame) -> Figure:
    """Return the paper's three panels."""
    import numpy

    bars = []
    for kind, colour in {"centred": "#8c564b", "input and output": "#bcbd22"}.items():
        norms = numpy.log10(table[(table["kind"] == kind) & (table["width"] == 1.0)]["norm"])
        counts, edges = numpy.histogram(norms, bins=30, range=(-4, 3))
        x, y = (edges[1:] + edges[:-1]) / 2, counts / max(1, len(norms))
        bars.append(Curve(f"{kind}: norms", x.tolist(), y.tolist(), [], colour, "bars"))
    wide = "wider with inputs and outputs modulated?"
    panels = [Panel(wide, "log10 of the gradient's norm, width 1", "part of members", bars)]
    for kind, see in (("centred", "falls with width"), ("shifted", "stays?")):
        rows = table[table["kind"] == kind].rename(columns={f"cos_{part}": part for part in PARTS})
        rows = rows.melt(["width", "seed"], list(PARTS), "part", "cos")
        found = curves(rows, "width", "cos", by="part", colours=PARTS)
        panels.append(Panel(f"{kind}: |cos| {see}", "relative width", "mean |cos|", found, 10, 10))
    return Figure(panels, columns=3)
