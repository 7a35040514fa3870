"""Arguments of a call: bind, check and copy those of the reference."""

import copy
import inspect
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from embens.checks import check_choice
from embens.graph.captures import memory_of
from embens.graph.snapshots import PLAIN, attributes_of
from embens.losses import BATCH_KINDS

_PASSED_ON = (nn.Module, FunctionType, MethodType, BuiltinFunctionType, type, torch.Generator)
"""Arguments that all members get as they are."""


def bind_inputs(reference: nn.Module, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments for the inputs of a data set.

    Args:
        reference: The network that is called.
        inputs: A tuple or list of positional arguments, a dictionary of keyword arguments, or a
            single argument.

    Returns:
        Positional and keyword arguments.

    Raises:
        TypeError: If a dictionary does not fit the forward of the reference.
    """
    if isinstance(inputs, (tuple, list)) and not isinstance(inputs, PackedSequence):
        return tuple(inputs), {}
    if not isinstance(inputs, Mapping):
        return (inputs,), {}
    signature = inspect.signature(reference.forward)
    try:
        bound = signature.bind(**inputs)
    except TypeError as error:
        names = ", ".join(repr(name) for name in inputs)
        raise TypeError(
            f"the inputs {names} do not fit the reference, which takes {signature}: {error}."
        ) from None
    return bound.args, bound.kwargs


def separate_arguments(
    reference: nn.Module, batch: Any, chunk: Any, kwargs: dict[str, Any]
) -> tuple[Any, int | None]:
    """Pass ``batch`` and ``chunk`` on to a reference whose forward has arguments of these names.

    Args:
        reference: The network that is called.
        batch: Value of ``batch`` in the call of the ensemble.
        chunk: Value of ``chunk`` in the call of the ensemble.
        kwargs: Keyword arguments of the reference; changed in place.

    Returns:
        ``batch`` and ``chunk`` for the ensemble.

    Raises:
        TypeError: If ``chunk`` is an integer and the reference has an argument ``chunk``.
    """
    names = inspect.signature(reference.forward).parameters
    if "batch" in names and not isinstance(batch, str):
        kwargs["batch"] = batch
        batch = "same"
    if "chunk" in names and chunk is not None:
        if isinstance(chunk, int):
            raise TypeError(
                f"chunk={chunk} may be meant for the ensemble or for the reference, which has an "
                "argument of this name. Pass it by position, or set ensemble.chunk."
            )
        kwargs["chunk"] = chunk
        chunk = None
    return batch, chunk


def check_rows(inputs: tuple[Any, ...], batch: str, members: int) -> None:
    """Raise ValueError if inputs have the wrong first axis for ``batch="own"`` or ``"split"``.

    Args:
        inputs: Positional arguments of the reference.
        batch: How rows are assigned to members.
        members: Number of members.
    """
    check_choice("batch", batch, BATCH_KINDS)
    shapes = [tuple(leaf.shape) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    if not shapes:
        raise ValueError(f"batch={batch!r} needs a tensor among the positional inputs.")
    first_axes = {shape[:1] for shape in shapes}
    if batch == "own" and first_axes != {(members,)}:
        raise ValueError(
            f"batch='own' expects inputs of shape ({members}, batch, …), a batch for each member, "
            f"got {shapes}. For one batch use batch='same' or 'split'."
        )
    if len(first_axes) > 1:
        raise ValueError(f"batch='split' expects equal numbers of rows, got shapes {shapes}.")


def private_arguments(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Return copies of arguments, so that a member's changes do not reach others or the caller.

    A tensor that occurs twice is copied once. Views of one tensor stay views of one copy, unless
    they have gradients. Other objects, such as a cache that a network fills, are copied with the
    tensors in their attributes.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        Copies of both.
    """
    copies: dict[int, Any] = {}
    leaves = tree_leaves((args, kwargs))
    copies.update(_private_views(leaves))
    for leaf in leaves:
        if id(leaf) in copies:
            continue
        if isinstance(leaf, Tensor):
            copies[id(leaf)] = _private_tensor(leaf)
        elif not isinstance(leaf, (*PLAIN, *_PASSED_ON)):
            copies[id(leaf)] = _private_object(leaf, copies)
    return tree_map(lambda leaf: copies.get(id(leaf), leaf), (args, kwargs))


def _private_views(leaves: list[Any]) -> dict[int, Tensor]:
    """Return copies of the tensors that share memory with others, by ``id``."""
    by_memory: dict[int, dict[int, Tensor]] = {}
    if not torch.compiler.is_compiling():
        for leaf in leaves:
            if type(leaf) is Tensor and not leaf.requires_grad:
                by_memory.setdefault(memory_of(leaf), {})[id(leaf)] = leaf
    by_memory.pop(0, None)
    copies = {}
    memo: dict[int, Any] = {}  # with a common one, deepcopy keeps what the tensors share
    for views in by_memory.values():
        if len(views) > 1:
            for view in views.values():
                copies[id(view)] = copy.deepcopy(view, memo)
    return copies


def _private_tensor(x: Tensor) -> Tensor:
    """Return a copy of a tensor with the attributes that the user has set."""
    copied = x.clone()
    if not torch.compiler.is_compiling() and type(x) is Tensor and vars(x):
        vars(copied).update(tree_map_only(Tensor, Tensor.clone, vars(x)))
    return copied


def _held_tensors(value: Any, visited: set[int]) -> Iterator[Tensor]:
    """Yield the tensors in containers and in attributes of objects."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif id(leaf) not in visited and not isinstance(leaf, (*PLAIN, *_PASSED_ON)):
            visited.add(id(leaf))
            yield from _held_tensors([item for _, item in attributes_of(leaf)], visited)


def _private_object(argument: Any, copies: dict[int, Any]) -> Any:
    memo = dict(copies)
    for tensor in _held_tensors(argument, set()):  # deepcopy would cut their gradients
        memo.setdefault(id(tensor), tensor.clone())
    try:
        return copy.deepcopy(argument, memo)
    except Exception as error:  # its class may raise anything
        raise TypeError(
            f"an argument of type {type(argument).__name__} cannot be copied for each member: "
            f"{error}. Pass tensors, or containers of tensors."
        ) from error
