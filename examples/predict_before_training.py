"""
Predict an ensemble before training it
======================================

An infinitely wide ensemble trained by gradient descent is a Gaussian process whose mean and
covariances are known at any time. We compute them first, then train a wide ensemble and compare.
"""

import math

import matplotlib.pyplot as plt
import torch

import embens
from embens import theory

# %%
# The problem: a function on the circle with five training points.


def on_circle(angle):
    return torch.stack([angle.cos(), angle.sin(), torch.ones_like(angle)], dim=-1)


angle = torch.tensor([-2.6, -1.9, -0.4, 0.4, 2.1], dtype=torch.float64)
test = torch.linspace(-math.pi, math.pi, 80).double()
x, target, x_test = on_circle(angle), (2 * angle).sin()[:, None], on_circle(test)

generator = torch.Generator().manual_seed(1)
width = 2048
net = embens.networks.mlp(3, width, 1, weight_std=math.sqrt(2), generator=generator).double()
ensemble = embens.batch_ensemble(net, members=5, generator=generator)
print(theory.regime(ensemble))

# %%
# The prediction. ``theory.kernels`` computes the limit of the ensemble; its width does not matter.
# ``gradient_descent`` solves training for any number of steps at once. ``largest_stable_rate`` is
# the largest learning rate at which training converges.

kernels = (
    theory.kernels(ensemble, x),
    theory.kernels(ensemble, x_test, x),
    theory.kernels(ensemble, x_test),
)
stable = min(theory.gradient_flow(*kernels, target, ensemble.members).largest_stable_rate)
flow = theory.gradient_descent(*kernels, target, ensemble.members, rate=0.5 * stable)
print(f"gamma {flow.gamma:.2f}, rate {flow.rate:.3g}")

# %%
# The experiment: the same ensemble, trained with the gamma and the learning rate of the prediction.


def half_squares(outputs, target):
    return (outputs - target).square().mean() / 2


steps = 300
start = ensemble(x).detach(), ensemble(x_test).detach()
optimizer = torch.optim.SGD(
    ensemble.parameter_groups(flow.rate, weight_decay=0.0, gamma=flow.gamma)
)
for _ in range(steps):
    optimizer.zero_grad()
    embens.objective(ensemble(x), target, half_squares).backward()
    optimizer.step()
outputs = ensemble(x_test).detach()[..., 0]
expected = flow.evolve(torch.tensor([steps]), *start)[0, ..., 0]
error = float((outputs - expected).norm() / (outputs - start[1][..., 0]).norm())
print(f"width {width}: relative error of the prediction {100 * error:.1f} %")

# %%
# Bands: two standard deviations over initialisations, of a member (light) and of the ensemble's
# mean (dark). Lines: trained members. Dots: predictions for these members.

figure, axes = plt.subplots(figsize=(8, 4.5))
mean = flow.mean(steps)[:, 0]
for variance, shade in ((flow.variance(steps), 0.15), (flow.ensemble_variance(steps), 0.3)):
    band = 2 * variance.sqrt()
    axes.fill_between(test, mean - band, mean + band, color="C0", alpha=shade, lw=0)
for a in range(ensemble.members):
    axes.plot(test, outputs[a], color=f"C{a + 1}", lw=1)
    axes.plot(test[::4], expected[a, ::4], ".", color=f"C{a + 1}", ms=4)
axes.plot(test, mean, color="C0", lw=2, label="predicted mean")
axes.plot(angle, target[:, 0], "ko", ms=5, label="training data")
axes.set(xlabel="angle", ylabel="output", title="Five members, predicted and trained")
axes.legend()
figure.tight_layout()
assert error < 0.1
