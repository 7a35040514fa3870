"""First layer of fitted members, by tables instead of products with all bins.

In the piecewise-linear encoding of a number all bins below it are 1, its bin is a ramp, and those
above are 0. The product of the encoding with a weight vector is therefore linear within each bin:
its value at the left edge plus a slope times the ramp. Both are rows of a table with one entry for
each bin and hidden unit, so a column of a row takes two table rows, however many bins there are.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, linear

from embens.tabular.perceptron import Encoder


class FirstLayer:
    """Hidden units of the first layer before modulations, for rows that are not encoded.

    Args:
        encoder: The encoder of the table, with at least one bin.
        weight: Weights of all inputs, ``(hidden unit, input)``.
        bias: ``(hidden unit,)``.

    Attributes:
        table: Values at the left edges of all bins, then slopes, ``(2 * column * bin, hidden
            unit)``.
        inner_edges: Left edges of all bins but the first, ``(column, bin - 1)``, padded with
            infinity.
        rest: Weights of the compressed numbers and of all inputs that are not numbers.

    Shape:
        numbers ``(row, number)`` and codes ``(row, categorical column)`` become
        ``(row, hidden unit)``.
    """

    def __init__(self, encoder: Encoder, weight: Tensor, bias: Tensor):
        self.encoder = encoder
        self.bias = bias
        columns, bins = encoder.left.shape
        ramps = 0
        if encoder.bins:
            ramps = len(encoder.bin_index)
        sizes = [columns, columns, ramps, weight.shape[1] - 2 * columns - ramps]
        score, compressed, ramp, rest = weight.split(sizes, dim=1)
        # In float64, because values at the edges are sums over all bins below.
        slopes = torch.zeros(columns * bins, len(bias), dtype=torch.float64)
        if ramps:
            slopes[encoder.bin_index] = ramp.T.double()
        slopes = slopes.view(columns, bins, -1)
        slopes += encoder.score_rise.double().unsqueeze(-1) * score.T.double().unsqueeze(1)
        first_value = encoder.first_score.double().unsqueeze(-1) * score.T.double()
        values = first_value.unsqueeze(1) + slopes.cumsum(1) - slopes
        self.table = torch.cat([values.flatten(0, 1), slopes.flatten(0, 1)]).to(weight.dtype)
        is_bin = encoder.inverse_width > 0
        self.inner_edges = encoder.left.masked_fill(~is_bin, torch.inf)[:, 1:].contiguous()
        self.first_place = bins * torch.arange(columns)
        self.rest = torch.cat([compressed, rest], 1)

    @staticmethod
    def has_bins(encoder: Encoder) -> bool:
        """Return whether a numeric column has bins, without which there is no table."""
        return encoder.left.numel() > 0

    def __call__(self, numbers: Tensor, codes: Tensor) -> Tensor:
        encoder = self.encoder
        columns = numbers[:, : encoder.columns]
        is_used = ~encoder.is_ignored(columns)
        bins = torch.searchsorted(self.inner_edges, columns.T.contiguous(), right=True).T
        places = bins + self.first_place
        ramps = (columns - encoder.left.take(places)) * encoder.inverse_width.take(places)
        ramps = ramps.clamp(encoder.low.take(places), encoder.high.take(places))
        ramps = torch.where(is_used, ramps, 0.0)
        hidden = embedding_bag(
            torch.cat([places, places + encoder.left.numel()], 1),
            self.table,
            per_sample_weights=torch.cat([is_used.type_as(ramps), ramps], 1),
            mode="sum",
        )
        rest = torch.cat([encoder.compress(columns), *encoder.other_inputs(numbers, codes)], 1)
        return hidden + linear(rest, self.rest, self.bias)


class EncodedFirstLayer:
    """The same hidden units as :class:`FirstLayer`, by encoding the rows; for all encoders.

    Args:
        encoder: The encoder of the table.
        embeddings: Modules before the first layer of the reference, of each group.
        weights: Weights of the first layer of each group.
        biases: Biases of the first layer of each group.
    """

    def __init__(
        self,
        encoder: Encoder,
        embeddings: Sequence,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor],
    ):
        self.encoder = encoder
        self.groups = list(zip(embeddings, weights, biases, strict=True))

    def __call__(self, numbers: Tensor, codes: Tensor) -> Tensor:
        inputs = self.encoder(numbers, codes)
        hidden = [linear(embed(inputs), weight, bias) for embed, weight, bias in self.groups]
        return torch.cat(hidden, 1)
