r"""Interaction of members in the tangent kernel at initialisation (fig:NTK_stat_at_init).

Three measures, for M = 15 members with centred and with shifted modulations: the mean square of
the kernel between members relative to that within a member, and how much of the change of a
member's loss (``nll``) or of its target outputs (``target``) comes from m other members. The
networks are in the NTK parametrization, whose limit is finite, so that the first measure can be
normalised by the limit as well: the measured kernel within a member has heavy tails at small width,
which flatten the paper's ratio.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from torch import Tensor

from embens.ensemble import EmbeddedEnsemble
from embens.experiments.claims import Claim, Frame, Rows, judge, trend
from embens.experiments.contract import Row, batch_ensemble, product
from embens.experiments.figure import Figure, Panel, curves, shades
from embens.experiments.gradients import WIDTHS, Cell, some_samples
from embens.experiments.setting import Setting
from embens.finite import ntk, ntk_ratio, other_members_weight
from embens.theory import kernels

LABEL = "fig:NTK_stat_at_init"
TITLE = "Interaction of members in the tangent kernel"
ABOUT = (
    "Left, mean square of the target-class kernel between members over that within a member, "
    "measured (as the paper) and in the limit; centre and right, weight of m other members in the "
    "change of a member's loss (nll) and target outputs."
)
KINDS = {"centred": 0.0, "shifted": math.sqrt(0.5)}
SEEDS = {"quick": 10, "cpu": 6, "paper": 10}
SAMPLES = {"quick": 20, "cpu": 12, "paper": 16}
OTHERS = (1, 2, 4, 7, 14)


def cells(setting: Setting) -> list[Cell]:
    """Return initialisations of both laws at all widths."""
    widths, samples = WIDTHS[setting.preset], [SAMPLES[setting.preset]]
    return product(Cell, setting, kind=KINDS, width=widths, members=[15], samples=samples)


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


def claims(table: Frame) -> list[Claim]:
    """Return the paper's observations on this figure."""

    def exponent(name: str, x: str, y: str, low: float, high: float) -> Claim:
        def some(rows: Rows) -> Rows:
            rows = rows.where(kind=name.partition(":")[0])
            if x == "others":
                return rows.last("width")
            return rows.first("others") if y.startswith("ratio") else rows.last("others")

        found, measure = trend(some, y, x, log_y=True), f"exponent of {y.replace('_', ' ')} in {x}"
        return judge(table, name, found, above=low, below=high, measure=measure)

    found = [
        exponent("centred: ratio", "width", "ratio_to_limit", -1.3, -0.7).says(
            "the ratio falls as 1/width when centred (by the limit)", paper="∝ 1/width"
        ),
        exponent("centred: measured ratio", "width", "ratio", -1.3, -0.7).says(
            "and so does the ratio by the measured kernel", paper="∝ 1/width"
        ),
        exponent("shifted: ratio", "width", "ratio_to_limit", -0.7, 0.3).says(
            "the ratio does not fall when shifted (by the limit)", paper="constant"
        ),
    ]
    for name in ("nll", "target"):
        found += [
            exponent(f"centred: {name} and m", "others", name, 0.7, 1.3).says(
                f"the {name} measure grows as m when centred", paper="∝ m/width"
            ),
            exponent(f"shifted: {name} and m", "others", name, 1.7, 2.3).says(
                f"the {name} measure grows as m² when shifted", paper="∝ m²"
            ),
            exponent(f"centred: {name} and width", "width", name, -math.inf, -0.4).says(
                f"the {name} measure falls with width when centred", paper="∝ m/width"
            ),
            exponent(f"shifted: {name} and width", "width", name, -0.3, 0.3).says(
                f"the {name} measure does not depend on width when shifted", paper="∝ m²"
            ),
        ]
    return found


def plot(table: Frame) -> Figure:
    """Return the paper's three panels."""
    ratios = []
    for kind, colour in (("centred", "#1f77b4"), ("shifted", "#d62728")):
        rows = table[(table["kind"] == kind) & (table["others"] == 1)]
        draw = partial(curves, rows, "width", colours=colour)
        ratios += draw(y="ratio_to_limit", label=f"{kind}, by the limit")
        ratios += draw(y="ratio", label=f"{kind}, by the measured", style="dash")
    panels = [Panel("cross/same", "relative width", "ratio of squares", ratios, 10, 10)]
    for column in ("nll", "target"):
        found = []
        for kind, shade in (("centred", "winter"), ("shifted", "autumn")):
            rows = table[table["kind"] == kind]
            some = shades(rows["width"], shade)
            found += curves(rows, "others", column, by="width", label=kind + " ×{}", colours=some)
        panels.append(Panel(column, "other members m", "weight of others", found, 10, 10))
    return Figure(TITLE, panels, columns=3)
