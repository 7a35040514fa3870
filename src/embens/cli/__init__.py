"""The ``embens`` command.

Each command is a module with ``add_arguments(parser)`` and ``run(options) -> exit code``; it is
imported when it is called for. Errors of these kinds end as a message, without a traceback.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

import embens

__all__ = ["main"]

COMMANDS = {
    "advise": ("propose ensembles of a network, within a budget", "data"),
    "diagnose": ("say before training whether members will differ", "plot"),
    "reproduce": ("run an experiment of the paper", "experiments"),
    "report": ("make one page of the results in a folder", "experiments"),
    "fit": ("fit an ensemble to a table", "estimators"),
    "predict": ("predict with a fitted ensemble", "estimators"),
    "explore": ("make a page with dials of the infinitely wide ensemble", "experiments"),
    "kernel": ("write the kernels of an infinitely wide ensemble", "data"),
}
"""Name, which is that of a module here, to help line, and the extra that installs what it needs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog="embens", description="Embedded ensembles: one neural network, many models inside it."
    )
    parser.add_argument("--version", action="version", version=f"embens {embens.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    subparsers = {
        name: commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        for name, (text, _) in COMMANDS.items()
    }
    chosen = next((argument for argument in arguments if argument in COMMANDS), None)
    module = None
    if chosen is not None:
        module = importlib.import_module(f"embens.cli.{chosen}")
        module.add_arguments(subparsers[chosen])
        subparsers[chosen].set_defaults(parser=subparsers[chosen])
    options = parser.parse_args(arguments)
    assert module is not None
    try:
        return module.run(options)
    except ModuleNotFoundError as error:
        extra = COMMANDS[options.command][1]
        print(f"{error}. Install an extra: pip install 'embens[{extra}]'", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, TypeError, RuntimeError, IndexError, AssertionError, OSError) as error:
        return options.parser.error(str(error))
