"""The theorems at finite width (Theorems 1 and 2, assumptions A1 to A3).

Perceptrons in the NTK parametrization, in four parts. *Kernels*: the empirical covariance and
tangent kernel, within and between members, against their limits; and for which laws the part
between members vanishes. *Outputs*: how far from Gaussian they are. *Training*: how much the
tangent kernel changes in gradient descent on the squared loss, and how well the limit predicts each
network's outputs from its own initial ones. *Classification*: whether target-class components of
the kernel rule the late stages of training on cross-entropy, as the paper argues.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from embens import laws, networks
from embens.embedding.families import batch_ensemble, embed
from embens.ensemble import EmbeddedEnsemble
from embens.experiments.claims import Claim, Table, judge, mean, select, slope
from embens.experiments.figure import Curve, Figure, Panel, curves
from embens.experiments.setting import Setting, data_set, reference
from embens.experiments.training import train
from embens.finite import nngp, ntk, ntk_drift
from embens.laws import Law
from embens.theory import gradient_descent, kernels

LABEL = "Theorems 1 and 2, A1–A3"
TITLE = "The theorems at finite width"
ABOUT = (
    "Perceptrons in the NTK parametrization against their infinite-width limit, as the width "
    "grows: errors of kernels, coupling of members, kurtosis of outputs, change of the kernel in "
    "training, and the limit's predictions of trained outputs."
)
STRONG = 0.9  # shift of the laws that are not centred
Row = dict[str, float]


@dataclass(frozen=True)
class Cell:
    """One network (of ``outputs``: many); ``units`` is the width in units."""

    setting: Setting
    part: str
    case: str
    units: int
    seed: int

    @property
    def weight(self) -> float:
        """See :func:`embens.experiments.contract.weight`."""
        return {"kernels": 1, "outputs": 8, "training": 4, "classification": 4}[self.part] * (
            1 + self.units / 256
        )


CENTRED, SHIFTED = laws.Normal(), laws.Shifted(STRONG)
LAWS: dict[str, tuple[Law, Law, Law]] = {
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
DRAWS = 60
STEPS = (10, 30, 100, 300)


def cells(setting: Setting, *, seeds: int | None = None) -> list[Cell]:
    """Return all parts at all widths."""
    units = UNITS[setting.preset]
    found = []
    for seed in range(seeds or SEEDS[setting.preset]):
        found += [Cell(setting, "kernels", case, n, seed) for case in LAWS for n in units]
        found += [Cell(setting, "outputs", "centred", n, seed) for n in units[:4]]
        found += [Cell(setting, "training", "centred", n, seed) for n in units]
        found += [Cell(setting, "classification", "centred", units[0], seed)]
    return found


def measure(cell: Cell) -> list[Row]:
    """Measure one part."""
    return {
        "kernels": _kernels,
        "outputs": _outputs,
        "training": _training,
        "classification": _classification,
    }[cell.part](cell)


def _ensemble(
    cell: Cell, members: int, *, depth: int = 3, outputs: int = 1, generator: torch.Generator
) -> EmbeddedEnsemble:
    network = networks.mlp(
        _inputs(cell, 1).shape[1],
        cell.units,
        depth,
        outputs,
        weight_std=math.sqrt(2),
        generator=generator,
    ).double()
    pre, inner, outer = LAWS[cell.case]
    post = {str(2 * k): outer if k == depth else inner for k in range(1, depth + 1)}
    if cell.case == "output bias":
        network[-1] = networks.Linear(
            cell.units, outputs, weight_std=math.sqrt(2), bias_std=1.0, generator=generator
        ).double()
    return embed(network, members, pre=pre, post=post, generator=generator)


def _inputs(cell: Cell, count: int) -> Tensor:
    """Return images as vectors of unit mean square."""
    flat = data_set(replace(cell.setting, network="mlp")).train.inputs[:count].double().cpu()
    return flat / flat.square().mean(1, keepdim=True).sqrt()


def _kernels(cell: Cell) -> list[Row]:
    generator = torch.Generator().manual_seed(cell.seed)
    ensemble = _ensemble(cell, 8, generator=generator)
    x = _inputs(cell, 10)
    limit = kernels(ensemble, x)
    row: Row = {}
    found = (
        ("nngp", nngp(ensemble, x), limit.nngp),
        ("ntk", ntk(ensemble, x, outputs="trace").shared, limit.ntk_shared),
    )
    different = ~torch.eye(ensemble.members, dtype=torch.bool)
    for name, measured, expected in found:
        scale = expected.same.square().mean()
        same, cross = measured[~different], measured[different]
        row[f"{name}_error"] = float((same - expected.same).square().mean() / scale)
        row[f"{name}_cross_error"] = float((cross - expected.cross).square().mean() / scale)
        own = expected.same.diagonal().mean()
        row[f"{name}_coupling"] = float(cross.diagonal(dim1=-2, dim2=-1).mean() / own)
        row[f"{name}_coupling_limit"] = float(expected.cross.diagonal().mean() / own)
    return [row]


def _outputs(cell: Cell) -> list[Row]:
    """Return the excess kurtosis of outputs over many networks, at one input."""
    generator = torch.Generator().manual_seed(cell.seed)
    x = _inputs(cell, 1)
    draws = []
    with torch.no_grad():
        for _ in range(DRAWS):
            ensemble = _ensemble(cell, 64, depth=2, outputs=4, generator=generator)
            draws.append(ensemble(x).flatten())
    values = torch.stack(draws)
    kurtosis = values.pow(4).mean() / values.square().mean().square() - 3
    return [{"kurtosis": float(kurtosis)}]


def _training(cell: Cell) -> list[Row]:
    """Descend on the squared loss; return a row for each of some times."""
    generator = torch.Generator().manual_seed(cell.seed)
    ensemble = _ensemble(cell, 4, depth=2, generator=generator)
    x = _inputs(cell, 24)
    inputs, tested = x[:16], x[16:]
    target = data_set(replace(cell.setting, network="mlp")).train.targets[:16].cpu()
    y = (target % 2).double()[:, None] * 2 - 1
    k = kernels(ensemble, x)
    train_part, test_part = slice(16), slice(16, None)
    parts = (k[train_part, train_part], k[test_part, train_part], k[test_part, test_part])
    members = float(ensemble.members)
    probe = gradient_descent(*parts, y, ensemble.members, members, rate=1e-9)
    rate = 0.2 * min(probe.largest_stable_rate)
    flow = gradient_descent(*parts, y, ensemble.members, members, rate=rate)
    with torch.no_grad():
        first = ensemble(x)
    before = ntk(ensemble, inputs, outputs="trace")
    parameters = list(ensemble.parameters())
    rows: list[Row] = []
    for step in range(1, max(STEPS) + 1):
        loss = ensemble.objective(ensemble(inputs), y, _half_square)  # its sum: gamma = M
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= rate * gradient
        if step in STEPS:
            with torch.no_grad():
                now = ensemble(tested)
            expected = flow.evolve(float(step), first[:, :16], first[:, 16:])
            error = (now - expected).norm() / (expected - first[:, 16:]).norm()
            drift = ntk_drift(before, ntk(ensemble, inputs, outputs="trace"))
            rows.append({"step": step, "drift": float(drift), "prediction_error": float(error)})
    return rows


def _half_square(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs - target).square().mean() / 2


def _classification(cell: Cell) -> list[Row]:
    """Return the part of target-class components in the change of the loss, before and after."""
    generator = torch.Generator().manual_seed(cell.seed)
    setting = replace(cell.setting, network="mlp", channels=(cell.units,) * 3)
    setting = replace(setting, parametrization="standard", weight_std=math.sqrt(2))
    network = reference(setting, generator=generator)
    ensemble = batch_ensemble(network, 4, generator=generator)
    data = data_set(setting)
    x, y = data.train.inputs[:24], data.train.targets[:24]
    rows = [{"stage": 0.0, "target_part": _target_part(ensemble, x, y)}]
    train(ensemble, setting, data, seed=cell.seed)
    return [*rows, {"stage": 1.0, "target_part": _target_part(ensemble, x, y)}]


def _target_part(ensemble: EmbeddedEnsemble, x: Tensor, y: Tensor) -> float:
    whole = ntk(ensemble, x, outputs="nll", target=y)
    target = ntk(ensemble, x, outputs="target", target=y)
    with torch.no_grad():
        chance = ensemble(x).softmax(-1)[:, range(len(y)), y]
    slope_of_loss = chance - 1  # of the target's output
    own = (target.same + target.individual).double()
    part = torch.einsum("ai,aij,aj->", slope_of_loss.double(), own, slope_of_loss.double())
    return float(part / (whole.same + whole.individual).double().sum())


# Claims


def _exponent(table: Table, case: str, column: str) -> float:
    return slope(select(table, part="kernels", case=case), "units", column, log_y=True)


def _coupling(table: Table, case: str, column: str = "ntk_coupling") -> float:
    rows = select(table, part="kernels", case=case)
    return mean(select(rows, units=int(rows["units"].max())), column)


def _late(table: Table) -> Table:
    rows = select(table, part="training")
    return select(rows, step=int(rows["step"].max()))


def _not_uniform(table: Table) -> float:
    rows = select(table, part="training")
    early = mean(select(rows, step=int(rows["step"].min())), "drift")
    return math.log(mean(_late(table), "drift") / early)


def _change_of_target(table: Table) -> float:
    rows = select(table, part="classification")
    late, early = (mean(select(rows, stage=float(s)), "target_part") for s in (1, 0))
    return late - early


def claims(table: Table) -> list[Claim]:
    """Return what the theorems and assumptions say."""
    test = partial(judge, table)
    found = []
    for case in ("centred", "shifted"):
        for column, text in (
            ("nngp_error", "covariance within a member"),
            ("nngp_cross_error", "covariance between members"),
            ("ntk_error", "tangent kernel within a member"),
            ("ntk_cross_error", "tangent kernel between members"),
        ):
            found.append(
                test(
                    partial(_exponent, case=case, column=column),
                    name=f"{case}: {column}",
                    statement=f"{case}: the squared error of the {text} falls as 1/width",
                    paper="kernels converge to their limit",
                    measure="exponent of the relative mean square error in the width",
                    above=-1.5,
                    below=-0.5,
                )
            )
    for case, text, region in (
        ("centred", "vanishes if all modulations are centred", {"above": -0.02, "below": 0.02}),
        ("last centred", "vanishes if only u of the last layer is centred",
         {"above": -0.02, "below": 0.02}),
        ("last shifted", "does not vanish if u of the last layer is not", {"above": 0.02}),
        ("output bias", "does not vanish with a shared output bias (an erratum)", {"above": 0.02}),
    ):  # fmt: skip
        found.append(
            test(
                partial(_coupling, case=case),
                name=f"cross: {case}",
                statement=f"the tangent kernel between members {text}",
                paper="zero if and only if E[u^L]=0",
                measure="cross relative to same, at the largest width",
                **region,
            )
        )
    return [
        *found,
        test(
            lambda t: slope(select(t, part="outputs"), "units", "kurtosis", log_y=True),
            name="A1",
            statement="outputs become Gaussian: excess kurtosis falls as 1/width",
            paper="outputs are Gaussian in the limit",
            measure="exponent of the excess kurtosis in the width",
            above=-1.6,
            below=-0.5,
        ),
        test(
            lambda t: slope(_late(t), "units", "drift", log_y=True),
            name="A3",
            statement="the change of the tangent kernel in training falls as 1/width",
            paper="deviation bounded as O(1/N)",
            measure="exponent of |ΔΘ|/|Θ| at the last step in the width",
            above=-1.3,
            below=-0.5,
        ),
        test(
            _not_uniform,
            name="A3 is not uniform",
            statement="the change grows with time",
            paper="the bound is not uniform in time",
            measure="log of the ratio of the change at the last step to the first",
            above=0.0,
        ),
        test(
            lambda t: slope(_late(t), "units", "prediction_error", log_y=True),
            name="predictions",
            statement="the limit predicts trained outputs better as the width grows",
            paper="the dynamics are those of the limit",
            measure="exponent of the relative error at the last step in the width",
            below=-0.25,
        ),
        test(
            _change_of_target,
            name="target class",
            statement="target-class components matter more late in training than at first",
            paper="they dominate in the late stages if classes are many",
            measure="their part in the change of the loss, late less early",
            above=0.0,
        ),
    ]


def plot(table: Table) -> Figure:
    """Return errors, coupling, kurtosis, drift and predictions against width."""
    rows = table[table["part"] == "kernels"]
    colours = {
        "nngp_error": "#1f77b4",
        "nngp_cross_error": "#17becf",
        "ntk_error": "#d62728",
        "ntk_cross_error": "#ff7f0e",
    }
    panels = [
        Panel(
            f"errors of kernels, {case}",
            "units",
            "relative mean square error",
            [
                Curve(column.replace("_", " "), c.x, c.y, c.error, c.colour)
                for column, colour in colours.items()
                for c in curves(rows[rows["case"] == case], "units", column, colours=[colour])
            ],
            True,
            True,
        )
        for case in ("centred", "shifted")
    ]
    measured = curves(rows, "units", "ntk_coupling", by="case")
    limits = [
        Curve(f"{c.label}, limit", c.x, c.y, [], c.colour, "dash")
        for c in curves(rows, "units", "ntk_coupling_limit", by="case")
    ]
    panels.append(Panel("between members", "units", "cross/same", measured + limits, True))
    outputs = curves(table[table["part"] == "outputs"], "units", "kurtosis")
    shown = [Curve("kurtosis", c.x, c.y, c.error, c.colour) for c in outputs]
    panels.append(Panel("A1", "units", "excess kurtosis", shown, True, True))
    for column, title in (("drift", "A3: change of the kernel"), ("prediction_error", "trained")):
        found = curves(table[table["part"] == "training"], "units", column, by="step",
                       label="step {}")  # fmt: skip
        panels.append(Panel(title, "units", column.replace("_", " "), found, True, True))
    stages = curves(table[table["part"] == "classification"], "stage", "target_part")
    shown = [Curve("target class", c.x, c.y, c.error, "#9467bd") for c in stages]
    panels.append(Panel("cross-entropy", "0: start, 1: end", "part of target classes", shown))
    return Figure(TITLE, panels, columns=4)
