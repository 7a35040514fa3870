"""References at random: every member is right whatever the network, or embed says why not.

A reference is drawn step by step: layers, norms, dropout, attention, recurrent layers, reuse,
residual and dense connections, operations in place, state of its own, several inputs, tied weights.
The truth is a network for each member, written by hand: the reference with the same parameters
and with hooks that multiply inputs by u and outputs by v.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from reference import modulations
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils._pytree import tree_leaves

import embens
from embens import laws

REFUSALS = (  # whatever else is raised is a bug
    r"has no hidden site|leaves none",
    r"no reset_parameters\(\)",
    r"reads the weight of .* without calling the layer",
    r"reads the \w+ of a modulated",
    r"belong to no member",
    r"is parametrized, so members cannot have separate copies",
)
WARNINGS = (  # whatever else is warned of is a bug
    r"the data flow of the reference could not be read",
    r"members do not differ in",
)

# Modules of a user's


class Centred(nn.Module):
    """Subtracts a running mean that it assigns anew."""

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))

    def forward(self, x):
        if self.training:
            self.mean = 0.8 * self.mean + 0.2 * x.detach().flatten(0, -2).mean(0)
        return x - self.mean


class Blended(nn.Module):
    """Divides by a running size that it changes in place, and counts calls in a buffer."""

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("size", torch.ones(size))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.size.mul_(0.9).add_(x.detach().abs().flatten(0, -2).mean(0), alpha=0.1)
        return x / self.size


class HandNorm(nn.Module):
    """A BatchNorm by its function."""

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("var", torch.ones(size))

    def forward(self, x):
        rows = x.flatten(0, -2)
        return F.batch_norm(rows, self.mean, self.var, training=self.training).view(x.shape)


class Counting(nn.Module):
    """Scales by the number of its calls."""

    def __init__(self, size: int):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1 + 1 / self.calls)


class Remembering(nn.Module):
    """Adds what it gave the last time."""

    def __init__(self, size: int):
        super().__init__()
        self.last = None

    def forward(self, x):
        if self.last is not None and self.last.shape == x.shape:
            x = x + 0.3 * self.last
        self.last = x.detach()
        return x


class Listing(nn.Module):
    """Keeps a list of means, a dict of sizes and an object with a number in it."""

    def __init__(self, size: int):
        super().__init__()
        self.means, self.sizes, self.meter = [], {}, Meter()

    def forward(self, x):
        self.means.append(x.detach().mean())
        self.sizes[len(self.means)] = x.dim()
        self.meter.observe(x)
        return x + torch.stack(self.means).mean() / (self.meter.seen + len(self.sizes))


class Meter:
    def __init__(self):
        self.seen = 0

    def observe(self, x):
        self.seen += 1


class Showing(nn.Module):
    """Leaves its last result where others can look at it."""

    def __init__(self, size: int):
        super().__init__()
        self.shown = None

    def forward(self, x):
        self.shown = x * 2
        return x


class Gated(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.both = nn.Linear(size, 2 * size)

    def forward(self, x):
        a, b = self.both(x).chunk(2, -1)
        return a * torch.sigmoid(b)


class Residual(nn.Module):
    """Two layers with a connection around them, perhaps with state inside."""

    def __init__(self, size: int, inside: nn.Module):
        super().__init__()
        self.a, self.inside, self.b = nn.Linear(size, size), inside, nn.Linear(size, size)

    def forward(self, x):
        y = self.b(self.inside(torch.tanh(self.a(x))))
        y += x
        return y


class SelfAttention(nn.Module):
    def __init__(self, size: int, weights: bool):
        super().__init__()
        self.attention = nn.MultiheadAttention(size, 2, batch_first=True)
        self.weights = weights

    def forward(self, x):
        return x + self.attention(x, x, x, need_weights=self.weights)[0]


class Recurrent(nn.Module):
    def __init__(self, cell: nn.Module):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        return self.cell(x)[0]


# Drawing a reference


@dataclass
class Drawing:
    """A reference under construction: its layout and sizes, steps, and inputs."""

    draw: Callable[[Any], Any]
    layout: str = "flat"
    sizes: tuple[int, ...] = ()  # without the batch
    steps: list[tuple[str, Any]] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    features: list[str] = field(default_factory=list)
    saved: list[tuple[int, ...]] = field(default_factory=list)

    def pick(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def module(self, module: nn.Module) -> None:
        self.steps.append(("module", len(self.modules)))
        self.modules.append(module)


ACTIVATIONS = (nn.Tanh, nn.SiLU, nn.GELU, lambda: nn.ELU(inplace=True), nn.Softplus)
FUNCTIONS = {
    "tanh": torch.tanh,
    "silu": F.silu,
    "sine": lambda x: x + torch.sin(x),
    "scaled in place": lambda x: (x * 1.0).mul_(0.7).add_(0.1),
    "square root": lambda x: torch.sqrt(1 + x * x),
    "softmax": lambda x: x + F.softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
}
IN_ATTRIBUTES = ("Counting", "Remembering", "Listing")
STATE = (Centred, Blended, HandNorm, Counting, Remembering, Listing, Showing)


def linear(d: Drawing) -> None:
    size = d.pick(4, 6, 8)
    layer = nn.Linear(d.sizes[-1], size, bias=d.pick(True, False))
    wrap = d.pick(None, None, None, None, "spectral_norm", "weight_norm")
    if wrap:
        layer = getattr(parametrizations, wrap)(layer)
        d.features.append(wrap)
    d.module(layer)
    d.sizes = (*d.sizes[:-1], size)


def activation(d: Drawing) -> None:
    if d.pick(True, False):
        d.module(d.pick(*ACTIVATIONS)())
    else:
        d.steps.append(("function", d.pick(*FUNCTIONS)))


def dropout(d: Drawing) -> None:
    p = d.pick(0.0, 0.0, 0.3)
    d.features += ["dropout"] if p else []
    kind = nn.Dropout2d if d.layout == "image" and d.pick(True, False) else nn.Dropout
    if d.pick(True, False):
        d.module(kind(p))
    else:
        d.steps.append(("dropout", p))


def state(d: Drawing) -> None:
    kind = d.pick(*STATE)
    d.features.append(kind.__name__)
    d.module(kind(d.sizes[-1]))


def residual(d: Drawing) -> None:
    inside = d.pick(nn.Identity, nn.Identity, *STATE)
    d.features.append(f"residual {inside.__name__}")
    d.module(Residual(d.sizes[-1], nn.Identity() if inside is nn.Identity else inside(d.sizes[-1])))


def gated(d: Drawing) -> None:
    d.module(Gated(d.sizes[-1]))


def save(d: Drawing) -> None:
    d.saved.append(d.sizes)
    d.steps.append(("save", None))


def meet(d: Drawing) -> None:
    fitting = [i for i, sizes in enumerate(d.saved) if sizes == d.sizes]
    if fitting:
        kind = d.pick("add", "add in place", "cat" if d.layout != "image" else "cat channels")
        d.steps.append((kind, d.pick(*fitting)))
        if kind == "cat":
            d.sizes = (*d.sizes[:-1], 2 * d.sizes[-1])
        elif kind == "cat channels":
            d.sizes = (2 * d.sizes[0], *d.sizes[1:])


def reuse(d: Drawing) -> None:
    fitting = [
        i
        for i, m in enumerate(d.modules)
        if (isinstance(m, nn.Linear) and m.in_features == m.out_features == d.sizes[-1])
        or (isinstance(m, (nn.LayerNorm, nn.Tanh, nn.SiLU)) and d.steps[-1] != ("module", i))
        if not isinstance(m, nn.LayerNorm) or m.normalized_shape == d.sizes[-1:]
    ]
    fitting = [i for i in fitting if not hasattr(d.modules[i], "parametrizations")]
    if fitting:
        d.features.append("reuse")
        d.steps.append(("module", d.pick(*fitting)))


def norm(d: Drawing) -> None:
    channels = d.sizes[0]
    affine = d.pick(True, False)
    if d.layout == "flat":
        d.module(d.pick(nn.BatchNorm1d(channels, affine=affine), nn.LayerNorm(channels)))
    elif d.layout == "sequence":
        d.module(d.pick(nn.LayerNorm, nn.RMSNorm)(d.sizes[-1]))
    else:
        axes = len(d.sizes) - 1
        batch = nn.BatchNorm2d if axes == 2 else nn.BatchNorm1d
        instance = nn.InstanceNorm2d if axes == 2 else nn.InstanceNorm1d
        tracking = d.pick(True, False)
        options = [batch(channels, affine=affine, track_running_stats=tracking)]
        options += [nn.GroupNorm(d.pick(1, 2), channels)]
        if min(d.sizes[1:]) > 1:
            options += [instance(channels, affine=affine, track_running_stats=tracking)]
        d.module(d.pick(*options))


def convolution(d: Drawing) -> None:
    channels, side = d.sizes[0], d.sizes[1]
    gives, axes = d.pick(4, 6), len(d.sizes) - 1
    groups = d.pick(1, 1, 2)
    transposed = d.pick(False, False, True)
    name = ("ConvTranspose" if transposed else "Conv") + f"{axes}d"
    options: dict[str, Any] = {"groups": groups, "bias": d.pick(True, False)}
    if transposed:
        layer = getattr(nn, name)(channels, gives, 2, stride=d.pick(1, 2), **options)
        stride = layer.stride[0]
        side = (side - 1) * stride + 2
        if side > 12:
            return
    else:
        mode = d.pick("zeros", "circular", "reflect") if side > 1 else "zeros"
        stride = d.pick(1, 1, 2)
        layer = getattr(nn, name)(
            channels, gives, 3, padding=1, stride=stride, padding_mode=mode, **options
        )
        side = (side - 1) // stride + 1
    d.module(layer)
    d.sizes = (gives, *(side,) * axes)


def pooling(d: Drawing) -> None:
    if d.sizes[1] > 3:
        kind = d.pick("MaxPool", "AvgPool", "function")
        if kind == "function":
            d.steps.append(("pool", len(d.sizes) - 1))
        else:
            d.module(getattr(nn, f"{kind}{len(d.sizes) - 1}d")(2))
        d.sizes = (d.sizes[0], *(s // 2 for s in d.sizes[1:]))


def attention(d: Drawing) -> None:
    d.features.append("attention")
    d.module(SelfAttention(d.sizes[-1], d.pick(True, False)))


def encoder(d: Drawing) -> None:
    p = d.pick(0.0, 0.0, 0.2)
    d.features += ["attention"] + (["dropout"] if p else [])
    first, kind = d.pick(True, False), d.pick("gelu", F.silu)
    layer = nn.TransformerEncoderLayer(
        d.sizes[-1], 2, 6, p, activation=kind, batch_first=True, norm_first=first
    )
    d.module(layer)


def recurrent(d: Drawing) -> None:
    d.features.append("recurrent")
    size = d.pick(4, 6)
    d.module(Recurrent(d.pick(nn.GRU, nn.LSTM)(d.sizes[-1], size, batch_first=True)))
    d.sizes = (d.sizes[0], size)


def flatten(d: Drawing) -> None:
    total = torch.Size(d.sizes).numel()
    ways = {
        "image": ("flatten", "module", "view", "mean"),
        "signal": ("flatten", "module", "mean"),
        "sequence": ("mean", "last", "flatten"),
    }
    way = d.pick(*ways[d.layout]) if d.layout in ways else ""
    if way == "module":
        d.module(nn.Flatten())
    elif way:
        d.steps.append((f"{way} {d.layout}", None))
    if way == "mean":
        total = d.sizes[0] if d.layout != "sequence" else d.sizes[-1]
    elif way == "last":
        total = d.sizes[-1]
    d.layout, d.sizes, d.saved = "flat", (total,), []
    d.steps.append(("forget", None))


LAYOUTS: dict[str, tuple[Callable[[Drawing], None], ...]] = {
    "flat": (linear, linear, activation, norm, dropout, state, residual, gated, save, meet, reuse),
    "image": (convolution, convolution, activation, norm, dropout, pooling, save, meet),
    "signal": (convolution, convolution, activation, norm, dropout, pooling, save, meet),
    "sequence": (
        *(linear, activation, norm, dropout, state, residual),
        *(attention, encoder, recurrent, save, meet, reuse),
    ),
}


class Drawn(nn.Module):
    """A reference that goes through its steps."""

    def __init__(self, d: Drawing, kind: str, second: int):
        super().__init__()
        self.layers = nn.ModuleList(d.modules)
        self.steps, self.kind = list(d.steps), kind
        self.side = nn.Linear(second, d.sizes[-1]) if second else None
        self.head = nn.Linear(d.sizes[-1], 3)
        first = d.modules[0] if d.modules else None
        if isinstance(first, nn.Embedding) and d.sizes[-1] == first.embedding_dim:
            self.head = nn.Linear(d.sizes[-1], first.num_embeddings, bias=False)
            self.head.weight = first.weight  # tied

    def forward(self, x, z=None):
        saved: list[Tensor] = []
        for kind, what in self.steps:
            if kind == "module":
                x = self.layers[what](x)
            elif kind == "function":
                x = FUNCTIONS[what](x)
            elif kind == "dropout":
                x = F.dropout(x, what, self.training)
            elif kind == "save":
                saved.append(x)
            elif kind == "add":
                x = x + saved[what]
            elif kind == "add in place":
                x = 1.0 * x
                x += saved[what]
            elif kind == "cat":
                x = torch.cat([x, saved[what]], -1)
            elif kind == "cat channels":
                x = torch.cat([x, saved[what]], 1)
            elif kind == "pool":
                x = F.max_pool2d(x, 2) if what == 2 else F.max_pool1d(x, 2)
            elif kind.startswith("flatten"):
                x = torch.flatten(x, 1)
            elif kind.startswith("view"):
                x = x.view(x.size(0), -1)
            elif kind == "mean image":
                x = x.mean((2, 3))
            elif kind == "mean signal":
                x = x.mean(2)
            elif kind == "mean sequence":
                x = x.mean(1)
            elif kind == "last sequence":
                x = x[:, -1]
        if self.side is not None:
            x = torch.tanh(x) + self.side(z)
        logits = self.head(x)
        if self.kind == "tuple":
            return logits, x
        if self.kind == "dict":
            return {"logits": logits, "features": x}
        return logits


@dataclass
class Case:
    """A reference with inputs of a batch, and how it is embedded."""

    reference: nn.Module
    inputs: Callable[[int, int], tuple[Tensor, ...]]
    features: list[str]
    family: str
    example: bool
    members: int
    chunk: int
    seed: int
    kind: str

    def __str__(self) -> str:
        return f"{self.family}, {self.members}, {self.chunk}, {self.features}, {self.reference}"


FAMILIES: dict[str, Callable[..., embens.EmbeddedEnsemble]] = {
    "batch_ensemble": embens.batch_ensemble,
    "embed": embens.embed,
    "pre": lambda r, m, **o: embens.embed(r, m, pre=laws.Signs(0.2), post=None, **o),
    "post": lambda r, m, **o: embens.embed(r, m, pre=None, post=laws.Shifted(0.5), **o),
    "all": lambda r, m, **o: embens.embed(r, m, sites="all", **o),
    "mc_dropout": lambda r, m, **o: embens.mc_dropout(r, m, fresh=False, **o),
    "last_layer_dropout": embens.last_layer_dropout,
    "affine": lambda r, m, **o: embens.embed(r, m, norm_affine="member", **o),
    "independent": lambda r, m, example_input=None, **o: embens.independent(r, m, **o),
}


def draw_case(draw: Callable[[Any], Any]) -> Case:
    """Draw a reference, its inputs, and a family."""
    seed = draw(st.integers(0, 2**16))
    torch.manual_seed(seed)
    d = Drawing(draw)
    kind = d.pick("flat", "flat", "image", "signal", "sequence", "tokens")
    d.layout = "sequence" if kind == "tokens" else kind
    start = {"flat": (4,), "image": (2, 6, 6), "signal": (2, 6), "sequence": (3, 4)}
    first = d.sizes = start[d.layout]
    if kind == "tokens":
        d.module(nn.Embedding(7, 4))
    for _ in range(draw(st.integers(1, 5))):
        d.pick(*LAYOUTS[d.layout])(d)
    if d.layout != "flat":
        flatten(d)
        for _ in range(draw(st.integers(0, 2))):
            d.pick(*LAYOUTS[d.layout])(d)
    second = d.pick(0, 0, 0, 5)
    reference = Drawn(d, d.pick("tensor", "tensor", "tuple", "dict"), second)
    dtype = d.pick(torch.float64, torch.float64, torch.float32, torch.bfloat16)
    reference.to(dtype)

    def inputs(rows: int, again: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed + again)
        if kind == "tokens":
            x = torch.randint(7, (rows, 3), generator=generator)
        else:
            x = torch.randn((rows, *first), generator=generator, dtype=torch.float64).to(dtype)
        z = torch.randn((rows, 5), generator=generator, dtype=torch.float64).to(dtype)
        return (x, z) if second else (x,)

    family, members = d.pick(*FAMILIES), draw(st.integers(1, 5))
    chunk, example = draw(st.integers(1, 5)), d.pick(True, False)
    return Case(
        *(reference, inputs, d.features, family, example, members, chunk, seed), kind=str(dtype)
    )


# The truth


class Scale(nn.Module):
    """A parametrization that multiplies a weight by a function of modulations."""

    def __init__(self, factor: Callable[[], Tensor]):
        super().__init__()
        self.factor = factor

    def forward(self, weight):
        return weight * self.factor()


class Truth:
    """Members by hand: copies of one reference that share its parameters, with hooks.

    Those of separate networks, or with tensors of their own, are taken out of the ensemble.
    """

    def __init__(self, case: Case, ensemble: embens.EmbeddedEnsemble):
        self.values: dict[tuple[str, str], nn.Parameter] = {}
        recurrent = {n for n, m in case.reference.named_modules() if isinstance(m, nn.RNNBase)}
        has_gates = any(s.layer in recurrent and s.kind == "pre" for s in ensemble.spec.sites)
        self.by_hand = case.family not in ("independent", "affine") and not has_gates
        if not self.by_hand:
            self.networks = [ensemble.member(a) for a in range(ensemble.members)]
            return
        root = copy.deepcopy(case.reference)
        shared = {id(p): p for p in root.parameters()}
        found = modulations(ensemble)
        for key, m in found.items():
            trainable = isinstance(m.values, nn.Parameter)
            self.values[key] = nn.Parameter(m.values.detach().clone(), trainable)
        self.networks = [copy.deepcopy(root, dict(shared)) for _ in range(ensemble.members)]
        for a, network in enumerate(self.networks):
            for (name, kind), m in found.items():
                if name.rpartition(".")[2] not in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    self._hook(network.get_submodule(name), (name, kind), m.repeat, a)
            for name in {n.rpartition(".")[0] for n, _ in found if n.endswith("_proj")}:
                self._parametrize(network.get_submodule(name), name, a)

    def _hook(self, layer: Any, key: tuple[str, str], repeat: int, a: int) -> None:
        def scaled(x: Tensor) -> Tensor:
            numbers = self.values[key][a].repeat_interleave(repeat).to(x.dtype)
            axes = len(layer.kernel_size) if isinstance(layer, nn.modules.conv._ConvNd) else 0
            return x * numbers.reshape(-1, *(1,) * axes)

        if key[1] == "post":
            layer.register_forward_pre_hook(lambda m, args: (scaled(args[0]),))
        else:
            layer.register_forward_hook(
                lambda m, args, out: (scaled(out[0]),) if isinstance(out, tuple) else scaled(out)
            )

    def _parametrize(self, attention: Any, name: str, a: int) -> None:
        one = attention.out_proj.weight.new_ones(attention.embed_dim)

        def factor(projections: tuple[str, ...], bias: bool) -> Tensor:
            parts = []
            for p in projections:
                v = self.values.get((f"{name}.{p}", "pre"))
                u = self.values.get((f"{name}.{p}", "post"))
                v, u = (one if t is None else t[a] for t in (v, u))
                parts.append(v if bias else v[:, None] * u)
            return torch.cat(parts)

        into, out = ("q_proj", "k_proj", "v_proj"), ("out_proj",)
        for module, tensor, projections in (
            *((attention, f"in_proj_{t}", into) for t in ("weight", "bias")),
            *((attention.out_proj, t, out) for t in ("weight", "bias")),
        ):
            scale = Scale(functools.partial(factor, projections, tensor.endswith("bias")))
            parametrize.register_parametrization(module, tensor, scale, unsafe=True)

    def parameters(self) -> list[nn.Parameter]:
        found = {id(p): p for network in self.networks for p in network.parameters()}
        found |= {id(p): p for p in self.values.values() if p.requires_grad}
        return list(found.values())


# The property


def first(outputs: Any) -> Tensor:
    return tree_leaves(outputs)[0]


def check_equal(case: Case, outputs: Any, expected: Any, what: str) -> None:
    tolerance = {"torch.float64": 1e-7, "torch.float32": 2e-3, "torch.bfloat16": 0.2}[case.kind]
    left, right = tree_leaves(outputs), tree_leaves(expected)
    assert len(left) == len(right), what
    for a, b in zip(left, right, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), what
        size = float(b.detach().abs().amax()) + 1e-3
        difference = float((a.detach() - b.detach()).abs().amax())
        assert difference <= tolerance * size, f"{what}: off by {difference} of {size} in {case}"


def cloned(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Return inputs that code may change in place."""
    return [t.clone() for t in tensors]


