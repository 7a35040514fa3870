"""Rules of tensor operations: patches, tokens and max pooling."""

from __future__ import annotations

import pytest
import torch
from theory.measured import images
from torch import nn
from torch.nn import functional as F

from embens import theory
from embens.networks import Conv2d, Linear

pytestmark = pytest.mark.usefixtures("double")


class Patches(nn.Module):
    """An image, cut into patches that become tokens."""

    def __init__(self):
        super().__init__()
        self.patch, self.up, self.head = Conv2d(2, 4, 2, stride=2), Linear(4, 4), Linear(4, 1)

    def forward(self, x):
        return self.head(torch.relu(self.up(self.patch(x).flatten(2).transpose(1, 2))).mean(1))


def test_patches_become_tokens():
    net = Patches()
    chain = nn.Sequential(
        Conv2d(2, 4, 2, stride=2), Conv2d(4, 4, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), Linear(4, 1),
    )  # fmt: skip
    ours, theirs = theory.kernels(net, images()), theory.kernels(chain, images())

    torch.testing.assert_close(ours.ntk_shared.same, theirs.ntk_shared.same, rtol=1e-12, atol=0)


def test_max_pooling_in_code_is_refused():
    class Code(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = Conv2d(2, 4, 3, padding=1), Linear(4, 1)

        def forward(self, x):
            return self.head(F.max_pool2d(self.conv(x).relu(), 4).flatten(1))

    with pytest.raises(
        TypeError, match=r"max pooling has no limit here.*test_tensor_rules\.py.*max_pool2d"
    ):
        theory.kernels(Code(), images())
