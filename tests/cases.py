"""Architectures and families of the contract tests; a new one is one line.

Activations are smooth, so that no unit is dead and every modulation shows in the output.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import embens
from embens import laws


@dataclass(frozen=True)
class Architecture:
    """A reference network with inputs for it."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], Tensor]
    first: set[str]
    last: set[str]

    def __str__(self) -> str:
        return self.name


class ResidualBlock(nn.Module):
    """Two convolutions with BatchNorm and a connection around them, activations functional."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += self.skip(x)
        return F.silu(y)


class Residual(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.ModuleList([ResidualBlock(6, 6), ResidualBlock(6, 8)])
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x.mean((2, 3))))


class HandAttention(nn.Module):
    """A transformer written with Linear layers on (batch, time, feature)."""

    def __init__(self, width: int = 8, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.ffn = nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, width))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows, times, width = x.shape

        def split(t: Tensor) -> Tensor:
            return t.view(rows, times, self.heads, width // self.heads).transpose(1, 2)

        y = F.scaled_dot_product_attention(
            split(self.query(x)), split(self.key(x)), split(self.value(x))
        )
        x = self.norm(x + self.out(y.transpose(1, 2).reshape(rows, times, width)))
        return self.head((x + self.ffn(x)).mean(1))


class Tokens(nn.Module):
    """An Embedding, torch's own transformer encoder, and a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


class CrossAttention(nn.Module):
    """nn.MultiheadAttention with keys and values of other widths."""

    def __init__(self):
        super().__init__()
        self.memory = nn.Linear(6, 5)
        self.attention = nn.MultiheadAttention(8, 2, kdim=5, vdim=6, batch_first=True)
        self.query = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attention(self.query(x), self.memory(x), x, need_weights=False)
        return self.head(torch.tanh(y.mean(1)))


class Reused(nn.Module):
    """One layer applied twice, with a functional activation."""

    def __init__(self):
        super().__init__()
        self.input = nn.Linear(4, 6)
        self.core = nn.Linear(6, 6)
        self.output = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.input(x))
        x = torch.tanh(self.core(x))
        x = torch.tanh(self.core(x))
        return self.output(x)


class Held(nn.Module):
    """Layers held in a dict and a plain list as well as by name, nested three deep."""

    def __init__(self):
        super().__init__()
        inner = nn.ModuleDict({"a": nn.Linear(4, 6), "b": nn.Sequential(nn.Linear(6, 6))})
        self.nest = nn.ModuleDict({"inner": inner})
        self.order = [inner["a"], inner["b"]]
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.order:
            x = torch.tanh(layer(x))
        return self.head(x)


class Tied(nn.Module):
    """An output layer that has the weight of the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.core = nn.Linear(6, 6)
        self.output = nn.Linear(6, 7, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(torch.tanh(self.core(self.embedding(tokens))))


class Recurrent(nn.Module):
    """An Embedding, an LSTM whose output and state are both used, and a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.core = nn.LSTM(6, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        output, (hidden, _) = self.core(self.embedding(tokens))
        return self.head(output.mean(1) + hidden[-1])


class Levels(nn.Module):
    """A GRU with two levels in both directions, of which only the output is used."""

    def __init__(self):
        super().__init__()
        self.input = nn.Linear(4, 6)
        self.core = nn.GRU(6, 3, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.core(self.input(x))[0].mean(1))


def _mlp() -> nn.Module:
    layers = [nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.GELU(), nn.Linear(6, 3)]
    return nn.Sequential(*layers)


def _grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect", groups=2),
        nn.SiLU(),
        nn.Conv2d(6, 6, 3, padding=1, padding_mode="circular", groups=6),
        nn.SiLU(),
        nn.Conv2d(6, 9, 3, stride=2, dilation=1, groups=3),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(9 * 4, 3),
    )


def _transposed() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(4, 6, 3, groups=2),
        nn.SiLU(),
        nn.ConvTranspose2d(6, 4, 2, stride=2, groups=2),
        nn.SiLU(),
        nn.Conv2d(4, 2, 1),
    )


def _cnn() -> nn.Module:
    return embens.networks.cnn((4, 6, 8), inputs=3, outputs=5, image=8, activation="gelu")


