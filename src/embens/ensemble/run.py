"""One pass of an ensemble: which members run now, with which numbers, on which rows.

A pass goes through the network once for each chunk of members. Modules that differ between members
find the :class:`Run` that is open in their thread and ask it for their numbers. A chunk of m
members runs *folded*, as one batch of m·B rows, or member by member; the results are the same.

What no modulation lies before is the same for all members: it is computed in the first chunk and
kept for the others (:class:`SharedResults`), and rows are repeated where members begin to differ.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from embens.ensemble.shared import SharedResults
from embens.objective import BatchKind
from embens.reading.attention import Unfoldable

if TYPE_CHECKING:
    from embens.ensemble.module import EmbeddedEnsemble
    from embens.ensemble.wrapping import Individual


class Entered(Exception):
    """All first layers have a member's input: the pass need not go on for it."""


class Way(Enum):
    """How a chunk of several members runs."""

    EACH = "member by member"
    SHARED = "as one batch, with what they share at its own rows"
    REPEATED = "as one batch, everything repeated for each member"
    REPEATED_INPUTS = "as one batch, positional inputs repeated for each member"


class Current(threading.local):
    """The run that is open in this thread; all modules of an ensemble hold the same one."""

    def __init__(self) -> None:
        self.run: Run | None = None  # in every thread; compiled code looks for it

    def get(self) -> Run:
        """Return the run, or say why there is none."""
        if self.run is None:
            raise RuntimeError(
                "a modulated layer was called outside a pass of its ensemble, so there is no "
                "member to run it for. Call the ensemble, or take ensemble.member(a). Where "
                "activations are recomputed, let the code of a module call torch.utils.checkpoint."
            )
        return self.run

    def __deepcopy__(self, memo: dict) -> Current:
        return memo.setdefault(id(self), Current())

    def __reduce__(self):
        return Current, ()


