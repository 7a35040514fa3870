r"""Networks with several inputs and outputs: MIMO (Havasi et al. 2021), MixMo (Ramé et al. 2021).

One network takes M inputs, concatenated along their channels, and has M outputs:

.. math:: z = b + \sum_a s_a W_a x_a, \qquad f_a = V_a\,\mathrm{trunk}(z) + c_a

The weight of the first layer consists of M blocks :math:`W_a`, with one bias. The last layer has M
heads. The trunk between them runs once. In training the M inputs are different samples; at test
time all of them are the same sample. The training loss is the sum of the members' losses,
each on the samples of that member.

MIMO has :math:`s_a = 1`. MixMo draws the mixing ratios :math:`\lambda` of each training batch from
a symmetric Dirichlet distribution (Beta(α, α) for two members), mixes with :math:`s_a = M
\lambda_a`, and weights the loss of member a by :math:`M \lambda_a^{1/3} / \sum_b \lambda_b^{1/3}`.
At test time :math:`s_a = 1`.

Differences from the papers: first and last layers are drawn by the reference's initialisation, the
blocks :math:`W_a` at :math:`1/\sqrt M` of its scale, so that activations keep their size. There is
no batch repetition. MixMo is the linear variant, with one λ per batch, for any number of members.
"""

import copy
import math

import torch
from torch import Tensor, nn
from torch.func import functional_call

import embens
from reproduction.systems.layers import LAYERS, first_layer, last_layer
from reproduction.systems.loop import Criterion
from reproduction.systems.separate import redraw


