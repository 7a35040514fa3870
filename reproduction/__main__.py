"""The command line: ``python -m reproduction``.

* ``python -m reproduction NAME`` or ``--all`` runs experiments.
* ``python -m reproduction report DIR`` writes one page of the results in a folder.
* ``python -m reproduction explore`` writes a page with controls for the infinite-width theory.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from reproduction import command
from reproduction.grid.results import redraw
from reproduction.report import explorer, page

DESCRIPTION = (
    "Run an experiment of the paper. `report DIR` writes one page of the results in a folder; "
    "`explore` writes a page with controls for the infinite-width theory."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The arguments; None: those of the process.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    subcommand = arguments[0] if arguments else ""
    if subcommand == "report":
        parser, work = _report_parser(), write_report
        arguments = arguments[1:]
    elif subcommand == "explore":
        parser, work = _explore_parser(), write_explorer
        arguments = arguments[1:]
    else:
        parser, work = _run_parser(), command.run_experiments
    options = parser.parse_args(arguments)
    try:
        return work(options)
    except ModuleNotFoundError as error:
        print(f"{error}. Install it: pip install 'embens[reproduction]'", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, RuntimeError, OSError) as error:
        parser.error(str(error))


def _run_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m reproduction", description=DESCRIPTION)
    command.add_arguments(parser)
    return parser


def _report_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m reproduction report",
        description="Write one HTML page of the results in a folder.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="results folder")
    parser.add_argument("--out", type=Path, help="the page (default: DIR/report.html)")
    parser.add_argument(
        "--redraw",
        action="store_true",
        help="first judge and draw the tables with the present claims and figures",
    )
    return parser


def _explore_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m reproduction explore",
        description="Write a page with controls for the infinite-width theory.",
    )
    parser.add_argument("--out", type=Path, default=Path("embens-explorer.html"), help="the page")
    return parser


def write_report(options: Namespace) -> int:
    """Write the page of a results folder."""
    if options.redraw:
        for manifest in sorted(options.folder.rglob("manifest.json")):
            redraw(manifest.parent)
    print(f"page: {page.write(options.folder, options.out)}")
    return 0


def write_explorer(options: Namespace) -> int:
    """Write the page of the infinite-width theory."""
    from rich.progress import track

    print(f"page: {explorer.write(options.out, lambda items: track(items, 'computing'))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
