"""The theorems at finite width (Theorems 1 and 2, A1–A3).

Perceptrons in the NTK parametrization against their infinite-width limit, as the width grows:
errors of kernels, coupling of members, kurtosis of outputs, change of the kernel in training, and
the limit's predictions of trained outputs.

*Kernels*: for which laws the part between members vanishes. *Training*: gradient descent on the
squared loss; the limit predicts each network's outputs from its own initial ones. *Classification*:
whether target-class components of the kernel rule the late stages of training on cross-entropy.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from embens import laws, networks
from embens.embedding.families import embed
from embens.ensemble import EmbeddedEnsemble
from reproduction.claims import Claim, Frame, Rows, Some, less, trend, where
from reproduction.grid.cells import Cell, Row, batch_ensemble, sweep, train
from reproduction.drawing import PALETTE, Figure, Panel, curves, panels, shades
from reproduction.grid.settings import data_set
from embens.finite import nngp, ntk, ntk_drift
from embens.theory import gradient_descent, kernels

CENTRED, SHIFTED = laws.Normal(), laws.Shifted(0.9)
LAWS = {
    "centred": (CENTRED, CENTRED, CENTRED),
    "shifted": (SHIFTED, SHIFTED, SHIFTED),
    "last centred": (SHIFTED, SHIFTED, CENTRED),
    "last shifted": (CENTRED, CENTRED, SHIFTED),
    "output bias": (CENTRED, CENTRED, CENTRED),
}
"""Laws of v, of u in the inner layers, and of u in the last hidden layer."""
UNITS = {
    "quick": (32, 64, 128, 256, 512),
    "cpu": (64, 128, 256, 512, 1024),
    "paper": (64, 128, 256, 512, 1024, 2048, 4096),
}
SEEDS = {"quick": 10, "cpu": 6, "paper": 10}
ERRORS = {
    "nngp_error": "covariance within a member",
    "nngp_cross_error": "covariance between members",
    "ntk_error": "tangent kernel within a member",
    "ntk_cross_error": "tangent kernel between members",
}
DRAWS = 60
STEPS = (10, 30, 100, 300)

_WIDTHS = {"outputs": slice(4), "training": slice(None), "classification": slice(1)}
SWEEP = [sweep(part="kernels", case=list(LAWS), units=UNITS)]
for _part, _some in _WIDTHS.items():
    _units = {preset: units[_some] for preset, units in UNITS.items()}
    SWEEP.append(sweep(part=_part, case="centred", units=_units))


def weight(cell: Cell) -> float:
    """Return roughly what a cell costs."""
    part = {"kernels": 1, "outputs": 8, "training": 4, "classification": 4}[cell.part]
    return part * (1 + cell.units / 256)


def measure(cell: Cell) -> Row | list[Row]:
    """Measure one part."""
    by_part = {"kernels": _kernels, "outputs": _outputs, "training": _training}
    return by_part.get(cell.part, _classification)(cell)


def _ensemble(
    cell: Cell, members: int, generator: torch.Generator, *, depth: int = 3, outputs: int = 1
) -> EmbeddedEnsemble:
    inputs, std = _inputs(cell, 1).shape[1], math.sqrt(2)
    network = networks.mlp(inputs, cell.units, depth, outputs, weight_std=std, generator=generator)
    if cell.case == "output bias":
        biased = {"weight_std": std, "bias_std": 1.0, "generator": generator}
        network[-1] = networks.Linear(cell.units, outputs, **biased)
    pre, inner, outer = LAWS[cell.case]
    post = {str(2 * k): outer if k == depth else inner for k in range(1, depth + 1)}
    return embed(network.double(), members, pre=pre, post=post, generator=generator)


def _inputs(cell: Cell, count: int) -> Tensor:
    """Return images as vectors of unit mean square."""
    flat = data_set(replace(cell.setting, network="mlp")).train.inputs[:count].double().cpu()
    return flat / flat.square().mean(1, keepdim=True).sqrt()


def _kernels(cell: Cell) -> Row:
    """Return errors of both kernels, and how much of them is between members."""
    ensemble = _ensemble(cell, 8, torch.Generator().manual_seed(cell.seed))
    x = _inputs(cell, 10)
    limit = kernels(ensemble, x)
    row: Row = {}
    different = ~torch.eye(ensemble.members, dtype=torch.bool)
    for name, measured, expected in (
        ("nngp", nngp(ensemble, x), limit.nngp),
        ("ntk", ntk(ensemble, x, outputs="trace").shared, limit.ntk_shared),
    ):
        scale = expected.same.square().mean()
        same, cross = measured[~different], measured[different]
        row[f"{name}_error"] = float((same - expected.same).square().mean() / scale)
        row[f"{name}_cross_error"] = float((cross - expected.cross).square().mean() / scale)
        own = expected.same.diagonal().mean()
        row[f"{name}_coupling"] = float(cross.diagonal(dim1=-2, dim2=-1).mean() / own)
        row[f"{name}_coupling_limit"] = float(expected.cross.diagonal().mean() / own)
    return row


@torch.no_grad()
def _outputs(cell: Cell) -> Row:
    """Return the excess kurtosis of outputs over many networks, at one input."""
    generator = torch.Generator().manual_seed(cell.seed)
    x = _inputs(cell, 1)
    draws = [_ensemble(cell, 64, generator, depth=2, outputs=4)(x) for _ in range(DRAWS)]
    values = torch.stack(draws)
    return {"kurtosis": float(values.pow(4).mean() / values.square().mean().square() - 3)}


def _training(cell: Cell) -> list[Row]:
    """Descend on the squared loss with γ=M; return a row for each of some times."""
    ensemble = _ensemble(cell, 4, torch.Generator().manual_seed(cell.seed), depth=2)
    x = _inputs(cell, 24)
    train_part, test_part = slice(16), slice(16, None)
    target = data_set(replace(cell.setting, network="mlp")).train.targets[:16].cpu()
    y = (target % 2).double()[:, None] * 2 - 1
    k = kernels(ensemble, x)
    parts = (k[train_part, train_part], k[test_part, train_part], k[test_part, test_part])
    limit = partial(gradient_descent, *parts, y, ensemble.members, float(ensemble.members))
    rate = 0.2 * min(limit(rate=1e-9).largest_stable_rate)
    flow = limit(rate=rate)
    first_outputs = ensemble(x).detach()
    before = ntk(ensemble, x[train_part], outputs="trace")
    optimizer = torch.optim.SGD(ensemble.parameters(), lr=rate)
    rows: list[Row] = []
    for step in range(1, max(STEPS) + 1):
        optimizer.zero_grad()
        ensemble.objective(ensemble(x[train_part]), y, _half_square).backward()
        optimizer.step()
        if step in STEPS:
            seen, unseen = first_outputs[:, train_part], first_outputs[:, test_part]
            expected = flow.evolve(float(step), seen, unseen)
            error = (ensemble(x[test_part]).detach() - expected).norm() / (expected - unseen).norm()
            drift = ntk_drift(before, ntk(ensemble, x[train_part], outputs="trace"))
            rows.append({"step": step, "drift": float(drift), "prediction_error": float(error)})
    return rows


def _half_square(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs - target).square().mean() / 2


def _classification(cell: Cell) -> list[Row]:
    """Return the part of target-class components in the change of the loss, before and after."""
    shape = {"network": "mlp", "channels": (cell.units,) * 3, "weight_std": math.sqrt(2)}
    cell = replace(cell, setting=replace(cell.setting, parametrization="standard", **shape))
    network, generator = cell.draw()
    ensemble = batch_ensemble(network, 4, generator=generator)
    inputs, targets = data_set(cell.setting).train
    early = _target_part(ensemble, inputs[:24], targets[:24])
    train(cell, ensemble)
    late = _target_part(ensemble, inputs[:24], targets[:24])
    return [{"stage": 0.0, "target_part": early}, {"stage": 1.0, "target_part": late}]


def _target_part(ensemble: EmbeddedEnsemble, x: Tensor, y: Tensor) -> float:
    whole = ntk(ensemble, x, outputs="nll", target=y)
    target = ntk(ensemble, x, outputs="target", target=y)
    chance = ensemble(x).detach().softmax(-1)[:, range(len(y)), y]
    slope_of_loss = (chance - 1).double()  # in the target's output
    own = (target.same + target.individual).double()
    part = torch.einsum("ai,aij,aj->", slope_of_loss, own, slope_of_loss)
    return float(part / (whole.same + whole.individual).double().sum())


def _late(rows: Rows) -> Rows:
    return rows.where(part="training").last("step")


def _not_uniform(rows: Rows) -> float:
    """Log of the ratio of the change at the last step to the first."""
    early = rows.where(part="training").first("step")
    return math.log(_late(rows).mean("drift") / early.mean("drift"))


def _coupling(rows: Rows, case: str) -> float:
    """Cross relative to same, at the largest width."""
    return rows.where(part="kernels", case=case).last("units").mean("ntk_coupling")


def _exponent(rows: Some, column: str, low: float, high: float) -> Claim:
    return Claim(trend(rows, column, "units", log_y=True), low, high)


_COUPLINGS = (
    ("centred", -0.02, 0.02, "vanishes if all modulations are centred"),
    ("last centred", -0.02, 0.02, "vanishes if only u of the last layer is centred"),
    ("last shifted", 0.02, math.inf, "does not vanish if u of the last layer is not"),
    ("output bias", 0.02, math.inf, "does not vanish with a shared output bias (an erratum)"),
)
CLAIMS = [
    *(
        _exponent(where(part="kernels", case=case), column, -1.5, -0.5).says(
            f"{case}: the squared error of the {text} falls as 1/width",
            "kernels converge to their limit",
            "exponent of the relative mean square error in the width",
        )
        for case in ("centred", "shifted")
        for column, text in ERRORS.items()
    ),
    *(
        Claim(partial(_coupling, case=case), low, high).says(
            f"the tangent kernel between members {text}", "zero if and only if E[u^L]=0"
        )
        for case, low, high, text in _COUPLINGS
    ),
    _exponent(where(part="outputs"), "kurtosis", -1.6, -0.5).says(
        "outputs become Gaussian: excess kurtosis falls as 1/width (A1)", "Gaussian in the limit"
    ),
    _exponent(_late, "drift", -1.3, -0.5).says(
        "the change of the tangent kernel in training falls as 1/width (A3)",
        "deviation bounded as O(1/N)",
        "exponent of |ΔΘ|/|Θ| at the last step in the width",
    ),
    Claim(_not_uniform, above=0.0).says(
        "the change grows with time", "the bound is not uniform in time"
    ),
    _exponent(_late, "prediction_error", -math.inf, -0.25).says(
        "the limit predicts trained outputs better as the width grows",
        "the dynamics are those of the limit",
        "exponent of the relative error at the last step in the width",
    ),
    Claim(less("target_part", where(stage=1.0), where(stage=0.0)), above=0.0).says(
        "target-class components matter more late in training than at first",
        "they dominate late",
        "Their part in the change of the loss, late less early",
    ),
]


def plot(table: Frame) -> Figure:
    """Return errors, coupling, kurtosis, drift and predictions against width."""
    cases: dict[Any, str] = dict(zip(LAWS, PALETTE, strict=False))
    by_case = partial(curves, table, "units", by="case", colours=cases)
    by_step = partial(curves, table, "units", by="step", label="step {}", colours=shades(STEPS))
    error = "relative mean square error"
    near = [
        Panel(f"{text}: near its limit", "units", error, by_case(column), 10, 10)
        for column, text in ERRORS.items()
    ]
    steps = {
        "drift": "the kernel moves less the wider (A3)",
        "prediction_error": "the limit predicts trained outputs",
    }
    limit = by_case("ntk_coupling_limit", label="{}, limit", style="dash")
    both, logs = [*by_case("ntk_coupling"), *limit], {"x_log": 10, "y_log": 10}
    late = curves(table, "stage", "target_part", label="target class", colours="#7f7f7f")
    see, part = "target classes matter more late?", "part of the change of the loss"
    return Figure(
        [
            *near,
            Panel("apart only if u^L is centred", "units", "cross/same", both, 10),
            *panels(by_case, {"kurtosis": "outputs become Gaussian (A1)"}, "units", **logs),
            *panels(by_step, steps, "units", **logs),
            Panel(see, "0: start, 1: end", part, late),
        ]
    )
