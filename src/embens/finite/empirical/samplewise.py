"""Gradients of samples one by one, for parameters that nothing is known of.

Each sample runs alone, as a batch of one: all of them at once by ``torch.func.vmap`` where the
network allows it, otherwise one after another. Slow, and right for any network.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from embens.ensemble import EmbeddedEnsemble

Rows = dict[int, Tensor]  # by the id of a parameter


class _Member(nn.Module):
    """One member of an ensemble, with numbers that are given: something to call functionally."""

    def __init__(self, ensemble: EmbeddedEnsemble):
        super().__init__()
        self.ensemble = ensemble

    def forward(self, a: int, numbers: list[Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        with self.ensemble.run(inputs, chunk=1) as run:
            return run.member(a, numbers=numbers)


class Samplewise:
    """Gradients of some parameters of an ensemble, with the members' own numbers of a pass."""

    def __init__(
        self, ensemble: EmbeddedEnsemble, numbers: list[Tensor], parameters: dict[int, nn.Parameter]
    ):
        self.network = _Member(ensemble)
        self.numbers = numbers
        self.parameters = parameters
        self.slots = {i: id(stack) for i, stack in enumerate(numbers) if id(stack) in parameters}
        names = {id(p): name for name, p in self.network.named_parameters()}
        self.names = {key: names[key] for key in parameters.keys() - self.slots.values()}
        self._vectorised = not ensemble.plan.recompute

    def rows(self, a: int, inputs: tuple[Tensor, ...], cotangents: Tensor) -> Rows:
        """Return gradients ``(batch, class, number)`` for cotangents ``(class, batch, …)``."""
        numbers = [stack[a].detach() for stack in self.numbers]
        leaves = {key: p.detach() for key, p in self.parameters.items()}
        leaves |= {key: numbers[slot] for slot, key in self.slots.items()}

        def output(leaves: Rows, sample: tuple[Tensor, ...], cotangent: Tensor) -> Tensor:
            mine = [leaves.get(self.slots.get(i, 0), n) for i, n in enumerate(numbers)]
            shared = {name: leaves[key] for key, name in self.names.items()}
            one = tuple(x.unsqueeze(0) for x in sample)
            result = torch.func.functional_call(self.network, shared, (a, mine, one))
            return (result[0] * cotangent).sum()

        def together(cotangent: Tensor) -> Rows:
            gradient = torch.func.grad(output)
            vectorised = torch.func.vmap(gradient, (None, 0, 0), randomness="different")
            return vectorised(leaves, inputs, cotangent)

        def one_by_one(cotangent: Tensor) -> Rows:
            found = []
            for *sample, c in zip(*inputs, cotangent, strict=True):
                fresh = {key: leaf.detach().requires_grad_() for key, leaf in leaves.items()}
                value = output(fresh, tuple(sample), c)
                gradients = torch.autograd.grad(value, list(fresh.values()), materialize_grads=True)
                found.append(dict(zip(fresh, gradients, strict=True)))
            return _stack(found, 0)

        found: list[Rows] = []
        with torch.enable_grad():
            if self._vectorised:
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # operations without a rule are slow
                        found = [together(c) for c in cotangents]
                except (RuntimeError, ValueError, TypeError, NotImplementedError):
                    self._vectorised = False
            found = found or [one_by_one(c) for c in cotangents]
        return {key: gradient.flatten(2) for key, gradient in _stack(found, 1).items()}


def _stack(found: list[Rows], axis: int) -> Rows:
    return {key: torch.stack([rows[key] for rows in found], axis) for key in found[0]}
