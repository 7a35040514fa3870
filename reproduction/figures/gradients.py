"""Gradients of members at initialisation (fig:Gradients_at_init).

Left, histogram of the norms of members' gradients (log10), with modulations at hidden sites and
also at inputs and outputs. Centre and right, mean |cos| between the gradients of two members
against the relative width, in total and by layer, for N(0, 1) and N(1/√2, 1/2).

The paper reads |cos| ∝ 1/width from its plot. The theory predicts the exponents −1/2 in total, −1
in inner layers and −1 for cos², because the gradients of the first and the last layer overlap more.
"""

import math
from functools import partial

import torch
from torch import Tensor

from embens.finite import gradient_cosines, gradient_norms
from reproduction.claims import Claim, slope
from reproduction.drawing import (
    BLUE,
    BROWN,
    GREEN,
    OLIVE,
    PURPLE,
    RED,
    Curve,
    Figure,
    Mark,
    Panel,
    curves,
    state,
)
from reproduction.grid.cells import Cell, Row, sweep
from reproduction.grid.settings import load_data
from reproduction.rows import Frame, Rows, where
from reproduction.training import batch_ensemble

SHIFTS = {"centred": 0.0, "shifted": math.sqrt(0.5), "input and output": 0.0}
PARTS = {"total": BLUE, "first": GREEN, "inner": RED, "last": PURPLE}
"""Parts of the network, with their colours."""

WIDTHS = {
    "quick": (1.0, 2.0, 4.0, 8.0, 16.0, 32.0),
    "cpu": (0.125, 0.25, 0.5, 1.0, 2.0, 4.0),
    "paper": (0.125, 0.25, 0.5, 1.0, 2.0, 4.0),
}
SEEDS = {"quick": 30, "cpu": 6, "gpu": 6, "paper": 20}
SAMPLES = {"quick": 64, "cpu": 32, "paper": 64}
# Nothing is trained, so that the paper's network and images take minutes on a CPU, and recorded
# learning rates do not matter.
PAPER_NETWORK = {
    "labels": "fine",
    "image": 32,
    "train": 2000,
    "test": 100,
    "channels": (64, 128, 256, 512),
    "parametrization": "xavier",
    "weight_std": 1.0,
    "epochs": 0,
    "rates": (),
}
CHANGES = {"cpu": PAPER_NETWORK}

SWEEP = [
    sweep(kind=["centred", "shifted"], width=WIDTHS, members=8, samples=SAMPLES),
    sweep(kind="input and output", width=1.0, members=8, samples=SAMPLES),
]


def estimate_cost(cell: Cell) -> float:
    """Return the rough cost of a cell; nothing is trained."""
    return (1 + cell.width**2 * cell.setting.channels[0]) * cell["samples"]


