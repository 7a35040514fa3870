"""The ``embens`` command: ``main`` and one module for each subcommand."""

from embens.cli.main import main

__all__ = ["main"]
