r"""Room: how many members a network can hold before they stand in each other's way.

In each layer the pull of the :math:`M - 1` other members on a member's shared weights has, along
its own gradient, the mean :math:`(M-1)\,r`, which helps every member (:math:`r` is the mean of
:math:`\cos_{ab}` over pairs, but no more than the coupling in the limit), and by chance the size
:math:`\sqrt{M-1}\,s`, :math:`s^2 = \langle(\cos_{ab} - r)^2\rangle`, which only disturbs. A network
is full where chance is a fraction :math:`\epsilon` of what moves a member on its way, in the layer
where that comes first (for :math:`4\epsilon^2 r > s^2` it never does):

.. math::
    \sqrt{M-1}\, s = \epsilon\, \big(1 + (M-1)\, r\big)
    \qquad\Longrightarrow\qquad M = 1 + \frac{\epsilon^2}{s^2} \quad (r = 0) .

Shared output biases don't count, as their pull is systematic. :math:`\epsilon = 0.4` is calibrated,
see ``docs/how-to/is-my-ensemble-an-ensemble.md``: the order of magnitude is what one should trust.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from embens.finite.gradients import cosines, off_diagonal, pair_error

SHARE = 0.01  # layers with less of the squared gradient than this don't limit the room
FULL = 0.4  # the ε of the module's text


@dataclass(frozen=True)
class LayerOverlap:
    """How the members' gradients of one layer's shared parameters lie to each other.

    Attributes:
        mean: mean cosine of two members; ``rms`` is the root of the mean squared one.
        share: of the squared gradient of all layers that this layer has.
        systematic: the part of the mean that the limit's coupling explains.
        chance: root of the mean squared distance of the cosine from that.
        room: for how many members, if this layer were all.
    """

    mean: float
    rms: float
    share: float
    systematic: float
    chance: float
    room: float


@dataclass(frozen=True)
class Room:
    """How many members there is room for, maybe infinitely many, and the layer that limits it."""

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
    systematic = max(min(mean, 0.0), coupling) if coupling < 0 else min(max(mean, 0.0), coupling)
    chance = float((pairs - systematic).square().mean().sqrt())
    return LayerOverlap(mean, rms, share, systematic, chance, room_of(chance, systematic))


def room_of(chance: float, systematic: float = 0.0) -> float:
    """Return the number of members at which chance fills the room; infinite if it never does."""
    if chance <= 0 or 4 * FULL**2 * systematic > chance**2:
        return math.inf
    # The smaller root of FULL · (1 + m r) = s · sqrt(m), for m = M - 1, in a form that r = 0 takes.
    root = 2 * FULL / (chance + math.sqrt(chance**2 - 4 * FULL**2 * systematic))
    return 1 + root**2


def room(grams: Mapping[str, Tensor], coupling: float) -> Room:
    """Return how many members there is room for, from the inner products of layers' gradients."""
    overlaps = layer_overlaps(grams, coupling)
    counting = {layer: found for layer, found in overlaps.items() if found.share >= SHARE}
    tightest = min(counting, key=lambda layer: counting[layer].room, default=None)
    if tightest is None or math.isinf(counting[tightest].room):
        return Room(math.inf, (math.inf, math.inf), None)
    found = counting[tightest]
    error = pair_error((cosines(_alive(grams[tightest])) - found.systematic).square())
    if math.isnan(error):  # nothing is known of fewer than three members
        return Room(found.room, (1.0, math.inf), tightest)
    low, high = (
        room_of(math.sqrt(max(0.0, found.chance**2 + sign * error)), found.systematic)
        for sign in (1, -1)
    )
    return Room(found.room, (low, high), tightest)


def _alive(gram: Tensor) -> Tensor:
    alive = gram.diagonal() > 0
    return gram[alive][:, alive]
