"""Convolutions of the members, in the folded form, against torch's layers."""

import pytest
import torch
from torch import nn

from embens.graph.convolutions import (
    convolution_options,
    member_convolution,
    modulated_convolution,
)
from embens.graph.members import blocks_of

COUNT, ROWS = 3, 4


@pytest.mark.parametrize("is_shared", [True, False])
def test_convolutions_are_those_of_the_members(is_shared):
    x, weights = torch.randn(ROWS if is_shared else COUNT * ROWS, 2, 6), torch.randn(COUNT, 4, 2, 3)
    outputs = member_convolution(x, weights, None, COUNT, is_shared, "conv1d", {"padding": 1})
    for a, block in enumerate(blocks_of(x, COUNT, is_shared)):
        expected = nn.functional.conv1d(block, weights[a], padding=1)
        torch.testing.assert_close(outputs.chunk(COUNT)[a], expected)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("has_post", [True, False])
def test_a_modulated_convolution_has_the_weights_of_its_member(count, has_post):
    convolution = nn.Conv2d(2, 4, 3, padding=1)
    x, pre = torch.randn(count * ROWS, 2, 5, 5), torch.randn(count, 4)
    post = torch.randn(count, 2) if has_post else None
    name, options = convolution_options(convolution)
    weight, bias = convolution.weight, convolution.bias
    arguments = (weight, bias, pre, post, 1, count, False, False, name, options)
    outputs = modulated_convolution(x, *arguments).chunk(count)
    for a, block in enumerate(x.chunk(count)):
        member_weight = weight * pre[a].view(-1, 1, 1, 1)
        if post is not None:
            member_weight = member_weight * post[a].view(1, -1, 1, 1)
        expected = nn.functional.conv2d(block, member_weight, pre[a] * bias, padding=1)
        torch.testing.assert_close(outputs[a], expected)