def draw_samples(cell: Cell, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return random training samples, as many as the cell asks for."""
    inputs, targets = load_data(cell.setting).train
    index = torch.randperm(len(targets), generator=generator)[: cell["samples"]]
    return inputs[index], targets[index]


def measure(cell: Cell) -> list[Row]:
    """Return a row for each member: the norm of its gradient and its cosines with the others."""
    network, generator = cell.build_reference()
    ensemble = batch_ensemble(
        network,
        cell["members"],
        p=SHIFTS[cell["kind"]],
        sites="all" if cell["kind"] == "input and output" else "hidden",
        generator=generator,
    )
    x, y = draw_samples(cell, generator)
    layer_norms = gradient_norms(ensemble, x, y)
    norms = layer_norms.total
    by_layer: dict[str, Tensor] = gradient_cosines(ensemble, x, y, by_layer=True)  # type: ignore
    layers = list(by_layer.values())
    matrices_of_part = {
        "total": [total_cosines(by_layer, dict(layer_norms))],
        "first": layers[:1],
        "inner": layers[1:-1],
        "last": layers[-1:],
    }
    rows = []
    for member, norm in enumerate(norms):
        row = {"member": float(member), "norm": float(norm)}
        others = torch.arange(cell["members"]) != member
        for part, matrices in matrices_of_part.items():
            cosines = torch.stack([matrix[member].cpu()[others] for matrix in matrices])
            row[f"cos_{part}"] = float(cosines.abs().mean())
            row[f"cos2_{part}"] = float(cosines.square().mean())
        rows.append(row)
    return rows


def total_cosines(cosines: dict[str, Tensor], norms: dict[str, Tensor]) -> Tensor:
    """Return the cosines of whole gradients from those of the layers.

    Args:
        cosines: Cosines ``(member, member)`` by layer.
        norms: Norms ``(member,)`` by layer.

    Returns:
        Cosines ``(member, member)``.
    """
    parts = []
    for name, matrix in cosines.items():
        parts.append(matrix * torch.outer(norms[name], norms[name]))
    products = torch.stack(parts).sum(0)
    lengths = products.diagonal().sqrt()
    return products / torch.outer(lengths, lengths)


def decades_of_norms(rows: Rows, kind: str) -> float:
    """Return the decades from the 5 % to the 95 % quantile of the norms, at width 1."""
    norms = rows.where(kind=kind, width=1.0)["norm"].clip(lower=1e-30)
    log_norms = norms.map(math.log10)
    return float(log_norms.quantile(0.95) - log_norms.quantile(0.05))


def increase_of_spread(rows: Rows) -> float:
    """Return how many decades input and output modulations add to the spread of norms."""
    return decades_of_norms(rows, "input and output") - decades_of_norms(rows, "centred")


def exponent_of_deviation(rows: Rows) -> float:
    """Return the exponent of the standard deviation of |cos| in the width."""
    means = rows.where(kind="centred").frame.groupby("width").mean(numeric_only=True).reset_index()
    variance = (means["cos2_total"] - means["cos_total"] ** 2).clip(lower=1e-30)
    deviations = Rows(means.assign(deviation=variance**0.5))
    return deviations.slope("width", "deviation", log_y=True)


def exponent_claim(
    kind: str, column: str, above: float, below: float, statement: str, paper: str
) -> Claim:
    """Return a claim on the exponent of a column in the width."""
    return Claim(
        statement=statement,
        measure=f"exponent in the width, {kind} modulations",
        statistic=slope(where(kind=kind), column, "width", log_y=True),
        above=above,
        below=below,
        paper=paper,
    )


FALLS = "falls as 1/width"
CLAIMS = [
    Claim(
        statement="input and output modulations spread gradient norms by an order of magnitude",
        measure="difference of the decades from the 5 % to the 95 % quantile",
        statistic=increase_of_spread,
        above=1.0,
        paper="increase of the spread by several orders of magnitude",
    ),
    exponent_claim(
        "centred",
        "cos_total",
        -math.inf,
        -0.25,
        "|cos| falls as a power of width when centred",
        FALLS,
    ),
    exponent_claim(
        "shifted",
        "cos_total",
        -0.15,
        math.inf,
        "|cos| does not fall when shifted",
        "not orthogonal in general",
    ),
    exponent_claim("centred", "cos_total", -1.2, -0.8, "|cos| ∝ 1/width, as in the paper", FALLS),
    exponent_claim(
        "centred", "cos_total", -0.7, -0.3, "|cos| ∝ width^−1/2, as in the theory", FALLS
    ),
    exponent_claim(
        "centred", "cos_inner", -1.2, -0.8, "|cos| ∝ 1/width in inner layers (theory)", FALLS
    ),
    exponent_claim(
        "centred", "cos_first", -0.7, -0.3, "|cos| ∝ width^−1/2 in the first layer (theory)", FALLS
    ),
    exponent_claim(
        "centred", "cos_last", -0.7, -0.3, "|cos| ∝ width^−1/2 in the last layer (theory)", FALLS
    ),
    exponent_claim("centred", "cos2_total", -1.3, -0.7, "cos² ∝ 1/width (theory)", FALLS),
    Claim(
        statement="the standard deviation of |cos| falls as well",
        measure="exponent of the standard deviation in the width",
        statistic=exponent_of_deviation,
        below=-0.25,
        paper=FALLS,
    ),
]


def plot(table: Frame) -> Figure:
    """Return the paper's three panels."""
    histograms = [
        _histogram(table, "centred", BROWN),
        _histogram(table, "input and output", OLIVE),
    ]
    all_panels = [
        Panel(
            state(
                lambda: f"inputs and outputs add {increase_of_spread(Rows(table)):.1f} decades",
                "gradient norms",
            ),
            "log10 of the gradient's norm, width 1",
            "fraction of members",
            histograms,
        )
    ]
    for kind in ("centred", "shifted"):
        exponent = state(partial(exponent_text, Rows(table), kind), "|cos| against width")
        rows = table[table["kind"] == kind].rename(columns={f"cos_{part}": part for part in PARTS})
        rows = rows.melt(["width", "seed"], list(PARTS), "part", "cos")
        by_part = curves(rows, "width", "cos", by="part", colours=PARTS)
        marks = [Mark("paper: constant", exponent=0.0)]
        if kind == "centred":
            marks = [Mark("paper: 1/width", exponent=-1.0)]
        title = f"{kind}: {exponent}"
        all_panels.append(Panel(title, "relative width", "mean |cos|", by_part, 10, 10, marks))
    return Figure(all_panels, columns=3)


def exponent_text(rows: Rows, kind: str) -> str:
    """Return the exponents of |cos| in the width, in total and in inner layers, as a text."""
    selected = rows.where(kind=kind)
    total = selected.slope("width", "cos_total", log_y=True)
    inner = selected.slope("width", "cos_inner", log_y=True)
    return f"|cos| ∝ width^{total:.2f}, inner layers {inner:.2f}"


def _histogram_limits(table: Frame) -> tuple[float, float]:
    """Return the decades that contain all norms at the width of the histograms."""
    norms = table.loc[table["width"] == 1.0, "norm"].dropna()
    if not len(norms):
        return -4.0, 3.0
    return math.floor(math.log10(norms.min())), math.ceil(math.log10(norms.max()))


def _histogram(table: Frame, kind: str, colour: str) -> Curve:
    import numpy

    rows = table[(table["kind"] == kind) & (table["width"] == 1.0)]
    limits = _histogram_limits(table)
    counts, edges = numpy.histogram(numpy.log10(rows["norm"]), bins=30, range=limits)
    centres = (edges[1:] + edges[:-1]) / 2
    fractions = counts / max(1, len(rows))
    return Curve(
        f"{kind}: norms", centres.tolist(), fractions.tolist(), colour=colour, style="bars"
    )
