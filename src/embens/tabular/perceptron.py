r"""Encoded rows of a table, the reference network, and the ensemble that is embedded in it.

The reference is a plain perceptron. Its inputs come from an encoder without parameters, which
expands a batch of rows once for all members.

A number :math:`x` of a column with bin edges :math:`e_0 < e_1 < \dots` becomes

.. math::
    \Big(s(x),\; \frac{x}{\sqrt{1 + x^2/9}},\;
    \Big[\tfrac{x - e_b}{e_{b+1} - e_b}\Big]_0^1,\; b = 0, 1, \dots\Big),

its score :math:`s`, linear between the edges; the number itself with outliers compressed
(Holzmüller et al., 2024); and its piecewise-linear encoding (Gorishniy et al., 2022), where
:math:`[\cdot]_0^1` clips and the outer bins extend one bin further. A missing number becomes zeros,
and an indicator if the training rows had missing values in that column.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

import embens
from embens import EmbeddedEnsemble
from embens.laws import Bernoulli, Normal, Signs
from embens.tabular.columns import Preprocessing
from embens.tabular.defaults import Arguments, Sizes
from embens.tabular.layers import DetachedOutputs, Periodic
from embens.tabular.targets import Head

if TYPE_CHECKING:
    from embens.tabular.preparation import Prepared

PREDICTED_ROWS = 1024  # rows that the network predicts at a time
ENCODED_VALUES = 2**24  # inputs of all training rows up to which they are encoded once


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a table as tensors, before the encoder expands them.

    Attributes:
        numbers: ``(row, number)``.
        codes: ``(row, categorical column)``.
        target: ``(row, target + 1)``, with weights in the last column.
    """

    numbers: Tensor
    codes: Tensor
    target: Tensor

    def __len__(self) -> int:
        return len(self.target)

    def __getitem__(self, rows: Any) -> Self:
        return type(self)(self.numbers[rows], self.codes[rows], self.target[rows])

    def __add__(self, other: Self) -> Self:
        return type(self)(
            torch.cat([self.numbers, other.numbers]),
            torch.cat([self.codes, other.codes]),
            torch.cat([self.target, other.target]),
        )

    def thinned(self, most: int) -> Self:
        """Return at most ``most`` rows, evenly spaced."""
        if len(self) <= most:
            return self
        return self[torch.linspace(0, len(self) - 1, max(1, most)).long()]


