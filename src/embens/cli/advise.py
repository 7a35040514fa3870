"""``embens advise``: which ensemble to make of a network, for these data and this budget."""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict

import torch

from embens.cli.specification import NETWORK_HELP, parse_reference, parse_widths, read_training_data
from embens.finite import advise

_BUDGET = {"parameters": "numbers", "time": "a pass", "memory": "a step"}
_PLAN = ("widths", "members", "epochs", "lr", "check", "seed")


def add_arguments(add: Callable[..., object]) -> None:
    """Add the options of ``embens advise``."""
    add("reference", help=NETWORK_HELP)
    add("data", nargs="?", default="digits", help="digits (default), or an .npz file with x and y")
    for name, what in _BUDGET.items():
        add(f"--{name}", type=float, default=math.inf, help=f"{what}, in multiples of one network")
    add("--widths", type=float, nargs="+", default=[1.0], help="relative, of mlp(…) and cnn(…)")
    add("--members", type=int, nargs="+", default=[2, 4, 8, 16], help="numbers to choose from")
    add("--epochs", type=int, default=30, help="of the training that is planned (default 30)")
    add("--lr", type=float, default=0.01, help="its rate (default 0.01)")
    add("--check", type=int, metavar="EPOCHS", help="train the proposals for so many epochs")
    add("--seed", type=int, default=0, help="of all that is drawn (default 0)")
    add("--json", action="store_true", help="print numbers for programs")


def run(options: argparse.Namespace) -> None:
    """Run ``embens advise``."""
    if ":" in options.reference and options.widths != [1.0]:
        raise ValueError("--widths is for mlp(…) and cnn(…); the network of a file has its own")
    torch.manual_seed(options.seed)
    reference, names = parse_reference(options.reference), (*_BUDGET, *_PLAN)
    given = {name: value for name, value in vars(options).items() if name in names}
    data = read_training_data(options.data, reference)
    proposals = advise(parse_widths(options.reference), *data, **given)
    if options.json:
        print(json.dumps([asdict(p) | {"log_loss": p.log_loss} for p in proposals], indent=1))
    else:
        print("\n\n".join(map(str, proposals)))
