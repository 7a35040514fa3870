"""
The dial from one model to many
===============================

Members of a BatchEnsemble start from modulations with mean ``p`` and variance ``1 - p²``. At ``p
= 1`` they are equal and stay one model; at ``p = 0`` nothing ties them to each other. The paper
calls the two ends the *collective* and the *independent* regime. Theory says, before any
training, how strongly two members are coupled; training shows how alike they become.
"""

import matplotlib.pyplot as plt
import torch

import embens
from embens import theory

digits = embens.data.digits().standardise().flatten()
few = digits.train.inputs[:400], digits.train.targets[:400]
dial = (0.0, 0.5, 0.8, 0.9, 0.97, 1.0)


# %%
# ``theory.regime`` reads the coupling of the infinitely wide ensemble off the network and its laws.


def ensemble_at(p: float) -> embens.EmbeddedEnsemble:
    generator = torch.Generator().manual_seed(0)
    reference = embens.networks.mlp(
        64, 64, 3, 10, weight_std=2**0.5, parametrization="standard", generator=generator
    )
    return embens.batch_ensemble(
        reference, members=4, p=p, law=embens.laws.Signs, generator=generator
    )


coupling = [theory.regime(ensemble_at(p)).coupling for p in dial]
for p, r in zip(dial, coupling, strict=True):
    print(f"p = {p:<5} coupling {r:.2f}")

# %%
# Now train an ensemble at each position of the dial.

correlation, gain = [], []
for p in dial:
    ensemble = ensemble_at(p)
    embens.fit(ensemble, few, epochs=30, batch_size=32, lr=0.01, progress=False)
    outputs = embens.predict(ensemble, digits.test.inputs).members
    correlation.append(float(embens.metrics.correctness_correlation(outputs, digits.test.targets)))
    together = embens.metrics.ensemble_accuracy(outputs, digits.test.targets)
    alone = embens.metrics.member_accuracy(outputs, digits.test.targets).mean()
    gain.append(100 * float(together - alone))

# %%
# Errors are correlated at every p, since some digits are hard for any network; how alike members
# are *beyond* that rises where the limit says that they are coupled. What the ensemble gains over
# its own members falls as they become one model. (One seed: the left end of the right panel is
# noise.)

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
left.plot(dial, coupling, "o-", label="coupling of the infinitely wide ensemble")
left.plot(dial, correlation, "s-", label="correlation of members' errors, trained")
left.set(xlabel="p", title="How alike members are")
left.legend()
right.plot(dial, gain, "o-", color="C2")
right.set(xlabel="p", ylabel="points", title="What four members gain over one of them")
figure.tight_layout()
assert coupling[0] < 1e-9
assert correlation[0] < correlation[-1]
