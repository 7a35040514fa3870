"""Experiments: one module for each figure of the paper, and five beyond the paper.

An experiment is a module with

* a docstring, whose first paragraphs are the texts of its page
  (:func:`reproduction.grid.cells.describe`);
* ``SWEEP``, functions from a setting to cells;
* ``measure(cell)``, which returns a row of measured quantities, or several rows;
* ``CLAIMS``, the claims that are tested on the table;
* ``plot(table)``, which returns the figure.

It may have ``SEEDS`` (number of seeds by preset), ``CHANGES`` (of the setting, by preset),
``POOLED`` (whether intervals pool the residuals of all cells, :mod:`reproduction.claims`) and
``estimate_cost(cell)``. A new experiment is a module here, its name in ``NAMES``, and a test
file with a made-up table.
"""

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
    # Beyond the paper:
    "gain",
    "richness",
    "compare",
    "systems",
    "laws",
)
"""Names in the order of the paper; the module of ``lld-rates`` is ``lld_rates``."""
