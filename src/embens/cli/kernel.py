"""``embens kernel``: kernels of an infinitely wide ensemble, written to a file."""

import argparse
from collections.abc import Callable

import torch

from embens.checks import check_whole
from embens.cli.specification import NETWORK_HELP, parse_law, parse_reference, read_data
from embens.embedding.families import embed
from embens.theory import load_kernels, natural_gamma, regime, write_kernels
from embens.theory.storage import NAMES

EXAMPLE = """example:
  embens kernel --network "mlp(inputs=64, depth=3, weight_std=1.414)" --law "Shifted(0.5)" \\
                --data digits --points 1000 --out digits.npz
Interrupted, the same command goes on where it stopped."""


def add_arguments(add: Callable[..., object]) -> None:
    """Add the options of ``embens kernel``."""
    network = "mlp(inputs=64, depth=3, weight_std=1.4142135623730951)"
    add("--network", default=network, help=f"{NETWORK_HELP} (default: %(default)s)")
    add("--law", help="law of all modulations, such as 'Shifted(0.5)'")
    add("--pre", help="law of the outputs' modulations; 'none': absent")
    add("--post", help="law of the inputs' modulations; 'none': absent")
    add("--sites", default="hidden", choices=("hidden", "last", "all"))
    add("--members", type=int, default=8)
    add("--data", default="digits", help="digits, x.npy, or a .npz with x")
    add("--points", type=int, help="take the first N inputs")
    add("--out", required=True, help="file to write, .npz")
    add("--float32", action="store_true", help="half the size, six digits")
    add("--block", type=int, help="side of a block (default: what fits the cache)")
    add("--device", default="cpu", help="where to compute (default cpu)")
    add("--quiet", action="store_true", help="no progress bar")


def run(options: argparse.Namespace) -> None:
    """Run ``embens kernel``."""
    law = options.law or "Normal()"
    pre, post = (parse_law(law if text is None else text) for text in (options.pre, options.post))
    reference = parse_reference(options.network)
    x, _ = read_data(options.data, reference)
    if options.points is not None and check_whole("--points", options.points) > len(x):
        raise ValueError(f"--points {options.points}: {options.data} has only {len(x)} inputs")
    x = x[: options.points].to(options.device)
    given = {"sites": options.sites, "generator": torch.Generator().manual_seed(0)}
    ensemble = embed(reference, options.members, pre=pre, post=post, **given)
    how = {"dtype": torch.float32 if options.float32 else torch.float64, "block": options.block}
    path = write_kernels(options.out, ensemble, x, progress=False if options.quiet else None, **how)
    print(f"{path}: {', '.join(NAMES)}; {len(x)} × {len(x)} inputs\nregime: {regime(ensemble)}")
    kernels = load_kernels(path) if len(x) <= 2000 else None
    if kernels is not None and not kernels.conditional:
        gamma = natural_gamma(kernels.to(torch.float64), options.members)
        print(f"natural gamma of {options.members} members: {gamma:.4g}")