def _floats(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(shape, generator=generator)


def _tokens(kinds: int, *shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randint(kinds, shape, generator=generator)


def _qkv(prefix: str) -> set[str]:
    return {f"{prefix}.{p}_proj" for p in "qkv"}


ARCHITECTURES = [
    Architecture("mlp", _mlp, _floats(4, 5), {"0"}, {"4"}),
    Architecture("linear on four axes", _mlp, _floats(2, 3, 2, 5), {"0"}, {"4"}),
    Architecture("paper's cnn", _cnn, _floats(4, 3, 8, 8), {"0"}, {"10"}),
    Architecture("residual", Residual, _floats(4, 3, 6, 6), {"stem"}, {"head"}),
    Architecture("grouped", _grouped, _floats(3, 4, 6, 6), {"0"}, {"7"}),
    Architecture("transposed", _transposed, _floats(3, 4, 4, 4), {"0"}, {"4"}),
    Architecture(
        "conv1d",
        lambda: nn.Sequential(nn.Conv1d(3, 5, 3), nn.Tanh(), nn.Conv1d(5, 2, 3)),
        _floats(3, 3, 8),
        {"0"},
        {"2"},
    ),
    Architecture(
        "conv3d",
        lambda: nn.Sequential(nn.Conv3d(2, 5, 2), nn.Tanh(), nn.Conv3d(5, 2, 1)),
        _floats(2, 2, 4, 4, 4),
        {"0"},
        {"2"},
    ),
    Architecture(
        "unbatched conv",
        lambda: nn.Sequential(nn.Conv2d(2, 5, 3), nn.Tanh(), nn.Conv2d(5, 2, 1)),
        _floats(2, 5, 5),
        {"0"},
        {"2"},
    ),
    Architecture(
        "attention by hand", HandAttention, _floats(3, 4, 8), {"query", "key", "value"}, {"head"}
    ),
    Architecture("transformer", Tokens, _tokens(11, 3, 5), {"embedding"}, {"head"}),
    Architecture(
        "encoder layer, time first",
        lambda: nn.TransformerEncoderLayer(8, 2, 12, 0.0, activation="gelu"),
        _floats(5, 3, 8),
        _qkv("self_attn"),
        {"linear2"},
    ),
    Architecture(
        "cross attention",
        CrossAttention,
        _floats(3, 4, 6),
        {"memory", "query", "attention.v_proj"},
        {"head"},
    ),
    Architecture("recurrent", Recurrent, _tokens(11, 3, 5), {"embedding"}, {"head"}),
    Architecture("recurrent levels", Levels, _floats(3, 4, 4), {"input"}, {"head"}),
    Architecture("reused", Reused, _floats(3, 4), {"input"}, {"output"}),
    Architecture("held", Held, _floats(3, 4), {"nest.inner.a"}, {"head"}),
    Architecture("tied", Tied, _tokens(7, 3, 4), {"embedding"}, {"output"}),
]


# Families


def _own_last(reference: nn.Module, members: int, **options: Any) -> embens.EmbeddedEnsemble:
    # Tied weights are separate in both layers or in neither.
    is_tied = any(isinstance(module, Tied) for module in reference.modules())
    own = "*core" if is_tied else "last"
    return embens.batch_ensemble(reference, members, own=own, **options)


def _own_all(reference: nn.Module, members: int, **options: Any) -> embens.EmbeddedEnsemble:
    return embens.embed(reference, members, None, None, own="*", own_weights=_shake, **options)


def _shake(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter.add_(0.1 * torch.randn_like(parameter))


def _independent(reference: nn.Module, members: int, **options: Any) -> embens.EmbeddedEnsemble:
    return embens.independent(reference, members, initialise=_shake, **options)


FAMILIES: dict[str, Callable[..., embens.EmbeddedEnsemble]] = {
    "batch ensemble": embens.batch_ensemble,
    "all sites": partial(embens.embed, sites="all"),
    "pre only": partial(embens.embed, post=None),
    "post only": partial(embens.embed, pre=None, post=laws.Shifted(0.5)),
    "norms per member": partial(embens.embed, norm_affine="member"),
    "fixed masks": partial(embens.mc_dropout, law=laws.Normal(), fresh=False),
    "last-layer dropout": embens.last_layer_dropout,
    "masksembles": embens.masksembles,
    "own last layers": _own_last,
    "own layers everywhere": _own_all,
    "low rank": partial(embens.low_rank, rank=2),
    "lora": partial(embens.low_rank, rank=2, kind="additive", scale=0.5),
    "independent": _independent,
}
"""Every family whose members have fixed weights, as a function of a reference and members."""


# Combinations


def sampled(names: str, first: list, second: list, step: int = 3) -> pytest.MarkDecorator:
    """Parametrize a test with all pairs of two lists; most pairs run in long suites only.

    Short runs have every value of both lists, and all values of ``first`` with ``second[0]``.

    Args:
        names: names of the two arguments.
        first: values of the first argument.
        second: values of the second argument; the first of them is the most common one.
        step: one of ``step`` pairs is in short runs; at most the length of the lists.
    """
    pairs = []
    for i, left in enumerate(first):
        for j, right in enumerate(second):
            is_usual = j == 0 or (i + j) % step == 0
            label = getattr(left, "__name__", str(left))
            marks = () if is_usual else pytest.mark.long
            pairs.append(pytest.param(left, right, id=f"{label}, {right}", marks=marks))
    return pytest.mark.parametrize(names, pairs)
