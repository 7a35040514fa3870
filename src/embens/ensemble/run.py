"""How the members of one network are run: one pass over all members, chunk by chunk.

A pass goes through the network once for each chunk of members. Modules with numbers of their own
for every member are :class:`Individual`; before a chunk runs, the pass puts that chunk's numbers
into the :class:`Cursor`, which all modules of an ensemble share, and they read them there. A chunk
of several members is *folded* (``torch.func.vmap`` over the members' numbers, shared weights
unbatched) or goes member by member; the results are the same.

What no modulation lies before is the same for all members: a :class:`Once` module is computed in
the first chunk and remembered for the others, unless a random module before it draws separately
for each member.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

FOLDED_BYTES = {"cpu": 2**21, "cuda": 2**28}
"""The largest activation of a folded chunk, by device: on a CPU it should stay in the cache."""


class Cursor:
    """Where a pass stands: the numbers of the members that run now, and what they share."""

    def __init__(self) -> None:
        self.values: list[Tensor] | None = None
        self.store: Store | None = None
        self.folded = False
        self.open = False

    def missing(self) -> list[Tensor]:
        """Say why there are no numbers to multiply by."""
        raise RuntimeError(
            "a modulated layer was called outside a pass of its ensemble, so there is no "
            "member to run it for. Call the ensemble, or take ensemble.member(a). If the "
            "reference recomputes activations (torch.utils.checkpoint), pass "
            "recompute=True to embed."
        )

    def __deepcopy__(self, memo: dict) -> Cursor:
        return memo.setdefault(id(self), Cursor())

    def __reduce__(self):
        return Cursor, ()


class Individual(nn.Module):
    """A module with numbers of its own for every member.

    A subclass says in :meth:`stacks` which tensors it has, each with the members as its first
    axis, and finds those of the running member in ``self.mine()``.
    """

    cursor: Cursor
    slot: slice
    count: int = 1

    def stacks(self) -> list[Tensor]:
        """Return the tensors of all members for one pass."""
        raise NotImplementedError

    def mine(self) -> list[Tensor]:
        """Return the tensors of the member that is running."""
        values = self.cursor.values or self.cursor.missing()
        return values[self.slot]


class Store:
    """What the members of one pass share.

    With ``cut`` the outputs are cut off the graph, so that every chunk can be backpropagated on
    its own; :meth:`backward` then goes on to what came before. With ``copies`` every use gets a
    copy, for code that changes results in place.
    """

    def __init__(self, *, cut: bool = False, copies: bool = False) -> None:
        self.cut = cut
        self.copies = copies
        self.results: dict[tuple[int, int], Any] = {}
        self.counts: dict[int, int] = {}
        self.edges: list[tuple[Tensor, Tensor]] = []

    def restart(self) -> None:
        """Begin the next chunk."""
        self.counts.clear()

    def once(self, shared: Once, args: tuple, kwargs: dict) -> Any:
        """Return the module's output, computed at the first call of this kind in the pass."""
        count = self.counts.get(id(shared), 0)
        self.counts[id(shared)] = count + 1
        key = (id(shared), count)
        if key not in self.results:
            result = shared.module(*args, **kwargs)
            if not shared.keep:
                self.results[key] = None
                return result
            self.results[key] = tree_map(self._leaf, result) if self.cut else result
        elif not shared.keep:  # used by shared modules only, which won't look at it
            return next(v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor))
        result = self.results[key]
        return tree_map(_copied, result) if self.copies else result

    def _leaf(self, value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.requires_grad):
            return value
        leaf = torch.autograd.Variable(value.detach(), requires_grad=True)  # also under vmap
        self.edges.append((value, leaf))
        return leaf

    def backward(self) -> None:
        """Backpropagate what the chunks left at the cuts, each part of the graph once."""
        needs = {id(leaf): _leaves_before(value) for value, leaf in self.edges}
        waiting = list(self.edges)
        while waiting:
            later = {n for _, leaf in waiting for n in needs[id(leaf)]}
            ready = [edge for edge in waiting if id(edge[1]) not in later]
            waiting = [edge for edge in waiting if id(edge[1]) in later]
            ready = [(value, leaf.grad) for value, leaf in ready if leaf.grad is not None]
            if ready:
                values, gradients = zip(*ready, strict=True)
                torch.autograd.backward(values, gradients)

    def meets(self, losses: Tensor) -> bool:
        """Return whether losses and the cut results share a part of the graph that is freed."""
        common = set().union(*(_nodes_before(value) for value, _ in self.edges))
        common &= _nodes_before(losses)
        return any(not node.name().endswith("AccumulateGrad") for node in common)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


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


