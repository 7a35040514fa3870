"""
Eight models inside one network
===============================

One network learns a curve from twenty points. Its eight members share all weights and differ in a
few hundred parameters each, yet they disagree where there are no data, as separate networks would.
"""

import matplotlib.pyplot as plt
import torch

import embens

generator = torch.Generator().manual_seed(0)
x = torch.cat(
    [torch.rand(10, 1, generator=generator) - 2, torch.rand(10, 1, generator=generator) + 1]
)
y = torch.sin(2 * x) + 0.05 * torch.randn(x.shape, generator=generator)

# %%
# Any network works. The ensemble keeps a copy of it.

reference = embens.networks.mlp(
    1,
    128,
    3,
    1,
    activation="tanh",
    weight_std=1.5,
    bias_std=0.5,
    parametrization="standard",
    generator=generator,
)
ensemble = embens.batch_ensemble(reference, members=8, generator=generator)
shared = sum(p.numel() for p in ensemble.shared_parameters())
individual = sum(p.numel() for p in ensemble.individual_parameters()) / ensemble.members
print(f"{shared} shared parameters, {individual:.0f} individual parameters per member")

# %%
# ``parameter_groups`` sets the learning rate of the shared weights; ``fit`` trains the ensemble.

groups = ensemble.parameter_groups(lr=0.003, weight_decay=0.0, optimizer=torch.optim.Adam)
optimizer = torch.optim.Adam(groups)
embens.fit(ensemble, (x, y), epochs=600, batch_size=20, optimizer=optimizer, progress=False)

# %%
# Members agree at the data and differ elsewhere; two standard deviations are shaded.

grid = torch.linspace(-4, 4, 200)[:, None]
prediction = embens.predict(ensemble, grid, task="regression")
members = prediction.members[..., 0]
mean, spread = prediction.mean[:, 0], prediction.std[:, 0]

figure, axes = plt.subplots(figsize=(8, 4))
axes.fill_between(grid[:, 0], mean - 2 * spread, mean + 2 * spread, color="C0", alpha=0.2, lw=0)
axes.plot(grid, members.T, color="C0", lw=0.7, alpha=0.7)
axes.plot(grid, mean, color="C0", lw=2, label="mean of the members")
axes.plot(x, y, "k.", label="data")
axes.set(ylim=(-3, 3), xlabel="x", ylabel="y", title="Members disagree where there are no data")
axes.legend()
figure.tight_layout()

# %%
# The standard deviation of the members, close to the data and far away:

distance = (grid[:, 0].abs() - 1.5).abs()
near = spread[distance < 0.4].mean()
far = spread[distance > 1.5].mean()
print(f"standard deviation of the members: {near:.2f} at the data, {far:.2f} far away")
assert far > 3 * near
