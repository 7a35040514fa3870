"""Arguments of a call: those of the ensemble, and those of the reference."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from embens.checks import check_choice
from embens.losses import BATCH_KINDS


def bind_inputs(reference: nn.Module, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call for inputs as data sets hold them.

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
        TypeError: If an integer ``chunk`` may be meant for either.
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
