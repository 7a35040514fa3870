"""Layers of the reference network that only some arguments use."""

import math

import torch
from torch import Tensor, nn


class Periodic(nn.Module):
    r"""Append :math:`\sin` and :math:`\cos` of :math:`2\pi c\, x` for each of the first inputs x.

    The frequencies :math:`c` are trained, shared by all members, and initialised as
    :math:`N(0, \sigma^2)`.

    Args:
        columns: How many of the inputs to expand.
        frequencies: Frequencies for each of them.
        std: Their initial standard deviation.
        generator: Source of the initial frequencies.

    Shape:
        ``(row, input)`` becomes ``(row, input + 2 * columns * frequencies)``.
    """

    def __init__(
        self,
        columns: int,
        frequencies: int = 8,
        std: float = 0.3,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        self.columns = columns
        self.std = std
        self.frequencies = nn.Parameter(torch.empty(columns, frequencies))
        self.reset_parameters(generator)

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
        layer: A linear layer, whose weights are copied.
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
