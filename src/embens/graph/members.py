"""The folded network, one pass through it, and the functions that its suffix calls.

The rows of each member are a consecutive block of the first axis. If ``is_shared``, the input has a
single block of rows, the same for all members.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F

FOLDED_BYTES = {"cpu": 3 * 2**20, "cuda": 2**28}
"""Largest activation of a folded chunk, by device. On a CPU it should stay in the cache."""

MERGING_RATIO = 2
"""Modulations are merged into weights that are smaller than activations by this factor.

Otherwise activations are modulated: one product of all rows with the shared weight is faster than a
product for each member.
"""

FREED_BYTES = 24 * 2**20
"""Size of a block that is allocated and freed before the first training pass of a process.

A step saves the activations of all members and frees them in its backward pass. The allocator of
glibc returns large freed blocks to the system, which clears the same pages again for the next step;
this takes up to a tenth of the step of a small network. But it keeps twice the size of the largest
block that was freed before. The pages of this block are never touched. Other allocators, and
settings of the user such as ``MALLOC_TRIM_THRESHOLD_``, are not affected.
"""


@dataclass
class Folded:
    """A folded network.

    Attributes:
        prefix: Computes the shared values; takes the tensors, then the arguments.
        suffix: Computes the outputs of a chunk; takes the number of members, the shared values, the
            tensors and the members' values.
        arguments: Names of the arguments that the prefix takes.
        tensors: Modules of the reference and names of their parameters and buffers that both graphs
            take.
        values: Names of the members' values that the suffix takes.
        has_convolutions: Whether a convolution runs for each member.
        has_positions: Whether layers that run for each member have values with more axes than rows
            and channels, such as pixels or tokens.
        width: Largest number of channels of the layers that run for each member.
    """

    prefix: torch.fx.GraphModule
    suffix: torch.fx.GraphModule
    arguments: list[str]
    tensors: list[tuple[nn.Module, str]]
    values: list[str]
    has_convolutions: bool
    has_positions: bool
    width: int

    def default_chunk(self, arguments: list[Tensor], members: int) -> int:
        """Return how many members run together: as many as keep activations small.

        Args:
            arguments: Tensor arguments of one member.
            members: Number of members.
        """
        if members == 1 or torch.compiler.is_compiling() or not arguments:
            return members
        x = arguments[0]
        device = x.device.type
        if self.has_convolutions and device == "cpu":
            return 1  # large batches of images leave the cache
        positions = x.numel()
        if not self.has_positions and x.dim() > 0:
            positions = len(x)  # such as the features of images, before a last layer
        elif x.is_floating_point() and x.dim() > 1:  # indices and vectors have no channels
            channels = x.shape[1] if self.has_convolutions else x.shape[-1]
            positions //= max(1, channels)
        activation_bytes = positions * self.width * 4
        largest = FOLDED_BYTES.get(device, FOLDED_BYTES["cuda"]) // max(1, activation_bytes)
        largest = max(1, min(members, largest))
        chunks = math.ceil(members / largest)
        return math.ceil(members / chunks)  # chunks of nearly equal size


class FoldedPass:
    """One pass through a folded network.

    Args:
        folded: The network.
        arguments: Tensor arguments.
        values: Values of all members by name.
        members: Number of members.
        per_member: Whether arguments have the members as their first axis.

    Attributes:
        shared: Outputs of the prefix, computed once for all members. It is empty if ``per_member``;
            then each chunk runs the prefix on the arguments of its members.
    """

    def __init__(
        self,
        folded: Folded,
        arguments: list[Tensor],
        values: dict[str, Tensor],
        members: int,
        *,
        per_member: bool = False,
    ):
        self.members = members
        self.folded = folded
        self.arguments = arguments
        self.per_member = per_member
        self.values = [values[name] for name in folded.values]
        self.tensors = [getattr(module, name) for module, name in folded.tensors]
        self.shared: Any = ()
        if members > 1 and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            keep_freed_memory()
        if not per_member:
            self.shared = folded.prefix.forward(*self.tensors, *arguments)

    def run(self, start: int, count: int) -> Any:
        """Return the outputs of a chunk of members, members first."""
        values = self.values
        if count != self.members:
            values = [value.narrow(0, start, count) for value in values]
        return self._run(start, count, values)

    def run_chunks(self, chunks: list[tuple[int, int]]) -> Iterator[Any]:
        """Yield the outputs of chunks that contain all members in order.

        Args:
            chunks: First member and number of members of each chunk.
        """
        if len(chunks) == 1:
            yield self._run(0, self.members, self.values)
            return
        counts = [count for _, count in chunks]
        parts = [split_members(value, counts) for value in self.values]
        for index, (start, count) in enumerate(chunks):
            yield self._run(start, count, [part[index] for part in parts])

    def _run(self, start: int, count: int, values: list[Tensor]) -> Any:
        shared = self.shared
        if self.per_member:
            rows = [x.narrow(0, start, count).flatten(0, 1) for x in self.arguments]
            shared = self.folded.prefix.forward(*self.tensors, *rows)
        return self.folded.suffix.forward(count, *shared, *self.tensors, *values)


@functools.cache
def keep_freed_memory() -> None:
    """Let the process keep up to 48 MiB of freed memory; see :data:`FREED_BYTES`."""
    torch.empty(FREED_BYTES, dtype=torch.uint8, device="cpu")


def split_members(values: Tensor, counts: list[int]) -> Sequence[Tensor]:
    """Return the values of chunks of members.

    The backward pass of a split joins the gradients once. That of a slice would allocate a tensor
    for all members. Buffers are sliced, as the parts of a split cannot be changed in place.

    Args:
        values: Values of all members, members first.
        counts: Number of members of each chunk.
    """
    if values.requires_grad:
        return values.split(counts)
    starts = itertools.accumulate(counts[:-1], initial=0)
    return [values.narrow(0, start, count) for start, count in zip(starts, counts, strict=True)]


# Modulations


def repeat_rows(x: Tensor, count: int) -> Tensor:
    """Repeat the rows of a batch as a block for each member."""
    if count == 1:
        return x
    return x.unsqueeze(0).expand(count, *x.shape).flatten(0, 1)


def whole_blocks(x: Tensor, count: int) -> Tensor:
    """Return a reshaped value; raise if a row holds elements of several members."""
    if x.shape[0] % count:
        raise RuntimeError(
            f"the reference reshapes a batch to rows of {x[0].numel()} elements, but the number of "
            "elements of one member is not divisible by it."
        )
    return x


def squeezed(x: Tensor, rank: int) -> Tensor:
    """Return a squeezed value; raise if the axis was not removed."""
    if x.dim() != rank:
        raise RuntimeError(
            f"the reference squeezes an axis with more than one element, of a value of shape "
            f"{tuple(x.shape)}. Squeeze axes of size 1 only."
        )
    return x


def unfold_members(x: Tensor, count: int) -> Tensor:
    """Return ``(member, row, …)`` for blocks of rows."""
    if count == 1:
        return x.unsqueeze(0)
    return x.unflatten(0, (count, -1))


def scale_members(
    x: Tensor, values: Tensor, count: int, spatial: int, repeat: int, is_shared: bool
) -> Tensor:
    """Multiply the rows of each member by its values.

    Args:
        x: ``(member · row, …, channel, position…)``; without members if ``is_shared``.
        values: ``(member, size)``.
        count: Number of members.
        spatial: Number of axes after the channels.
        repeat: Number of consecutive features per value.
        is_shared: Whether ``x`` has one block of rows for all members.
    """
    if values.dtype is not x.dtype:
        values = values.to(x.dtype)
    if repeat > 1:
        values = values.repeat_interleave(repeat, dim=1)
    if count == 1:
        return x * values.view(-1, *(1,) * spatial) if spatial or x.dim() < 2 else x * values
    if not is_shared:
        x = x.unflatten(0, (count, -1))
        rank = x.dim()
    else:
        rank = x.dim() + 1
    if rank == 3 and not spatial:
        values = values.unsqueeze(1)
    else:
        middle = (1,) * (rank - 2 - spatial)
        values = values.view(count, *middle, values.shape[1], *(1,) * spatial)
    return (x * values).flatten(0, 1)


def modulated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pre: Tensor | None,
    post: Tensor | None,
    repeat: int,
    count: int,
    is_shared: bool,
) -> Tensor:
    """Apply a Linear layer with modulated inputs and outputs.

    Activations are multiplied, or the weights of the members if these are much smaller.

    Args:
        x: ``(member · row, …, feature)``; without members if ``is_shared``.
        weight: Shared weight ``(output, input)``.
        bias: Shared bias, or None.
        pre: Values of the outputs, ``(member, output)``, or None.
        post: Values of the inputs, ``(member, input / repeat)``, or None.
        repeat: Number of consecutive inputs per value of ``post``.
        count: Number of members.
        is_shared: Whether ``x`` has one block of rows for all members.
    """
    if not is_shared and pre is not None and merges_weights(x, weight, count):
        weights = merged_weights(weight, pre, post, repeat)
        return apply_weights(x, weights, None if bias is None else pre * bias, count)
    if post is not None:
        x = scale_members(x, post, count, 0, repeat, is_shared)
        is_shared = False
    x = F.linear(x, weight, bias)
    if pre is None:
        return x
    return scale_members(x, pre, count, 0, 1, is_shared)


def merges_weights(x: Tensor, weight: Tensor, count: int) -> bool:
    """Return whether the weights of the members are much smaller than the activations.

    A compiled graph has to be valid for any number of rows, so it does not compare sizes.

    Args:
        x: ``(member · row, …, feature)``.
        weight: Shared weight ``(output, input)``.
        count: Number of members.
    """
    if torch.compiler.is_compiling():
        return False
    activations = x.numel() // x.shape[-1] * sum(weight.shape)
    return activations > MERGING_RATIO * count * weight.numel()


def apply_weights(x: Tensor, weights: Tensor, biases: Tensor | None, count: int) -> Tensor:
    """Apply a Linear layer with a weight for each member.

    Args:
        x: ``(member · row, …, input)``.
        weights: ``(member, input, output)``.
        biases: ``(member, output)`` or None.
        count: Number of members.
    """
    if biases is not None:
        biases = biases.to(weights.dtype)
    if count == 1:
        return F.linear(x, weights[0].t(), None if biases is None else biases[0])
    rows = x.reshape(count, -1, x.shape[-1])
    if biases is None:
        outputs = torch.bmm(rows, weights)
    else:
        outputs = torch.baddbmm(biases.unsqueeze(1), rows, weights)
    return outputs.view(*x.shape[:-1], -1)


def merged_weights(weight: Tensor, pre: Tensor, post: Tensor | None, repeat: int) -> Tensor:
    """Return the weights of the members of a Linear layer, ``(member, input, output)``.

    The gradient of a product of rows with weights has this order of axes. So both arguments of the
    elementwise operations in the backward pass are contiguous.
    """
    scales = pre.to(weight.dtype).unsqueeze(1)
    if post is not None:
        post = post.to(weight.dtype)
        if repeat > 1:
            post = post.repeat_interleave(repeat, dim=1)
        scales = post.unsqueeze(2) * scales
    return weight.t().contiguous() * scales


# Separate and low-rank weights


def member_rows(x: Tensor, count: int, is_shared: bool) -> Tensor:
    """Return ``(member, row, feature)`` for the rows of some members."""
    if is_shared:
        rows = x.reshape(-1, x.shape[-1])
        return rows.expand(count, *rows.shape)
    return x.reshape(count, -1, x.shape[-1])


def joined_rows(products: Tensor, x: Tensor, is_shared: bool) -> Tensor:
    """Return ``(member, row, feature)`` as blocks of rows with the axes of the input ``x``."""
    rows = products.flatten(0, 1)
    if torch.compiler.is_exporting():
        # The exporter does not know that a view of any number of rows is contiguous.
        rows = rows.clone(memory_format=torch.contiguous_format)
    if x.dim() == 2:
        return rows
    row_count = x.shape[0]
    if is_shared:
        row_count = row_count * products.shape[0]
    return rows.unflatten(0, (row_count, *x.shape[1:-1]))


def member_linear(
    x: Tensor, weights: Tensor, biases: Tensor | None, count: int, is_shared: bool
) -> Tensor:
    """Apply ``(member, out, in)`` weights and ``(member, out)`` or ``(out,)`` biases."""
    rows = member_rows(x, count, is_shared)
    if biases is None:
        products = torch.bmm(rows, weights.mT)
    else:
        if biases.dim() == 2:
            biases = biases.unsqueeze(1)
        biases = biases.expand(count, rows.shape[1], weights.shape[1])
        products = torch.baddbmm(biases, rows, weights.mT)
    return joined_rows(products, x, is_shared)


def low_rank_weights(weight: Tensor, left: Tensor, right: Tensor, kind: str) -> Tensor:
    r"""Return :math:`W \circ (1 + B_a A_a)` or :math:`W + B_a A_a`, members first."""
    delta = (left @ right).view(-1, *weight.shape)
    if kind == "multiplicative":
        return weight * (1 + delta)
    return weight + delta


def low_rank_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    left: Tensor,
    right: Tensor,
    count: int,
    is_shared: bool,
) -> Tensor:
    r"""Apply :math:`W + B_a A_a`; ``left`` stacks the :math:`B_a`, ``right`` the :math:`A_a`.

    With few rows :math:`W x + B_a (A_a x)` is cheaper than building the weights of each member. The
    bound was measured on a CPU.
    """
    row_count = x.numel() // x.shape[-1]
    rows_per_member = row_count if is_shared else row_count // count
    if not torch.compiler.is_compiling() and rows_per_member > 2 * weight.shape[0]:
        weights = low_rank_weights(weight, left, right, "additive")
        return member_linear(x, weights, bias, count, is_shared)
    shared = member_rows(F.linear(x, weight, bias), count, is_shared)
    rows = member_rows(x, count, is_shared)
    products = torch.baddbmm(shared, rows @ right.mT, left.mT)
    return joined_rows(products, x, is_shared)


def blocks_of(x: Tensor, count: int, is_shared: bool) -> list[Tensor]:
    """Return the rows of each member."""
    if is_shared:
        return [x] * count
    return list(x.chunk(count)) if count > 1 else [x]


def member_embedding(x: Tensor, weights: Tensor, count: int, is_shared: bool) -> Tensor:
    """Look indices up in ``(member, index, feature)`` tables."""
    indices = x.expand(count, *x.shape) if is_shared else x.view(count, -1, *x.shape[1:])
    first = torch.arange(count, device=x.device) * weights.shape[1]
    indices = indices + first.view(-1, *(1,) * (indices.dim() - 1))
    return F.embedding(indices, weights.flatten(0, 1)).flatten(0, 1)
