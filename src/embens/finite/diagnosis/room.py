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

from embens.finite.gradients import cosines, off_diagonal, total_gram

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


def layer_overlaps(grams: Mapping[str, Tensor], coupling: float) -> dict[str, LayerOverlap]:
    """Return the overlap of each layer from the inner products of its gradients."""
    total = sum(float(gram.diagonal().sum()) for gram in grams.values())
    return {
        layer: _overlap(gram, coupling, float(gram.diagonal().sum()) / total if total else 0.0)
        for layer, gram in grams.items()
    }


def total_overlap(grams: Mapping[str, Tensor], coupling: float, members: int) -> LayerOverlap:
    """Return the overlap of all layers together."""
    return _overlap(total_gram(grams, members), coupling, 1.0)


def _overlap(gram: Tensor, coupling: float, share: float) -> LayerOverlap:
    alive = gram.diagonal() > 0
    gram = gram[alive][:, alive]
    if len(gram) < 2:
        return LayerOverlap(0.0, 0.0, share, 0.0, 0.0, math.inf)
    pairs = off_diagonal(cosines(gram))
    mean, rms = float(pairs.mean()), float(pairs.square().mean().sqrt())
    systematic = min(max(mean, 0.0), coupling)
    chance = float((pairs - systematic).square().mean().sqrt())
    return LayerOverlap(mean, rms, share, systematic, chance, room_of(chance, systematic))


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


def room(overlaps: Mapping[str, LayerOverlap]) -> tuple[float, str | None]:
    """Return how many members there is room for, and the layer that limits them."""
    counted = {layer: o for layer, o in overlaps.items() if o.share >= SHARE}
    tightest = min(counted, key=lambda layer: counted[layer].room, default=None)
    if tightest is None or math.isinf(counted[tightest].room):
        return math.inf, None
    return counted[tightest].room, tightest


def room_interval(gram: Tensor, coupling: float = 0.0) -> tuple[float, float]:
    """Return the room of a layer for a chance part one standard error larger, and one smaller.

    The error is the jackknife's, leaving out one member at a time; with fewer than three members
    nothing is known, from 1 to infinity.
    """
    gram = gram[gram.diagonal() > 0][:, gram.diagonal() > 0]
    count = len(gram)
    if count < 3:
        return 1.0, math.inf
    overlap = _overlap(gram, coupling, 1.0)
    squares = (cosines(gram) - overlap.systematic).square().fill_diagonal_(0.0)
    without = (squares.sum() - 2 * squares.sum(0)) / ((count - 1) * (count - 2))
    spread = (without - without.mean()).square().sum()
    error = math.sqrt((count - 1) / count * float(spread))
    least = max(0.0, overlap.chance**2 - error)
    most = overlap.chance**2 + error
    return tuple(room_of(math.sqrt(c), overlap.systematic) for c in (most, least))  # type: ignore[return-value]
