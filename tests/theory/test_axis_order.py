"""Orders of axes: reshapes and permutations change no kernel."""

from __future__ import annotations

import pytest
import torch
from theory.measured import images
from torch import nn

from embens import theory
from embens.networks import Conv2d, Linear
from embens.theory.axis_order import axis_names, permute, reshape, weigh_pixels
from embens.theory.moments import PAIRS, Moments, State
from embens.theory.streams import Part, Stream

pytestmark = pytest.mark.usefixtures("double")


def tokens() -> Stream:
    """Return a stream of 3 tokens with 8 features."""
    state = State(Moments(torch.ones(1, 1, 3, 3)), layout=PAIRS, spatial=1, features_last=True)
    return Stream((Part(state, 8),))


def names(stream: Stream | None) -> tuple[str, ...]:
    assert stream is not None
    return axis_names(stream.parts[0].state)


def test_features_split_into_heads_and_join_again():
    heads = reshape(tokens(), torch.Size([1, 3, 8]), torch.Size([1, 3, 2, 4]))
    assert names(heads) == ("pixel 0", "heads", "features")
    assert heads.parts[0].width == 4
    first = permute(heads, (0, 2, 1, 3))
    assert names(first) == ("heads", "pixel 0", "features")
    assert names(permute(first, (0, 1, 3, 2))) == ("heads", "features", "pixel 0")
    joined = reshape(permute(first, (0, 2, 1, 3)), torch.Size([1, 3, 2, 4]), torch.Size([1, 3, 8]))
    assert names(joined) == names(tokens())
    assert joined.parts[0].width == 8


@pytest.mark.parametrize(
    "after", [(1, 3, 4, 2, 1), (1, 6, 4), (1, 2, 3, 4)], ids=["five axes", "mixed", "other order"]
)
def test_other_shapes_have_no_rule(after):
    assert reshape(tokens(), torch.Size([1, 3, 8]), torch.Size(after)) is None


def test_heads_that_come_first_cannot_be_joined():
    heads = reshape(tokens(), torch.Size([1, 3, 8]), torch.Size([1, 3, 2, 4]))
    first = permute(heads, (0, 2, 1, 3))
    assert reshape(first, torch.Size([1, 2, 3, 4]), torch.Size([1, 2, 12])) is None


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 1), (0, 1, 1)])
def test_orders_that_move_or_miss_an_axis_have_no_rule(order):
    assert permute(tokens(), order) is None


def test_channels_last_and_channels_first_have_the_same_kernels():
    class ChannelsLast(nn.Module):
        """A block of ConvNeXt: a convolution, then layers on channels in the last axis."""

        def __init__(self):
            super().__init__()
            self.stem, self.conv = Conv2d(2, 4, 2, stride=2), Conv2d(4, 4, 3, padding=1)
            self.norm = nn.LayerNorm(4, elementwise_affine=False)
            self.up, self.down, self.head = Linear(4, 8), Linear(8, 4), Linear(4, 1)

        def forward(self, x):
            x = self.stem(x)
            y = self.norm(self.conv(x).permute(0, 2, 3, 1))
            y = self.down(torch.relu(self.up(y))).permute(0, 3, 1, 2)
            return self.head((x + y).mean((2, 3)))

    class ChannelsFirst(ChannelsLast):
        def __init__(self):
            super().__init__()
            self.up, self.down = Conv2d(4, 8, 1), Conv2d(8, 4, 1)

        def forward(self, x):
            x = self.stem(x)
            y = self.conv(x)
            y = y.permute(0, 2, 3, 1)
            y = self.norm(y).permute(0, 3, 1, 2)
            return self.head((x + self.down(torch.relu(self.up(y)))).mean((2, 3)))

    ours, theirs = (theory.kernels(net(), images()) for net in (ChannelsLast, ChannelsFirst))
    torch.testing.assert_close(ours.ntk_shared.same, theirs.ntk_shared.same, rtol=1e-12, atol=0)


def test_factors_of_pixels_are_those_of_a_convolution_that_sees_less():
    """A mask that hides one row of images acts as images without the row."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.up, self.head = Conv2d(2, 4, 1), Conv2d(4, 4, 1), Linear(4, 1)

        def forward(self, x):
            kept = (x[:, :1] != 9.0).to(x.dtype)
            x = torch.relu(self.up(self.stem(x))) * kept
            return self.head(x.sum((2, 3)) / kept.sum((2, 3)))

    class Plain(Masked):
        def forward(self, x):
            return self.head(torch.relu(self.up(self.stem(x))).mean((2, 3)))

    x = images()
    hidden = x.clone()
    hidden[0, :, 0] = 9.0
    hidden[1, :, 3] = 9.0
    shown = torch.stack([x[0, :, 1:], x[1, :, :3]])
    ours, theirs = theory.kernels(Masked(), hidden), theory.kernels(Plain(), shown)
    torch.testing.assert_close(ours.ntk_shared.same, theirs.ntk_shared.same, rtol=1e-12, atol=0)


def test_factors_of_features_have_no_rule():
    stream = tokens()
    assert weigh_pixels(stream, torch.ones(1, 3, 8)) is None
    assert weigh_pixels(stream, torch.ones(2, 3, 1)) is None  # fixed for two inputs
    assert weigh_pixels(stream, torch.ones(1, 1, 3, 1)) is None
    doubled = weigh_pixels(stream, torch.full((3, 1), 2.0))
    assert doubled is not None
    assert (doubled.parts[0].state.covariance == 4).all()
