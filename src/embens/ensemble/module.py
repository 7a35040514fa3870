"""The ensemble: one network, many members, an ordinary module.

Made by :func:`embens.embed` and the named families. Axis order is ``(member, batch, …)``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from embens.checks import Gamma, closest
from embens.ensemble import rates
from embens.ensemble import run as execution
from embens.ensemble.layers import Modulates
from embens.ensemble.plain import plain
from embens.ensemble.plan import Plan
from embens.ensemble.run import Cursor, Own, Store
from embens.objective import Criterion, Of, objective

Batch = Literal["same", "own", "split"]
BATCHES = ("same", "own", "split")


class EmbeddedEnsemble(nn.Module):
    """M members in one network.

    Attributes:
        network: the reference's copy with its modulated layers.
        plan: what makes it an ensemble: sites, laws, what is shared.
        chunk: how many members run together; None: chosen for the network and the batch. It never
            changes the results beyond rounding, nor the order of members.
    """

    def __init__(self, network: nn.Module, plan: Plan, cursor: Cursor):
        super().__init__()
        self.network = network
        self.plan = plan
        self.chunk: int | None = None
        self.training = network.training
        self._cursor = cursor
        self._individuals = execution.connect(cursor, network)
        for module in network.modules():
            if isinstance(module, Modulates):
                module.connect(cursor)
        dependent = list(execution.dependent_modules(network))
        separate = plan.separate
        self._unfoldable = not plan.foldable or not all(
            execution.is_foldable(m) and not (separate and isinstance(m, nn.modules.conv._ConvNd))
            for m in dependent
        )
        self._updating = [m for m in dependent if execution.updates_shared_statistics(m)]

    @property
    def members(self) -> int:
        """How many members there are."""
        return self.plan.members

    def individual_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of which every member has its own (trainable modulations)."""
        for module in self._individuals:
            tensors = module.stacks() if isinstance(module, Own) else module.parameters()
            yield from (t for t in tensors if isinstance(t, nn.Parameter))

    def shared_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that all members share (the reference's)."""
        individual = {id(p) for p in self.individual_parameters()}
        yield from (p for p in self.parameters() if id(p) not in individual)

    def parameter_groups(
        self,
        lr: float = 0.01,
        modulation_lr: float | None = None,
        weight_decay: float = 5e-4,
        *,
        gamma: Gamma = None,
        optimizer: rates.MakeOptimizer = torch.optim.SGD,
        modulation_weight_decay: float = 0.0,
    ) -> list[dict[str, Any]]:
        r"""Return the groups for a torch optimizer: shared parameters, modulations, own layers.

        With them one step on :func:`embens.objective` is the paper's; see
        :mod:`embens.ensemble.rates`.

        Args:
            lr: rate :math:`\eta`. That of the shared parameters is multiplied by
                :math:`\gamma(M)/M`, for optimizers of the Adam kind by :math:`\gamma/\gamma^*`.
            modulation_lr: rate of the modulations; None: the same.
            weight_decay: of the shared parameters and of layers of the members' own, in units of
                ``lr``: what a step takes away does not depend on gamma.
            gamma: a number (0: nothing shared moves), a function of the number of members, or
                None for the natural value.
            optimizer: what the groups are for: a class, or a function from groups to an optimizer.
            modulation_weight_decay: of the modulations; decay would pull them to the same point.
        """
        return rates.parameter_groups(
            self, lr, modulation_lr, weight_decay, gamma, optimizer, modulation_weight_decay
        )

    # Running

    def forward(
        self, *inputs: Any, batch: Batch = "same", chunk: int | None = None, **kwargs: Any
    ) -> Any:
        """Run all members.

        Args:
            *inputs: of the reference.
            batch: "same": every member sees the inputs; "own": tensors among the inputs have the
                members as their first axis; "split": row i of every tensor goes to member i mod M.
            chunk: how many members run together, instead of ``self.chunk``.
            **kwargs: passed to the reference as they are, for every member.

        Returns:
            The outputs with the members as a new first axis; for "split" those of the reference.
        """
        self._check_batch(inputs, batch)
        size = self._chunk_size(inputs, chunk)
        store = self._new_store(batch, size)
        with execution.Pass(self._cursor, store):
            if batch == "split":
                outputs = self._run_split(inputs, kwargs)
            elif size == 1:
                stacks = [execution.members_of(stack) for stack in self._stacks()]
                outputs = self._run_each(stacks, range(self.members), inputs, kwargs, batch)
            else:
                chunks = list(self._run(self._stacks(), inputs, kwargs, batch, size))
                outputs = chunks[0] if len(chunks) == 1 else execution.gather(chunks, torch.cat)
        return outputs

    def _new_store(self, batch: Batch, chunk: int, cut: bool = False) -> Store | None:
        if batch != "same" or not self.plan.shared or (chunk >= self.members and not cut):
            return None
        return Store(cut=cut, copies=self.plan.copies)

    def _stacks(self) -> list[Tensor]:
        """Return the tensors of all members, members first, for one pass."""
        return [stack for module in self._individuals for stack in module.stacks()]

    def _run(
        self, stacks: list, inputs: tuple, kwargs: dict, batch: Batch, chunk: int
    ) -> Iterator[Any]:
        """Yield the outputs of one chunk of members after another, members first."""
        fold = chunk > 1 and self._foldable()
        for start in range(0, self.members, chunk):
            stop = min(start + chunk, self.members)
            if fold and stop - start > 1:
                try:
                    result = self._run_folded(stacks, slice(start, stop), inputs, kwargs, batch)
                except (RuntimeError, ValueError, TypeError) as error:
                    if torch.compiler.is_compiling() or start > 0:
                        raise
                    if self._cursor.store is not None:
                        self._cursor.store = self._new_store(
                            batch, chunk, cut=self._cursor.store.cut
                        )
                    result = self._run_each(stacks, range(start, stop), inputs, kwargs, batch)
                    self._unfoldable, fold = True, False
                    execution.warn_unfoldable(error)
            else:
                result = self._run_each(stacks, range(start, stop), inputs, kwargs, batch)
            yield result

    def _run_folded(
        self, stacks: list, members: slice, inputs: tuple, kwargs: dict, batch: Batch
    ) -> Any:
        own = batch == "own"
        if own:
            inputs = tree_map(lambda x: x[members] if isinstance(x, Tensor) else x, inputs)
        values = [stack[members] for stack in stacks]
        try:
            return execution.run_folded(self.network, self._cursor, values, inputs, kwargs, own)
        finally:
            self._cursor.folded = False

    def _run_each(
        self, stacks: list, members: range, inputs: tuple, kwargs: dict, batch: Batch
    ) -> Any:
        outputs = []
        for a in members:
            mine = inputs
            if batch == "own":
                mine = tree_map(lambda x, a=a: x[a] if isinstance(x, Tensor) else x, inputs)
            outputs.append(self._run_member([stack[a] for stack in stacks], mine, kwargs))
        if len(outputs) == 1:
            return tree_map(lambda x: x.unsqueeze(0) if isinstance(x, Tensor) else x, outputs[0])
        return execution.gather(outputs, torch.stack)

    def _run_member(self, values: list[Tensor], inputs: tuple, kwargs: dict) -> Any:
        if self.plan.recompute and torch.is_grad_enabled():
            with execution.following_recomputation(self._cursor, values):
                return execution.run_member(self.network, self._cursor, values, inputs, kwargs)
        return execution.run_member(self.network, self._cursor, values, inputs, kwargs)

    def _run_split(self, inputs: tuple, kwargs: dict) -> Any:
        stacks = [execution.members_of(stack) for stack in self._stacks()]
        rows = next(x.shape[0] for x in tree_leaves(inputs) if isinstance(x, Tensor))
        members = self.members
        outputs = []
        for a in range(max(1, min(members, rows))):
            mine = tree_map(
                lambda x, a=a: x[a::members] if isinstance(x, Tensor) and x.dim() else x, inputs
            )
            outputs.append(self._run_member([stack[a] for stack in stacks], mine, kwargs))
        # Concatenated, member by member, row i is at position order[i].
        order = torch.arange(rows).remainder(members).argsort(stable=True).argsort()
        return execution.gather(
            outputs, lambda parts: torch.cat(parts).index_select(0, order.to(parts[0].device))
        )

    def _check_batch(self, inputs: tuple, batch: Batch) -> None:
        if batch not in BATCHES:
            raise ValueError(f"batch: unknown {batch!r}{closest(batch, BATCHES)}")
        if batch == "same":
            return
        shapes = [tuple(x.shape) for x in tree_leaves(inputs) if isinstance(x, Tensor)]
        if not shapes:
            raise ValueError(f"batch={batch!r} needs a tensor among the positional inputs")
        if batch == "own" and any(s[:1] != (self.members,) for s in shapes):
            raise ValueError(
                f"batch='own' expects inputs of shape ({self.members}, batch, …), one batch for "
                f"each member; got {next(s for s in shapes if s[:1] != (self.members,))}. For one "
                "batch that all members see use batch='same', for one that they split 'split'."
            )
        if batch == "split" and len({s[:1] for s in shapes}) > 1:
            raise ValueError(
                "batch='split' expects all tensors to have the same number of rows; got shapes "
                + ", ".join(map(str, shapes))
            )

    def _foldable(self) -> bool:
        """Whether several members can run at once; depends on the mode of norm layers."""
        if self._unfoldable or _autocasting():
            return False
        return not any(module.training for module in self._updating)

    def _chunk_size(self, inputs: tuple, chunk: int | None) -> int:
        chunk = self.chunk if chunk is None else chunk
        if chunk is not None:
            if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
                raise ValueError(
                    f"chunk must be a whole number of at least 1, or None; got {chunk!r}"
                )
            return min(chunk, self.members)
        if self.members == 1 or not self._foldable():
            return 1
        x = next((v for v in tree_leaves(inputs) if isinstance(v, Tensor)), None)
        if x is None or torch.compiler.is_compiling():
            return self.members
        rows, positions = self.plan.widths
        numbers = max(
            rows * len(x) if x.dim() else 1, positions * x.numel() // self.plan.input_channels
        )
        budget = execution.FOLDED_BYTES.get(x.device.type, execution.FOLDED_BYTES["cuda"])
        itemsize = 4 if not x.is_floating_point() else x.element_size()
        return max(1, min(self.members, budget // max(1, numbers * itemsize)))

    # Training

    def objective(
        self,
        outputs: Any,
        target: Any,
        criterion: Criterion | None = None,
        *,
        batch: Batch = "same",
        of: Of = "members",
        **unknown: Any,
    ) -> Tensor:
        """Return the sum of the members' losses; see :func:`embens.objective`."""
        return objective(
            *(outputs, target, criterion), batch=batch, of=of, members=self.members, **unknown
        )

    def backward(
        self,
        *inputs_and_target: Any,
        criterion: Criterion | None = None,
        chunk: int = 1,
        **kwargs: Any,
    ) -> Tensor:
        """Run forward and backward chunk by chunk and accumulate the objective's gradients.

        Gives the gradients of ``self.objective(self(x), target).backward()`` with the memory of one
        chunk: what members share is backpropagated once, at the end.

        Args:
            *inputs_and_target: the reference's inputs, then the target.
            criterion: see :func:`embens.objective`.
            chunk: how many members at a time.
            **kwargs: passed to the reference.

        Returns:
            The objective, the sum of the members' losses, detached.
        """
        *inputs, target = inputs_and_target
        inputs = tuple(inputs)
        chunk = self._chunk_size(inputs, chunk)
        total: Any = 0.0
        cursor = self._cursor
        with (
            torch.enable_grad(),
            execution.Pass(cursor, self._new_store("same", chunk, cut=True)),
        ):
            stacks = [execution.CutStack(stack) for stack in self._stacks()]
            first = True  # what members share is computed in the first chunk
            for outputs in self._run(stacks, inputs, kwargs, "same", chunk):
                loss = objective(outputs, target, criterion)
                retain = first and cursor.store is not None and cursor.store.meets(loss)
                loss.backward(retain_graph=retain)
                first = False
                total = total + loss.detach()
            if cursor.store is not None:
                cursor.store.backward()
            for stack in stacks:
                stack.backward()
        return total

    @property
    def overlap(self) -> float:
        r"""Return the product of :math:`(E u)^2 / E u^2` of the post laws over the hidden sites."""
        return math.prod(s.law.overlap for s in self.plan.sites if s.kind == "post" and s.hidden)

    @property
    def natural_gamma(self) -> float:
        r"""The default gradient scale :math:`M / (1 + (M-1) r)`, with ``r`` the overlap."""
        return self.members / (1 + (self.members - 1) * self.overlap)

    # Out again

    def member(self, a: int) -> nn.Module:
        """Return member ``a`` as a plain module with the same outputs.

        Its layers are torch's own with that member's weights; only a layer whose weight can't hold
        its modulations (hooks, a parametrization, a forward of its own) keeps a small wrapper.
        """
        if isinstance(a, bool) or not isinstance(a, int):
            raise TypeError(f"a member is a whole number; got {a!r}")
        if not -self.members <= a < self.members:
            raise IndexError(f"member {a} of an ensemble of {self.members}")
        if any(s.fresh for s in self.plan.sites):
            raise ValueError(
                "masks that are drawn anew at each pass belong to no member; use fresh=False for a "
                "fixed set"
            )
        return plain(self.network, a % self.members, self.plan)

    def collapse(self) -> nn.Module:
        """Return one plain network whose output is the mean of the members' outputs.

        Exists where the output is affine in all modulations together: last-layer dropout.
        """
        if self.plan.not_collapsible:
            raise ValueError(
                f"this ensemble can't be collapsed: {self.plan.not_collapsible}. Only where the "
                "output is linear in the modulations (last-layer dropout) is the mean of the "
                "members one network."
            )
        return plain(self.network, None, self.plan)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the ensemble to one file, masks and laws included; see :func:`embens.load`."""
        from embens.ensemble.storage import save

        save(self, path)

    def extra_repr(self) -> str:
        """Return the line that ``repr`` shows."""
        shared = sum(p.numel() for p in self.shared_parameters())
        own = sum(p.numel() for p in self.individual_parameters())
        recompute = ", recompute" if self.plan.recompute else ""
        return (
            f"{self.plan.family}, members={self.members}, shared parameters={shared:,}, "
            f"individual parameters={own:,}{recompute}"
        )


def _autocasting() -> bool:
    """Return whether autocast is on; under vmap it gives other dtypes than it does alone."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