class Run:
    """A pass, as a context: nothing of it stays behind, whatever happens.

    ``chunk`` members run together; with ``cut`` what they share is cut off the graph, for
    :meth:`backward`. For ``batch`` see :meth:`EmbeddedEnsemble.forward`.
    """

    def __init__(
        self,
        ensemble: EmbeddedEnsemble,
        inputs: tuple,
        kwargs: dict,
        *,
        batch: BatchKind = "same",
        chunk: int = 1,
        cut: bool = False,
    ):
        self.ensemble, self.members = ensemble, ensemble.members
        self.inputs, self.kwargs = inputs, kwargs
        self.batch: BatchKind = batch
        self.chunk, self.cut, self.open = chunk, cut, False
        self.start, self.count = 0, 1  # the first member that runs now, and how many
        self.rows = 0  # how many samples a member has in a folded chunk
        self.common = False  # rows are the input's up to the first modulations, not each member's
        self.given: Sequence[Tensor] | None = None  # numbers in the place of a member's own
        self.fresh: dict[int, Tensor] = {}  # numbers that this pass has drawn, by slot
        self.begun: list[Tensor] | None = None  # buffers of iterated modules before the pass
        self.results = self._new_results()  # what members share; None where nothing is kept
        # Where members have inputs of their own to first layers with a block for each of them:
        self.entries: dict[int, list[Tensor]] | None = None  # these, by the slots of the layers
        self.entering: int | None = None  # whose inputs are on the way there
        self.shares: Tensor | None = None  # of the members in the sum of the blocks; None: 1

    def _new_results(self) -> SharedResults | None:
        plan = self.ensemble.plan
        if self.batch != "same" or not plan.shared:
            return None
        return SharedResults(cut=self.cut, copies=plan.copies)

    def __enter__(self) -> Run:
        current = self.ensemble.current
        if current.run is not None and current.run.open:
            raise RuntimeError("an ensemble was called from inside its own pass")
        current.run, self.open = self, True
        if self.batch == "own" and self.ensemble.plan.heads is not None:
            self._enter()
        return self

    def __exit__(self, *error: object) -> None:
        self.ensemble.current.run, self.open = None, False

    # Inputs of a network with a block for each member in its first layers

    def _enter(self) -> None:
        """Take the inputs of all members but the last to the first layers, then go on with it."""
        *others, last = (_at(self.inputs, a) for a in range(self.members))
        self.entries = {}
        for self.entering, inputs in enumerate(others):
            try:
                self._call(inputs, self.kwargs)
            except Entered:
                continue
            raise RuntimeError("the code did not call all of its first layers")
        self.inputs, self.batch, self.entering = last, "same", None
        self.results = self._new_results()

    def entered(self, slot: int, x: Tensor) -> list[Tensor] | None:
        """Return the inputs of all members to a first layer; None where there is but one."""
        if self.entries is None:
            return None
        mine = self.entries.setdefault(slot, [])
        if self.entering is None:
            if len(mine) == self.members - 1:
                return [*mine, x]
            raise RuntimeError("the code calls other first layers for some members")
        mine.append(x)
        heads = self.ensemble.plan.heads
        lengths = {len(inputs) for inputs in self.entries.values()}
        if heads and len(self.entries) == len(heads.first) and lengths == {self.entering + 1}:
            raise Entered
        return None

    # Numbers

    @property
    def numbers(self) -> list[Tensor]:
        """The tensors of all members, members first, as they are in this pass."""
        modules = self.ensemble.individuals.values()
        return [stack for module in modules for stack in self._stacks(module).values()]

    @property
    def names(self) -> list[str]:
        """The names of :attr:`numbers` in the reference."""
        return [
            f"{name}.{tensor}" if tensor else name
            for name, module in self.ensemble.individuals.items()
            for tensor in module.tensors()
        ]

    def _stacks(self, module: Individual) -> dict[str, Tensor]:
        stacks = module.tensors()
        if module.redrawn:
            if module.slot not in self.fresh:
                self.fresh[module.slot] = module.draw()
            stacks[next(reversed(stacks))] = self.fresh[module.slot]
        return stacks

    def of(self, module: Individual) -> dict[str, Tensor]:
        """Return a module's tensors by name for the members that run now, ``(member, …)``."""
        if self.given is not None:
            return dict(zip(module.tensors(), self.given[module.slot :], strict=False))
        stacks = self._stacks(module)
        if self.count == self.members:
            return stacks
        return {name: stack.narrow(0, self.start, self.count) for name, stack in stacks.items()}

    def scale(self, x: Tensor, numbers: Tensor, spatial: int, *, common: bool) -> Tensor:
        """Multiply every member's rows by its numbers, ``(member, feature)``; the dtype stays.

        ``spatial`` axes of x follow its features; ``common`` rows are the same for all members.
        """
        if numbers.dtype is not x.dtype:
            numbers = numbers.to(x.dtype)
        axes = x.dim()
        if self.count == 1:
            if spatial or axes == 1:
                numbers = numbers.view(-1, *(1,) * spatial)
            return x * numbers
        if axes < 2 + spatial:
            raise Unfoldable("an input has no batch axis")
        if axes == 2:
            numbers = numbers.unsqueeze(1)
        else:
            ones = (1,) * (axes - 1 - spatial)
            numbers = numbers.view(self.count, *ones, numbers.shape[1], *(1,) * spatial)
        if common:
            return together(x * numbers)
        return together(self.apart(x) * numbers)

    def apart(self, x: Tensor) -> Tensor:
        """Return ``(member, row, …)`` for the rows of all members that run now.

        A single row (positions, say) stands for every sample of every member.
        """
        if x.shape[0] == 1:
            return x.expand(self.count, self.rows, *x.shape[1:])
        return x.view(self.count, x.shape[0] // self.count, *x.shape[1:])

    def rows_of(self, value: Any, a: int, *, common: bool) -> Any:
        """Return the rows of one of the members that run now, of a tensor."""
        if not isinstance(value, Tensor) or not value.dim() or common:
            return value
        if value.shape[0] % self.count:
            raise Unfoldable("a module of each member's own takes a tensor without rows")
        return value.unflatten(0, (self.count, -1)).select(0, a)

    @contextmanager
    def only(self, a: int) -> Iterator[None]:
        """Let one of the members that run now run alone."""
        start, count = self.start, self.count
        self.start, self.count = start + a, 1
        try:
            yield
        finally:
            self.start, self.count = start, count

    # Members

    def member(self, a: int, numbers: Sequence[Tensor] | None = None) -> Any:
        """Return a member's outputs, without the members' axis; ``numbers`` replace its own."""
        inputs = _at(self.inputs, a) if self.batch == "own" else self.inputs
        self.given = None if numbers is None else [n.unsqueeze(0) for n in numbers]
        try:
            return self._alone(a, inputs, self.kwargs)
        finally:
            self.given = None

    def _alone(self, a: int, inputs: tuple, kwargs: dict) -> Any:
        self.start, self.count = a, 1
        with self.ensemble.state.of(a):
            return self._call(inputs, kwargs)

    def chunks(self) -> Iterator[Any]:
        """Yield the outputs of one chunk of members after another, members first."""
        way = self.ensemble.folding.choose(self) if self.chunk > 1 else Way.EACH
        for start in range(0, self.members, self.chunk):
            count = min(self.chunk, self.members - start)
            if count == 1 or way is Way.EACH:
                yield self.each(start, count)
                continue
            try:
                yield self.folded(start, count, way)
            except (RuntimeError, ValueError, TypeError) as error:
                if torch.compiler.is_compiling() or start > 0:
                    raise
                self.results = self._new_results()
                outputs = self.each(start, count)
                self.ensemble.folding.refuse(error)
                way = Way.EACH
                yield outputs

    def each(self, start: int, count: int) -> Any:
        """Return the outputs of some members that run one after another."""
        outputs = [self.member(a) for a in range(start, start + count)]
        if len(outputs) == 1:
            return tree_map_only(Tensor, lambda x: x.unsqueeze(0), outputs[0])
        return gather(outputs, torch.stack)

    def folded(self, start: int, count: int, way: Way) -> Any:
        """Return the outputs of some members that run as one batch."""
        self.start, self.count, self.common = start, count, way is Way.SHARED
        inputs, kwargs, results = self.inputs, self.kwargs, self.results
        self.rows = batch_size(_at(inputs, 0) if self.batch == "own" else inputs)
        self.rows = self.rows or batch_size(kwargs)

        def repeat(x: Tensor) -> Tensor:
            return repeat_rows(x, count) if x.shape[:1] == (self.rows,) else x

        if self.batch == "own":
            inputs = tree_map_only(Tensor, lambda x: together(x.narrow(0, start, count)), inputs)
        if way is not Way.SHARED:
            self.results = None
            if self.batch == "same":
                inputs = tree_map_only(Tensor, repeat, inputs)
            if way is Way.REPEATED:
                kwargs = tree_map_only(Tensor, repeat, kwargs)
        try:
            outputs = self._call(inputs, kwargs)
        finally:
            self.results = results

        def unfold(value: Tensor) -> Tensor:
            if not value.dim() or value.shape[0] % count:
                raise Unfoldable("an output has no axis of samples")
            return self.apart(value)

        single = isinstance(outputs, Tensor)
        return unfold(outputs) if single else tree_map_only(Tensor, unfold, outputs)

    def outputs(self) -> Any:
        """Return the outputs of all members, members first."""
        chunks = list(self.chunks())
        return chunks[0] if len(chunks) == 1 else gather(chunks, torch.cat)

    def split(self) -> Any:
        """Return the outputs of a batch whose row i belongs to member i mod M."""
        members, rows = self.members, batch_size(self.inputs)
        named = any(isinstance(x, Tensor) for x in tree_leaves(self.kwargs))
        if rows and rows % members == 0 and not named:  # members have as many rows each
            self.batch, deal = "own", lambda x: x.unflatten(0, (-1, members)).transpose(0, 1)
            self.inputs = tree_map_only(Tensor, deal, self.inputs)
            return tree_map_only(Tensor, lambda x: together(x.transpose(0, 1)), self.outputs())

        if any(isinstance(x, Tensor) and x.shape == (rows, rows) for x in tree_leaves(self.kwargs)):
            warnings.warn(
                f"batch='split' deals out the rows of an argument of shape {(rows, rows)}. If it "
                "is a mask that all rows share, pass a batch of another size.",
                stacklevel=4,
            )

        def alone(a: int) -> Any:
            mine = tree_map_only(
                Tensor,
                lambda x: x[a::members] if x.shape[:1] == (rows,) else x,
                (self.inputs, self.kwargs),
            )
            return self._alone(a, *mine)

        def interleave(parts: list[Tensor]) -> Tensor:
            order = torch.arange(rows).remainder(members).argsort(stable=True).argsort()
            joined = torch.cat(parts).unflatten(0, (rows, -1)) if rows else parts[0][:, None]
            return joined.index_select(0, order.to(joined.device)).flatten(0, 1)

        return gather([alone(a) for a in range(max(1, min(members, rows)))], interleave)

    def _call(self, inputs: tuple, kwargs: dict) -> Any:
        if self.results is not None:
            self.results.restart()
        network = self.ensemble.network
        self.ensemble.current.run = self  # a recomputation may have put another in its place
        iterated = [b for module in self.ensemble.iterated for b in module.buffers()]
        begun, ended = self.begun, [b.clone() for b in iterated]
        if begun is None:
            self.begun = ended
        else:  # go on by one step in a pass, not by one in each chunk
            _set(iterated, begun)
        if not self.ensemble.plan.recompute or not torch.is_grad_enabled():
            outputs = network(*inputs, **kwargs)
        else:
            with self._following_recomputation():
                outputs = network(*inputs, **kwargs)
        if begun is not None:
            _set(iterated, ended)
        if dataclasses.is_dataclass(outputs) and tree_leaves(outputs)[0] is outputs:
            raise TypeError(
                f"the reference returns a {type(outputs).__name__}, whose tensors can't be found; "
                "return a tensor, tuple, list or dict of them, or make the class known with "
                "torch.utils._pytree.register_dataclass"
            )
        return outputs

    @contextmanager
    def _following_recomputation(self) -> Iterator[None]:
        """Let activations that are recomputed in the backward pass be so for their members.

        ``torch.utils.checkpoint`` saves the inputs of what it will recompute; unpacking any of them
        opens this run again, in the thread that does so, as it is now.
        """
        again, current = copy.copy(self), self.ensemble.current
        again.open = False

        def unpack(saved: Tensor) -> Tensor:
            current.run = again
            return saved

        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            yield

    def backward(self, loss_of: Callable[[Any], Tensor]) -> None:
        """Backpropagate the loss of one chunk of members after another, with their memory.

        What members share is computed in the first chunk and, with ``cut``, backpropagated last.
        """
        for outputs in self.chunks():
            loss = loss_of(outputs)
            loss.backward(retain_graph=self.results is not None and self.results.meet(loss))
        if self.results is not None:
            self.results.backward()


def _set(buffers: list[Tensor], values: list[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.data.copy_(value)


def _at(values: Any, a: int) -> Any:
    """Return the inputs of one member, of inputs that have the members first."""
    return tree_map_only(Tensor, lambda x: x[a], values)


def repeat_rows(x: Tensor, count: int) -> Tensor:
    """Return the rows of a tensor, all of them ``count`` times."""
    return together(x.unsqueeze(0).expand(count, *x.shape))


def together(x: Tensor) -> Tensor:
    """Return ``(member, row, …)`` as the rows of one batch; :meth:`Run.apart` is the way back."""
    rows = x.flatten(0, 1)
    if torch.compiler.is_compiling() and torch.compiler.is_exporting():
        # A view of any number of rows is not known to be contiguous, a copy is.
        return rows.clone(memory_format=torch.contiguous_format)
    return rows


def batch_size(values: Any) -> int:
    """Return the length of the first tensor that has one."""
    if isinstance(values, tuple) and values and isinstance(values[0], Tensor) and values[0].dim():
        return values[0].shape[0]
    return next((x.shape[0] for x in tree_leaves(values) if isinstance(x, Tensor) and x.dim()), 0)


def gather(outputs: Sequence[Any], join: Callable[[list[Tensor]], Tensor]) -> Any:
    """Join the outputs of members (or of chunks) leaf by leaf."""
    if isinstance(outputs[0], Tensor):
        return join(list(outputs))
    return tree_map(lambda x, *more: join([x, *more]) if isinstance(x, Tensor) else x, *outputs)
