"""Networks with a custom forward that are common in practice."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from embens.networks import Conv2d, Linear

IMAGE_CHANNELS, FEATURES, TOKENS, VOCABULARY = 2, 5, 3, 7


class PreActivationMLP(nn.Module):
    """Residual perceptron of two blocks; activations act on the stream."""

    def __init__(self, width: int, **options):
        super().__init__()
        self.stem = Linear(FEATURES, width, **options)
        self.first = nn.ModuleList([Linear(width, width, **options) for _ in range(2)])
        self.second = nn.ModuleList([Linear(width, width, **options) for _ in range(2)])
        self.head = Linear(width, 1, **options)

    def forward(self, x):
        x = self.stem(x)
        for first, second in zip(self.first, self.second, strict=True):
            x = x + second(torch.relu(first(torch.relu(x))))
        return self.head(torch.relu(x))


class NormedMLP(nn.Module):
    """Residual perceptron with trainable LayerNorm on the stream, before activations."""

    def __init__(self, width: int, **options):
        super().__init__()
        self.stem = Linear(FEATURES, width, **options)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.layers = nn.ModuleList([Linear(width, width, **options) for _ in range(2)])
        self.head = Linear(width, 1, **options)

    def forward(self, x):
        x = self.stem(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(F.gelu(norm(x)))
        return self.head(torch.relu(x))


class ResidualImages(nn.Module):
    """Pre-activation blocks of convolutions, one with stride and a projected skip."""

    def __init__(self, width: int, norm: bool = False, **options):
        super().__init__()
        layer = {"padding": 1, **options}
        self.stem = Conv2d(IMAGE_CHANNELS, width, 3, **layer)
        self.norms = nn.ModuleList([_channel_norm(width, norm) for _ in range(4)])
        self.first = nn.ModuleList(
            [Conv2d(width, width, 3, **layer), Conv2d(width, 2 * width, 3, stride=2, **layer)]
        )
        self.second = nn.ModuleList(
            [Conv2d(width, width, 3, **layer), Conv2d(2 * width, 2 * width, 3, **layer)]
        )
        self.skip = Conv2d(width, 2 * width, 1, stride=2, **options)
        self.head = Linear(2 * width, 1, **options)

    def forward(self, x):
        x = self.stem(x)
        h = self.first[0](torch.relu(self.norms[0](x)))
        x = x + self.second[0](torch.relu(self.norms[1](h)))
        h = torch.relu(self.norms[2](x))
        x = self.skip(h) + self.second[1](torch.relu(self.first[1](h)))
        return self.head(torch.relu(x).mean((2, 3)))


def _channel_norm(width: int, norm: bool) -> nn.Module:
    return nn.GroupNorm(1, width) if norm else nn.Identity()


class NormedImages(ResidualImages):
    def __init__(self, width: int, **options):
        super().__init__(width, norm=True, **options)


class Block(nn.Module):
    """A pre-norm block of a transformer, whose scores are divided by the width of a head."""

    def __init__(self, width: int, heads: int = 2, **options):
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (Linear(width, width, **options) for _ in range(4))
        self.up, self.down = (
            Linear(width, 2 * width, **options),
            Linear(2 * width, width, **options),
        )

    def forward(self, x):
        n, t = x.shape[:2]
        h = self.norm1(x)
        q, k, v = (
            layer(h).view(n, t, self.heads, self.size).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / self.size)
        x = x + self.o(h.transpose(1, 2).reshape(n, t, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Embedded tokens, two pre-norm blocks, a norm, and a head on the last token."""

    def __init__(self, width: int, **options):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList([Block(width, **options) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.head = Linear(width, 1, **options)

    def forward(self, x):
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, -1])


