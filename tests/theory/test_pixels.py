"""What convolutions and poolings do to pixels."""

from __future__ import annotations

import pytest
import torch
from theory.measured import expected, images
from torch import nn

import embens
from embens import laws, theory
from embens.networks import Conv2d, Linear

pytestmark = pytest.mark.usefixtures("double")


def test_the_layout_without_pixel_pairs_gives_the_same_as_with_them():
    """Without pooling only equal pixels matter; a pooling of 1×1 in front forces all pairs."""
    x = images(3, size=5)
    body = [
        Conv2d(2, 3, 3, padding=1),
        nn.ReLU(),
        Conv2d(3, 3, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
    ]
    net = nn.Sequential(*body, Linear(3 * 4, 1))
    forced = nn.Sequential(*body[:4], nn.AdaptiveAvgPool2d(2), nn.Flatten(), Linear(3 * 4, 1))
    options = {"pre": laws.Shifted(0.3), "post": laws.Shifted(0.6)}
    k = expected(theory.kernels(embens.embed(net, **options), x))
    pairs = expected(theory.kernels(embens.embed(forced, **options), x))

    for name, value in k.items():
        torch.testing.assert_close(value, pairs[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "conv",
    [
        Conv2d(2, 3, 3, padding="same"),
        Conv2d(2, 3, (3, 2), padding=(0, 1), stride=(1, 2)),
        Conv2d(2, 3, 1),
        Conv2d(2, 3, 2, stride=2),
    ],
    ids=str,
)
def test_shapes_and_borders_of_convolutions_are_torchs(conv):
    """Kernels of the first layer are products of inputs seen through ones."""
    x = images(2, size=5)
    net = nn.Sequential(conv, nn.Identity(), nn.Flatten())
    pixels = conv.double()(x).shape[2:].numel()
    k = theory.kernels(nn.Sequential(*net, Linear(3 * pixels, 1)), x)
    columns = torch.nn.functional.unfold(
        _padded(x, conv), conv.kernel_size, stride=conv.stride
    )  # (n, channels · window, pixels)
    expected_same = torch.einsum("icp,jcp->ij", columns, columns) / columns.shape[1] / pixels

    torch.testing.assert_close(k.nngp.same, expected_same)


def _padded(x, conv):
    if conv.padding == "same":
        return nn.functional.pad(x, (1, 1, 1, 1))
    vertical, horizontal = conv.padding
    return nn.functional.pad(x, (horizontal, horizontal, vertical, vertical))


@pytest.mark.parametrize(
    "module",
    [
        nn.AvgPool2d(2, padding=1),
        nn.AvgPool2d(2, ceil_mode=True),
        nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False),
        nn.AvgPool2d((2, 1), stride=(1, 2)),
        nn.AvgPool2d(2, divisor_override=3),
        nn.AvgPool2d(1, stride=2),
        nn.AdaptiveAvgPool2d(3),
        nn.AdaptiveAvgPool2d((2, None)),
    ],
    ids=str,
)
def test_any_average_pooling_is_torchs(module):
    """Pooling Gaussian pixels: the covariance of pooled units, by pooling both sides of it."""
    x = images(2, size=5)
    pooled = module(torch.zeros(1, 1, 5, 5)).shape[2:].numel()
    net = nn.Sequential(Conv2d(2, 3, 1), module, nn.Flatten(), Linear(3 * pooled, 1))
    k = theory.kernels(net, x)
    pixels = torch.einsum("icp,jcq->ijpq", x.flatten(2), x.flatten(2)) / 2
    both = module(pixels.reshape(-1, 1, 5, 5)).flatten(1).reshape(2, 2, 25, pooled)
    both = module(both.movedim(2, 3).reshape(-1, 1, 5, 5)).reshape(2, 2, pooled, pooled)

    torch.testing.assert_close(k.nngp.same, both.diagonal(dim1=2, dim2=3).mean(-1))


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_an_interpolation_maps_the_pixels_of_both_inputs(mode):
    """A linear network of patches: its kernel is the product of interpolated patches."""
    upsample = nn.Upsample(scale_factor=2, mode=mode)
    x = images(3, size=4)
    conv = Conv2d(2, 5, 3, padding=1)
    net = nn.Sequential(conv, upsample, nn.AvgPool2d(4), nn.Flatten(), Linear(5 * 4, 1))

    k = theory.kernels(net, x)

    patches = nn.functional.unfold(x, 3, padding=1).reshape(3, 18, 4, 4) / 18**0.5
    features = nn.functional.avg_pool2d(upsample(patches), 4).flatten(1)
    torch.testing.assert_close(k.nngp.same, features @ features.T / 4)
