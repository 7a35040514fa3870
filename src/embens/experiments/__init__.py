"""The paper's experiments: one file for each figure, the grid that runs them, their claims.

An experiment is a module that reads top to bottom: a frozen ``Cell`` (all that determines one
result, seed included), ``cells(setting)``, ``measure(cell)``, ``claims(table)``, ``plot(table)``.
:mod:`embens.experiments.contract` says what each of them is for. A new one is a file here, its name
below, and a test file with a table made up for it.
"""

from __future__ import annotations

NAMES = (
    "transition",
    "widths",
    "trajectories",
    "lld-rates",
    "gradients",
    "ablation",
    "ntk-at-init",
    "mc-dropout",
    "lld",
    "cost",
    "theorems",
    "parametrization",
    "gain",
    "richness",
    "compare",
    "laws",
)
"""In the order of the paper; the module of ``lld-rates`` is ``lld_rates``."""
