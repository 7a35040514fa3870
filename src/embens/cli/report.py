"""``embens report``: one page of the results in a folder."""

import argparse
from collections.abc import Callable
from pathlib import Path

from embens.experiments.results import redraw
from embens.report import page


def add_arguments(add: Callable[..., object]) -> None:
    """Add the options of ``embens report``."""
    add("folder", type=Path, metavar="DIR", help="where embens reproduce wrote")
    add("--out", type=Path, help="the page (default: DIR/report.html)")
    anew = "judge and draw the tables there anew first, with the claims and figures of this version"
    add("--redraw", action="store_true", help=anew)


def run(options: argparse.Namespace) -> None:
    """Run ``embens report``."""
    for path in sorted(options.folder.rglob("manifest.json")) if options.redraw else ():
        redraw(path.parent)
    print(f"page: {page.write(options.folder, options.out)}")
