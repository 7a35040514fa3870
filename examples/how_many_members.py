"""How many members does a network have room for? The estimate, against trained ensembles.

`embens.diagnose` tells the room of an untrained network in a second. Here it stands beside the
accuracy on digits of ensembles that were trained with 1, 2, 4, … members, width by width. The table
in docs/how-to/is-my-ensemble-an-ensemble.md is `main(seeds=4, epochs=60)`: five minutes on a core.
"""

# %%
from __future__ import annotations

import math
from collections.abc import Sequence

import torch

import embens

# %% [markdown]
# The network: three hidden layers, as in the paper's standard parametrization.


# %%
def build(width: int, members: int, seed: int, depth: int = 3) -> embens.EmbeddedEnsemble:
    generator = torch.Generator().manual_seed(seed)
    reference = embens.networks.mlp(
        64, width, depth, 10, weight_std=math.sqrt(2), parametrization="standard",
        generator=generator,
    )  # fmt: skip
    return embens.batch_ensemble(reference, members, p=0.0, generator=generator)


# %%
def accuracy(width: int, members: int, seed: int, epochs: int, depth: int = 3) -> float:
    digits = embens.data.digits().standardise().flatten()
    ensemble = build(width, members, seed, depth)
    embens.fit(
        ensemble, tuple(digits.train), epochs=epochs, batch_size=64, lr=0.01, seed=seed,
        progress=False,
    )  # fmt: skip
    with torch.no_grad():
        outputs = ensemble.eval()(digits.test.inputs)
    return embens.metrics.ensemble_accuracy(outputs, digits.test.targets).item()


# %%
def room(width: int, seed: int, depth: int = 3) -> float:
    digits = embens.data.digits().standardise().flatten()
    return embens.diagnose(build(width, 16, seed, depth), *digits.train).room


# %%
def main(
    widths: Sequence[int] = (8, 16, 32, 64),
    members: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    seeds: int = 1,
    epochs: int = 20,
    depth: int = 3,
) -> list[dict]:
    rows = []
    print("| width | room |" + "".join(f" M={m} |" for m in members))
    print("|---|---|" + "---|" * len(members))
    for width in widths:
        found = {"width": width, "room": sum(room(width, s, depth) for s in range(seeds)) / seeds}
        for m in members:
            runs = []
            for seed in range(seeds):
                try:
                    runs.append(accuracy(width, m, seed, epochs, depth))
                except embens.Divergence:
                    runs.append(math.nan)
            found[m] = sum(runs) / seeds
        best = max(v for m, v in found.items() if m in members and not math.isnan(v))
        cells = [f"**{found[m]:.3f}**" if found[m] == best else f"{found[m]:.3f}" for m in members]
        print(f"| {width} | {found['room']:.0f} | " + " | ".join(cells) + " |")
        rows.append(found)
    return rows


# %%
if __name__ == "__main__":
    main(seeds=4, epochs=60)