@contextmanager
def only_known_warnings() -> Iterator[None]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
    unknown = [str(w.message) for w in found if not re.search("|".join(WARNINGS), str(w.message))]
    assert not unknown, unknown[0]


def check_passes(case: Case, ensemble: embens.EmbeddedEnsemble, truth: Truth) -> None:
    """Every pass, in any chunks and batches, gives what the members give, and their buffers."""
    members, rows = ensemble.members, 2 * ensemble.members
    x, own = case.inputs(rows, 0), [case.inputs(4, a + 1) for a in range(members)]
    together = tuple(torch.stack(column) for column in zip(*own, strict=True))
    for training in (False, True):
        if training and "dropout" in case.features:
            copy.deepcopy(ensemble).train()(*cloned(x), chunk=case.chunk)
            continue
        for what, arguments, options in (
            ("same", x, {"chunk": case.chunk}),
            ("each", x, {"chunk": 1}),
            ("own", together, {"batch": "own", "chunk": case.chunk}),
            ("split", x, {"batch": "split"}),
        ):
            running = copy.deepcopy(ensemble).train(training)
            networks = [n.train(training) for n in copy.deepcopy(truth.networks)]
            if what == "own":
                parts = own
            elif what == "split":
                parts = [tuple(t[a::members] for t in x) for a in range(members)]
            else:
                parts = [x] * members
            for again in range(2):
                outputs = running(*cloned(arguments), **options)
                expected = [n(*cloned(part)) for n, part in zip(networks, parts, strict=True)]
                where = f"{what}, {'training' if training else 'evaluation'}, pass {again}"
                for a in range(members):
                    row = [
                        leaf[a] if what != "split" else leaf[a::members]
                        for leaf in tree_leaves(outputs)
                    ]
                    check_equal(case, row, tree_leaves(expected[a]), f"{where}, member {a}")
            if what in ("same", "each"):
                for a in range(members):
                    check_buffers(case, running.member(a), networks[a], f"{where}, member {a}")


