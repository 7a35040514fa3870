"""What the members of one pass share: computed in the first chunk, kept for the others."""

from __future__ import annotations

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
        self.edges: list[tuple[Tensor, Tensor]] = []
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
            self.found[key] = tree_map_only(Tensor, self._leaf, result) if self.cut else result
        elif not once.keep:  # used by shared modules only, which won't look at it
            return next(v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor))
        result = self.found[key]
        return tree_map_only(Tensor, Tensor.clone, result) if self.copies else result

    def _leaf(self, value: Tensor) -> Tensor:
        if not value.requires_grad:
            return value
        leaf = value.detach().requires_grad_()
        self.edges.append((value, leaf))
        return leaf

    def backward(self) -> None:
        """Backpropagate what the chunks left at the cuts, each part of the graph once."""
        needs = {
            id(leaf): {id(n.variable) for n in _nodes_before(value) if hasattr(n, "variable")}
            for value, leaf in self.edges
        }  # the leaves that each value was computed from
        waiting = list(self.edges)
        while waiting:
            later = {n for _, leaf in waiting for n in needs[id(leaf)]}
            ready = [edge for edge in waiting if id(edge[1]) not in later]
            waiting = [edge for edge in waiting if id(edge[1]) in later]
            ready = [(value, leaf.grad) for value, leaf in ready if leaf.grad is not None]
            if ready:
                values, gradients = zip(*ready, strict=True)
                # Code outside of shared modules may lie behind several of the cuts.
                torch.autograd.backward(values, gradients, retain_graph=bool(waiting))

    def meet(self, losses: Tensor) -> bool:
        """Return whether losses and new cut results share a part of the graph that is freed."""
        if len(self.edges) == self.met:
            return False
        self.met = len(self.edges)
        common = set().union(*(_nodes_before(value) for value, _ in self.edges))
        common &= _nodes_before(losses)
        return any(not node.name().endswith("AccumulateGrad") for node in common)


def _nodes_before(value: Tensor) -> set[Any]:
    """Return the nodes of the graph behind a value."""
    seen: set[Any] = set()
    nodes = [value.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes.extend(parent for parent, _ in node.next_functions)
    return seen
