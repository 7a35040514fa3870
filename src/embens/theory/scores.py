r"""Rules of attention, with one head or several, masked or not.

Scores are :math:`c\, q_i^\top k_j` with :math:`d` features of each head.

*Scale* :math:`c = 1/d` *of Hron et al. (2020).* As :math:`d` grows, scores stop being random: they
are 0 if queries and keys come from different layers, and :math:`\Sigma_{aa}(x, i; x, j)` if queries
and keys are the same units. So the weights of attention :math:`A`, the masked softmax of the scores
or the scores themselves, depend on the input alone. They are the same for all members, and have no
tangents. Attention is then a linear map of tokens, which acts on each kernel of the values as

.. math:: K(x, i; x', j) \to \sum_{s, t} A_{is}(x)\, K(x, s; x', t)\, A_{jt}(x') .

Heads differ by their masks alone. Heads with different masks become parts of a concatenation.

*Scale* :math:`c = 1/\sqrt d`. Scores stay random. With a softmax, kernels have no closed form.
Linear attention :math:`\sum_s c\, q_i^\top k_s\, v_s` is a product of three independent streams if
they come from different layers and heads are many,

.. math:: K(x, i; x', j) = \Sigma_q(x, i; x', j) \sum_{s, t \in A} \Sigma_k(x, s; x', t)\,
    \Sigma_v(x, s; x', t) ,

and tangent kernels follow the product rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from embens.theory.activation_step import LINEAR
from embens.theory.input_pair import InputPair
from embens.theory.moments import MEASURE, PAIRS, Recorded, State
from embens.theory.streams import Part, Stream, multiply_streams, settle_parts

Mask = Callable[[Tensor], Tensor]
"""A function of scores ``(n, head, token, token)``, such as one that fills entries with -inf."""


@dataclass(frozen=True)
class Scores:
    """Sums over features of the products of queries and keys.

    Attributes:
        queries: The queries, settled.
        keys: The keys, settled; the same units as the queries, or those of another layer.
        width: Number of features of a head.
        tied: True if queries are the keys; otherwise they are independent.
        scale: Factor of the sums.
        mask: Function that is applied to the scaled scores; None for none.
        depth: Number of recorded values so far.
    """

    queries: Stream
    keys: Stream
    width: int
    tied: bool
    scale: float = 1.0
    mask: Mask | None = None
    depth: int = 0

    @property
    def state(self) -> State:
        """Kernels of the queries."""
        return self.queries.parts[0].state

    def at(self, depth: int) -> Scores:
        """Return the scores with another depth: the number of their next record."""
        return replace(self, depth=depth)

    def scaled(self, factor: float) -> Scores:
        """Return the scores times a number.

        Raises:
            ValueError: If the scores were masked before.
        """
        if self.mask is not None:
            raise ValueError("scores must be scaled before they are masked.")
        return replace(self, scale=self.scale * factor)

    def masked(self, mask: Mask) -> Scores:
        """Return the scores with a further mask, applied after those before."""
        before = self.mask
        if before is None:
            return replace(self, mask=mask)
        return replace(self, mask=lambda scores: mask(before(scores)))


@dataclass(frozen=True)
class Weights:
    """Weights of attention of both sets of inputs.

    Attributes:
        first: Weights of ``x1``, ``(n1, head, token, token)``; one head stands for equal heads.
        second: Weights of ``x2``, ``(n2, head, token, token)``.
        paired: True in the first pass, where every input is paired with itself.
        heads: Number of heads; 0 for values without an axis of heads.
        depth: Number of recorded values so far.
    """

    first: Tensor
    second: Tensor
    paired: bool
    heads: int
    depth: int


def score(queries: Stream, keys: Stream) -> Scores:
    """Return the scores of ``queries @ keys.transpose(-2, -1)``.

    Args:
        queries: Queries ``(n, token, feature)``, or ``(n, head, token, feature)``.
        keys: Keys with the last two axes exchanged.

    Raises:
        ValueError: If queries and keys are correlated, or not tokens.
    """
    is_tied = _are_equal_units(queries, keys)
    queries, keys = settle_parts(queries), settle_parts(keys)
    if len(queries.parts) != 1 or len(keys.parts) != 1:
        raise ValueError(f"attention of a concatenation has no rule. {MEASURE}")
    query, key = queries.parts[0].state, keys.parts[0].state
    _require_tokens(query)
    _require_tokens(key)
    if not query.features_last or key.features_last or query.heads != key.heads:
        raise ValueError(
            "a product of two streams must be queries @ keys.transpose(-2, -1), summed over "
            f"features. {MEASURE}"
        )
    is_independent = not query.sources & key.sources and query.centred and key.centred
    if not is_tied and not is_independent:
        raise ValueError(
            "queries and keys must be one stream, or outputs of two different layers; here they "
            f"are correlated, which has no rule. {MEASURE}"
        )
    width = queries.parts[0].width
    if width == 1:
        raise ValueError(
            "queries with one feature do not show whether scores are divided by the width or its "
            "root; use a wider network, its limit is the same."
        )
    depth = max(queries.depth, keys.depth)
    return Scores(queries, keys, width, is_tied, depth=depth)


def _are_equal_units(queries: Stream, keys: Stream) -> bool:
    """Return True if two streams are the same units, apart from the order of axes."""
    if len(queries.parts) != 1 or len(keys.parts) != 1:
        return False
    query, key = queries.parts[0].state, keys.parts[0].state
    return query.same.nngp is key.same.nngp and query.pre is key.pre


def normalise_scores(scores: Scores) -> Weights:
    """Return the softmax of scores over keys.

    Args:
        scores: Scores, scaled by 1/width.

    Raises:
        TypeError: If scores are not divided by the number of features.
        ValueError: If a mask leaves no key to a query.
    """
    return _record(scores, lambda values: torch.softmax(values, -1))


def attend(weights: Weights, values: Stream) -> Stream:
    """Return the stream of ``weights @ values``.

    Args:
        weights: Weights of attention.
        values: Values ``(n, token, feature)``, or ``(n, head, token, feature)``.

    Raises:
        ValueError: If values are not tokens with the heads of the weights.
    """
    heads = weights.first.shape[1]
    parts = list(values.parts)
    if heads > 1 and len(parts) == 1:
        parts = parts * heads
    if heads > 1 and len(parts) != heads:
        raise ValueError(f"{values.name!r} is a concatenation inside of heads. {MEASURE}")
    mixed = []
    for index, part in enumerate(parts):
        head = index if heads > 1 else 0
        mixed.append(Part(_mix_tokens(part.state, weights, head), part.width))
    return Stream(tuple(mixed), values.name).at(max(values.depth, weights.depth))


def _mix_tokens(state: State, weights: Weights, head: int) -> State:
    """Return the kernels of the mean of values with the weights of one head."""
    _require_tokens(state)
    if not state.features_last or state.heads != weights.heads:
        raise ValueError(
            "values must have shape (n, token, feature), or (n, head, token, feature) with "
            f"the heads of the queries. {MEASURE}"
        )
    equation = "ist,ips,iqt->ipq" if weights.paired else "ijst,ips,jqt->ijpq"
    first, second = weights.first[:, head], weights.second[:, head]
    return state.map(lambda kernel: torch.einsum(equation, kernel, first, second))


def attend_linearly(scores: Scores, values: Stream) -> Stream:
    """Return the stream of ``scores @ values``, without a softmax.

    Args:
        scores: Scores, scaled by 1/width, or by 1/√width for many heads.
        values: Values ``(n, token, feature)``, or ``(n, head, token, feature)``.

    Raises:
        TypeError: If the scale has no rule.
        ValueError: If streams are correlated or shapes do not fit.
    """
    if abs(scores.scale * scores.width - 1) < 1e-6:
        weights = _record(scores, lambda logits: logits)
        return attend(weights, values.at(weights.depth))
    is_random = abs(scores.scale * scores.width**0.5 - 1) < 1e-6 and not scores.tied
    if not is_random or scores.state.heads < 2 or scores.mask is not None:
        raise TypeError(
            f"linear attention with scores multiplied by {scores.scale:.6g} has no rule: it needs "
            f"1/width = {1 / scores.width:.6g}, or 1/sqrt(width) with several heads, no mask, and "
            f"queries and keys of different layers. {MEASURE}"
        )
    keys = scores.keys.map(lambda state: state.replace(features_last=True)).at(scores.depth)
    pairs = multiply_streams(keys, values.at(scores.depth))
    summed = pairs.map(_sum_over_tokens)
    return multiply_streams(scores.queries.at(summed.depth), summed)


def _sum_over_tokens(state: State) -> State:
    """Return the kernels of the sum over tokens, for every token of the queries."""
    pair_axes = (-2, -1)

    def total(kernel: Tensor) -> Tensor:
        return kernel.sum(pair_axes, keepdim=True).expand_as(kernel).clone()

    return state.map(total)


def _record(scores: Scores, function: Mask) -> Weights:
    """Return a function of the scores as weights.

    The first pass, of every input with itself, computes and records them. The second one, over
    pairs of inputs, reads them.
    """
    if abs(scores.scale * scores.width - 1) > 1e-6:
        raise TypeError(
            f"the scores of attention are multiplied by {scores.scale:.6g}; the limit is known "
            f"for 1/width = {1 / scores.width:.6g} only. With 1/sqrt(width) scores stay random. "
            + MEASURE
        )
    state = scores.state
    facts = state.facts
    depth = scores.depth + 1
    if facts.recording is None:
        first = facts.variances[0][scores.depth]
        second = facts.variances[1][scores.depth]
        return Weights(first, second, paired=False, heads=state.heads, depth=depth)
    values = state.covariance if scores.tied else torch.zeros_like(state.covariance)
    values = values.unsqueeze(1)
    if scores.mask is not None:
        values = scores.mask(values)
    weights = function(values)
    if not torch.isfinite(weights).all():
        raise ValueError(
            "the weights of attention are not finite; a mask must leave a key to every query."
        )
    facts.recording.append(Recorded(LINEAR, None, weights))
    return Weights(weights, weights, paired=True, heads=state.heads, depth=depth)


def _require_tokens(state: State) -> None:
    is_headed = state.heads == 0 or state.heads_first
    if state.layout != PAIRS or state.spatial != 1 or state.flat or not is_headed:
        raise ValueError(
            "attention needs tokens of shape (n, token, feature), or (n, head, token, feature); "
            f"got pixels {state.pixels}. {MEASURE}"
        )


def add_mask(values: Tensor | InputPair, scores: Scores) -> Mask:
    """Return the mask that adds values, such as -inf, to scores.

    Args:
        values: Values that broadcast to the scores; a pair if they are computed from the inputs.
        scores: The scores.
    """
    aligned = _aligned(values, scores.state)

    def add(logits: Tensor) -> Tensor:
        return logits + aligned.to(logits)

    return add


def fill_mask(where: Tensor | InputPair, value: float, scores: Scores) -> Mask:
    """Return the mask that replaces scores by a value.

    Args:
        where: True for the scores to replace; it broadcasts to the scores. A pair if it is computed
            from the inputs.
        value: The new value of these scores.
        scores: The scores.
    """
    aligned = _aligned(where, scores.state)

    def fill(logits: Tensor) -> Tensor:
        return torch.where(aligned.to(logits.device, torch.bool), value, logits)

    return fill


def _aligned(mask: Tensor | InputPair, state: State) -> Tensor:
    """Return a mask with the axes ``(n, head, token, token)``; raise if it does not fit.

    Masks act in the first pass, which records weights and has one set of inputs.
    """
    inputs = 1
    values = mask
    if isinstance(mask, InputPair):
        inputs, values = len(state.covariance), mask.first
    assert isinstance(values, Tensor)
    heads = (state.heads,) if state.heads else ()
    sizes = (inputs, *heads, *state.pixels * 2)
    shape = (1,) * (len(sizes) - values.dim()) + tuple(values.shape)
    fits = len(shape) == len(sizes)
    for size, expected in zip(shape, sizes, strict=False):
        fits = fits and size in (1, expected)
    if not fits:
        raise ValueError(
            f"a mask of shape {tuple(values.shape)} does not broadcast to scores of shape {sizes}. "
            "Compute a mask that differs between inputs from the inputs of the forward."
        )
    values = values.reshape(shape)
    return values if state.heads else values.unsqueeze(1)
