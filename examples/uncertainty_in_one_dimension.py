"""
Eight models inside one network
===============================

One network learns a curve from twenty points. Its eight members share all weights and differ only
by a few hundred numbers, yet they disagree where there are no data, as separate networks would.
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
# Any network of yours will do. The ensemble keeps a copy of its weights.

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
own = sum(p.numel() for p in ensemble.individual_parameters()) / ensemble.members
print(f"{shared} shared parameters, and {own:.0f} of each member's own")

# %%
# ``embens.fit`` trains it. The rate of the shared weights follows from the law of the modulations.

embens.fit(
    ensemble,
    (x, y),
    epochs=600,
    batch_size=20,
    lr=0.003,
    optimizer=torch.optim.Adam,
    weight_decay=0.0,
    progress=False,
)

# %%
# Members agree at the points and part beyond them; two standard deviations are shaded.

grid = torch.linspace(-4, 4, 200)[:, None]
members = embens.predict(ensemble, grid).members[..., 0]
mean, spread = members.mean(0), members.std(0)

figure, axes = plt.subplots(figsize=(8, 4))
axes.fill_between(grid[:, 0], mean - 2 * spread, mean + 2 * spread, color="C0", alpha=0.2, lw=0)
axes.plot(grid, members.T, color="C0", lw=0.7, alpha=0.7)
axes.plot(grid, mean, color="C0", lw=2, label="mean of the members")
axes.plot(x, y, "k.", label="data")
axes.set(ylim=(-3, 3), xlabel="x", ylabel="y", title="Members disagree where there are no data")
axes.legend()
figure.tight_layout()

# %%
# The same in numbers:

near, far = spread[(grid[:, 0].abs() - 1.5).abs() < 0.4].mean(), spread[grid[:, 0].abs() > 3].mean()
print(f"standard deviation of the members: {near:.2f} at the data, {far:.2f} far away")
assert far > 3 * near
