"""``embens report``: one page of the results in a folder."""

import argparse
from pathlib import Path

from embens.experiments.results import redraw
from embens.report import page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``embens report``."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="where embens reproduce wrote")
    parser.add_argument("--out", type=Path, help="the page (default: DIR/report.html)")
    anew = "judge and draw the tables there anew first, with the claims and figures of this version"
    parser.add_argument("--redraw", action="store_true", help=anew)


def run(options: argparse.Namespace) -> int:
    """Run ``embens report``; return its exit code."""
    for path in sorted(options.folder.rglob("manifest.json")) if options.redraw else ():
        redraw(path.parent)
    print(f"page: {page.write(options.folder, options.out)}")
    return 0
