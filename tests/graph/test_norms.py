"""Norm layers with tensors of the members, in the folded form, against torch's layers."""

import torch
from torch import nn

from embens.graph.norms import member_batch_norm, member_layer_norm

COUNT, ROWS = 3, 4


def test_batch_norms_have_the_statistics_of_their_members():
    x = torch.randn(COUNT * ROWS, 5)
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
    x, weight, bias = torch.randn(COUNT * ROWS, 2, 5), torch.randn(COUNT, 5), torch.randn(COUNT, 5)
    outputs = member_layer_norm(x, weight, bias, [5], 1e-5, COUNT).chunk(COUNT)
    for a, block in enumerate(x.chunk(COUNT)):
        expected = nn.functional.layer_norm(block, [5], weight[a], bias[a])
        torch.testing.assert_close(outputs[a], expected)
