r"""Reference network of the estimators, and the ensemble that is embedded in it.

The network is an encoder without parameters, followed by a perceptron.

A number :math:`x` of a column with bin edges :math:`e_0 < e_1 < \dots` becomes

.. math::
    \Big(s(x),\; \frac{x}{\sqrt{1 + x^2/9}},\;
    \Big[\tfrac{x - e_b}{e_{b+1} - e_b}\Big]_0^1,\; b = 0, 1, \dots\Big),

its score :math:`s`, linear between the edges; the number itself with outliers compressed
(Holzmüller et al., 2024); and its piecewise-linear encoding (Gorishniy et al., 2022), where
:math:`[\cdot]_0^1` clips and the outer bins extend one bin further. A missing number becomes zeros,
and an indicator if the training rows had missing values in that column.

All operations are row-wise and the control flow depends only on attributes, so ``torch.fx`` can
trace the network. The encoder precedes all modulations: it runs once for all members.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

import embens
from embens import EmbeddedEnsemble, networks
from embens.laws import Bernoulli, Normal, Signs
from embens.tabular.columns import Preprocessing
from embens.tabular.defaults import Arguments, Sizes
from embens.tabular.targets import Head


class Encoder(nn.Module):
    """Encode the two tensors of a table as inputs of a perceptron.

    Args:
        preprocessing: the learned encoding.
        bins: whether to include the piecewise-linear encoding.

    Shape:
        numbers ``(row, preprocessing.width)`` and codes ``(row, categorical column)`` become
        ``(row, input)``.
    """

    def __init__(self, preprocessing: Preprocessing, *, bins: bool = True):
        super().__init__()
        self.columns = len(preprocessing.numeric)
        self.bins = bins
        edges = _pad([column.edges for column in preprocessing.numeric])
        scores = _pad([column.scores for column in preprocessing.numeric])
        width = edges.diff(dim=1)
        is_bin = width > 0  # False in the padding, where widths are NaN
        index = torch.arange(is_bin.shape[1])
        is_last = is_bin & (index == is_bin.sum(1, keepdim=True) - 1)
        self.left = nn.Buffer(edges[:, :-1].nan_to_num(0.0))
        self.inverse_width = nn.Buffer(torch.where(is_bin, 1 / width, 0.0))
        self.low = nn.Buffer(torch.where(is_bin & (index == 0), -1.0, 0.0))
        self.high = nn.Buffer(is_bin.float() + is_last.float())
        self.first_score = nn.Buffer(scores[:, 0].nan_to_num(0.0))
        self.score_rise = nn.Buffer(torch.where(is_bin, scores.diff(dim=1), 0.0))
        self.has_padding = not bool(is_bin.all())
        self.bin_index = nn.Buffer(is_bin.flatten().nonzero().squeeze(1))
        missing = [j for j, column in enumerate(preprocessing.numeric) if column.has_missing]
        self.has_missing = len(missing) > 0
        self.missing_index = nn.Buffer(torch.tensor(missing, dtype=torch.int64))
        slots = []
        for j, column in enumerate(preprocessing.categorical):
            slots += [(j, code) for code in column.used_codes]
        self.has_categories = len(slots) > 0
        self.slot_column = nn.Buffer(torch.tensor([j for j, _ in slots], dtype=torch.int64))
        self.slot_code = nn.Buffer(torch.tensor([code for _, code in slots], dtype=torch.int64))

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        parts = []
        if self.columns:
            parts += self.encode_numbers(numbers[:, : self.columns])
        parts.append(numbers[:, self.columns :])  # target statistics
        if self.has_categories:
            one_hot = codes.index_select(1, self.slot_column) == self.slot_code
            parts.append(one_hot.type_as(numbers))
        return torch.cat(parts, 1)

    def encode_numbers(self, numbers: Tensor) -> list[Tensor]:
        """Return scores, compressed numbers, bins and missing indicators, each ``(row, …)``."""
        missing = torch.isnan(numbers)
        filled = torch.where(missing, 0.0, numbers)
        ramps = (filled.unsqueeze(-1) - self.left) * self.inverse_width
        ramps = torch.minimum(torch.maximum(ramps, self.low), self.high)
        scores = self.first_score + (ramps * self.score_rise).sum(-1)
        bounded = filled.clamp(-1e6, 1e6)  # its square is finite in float32
        parts = [
            torch.where(missing, 0.0, scores),
            bounded * torch.rsqrt(1 + (bounded / 3).square()),
        ]
        if self.bins:
            bins = torch.where(missing.unsqueeze(-1), 0.0, ramps).flatten(1)
            if self.has_padding:
                bins = bins.index_select(1, self.bin_index)
            parts.append(bins)
        if self.has_missing:
            parts.append(missing.index_select(1, self.missing_index).type_as(numbers))
        return parts


def _pad(rows: list[Tensor]) -> Tensor:
    """Stack vectors of different lengths, ``(vector, longest)``, padded with NaN."""
    longest = max([1, *(len(row) for row in rows)])
    padded = torch.full((len(rows), longest), math.nan)
    for j, row in enumerate(rows):
        padded[j, : len(row)] = row
    return padded


class Periodic(nn.Module):
    r"""Append :math:`\sin` and :math:`\cos` of :math:`2\pi c\, s` for each of the first inputs.

    The frequencies :math:`c` are trained, shared by all members, and initialised as
    :math:`N(0, \sigma^2)`.

    Args:
        columns: how many of the inputs to expand.
        frequencies: frequencies for each of them.
        std: their initial standard deviation.

    Shape:
        ``(row, input)`` becomes ``(row, input + 2 * columns * frequencies)``.
    """

    def __init__(self, columns: int, frequencies: int = 8, std: float = 0.3):
        super().__init__()
        self.columns = columns
        self.std = std
        self.frequencies = nn.Parameter(torch.empty(columns, frequencies))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Resample the frequencies."""
        with torch.no_grad():
            self.frequencies.normal_(0, self.std, generator=generator)

    def forward(self, input: Tensor) -> Tensor:
        angle = 2 * math.pi * input[:, : self.columns].unsqueeze(-1) * self.frequencies
        return torch.cat([input, angle.sin().flatten(1), angle.cos().flatten(1)], 1)


