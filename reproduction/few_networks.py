"""Two or four separate networks with longer training, a part of ``compare``.

*Separate networks* of ``compare`` spend the compute on their number, and each is trained as long as
one network. Here the number is fixed, and a larger budget pays for more epochs: M networks with the
budget B are trained for B/M times the epochs of one network.

A cell is measured by ``compare`` itself, as M separate networks with more epochs. At a budget of M
both systems are therefore the same networks, and their results must be equal.
"""

from dataclasses import replace

from reproduction.competitors import FOUR_NETWORKS, SEPARATE, TWO_NETWORKS
from reproduction.figures import compare
from reproduction.figures.compare import measure as measure_system
from reproduction.grid.cells import Cell, Row

MEMBERS = {TWO_NETWORKS: 2, FOUR_NETWORKS: 4}
estimate_cost = compare.estimate_cost


def measure(cell: Cell) -> Row:
    """Train a fixed number of separate networks and score them."""
    return measure_system(as_separate_networks(cell))


def as_separate_networks(cell: Cell) -> Cell:
    """Return the equal cell of ``compare``: separate networks with more epochs each."""
    members = MEMBERS[cell["system"]]
    epochs = max(1, round(cell.setting.epochs * cell["budget"] / members))
    networks = cell.with_values(system=SEPARATE, budget=members)
    return replace(networks, setting=replace(cell.setting, epochs=epochs))
