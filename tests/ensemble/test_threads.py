"""Threads that run one ensemble at the same time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import cases
import pytest
import torch
from cases import Residual, Tokens
from torch import nn

import embens


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


REFERENCES = {
    "mlp": (mlp, lambda: torch.randn(5, 3)),
    "residual": (Residual, lambda: torch.randn(4, 3, 6, 6)),
    "transformer": (Tokens, lambda: torch.randint(11, (4, 5))),
}
FAMILIES = {
    "batch ensemble": lambda r: embens.batch_ensemble(r, 4),
    "last-layer dropout": lambda r: embens.last_layer_dropout(r, 4),
    "own norms": lambda r: embens.embed(r, 4, norm_affine="member"),
    "independent": lambda r: embens.independent(r, 4),
    **{name: partial(family, members=4) for name, family in cases.FAMILIES.items()},
}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("case", REFERENCES.values(), ids=REFERENCES)
def test_threads_get_the_outputs_and_gradients_of_their_own_batches(family, case):
    build, batch = case
    torch.manual_seed(0)
    ensemble = family(build()).eval()
    batches = [batch() for _ in range(8)]
    expected = [ensemble(x).detach() for x in batches]
    barrier = threading.Barrier(4)

    def work(thread: int) -> list[torch.Tensor]:
        barrier.wait()
        outputs = []
        for turn in range(12):
            i = (thread + turn) % len(batches)
            with torch.set_grad_enabled((thread + turn) % 2 == 0):
                output = ensemble(batches[i], chunk=(None, 1, 3)[turn % 3])
            if output.requires_grad:
                parameters = list(ensemble.individual_parameters()) or list(ensemble.parameters())
                gradients = torch.autograd.grad(output.square().sum(), parameters)
                assert all(bool(g.isfinite().all()) for g in gradients)
            outputs.append((i, output.detach()))
        return outputs

    with ThreadPoolExecutor(4) as pool:
        for outputs in pool.map(work, range(4)):
            for i, output in outputs:
                torch.testing.assert_close(output, expected[i], rtol=1e-4, atol=1e-5)


def test_gradients_of_two_threads_are_those_of_one():
    torch.manual_seed(0)
    ensemble = embens.batch_ensemble(mlp(), 4)
    batches = [torch.randn(5, 3) for _ in range(6)]
    parameters = list(ensemble.parameters())

    def gradients(x: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(ensemble(x).square().sum(), parameters))

    expected = [gradients(x) for x in batches]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(10):
            for mine, right in zip(pool.map(gradients, batches), expected, strict=True):
                for a, b in zip(mine, right, strict=True):
                    torch.testing.assert_close(a, b)
