"""Interaction of members in the tangent kernel (fig:NTK_stat_at_init).

Left, mean square of the target-class kernel between members relative to that within a member,
measured (as in the paper) and in the limit; centre and right, weight of m other members in the
change of a member's loss (nll) and target outputs.

There are M = 15 members, in the parametrization of the preset (the paper's: Xavier). The NTK
parametrization is measured as well, because its limit is finite: there the first quantity can be
normalised by the limit. The measured kernel within a member has heavy tails at small width, which
flatten the paper's ratio.
"""

import math
from dataclasses import replace
from functools import partial

from torch import Tensor

from embens import EmbeddedEnsemble
from embens.finite import ntk, ntk_ratio, other_members_weight
from embens.theory import kernels
from reproduction.claims import Claim, slope
from reproduction.drawing import BLUE, RED, Figure, Mark, Panel, curves, shades, state
from reproduction.figures.gradients import PAPER_NETWORK, WIDTHS, draw_samples, estimate_cost
from reproduction.grid.cells import Cell, Row, sweep
from reproduction.rows import Frame, Rows
from reproduction.training import batch_ensemble

__all__ = ["CLAIMS", "SWEEP", "estimate_cost", "measure", "plot"]

SHIFTS = {"centred": 0.0, "shifted": math.sqrt(0.5)}
TRAINED, NTK = "of the preset", "ntk"
"""Parametrizations."""
SEEDS = {"quick": 10, "cpu": 6, "gpu": 6, "paper": 10}
CHANGES = {"cpu": PAPER_NETWORK}
SAMPLES = {"quick": 20, "cpu": 12, "paper": 16}
OTHERS = (1, 2, 4, 7, 14)
SWEEP = [
    sweep(
        parametrization=(TRAINED, NTK),
        kind=list(SHIFTS),
        width=WIDTHS,
        members=15,
        samples=SAMPLES,
    )
]


def measure(cell: Cell) -> list[Row]:
    """Return a row for each number of other members."""
    is_ntk = cell["parametrization"] == NTK
    if is_ntk:
        setting = replace(cell.setting, parametrization="ntk", weight_std=math.sqrt(2))
        cell = replace(cell, setting=setting)
    network, generator = cell.build_reference()
    ensemble = batch_ensemble(network, cell["members"], p=SHIFTS[cell["kind"]], generator=generator)
    x, y = draw_samples(cell, generator)
    target_kernel = ntk(ensemble, x, outputs="target", target=y)
    loss_kernel = ntk(ensemble, x, outputs="nll", target=y)
    ratio_to_limit = math.nan
    if is_ntk:
        limit = target_kernel_limit(ensemble, x, y)
        ratio_to_limit = float(ntk_ratio(target_kernel, same=limit))
    rows = []
    for others in OTHERS:
        if others >= cell["members"]:
            continue
        row = {
            "others": others,
            "ratio": float(ntk_ratio(target_kernel)),
            "ratio_to_limit": ratio_to_limit,
            "nll": float(other_members_weight(loss_kernel, others)),
            "target": float(other_members_weight(target_kernel, others)),
        }
        rows.append(row)
    return rows


def target_kernel_limit(ensemble: EmbeddedEnsemble, x: Tensor, y: Tensor) -> Tensor:
    """Return the infinite-width target-class kernel within a member.

    Args:
        ensemble: The ensemble.
        x: Inputs.
        y: Class indices ``(batch,)``.

    Returns:
        The kernel ``(batch, batch)``; outputs of different classes are independent in the limit.
    """
    limit = kernels(ensemble, x.double())
    same = limit.ntk_shared.same + limit.ntk_individual.same
    same_class = y[:, None] == y[None]
    return same * same_class.to(same)


def select_curve(rows: Rows, kind: str, x: str, y: str) -> Rows:
    """Return the rows of one curve against ``x``, at the extreme value of the other axis."""
    # Only the NTK parametrization has a limit.
    parametrization = NTK if y == "ratio_to_limit" else TRAINED
    rows = rows.where(parametrization=parametrization, kind=kind)
    if x == "others":
        return rows.last("width")
    if y.startswith("ratio"):
        return rows.first("others")  # the ratio does not depend on the number of others
    return rows.last("others")


