"""Interaction of members in the tangent kernel (fig:NTK_stat_at_init).

Left, mean square of the target-class kernel between members over that within a member, measured (as
the paper) and in the limit; centre and right, weight of m other members in the change of a member's
loss (nll) and target outputs.

There are M = 15 members. The networks are in the NTK parametrization, whose limit is finite, so
that the first measure can be normalised by the limit as well: the measured kernel within a member
has heavy tails at small width, which flatten the paper's ratio.
"""

import math
from dataclasses import replace
from functools import partial

from torch import Tensor

from embens.ensemble import EmbeddedEnsemble
from reproduction.claims import Claim, Frame, Rows, trend
from reproduction.grid.cells import Cell, Row, batch_ensemble, sweep
from reproduction.drawing import Figure, Panel, curves, shades
from reproduction.figures.gradients import WIDTHS, some_samples, weight
from embens.finite import ntk, ntk_ratio, other_members_weight
from embens.theory import kernels

__all__ = ["CLAIMS", "SWEEP", "measure", "plot", "weight"]

KINDS = {"centred": 0.0, "shifted": math.sqrt(0.5)}
SEEDS = {"quick": 10, "cpu": 6, "paper": 10}
SAMPLES = {"quick": 20, "cpu": 12, "paper": 16}
OTHERS = (1, 2, 4, 7, 14)
SWEEP = [sweep(kind=list(KINDS), width=WIDTHS, members=15, samples=SAMPLES)]


def measure(cell: Cell) -> list[Row]:
    """Return a row for each number of other members."""
    setting = replace(cell.setting, parametrization="ntk", weight_std=math.sqrt(2))
    network, generator = replace(cell, setting=setting).draw()
    ensemble = batch_ensemble(network, cell.members, p=KINDS[cell.kind], generator=generator)
    x, y = some_samples(cell, generator)
    target = ntk(ensemble, x, outputs="target", target=y)
    loss = ntk(ensemble, x, outputs="nll", target=y)
    limit = limit_of(ensemble, x, y)
    return [
        {
            "others": count,
            "ratio": float(ntk_ratio(target)),
            "ratio_to_limit": float(ntk_ratio(target, same=limit)),
            "nll": float(other_members_weight(loss, count)),
            "target": float(other_members_weight(target, count)),
        }
        for count in OTHERS
        if count < cell.members
    ]


def limit_of(ensemble: EmbeddedEnsemble, x: Tensor, y: Tensor) -> Tensor:
    """Return the target-class kernel within a member in the limit of infinite width."""
    found = kernels(ensemble, x.double())
    same = found.ntk_shared.same + found.ntk_individual.same
    return same * (y[:, None] == y[None]).to(same)  # outputs of different classes are independent


def _some(rows: Rows, kind: str, x: str, y: str) -> Rows:
    rows = rows.where(kind=kind)
    if x == "others":
        return rows.last("width")
    return rows.first("others") if y.startswith("ratio") else rows.last("others")


_RATIO, _LIMIT = "the ratio falls as 1/width when centred", "ratio_to_limit"
_EXPONENTS = [
    ("centred", "width", _LIMIT, -1.3, -0.7, f"{_RATIO} (by the limit)", "∝ 1/width"),
    ("centred", "width", "ratio", -1.3, -0.7, f"{_RATIO} (by the measured kernel)", "∝ 1/width"),
    ("shifted", "width", _LIMIT, -0.7, 0.3, "the ratio stays when shifted", "constant"),
]
for _y in ("nll", "target"):
    _fall = f"{_y} falls with width (centred)"
    _EXPONENTS += [
        ("centred", "others", _y, 0.7, 1.3, f"{_y} grows as m when centred", "∝ m/width"),
        ("shifted", "others", _y, 1.7, 2.3, f"{_y} grows as m² when shifted", "∝ m²"),
        ("centred", "width", _y, -math.inf, -0.4, _fall, "∝ m/width"),
        ("shifted", "width", _y, -0.3, 0.3, f"{_y} does not depend on width (shifted)", "∝ m²"),
    ]
CLAIMS = [
    Claim(trend(partial(_some, kind=kind, x=x, y=y), y, x, log_y=True), low, high).says(text, paper)
    for kind, x, y, low, high, text, paper in _EXPONENTS
]


def plot(table: Frame) -> Figure:
    """Return the paper's three panels."""
    ratios, weights = [], {"nll": [], "target": []}
    for kind, colour in {"centred": "#1f77b4", "shifted": "#d62728"}.items():
        rows, shade = table[table["kind"] == kind], "winter" if kind == "centred" else "autumn"
        draw = partial(curves, rows[rows["others"] == 1], "width", colours=colour)
        ratios += draw(y="ratio_to_limit", label=f"{kind}, by the limit")
        ratios += draw(y="ratio", label=f"{kind}, by the measured", style="dash")
        by_width = {"by": "width", "label": kind + " ×{}", "colours": shades(rows["width"], shade)}
        for column, found in weights.items():
            found += curves(rows, "others", column, **by_width)
    see, of = "centred: vanishes with width", "between over within, squares"
    panels = [Panel(see, "relative width", of, ratios, 10, 10)]
    for what, found in zip(("loss", "target output"), weights.values(), strict=True):
        see = f"{what}: as m if centred, as m² if shifted"
        panels.append(Panel(see, "other members m", "weight of others", found, 10, 10))
    return Figure(panels, columns=3)
