"""Embeddings of tokens: their kernels, and laws that are not known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from embens import theory
from embens.networks import Linear

TOKENS = torch.tensor([[0, 1], [0, 2], [3, 2]])


def test_equal_tokens_share_their_vectors():
    net = nn.Sequential(nn.Embedding(4, 8), nn.Flatten(), Linear(16, 1))
    k = theory.kernels(net, TOKENS)
    shared = torch.tensor([[2, 1, 0], [1, 2, 1], [0, 1, 2]], dtype=torch.float64) / 2
    torch.testing.assert_close(k.nngp.same, shared)
    torch.testing.assert_close(k.ntk_shared.same, 2 * shared)  # of the vectors and of the layer


def test_embeddings_of_another_law_raise():
    embedding = nn.Embedding(4, 8)
    nn.init.normal_(embedding.weight, std=0.02)
    net = nn.Sequential(embedding, nn.Flatten(), Linear(16, 1))
    with pytest.raises(TypeError, match="not standard normal"):
        theory.kernels(net, TOKENS)


def test_positions_of_integers_pass_through_a_norm():
    """Positions do not depend on the inputs and are integers, unlike kernels."""

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.positions, self.head = nn.Embedding(3, 64), Linear(64, 1)
            self.norm = nn.RMSNorm(64, elementwise_affine=False)

        def forward(self, x):
            places = (0 * x).long() + torch.arange(3)
            return self.head(self.norm(self.positions(places)).mean(1))

    kernel = theory.kernels(Positions(), torch.zeros(2, 3)).nngp.same
    torch.testing.assert_close(kernel, torch.full((2, 2), 1 / 3).double(), rtol=1e-6, atol=0)
