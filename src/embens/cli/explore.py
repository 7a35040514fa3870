"""``embens explore``: one page with dials on which the infinitely wide ensemble answers."""

import argparse
from pathlib import Path

from embens.report import explorer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``embens explore``."""
    parser.add_argument("--out", type=Path, default=Path("embens-explorer.html"), help="the page")


def run(options: argparse.Namespace) -> int:
    """Run ``embens explore``; return its exit code."""
    from rich.progress import track

    print(f"page: {explorer.write(options.out, lambda all_: track(all_, 'computing'))}")
    return 0