def exponent_claim(
    kind: str, x: str, y: str, above: float, below: float, statement: str, paper: str
) -> Claim:
    """Return a claim on the exponent of ``y`` in ``x``."""
    selection = partial(select_curve, kind=kind, x=x, y=y)
    return Claim(
        statement=statement,
        measure=f"exponent of {y.replace('_', ' ')} in {x}",
        statistic=slope(selection, y, x, log_y=True),
        above=above,
        below=below,
        paper=paper,
    )


def weight_claims(y: str) -> list[Claim]:
    """Return the claims on the weight of other members in one quantity."""
    return [
        exponent_claim(
            "centred", "others", y, 0.7, 1.3, f"{y} grows as m when centred", "∝ m/width"
        ),
        exponent_claim("shifted", "others", y, 1.7, 2.3, f"{y} grows as m² when shifted", "∝ m²"),
        exponent_claim(
            "centred", "width", y, -math.inf, -0.4, f"{y} falls with width (centred)", "∝ m/width"
        ),
        exponent_claim(
            "shifted", "width", y, -0.3, 0.3, f"{y} does not depend on width (shifted)", "∝ m²"
        ),
    ]


CLAIMS = [
    exponent_claim(
        "centred",
        "width",
        "ratio_to_limit",
        -1.3,
        -0.7,
        "the ratio falls as 1/width when centred (normalised by the limit)",
        "∝ 1/width",
    ),
    exponent_claim(
        "centred",
        "width",
        "ratio",
        -1.3,
        -0.7,
        "the ratio falls as 1/width when centred (normalised by the measured kernel)",
        "∝ 1/width",
    ),
    exponent_claim(
        "shifted",
        "width",
        "ratio_to_limit",
        -0.7,
        0.3,
        "the ratio does not fall when shifted",
        "constant",
    ),
    *weight_claims("nll"),
    *weight_claims("target"),
]


def exponent_text(rows: Rows) -> str:
    """Return the exponents of the ratio in the width as a text."""
    exponents = []
    for kind in SHIFTS:
        selected = select_curve(rows, kind, "width", "ratio")
        exponents.append(selected.slope("width", "ratio", log_y=True))
    return f"ratio ∝ width^{exponents[0]:.2f} if centred, {exponents[1]:.2f} if shifted"


def weight_text(rows: Rows, column: str, quantity: str) -> str:
    """Return the exponents of the weight of others in their number as a text."""
    exponents = []
    for kind in SHIFTS:
        selected = select_curve(rows, kind, "others", column)
        exponents.append(selected.slope("others", column, log_y=True))
    centred, shifted = exponents
    return f"{quantity}: ∝ m^{centred:.1f} if centred (paper 1), m^{shifted:.1f} if shifted (2)"


def plot(table: Frame) -> Figure:
    """Return the paper's three panels."""
    # Tables of earlier runs have the NTK parametrization alone.
    shown = TRAINED if (table["parametrization"] == TRAINED).any() else NTK
    ratios = []
    weights = {"nll": [], "target": []}
    for kind, colour, style in (("centred", BLUE, "line"), ("shifted", RED, "dash")):
        rows = table[(table["kind"] == kind) & (table["parametrization"] == shown)]
        with_limit = table[(table["kind"] == kind) & (table["parametrization"] == NTK)]
        draw = partial(curves, x="width", colours=colour)
        ratios += draw(rows[rows["others"] == 1], y="ratio", label=f"{kind} ÷ measured kernel")
        ratios += draw(
            with_limit[with_limit["others"] == 1],
            y="ratio_to_limit",
            label=f"{kind} ÷ limit (NTK param.)",
            style="dash",
        )
        colours = shades(rows["width"])
        for column, all_panels in weights.items():
            all_panels += curves(
                rows,
                "others",
                column,
                by="width",
                label=f"{kind}, width ×{{}}",
                colours=colours,
                style=style,
            )
    exponent = state(partial(exponent_text, Rows(table)), "cross over same")
    ratio_panel = Panel(
        exponent,
        "relative width",
        "between over within, squares",
        ratios,
        x_log=10,
        y_log=10,
        marks=[Mark("paper: 1/width", exponent=-1.0)],
    )
    drawn_panels = [ratio_panel]
    for column, quantity in (("nll", "loss"), ("target", "target output")):
        title = state(partial(weight_text, Rows(table), column, quantity), quantity)
        panel = Panel(title, "other members m", "weight of others", weights[column], 10, 10)
        drawn_panels.append(panel)
    return Figure(drawn_panels, columns=3)