def check_buffers(case: Case, member: nn.Module, network: nn.Module, where: str) -> None:
    expected = dict(network.named_buffers())
    for name, buffer in member.named_buffers():
        name = name.replace(".layer.", ".")
        if name in expected:
            check_equal(case, buffer.double(), expected[name].double(), f"{where}, buffer {name}")


def check_training(case: Case, ensemble: embens.EmbeddedEnsemble, truth: Truth) -> None:
    """A few steps on the objective are those of a loop over members that sums their gradients."""
    try:
        first(copy.deepcopy(case.reference).train()(*case.inputs(6, 10))).sum().backward()
    except RuntimeError:
        return  # the reference itself can't be trained: it overwrites what its gradient needs
    ensemble = copy.deepcopy(ensemble).train()
    optimizer = torch.optim.SGD(ensemble.parameters(), 0.02, momentum=0.5)
    by_hand = torch.optim.SGD(truth.parameters(), 0.02, momentum=0.5)
    for step in range(2):
        x = case.inputs(6, 10 + step)
        target = torch.arange(6) % 3
        optimizer.zero_grad()
        if step and ensemble.reference.kind == "tensor":
            loss = ensemble.backward(*cloned(x), target, chunk=case.chunk)
        else:
            loss = ensemble.objective(first(ensemble(*cloned(x), chunk=case.chunk)), target)
            loss.backward()
        optimizer.step()
        by_hand.zero_grad()
        losses = [F.cross_entropy(first(n.train()(*cloned(x))), target) for n in truth.networks]
        torch.stack(losses).sum().backward()
        by_hand.step()
        check_equal(case, loss, torch.stack(losses).sum(), f"loss of step {step}")
    x = case.inputs(5, 20)
    outputs = ensemble.eval()(*cloned(x))
    for a, network in enumerate(truth.networks):
        row = [leaf[a] for leaf in tree_leaves(outputs)]
        check_equal(case, row, tree_leaves(network.eval()(*cloned(x))), f"trained member {a}")


