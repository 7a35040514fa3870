"""Networks without modulations that neural-tangents can describe, with their inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embens import networks
from embens.networks import Conv2d, Linear

LAW = {"weight_std": 1.3, "bias_std": 0.2}
ACTIVATIONS = {
    "relu": nn.ReLU,
    "leaky relu": nn.LeakyReLU,
    "abs": networks.Abs,
    "erf": networks.Erf,
    "sin": networks.Sin,
    "cos": networks.Cos,
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
}


class Code(nn.Module):
    """A network with a forward that is custom code.

    Args:
        forward: A function of the network and its inputs.
        **layers: Layers by name.
    """

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor], **layers: nn.Module):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def dense(inputs: int = 8, outputs: int = 8, **law: float) -> nn.Module:
    return Linear(inputs, outputs, **(law or LAW))


def convolution(inputs: int, size: int = 3, **options) -> nn.Module:
    return Conv2d(inputs, 8, size, **options, **LAW)


def norm(kind: type[nn.Module] = nn.LayerNorm) -> nn.Module:
    return kind(8, eps=1e-12, elementwise_affine=False)


def residual(kind: type[nn.Module]) -> nn.Module:
    def forward(net, x):
        x = net.stem(x)
        return net.head(torch.relu(x + net.down(torch.erf(net.up(net.norm(x))))))

    return Code(forward, stem=dense(5), up=dense(), down=dense(), norm=norm(kind), head=dense())


def joined(*, product: bool) -> nn.Module:
    def forward(net, x):
        x = torch.relu(net.stem(x))
        first, second = F.relu(net.up(x)), torch.erf(net.down(x))
        if product:
            return net.head(first * second)
        return net.head(torch.cat([first, second], dim=1))

    head = dense(8 if product else 16)
    return Code(forward, stem=dense(5), up=dense(), down=dense(), head=head)


def split() -> nn.Module:
    def forward(net, x):
        first, second = net.both(torch.relu(net.stem(x))).chunk(2, dim=-1)
        return net.head(first * torch.erf(second))

    return Code(forward, stem=dense(5), both=dense(8, 16), head=dense())


def scaled() -> nn.Module:
    def forward(net, x):
        x = net.stem(x)
        return net.head(torch.erf(x + 0.5 * net.up(torch.relu(x))))

    return Code(forward, stem=dense(5), up=dense(), head=dense())


def images(readout: str) -> nn.Module:
    is_mean = readout == "mean"
    pool = [nn.AdaptiveAvgPool2d(1)] if is_mean else []
    return nn.Sequential(
        convolution(2, padding=1), nn.ReLU(), nn.AvgPool2d(2), convolution(8, padding=1), nn.ReLU(),
        convolution(8, stride=2), nn.ReLU(), *pool, nn.Flatten(), dense(8 if is_mean else 32),
    )  # fmt: skip


def residual_images() -> nn.Module:
    """A residual CNN with LayerNorm over channels."""

    def forward(net, x):
        x = net.stem(x)
        h = net.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        x = x + net.down(torch.relu(net.up(h)))
        return net.head(torch.relu(x).mean((2, 3)))

    up, down = convolution(8, padding=1), convolution(8, padding=1)
    stem = convolution(2, padding=1)
    return Code(forward, stem=stem, up=up, down=down, norm=norm(), head=dense())


def grouped_images() -> nn.Module:
    """A CNN with GroupNorm, a grouped and a depthwise convolution."""
    return nn.Sequential(
        convolution(2, padding=1), nn.GroupNorm(2, 8, eps=1e-12, affine=False), nn.ReLU(),
        convolution(8, padding=1, groups=2), nn.ReLU(), convolution(8, padding=1, groups=8),
        convolution(8, 1), nn.ReLU(), nn.Flatten(), dense(8 * 16),
    )  # fmt: skip


def patches() -> nn.Module:
    """Patches of images as tokens, one attention block, and the mean over tokens."""

    def forward(net, x):
        x = net.stem(x).flatten(2).transpose(1, 2)
        x = x + net.attention(net.norm(x))
        return net.head(torch.erf(net.up(x)).mean(1))

    stem, block = convolution(2, 2, stride=2), attention_block(heads=1)
    return Code(forward, stem=stem, attention=block, norm=norm(), up=dense(), head=dense())


def attention_block(heads: int, *, causal: bool = False, linear: bool = False) -> nn.Module:
    """Attention with tied queries and keys and scores over the width, or a linear one."""

    def forward(net, x):
        n, tokens, width = x.shape
        shape = n, tokens, heads, width // heads
        queries = net.query(x).view(shape).transpose(1, 2)
        values = net.value(x).view(shape).transpose(1, 2)
        if linear:
            keys = net.key(x).view(shape).transpose(1, 2)
            mixed = queries @ keys.transpose(-2, -1) * shape[-1] ** -0.5 @ values
        else:
            scores = queries @ queries.transpose(-2, -1) / shape[-1]
            if causal:
                hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
                scores = scores.masked_fill(hidden, -torch.inf)
            mixed = scores.softmax(-1) @ values
        return net.out(mixed.transpose(1, 2).reshape(n, tokens, width))

    names = ("query", "key", "value", "out") if linear else ("query", "value", "out")
    stds = {"query": 1.0, "key": 1.0, "value": 1.2, "out": 1.1}
    layers = {name: dense(weight_std=stds[name], bias_std=0.0) for name in names}
    return Code(forward, **layers)


def tokens(**options) -> nn.Module:
    """One attention block between perceptrons of tokens."""

    def forward(net, x):
        x = torch.relu(net.attention(torch.relu(net.stem(x))))
        return net.head(x.mean(1))

    return Code(forward, stem=dense(5), attention=attention_block(**options), head=dense())


def transformer() -> nn.Module:
    """A pre-norm transformer block on tokens."""

    def forward(net, x):
        x = net.stem(x)
        x = x + net.attention(net.norm(x))
        x = x + net.down(torch.erf(net.up(net.norm2(x))))
        return net.head(x.mean(1))

    layers = {"stem": dense(5), "up": dense(), "down": dense(), "head": dense()}
    return Code(
        forward, norm=norm(), norm2=norm(nn.RMSNorm), attention=attention_block(heads=2), **layers
    )


def embedded() -> nn.Module:
    """Embeddings of tokens and positions, and a norm."""

    def forward(net, x):
        x = net.tokens(x) + net.positions(torch.arange(3))
        return net.head(torch.erf(net.up(net.norm(x))).mean(1))

    embeddings = {"tokens": nn.Embedding(6, 800), "positions": nn.Embedding(3, 800)}
    wide_norm = nn.RMSNorm(800, eps=1e-12, elementwise_affine=False)
    return Code(forward, **embeddings, norm=wide_norm, up=dense(800), head=dense())


def perceptron(activation: type[nn.Module]) -> Callable[[], nn.Module]:
    return lambda: networks.mlp(5, 8, 2, activation=activation(), weight_std=1.0, bias_std=0.2)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    **{name: perceptron(kind) for name, kind in ACTIVATIONS.items()},
    "residual, layer norm": lambda: residual(nn.LayerNorm),
    "residual, rms norm": lambda: residual(nn.RMSNorm),
    "sum with a factor": scaled,
    "gate": lambda: joined(product=True),
    "concatenation": lambda: joined(product=False),
    "split": split,
    "images, mean": lambda: images("mean"),
    "images, flatten": lambda: images("flatten"),
    "images, residual": residual_images,
    "images, groups": grouped_images,
    "images, patches": patches,
    "tokens, attention": lambda: tokens(heads=1),
    "tokens, heads": lambda: tokens(heads=4),
    "tokens, linear attention": lambda: tokens(heads=4, linear=True),
    "tokens, transformer": transformer,
    "embeddings": embedded,
}


def inputs_of(name: str) -> Tensor:
    """Return the inputs of a network in float64."""
    generator = torch.Generator().manual_seed(0)
    if name == "embeddings":
        return torch.tensor([[0, 1, 2], [3, 1, 0], [4, 5, 5], [2, 2, 1]])
    shape = 4, 5
    if name.startswith("images"):
        size = 12 if name in ("images, mean", "images, flatten") else 4
        shape = 3, 2, size, size
    if name.startswith("tokens"):
        shape = 4, 3, 5
    return torch.randn(shape, generator=generator, dtype=torch.float64)
