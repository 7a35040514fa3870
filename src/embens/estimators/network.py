r"""The reference network of a table: an encoding without parameters, then a perceptron.

A number :math:`x` of a column with edges :math:`e_0 < e_1 < \dots` becomes

.. math::
    \Big(s(x),\; \frac{x}{\sqrt{1 + x^2/9}},\;
    \Big[\tfrac{x - e_b}{e_{b+1} - e_b}\Big]_0^1,\; b = 0, 1, \dots\Big),

its score, itself with far values drawn in (Holzmüller et al., 2024), and its piecewise-linear
encoding (Gorishniy et al., 2022), where :math:`s` is linear between the edges and
:math:`[\cdot]_0^1` cuts off, the outer bins reaching one bin further. A missing number has zeros,
and an indicator of its own where the training part had some.
The encoding lies before all modulations, so it runs once for all members; ONNX has its operations.
"""

import math
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from embens import networks
from embens.estimators.choices import Options, Sizes
from embens.estimators.preprocessing import Preprocessing

TURNS = 4


class Encode(nn.Module):
    """Encode scaled numbers, statistics and codes, with or without the bins beside scores."""

    def __init__(self, preprocessing: Preprocessing, *, bins: bool = True):
        super().__init__()
        edges, scores = preprocessing.edges, preprocessing.scores
        width = edges.diff(dim=1)
        real = ~width.isnan() & (width > 0)
        self.bins = bins
        self.slot = nn.Buffer(torch.tensor([j for j, _ in preprocessing.slots], dtype=torch.int64))
        self.code = nn.Buffer(torch.tensor([c for _, c in preprocessing.slots], dtype=torch.int64))
        self.left = nn.Buffer(edges[:, :-1].nan_to_num(0.0))
        self.inverse = nn.Buffer(torch.where(real, 1 / width, 0.0))
        count = real.sum(1, keepdim=True)
        index = torch.arange(real.shape[1]).expand(real.shape)
        self.low = nn.Buffer(torch.where(real & (index == 0), -1.0, 0.0))
        self.high = nn.Buffer(torch.where(real, 1.0, 0.0) + (real & (index == count - 1)))
        self.start = nn.Buffer(scores[:, 0].nan_to_num(0.0))
        self.rise = nn.Buffer(torch.where(real, scores.diff(dim=1), 0.0))
        used = real.flatten().nonzero().squeeze(1)
        self.used = nn.Buffer(used if len(used) < real.numel() else used[:0])
        columns = [j for j, yes in enumerate(preprocessing.missing) if yes]
        self.missing = nn.Buffer(torch.tensor(columns, dtype=torch.int64))

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        parts, columns = [], len(self.start)
        statistics, numbers = numbers[:, columns:], numbers[:, :columns]
        if columns:
            absent = torch.isnan(numbers)
            filled = torch.where(absent, 0.0, numbers)
            ramps = (filled.unsqueeze(-1) - self.left) * self.inverse
            ramps = torch.minimum(torch.maximum(ramps, self.low), self.high)
            present = (~absent).to(ramps.dtype)
            parts.append((self.start + (ramps * self.rise).sum(-1)) * present)
            near = filled.clamp(-1e6, 1e6)
            parts.append(near * torch.rsqrt(1 + (near / 3).square()))
            if self.bins:
                ramps = (ramps * present.unsqueeze(-1)).flatten(1)
                parts.append(ramps.index_select(1, self.used) if len(self.used) else ramps)
            if len(self.missing):
                parts.append(absent.index_select(1, self.missing).to(ramps.dtype))
        parts.append(statistics)
        if len(self.slot):
            parts.append((codes.index_select(1, self.slot) == self.code).to(numbers.dtype))
        return torch.cat(parts, 1)


