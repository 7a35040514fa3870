"""Nested containers of tensors: joining the outputs of several calls, and counting rows."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


def gather(outputs: Sequence[Any], join: Callable[[list[Tensor]], Tensor]) -> Any:
    """Join nested outputs of the same structure, tensor by tensor.

    Args:
        outputs: one nested container of tensors per call, all with the same structure.
        join: joins the tensors at one place, for example ``torch.stack`` or ``torch.cat``.

    Returns:
        A container of the same structure. Leaves that are not tensors come from the first output.

    Example:
        >>> import torch
        >>> gather([{"y": torch.zeros(2)}, {"y": torch.ones(2)}], torch.stack)["y"].shape
        torch.Size([2, 2])
    """
    if isinstance(outputs[0], Tensor):
        return join(list(outputs))

    def join_leaves(*leaves: Any) -> Any:
        if isinstance(leaves[0], Tensor):
            return join(list(leaves))
        return leaves[0]

    return tree_map(join_leaves, *outputs)


def batch_size(values: Any) -> int:
    """Return the length of the first tensor with at least one axis, or 0 if there is none."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    return 0