def check_copies(case: Case, ensemble: embens.EmbeddedEnsemble, folder: Any) -> None:
    """After passes, copies of every kind give the same."""
    ensemble.train()(*case.inputs(4, 30))
    ensemble.eval()
    copies = {"deepcopy": copy.deepcopy(ensemble)}
    try:
        pickle.dumps(case.reference)
    except RuntimeError:  # torch does not pickle parametrizations
        pass
    else:
        copies["pickle"] = pickle.loads(pickle.dumps(ensemble))
        stored = io.BytesIO()
        torch.save(ensemble, stored)
        stored.seek(0)
        copies["torch.save"] = torch.load(stored, weights_only=False)
    has_attributes = any(name in " ".join(case.features) for name in IN_ATTRIBUTES)
    if not has_attributes:  # a file holds tensors only
        path = folder / "ensemble.safetensors"
        ensemble.save(path)
        copies["save"] = embens.load(path, case.reference).eval()
    x = case.inputs(4, 31)
    members = [ensemble.member(a) for a in range(ensemble.members)]
    expected = ensemble(*cloned(x))
    for what, copied in copies.items():
        check_equal(case, copied(*cloned(x)), expected, what)
    for a, member in enumerate(members):
        row = [leaf[a] for leaf in tree_leaves(expected)]
        check_equal(case, tree_leaves(member(*cloned(x))), row, f"member {a}")


