"""Gradients of members at initialisation (fig:Gradients_at_init).

Left, norms of members' gradients with and without input and output modulations. Centre and right,
the mean |cos| between members' gradients of the shared weights against width, for centred and for
shifted modulations. The paper reads |cos| ∝ 1/width from its plot; the theory has −1/2 in total, −1
in inner layers and −1 for cos², because the first and the last layer's gradients overlap more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch

from embens.embedding.families import batch_ensemble
from embens.experiments.claims import Claim, Table, curve, judge, line, select, slope
from embens.experiments.figure import Curve, Figure, Panel, curves
from embens.experiments.setting import Setting, data_set, reference
from embens.finite import gradient_cosines, gradient_norms

LABEL = "fig:Gradients_at_init"
TITLE = "Gradients of members at initialisation"
ABOUT = (
    "Left, histogram of the norms of members' gradients (log10), with modulations at hidden sites "
    "and also at inputs and outputs. Centre and right, mean |cos| between the gradients of two "
    "members against the relative width, in total and by layer, for N(0, 1) and N(1/√2, 1/2)."
)
KINDS = {"centred": 0.0, "shifted": math.sqrt(0.5), "input and output": 0.0}
PARTS = {"total": "#1f77b4", "first": "#2ca02c", "inner": "#d62728", "last": "#9467bd"}


@dataclass(frozen=True)
class Cell:
    """One initialisation."""

    setting: Setting
    kind: str
    width: float
    members: int
    samples: int
    seed: int

    @property
    def weight(self) -> float:
        """See :func:`embens.experiments.contract.weight`."""
        return 1 + self.width**2 / 16


WIDTHS = {
    "quick": (1.0, 2.0, 4.0, 8.0, 16.0, 32.0),
    "cpu": (0.5, 1.0, 2.0, 4.0, 8.0),
    "paper": (0.125, 0.25, 0.5, 1.0, 2.0, 4.0),
}
SEEDS = {"quick": 30, "cpu": 10, "paper": 20}


def cells(setting: Setting, *, seeds: int | None = None) -> list[Cell]:
    """Return initialisations of both laws at all widths, and with modulated inputs at width 1."""
    return [
        Cell(setting, kind, width, 8, 64, seed)
        for seed in range(seeds or SEEDS[setting.preset])
        for kind in KINDS
        for width in WIDTHS[setting.preset]
        if kind != "input and output" or width == 1.0
    ]


def measure(cell: Cell) -> list[dict[str, float]]:
    """Return a row for each member: its gradient's norm, and its cosines with the others."""
    generator = torch.Generator().manual_seed(cell.seed)
    network = reference(cell.setting, cell.width, generator=generator)
    sites = "all" if cell.kind == "input and output" else "hidden"
    ensemble = batch_ensemble(
        network, cell.members, p=KINDS[cell.kind], sites=sites, generator=generator
    )
    data = data_set(cell.setting)
    chosen = torch.randperm(len(data.train.targets), generator=generator)[: cell.samples]
    x, y = data.train.inputs[chosen], data.train.targets[chosen]
    norms = gradient_norms(ensemble, x, y).total
    found = gradient_cosines(ensemble, x, y, by_layer=True)
    layers = list(found.values())  # type: ignore[union-attr]
    total = gradient_cosines(ensemble, x, y)
    parts = {"total": [total], "first": layers[:1], "inner": layers[1:-1], "last": layers[-1:]}
    rows = []
    others = 1 - torch.eye(cell.members)
    for a in range(cell.members):
        row = {"member": float(a), "norm": float(norms[a])}
        for part, matrices in parts.items():
            cosines = torch.stack([m[a].cpu()[others[a] > 0] for m in matrices])  # type: ignore
            row[f"cos_{part}"] = float(cosines.abs().mean())
            row[f"cos2_{part}"] = float(cosines.square().mean())
        rows.append(row)
    return rows


def _spread(table: Table, kind: str) -> float:
    """Return the decades between the 5 % and 95 % quantiles of norms."""
    import numpy

    norms = numpy.log10(select(table, kind=kind, width=1.0)["norm"].clip(lower=1e-30))
    return float(norms.quantile(0.95) - norms.quantile(0.05))


