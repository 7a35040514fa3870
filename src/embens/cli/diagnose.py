"""``embens diagnose``: the diagnosis of a saved ensemble.

A file holds tensors and laws but no code, so the reference's architecture is given beside it: one
of embens' own networks as it is written in Python, ``"mlp(inputs=64, width=32, outputs=10)"``
(read, not executed: names and plain values only), or a function of yours that returns the module,
``package.module:function`` or ``file.py:function``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from torch import Tensor, nn

from embens.cli.specification import parse_reference, read_data
from embens.ensemble.surgery import load
from embens.finite import Budget, diagnose


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``embens diagnose``."""
    add = parser.add_argument
    add("ensemble", type=Path, help="what ensemble.save wrote")
    networks = '"mlp(inputs=64, …)", "cnn(…)", module:function, file.py:function'
    trust = "the last two run that code: name only what you trust"
    add("--reference", required=True, help=f"the architecture: {networks}; {trust}")
    add("--data", default="digits", help="digits (default), or an .npz file with x and y")
    add("--gamma", type=float, help="the gradient scale that you mean to use")
    add("--optimizer", help="the optimizer that you mean to use, such as Adam")
    add("--wanted", choices=["independent"], help="what members should be")
    add("--samples", type=int, default=256, help="at most so many (default 256)")
    add("--members", type=int, default=16, help="measure at most so many (default 16)")
    add("--json", action="store_true", help="print numbers for programs")
    add("--plot", type=Path, help="a file for a picture")


def run(options: argparse.Namespace) -> int:
    """Run ``embens diagnose``; return its exit code."""
    reference = parse_reference(options.reference)
    ensemble = load(options.ensemble, reference)
    x, target = _data(options.data, reference)
    report = diagnose(
        ensemble,
        x,
        target,
        gamma=options.gamma,
        optimizer=options.optimizer,
        wanted=options.wanted,
        budget=Budget(samples=options.samples, members=options.members),
    )
    if options.plot is not None:
        report.plot(options.plot)
    print(json.dumps(report.to_dict(), indent=1) if options.json else report)
    return 0


def _data(text: str, reference: nn.Module) -> tuple[Tensor, Tensor]:
    """Return inputs and targets in the dtypes that the reference and its loss take."""
    x, y = read_data(text, reference)
    if y is None:
        raise ValueError(f"{text} has no targets; expected arrays x and y in an .npz file.")
    like = next(reference.parameters()).dtype
    x = x.to(like) if x.is_floating_point() else x
    return x, y.to(like) if y.is_floating_point() else y.long()
