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


NAMES_OF_COMMON_FAMILIES = (
    "masksembles",
    "own last layers",
    "own layers everywhere",
    "low rank",
    "lora",
)
"""Families that other tests have too."""

FAMILIES = {
    "batch_ensemble": embens.batch_ensemble,
    "all sites": partial(embens.embed, sites="all"),
    "trainable values with zeros": partial(embens.embed, pre=laws.Ternary(), post=laws.Ternary()),
    "norms per member": partial(embens.embed, norm_affine="member"),
    "frozen masks": partial(embens.mc_dropout, law=laws.Bernoulli(0.5), fresh=False),
    "last_layer_dropout": embens.last_layer_dropout,
    "independent": lambda reference, members, example_input: embens.independent(reference, members),
}
for name in NAMES_OF_COMMON_FAMILIES:
    FAMILIES[name] = cases.FAMILIES[name]


NOT_BATCHED = ("unbatched conv", "encoder layer, time first")


BATCHED = [a for a in ARCHITECTURES if a.name not in NOT_BATCHED]


def find_architecture(name: str) -> Architecture:
    """Return the architecture of that name."""
    return next(architecture for architecture in ARCHITECTURES if architecture.name == name)


class Few(nn.Module):
    """Select a few outputs, because an explicit Jacobian of all outputs is slow."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, ::7][:, :6]


def build(architecture: Architecture, family: str) -> tuple[embens.EmbeddedEnsemble, Tensor]:
    """Return an ensemble of two members in float64, in evaluation mode, and samples."""
    x = architecture.inputs(torch.Generator().manual_seed(1))
    if x.is_floating_point():
        x = x.double()
    reference = architecture.build().double().eval()
    if architecture.name not in NOT_BATCHED and reference(x)[0].numel() > 10:
        reference = nn.Sequential(reference, Few())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # guesses about the data flow
        ensemble = FAMILIES[family](reference, 2, example_input=x)
    return ensemble.eval(), x


def jacobians(ensemble: embens.EmbeddedEnsemble, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Jacobians of outputs (member, batch, class), one output after the other.

    Returns:
        Gradients of the shared and of the member's individual parameters, each of shape
        (member, batch, class, parameter).
    """
    shared = [p for p in ensemble.shared_parameters() if p.requires_grad]
    individual = [p for p in ensemble.individual_parameters() if p.requires_grad]
    empty_gradient = outputs.new_zeros(1)  # so that there is something to concatenate
    shared_rows = []
    individual_rows = []
    for a, outputs_of_member in enumerate(outputs):
        for output in outputs_of_member.flatten():
            gradients = torch.autograd.grad(
                output, shared + individual, retain_graph=True, materialize_grads=True
            )
            shared_row = [gradient.flatten() for gradient in gradients[: len(shared)]]
            individual_row = [gradient[a].flatten() for gradient in gradients[len(shared) :]]
            shared_rows.append(torch.cat([empty_gradient, *shared_row]))
            individual_rows.append(torch.cat([empty_gradient, *individual_row]))
    return (
        torch.stack(shared_rows).view(*outputs.shape, -1),
        torch.stack(individual_rows).view(*outputs.shape, -1),
    )


def contract(rows: tuple[Tensor, Tensor], columns: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the shared and the individual kernel of two sets of samples from Jacobians."""
    shared_rows, individual_rows = rows
    shared_columns, individual_columns = columns
    shared = torch.einsum("aikp,bjlp->abijkl", shared_rows, shared_columns)
    individual = torch.einsum("aikp,ajlp->aijkl", individual_rows, individual_columns)
    return shared, individual


def naive_kernel(ensemble: embens.EmbeddedEnsemble, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the kernel of all outputs by explicit Jacobians."""
    rows = jacobians(ensemble, flat_outputs(ensemble, x))
    return contract(rows, rows)


def flat_outputs(ensemble: embens.EmbeddedEnsemble, x: Tensor) -> Tensor:
    return ensemble(x, chunk=1).flatten(2)


def assert_equal(kernel: finite.FiniteKernel, expected: tuple[Tensor, Tensor], **tolerance) -> None:
    """Compare both parts of a kernel relative to their largest value."""
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
        if self.time_first:
            x = x.transpose(0, 1)
        x = torch.tanh(self.mixed(x.reshape(rows * times, 4)))
        if self.time_first:
            x = x.reshape(times, rows, 4).mean(0)
        else:
            x = x.reshape(rows, times, 4).mean(1)
        x = x * self.token + self.mixed(self.token)
        return self.head(x) * self.head.weight.square().mean()