def _exponent(table: Table, kind: str, column: str) -> float:
    return slope(select(table, kind=kind), "width", column, log_y=True)


def _exponent_of_deviation(table: Table) -> float:
    """Return the exponent of the standard deviation of |cos| in the width."""
    rows = select(table, kind="centred")
    widths, means = curve(rows, "width", "cos_total")
    _, squares = curve(rows, "width", "cos2_total")
    deviations = [math.sqrt(max(s - m * m, 1e-30)) for s, m in zip(squares, means, strict=True)]
    return line([math.log2(w) for w in widths], [math.log2(d) for d in deviations])


def claims(table: Table) -> list[Claim]:
    """Return the paper's observations, and the theory's exponents beside them."""
    test = partial(judge, table)
    power = "falls as 1/width"

    def exponent(name: str, column: str, statement: str, paper: str, low: float, high: float):
        return test(
            partial(_exponent, kind="centred", column=column),
            name=name,
            statement=statement,
            paper=paper,
            measure="exponent in the width, centred modulations",
            above=low,
            below=high,
        )

    return [
        test(
            lambda t: _spread(t, "input and output") - _spread(t, "centred"),
            name="spread of norms",
            statement="input and output modulations spread gradient norms by an order of magnitude",
            paper="increase of the spread by several orders of magnitude",
            measure="decades from the 5 % to the 95 % quantile, difference",
            above=1.0,
        ),
        test(
            partial(_exponent, kind="centred", column="cos_total"),
            name="falls when centred",
            statement="|cos| falls as a power of width when modulations are centred",
            paper=power,
            measure="exponent of |cos| in the width",
            below=-0.25,
        ),
        test(
            partial(_exponent, kind="shifted", column="cos_total"),
            name="stays when shifted",
            statement="|cos| stays when modulations are shifted",
            paper="gradients are not orthogonal in general",
            measure="exponent of |cos| in the width",
            above=-0.15,
        ),
        test(
            _exponent_of_deviation,
            name="deviation falls",
            statement="the standard deviation of |cos| falls as well",
            paper=power,
            measure="exponent of the standard deviation in the width",
            below=-0.25,
        ),
        exponent("exponent −1", "cos_total", "|cos| ∝ 1/width, as the paper says", power, -1.2,
                 -0.8),
        exponent("exponent −1/2", "cos_total", "|cos| ∝ width^−1/2, as the theory says", power,
                 -0.7, -0.3),
        exponent("inner layers", "cos_inner", "|cos| ∝ 1/width in inner layers (theory)", power,
                 -1.2, -0.8),
        exponent("first layer", "cos_first", "|cos| ∝ width^−1/2 in the first layer (theory)",
                 power, -0.7, -0.3),
        exponent("last layer", "cos_last", "|cos| ∝ width^−1/2 in the last layer (theory)", power,
                 -0.7, -0.3),
        exponent("cos²", "cos2_total", "cos² ∝ 1/width (theory)", power, -1.3, -0.7),
    ]  # fmt: skip


def _histogram(table: Table, kind: str, colour: str) -> Curve:
    import numpy

    norms = numpy.log10(table[(table["kind"] == kind) & (table["width"] == 1.0)]["norm"])
    if not len(norms):
        return Curve(kind, [], [], [], colour, "bars")
    counts, edges = numpy.histogram(norms, bins=30, range=(-4, 3))
    centres = (edges[1:] + edges[:-1]) / 2
    return Curve(kind, centres.tolist(), (counts / len(norms)).tolist(), [], colour, "bars")


def plot(table: Table) -> Figure:
    """Return the paper's three panels."""
    names = (("centred", "#1f77b4"), ("input and output", "#bcbd22"))
    panels = [
        Panel(
            "gradient norms at width 1",
            "log10 of the norm",
            "part of members",
            [_histogram(table, kind, colour) for kind, colour in names],
        )
    ]
    for kind in ("centred", "shifted"):
        rows = table[table["kind"] == kind]
        found = [
            Curve(part, c.x, c.y, c.error, c.colour)
            for part, colour in PARTS.items()
            for c in curves(rows, "width", f"cos_{part}", colours=[colour])
        ]
        panels.append(Panel(kind, "relative width", "mean |cos|", found, x_log=True, y_log=True))
    return Figure(TITLE, panels, columns=3)