def _leaves_before(value: Tensor) -> set[int]:
    """Return the ids of the leaves that a value was computed from."""
    nodes = _nodes_before(value)
    return {id(node.variable) for node in nodes if hasattr(node, "variable")}


class Wrapper(nn.Module):
    """A module around another that looks like it from outside.

    Attributes that it does not have itself are those of the module inside.
    """

    def inner(self) -> nn.Module:
        """Return the module inside."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or not self.__dict__.get("_modules"):
                raise
            return self._inner_attribute(name)

    def _inner_attribute(self, name: str) -> Any:
        return getattr(self.inner(), name)


class Once(Wrapper):
    """A module whose output is the same for all members, computed once in a pass.

    Args:
        module: the module.
        cursor: the ensemble's.
        random: whether a random module (Dropout) comes before or lies in it, so that in training
            mode members differ after all.
        keep: whether anything but other shared modules uses its output; otherwise it need not be
            remembered.
    """

    def __init__(self, module: nn.Module, cursor: Cursor, *, random: bool, keep: bool):
        super().__init__()
        self.module = module
        self.cursor = cursor
        self.random = random
        self.keep = keep
        self.train(module.training)

    def inner(self) -> nn.Module:
        """Return the module inside."""
        return self.module

    def extra_repr(self) -> str:
        """Return the line that ``repr`` shows."""
        return "computed once for all members"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output."""
        store = self.cursor.store
        if store is None or (self.random and self.training):
            return self.module(*args, **kwargs)
        return store.once(self, args, kwargs)

    def __iter__(self) -> Iterator:
        return iter(self.module)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> Any:
        return self.module[index]  # type: ignore[index]


