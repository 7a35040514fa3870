"""The paper's experiments: one file for each figure, the grid that runs them, their claims.

An experiment is a module that reads top to bottom: a docstring for its page
(:func:`reproduction.grid.cells.describe`); ``SWEEP``, functions of a setting that return cells,
each of which has all that determines one result; ``measure(cell)``, which returns a row of numbers
or several (one for each epoch, say); ``CLAIMS``, the paper's; and ``plot(table)``, its panels. It
may have ``SEEDS``, their number for each preset, ``QUICK``, what is otherwise in that preset's
setting, and ``weight(cell)``, roughly what one costs. A new one is a file here, its name below, and
a test file with a table made up for it.
"""

NAMES = tuple(
    "transition widths trajectories lld-rates gradients ablation ntk-at-init mc-dropout lld cost "
    "theorems parametrization gain richness compare laws".split()
)
"""In the order of the paper; the module of ``lld-rates`` is ``lld_rates``."""
