"""Choices: what stands behind every "auto", by the size of the training part.

One place for all rules, so that they can be read, and changed, together. What they were chosen by
is in ``docs/how-to/tables.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

if TYPE_CHECKING:
    from embens.estimators.options import Options

Number = TypeVar("Number", int, float)

TINY = 50
"""Below so many rows nothing is held out, and a step sees all of them, in float64."""
LOOK = 100_000
"""Rows that bins and categories are taken from, at most."""
HELD_OUT = 10_000
"""Rows that are held out at most."""
BLIND = 100
"""Epochs at most where nothing is held out to stop by."""
P = (0.25, 0.5)
"""Means of the modulations of a BatchEnsemble, N(p, 1 − p²): the first with room for all members,
else the last."""
LR = 2e-3
"""Rate of AdamW."""


class Parts(NamedTuple):
    """Numbers of rows: to train on, to stop by, to calibrate with."""

    train: torch.Tensor
    stop: torch.Tensor
    calibrate: torch.Tensor


class Sizes(NamedTuple):
    """What depends on the number of rows."""

    members: int
    width: int
    batch_size: int
    epochs: int
    dropout: float


def given(option: Any, usual: Number) -> Number:
    """Return an option, or where it is "auto" what is usual."""
    return usual if isinstance(option, str) else type(usual)(option)


def choose_sizes(rows: int, options: Options) -> Sizes:
    """Return the sizes, as given or as the number of rows to train on suggests.

    Example:
        >>> from embens.estimators.options import Options
        >>> choose_sizes(10_000, Options())
        Sizes(members=16, width=256, batch_size=256, epochs=200, dropout=0.1)
        >>> choose_sizes(300, Options(members=4))
        Sizes(members=4, width=64, batch_size=64, epochs=200, dropout=0.1)
    """
    batches = ((rows, TINY), (64, 2500), (128, 5000), (256, 50_000), (512, 200_000))
    batch_size = next((size for size, below in batches if rows < below), 1024)
    epochs = 200 if rows <= 100_000 else max(20, 20_000_000 // rows)
    return Sizes(
        members=given(options.members, 16),
        width=given(options.width, 64 if rows < 500 else 256),
        batch_size=given(options.batch_size, batch_size),
        epochs=given(options.max_epochs, epochs),
        dropout=given(options.dropout, 0.0 if rows < TINY else 0.1),
    )


def diagnosed_rows(outputs: int) -> int:
    """Return how many rows to diagnose with, for a network with so many outputs."""
    return max(8, min(64, 128 // outputs))


def members_with_room(room: float, members: int, rows: int) -> int:
    """Return how many members to take where the network has room for so many.

    Never less than half: room is measured before training, and roughly. A tiny table is left alone.

    Example:
        >>> members_with_room(11.3, 16, 1000), members_with_room(2.0, 16, 1000)
        (11, 8)
    """
    if rows < TINY or room >= members:
        return members
    return max(members // 2, int(room))


def split(
    rows: int,
    fraction: Any,
    *,
    calibrate: bool,
    groups: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Parts:
    """Deal out rows.

    Args:
        rows: how many there are.
        fraction: to hold out; "auto": a fifth, but at most 10,000 rows, and none of a tiny table.
        calibrate: whether half of what is held out is for calibration alone.
        groups: the class of each row; every class that has several rows keeps its share.
        generator: draws the rows.
    """
    nothing = torch.empty(0, dtype=torch.int64)
    order = torch.randperm(rows, generator=generator)
    if fraction == "auto":
        count = 0 if rows < TINY else min(round(0.2 * rows), HELD_OUT)
    else:
        count = round(fraction * rows)
    if count == 0:
        return Parts(torch.arange(rows), nothing, nothing)
    if groups is not None:
        order = _by_turns(order, groups)
    held, train = order[:count], order[count:].sort().values
    if not calibrate:
        return Parts(train, held.sort().values, nothing)
    return Parts(train, held[::2].sort().values, held[1::2].sort().values)


def _by_turns(order: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return an order of which any beginning has the classes in proportion, and none whole.

    The k-th of n rows of a class comes at (k + 1/2) / n of the way; a class's last rows come last.
    """
    groups = groups[order]
    position = torch.empty(len(order), dtype=torch.float64)
    for group in groups.unique():
        mine = (groups == group).nonzero().squeeze(1)
        position[mine] = (torch.arange(len(mine), dtype=torch.float64) + 0.5) / len(mine)
        if len(mine) == 1:
            position[mine] = 1.0
    return order[position.argsort(stable=True)]
