"""What the members of one pass share: computed in the first chunk, kept for the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from embens.ensemble.layers import Once


class SharedResults:
    """What the members of one pass share.

    With ``cut`` the results are cut off the graph, so that every chunk can be backpropagated on
    its own; :meth:`backward` then goes on to what came before. With ``copies`` every use gets a
    copy, for code that changes results in place.
    """

    def __init__(self, *, cut: bool = False, copies: bool = False) -> None:
        self.cut = cut
        self.copies = copies
        self.found: dict[tuple[int, int], Any] = {}
        self.counts: dict[int, int] = {}
        self.cuts: list[list[tuple[Tensor, Tensor]]] = []  # results, and the leaves in their place
        self.met = 0

    def restart(self) -> None:
        """Begin the next chunk."""
        self.counts.clear()

    def once(self, once: Once, args: tuple, kwargs: dict) -> Any:
        """Return the module's output, computed at the first call of this kind in the pass."""
        count = self.counts.get(id(once), 0)
        self.counts[id(once)] = count + 1
        key = (id(once), count)
        if key not in self.found:
            result = once.module(*args, **kwargs)
            if not once.keep:
                self.found[key] = None
                return result
            self.found[key] = self._cut(result) if self.cut else result
        elif not once.keep:  # used by shared modules only, which won't look at it
            return next(v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor))
        result = self.found[key]
        return tree_map_only(Tensor, Tensor.clone, result) if self.copies else result

    def _cut(self, result: Any) -> Any:
        pairs: list[tuple[Tensor, Tensor]] = []

        def leaf(value: Tensor) -> Tensor:
            if not value.requires_grad:
                return value
            pairs.append((value, value.detach().requires_grad_()))
            return pairs[-1][1]

        result = tree_map_only(Tensor, leaf, result)
        self.cuts.append(pairs)
        return result

    def backward(self) -> None:
        """Backpropagate what the chunks left at the cuts, later results before earlier ones."""
        for later, cut in reversed(list(enumerate(self.cuts))):
            ready = [(value, leaf.grad) for value, leaf in cut if leaf.grad is not None]
            if ready:  # code outside of shared modules may lie behind several of the cuts
                values, gradients = zip(*ready, strict=True)
                torch.autograd.backward(values, gradients, retain_graph=later > 0)

    def meet(self, loss: Tensor) -> bool:
        """Return whether a loss and new cut results share a part of the graph that is freed."""
        new, self.met = self.cuts[self.met :], len(self.cuts)
        common = _nodes_before(value for cut in new for value, _ in cut)
        common &= _nodes_before([loss]) if common else set()
        return any(not node.name().endswith("AccumulateGrad") for node in common)


def _nodes_before(values: Iterable[Tensor]) -> set[Any]:
    """Return the nodes of the graph behind some values."""
    seen, nodes = set(), [value.grad_fn for value in values]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes.extend(parent for parent, _ in node.next_functions)
    return seen