class Periodic(nn.Module):
    r"""Add :math:`\sin` and :math:`\cos` of :math:`2\pi c\, s` for each of the first inputs.

    The frequencies :math:`c` are trained, shared by all members, and start as
    :math:`N(0, \sigma^2)`.
    """

    def __init__(self, columns: int, frequencies: int = 8, std: float = 0.3):
        super().__init__()
        self.columns, self.std = columns, std
        self.frequencies = nn.Parameter(torch.empty(columns, frequencies))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        with torch.no_grad():
            self.frequencies.normal_(0, self.std, generator=generator)

    def forward(self, input: Tensor) -> Tensor:
        angle = 2 * math.pi * input[:, : self.columns].unsqueeze(-1) * self.frequencies
        return torch.cat([input, angle.sin().flatten(1), angle.cos().flatten(1)], 1)


class Dropout(nn.Dropout):
    """Dropout whose draws cost little; see :func:`dropout`."""

    def forward(self, input: Tensor) -> Tensor:
        return dropout(input, self.p) if self.training and self.p > 0 else input


def dropout(input: Tensor, p: float) -> Tensor:
    """Return the input with some numbers 0, by one random byte each, eight of them from one draw.

    The rate is rounded to 256ths, and the rest scaled by the rate as it is. On a processor torch's
    own mask takes a quarter of a step of a network this small. The rows of a large input take
    turns with a few masks, so that some members have the same ones. A mode that takes over torch's
    functions takes over this one.
    """
    if has_torch_function_unary(input):
        return handle_torch_function(dropout, (input,), input, p)
    turns = TURNS if input.dim() > 1 and len(input) % TURNS == 0 else 1
    count, cut = input.numel() // turns, min(255, max(1, round(256 * p)))
    draws = torch.randint(-(2**63), 2**63 - 1, (-(-count // 8),), device=input.device)
    keep = draws.view(torch.uint8)[:count] >= cut
    mask = keep.to(input.dtype).mul_(256 / (256 - cut))
    return (input.reshape(turns, -1) * mask).view(input.shape)


torch.fx.wrap("dropout")  # one operation to whoever reads the network's code


class TableNetwork(nn.Module):
    """Encoding and perceptron; a call takes the two tensors of a table."""

    def __init__(self, encode: Encode, body: nn.Sequential):
        super().__init__()
        self.encode, self.body = encode, body

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        return self.body(self.encode(numbers, codes))


def build(
    preprocessing: Preprocessing,
    head: Any,
    options: Options,
    sizes: Sizes,
    generator: torch.Generator | None = None,
) -> TableNetwork:
    """Build the reference network of a table."""
    embedding = options.numerical_embedding
    encode = Encode(preprocessing, bins=embedding in ("piecewise", "both"))
    codes = torch.zeros(1, len(preprocessing.categorical), dtype=torch.int64)
    x = encode(torch.zeros(1, preprocessing.numbers), codes)
    body = nn.Sequential()
    if embedding in ("periodic", "both") and preprocessing.numeric:
        periodic = Periodic(len(preprocessing.numeric))
        periodic.reset_parameters(generator)
        x = body.append(periodic)(x)
    perceptron = networks.mlp(
        *(x.shape[1], sizes.width, int(options.depth), head.outputs),
        weight_std=math.sqrt(2),
        bias_std=0.1,
        parametrization="standard",
        generator=generator,
    )
    for module in perceptron:
        body.append(module)
        if sizes.dropout > 0 and isinstance(module, nn.ReLU):
            body.append(Dropout(sizes.dropout))
    if head.detached:
        body[-1] = Detached(body[-1])
    return TableNetwork(encode, body)


class Detached(nn.Module):
    """A last layer in two halves, the second of which does not change what comes before."""

    def __init__(self, layer: Any):
        super().__init__()
        half = layer.out_features // 2
        self.first, self.second = (nn.Linear(layer.in_features, half) for _ in "ab")
        for mine, part in ((self.first, slice(half)), (self.second, slice(half, None))):
            mine.load_state_dict({k: v[part] for k, v in layer.state_dict().items()})

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([self.first(input), self.second(input.detach())], -1)
