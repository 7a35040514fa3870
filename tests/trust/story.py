"""A story: calls of an ensemble and of its members, with changes between the calls.

The members are plain copies of the reference with merged weights. Whatever happens to the ensemble
happens to each of them, so the outputs have to stay equal.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from agreement import assert_same, cloned, tensors_of
from torch import nn
from torch.utils._pytree import tree_leaves

import embens

FAMILIES = {
    "batch ensemble": embens.batch_ensemble,
    "last layer": embens.last_layer_dropout,
    "own last layer": lambda r, m, **o: embens.embed(r, m, own="out", **o),
}
REFUSALS = "|".join(
    (
        "changes its parameter",
        "changes the buffer",
        "changes the attribute",
        "adds the",
        "removes the",
    )
)
"""What the errors begin with that a reference may be refused with while it runs."""

Change = Callable[[nn.Module], Any]


def x_of(rows: int = 4, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, dtype=torch.float64, generator=generator)


def grow_up(reference: nn.Module, family: str, **options: Any) -> embens.EmbeddedEnsemble:
    """Return an ensemble of three members in double precision."""
    torch.manual_seed(0)
    return FAMILIES[family](reference.double(), 3, **options)


def follow(
    ensemble: embens.EmbeddedEnsemble,
    steps: Iterable[Change | torch.Tensor | tuple],
    *,
    may_refuse: str = "",
    chunk: int | None = None,
) -> str:
    """Call an ensemble and its members in turn; return the error that ended it, or "".

    Args:
        ensemble: the ensemble.
        steps: tensors or tuples of arguments to call everything on, and functions that change the
            reference and every member.
        may_refuse: an error with this pattern may end the story.
        chunk: number of members that run together.
    """
    members = [ensemble.member(a).train(ensemble.training) for a in range(ensemble.members)]
    for index, step in enumerate(steps):
        if callable(step) and not isinstance(step, torch.Tensor):
            for module in (ensemble.reference, *members):
                step(module)
            continue
        inputs = step if isinstance(step, tuple) else (step,)
        passed = cloned(inputs)
        try:
            outputs = ensemble(*passed, chunk=chunk)
        except (RuntimeError, ValueError, TypeError) as error:
            if may_refuse and re.search(may_refuse, str(error)):
                return str(error)
            raise
        where = f"step {index}, {ensemble.executor}"
        expected = [tensors_of(member(*cloned(inputs))) for member in members]
        for position, output in enumerate(tensors_of(outputs)):
            stacked = torch.stack([tensors[position] for tensors in expected])
            assert_same(output.detach(), stacked.detach(), f"outputs at {where}")
        assert_same(list(tree_leaves(passed)), list(tree_leaves(inputs)), f"inputs at {where}")
    for a, member in enumerate(members):
        buffers = dict(ensemble.member(a).named_buffers())
        assert_same(buffers, dict(member.named_buffers()), f"buffers of member {a}")
    return ""


both_modes = pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
all_families = pytest.mark.parametrize("family", FAMILIES)
quiet = pytest.mark.filterwarnings("ignore:the data flow of", "ignore:members do not differ in")
