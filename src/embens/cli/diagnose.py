"""``embens diagnose``: the diagnosis of a saved ensemble.

A file holds tensors and laws but no code, so the reference's architecture is given beside it.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from embens.cli.specification import NETWORK_HELP, parse_reference, read_training_data
from embens.ensemble.surgery import load
from embens.finite import Budget, diagnose


def add_arguments(add: Callable[..., object]) -> None:
    """Add the options of ``embens diagnose``."""
    add("ensemble", type=Path, help="what ensemble.save wrote")
    add("--reference", required=True, help=NETWORK_HELP)
    add("--data", default="digits", help="digits (default), or an .npz file with x and y")
    add("--gamma", type=float, help="the gradient scale that you mean to use")
    add("--optimizer", help="the optimizer that you mean to use, such as Adam")
    add("--wanted", choices=["independent"], help="what members should be")
    add("--samples", type=int, default=256, help="at most so many (default 256)")
    add("--members", type=int, default=16, help="measure at most so many (default 16)")
    add("--json", action="store_true", help="print numbers for programs")
    add("--plot", type=Path, help="a file for a picture")


def run(options: argparse.Namespace) -> None:
    """Run ``embens diagnose``."""
    reference = parse_reference(options.reference)
    ensemble = load(options.ensemble, reference)
    x, target = read_training_data(options.data, reference)
    given = {name: getattr(options, name) for name in ("gamma", "optimizer", "wanted")}
    budget = Budget(samples=options.samples, members=options.members)
    report = diagnose(ensemble, x, target, **given, budget=budget)
    if options.plot is not None:
        report.plot(options.plot)
    print(json.dumps(report.to_dict(), indent=1) if options.json else report)
