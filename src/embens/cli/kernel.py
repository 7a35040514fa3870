"""``embens kernel``: kernels of an infinitely wide ensemble, written to a file."""

import argparse

import torch
from torch import nn

from embens.checks import check_whole
from embens.cli.specification import parse_law, parse_reference, read_data
from embens.embedding.families import embed
from embens.theory import load_kernels, natural_gamma, regime, write_kernels
from embens.theory.storage import NAMES, check_path

EXAMPLE = """example:
  embens kernel --network "mlp(inputs=64, depth=3, weight_std=1.414)" --law "Shifted(0.5)" \\
                --data digits --points 1000 --out digits.npz
Interrupted, the same command goes on where it stopped."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``embens kernel``."""
    parser.epilog, parser.formatter_class = EXAMPLE, argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    network = "mlp(inputs=64, depth=3, weight_std=1.4142135623730951)"
    code = "file.py:function, which runs that file's code, so name only files that you trust"
    add("--network", default=network, help=f"mlp(…), cnn(…), or {code} (default: %(default)s)")
    add("--law", help="law of all modulations, such as 'Shifted(0.5)'")
    add("--pre", help="law of the outputs' modulations; 'none': absent")
    add("--post", help="law of the inputs' modulations; 'none': absent")
    add("--sites", default="hidden", choices=("hidden", "last", "all"))
    add("--frozen", action="store_true", help="modulations that are not trained")
    add("--members", type=int, default=8)
    add("--data", default="digits", help="digits, x.npy, or a .npz with x")
    add("--against", help="second set of inputs, as for --data")
    add("--points", type=int, help="take the first N inputs")
    add("--out", required=True, help="file to write, .npz or .zarr")
    add("--float32", action="store_true", help="half the size, six digits")
    add("--block", type=int, help="side of a block (default: what fits the cache)")
    add("--device", default="cpu", help="where to compute (default cpu)")
    add("--seed", type=int, default=0, help="of drawn modulations with --sites all")
    add("--quiet", action="store_true", help="no progress bar")


def run(options: argparse.Namespace) -> int:
    """Run ``embens kernel``; return its exit code."""
    check_path(options.out)
    law = options.law or "Normal()"
    pre, post = (parse_law(law if text is None else text) for text in (options.pre, options.post))
    reference = parse_reference(options.network)
    x1 = _inputs(options.data, reference, options)
    x2 = None if options.against is None else _inputs(options.against, reference, options)
    generator = torch.Generator().manual_seed(options.seed)
    given = {"sites": options.sites, "trainable": not options.frozen, "generator": generator}
    ensemble = embed(reference, options.members, pre=pre, post=post, **given)
    how = {"dtype": torch.float32 if options.float32 else torch.float64, "block": options.block}
    progress = False if options.quiet else None
    path = write_kernels(options.out, ensemble, x1, x2, progress=progress, **how)
    print(f"{path}: {', '.join(NAMES)}; {len(x1)} × {len(x1 if x2 is None else x2)} inputs")
    print(f"regime: {regime(ensemble)}")
    if x2 is None and len(x1) <= 2000:
        kernels = load_kernels(path)
        if not kernels.conditional:
            gamma = natural_gamma(kernels.to(torch.float64), options.members)
            print(f"natural gamma of {options.members} members: {gamma:.4g}")
    return 0


def _inputs(text: str, reference: nn.Module, options: argparse.Namespace) -> torch.Tensor:
    x, _ = read_data(text, reference)
    if options.points is not None and check_whole("--points", options.points) > len(x):
        raise ValueError(f"--points {options.points}: {text} has only {len(x)} inputs")
    return x[: options.points].to(options.device)
