"""``embens diagnose``: the diagnosis of a saved ensemble.

A file holds tensors and laws but no code, so the reference's architecture is given beside it: one
of embens' own networks as it is written in Python, ``"mlp(inputs=64, width=32, outputs=10)"``
(read, not executed: names and plain values only), or a function of yours that returns the module,
``package.module:function`` or ``file.py:function``.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embens import data, networks, storage
from embens.dataflow import parameter_layers
from embens.finite.diagnose import diagnose
from embens.plan import closest

NETWORKS = {"mlp": networks.mlp, "cnn": networks.cnn}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``embens diagnose``."""
    parser.add_argument("ensemble", type=Path, help="what ensemble.save wrote")
    parser.add_argument(
        "--reference",
        required=True,
        help='the architecture: "mlp(inputs=64, …)", "cnn(…)", module:function, file.py:function',
    )
    parser.add_argument(
        "--data", default="digits", help="digits (default), or an .npz file with x and y"
    )
    parser.add_argument("--gamma", type=float, help="the gradient scale that you mean to use")
    parser.add_argument("--optimizer", help="the optimiser that you mean to use, such as Adam")
    parser.add_argument("--wanted", choices=["independent"], help="what members should be")
    parser.add_argument("--seconds", type=float, default=10.0, help="budget (default 10)")
    parser.add_argument("--json", action="store_true", help="print numbers for programs")
    parser.add_argument("--plot", type=Path, help="a file for a picture")


def run(options: argparse.Namespace) -> int:
    """Run ``embens diagnose``; return its exit code."""
    try:
        reference = read_reference(options.reference)
        ensemble = storage.load(options.ensemble, reference)
        x, target = read_data(options.data, reference)
        report = diagnose(
            ensemble,
            x,
            target,
            gamma=options.gamma,
            optimizer=options.optimizer,
            wanted=options.wanted,
            seconds=options.seconds,
            plot=options.plot,
        )
    except (ValueError, TypeError, RuntimeError, IndexError, OSError) as error:
        options.parser.error(str(error))
        raise  # it does not return
    print(json.dumps(report.to_dict(), indent=1) if options.json else report)
    return 0


def read_reference(text: str) -> nn.Module:
    """Return the module that a ``--reference`` names.

    Example:
        >>> read_reference("mlp(inputs=4, width=8, depth=1, outputs=2)")[2].out_features
        2
    """
    try:
        call = ast.parse(text, mode="eval").body
    except SyntaxError:
        call = None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
        return _build(text, call, call.func.id)
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise ValueError(
            "--reference: expected mlp(…), cnn(…), module:function or file.py:function; got "
            f"{text!r}"
        )
    made = getattr(_import(place), name, None)
    if made is None:
        raise ValueError(f"--reference: {place} has no {name!r}")
    made = made if isinstance(made, nn.Module) else made()
    if not isinstance(made, nn.Module):
        raise ValueError(
            f"--reference: {text} should return a torch.nn.Module; got {type(made).__name__}"
        )
    return made


def _build(text: str, call: ast.Call, name: str) -> nn.Module:
    if name not in NETWORKS:
        raise ValueError(f"--reference: unknown network {name!r}{closest(name, NETWORKS)}")
    try:
        arguments = [ast.literal_eval(a) for a in call.args]
        keywords = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}
    except ValueError:
        raise ValueError(
            f"--reference: arguments must be plain values, such as width=32; got {text!r}"
        ) from None
    return NETWORKS[name](*arguments, **keywords)


def _import(place: str) -> Any:
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise ValueError(f"--reference: {error}") from None
    path = Path(place)
    if not path.is_file():
        raise ValueError(f"--reference: there is no file {place!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_data(name: str, reference: nn.Module) -> tuple[Tensor, Tensor]:
    """Return inputs and targets: of digits, as the reference takes them, or of an .npz file."""
    if name == "digits":
        digits = data.digits().standardise()
        first = next(iter(parameter_layers(reference).values()), None)
        digits = digits.flatten() if isinstance(first, nn.Linear) else digits
        return digits.train.inputs, digits.train.targets
    import numpy

    path = Path(name)
    if not path.is_file():
        raise ValueError(f"--data: expected digits or an .npz file; there is no file {name!r}")
    with numpy.load(path, allow_pickle=False) as arrays:
        if not {"x", "y"} <= set(arrays.files):
            raise ValueError(
                f"--data: expected arrays x and y in {path.name}; got {', '.join(arrays.files)}"
            )
        x, y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
    like = next(reference.parameters()).dtype
    x = x.to(like) if x.is_floating_point() else x
    return x, y.to(like) if y.is_floating_point() else y.long()
