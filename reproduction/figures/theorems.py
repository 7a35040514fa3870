"""The theorems at finite width (Theorems 1 and 2, A1–A3).

Perceptrons in the NTK parametrization against their infinite-width limit, as the width grows:
errors of kernels, coupling of members, kurtosis of outputs, change of the kernel in training, and
the limit's predictions of trained outputs.

*Kernels*: for which laws the part between members vanishes. *Training*: gradient descent on the
squared loss; the limit predicts the outputs of each network from its initial outputs.
*Classification*: whether the target-class components of the kernel dominate late in training on
cross-entropy.
"""

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from embens import EmbeddedEnsemble, embed, laws, networks
from embens.finite import nngp, ntk, ntk_drift
from embens.theory import gradient_descent, kernels
from reproduction.claims import Claim, difference
from reproduction.convergence import convergence_claims, coupling_claim, exponent_claim
from reproduction.drawing import GREY, PALETTE, Figure, Mark, Panel, curves, panels, shades, state
from reproduction.grid.cells import Cell, Row, sweep
from reproduction.grid.settings import load_data
from reproduction.rows import Frame, Rows, where
from reproduction.training import batch_ensemble, train

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
    "cpu": (64, 128, 256, 512, 1024, 2048, 4096),
    "paper": (64, 128, 256, 512, 1024, 2048, 4096),
}
TRAINED_UNITS = {**UNITS, "cpu": UNITS["cpu"][:-1]}
FOUR_UNITS = {preset: units[:4] for preset, units in UNITS.items()}
SMALLEST_UNITS = {preset: units[:1] for preset, units in UNITS.items()}
SEEDS = {"quick": 10, "cpu": 6, "gpu": 6, "paper": 10}
# Perceptrons on few images: training is a small part of the experiment.
CHANGES = {
    "cpu": {
        "augment": 0,
        "train": 1000,
        "validation": 0,
        "test": 1000,
        "epochs": 80,
        "batch_size": 32,
        "precision": "float32",
        "lr": 0.01,
        "rates": (),
    }
}
KERNEL_ERRORS = {
    "nngp_error": "covariance within a member",
    "nngp_cross_error": "covariance between members",
    "ntk_error": "tangent kernel within a member",
    "ntk_cross_error": "tangent kernel between members",
}
DRAWS = 60
STEPS = (10, 30, 100, 300)
"""Steps of gradient descent at which the limit is compared."""

SWEEP = [
    sweep(part="kernels", case=list(LAWS), units=UNITS),
    sweep(part="outputs", case="centred", units=FOUR_UNITS),
    sweep(part="training", case="centred", units=TRAINED_UNITS),
    sweep(part="classification", case="centred", units=SMALLEST_UNITS),
]


def estimate_cost(cell: Cell) -> float:
    """Return the rough cost of a cell."""
    cost_of_part = {"kernels": 1, "outputs": 8, "training": 4, "classification": 4}
    return cost_of_part[cell["part"]] * (1 + (cell["units"] / 256) ** 2)


def measure(cell: Cell) -> Row | list[Row]:
    """Measure one part."""
    if cell["part"] == "kernels":
        return measure_kernels(cell)
    if cell["part"] == "outputs":
        return measure_outputs(cell)
    if cell["part"] == "training":
        return measure_training(cell)
    return measure_classification(cell)


def build(
    cell: Cell, members: int, generator: torch.Generator, *, depth: int = 3, outputs: int = 1
) -> EmbeddedEnsemble:
    """Return an ensemble of perceptrons in double precision with the laws of the cell."""
    units = cell["units"]
    weight_std = math.sqrt(2)
    network = networks.mlp(
        unit_images(cell, 1).shape[1],
        units,
        depth,
        outputs,
        weight_std=weight_std,
        generator=generator,
    )
    if cell["case"] == "output bias":
        network[-1] = networks.Linear(
            units, outputs, weight_std=weight_std, bias_std=1.0, generator=generator
        )
    pre, inner, outer = LAWS[cell["case"]]
    # Layers of the sequential network are at even positions; activations are between them.
    post = {str(2 * layer): inner for layer in range(1, depth)}
    post[str(2 * depth)] = outer
    return embed(network.double(), members, pre=pre, post=post, generator=generator)


def unit_images(cell: Cell, count: int) -> Tensor:
    """Return training images as vectors of unit mean square, ``(sample, pixel)``."""
    setting = replace(cell.setting, network="mlp")
    images = load_data(setting).train.inputs[:count].double().cpu()
    return images / images.square().mean(1, keepdim=True).sqrt()


