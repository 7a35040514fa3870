"""
From one model to many
======================

Members of a BatchEnsemble start from modulations with mean ``p`` and variance ``1 - p²``. With ``p
= 1`` members are equal and stay one model; with ``p = 0`` they are independent at initialisation.
The paper calls the two ends the *collective* and the *independent* regime. Theory gives the
coupling of members before training; training shows how correlated their errors become.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits

import embens
from embens import theory

digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32)
x = (x - x.mean()) / x.std()
y = torch.tensor(digits.target)
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
train = x[order[:400]], y[order[:400]]
test = x[order[400:]], y[order[400:]]
means = (0.0, 0.5, 0.8, 0.9, 0.97, 1.0)


# %%
# ``theory.regime`` computes the coupling of the infinitely wide ensemble from the network and the
# laws of its modulations.


def ensemble_at(p: float) -> embens.EmbeddedEnsemble:
    generator = torch.Generator().manual_seed(0)
    reference = embens.networks.mlp(
        64, 64, 3, 10, weight_std=2**0.5, parametrization="standard", generator=generator
    )
    return embens.batch_ensemble(reference, members=4, p=p, generator=generator)


coupling = [theory.regime(ensemble_at(p)).coupling for p in means]
for p, r in zip(means, coupling, strict=True):
    print(f"p = {p:<5} coupling {r:.2f}")

# %%
# Train an ensemble for each p.

correlation, gain = [], []
for p in means:
    ensemble = ensemble_at(p)
    embens.fit(ensemble, train, epochs=30, batch_size=32, lr=0.01, progress=False)
    scores = embens.evaluate(ensemble, test)
    correlation.append(scores["correctness_correlation"])
    gain.append(100 * (scores["accuracy"] - scores["member_accuracy"]))

# %%
# Errors are correlated at every p, because some digits are hard for any network. The correlation
# rises where the limit predicts coupling, and the gain of the ensemble over its members falls. (One
# seed: the left end of the right panel is noise.)

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
left.plot(means, coupling, "o-", label="coupling, infinite width")
left.plot(means, correlation, "s-", label="correlation of members' errors, trained")
left.set(xlabel="p", title="Similarity of members")
left.legend()
right.plot(means, gain, "o-", color="C2")
right.set(xlabel="p", ylabel="percentage points", title="Accuracy gain of four members over one")
figure.tight_layout()
assert coupling[0] < 1e-9
assert correlation[0] < correlation[-1]
