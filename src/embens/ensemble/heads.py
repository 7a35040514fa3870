r"""Many inputs into one network: the first layers of MIMO (Havasi et al. 2021).

.. math:: z = b + \sum_a s_a W_a x_a

Every member has a block :math:`W_a` of a first layer's weights; the rest of the network runs once,
on the sum, up to last layers of the members' own. Where all members see one input, the blocks are
summed instead. The shares :math:`s_a` are 1, or drawn at each pass in training, with the sum M
(MixMo, Ramé et al. 2021).
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embens.ensemble.own import Own, call_with
from embens.reading.layers import spatial_axes

ROOT = 3
"""A member's loss has a weight proportional to this root of its share, as in the paper."""


class InputHeads(Own):
    """A first layer with a block of weights for every member, and one bias."""

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the sum over members of their blocks' outputs."""
        run = self.current.run or self.current.get()
        inputs = run.entered(self.slot, input)
        blocks: Any = self.module.weight
        if inputs is None:
            return call_with(self.module, {"weight": blocks.sum(0)}, (input, *args), kwargs)
        if run.shares is not None:
            blocks = blocks * run.shares.to(blocks).view(-1, *(1,) * (blocks.dim() - 1))
        if self._joins and not (args or kwargs):
            return self._join(inputs, blocks)
        total, tensors = None, {}
        for block, x in zip(blocks, inputs, strict=True):
            tensors["weight"] = block
            output = call_with(self.module, tensors, (x, *args), kwargs)
            total = output if total is None else total + output
            if getattr(self.module, "bias", None) is not None:  # only once
                tensors["bias"] = torch.zeros_like(self.module.bias)  # type: ignore[arg-type]
        assert total is not None
        return total

    @property
    def _joins(self) -> bool:
        """Whether it is the same layer on inputs that are joined along their channels."""
        kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
        grouped = getattr(self.module, "groups", 1) != 1
        return self._plain and isinstance(self.module, kinds) and not grouped

    def _join(self, inputs: list[Tensor], blocks: Tensor) -> Tensor:
        layer: Any = self.module
        spatial = spatial_axes(layer)
        x = torch.cat(inputs, -1 - spatial)
        weight, bias = blocks.transpose(0, 1).flatten(1, 2), layer.bias  # (out, member · in, …)
        if hasattr(layer, "effective_parameters"):
            weight, bias = layer.effective_parameters(weight, bias)
        return (layer._conv_forward if spatial else F.linear)(x, weight, bias)

    def plain(self, member: int | None, memo: dict[int, Any]) -> nn.Module:
        """Return a copy of the layer with the sum of all blocks, which every member has."""
        blocks: Any = self.module.weight
        memo[id(blocks)] = nn.Parameter(blocks.detach().sum(0), blocks.requires_grad)
        return copy.deepcopy(self.module, memo)


def draw_shares(members: int, concentration: float | None, like: Tensor) -> Tensor | None:
    """Return shares of mean 1, ``(member,)``; None: all are 1."""
    if concentration is None:
        return None
    shares = torch.full((members,), concentration, device=like.device)
    return members * torch.distributions.Dirichlet(shares, validate_args=False).sample()


def weigh(outputs: Tensor, shares: Tensor) -> Tensor:
    """Return outputs that pass back every member's gradient with the weight of its loss."""
    roots = shares ** (1 / ROOT)
    weights = roots / roots.mean()
    still = outputs.detach()
    return still + weights.to(outputs).view(-1, *(1,) * (outputs.dim() - 1)) * (outputs - still)