def measure_kernels(cell: Cell) -> Row:
    """Return the errors of both kernels, and their ratio between members to within a member."""
    ensemble = build(cell, 8, torch.Generator().manual_seed(cell.seed))
    x = unit_images(cell, 10)
    limit = kernels(ensemble, x)
    measured_ntk = ntk(ensemble, x, outputs="trace").shared
    is_cross = ~torch.eye(ensemble.members, dtype=torch.bool)
    row: Row = {}
    for name, measured, expected in (
        ("nngp", nngp(ensemble, x), limit.nngp),
        ("ntk", measured_ntk, limit.ntk_shared),
    ):
        same, cross = measured[~is_cross], measured[is_cross]
        scale = expected.same.square().mean()
        row[f"{name}_error"] = float((same - expected.same).square().mean() / scale)
        row[f"{name}_cross_error"] = float((cross - expected.cross).square().mean() / scale)
        same_diagonal = expected.same.diagonal().mean()
        cross_diagonal = cross.diagonal(dim1=-2, dim2=-1).mean()
        row[f"{name}_coupling"] = float(cross_diagonal / same_diagonal)
        row[f"{name}_coupling_limit"] = float(expected.cross.diagonal().mean() / same_diagonal)
    return row


@torch.no_grad()
def measure_outputs(cell: Cell) -> Row:
    """Return the excess kurtosis of outputs over many networks, at one input."""
    generator = torch.Generator().manual_seed(cell.seed)
    x = unit_images(cell, 1)
    outputs = []
    for _ in range(DRAWS):
        ensemble = build(cell, 64, generator, depth=2, outputs=4)
        outputs.append(ensemble(x))
    values = torch.stack(outputs)
    kurtosis = values.pow(4).mean() / values.square().mean().square()
    return {"kurtosis": float(kurtosis - 3)}


def measure_training(cell: Cell) -> list[Row]:
    """Run gradient descent on the squared loss with γ=M; return a row for each of :data:`STEPS`."""
    ensemble = build(cell, 4, torch.Generator().manual_seed(cell.seed), depth=2)
    x = unit_images(cell, 24)
    x_train, x_test = x[:16], x[16:]
    labels = load_data(replace(cell.setting, network="mlp")).train.targets[:16].cpu()
    y = (labels % 2).double()[:, None] * 2 - 1
    k = kernels(ensemble, x)
    limit = partial(
        gradient_descent,
        k[:16, :16],
        k[16:, :16],
        k[16:, 16:],
        y,
        ensemble.members,
        float(ensemble.members),
    )
    # The largest stable rate does not depend on the rate of this first call.
    lr = 0.2 * min(limit(rate=1e-9).largest_stable_rate)
    flow = limit(rate=lr)
    initial_train = ensemble(x_train).detach()
    initial_test = ensemble(x_test).detach()
    initial_kernel = ntk(ensemble, x_train, outputs="trace")
    optimizer = torch.optim.SGD(ensemble.parameters(), lr=lr)
    rows: list[Row] = []
    for step in range(1, max(STEPS) + 1):
        optimizer.zero_grad()
        ensemble.objective(ensemble(x_train), y, half_squared_error).backward()
        optimizer.step()
        if step in STEPS:
            predicted = flow.evolve(float(step), initial_train, initial_test)
            error = (ensemble(x_test).detach() - predicted).norm()
            error = error / (predicted - initial_test).norm()
            drift = ntk_drift(initial_kernel, ntk(ensemble, x_train, outputs="trace"))
            rows.append({"step": step, "drift": float(drift), "prediction_error": float(error)})
    return rows


def half_squared_error(outputs: Tensor, target: Tensor) -> Tensor:
    """Return half of the mean squared error."""
    return (outputs - target).square().mean() / 2


def measure_classification(cell: Cell) -> list[Row]:
    """Return the fraction of target-class components before and after training."""
    setting = replace(
        cell.setting,
        network="mlp",
        channels=(cell["units"],) * 3,
        weight_std=math.sqrt(2),
        parametrization="standard",
    )
    cell = replace(cell, setting=setting)
    network, generator = cell.build_reference()
    ensemble = batch_ensemble(network, 4, generator=generator)
    inputs, targets = load_data(setting).train
    x, y = inputs[:24], targets[:24]
    early = target_fraction(ensemble, x, y)
    train(cell, ensemble)
    late = target_fraction(ensemble, x, y)
    return [{"stage": 0.0, "target_part": early}, {"stage": 1.0, "target_part": late}]


def target_fraction(ensemble: EmbeddedEnsemble, x: Tensor, y: Tensor) -> float:
    """Return the fraction of target-class components in the change of the loss.

    Args:
        ensemble: The ensemble.
        x: Inputs.
        y: Class indices ``(batch,)``.

    Returns:
        The fraction.
    """
    loss_kernel = ntk(ensemble, x, outputs="nll", target=y)
    target_kernel = ntk(ensemble, x, outputs="target", target=y)
    target_probability = ensemble(x).detach().softmax(-1)[:, range(len(y)), y]
    # The derivative of the cross-entropy in the target's output.
    slopes = (target_probability - 1).double()
    within_member = (target_kernel.same + target_kernel.individual).double()
    target_part = torch.einsum("ai,aij,aj->", slopes, within_member, slopes)
    whole = (loss_kernel.same + loss_kernel.individual).double().sum()
    return float(target_part / whole)


def last_step(rows: Rows) -> Rows:
    """Return the rows at the last step of gradient descent."""
    return rows.where(part="training").last("step")


