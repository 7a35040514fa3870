"""Split batches: row i of a batch goes to member i mod M."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from embens.trees import batch_size, check_same_structure, gather

if TYPE_CHECKING:
    from embens.ensemble.module import EmbeddedEnsemble


def run_split(ensemble: "EmbeddedEnsemble", inputs: tuple, kwargs: dict, chunk: int | None) -> Any:
    """Return the outputs of a split batch, in the order of its rows.

    Args:
        ensemble: The ensemble.
        inputs: Positional arguments of the reference.
        kwargs: Its keyword arguments.
        chunk: Number of members that run together; None: the ensemble's.
    """
    members, rows = ensemble.members, batch_size(inputs)
    has_named_tensors = any(isinstance(leaf, Tensor) for leaf in tree_leaves(kwargs))
    if rows == 0 or rows % members or has_named_tensors:
        return _run_unequal(ensemble, inputs, kwargs, rows)

    def deal(x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, members)).transpose(0, 1)

    outputs = ensemble.run(tree_map_only(Tensor, deal, inputs), kwargs, chunk, per_member=True)
    return tree_map_only(Tensor, lambda x: x.transpose(0, 1).flatten(0, 1), outputs)


def _run_unequal(ensemble: "EmbeddedEnsemble", inputs: tuple, kwargs: dict, rows: int) -> Any:
    """Run members one after another, as some have more rows than others."""
    members = ensemble.members
    values, computed = ensemble.sample_values(), ensemble.merged.begin()
    outputs = []
    for a in range(max(1, min(members, rows))):

        def rows_of_member(x: Tensor, a: int = a) -> Tensor:
            return x[a::members] if x.shape[:1] == (rows,) else x

        args, named = tree_map_only(Tensor, rows_of_member, (inputs, kwargs))
        outputs.append(ensemble.merged.run(a, args, named, values, computed))

    def interleave(parts: list[Tensor]) -> Tensor:
        output = torch.cat(parts)
        order = torch.arange(rows).remainder(members).argsort(stable=True).argsort()
        return output[order.to(output.device)] if len(output) == rows else output

    check_same_structure(outputs)
    return gather(outputs, interleave)
