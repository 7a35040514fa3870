"""Ensembles of all families and architectures, and their kernels by explicit Jacobians."""

from __future__ import annotations

import warnings
from functools import partial

import cases
import torch
from cases import ARCHITECTURES, Architecture
from torch import Tensor, nn

import embens
from embens import finite, laws

EXACT = {"rtol": 1e-10, "atol": 1e-12}


SAME_AS_CASES = ("masksembles", "own last layers", "own layers everywhere", "low rank", "lora")
"""Families that are shared with other tests."""

FAMILIES = {
    "batch_ensemble": embens.batch_ensemble,
    "all sites": partial(embens.embed, sites="all"),
    "trainable values with zeros": partial(embens.embed, pre=laws.Ternary(), post=laws.Ternary()),
    "norms per member": partial(embens.embed, norm_affine="member"),
    "frozen masks": partial(embens.mc_dropout, law=laws.Bernoulli(0.5), fresh=False),
    "last_layer_dropout": embens.last_layer_dropout,
    "independent": lambda reference, members, example_input: embens.independent(reference, members),
    **{name: cases.FAMILIES[name] for name in SAME_AS_CASES},
}


NOT_BATCHED = ("unbatched conv", "encoder layer, time first")


BATCHED = [a for a in ARCHITECTURES if a.name not in NOT_BATCHED]


class Few(nn.Module):
    """Select a few outputs, because an explicit Jacobian of all outputs is slow."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, ::7][:, :6]


def build(architecture: Architecture, family: str) -> tuple[embens.EmbeddedEnsemble, Tensor]:
    x = architecture.inputs(torch.Generator().manual_seed(1))
    x = x.double() if x.is_floating_point() else x
    reference = architecture.build().double().eval()
    if architecture.name not in NOT_BATCHED and reference(x)[0].numel() > 10:
        reference = nn.Sequential(reference, Few())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # guesses about the data flow
        return FAMILIES[family](reference, 2, example_input=x).eval(), x


def jacobians(ensemble: embens.EmbeddedEnsemble, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of outputs (member, batch, class) by one call for each of them."""
    shared = [p for p in ensemble.shared_parameters() if p.requires_grad]
    individual = [p for p in ensemble.individual_parameters() if p.requires_grad]
    rows: tuple[list, list] = ([], [])
    for a, of_member in enumerate(outputs):
        for value in of_member.flatten():
            gradients = torch.autograd.grad(
                value, shared + individual, retain_graph=True, materialize_grads=True
            )
            nothing = outputs.new_zeros(1)
            rows[0].append(torch.cat([nothing, *(g.flatten() for g in gradients[: len(shared)])]))
            rows[1].append(
                torch.cat([nothing, *(g[a].flatten() for g in gradients[len(shared) :])])
            )
    first, second = (torch.stack(r).view(*outputs.shape, -1) for r in rows)
    return first, second


def naive(rows: tuple[Tensor, Tensor], columns: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Contract Jacobians."""
    shared = torch.einsum("aikp,bjlp->abijkl", rows[0], columns[0])
    return shared, torch.einsum("aikp,ajlp->aijkl", rows[1], columns[1])


def flat_outputs(ensemble: embens.EmbeddedEnsemble, x: Tensor) -> Tensor:
    return ensemble(x, chunk=1).flatten(2)


def assert_equal(kernel: finite.FiniteKernel, expected: tuple[Tensor, Tensor], **tolerance) -> None:
    for part, expected_part in zip((kernel.shared, kernel.individual), expected, strict=True):
        scale = expected_part.abs().max().clamp(min=1e-30)
        torch.testing.assert_close(part / scale, expected_part / scale, **(tolerance or EXACT))


class Strange(nn.Module):
    """Positions folded into the batch, a bare parameter, and a weight read outside its layer."""

    def __init__(self, time_first: bool):
        super().__init__()
        self.time_first = time_first
        self.input = nn.Linear(3, 4)
        self.mixed = nn.Linear(4, 4)
        self.token = nn.Parameter(torch.randn(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows, times, _ = x.shape
        x = torch.tanh(self.input(x))
        x = x.transpose(0, 1) if self.time_first else x
        x = torch.tanh(self.mixed(x.reshape(rows * times, 4)))
        x = (
            x.reshape(times, rows, 4).mean(0)
            if self.time_first
            else x.reshape(rows, times, 4).mean(1)
        )
        x = x * self.token + self.mixed(self.token)
        return self.head(x) * self.head.weight.square().mean()
