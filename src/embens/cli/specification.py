"""What is written on a command line: networks, laws and data, as text.

Nothing here evaluates code from its arguments: calls are read as a name and literal values, and
only a function that the user names in a file of theirs is run.
"""

import argparse
import ast
import inspect
import runpy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embens import data, laws, networks
from embens.checks import closest
from embens.files import Refused, refusing
from embens.laws import Law
from embens.reading import parameter_layers

NETWORK_HELP = (
    'the architecture: "mlp(inputs=64, …)", "cnn(…)", or file.py:function, which runs that '
    "file's code, so name only files that you trust"
)
NETWORKS: dict[str, Callable[..., nn.Module]] = {"mlp": networks.mlp, "cnn": networks.cnn}


def parse_call(text: str, known: Mapping[str, Callable[..., Any]], what: str) -> Any:
    """Return the result of a call written as text, such as ``"Shifted(0.5)"``."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
        node = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        if not isinstance(node.func, ast.Name):
            raise ValueError
        name = node.func.id
        positional = [ast.literal_eval(a) for a in node.args]
        named = {k.arg or "": ast.literal_eval(k.value) for k in node.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # of any depth
        expected = f"a call with literal values, such as {next(iter(known))}(…)"
        raise ValueError(f"a {what} is written as {expected}; got {text!r}.") from None
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}{closest(name, known)}")
    try:
        return known[name](*positional, **named)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} {text!r}: {error}") from None


def share(text: str) -> float:
    """Return a number between 0 and 1, for :mod:`argparse`."""
    if not 0 < float(text) < 1:
        raise argparse.ArgumentTypeError(f"lies between 0 and 1; got {text}")
    return float(text)


def parse_law(text: str) -> Law | None:
    """Return a law; "none" is no modulation."""
    return None if text.strip().lower() == "none" else parse_call(text, laws.known(), "law")


def parse_reference(text: str) -> nn.Module:
    """Return a network: ``mlp(inputs=64, width=32)`` or ``cnn(…)`` of :mod:`embens.networks`.

    Or what a function of no arguments in a file returns: ``file.py:function``.
    """
    place, colon, name = text.rpartition(":")
    if not colon:
        return parse_call(text, NETWORKS, "network")
    if not Path(place).is_file():
        raise ValueError(f"there is no file {place}; a network of your own is file.py:function")
    make = runpy.run_path(place).get(name)
    if make is None:
        raise ValueError(f"{place} has no {name!r}; expected a function that returns a network.")
    network = make() if not isinstance(make, nn.Module) else make
    if not isinstance(network, nn.Module):
        raise ValueError(f"{text} should return a torch.nn.Module; got {type(network).__name__}.")
    return network


def parse_widths(text: str) -> nn.Module | Callable[[float], nn.Module]:
    """Return a reference; of ``mlp(…)`` and ``cnn(…)``, which have a width, a function of it."""
    if ":" in text:
        return parse_reference(text)

    def build(factor: float) -> nn.Module:
        known = {name: partial(_scaled, make, factor) for name, make in NETWORKS.items()}
        return parse_call(text, known, "network")

    return build


def _scaled(make: Callable[..., nn.Module], factor: float, *args: Any, **options: Any) -> nn.Module:
    given = inspect.signature(make).bind(*args, **options)
    given.apply_defaults()
    width = given.arguments["width"]
    scaled = max(1, round(factor * width)) if isinstance(width, int) else factor * width
    given.arguments["width"] = scaled
    return make(*given.args, **given.kwargs)


def read_data(text: str, reference: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return inputs and targets: "digits", as the reference takes them, or a file.

    A ``.npz`` has arrays ``x`` and, where there are targets, ``y``; a ``.npy`` is ``x`` alone.
    """
    if text == "digits":
        digits = data.digits().standardise()
        first = next(iter(parameter_layers(reference).values()), None)
        return (digits.flatten() if isinstance(first, nn.Linear) else digits).train
    import numpy as np

    path, expected = Path(text), "'digits', a .npz file with x (and y), or a .npy file"
    if path.suffix not in (".npz", ".npy"):
        raise ValueError(f"data is {expected}; got {text!r}.")
    if not path.is_file():
        raise ValueError(f"there is no file {text}")
    with refusing(path), path.open("rb") as file:
        loaded = np.load(file)
        if path.suffix == ".npy":
            return torch.from_numpy(loaded), None
        with loaded:
            arrays = {name: torch.from_numpy(loaded[name]) for name in ("x", "y") if name in loaded}
            if "x" not in arrays:
                got = ", ".join(loaded) or "none"
                raise Refused(f"expected arrays x and y in {path.name}; got {got}.")
    return arrays["x"], arrays.get("y")


def read_training_data(text: str, reference: nn.Module) -> tuple[Tensor, Tensor]:
    """Return inputs and targets in the dtypes that the reference and its loss take."""
    x, y = read_data(text, reference)
    if y is None:
        raise ValueError(f"{text} has no targets; expected arrays x and y in an .npz file.")
    like = next(reference.parameters()).dtype
    x = x.to(like) if x.is_floating_point() else x
    return x, y.to(like) if y.is_floating_point() else y.long()
