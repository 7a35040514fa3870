"""Random reference networks: the source text of a module, composed of small patterns.

The files in ``tests/patterns`` list the patterns. A pattern changes ``h``, a batch of shape
``(batch, 6)`` in double precision, into another batch of that shape; ``x`` is the input of the
network. ``$`` in a name becomes a number, so that a pattern may occur twice. Activations are
smooth, so that every modulation shows in the output. Each pattern looks like this::

    # name [flags]
    define:
        statements before the class
    init:
        statements of __init__
    run:
        statements of forward

A network is determined by its seed. ``print(make_network(seed).source)`` shows its code.
"""

import linecache
import random
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HEADER = """
import copy
import random
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
"""


@dataclass(frozen=True)
class Pattern:
    """One piece of code.

    Attributes:
        name: what the code does.
        run: statements of ``forward``.
        init: statements of ``__init__``.
        define: statements before the class.
        flags: "input" if it changes ``x``, so that it comes first and ``x`` is floating; "random"
            if it draws numbers in training mode; "rough" if finite differences do not show its
            gradients; "single" if it computes in single precision.
    """

    name: str
    run: str
    init: str = ""
    define: str = ""
    flags: frozenset[str] = frozenset()


def read_patterns(path: Path) -> list[Pattern]:
    """Return the patterns of a file."""
    patterns = []
    for block in path.read_text().split("\n\n# "):
        title, _, text = block.strip().removeprefix("# ").partition("\n")
        name, _, flags = title.removesuffix("]").partition(" [")
        sections: dict[str, list[str]] = {}
        lines: list[str] = []
        for line in text.splitlines():
            if line in ("define:", "init:", "run:"):
                lines = sections.setdefault(line[:-1], [])
            else:
                lines.append(line)
        code = {key: textwrap.dedent("\n".join(lines)).strip() for key, lines in sections.items()}
        patterns.append(Pattern(name, flags=frozenset(flags.split(", ")) - {""}, **code))
    return patterns


KINDS = {
    path.stem: read_patterns(path)
    for path in sorted(Path(__file__).with_name("patterns").iterdir())
}
PLAIN = KINDS["plain"]


def floats(*shape: int) -> Callable[[int], Tensor]:
    """Return a function from a number of rows to a random batch."""
    return lambda rows: torch.randn(rows, *shape, dtype=torch.float64)


def tokens(rows: int) -> Tensor:
    """Return a random batch of indices."""
    return torch.randint(7, (rows, 4))


@dataclass(frozen=True)
class Entry:
    """How a network takes its inputs.

    Attributes:
        name: what it takes.
        arguments: arguments of ``forward`` after ``self``.
        start: statements that find ``x``, if it is no argument.
        run: statements that compute the first ``h``.
        init: statements of ``__init__``.
        positional: makers of the positional arguments.
        named: makers of the keyword arguments.
    """

    name: str
    arguments: str
    run: str
    init: str
    positional: tuple[Callable[[int], Any], ...]
    named: tuple[tuple[str, Callable[[int], Any]], ...] = ()
    start: str = ""


STEM = "self.stem = nn.Linear(6, 6)"
ENTRIES = [
    Entry("features", "x", "h = x", "", (floats(6),)),
    Entry("features and a layer", "x", "h = torch.tanh(self.stem(x))", STEM, (floats(6),)),
    Entry("tokens", "x", "h = self.stem(x).mean(1)", "self.stem = nn.Embedding(7, 6)", (tokens,)),
    Entry("sequence", "x", "h = torch.tanh(self.stem(x)).mean(1)", STEM, (floats(3, 6),)),
    Entry(
        "image",
        "x",
        "h = self.mix(torch.tanh(self.stem(x)).flatten(1))",
        "self.stem = nn.Conv2d(2, 3, 3, padding=1)\nself.mix = nn.Linear(27, 6)",
        (floats(2, 3, 3),),
    ),
    Entry(
        "two inputs",
        "x, z",
        "h = torch.tanh(self.stem(x) + self.side(z))",
        STEM + "\nself.side = nn.Linear(4, 6)",
        (floats(6), floats(4)),
    ),
    Entry(
        "keywords",
        "x, scale=1.0, *, shift=None",
        "h = torch.tanh(scale * self.stem(x))\nif shift is not None:\n    h = h + shift",
        STEM,
        (floats(6),),
        (("scale", lambda rows: 0.5), ("shift", floats(6))),
    ),
    Entry(
        "default arguments",
        "x, scale=2.0, shift=None",
        "h = torch.tanh(scale * self.stem(x))\nif shift is not None:\n    h = h + shift",
        STEM,
        (floats(6),),
    ),
    Entry(
        "any arguments",
        "*args, **kwargs",
        'h = torch.tanh(kwargs["scale"] * self.stem(x))',
        STEM,
        (floats(6),),
        (("scale", lambda rows: 2.0),),
        "x = args[0]",
    ),
    Entry(
        "dictionary",
        "batch",
        "h = torch.tanh(self.stem(x))",
        STEM,
        (lambda rows: {"x": torch.randn(rows, 6, dtype=torch.float64)},),
        (),
        'x = batch["x"]',
    ),
]


@dataclass(frozen=True)
class Exit:
    """How a network returns its outputs; ``y`` has the shape ``(batch, 3)``."""

    name: str
    run: str
    define: str = ""


