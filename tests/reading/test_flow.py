"""Both readers find the same data flow where both can read it."""

from __future__ import annotations

import pytest
import torch
from cases import ARCHITECTURES
from embens.reading.readers import read_from_run, read_symbolically
from torch import nn

from embens import reading


@pytest.mark.parametrize("case", ARCHITECTURES, ids=str)
def test_first_and_last_layers_are_those_of_the_architecture(case):
    flow = reading.read(reading.opened(case.build()))
    assert flow.first == case.first
    assert flow.last == case.last


@pytest.mark.parametrize("case", ARCHITECTURES, ids=str)
def test_code_and_an_example_are_read_alike(case):
    reference = reading.opened(case.build())
    symbolic = read_symbolically(reference)
    watched = read_from_run(reference, case.inputs(torch.Generator().manual_seed(0)))
    assert watched.first == case.first
    assert watched.last == case.last
    if symbolic is not None:
        assert symbolic.upstream == watched.upstream
        assert symbolic.repeat == watched.repeat


def test_rows_of_inputs_and_results_are_told_apart():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(self.a(x / 2)) + x

    for flow in (reading.read(Net()), read_from_run(Net(), torch.randn(3, 4))):
        loose = {call.name: call.loose for call in flow.calls if call.name}
        assert loose["a"] == {"input"}
        assert loose["b"] == frozenset()
        assert sum(s.rows >= {"input", "result"} for s in flow.steps) == 1
