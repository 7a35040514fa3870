"""Gradients of samples one by one, for parameters that nothing is known of.

Each sample runs alone, as a batch of one: all of them at once by ``torch.func.vmap`` where the
network allows it, otherwise one after another. Slow, and right for any network.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from embens.ensemble import EmbeddedEnsemble
from embens.ensemble import run as execution
from embens.ensemble.layers import Modulation

Rows = dict[int, Tensor]


class Samplewise:
    """Gradients of some parameters of an ensemble, sample by sample.

    Args:
        ensemble: any.
        stacks: the members' own numbers, as the ensemble gives them.
        parameters: whose gradients; shared or individual ones.
    """

    def __init__(
        self,
        ensemble: EmbeddedEnsemble,
        stacks: list[Tensor],
        parameters: dict[int, nn.Parameter],
    ):
        self.ensemble = ensemble
        self.stacks = stacks
        self.parameters = parameters
        slots: dict[int, tuple[int, nn.Module]] = {}
        for module in ensemble._individuals:
            tensors = [module.values] if isinstance(module, Modulation) else module.stacks()
            for i, tensor in enumerate(tensors):
                slots[id(tensor)] = (module.slot.start + i, module)
        self.slots = {key: slots[key] for key in parameters if key in slots}
        names = {id(p): name for name, p in ensemble.network.named_parameters()}
        self.names = {key: names[key] for key in parameters if key not in slots}
        self.shared = {self.names[k]: p.detach() for k, p in parameters.items() if k in self.names}
        self._vectorised = not ensemble.plan.recompute

    def rows(self, a: int, inputs: tuple[Tensor, ...], cotangents: Tensor) -> Rows:
        """Return gradients of ``(cotangent * output).sum()``, by the id of a parameter.

        Args:
            a: the member.
            inputs: the batch first.
            cotangents: ``(class, batch, …)``.

        Returns:
            Tensors ``(batch, class, number)``.
        """
        values = [stack[a].detach() for stack in self.stacks]
        own = {str(slot): values[slot] for slot, _ in self.slots.values()}

        def output(
            shared: dict, own: dict, sample: tuple[Tensor, ...], cotangent: Tensor
        ) -> Tensor:
            mine = [own.get(str(i), value) for i, value in enumerate(values)]
            with execution.Pass(self.ensemble._cursor, None):
                result = self._call(shared, mine, tuple(x.unsqueeze(0) for x in sample))
            return (result[0] * cotangent).sum()

        with torch.enable_grad():
            found = self._gradients(output, own, inputs, cotangents)
        shared, own = found
        rows = {key: shared[name].flatten(2) for key, name in self.names.items()}
        for key, (slot, module) in self.slots.items():
            gradient = own[str(slot)].flatten(2)
            if isinstance(module, Modulation) and module.repeat > 1:
                gradient = gradient.unflatten(-1, (-1, module.repeat)).sum(-1)
            rows[key] = gradient
        return rows

    def _call(self, shared: dict, values: list[Tensor], sample: tuple[Tensor, ...]) -> Tensor:
        self.ensemble._cursor.values = values
        if not self.ensemble.plan.recompute:
            return torch.func.functional_call(self.ensemble.network, shared, sample)
        with execution.following_recomputation(self.ensemble._cursor, values):
            return torch.func.functional_call(self.ensemble.network, shared, sample)

    def _gradients(
        self, output: Callable[..., Tensor], own: dict, inputs: tuple, cotangents: Tensor
    ) -> tuple[dict, dict]:
        if self._vectorised:
            gradient = torch.func.grad(output, argnums=(0, 1))
            by_sample = torch.func.vmap(gradient, (None, None, 0, 0))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # operations without a batching rule are slow
                    found = [by_sample(self.shared, own, inputs, c) for c in cotangents]
                return _stack(found, 1)
            except (RuntimeError, ValueError, TypeError, NotImplementedError):
                self._vectorised = False
        found = [
            _stack([self._one(output, own, inputs, c, i) for i in range(len(inputs[0]))], 0)
            for c in cotangents
        ]
        return _stack(found, 1)

    def _one(
        self, output: Callable[..., Tensor], own: dict, inputs: tuple, cotangent: Tensor, i: int
    ) -> tuple[dict, dict]:
        leaves = tuple(
            {k: v.detach().requires_grad_() for k, v in part.items()} for part in (self.shared, own)
        )
        value = output(*leaves, tuple(x[i] for x in inputs), cotangent[i])
        flat = [leaf for part in leaves for leaf in part.values()]
        gradients = iter(torch.autograd.grad(value, flat, materialize_grads=True))
        shared, own = ({k: next(gradients) for k in part} for part in leaves)
        return shared, own


def _stack(found: list[Any], axis: int) -> tuple[dict, dict]:
    first: tuple[dict, dict] = found[0]
    shared, own = (
        {k: torch.stack([f[i][k] for f in found], axis) for k in first[i]} for i in range(2)
    )
    return shared, own
