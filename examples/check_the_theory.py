"""
Check the theory
================

The documentation of the theory states kernels, their variance at finite width, and the number of
members that fit. This example computes each of them and compares it with drawn networks.
"""

import math

import matplotlib.pyplot as plt
import torch

import embens
from embens import laws, theory

SIGNS = laws.Signs(0.0)
generator = torch.Generator().manual_seed(0)
x = torch.randn(2, 5, generator=generator, dtype=torch.float64)


def draw(width, seed, pre, post, members=2, inputs=5):
    """Return an ensemble of new weights and modulations."""
    generator = torch.Generator().manual_seed(seed)
    net = embens.networks.mlp(inputs, width, 2, weight_std=math.sqrt(2), generator=generator)
    return embens.embed(
        net.double(), members, pre=pre, post=post, trainable=False, generator=generator
    )


# %%
# Kernels. The mean over drawn networks approaches the limit, within and between members.

shifted = laws.Shifted(0.7)
limit = theory.kernels(draw(8, 0, shifted, shifted), x).ntk_shared
measured = [embens.finite.ntk(draw(256, s, shifted, shifted), x).shared for s in range(40)]
mean = torch.stack(measured).mean(0).squeeze()
print("within members:  limit", limit.same.flatten().tolist())
print("                 drawn", mean[0, 0].flatten().tolist())
print("between members: limit", limit.cross.flatten().tolist())
print("                 drawn", mean[0, 1].flatten().tolist())

# %%
# Interference. With centred signs the kernel between members has mean 0. Its variance falls as
# 1/width, and the leading coefficient is known.

widths = [32, 64, 128, 256]
predicted, drawn = [], []
for width in widths:
    predicted.append(theory.interference(draw(width, 0, SIGNS, SIGNS), x, gamma=2)[0, 0].item())
    kernels = []
    for seed in range(30):
        network = draw(width, seed, SIGNS, SIGNS, members=8)
        kernels.append(embens.finite.ntk(network, x[:1], outputs="trace").shared[..., 0, 0])
    between = torch.stack(kernels)[:, ~torch.eye(8, dtype=torch.bool)]
    drawn.append(between.square().mean().item())
    print(f"width {width}: predicted {predicted[-1]:.4f}, drawn {drawn[-1]:.4f}")

# %%
# Members. The error of the ensemble mean falls with the number of members until the network is
# full. A wider network holds more of them.

inputs = torch.randn(40, 3, generator=generator, dtype=torch.float64)
target = inputs[:, 0]
members = (1, 2, 4, 8, 16, 32)
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2))
left.loglog(widths, predicted, label="predicted")
left.loglog(widths, drawn, "o", label="30 drawn networks of 8 members")
left.set_xlabel("width")
left.set_ylabel("variance of the kernel between members")
left.legend()
for width in (8, 32):
    report = theory.best_members(
        draw(width, 0, SIGNS, SIGNS, inputs=3),
        train=(inputs[:12], target[:12]),
        test=(inputs[12:], target[12:]),
        members=members,
        gamma=float,
        time=3000.0,
    )
    print(f"width {width}: best number of members {report.best} of {members}")
    right.loglog(members, report.errors, "o-", label=f"width {width}")
right.loglog(members, report.separate, "k--", label="separate wide networks")
right.set_xlabel("members")
right.set_ylabel("predicted test error")
right.legend()
figure.tight_layout()
