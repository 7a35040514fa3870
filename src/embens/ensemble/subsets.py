"""Ensembles of some of the members of an ensemble."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from embens.ensemble.copies import copy_attributes
from embens.ensemble.extraction import index_of_member
from embens.graph.reading import copy_reference

if TYPE_CHECKING:
    from embens.ensemble.module import EmbeddedEnsemble


def subset(ensemble: "EmbeddedEnsemble", members: Iterable[int]) -> "EmbeddedEnsemble":
    """Return an ensemble of some of the members, which shares no tensor with this one.

    Args:
        ensemble: The ensemble.
        members: Indices of the members. A member that occurs twice counts twice in means.

    Returns:
        The smaller ensemble.

    Example:
        >>> from embens import batch_ensemble
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> batch_ensemble(net, members=8).subset([0, 3, 5]).members
        3
    """
    if not isinstance(members, Iterable):
        raise TypeError(f"members must be a list of indices, got {members!r}.")
    indices = [index_of_member(ensemble, a) for a in members]
    if not indices:
        raise ValueError("members must contain at least one index, got none.")
    spec = ensemble.spec.subset(indices)
    if spec.has_repeated_members and any(site.fresh for site in spec.sites):
        raise ValueError("a member whose modulations are drawn at each pass cannot occur twice.")
    values = _select_members(ensemble.individual.tensors(), indices)
    reference = copy_reference(ensemble.reference)
    smaller = type(ensemble)(reference, spec, values, ensemble.flow)
    smaller.chunk = ensemble.chunk
    if ensemble.generator_state is not None:
        smaller.generator_state = ensemble.generator_state.clone()
    attributes = ensemble.merged.member_attributes()
    smaller.merged.restore_attributes([copy_attributes(attributes[a]) for a in indices])
    return smaller


def _select_members(tensors: dict[str, Tensor], indices: Sequence[int]) -> dict[str, Tensor]:
    """Return the rows of some members; tied tensors stay tied."""
    values: dict[str, Tensor] = {}
    rows_of: dict[int, Tensor] = {}
    for name, stack in tensors.items():
        if id(stack) not in rows_of:
            rows = stack.detach()[list(indices)]
            if isinstance(stack, nn.Parameter):
                rows = nn.Parameter(rows, stack.requires_grad)
            rows_of[id(stack)] = rows
        values[name] = rows_of[id(stack)]
    return values