def check_reference(draw: Callable[[Any], Any], folder: Any) -> None:
    case = draw_case(draw)
    before = copy.deepcopy(case.reference.state_dict())
    with only_known_warnings():
        options = {"example_input": case.inputs(4, 40)} if case.example else {}
        generator = torch.Generator().manual_seed(case.seed)
        try:
            ensemble = FAMILIES[case.family](
                case.reference, case.members, generator=generator, **options
            )
        except (ValueError, TypeError, RuntimeError) as error:
            if re.search("|".join(REFUSALS), str(error)):
                return
            raise AssertionError(f"refused without a reason of ours: {case}") from error
        truth = Truth(case, ensemble)
        check_passes(case, ensemble, truth)
        if truth.by_hand and "dropout" not in case.features:
            check_training(case, ensemble, truth)
        check_copies(case, ensemble, folder)
    for name, tensor in case.reference.state_dict().items():
        assert torch.equal(tensor, before[name]), f"embed changed {name!r} of the reference"


QUIET = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "phases": (Phase.explicit, Phase.generate),  # to make a case smaller takes minutes
}


@settings(max_examples=20, derandomize=True, **QUIET)
@given(data=st.data())
def test_members_of_a_random_reference_are_right_or_refused(data, tmp_path_factory):
    check_reference(data.draw, tmp_path_factory.mktemp("drawn"))


@pytest.mark.long
@settings(max_examples=1000, derandomize=True, **QUIET)
@given(data=st.data())
def test_members_of_a_thousand_random_references_are_right_or_refused(data, tmp_path_factory):
    check_reference(data.draw, tmp_path_factory.mktemp("drawn"))