def log_growth_of_drift(rows: Rows) -> float:
    """Return the log of the ratio of the change of the kernel, last step to first step."""
    first_step = rows.where(part="training").first("step")
    return math.log(last_step(rows).mean("drift") / first_step.mean("drift"))


CLAIMS = [
    *convergence_claims("centred", KERNEL_ERRORS),
    *convergence_claims("shifted", KERNEL_ERRORS),
    coupling_claim("centred", "vanishes if all modulations are centred", above=-0.02, below=0.02),
    coupling_claim(
        "last centred", "vanishes if only u of the last layer is centred", above=-0.02, below=0.02
    ),
    coupling_claim(
        "last shifted",
        "does not vanish if u of the last layer is not centred",
        above=0.02,
        below=math.inf,
    ),
    coupling_claim(
        "output bias",
        "does not vanish with a shared output bias (an erratum)",
        above=0.02,
        below=math.inf,
    ),
    exponent_claim(
        "outputs become Gaussian: excess kurtosis falls as 1/width (A1)",
        "exponent of kurtosis in units",
        "Gaussian in the limit",
        where(part="outputs"),
        "kurtosis",
        above=-1.6,
        below=-0.5,
    ),
    exponent_claim(
        "the change of the tangent kernel in training falls as 1/width (A3)",
        "exponent of |ΔΘ|/|Θ| at the last step in the width",
        "deviation bounded as O(1/N)",
        last_step,
        "drift",
        above=-1.3,
        below=-0.5,
    ),
    Claim(
        statement="the change of the tangent kernel grows with time",
        measure="log of the ratio of the change at the last step to the first",
        statistic=log_growth_of_drift,
        above=0.0,
        paper="the bound is not uniform in time",
    ),
    exponent_claim(
        "the limit predicts trained outputs better as the width grows",
        "exponent of the relative error at the last step in the width",
        "the dynamics are those of the limit",
        last_step,
        "prediction_error",
        above=-math.inf,
        below=-0.25,
    ),
    Claim(
        statement="target-class components matter more late in training than at first",
        measure="their fraction in the change of the loss, late minus early",
        statistic=difference("target_part", where(stage=1.0), where(stage=0.0)),
        above=0.0,
        paper="they dominate late",
    ),
]


THEORY = [Mark("theory: 1/width", exponent=-1.0)]
TRAINED = {"drift": "A3: change of the kernel", "prediction_error": "error of the limit"}
"""Quantities of trained networks, in words."""


def exponent_text(rows: Rows, column: str, text: str) -> str:
    """Return a title with the exponent of an error in the width, for centred modulations."""
    return f"{text}: error ∝ width^{slope_text(rows.where(case='centred'), column)} (centred)"


def slope_text(rows: Rows, column: str) -> str:
    """Return the exponent of a column in the width; of trained networks, at the last step."""
    if column in TRAINED:
        rows = last_step(rows)
    return f"{rows.slope('units', column, log_y=True):.2f}"


def target_text(rows: Rows) -> str:
    """Return a title with the fractions of the target class at the start and the end."""
    early, late = (rows.where(stage=stage).mean("target_part") for stage in (0.0, 1.0))
    return f"target class: {early:.2f} of the change of the loss at first, {late:.2f} late"


def plot(table: Frame) -> Figure:
    """Return errors, coupling, kurtosis, drift and predictions against width."""
    colours: dict[str, str] = dict(zip(LAWS, PALETTE, strict=False))
    by_case = partial(curves, table, "units", by="case", colours=colours)
    by_step = partial(curves, table, "units", by="step", label="step {}", colours=shades(STEPS))
    all_panels = []
    for column, text in KERNEL_ERRORS.items():
        title = state(partial(exponent_text, Rows(table), column, text), text)
        error = "relative mean squared error"
        all_panels.append(Panel(title, "units", error, by_case(column), 10, 10, THEORY))
    coupling = [
        *by_case("ntk_coupling"),
        *by_case("ntk_coupling_limit", label="{}, limit", style="dash"),
    ]
    all_panels.append(
        Panel(
            "coupling: zero if the last u is centred",
            "units",
            "between over within members",
            coupling,
            x_log=10,
        )
    )
    exponent = partial(slope_text, Rows(table), "kurtosis")
    title = state(lambda: f"A1: excess kurtosis of outputs ∝ width^{exponent()}", "A1: kurtosis")
    kurtosis = {"kurtosis": title}
    marks = {"kurtosis": THEORY, "drift": THEORY}
    all_panels += panels(by_case, kurtosis, "units", x_log=10, y_log=10, marks=marks)
    training = {}
    for column, text in TRAINED.items():
        title = state(partial(slope_text, Rows(table), column), "")
        training[column] = f"{text} ∝ width^{title}" if title else text
    all_panels += panels(by_step, training, "units", x_log=10, y_log=10, marks=marks)
    stages = curves(table, "stage", "target_part", label="target class", colours=GREY)
    all_panels.append(
        Panel(
            state(partial(target_text, Rows(table)), "part of the target class"),
            "start (0) and end (1) of training",
            "fraction of the change of the loss",
            stages,
        )
    )
    return Figure(all_panels)
