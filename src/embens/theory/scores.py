r"""Rules of attention with the scale 1/width of Hron et al. (2020).

Scores are :math:`\frac1d q_i^\top k_j` with :math:`d` features. As :math:`d` grows they stop being
random: they are 0 for queries and keys of different layers, and the kernel :math:`\Sigma_{aa}(x, i;
x, j)` if queries are the keys. So the weights of attention, :math:`A = \mathrm{softmax}`, depend on
the input alone, are the same for all members, and have no tangents. Attention is then a linear map
of tokens, which acts on each kernel of the values as

.. math:: K(x, i; x', j) \to \sum_{s, t} A_{is}(x)\, K(x, s; x', t)\, A_{jt}(x') .

With the usual scale :math:`1/\sqrt d` scores stay random and kernels have no closed form.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from embens.theory.activation_step import LINEAR
from embens.theory.moments import MEASURE, PAIRS, Recorded, State
from embens.theory.streams import Stream, settled


@dataclass(frozen=True)
class Scores:
    """Sums over features of the products of queries and keys.

    Attributes:
        state: Kernels of the queries if they are the keys; otherwise of queries alone.
        width: Number of features.
        tied: True if queries are the keys; otherwise they are independent.
        scale: Factor of the sums.
    """

    state: State
    width: int
    tied: bool
    scale: float = 1.0

    @property
    def depth(self) -> int:
        """Number of recorded values so far."""
        return self.state.depth

    def scaled(self, factor: float) -> Scores:
        """Return the scores times a number."""
        return replace(self, scale=self.scale * factor)


@dataclass(frozen=True)
class Weights:
    """Weights of attention of both sets of inputs.

    Attributes:
        first: Weights of ``x1``, ``(n1, token, token)``.
        second: Weights of ``x2``, ``(n2, token, token)``.
        paired: True in the pass of every input with itself.
        depth: Number of recorded values so far.
    """

    first: Tensor
    second: Tensor
    paired: bool
    depth: int


def score(queries: Stream, keys: Stream) -> Scores:
    """Return the scores of ``queries @ keys.transpose(-2, -1)``.

    Raises:
        ValueError: If queries and keys are correlated, or not tokens.
    """
    queries = settled(queries)
    keys = settled(keys.at(queries.depth))
    if len(queries.parts) != 1 or len(keys.parts) != 1:
        raise ValueError(f"attention of a concatenation has no rule. {MEASURE}")
    query, key = queries.parts[0].state, keys.parts[0].state
    _require_tokens(query)
    if not query.features_last or key.features_last:
        raise ValueError(
            "a product of two streams must be queries @ keys.transpose(-2, -1), summed over "
            f"features. {MEASURE}"
        )
    is_tied = query.same.nngp is key.same.nngp
    is_independent = not query.sources & key.sources and query.centred and key.centred
    if not is_tied and not is_independent:
        raise ValueError(
            "queries and keys must be one stream, or outputs of two different layers; here they "
            f"are correlated, which has no rule. {MEASURE}"
        )
    state = query.replace(depth=max(queries.depth, keys.depth))
    return Scores(state, queries.parts[0].width, is_tied)


def normalise_scores(scores: Scores) -> Weights:
    """Return the softmax of scores over keys; weights are recorded, then read.

    Raises:
        TypeError: If scores are not divided by the number of features.
    """
    if abs(scores.scale * scores.width - 1) > 1e-6:
        raise TypeError(
            f"the scores of attention are multiplied by {scores.scale:.6g}; the limit is known "
            f"for 1/width = {1 / scores.width:.6g} only. With 1/sqrt(width) scores stay random. "
            + MEASURE
        )
    state = scores.state
    facts = state.facts
    depth = state.depth + 1
    if facts.recording is not None:
        logits = state.covariance if scores.tied else torch.zeros_like(state.covariance)
        weights = torch.softmax(logits, -1)
        facts.recording.append(Recorded(LINEAR, None, weights))
        return Weights(weights, weights, paired=True, depth=depth)
    first = facts.variances[0][state.depth]
    second = facts.variances[1][state.depth]
    return Weights(first, second, paired=False, depth=depth)


def attend(weights: Weights, values: Stream) -> Stream:
    """Return the stream of ``weights @ values``."""
    equation = "ijst,ips,jqt->ijpq"
    if weights.paired:
        equation = "ist,ips,iqt->ipq"

    def mix(state: State) -> State:
        _require_tokens(state)
        if not state.features_last:
            raise ValueError(f"values must have shape (n, token, feature). {MEASURE}")
        return state.map(lambda k: torch.einsum(equation, k, weights.first, weights.second))

    return values.map(mix).at(max(values.depth, weights.depth))


def _require_tokens(state: State) -> None:
    if state.layout != PAIRS or state.spatial != 1 or state.flat:
        raise ValueError(
            f"attention needs tokens of shape (n, token, feature); got pixels {state.pixels}. "
            + MEASURE
        )
