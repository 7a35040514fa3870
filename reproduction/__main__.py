"""The command line: ``python -m reproduction``.

* ``python -m reproduction NAME`` or ``--all`` runs experiments.
* ``python -m reproduction demo`` shows in two minutes what embens is good for.
* ``python -m reproduction tuning`` compares learning rates on validation data, ``compare-rates``
  those of ``compare``, and ``python -m reproduction record DIR`` records the best ones.
* ``python -m reproduction report DIR`` writes one page of the results in a folder.
* ``python -m reproduction explore`` writes a page with controls for the infinite-width theory.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from reproduction import command, compare_rates, demo, tuning
from reproduction.grid.cells import TUNINGS
from reproduction.grid.results import read_table, redraw
from reproduction.grid.settings import CHOICES, read_choices
from reproduction.report import explorer, page
from reproduction.storage import check_distinct, check_output, unseal, write_atomically

DESCRIPTION = (
    "Run an experiment of the paper. `demo` takes two minutes; `report DIR` writes one page of the "
    "results in a folder; `explore` writes a page with controls for the infinite-width theory."
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
    elif subcommand == "demo":
        parser, work = _demo_parser(), demo.run
        arguments = arguments[1:]
    elif subcommand == "record":
        parser, work = _record_parser(), record_choices
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


def _demo_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m reproduction demo",
        description="Fit a table with intervals and show the paper's two regimes, in two minutes.",
    )
    parser.add_argument("--out", type=Path, default=Path("embens-results"), help="the folder")
    return parser


def _record_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m reproduction record",
        description="Record the learning rates and training lengths of a tuning.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="results folder")
    parser.add_argument("--file", type=Path, default=CHOICES, help="the file to write")
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
        for folder in page.result_folders(options.folder):
            redraw(folder)
    print(f"page: {page.write(options.folder, options.out)}")
    return 0


def record_choices(options: Namespace) -> int:
    """Record the choices of all tunings in a results folder."""
    paths = []
    for name in TUNINGS:
        paths += sorted(options.folder.glob(f"{name}/*/manifest.json"))
    if not paths:
        raise ValueError(f"{options.folder} must contain a finished tuning, got none.")
    check_distinct(options.file, page.result_files(options.folder))
    check_output(options.file)
    choices = read_choices(options.file)
    for path in paths:
        manifest = unseal(path.name, json.loads(path.read_bytes()))
        preset = manifest["preset"]
        previous = choices.get(preset, {})
        versions = {"commit": manifest["commit"], "code": manifest["code"]}
        table = read_table(path.parent)
        if path.parent.parent.name == "compare-rates":
            choice = {**compare_rates.choose(table), **versions}
            choices[preset] = {**previous, "compare": choice}
            print(f"{preset}, compare: rates {choice['rates']}")
        else:
            choice = {**tuning.choose(table), **versions}
            choices[preset] = {**previous, **choice}
            print(f"{preset}: {choice['epochs']} epochs, rates {choice['rates']}")
    write_atomically(options.file, json.dumps(choices, indent=1) + "\n")
    return 0


def write_explorer(options: Namespace) -> int:
    """Write the page of the infinite-width theory."""
    from rich.progress import track

    print(f"page: {explorer.write(options.out, lambda items: track(items, 'computing'))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