class EncodedBatches:
    """Batches ``(inputs, target)`` of rows.

    Rows that are passed several times, in a new order each time, are encoded once if they fit into
    memory. Otherwise the encoder expands one batch at a time.

    Args:
        rows: The rows.
        encoder: The encoder of the table.
        batch_size: Rows of a batch.
        generator: Draws a new order for every pass; None keeps the order of the rows.
    """

    def __init__(
        self,
        rows: Rows,
        encoder: "Encoder",
        batch_size: int,
        generator: torch.Generator | None = None,
    ):
        self.rows = rows
        self.encoder = encoder
        self.batch_size = batch_size
        self.generator = generator
        self.inputs = None
        if generator is not None and len(rows) * encoder.inputs <= ENCODED_VALUES:
            blocks = torch.arange(len(rows)).split(PREDICTED_ROWS)
            self.inputs = torch.cat([self._encode(block) for block in blocks])

    def __len__(self) -> int:
        return math.ceil(len(self.rows) / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.arange(len(self.rows))
        if self.generator is not None:
            order = torch.randperm(len(self.rows), generator=self.generator)
        for index in order.split(self.batch_size):
            inputs = self._encode(index) if self.inputs is None else self.inputs[index]
            yield inputs, self.rows.target[index]

    def _encode(self, index: Tensor) -> Tensor:
        return self.encoder(self.rows.numbers[index], self.rows.codes[index])


class Encoder(nn.Module):
    """Encode the two tensors of a table as inputs of a perceptron.

    Args:
        preprocessing: The learned encoding.
        bins: Whether to include the piecewise-linear encoding.

    A *ramp* is the position of a number in a bin: 0 at its left edge and 1 at its right edge,
    clipped. The number of bins differs between columns, so tensors are padded.

    Attributes:
        left: Left edge of each bin, ``(column, bin)``, padded with zeros.
        inverse_width: Inverse width of each bin; 0 in the padding.
        low: Lower bound of each ramp: 0, or -1 in the first bin, which extends to the left.
        high: Upper bound of each ramp: 1, or 2 in the last bin, which extends to the right; 0 in
            the padding.
        first_score: Score of the first edge, ``(column,)``.
        score_rise: Increase of the score from edge to edge, ``(column, bin)``.
        is_constant: Columns without a bin, ``(column,)``.
        bin_index: Positions of the bins in a flattened ``(column, bin)``, without the padding.
        missing_index: Columns with an indicator of missing numbers.
        slot_column: The categorical column of each one-hot input.
        slot_code: The code for which this input is 1.

    Shape:
        numbers ``(row, preprocessing.width)`` and codes ``(row, categorical column)`` become
        ``(row, input)``.
    """

    def __init__(self, preprocessing: Preprocessing, *, bins: bool = True):
        super().__init__()
        self.columns = len(preprocessing.numeric)
        self.categorical_columns = len(preprocessing.categorical)
        self.width = preprocessing.width
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
        high = torch.where(is_last, 2.0, 1.0)
        self.high = nn.Buffer(torch.where(is_bin, high, 0.0))
        self.first_score = nn.Buffer(scores[:, 0].nan_to_num(0.0))
        self.score_rise = nn.Buffer(torch.where(is_bin, scores.diff(dim=1), 0.0))
        self.is_constant = nn.Buffer(~is_bin.any(1))
        self.bin_index = nn.Buffer(is_bin.flatten().nonzero().squeeze(1))
        missing = [j for j, column in enumerate(preprocessing.numeric) if column.has_missing]
        self.missing_index = nn.Buffer(torch.tensor(missing, dtype=torch.int64))
        slots = []
        for j, column in enumerate(preprocessing.categorical):
            slots += [(j, code) for code in column.used_codes]
        self.slot_column = nn.Buffer(torch.tensor([j for j, _ in slots], dtype=torch.int64))
        self.slot_code = nn.Buffer(torch.tensor([code for _, code in slots], dtype=torch.int64))

    @property
    def inputs(self) -> int:
        """Number of inputs of the perceptron."""
        numbers = torch.zeros(1, self.width, dtype=self.left.dtype)
        codes = torch.zeros(1, self.categorical_columns, dtype=torch.int64)
        return self(numbers, codes).shape[1]

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        parts = self.encode_numbers(numbers[:, : self.columns])
        return torch.cat([*parts, *self.other_inputs(numbers, codes)], 1)

    def encode_numbers(self, numbers: Tensor) -> list[Tensor]:
        """Return scores, compressed numbers and bins, each ``(row, …)``."""
        # In place, because most of the time of an encoder goes into these tensors of all bins. The
        # bins of a constant column are padding, where ramps are 0.
        ramps = (numbers.unsqueeze(-1) - self.left).mul_(self.inverse_width)
        ramps = ramps.clamp_(self.low, self.high).nan_to_num_(0.0)
        scores = self.first_score + (ramps * self.score_rise).sum(-1)
        parts = [torch.where(self.is_ignored(numbers), 0.0, scores), self.compress(numbers)]
        if self.bins:
            parts.append(ramps.flatten(1).index_select(1, self.bin_index))
        return parts

    def is_ignored(self, numbers: Tensor) -> Tensor:
        """Return where inputs are 0: of missing numbers and of constant columns."""
        return torch.isnan(numbers) | self.is_constant

    def compress(self, numbers: Tensor) -> Tensor:
        """Return the numbers with outliers compressed, ``(row, column)``."""
        bounded = numbers.clamp(-1e6, 1e6)  # its square is finite in float32
        compressed = bounded * torch.rsqrt(1 + (bounded / 3).square())
        return torch.where(self.is_ignored(numbers), 0.0, compressed)

    def other_inputs(self, numbers: Tensor, codes: Tensor) -> list[Tensor]:
        """Return missing indicators, target statistics and categories, each ``(row, …)``."""
        parts = []
        if len(self.missing_index):
            parts.append(torch.isnan(numbers[:, self.missing_index]).type_as(numbers))
        parts.append(numbers[:, self.columns :])  # target statistics
        if len(self.slot_code):
            one_hot = codes[:, self.slot_column] == self.slot_code
            parts.append(one_hot.type_as(numbers))
        return parts


def _pad(rows: list[Tensor]) -> Tensor:
    """Stack vectors of different lengths, ``(vector, longest)``, padded with NaN."""
    longest = max([1, *(len(row) for row in rows)])
    padded = torch.full((len(rows), longest), math.nan)
    for j, row in enumerate(rows):
        padded[j, : len(row)] = row
    return padded


class Dropout(nn.Dropout):
    """Dropout with masks from random bytes, which takes about a fifth of the time on a CPU.

    The rate is a multiple of 1/256, for example 26/256 instead of 0.1. Outputs are scaled for this
    rate, so their expectation is the input.

    Example:
        >>> layer = Dropout(0.5)
        >>> layer(torch.ones(2, 3)).unique().tolist() in ([0.0], [2.0], [0.0, 2.0])
        True
    """

    is_elementwise = True  # a folded ensemble calls it as it calls nn.Dropout

    def forward(self, input: Tensor) -> Tensor:
        threshold = round(256 * self.p)
        if not self.training or threshold == 0:
            return input
        if threshold == 256:
            return input * 0
        words = torch.empty((input.numel() + 7) // 8, dtype=torch.int64, device=input.device)
        words.random_(torch.iinfo(torch.int64).min, None)
        random_bytes = words.view(torch.uint8)[: input.numel()].view(input.shape)
        # 0 for bytes below the threshold, else 1; faster than a comparison.
        keep = random_bytes.clamp_(threshold - 1, threshold).sub_(threshold - 1)
        return input * keep.to(input.dtype).mul_(256 / (256 - threshold))


def initialise_(module: nn.Module, generator: torch.Generator | None = None) -> None:
    """Draw the initial parameters of a layer: He et al. (2015), with small random biases."""
    if isinstance(module, nn.Linear):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu", generator=generator)
        nn.init.normal_(module.bias, std=0.1, generator=generator)
    elif isinstance(module, Periodic):
        module.reset_parameters(generator)


def build_network(
    encoder: Encoder,
    head: Head,
    arguments: Arguments,
    sizes: Sizes,
    generator: torch.Generator | None = None,
) -> nn.Sequential:
    """Build the reference network of a table.

    Args:
        encoder: The encoder of the table, which has the number of inputs.
        head: The head of the target, which has the number of outputs.
        arguments: Arguments of the estimator.
        sizes: Width and dropout rate.
        generator: Source of the initial weights.
    """
    network = nn.Sequential()
    inputs = encoder.inputs
    if arguments.numerical_embedding in ("periodic", "both") and encoder.columns:
        periodic = Periodic(encoder.columns, generator=generator)
        inputs += 2 * periodic.frequencies.numel()
        network.append(periodic)
    for _ in range(int(arguments.depth)):
        network.append(nn.utils.skip_init(nn.Linear, inputs, sizes.width))
        network.append(nn.ReLU())
        if sizes.dropout > 0:
            network.append(Dropout(sizes.dropout))
        inputs = sizes.width
    last_layer: Any = nn.utils.skip_init(nn.Linear, inputs, head.outputs)
    network.append(last_layer)
    for module in network.children():
        if isinstance(module, nn.Linear):
            initialise_(module, generator)
    if head.detached:
        network[-1] = DetachedOutputs(last_layer)
    return network


def embed(
    reference: nn.Sequential,
    head: Head,
    arguments: Arguments,
    sizes: Sizes,
    generator: torch.Generator | None = None,
) -> EmbeddedEnsemble:
    """Embed the ensemble of the chosen family in a reference network.

    Args:
        reference: The reference network.
        head: The head of the target, which has the default sites.
        arguments: Family, law, sites and per-member layers.
        sizes: Number of members and mean of the signs.
        generator: Source of the modulations and per-member weights.
    """
    members = sizes.members
    if arguments.family == "independent":
        return embens.independent(reference, members, initialise=initialise_, generator=generator)
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
    pre: Any = law
    post: Any = law
    if sites == "first":
        # Modulate the output of the first layer only: then its product is shared by all members.
        names = [name for name, part in reference.named_modules() if isinstance(part, nn.Linear)]
        pre = {names[0]: law}
        post = None
        sites = "hidden"
    own = ()
    if arguments.own:
        own = "last"
    return embens.embed(
        reference,
        members,
        pre=pre,
        post=post,
        sites=sites,
        own=own,
        own_weights=initialise_,
        generator=generator,
    )


def build_ensemble(prepared: "Prepared", sizes: Sizes) -> EmbeddedEnsemble:
    """Build the reference network and embed an ensemble in it."""
    generator = torch.Generator().manual_seed(prepared.seed)
    head, arguments = prepared.head, prepared.arguments
    reference = build_network(prepared.encoder, head, arguments, sizes, generator)
    reference = reference.to(prepared.train.numbers.dtype)
    return embed(reference, head, arguments, sizes, generator)


@torch.no_grad()
def predict_constant_(ensemble: EmbeddedEnsemble, outputs: Tensor) -> None:
    """Change the last layer so that every member returns the same outputs for every row.

    Args:
        ensemble: The ensemble, changed in place.
        outputs: ``(output,)``.
    """
    reference: Any = ensemble.reference
    last = str(len(reference) - 1)
    tensors = dict(ensemble.reference.named_parameters()) | ensemble.individual.tensors()
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        if layer == last:
            values = outputs
        elif layer == f"{last}.first":
            values = outputs[: len(outputs) // 2]
        elif layer == f"{last}.second":
            values = outputs[len(outputs) // 2 :]
        else:
            continue
        if kind == "weight":
            tensor.zero_()
        elif kind == "bias":
            tensor.copy_(values)
        else:
            tensor.fill_(1.0)  # a modulation of the outputs or of inputs that no longer count


@torch.no_grad()
def predict_rows(ensemble: EmbeddedEnsemble, encoder: Encoder, rows: Rows) -> Tensor:
    """Return the outputs of all members in evaluation mode, ``(member, row, output)``."""
    ensemble.eval()
    outputs = [ensemble(inputs) for inputs, _ in EncodedBatches(rows, encoder, PREDICTED_ROWS)]
    return torch.cat(outputs, 1)