class DetachedOutputs(nn.Module):
    """Last layer whose second half of outputs does not train the hidden layers.

    Args:
        layer: a linear layer, whose weights are copied.
    """

    def __init__(self, layer: nn.Linear):
        super().__init__()
        half = layer.out_features // 2
        # On the meta device no weights are drawn: these would change the global generator.
        self.first = nn.Linear(layer.in_features, half, device="meta")
        self.second = nn.Linear(layer.in_features, half, device="meta")
        self.first.weight = nn.Parameter(layer.weight[:half].detach().clone())
        self.first.bias = nn.Parameter(layer.bias[:half].detach().clone())
        self.second.weight = nn.Parameter(layer.weight[half:].detach().clone())
        self.second.bias = nn.Parameter(layer.bias[half:].detach().clone())

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([self.first(input), self.second(input.detach())], -1)


class TableNetwork(nn.Module):
    """Encoder and perceptron; called with the two tensors of a table.

    Shape:
        numbers ``(row, number)`` and codes ``(row, categorical column)`` become ``(row, output)``.
    """

    def __init__(self, encoder: Encoder, body: nn.Sequential):
        super().__init__()
        self.encoder = encoder
        self.body = body

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        return self.body(self.encoder(numbers, codes))

    @property
    def first_layer(self) -> str:
        """Name of the first linear layer."""
        names = [name for name, part in self.named_modules() if isinstance(part, nn.Linear)]
        return names[0]


def build_network(
    preprocessing: Preprocessing,
    head: Head,
    arguments: Arguments,
    sizes: Sizes,
    generator: torch.Generator | None = None,
) -> TableNetwork:
    """Build the reference network of a table.

    Args:
        preprocessing: the encoding of the table.
        head: the head of the target, which has the number of outputs.
        arguments: of the estimator.
        sizes: width and dropout rate.
        generator: source of the initial weights.
    """
    embedding = arguments.numerical_embedding
    encoder = Encoder(preprocessing, bins=embedding in ("piecewise", "both"))
    numbers = torch.zeros(1, preprocessing.width)
    codes = torch.zeros(1, len(preprocessing.categorical), dtype=torch.int64)
    inputs = encoder(numbers, codes).shape[1]
    body = nn.Sequential()
    if embedding in ("periodic", "both") and preprocessing.numeric:
        periodic = Periodic(len(preprocessing.numeric))
        periodic.reset_parameters(generator)
        inputs += 2 * periodic.frequencies.numel()
        body.append(periodic)
    perceptron = networks.mlp(
        inputs,
        sizes.width,
        int(arguments.depth),
        head.outputs,
        weight_std=math.sqrt(2),
        bias_std=0.1,
        parametrization="standard",
        generator=generator,
    )
    for module in perceptron:
        body.append(module)
        if sizes.dropout > 0 and isinstance(module, nn.ReLU):
            body.append(nn.Dropout(sizes.dropout))
    if head.detached:
        last_layer: Any = body[-1]
        body[-1] = DetachedOutputs(last_layer)
    return TableNetwork(encoder, body)


def embed(
    reference: TableNetwork,
    head: Head,
    arguments: Arguments,
    sizes: Sizes,
    generator: torch.Generator | None = None,
) -> EmbeddedEnsemble:
    """Embed the ensemble of the chosen family in a reference network.

    Args:
        reference: the reference network.
        head: the head of the target, which has the default sites.
        arguments: family, law, sites and per-member layers.
        sizes: number of members and mean of the signs.
        generator: source of the modulations and per-member weights.
    """
    members = sizes.members
    if arguments.family == "independent":
        return embens.independent(reference, members, generator=generator)
    if arguments.family == "mc_dropout":
        # Fixed masks: predictions are deterministic, and the ensemble can be exported.
        law = arguments.law or Bernoulli(0.9)
        return embens.mc_dropout(reference, members, law=law, fresh=False, generator=generator)
    if arguments.family == "last_layer_dropout":
        law = arguments.law or Normal()
        return embens.last_layer_dropout(reference, members, law=law, generator=generator)
    law = arguments.law or Signs(sizes.p)
    sites = arguments.sites
    if sites == "auto":
        sites = head.default_sites
    post = law
    if sites == "first":
        # Modulate the output of the first layer only: then its product is shared by all members.
        law = {reference.first_layer: law}
        post = None
        sites = "hidden"
    return embens.embed(
        reference,
        members,
        pre=law,
        post=post,
        sites=sites,
        own="last" if arguments.own else (),
        generator=generator,
    )