class Own(Individual):
    """A module some of whose tensors (given by name) have one value for every member.

    The module's own tensors of these names are stacks with the members first; a call puts the
    running member's in their place. In-place updates (running statistics) reach the stacks.
    """

    def __init__(self, module: nn.Module, names: Sequence[str], members: int):
        super().__init__()
        self.module = module
        self.names = tuple(names)
        self.count = len(self.names)
        for owner, name, tensor in self._tensors():
            stack = tensor.detach().expand(members, *tensor.shape).clone()
            if isinstance(tensor, nn.Parameter):
                stack = nn.Parameter(stack, tensor.requires_grad)
            setattr(owner, name, stack)
        self.train(module.training)

    def _tensors(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for path in self.names:
            owner_path, _, name = path.rpartition(".")
            owner = self.module.get_submodule(owner_path)
            yield owner, name, getattr(owner, name)

    def stacks(self) -> list[Tensor]:
        """Return the stacked tensors."""
        return [tensor for _, _, tensor in self._tensors()]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with the running member's tensors."""
        mine = dict(zip(self.names, self.mine(), strict=True))
        return torch.func.functional_call(self.module, mine, args, kwargs)

    def plain(self, member: int, memo: dict[int, Any]) -> nn.Module:
        """Return a copy of the module with the tensors of one member.

        ``memo`` is that of a deep copy of the whole network under way.
        """
        for _, _, stack in self._tensors():
            tensor = stack.detach()[member].clone()
            is_parameter = isinstance(stack, nn.Parameter)
            memo[id(stack)] = nn.Parameter(tensor, stack.requires_grad) if is_parameter else tensor
        return copy.deepcopy(self.module, memo)


class Pass:
    """A context that holds a pass open; nothing of it stays behind, whatever happens."""

    def __init__(self, cursor: Cursor, store: Store | None):
        self.cursor = cursor
        self.store = store

    def __enter__(self) -> None:
        if self.cursor.open:
            raise RuntimeError("an ensemble was called from inside its own pass")
        self.cursor.open, self.cursor.store = True, self.store

    def __exit__(self, *error: object) -> None:
        cursor = self.cursor
        cursor.values, cursor.store, cursor.folded, cursor.open = None, None, False, False


def gather(outputs: Sequence[Any], join: Callable[[list[Tensor]], Tensor]) -> Any:
    """Join the outputs of members (or of chunks) leaf by leaf."""
    if isinstance(outputs[0], Tensor):
        return join(list(outputs))
    flat = [tree_flatten(output) for output in outputs]
    spec = flat[0][1]
    leaves = [
        join(list(column)) if isinstance(column[0], Tensor) else column[0]
        for column in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    return tree_unflatten(leaves, spec)


def members_of(stack: Tensor) -> Sequence[Tensor]:
    """Return a stack as something to index by member: one node of the graph for all members."""
    if not stack.requires_grad:
        return stack  # type: ignore[return-value]
    return (stack.squeeze(0),) if stack.shape[0] == 1 else stack.unbind(0)


class CutStack:
    """A stack cut off the graph: each chunk of members is a leaf that collects its own gradient."""

    def __init__(self, stack: Tensor):
        self.stack = stack
        self.gradient = torch.zeros_like(stack) if stack.requires_grad else None

    def __getitem__(self, members: int | slice) -> Tensor:
        if self.gradient is None:
            return self.stack[members]
        leaf = self.stack.detach()[members].requires_grad_()
        leaf.grad = self.gradient[members]
        return leaf

    def backward(self) -> None:
        """Pass the gradient of all chunks on."""
        if self.gradient is not None:
            torch.autograd.backward(self.stack, self.gradient)


def run_member(
    network: nn.Module, cursor: Cursor, values: list, inputs: tuple, kwargs: dict
) -> Any:
    """Run the network for one member."""
    cursor.values = values
    if cursor.store is not None:
        cursor.store.restart()
    return network(*inputs, **kwargs)


def run_folded(
    network: nn.Module, cursor: Cursor, values: list, inputs: tuple, kwargs: dict, own: bool
) -> Any:
    """Run the network for several members at once; the outputs have them as their first axis."""
    structure: list[Any] = []

    def call(values: list[Tensor], inputs: tuple) -> Any:
        result = run_member(network, cursor, values, inputs, kwargs)
        if isinstance(result, Tensor):
            return result
        leaves, spec = tree_flatten(result)
        structure.extend(([x if not isinstance(x, Tensor) else None for x in leaves], spec))
        structure.append([isinstance(x, Tensor) for x in leaves])
        return tuple(x for x in leaves if isinstance(x, Tensor))

    cursor.folded = True
    in_dims = (0, tree_map(lambda x: 0 if own and isinstance(x, Tensor) else None, inputs))
    outputs = torch.func.vmap(call, in_dims, randomness="different")(values, inputs)
    if not structure:
        return outputs
    leaves, spec, is_tensor = structure
    tensors = iter(outputs)
    filled = [next(tensors) if t else x for x, t in zip(leaves, is_tensor, strict=True)]
    return tree_unflatten(filled, spec)


@contextmanager
def following_recomputation(cursor: Cursor, values: list[Tensor]) -> Iterator[None]:
    """Let activations that are recomputed in the backward pass be recomputed for their member.

    ``torch.utils.checkpoint`` saves the inputs of what it will recompute; unpacking any of them
    puts the cursor back to where it was.
    """

    def unpack(saved: Tensor) -> Tensor:
        cursor.values = values
        return saved

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        yield


def connect(cursor: Cursor, network: nn.Module) -> list[Individual]:
    """Give every individual module its place in the cursor; return them."""
    individuals = [m for m in network.modules() if isinstance(m, Individual)]
    start = 0
    for module in individuals:
        module.cursor = cursor
        module.slot = slice(start, start + module.count)
        start += module.count
    return individuals


def is_foldable(module: nn.Module) -> bool:
    """Return whether ``torch.func.vmap`` can ever go through a module."""
    unruly = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.SyncBatchNorm)
    cumulative = isinstance(module, nn.modules.batchnorm._NormBase) and module.momentum is None
    return not isinstance(module, unruly) and not cumulative


def updates_shared_statistics(module: nn.Module) -> bool:
    """Return whether a module, in training mode, updates statistics that all members share.

    ``torch.func.vmap`` can't.
    """
    return (
        isinstance(module, nn.modules.batchnorm._NormBase)
        and module.running_mean is not None
        and module.running_mean.dim() == 1
    )


def dependent_modules(network: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that run for every member, rather than once."""
    yield network
    if isinstance(network, Once) and not network.random:
        return
    for child in network.children():
        yield from dependent_modules(child)


def warn_unfoldable(error: Exception) -> None:
    """Say that members go one at a time from now on, and why."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    warnings.warn(
        "this network can't run several members at once (torch.func.vmap: "
        f"{reason}); its members run one after another from now on. Set ensemble.chunk = 1 to "
        "choose that yourself.",
        stacklevel=4,
    )
