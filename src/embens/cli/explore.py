"""``embens explore``: one page with dials on which the infinitely wide ensemble answers."""

import argparse
from collections.abc import Callable
from pathlib import Path

from embens.report import explorer


def add_arguments(add: Callable[..., object]) -> None:
    """Add the options of ``embens explore``."""
    add("--out", type=Path, default=Path("embens-explorer.html"), help="the page")


def run(options: argparse.Namespace) -> None:
    """Run ``embens explore``."""
    from rich.progress import track

    print(f"page: {explorer.write(options.out, lambda all_: track(all_, 'computing'))}")