class MIMO(nn.Module):
    """Network with an input and an output for each member.

    With one member it is the reference.

    Args:
        reference: Network with one input and one output ``(batch, class)``; copied. Its trunk and
            the bias of its first layer are kept; no other layer may read the raw input.
        members: Number of inputs and outputs, M.
        mixing: Concentration α of the mixing ratios, 2 in the MixMo paper. None: MIMO.
        first: Name of the first layer, a Linear or Conv layer. None: the first one registered.
        last: Name of the last layer, a Linear layer. None: the last one registered.
        generator: Source of the new first and last layers.

    Shape:
        - input: ``(batch, …)``, the same for all members.
        - output: ``(member, batch, class)``.

    Example:
        >>> from functools import partial
        >>> from reproduction.systems.loop import Recipe, train
        >>> reference = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
        >>> network = MIMO(reference, members=2)
        >>> data = (torch.randn(32, 4), torch.randint(3, (32,)))
        >>> recipe = Recipe(epochs=2, batch_size=16)
        >>> order = partial(member_orders, members=2, repetition=0.25)
        >>> train(network.loss, recipe.optimizer(network.parameters()), data, recipe, order=order)
        >>> network(data[0]).shape
        torch.Size([2, 32, 3])
    """

    def __init__(
        self,
        reference: nn.Module,
        members: int = 4,
        *,
        mixing: float | None = None,
        first: str | None = None,
        last: str | None = None,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        if members < 1:
            raise ValueError(f"members must be a positive integer, got {members}.")
        if mixing is not None and mixing <= 0:
            raise ValueError(f"mixing must be positive or None, got {mixing}.")
        self.members = members
        self.mixing = mixing
        self.network = copy.deepcopy(reference)
        self.first = first_layer(reference) if first is None else first
        self.last = last_layer(reference) if last is None else last
        _widen_inputs_(self.network.get_submodule(self.first), members, generator)
        _widen_outputs_(self.network.get_submodule(self.last), members, generator)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of all members for the same inputs, in one pass.

        Args:
            x: Inputs, ``(batch, …)``.

        Returns:
            Outputs, ``(member, batch, class)``.
        """
        # Equal inputs: the sum of the blocks replaces M copies of the input.
        weight = self.network.get_parameter(f"{self.first}.weight")
        blocks = weight.unflatten(1, (self.members, -1))
        outputs = functional_call(self.network, {f"{self.first}.weight": blocks.sum(1)}, (x,))
        return self._separate(outputs)

    def forward_members(self, inputs: Tensor, shares: Tensor | None = None) -> Tensor:
        """Return the outputs of all members for per-member inputs.

        Args:
            inputs: Inputs, ``(member, batch, …)``.
            shares: Factors s of the members in the first layer, ``(member,)``. None: ones.

        Returns:
            Outputs, ``(member, batch, class)``.
        """
        if len(inputs) != self.members:
            raise ValueError(
                f"inputs must have shape ({self.members}, batch, …), got {tuple(inputs.shape)}."
            )
        if shares is not None:
            # The first layer is linear up to its bias, so scaling inputs scales the blocks.
            inputs = inputs * shares.view(-1, *[1] * (inputs.dim() - 1))
        concatenated = torch.cat(list(inputs), dim=self._channel_axis(inputs[0]))
        return self._separate(self.network(concatenated))

    def draw_shares(self) -> Tensor | None:
        """Return shares s of mean 1 from the mixing distribution, ``(member,)``; None for MIMO."""
        if self.mixing is None:
            return None
        concentration = torch.full((self.members,), float(self.mixing))
        return self.members * torch.distributions.Dirichlet(concentration).sample()

    def loss(self, inputs: Tensor, target: Tensor, criterion: Criterion | None = None) -> Tensor:
        """Return the training loss: the weighted sum over members of their losses.

        Args:
            inputs: Inputs, ``(member, batch, …)``.
            target: Targets, ``(member, batch)`` or ``(member, batch, class)``.
            criterion: Loss of one member; see ``embens.objective``.
        """
        shares = self.draw_shares()
        if shares is None:
            weights = torch.ones(self.members)
        else:
            shares = shares.to(inputs)
            weights = loss_weights(shares)
        outputs = self.forward_members(inputs, shares)
        total = outputs.new_zeros(())
        for a in range(self.members):
            total = total + weights[a] * embens.objective(outputs[a : a + 1], target[a], criterion)
        return total

    def _channel_axis(self, x: Tensor) -> int:
        """Return the axis along which the inputs of the members are concatenated."""
        first = self.network.get_submodule(self.first)
        if isinstance(first, nn.Linear) and x.shape[-1] * self.members == first.weight.shape[1]:
            return -1
        # Convolution, or a Flatten before a Linear layer, which keeps the blocks in order.
        return 1

    def _separate(self, outputs: Tensor) -> Tensor:
        """Reshape outputs ``(batch, member · class)`` to ``(member, batch, class)``."""
        return outputs.unflatten(-1, (self.members, -1)).movedim(-2, 0)


def loss_weights(shares: Tensor) -> Tensor:
    """Return MixMo's weights of the members' losses, of mean 1.

    Args:
        shares: Shares of the members in the mixed input, ``(member,)``.

    Example:
        >>> loss_weights(torch.tensor([1.0, 1.0]))
        tensor([1., 1.])
    """
    roots = shares ** (1 / 3)
    return roots / roots.mean()


def member_orders(
    rows: int, generator: torch.Generator, *, members: int, repetition: float = 0.0
) -> Tensor:
    """Return an order of the samples for each member; an ``order`` of ``loop.train``.

    Args:
        rows: Number of samples.
        generator: Source of randomness.
        members: Number of members.
        repetition: Fraction of the positions at which all members see the same sample.

    Returns:
        Sample indices, ``(member, row)``; each row of it is a permutation.

    Example:
        >>> member_orders(100, torch.Generator(), members=3, repetition=0.2).shape
        torch.Size([3, 100])
    """
    if not 0 <= repetition <= 1:
        raise ValueError(f"repetition must be a fraction from 0 to 1, got {repetition}.")
    common = torch.randperm(rows, generator=generator)
    # The positions are random, so that every batch has repeated samples.
    free = torch.randperm(rows, generator=generator)[round(repetition * rows) :]
    orders = common.repeat(members, 1)
    for a in range(1, members):
        shuffled = free[torch.randperm(len(free), generator=generator)]
        orders[a, free] = common[shuffled]
    return orders


@torch.no_grad()
def _widen_inputs_(layer: nn.Module, members: int, generator: torch.Generator | None) -> None:
    """Give a layer a block of input weights for each member."""
    if not isinstance(layer, LAYERS) or getattr(layer, "groups", 1) != 1:
        raise ValueError(f"the first layer must be Linear or Conv without groups, got {layer}.")
    if members == 1:
        return
    redrawn = redraw(layer, members, generator)
    blocks = [copied.get_parameter("weight") / math.sqrt(members) for copied in redrawn]
    layer.weight = nn.Parameter(torch.cat(blocks, dim=1))
    if isinstance(layer, nn.Linear):
        layer.in_features *= members
    else:
        layer.in_channels *= members


@torch.no_grad()
def _widen_outputs_(layer: nn.Module, members: int, generator: torch.Generator | None) -> None:
    """Give a layer a head for each member."""
    if not isinstance(layer, nn.Linear):
        raise ValueError(f"the last layer must be Linear, got {layer}.")
    if members == 1:
        return
    heads = redraw(layer, members, generator)
    layer.weight = nn.Parameter(torch.cat([head.get_parameter("weight") for head in heads]))
    if layer.bias is not None:
        layer.bias = nn.Parameter(torch.cat([head.get_parameter("bias") for head in heads]))
    layer.out_features *= members
