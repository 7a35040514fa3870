# %% [markdown]
# # Predict an ensemble before training it
#
# An infinitely wide ensemble trained by gradient descent is a Gaussian process whose mean and
# covariances are known at any time. Here they are computed first; then a wide, finite ensemble is
# trained, and drawn over the prediction.

# %%
from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

import embens
from embens import theory

MEMBERS, STEPS = 5, 300


# %% [markdown]
# ## The problem
#
# A function on the circle, known at five angles.


# %%
def on_circle(angle: Tensor) -> Tensor:
    return torch.stack([angle.cos(), angle.sin(), torch.ones_like(angle)], dim=-1)


def problem() -> tuple[Tensor, Tensor, Tensor]:
    """Return train angles, their targets, and test angles."""
    angle = torch.tensor([-2.6, -1.9, -0.4, 0.4, 2.1], dtype=torch.float64)
    return angle, (2 * angle).sin()[:, None], torch.linspace(-math.pi, math.pi, 80).double()


# %% [markdown]
# ## The prediction
#
# `theory.kernels` reads the limit off the ensemble: its width doesn't matter. `gradient_descent`
# solves training for any number of steps at once, `largest_stable_rate` says how fast it may go.


# %%
def predict(ensemble: embens.EmbeddedEnsemble) -> theory.GradientFlow:
    angle, target, test = problem()
    x, x_test = on_circle(angle), on_circle(test)
    k = (
        theory.kernels(ensemble, x),
        theory.kernels(ensemble, x_test, x),
        theory.kernels(ensemble, x_test),
    )
    stable = theory.gradient_flow(*k, target, MEMBERS).largest_stable_rate
    return theory.gradient_descent(*k, target, MEMBERS, rate=0.5 * min(stable))


# %% [markdown]
# ## The experiment
#
# The same ensemble, trained: the gradient scale and the rate are those of the prediction.


# %%
def half_squares(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs - target).square().mean() / 2


def train(
    ensemble: embens.EmbeddedEnsemble, flow: theory.GradientFlow, steps: list[int]
) -> list[Tensor]:
    """Return the test outputs after so many steps, in rising order."""
    angle, target, test = problem()
    groups = ensemble.parameter_groups(
        flow.schedule.rate or 0.0, weight_decay=0.0, gamma=flow.gamma
    )
    optimizer = torch.optim.SGD(groups)
    found = []
    for step in range(steps[-1] + 1):
        if step in steps:
            with torch.no_grad():
                found.append(ensemble(on_circle(test)))
        optimizer.zero_grad()
        outputs = ensemble(on_circle(angle))
        embens.objective(outputs, target, half_squares).backward()
        optimizer.step()
    return found


def run(p: float, width: int) -> tuple[theory.GradientFlow, Tensor, list[int], list[Tensor]]:
    """Return the prediction, the one that knows the start, and what came out at some steps."""
    generator = torch.Generator().manual_seed(1)
    net = embens.networks.mlp(3, width, 1, weight_std=math.sqrt(2), generator=generator)
    ensemble = embens.batch_ensemble(net.double(), MEMBERS, p=p, generator=generator)
    flow = predict(ensemble)
    print(f"p = {p}: {theory.regime(ensemble)}")
    print(f"  gamma {flow.gamma:.2f}, rate {flow.schedule.rate:.3g}, {flow!r}")
    angle, _, test = problem()
    with torch.no_grad():
        start = ensemble(on_circle(angle)), ensemble(on_circle(test))
    steps = sorted({0, *(round(STEPS ** (i / 12)) for i in range(13))})
    outputs = train(ensemble, flow, steps)
    expected = flow.evolve(torch.tensor(steps), *start)
    error = (outputs[-1] - expected[-1]).norm() / (outputs[-1] - start[1]).norm()
    print(f"  width {width}: {100 * error.item():.1f} % off the prediction from its own start")
    return flow, expected, steps, outputs


# %% [markdown]
# ## The picture
#
# Above: mean and two standard deviations over initialisations, of a member (light) and of the
# ensemble mean (dark); members as trained (lines), and as predicted from their own start (dots).
# Below: how much members differ in the course of training, expected and for this start.


# %%
def main(width: int = 2048, out: str | Path | None = None):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 6.5), height_ratios=(3, 2), sharey="row")
    angle, target, test = problem()
    for column, p in enumerate((0.0, 0.9)):
        flow, expected, steps, outputs = run(p, width)
        above, below = axes[:, column]
        mean = flow.mean(steps[-1])[:, 0]
        for variance, shade in (
            (flow.variance(steps[-1]), 0.15),
            (flow.ensemble_variance(steps[-1]), 0.3),
        ):
            band = 2 * variance.sqrt()
            above.fill_between(test, mean - band, mean + band, color="C0", alpha=shade, lw=0)
        for a in range(MEMBERS):
            above.plot(test, outputs[-1][a, :, 0], color=f"C{a + 1}", lw=1)
            above.plot(test[::4], expected[-1, a, ::4, 0], ".", color=f"C{a + 1}", ms=4)
        above.plot(test, mean, color="C0", lw=2, label="predicted mean")
        above.plot(angle, target[:, 0], "ko", ms=5, label="train data")
        above.set_title(f"N({p:g}, {1 - p * p:.2g}): γ = {flow.gamma:.2f} for {MEMBERS} members")
        above.set_xlabel("angle")
        spread = torch.stack([o.var(0, correction=0).mean() for o in outputs])
        own = expected.var(1, correction=0).flatten(1).mean(1)
        below.plot(steps, flow.diversity(torch.tensor(steps)).mean(-1), label="expected")
        below.plot(steps, own, "k:", lw=1, label="predicted from its start")
        below.plot(steps, spread, "o", ms=4, label=f"width {width}")
        below.set_xscale("symlog", linthresh=1)
        below.set_yscale("log")
        below.set_xlabel("steps")
    axes[0, 0].set_ylabel("output")
    axes[1, 0].set_ylabel("spread of members")
    for row in range(2):
        axes[row, 1].legend(*axes[row, 0].get_legend_handles_labels(), loc="lower left")
    figure.tight_layout()
    if out is not None:
        figure.savefig(out, dpi=150)
    return figure


# %%
if __name__ == "__main__":
    main(out="predict_before_training.png")
