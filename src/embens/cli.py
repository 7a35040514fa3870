"""The ``embens`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="embens", description="Embedded ensembles: one neural network, many models inside it."
    )
    parser.add_argument("--version", action="version", version=f"embens {version('embens')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="compare ensembles on handwritten digits")
    demo.add_argument("--out", type=Path, default=Path("embens-demo"), help="folder for results")
    demo.add_argument("--seeds", type=int, default=3, help="runs to average (default 3)")
    demo.add_argument("--epochs", type=int, default=30, help="epochs of each run (default 30)")
    demo.add_argument("--members", type=int, nargs="+", default=[1, 2, 4, 8])
    demo.add_argument("--width", type=int, default=64, help="width of the network (default 64)")
    demo.add_argument("--workers", type=int, default=None, help="processes (default: cores)")
    options = parser.parse_args(arguments)
    if min([options.seeds, options.epochs, options.width, *options.members]) < 1:
        parser.error("seeds, epochs, width and members must be at least 1")
    try:
        from embens import demo as module

        module.run(
            out=options.out,
            seeds=options.seeds,
            epochs=options.epochs,
            members=sorted(set(options.members)),
            width=options.width,
            workers=options.workers,
        )
    except ModuleNotFoundError as error:
        print(f"{error}. The demo needs an extra: pip install 'embens[demo]'", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
