"""Unusual layers equal a naive contraction; tiles and chunks give the same kernel."""

from __future__ import annotations

import warnings

import pytest
import torch
from finite.jacobians import assert_equal, build, find_architecture, naive_kernel
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import embens
from embens import finite
from embens.finite import grams


@pytest.mark.parametrize("outputs", ["all", "nll"])
@pytest.mark.parametrize("name", ["paper's cnn", "cross attention", "tied", "transposed"])
def test_chunks_and_tiles_do_not_change_the_kernel(name, outputs, monkeypatch):
    architecture = find_architecture(name)
    ensemble, x = build(architecture, "batch_ensemble")
    options = {}
    if outputs == "nll":
        options = {"target": torch.arange(len(x)) % 2}
    whole = finite.ntk(ensemble, x, outputs=outputs, **options)
    monkeypatch.setattr(grams, "TILE_BYTES", 1)
    for chunk in (1, 2, 100):
        kernel = finite.ntk(ensemble, x, outputs=outputs, chunk=chunk, **options)
        assert_equal(kernel, (whole.shared, whole.individual))
    if outputs == "nll":
        options["target2"] = options["target"]
    rectangular = finite.ntk(ensemble, x, x, outputs=outputs, chunk=2, **options)

    assert_equal(rectangular, (whole.shared, whole.individual))


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.input, self.core, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.core, torch.tanh(self.input(x)), use_reentrant=False)
        return self.head(torch.tanh(x))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.input, self.head = nn.Linear(4, 5), nn.Linear(6, 2)
        self.core = nn.LSTM(5, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.core(torch.tanh(self.input(x)))[0][:, -1])


class Overwriting(nn.Module):
    def __init__(self):
        super().__init__()
        self.input, self.core = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding="same")
        self.head, self.relu = nn.Linear(4, 2), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.input(x))
        y = self.core(x)
        y += x
        return self.head(self.relu(y.mul_(2.0)).mean((2, 3)))


UNUSUAL = {
    "recomputed": (Recomputed, (3, 4)),
    "recurrent": (Recurrent, (3, 5, 4)),
    "overwriting": (Overwriting, (3, 2, 5, 5)),
    "norms": (
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh()),
            *(nn.Conv2d(4, 4, 3, dilation=2), nn.InstanceNorm2d(4, affine=True), nn.Tanh()),
            *(nn.Flatten(), nn.Linear(16, 6), nn.RMSNorm(6), nn.Linear(6, 2)),
        ),
        (3, 2, 8, 8),
    ),
    "transposed with output padding": (
        lambda: nn.Sequential(
            nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1, groups=2),
            *(nn.Tanh(), nn.Flatten(), nn.Linear(4 * 36, 2)),
        ),
        (3, 2, 3, 3),
    ),
    "weight norm": (
        lambda: nn.Sequential(
            nn.Linear(4, 6), nn.Tanh(), weight_norm(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 2)
        ),
        (3, 4),
    ),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_layers_equal_a_naive_contraction(name):
    make, shape = UNUSUAL[name]
    x = torch.randn(shape, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ensemble = embens.embed(make().double(), 2, norm_affine="member", example_input=x).eval()

    assert_equal(finite.ntk(ensemble, x, chunk=2), naive_kernel(ensemble, x))


def test_the_padding_token_of_an_embedding_has_no_gradient():
    reference = nn.Sequential(nn.Embedding(4, 5, padding_idx=0), nn.Flatten(), nn.Linear(15, 2))
    x = torch.tensor([[0, 1, 2], [0, 0, 3], [1, 1, 0]])
    ensemble = embens.embed(reference.double(), 2)
    assert_equal(finite.ntk(ensemble, x), naive_kernel(ensemble, x))
