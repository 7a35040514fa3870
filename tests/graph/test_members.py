"""Layers with separate tensors of members, in the folded form, against torch's layers."""

import pytest
import torch
from torch import nn

from embens.graph.members import (
    blocks_of,
    low_rank_linear,
    low_rank_weights,
    member_batch_norm,
    member_convolution,
    member_embedding,
    member_layer_norm,
    member_linear,
)

COUNT, ROWS = 3, 4


def rows_of(is_shared: bool, *shape: int) -> torch.Tensor:
    return torch.randn(ROWS if is_shared else COUNT * ROWS, *shape)


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("bias", ["none", "shared", "separate"])
def test_linear_layers_are_those_of_the_members(is_shared, bias):
    x, weights = rows_of(is_shared, 2, 5), torch.randn(COUNT, 6, 5)
    biases = {"none": None, "shared": torch.randn(6), "separate": torch.randn(COUNT, 6)}[bias]
    outputs = member_linear(x, weights, biases, COUNT, is_shared)
    for a, block in enumerate(blocks_of(x, COUNT, is_shared)):
        own = biases[a] if bias == "separate" else biases
        expected = nn.functional.linear(block, weights[a], own)
        torch.testing.assert_close(outputs.chunk(COUNT)[a], expected)


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("rows", [1, 50])
def test_low_rank_layers_are_those_of_the_members(is_shared, rows):
    x = torch.randn(rows if is_shared else COUNT * rows, 5)
    weight, bias = torch.randn(6, 5), torch.randn(6)
    left, right = torch.randn(COUNT, 6, 2), torch.randn(COUNT, 2, 5)
    outputs = low_rank_linear(x, weight, bias, left, right, COUNT, is_shared)
    weights = low_rank_weights(weight, left, right, "additive")
    torch.testing.assert_close(outputs, member_linear(x, weights, bias, COUNT, is_shared))


@pytest.mark.parametrize("is_shared", [True, False])
def test_embeddings_and_convolutions_are_those_of_the_members(is_shared):
    tokens = torch.randint(7, (ROWS if is_shared else COUNT * ROWS, 2))
    tables = torch.randn(COUNT, 7, 5)
    outputs = member_embedding(tokens, tables, COUNT, is_shared).chunk(COUNT)
    for a, block in enumerate(blocks_of(tokens, COUNT, is_shared)):
        torch.testing.assert_close(outputs[a], tables[a][block])
    x, weights = rows_of(is_shared, 2, 6), torch.randn(COUNT, 4, 2, 3)
    outputs = member_convolution(x, weights, None, COUNT, is_shared, "conv1d", {"padding": 1})
    for a, block in enumerate(blocks_of(x, COUNT, is_shared)):
        expected = nn.functional.conv1d(block, weights[a], padding=1)
        torch.testing.assert_close(outputs.chunk(COUNT)[a], expected)


def test_batch_norms_have_the_statistics_of_their_members():
    x = rows_of(False, 5)
    norms = [nn.BatchNorm1d(5) for _ in range(COUNT)]
    expected = [norm(block) for norm, block in zip(norms, x.chunk(COUNT), strict=True)]
    means, variances = torch.zeros(COUNT, 5), torch.ones(COUNT, 5)
    batches = torch.zeros(COUNT, dtype=torch.long)
    tensors = (means, variances, norms[0].weight, norms[0].bias, batches)
    separate = (True, True, False, False, True)
    outputs = member_batch_norm(x, COUNT, tensors, separate, True, 0.1, 1e-5)
    torch.testing.assert_close(outputs, torch.cat(expected))
    torch.testing.assert_close(means, torch.stack([norm.running_mean for norm in norms]))
    torch.testing.assert_close(variances, torch.stack([norm.running_var for norm in norms]))
    assert batches.tolist() == [1] * COUNT


def test_layer_norms_have_the_scales_of_their_members():
    x, weight, bias = rows_of(False, 2, 5), torch.randn(COUNT, 5), torch.randn(COUNT, 5)
    outputs = member_layer_norm(x, weight, bias, [5], 1e-5, COUNT).chunk(COUNT)
    for a, block in enumerate(x.chunk(COUNT)):
        expected = nn.functional.layer_norm(block, [5], weight[a], bias[a])
        torch.testing.assert_close(outputs[a], expected)
