"""Nested containers of tensors: joining outputs, and counting rows."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

_PLAIN = (bool, int, float, complex, str, bytes)


def gather(outputs: Sequence[Any], join: Callable[[list[Tensor]], Tensor]) -> Any:
    """Join nested outputs of the same structure, tensor by tensor.

    Args:
        outputs: One nested container of tensors per call, all with the same structure.
        join: Joins the tensors at one place, for example ``torch.stack`` or ``torch.cat``.

    Returns:
        A container of the same structure. Leaves that are not tensors are kept if they are equal;
        other objects, such as the caches of a language model, become None.

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
        if all(_is_equal(leaves[0], leaf) for leaf in leaves[1:]):
            return leaves[0]
        return None

    return tree_map(join_leaves, *outputs)


def join_members(outputs: list[Tensor]) -> Tensor:
    """Concatenate the outputs of chunks of members.

    Args:
        outputs: One tensor per chunk, members first.

    Raises:
        ValueError: If members differ in the shape of their outputs.
    """
    try:
        return torch.cat(outputs)
    except RuntimeError as error:
        # Shapes are compared only now: an exporter would fix the sizes that are compared.
        shapes = {tuple(output.shape[1:]) for output in outputs}
        if len(shapes) == 1:
            raise
        raise ValueError(
            f"members return outputs of different shapes, {sorted(shapes)}, which cannot be "
            "stacked. Return outputs whose shape does not depend on values."
        ) from error


def check_same_structure(outputs: Sequence[Any]) -> None:
    """Raise if outputs of several members cannot be joined.

    Args:
        outputs: One nested container of tensors per member.

    Raises:
        ValueError: If containers have different structures.
        TypeError: If plain values or arrays differ. Other objects may differ; see :func:`gather`.
    """
    if all(isinstance(output, Tensor) for output in outputs):
        return
    descriptions = []
    for output in outputs:
        leaves, structure = tree_flatten(output)
        are_tensors = [isinstance(leaf, Tensor) for leaf in leaves]
        plain_values = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        descriptions.append((structure, are_tensors, plain_values))
    first_structure, first_are_tensors, first_values = descriptions[0]
    for structure, are_tensors, values in descriptions[1:]:
        if structure != first_structure or are_tensors != first_are_tensors:
            raise ValueError(
                f"members return outputs of different structures, {first_structure} and "
                f"{structure}. Return outputs whose structure does not depend on values."
            )
        for first, value in zip(first_values, values, strict=True):
            is_data = isinstance(value, _PLAIN) or hasattr(value, "__array__")
            if is_data and not _is_equal(first, value):
                raise TypeError(
                    f"members return different values of type {type(value).__name__}, which "
                    "cannot be stacked. Return tensors."
                )


def _is_equal(first: Any, second: Any) -> bool:
    """Return whether two leaves are equal, where NaN (the value that differs from itself) is."""
    try:
        return first is second or bool(first == second) or bool(first != first and second != second)
    except Exception:  # arrays, and classes of the user, may raise anything
        return False


def batch_size(values: Any) -> int:
    """Return the length of the first tensor with at least one axis, or 0 if there is none.

    Args:
        values: Tensors in any containers.
    """
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    return 0