class GatedMLP(nn.Module):
    """A residual block of RMSNorm and a gated layer (SwiGLU)."""

    def __init__(self, width: int, **options):
        super().__init__()
        self.stem = Linear(FEATURES, width, **options)
        self.norms = nn.ModuleList([nn.RMSNorm(width) for _ in range(2)])
        self.gate, self.up = Linear(width, width, **options), Linear(width, width, **options)
        self.down, self.head = Linear(width, width, **options), Linear(width, 1, **options)

    def forward(self, x):
        x = self.stem(x)
        h = self.norms[0](x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return self.head(self.norms[1](x))


class ConvNeXt(nn.Module):
    """A depthwise convolution, LayerNorm over channels, and a wide pointwise layer."""

    def __init__(self, width: int, **options):
        super().__init__()
        self.stem = Conv2d(IMAGE_CHANNELS, width, 3, padding=1, **options)
        self.depthwise = Conv2d(width, width, 3, padding=1, groups=width, **options)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = (
            Linear(width, 2 * width, **options),
            Linear(2 * width, width, **options),
        )
        self.head = Linear(width, 1, **options)

    def forward(self, x):
        x = self.stem(x)
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        x = x + self.down(F.gelu(self.up(h))).permute(0, 3, 1, 2)
        return self.head(torch.relu(x).mean((2, 3)))


class DenseImages(nn.Module):
    """Every layer sees the concatenation of all before."""

    def __init__(self, width: int, **options):
        super().__init__()
        layer = {"padding": 1, **options}
        self.stem = Conv2d(IMAGE_CHANNELS, width, 3, **layer)
        self.first = Conv2d(width, width // 2, 3, **layer)
        self.second = Conv2d(width + width // 2, width // 2, 3, **layer)
        self.head = Linear(2 * width, 1, **options)

    def forward(self, x):
        x = self.stem(x)
        x = torch.cat([x, self.first(torch.relu(x))], 1)
        x = torch.cat([x, self.second(torch.relu(x))], 1)
        return self.head(F.adaptive_avg_pool2d(torch.relu(x), 1).flatten(1))


class BagOfTokens(nn.Module):
    """The mean of embedded tokens, and a perceptron."""

    def __init__(self, width: int, **options):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.hidden, self.head = Linear(width, width, **options), Linear(width, 1, **options)

    def forward(self, x):
        return self.head(torch.relu(self.hidden(self.tokens(x).mean(1))))


class UNet(nn.Module):
    """Down, up by repeated pixels, and a skip by concatenation."""

    def __init__(self, width: int, **options):
        super().__init__()
        layer = {"padding": 1, **options}
        self.stem = Conv2d(IMAGE_CHANNELS, width, 3, **layer)
        self.down = Conv2d(width, 2 * width, 3, **layer)
        self.up = Conv2d(2 * width, width, 1, **options)
        self.out = Conv2d(2 * width, width, 3, **layer)
        self.head = Linear(width, 1, **options)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        h = torch.relu(self.down(F.avg_pool2d(x, 2)))
        h = F.interpolate(self.up(h), scale_factor=2)
        h = torch.relu(self.out(torch.cat([x, h], 1)))
        return self.head(h.mean((2, 3)))


class SqueezeExcite(nn.Module):
    """Channels are multiplied by gates of their means over pixels."""

    def __init__(self, width: int, **options):
        super().__init__()
        self.stem = Conv2d(IMAGE_CHANNELS, width, 3, padding=1, **options)
        self.body = Conv2d(width, width, 3, padding=1, **options)
        self.squeeze = Conv2d(width, width // 2, 1, **options)
        self.excite = Conv2d(width // 2, width, 1, **options)
        self.head = Linear(width, 1, **options)

    def forward(self, x):
        x = self.body(torch.relu(self.stem(x)))
        gate = self.excite(torch.relu(self.squeeze(x.mean((2, 3), keepdim=True))))
        return self.head((x * torch.sigmoid(gate)).mean((2, 3)))


class HighwayMLP(nn.Module):
    """A learned mixture of a layer and a scaled skip."""

    def __init__(self, width: int, **options):
        super().__init__()
        self.stem = Linear(FEATURES, width, **options)
        self.gate, self.value = Linear(width, width, **options), Linear(width, width, **options)
        self.head = Linear(width, 1, **options)

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        return self.head(0.7 * self.value(x) * torch.sigmoid(self.gate(x)) + 0.5 * x)


class Siamese(nn.Module):
    """Two branches of the inputs, joined by a sum before an activation."""

    def __init__(self, width: int, **options):
        super().__init__()
        self.left, self.right = (Linear(FEATURES, width, **options) for _ in range(2))
        self.head = Linear(width, 1, **options)

    def forward(self, x):
        return self.head(torch.relu(self.left(x) + self.right(x.flip(1))))


NETWORKS: dict[str, type[nn.Module]] = {
    "pre-activation perceptron": PreActivationMLP,
    "normed perceptron": NormedMLP,
    "residual images": ResidualImages,
    "normed images": NormedImages,
    "transformer": Transformer,
    "gated perceptron": GatedMLP,
    "ConvNeXt": ConvNeXt,
    "dense images": DenseImages,
    "bag of tokens": BagOfTokens,
    "U-net": UNet,
    "squeeze and excite": SqueezeExcite,
    "highway": HighwayMLP,
    "siamese": Siamese,
}


def inputs_of(name: str) -> torch.Tensor:
    """Return two inputs of a reference network."""
    generator = torch.Generator().manual_seed(3)
    if NETWORKS[name] in (Transformer, BagOfTokens):
        return torch.tensor([[0, 4, 2], [4, 4, 6]])
    if NETWORKS[name] in (ResidualImages, NormedImages, ConvNeXt, DenseImages, UNet, SqueezeExcite):
        return torch.randn(2, IMAGE_CHANNELS, 4, 4, generator=generator)
    return torch.randn(2, FEATURES, generator=generator)