RESULT = """
@dataclass
class Result:
    logits: torch.Tensor
    hidden: torch.Tensor
"""
EXITS = [
    Exit("tensor", "return y"),
    Exit("tensor of features", "return torch.cat([y, h], dim=1)"),
    Exit("vector", "return y.sum(1)"),
    Exit("number", "return y.mean()"),
    Exit("tuple", "return y, h.mean(1)"),
    Exit("list", "return [y, torch.tanh(h)]"),
    Exit("dictionary", 'return {"logits": y, "hidden": {"h": h, "none": None}}'),
    Exit("number in a tuple", "return y, h.square().mean()"),
    Exit("plain values", 'return {"logits": y, "name": "network", "size": 3}'),
    Exit("indices", "return y, y.argmax(1)"),
    Exit("input", "return y, x"),
    Exit("same tensor twice", "return y, y"),
    Exit("rows of a parameter", "return y, self.head.weight"),
    Exit(
        "named tuple",
        "return Pair(y, h)",
        'Pair = namedtuple("Pair", "logits hidden")',
    ),
    Exit("dataclass", "return Result(y, h)", RESULT),
    Exit(
        "registered dataclass",
        "return Result(y, h)",
        RESULT + "\n\ntorch.utils._pytree.register_dataclass(Result)",
    ),
]


@dataclass(frozen=True)
class Network:
    """A random reference network.

    Attributes:
        seed: determines everything.
        source: the code of its class.
        entry: how it takes its inputs.
        patterns: what its code consists of.
        is_called_first: whether the reference is called once before it is embedded.
    """

    seed: int
    source: str
    entry: Entry
    patterns: tuple[Pattern, ...]
    is_called_first: bool

    def build(self) -> nn.Module:
        """Return the network with random weights in double precision."""
        file_name = f"<network {self.seed}>"
        lines = self.source.splitlines(keepends=True)
        linecache.cache[file_name] = (len(self.source), None, lines, file_name)
        namespace: dict[str, Any] = {"__name__": "generated_network"}
        exec(compile(self.source, file_name, "exec"), namespace)
        torch.manual_seed(self.seed)
        network = namespace["Network"]().double()
        if self.is_called_first:
            args, kwargs = self.inputs(7)
            network.eval()(*args, **kwargs)
        return network.train()

    def inputs(self, rows: int) -> tuple[tuple, dict[str, Any]]:
        """Return random positional and keyword arguments."""
        args = tuple(make(rows) for make in self.entry.positional)
        return args, {name: make(rows) for name, make in self.entry.named}

    def example(self) -> tuple | None:
        """Return an example input for ``embed``, for one in three networks."""
        if self.seed % 3 or self.entry.named:
            return None
        return self.inputs(4)[0]

    @property
    def is_random(self) -> bool:
        """Whether the network draws random numbers in training mode."""
        return any("random" in pattern.flags for pattern in self.patterns)

    @property
    def is_smooth(self) -> bool:
        """Whether finite differences show its gradients."""
        return not any("rough" in pattern.flags for pattern in self.patterns)

    @property
    def tolerance(self) -> float:
        """Largest difference that rounding may explain."""
        is_single = any("single" in pattern.flags for pattern in self.patterns)
        return 1e-3 if is_single else 1e-8


def make_network(seed: int) -> Network:
    """Return the network of a seed."""
    draw = random.Random(seed)
    entry = draw.choice(ENTRIES)
    way_out = draw.choice(EXITS) if draw.random() < 0.5 else EXITS[0]
    has_floats = entry.name != "tokens"
    patterns = [draw.choice(PLAIN[:3])]
    kinds = list(KINDS.values())
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        pattern = draw.choice(draw.choice(kinds))
        if has_floats or "input" not in pattern.flags:
            patterns.append(pattern)
    draw.shuffle(patterns)
    source = write_source(entry, way_out, patterns)
    is_called_first = "Lazy" in source and draw.random() < 0.8
    return Network(seed, source, entry, tuple(patterns), is_called_first)


def with_pattern(pattern: Pattern) -> Network:
    """Return a network with one pattern between plain layers."""
    entry = ENTRIES[0]
    source = write_source(entry, EXITS[0], [PLAIN[0], pattern, PLAIN[1]])
    return Network(0, source, entry, (pattern,), "Lazy" in source)


def write_source(entry: Entry, way_out: Exit, patterns: list[Pattern]) -> str:
    """Return the code of a network."""
    definitions = [HEADER]
    inits, starts, runs = [entry.init], [entry.start], [entry.run]
    for number, pattern in enumerate(patterns):
        definition, init, run = (
            text.replace("$", str(number)) for text in (pattern.define, pattern.init, pattern.run)
        )
        if definition not in definitions:
            definitions.append(definition)
        inits.append(init)
        place = starts if "input" in pattern.flags else runs
        place.append(f"# {pattern.name}\n{run}")
    definitions.append(way_out.define)
    head = "self.head = nn.Linear(6, 3)"
    if len(patterns) % 3 == 0:
        inits.insert(0, head)  # the order of registration is not the order of calls
    else:
        inits.append(head)
    runs = [text for text in starts if text] + runs + ["y = self.head(h)", way_out.run]
    parts = [text.strip() for text in definitions if text]
    parts.append(
        "class Network(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        + textwrap.indent("\n".join(text for text in inits if text), " " * 8)
        + f"\n\n    def forward(self, {entry.arguments}):\n"
        + textwrap.indent("\n".join(runs), " " * 8)
    )
    return "\n\n\n".join(parts) + "\n"
