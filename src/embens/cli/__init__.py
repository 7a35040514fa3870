"""The ``embens`` command.

Each command is a module, imported when it is called for: ``add_arguments(add)`` is given the
parser's ``add_argument``, ``run(options)`` may return an exit code; an ``EXAMPLE`` ends its help.
Errors of these kinds end as a message, without a traceback.
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
    chosen = next((argument for argument in arguments if argument in COMMANDS), None)
    for name, (text, _) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name == chosen:
            module = importlib.import_module(f"embens.cli.{name}")
            module.add_arguments(command.add_argument)
            command.epilog = getattr(module, "EXAMPLE", None)
            command.formatter_class = argparse.RawDescriptionHelpFormatter
            command.set_defaults(run=module.run, parser=command)
    options = parser.parse_args(arguments)
    try:
        return options.run(options) or 0
    except ModuleNotFoundError as error:
        extra = COMMANDS[options.command][1]
        print(f"{error}. Install an extra: pip install 'embens[{extra}]'", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, TypeError, RuntimeError, IndexError, AssertionError, OSError) as error:
        return options.parser.error(str(error))
