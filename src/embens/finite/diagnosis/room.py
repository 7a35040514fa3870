r"""Room: how many members a network can hold before they stand in each other's way.

In each layer the pull of the :math:`M - 1` other members on a member's shared weights has, along
the member's own gradient, the mean :math:`(M-1)\,r` and the size :math:`\sqrt{M-1}\,s`. Here
:math:`r` is systematic and helps every member: the mean of :math:`\cos_{ab}` over pairs, but no
more than the coupling in the limit, so 0 for independent members. The rest is chance, which only
disturbs, :math:`s^2 = \langle(\cos_{ab} - r)^2\rangle`, and falls with the width. A network is
full where the chance part is a fraction :math:`\epsilon` of what moves a member on its way,

.. math::
    \sqrt{M-1}\, s = \epsilon\, \big(1 + (M-1)\, r\big)
    \qquad\Longrightarrow\qquad M = 1 + \frac{\epsilon^2}{s^2} \quad (r = 0) .

For :math:`4\epsilon^2 r > s^2` that never happens: more members are then no burden.

The layer in which this comes first is the one that counts: usually the first or the last, whose
:math:`s^2` falls as :math:`1/N`, so that the room grows in proportion to the width. Layers with
less than 1 % of the squared gradient don't count, nor do shared output biases, whose pull is
systematic. :math:`\epsilon = 0.4` is calibrated: with it the room of MLPs on digits is within a
factor of two or so of the number of members with the best accuracy, see the table in
``docs/how-to/is-my-ensemble-an-ensemble.md``. It is the order of magnitude that one should trust.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from embens.finite.gradients import cosines, off_diagonal
from embens.finite.jackknife import pair_error

SHARE = 0.01
"""Layers with less of the squared gradient than this don't limit the room."""
FULL = 0.4
r"""The :math:`\epsilon` of the module's text."""


@dataclass(frozen=True)
class LayerOverlap:
    """How the members' gradients of one layer's shared parameters lie to each other.

    Attributes:
        mean: mean cosine of two members, with its sign.
        rms: root of the mean squared cosine.
        share: of the squared gradient of all layers that this layer has.
        systematic: the part of the mean that the limit's coupling explains.
        chance: root of the mean squared distance of the cosine from that.
        room: see :func:`room_of`, for this layer.
    """

    mean: float
    rms: float
    share: float
    systematic: float
    chance: float
    room: float


@dataclass(frozen=True)
class Room:
    """How many members there is room for.

    Attributes:
        members: the room; infinite where nothing limits it.
        interval: the same, one standard error lower and higher.
        tightest: the layer that limits it.
    """

    members: float
    interval: tuple[float, float]
    tightest: str | None


def layer_overlaps(grams: Mapping[str, Tensor], coupling: float) -> dict[str, LayerOverlap]:
    """Return the overlap of each layer from the inner products of its gradients."""
    sizes = {layer: float(gram.diagonal().sum()) for layer, gram in grams.items()}
    total = sum(sizes.values()) or 1.0
    return {layer: overlap(grams[layer], coupling, sizes[layer] / total) for layer in grams}


def overlap(gram: Tensor, coupling: float, share: float = 1.0) -> LayerOverlap:
    """Return the overlap of gradients with these inner products; those that vanish don't count."""
    gram = _alive(gram)
    if len(gram) < 2:
        return LayerOverlap(0.0, 0.0, share, 0.0, 0.0, math.inf)
    pairs = off_diagonal(cosines(gram))
    mean, rms = float(pairs.mean()), float(pairs.square().mean().sqrt())
    systematic = min(max(mean, 0.0), coupling)
    chance = float((pairs - systematic).square().mean().sqrt())
    return LayerOverlap(mean, rms, share, systematic, chance, room_of(chance, systematic))


def _alive(gram: Tensor) -> Tensor:
    alive = gram.diagonal() > 0
    return gram[alive][:, alive]


def room_of(chance: float, systematic: float = 0.0) -> float:
    r"""Return the :math:`M` at which the chance part fills the room; infinite if it never does.

    Example:
        >>> round(room_of(0.1), 6), room_of(0.1, 0.5)
        (17.0, inf)
    """
    if chance <= 0 or 4 * FULL**2 * systematic > chance**2:
        return math.inf
    # The smaller root of FULL · (1 + m r) = s · sqrt(m), for m = M - 1, in a form that r = 0 takes.
    root = 2 * FULL / (chance + math.sqrt(chance**2 - 4 * FULL**2 * systematic))
    return 1 + root**2


def room(grams: Mapping[str, Tensor], coupling: float) -> Room:
    """Return how many members there is room for, from the inner products of layers' gradients."""
    overlaps = layer_overlaps(grams, coupling)
    rooms = {layer: found.room for layer, found in overlaps.items() if found.share >= SHARE}
    tightest = min(rooms, key=rooms.__getitem__, default=None)
    if tightest is None or math.isinf(rooms[tightest]):
        return Room(math.inf, (math.inf, math.inf), None)
    return Room(rooms[tightest], room_interval(grams[tightest], coupling), tightest)


def room_interval(gram: Tensor, coupling: float = 0.0) -> tuple[float, float]:
    """Return the room of a layer for a chance part one standard error larger, and one smaller.

    With fewer than three members nothing is known: from 1 to infinity.
    """
    found = overlap(gram, coupling)
    error = pair_error((cosines(_alive(gram)) - found.systematic).square())
    if math.isnan(error):
        return 1.0, math.inf
    least, most = (max(0.0, found.chance**2 + sign * error) for sign in (-1, 1))
    return room_of(math.sqrt(most), found.systematic), room_of(math.sqrt(least), found.systematic)
