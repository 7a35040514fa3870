"""Reading one real call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from embens.reading.watched import read_from_run


class Looking(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        h = self.a(x)
        return self.b(h if bool(h.sum() > 0) else -h)


def test_any_code_is_read_and_looking_at_values_is_seen():
    flow = read_from_run(Looking(), torch.randn(4, 3))
    assert flow.upstream == {"a": set(), "b": {"a"}}
    assert "__bool__" in {s.name for s in flow.steps}


def test_sizes_that_leave_no_trail_are_unclear():
    class Net(Looking):
        def forward(self, x):
            return self.b(self.a(x)) / len(x)

    flow = read_from_run(Net(), torch.randn(4, 3))
    assert "__len__" in {s.name for s in flow.steps if not s.clear}


def test_an_example_that_does_not_fit_says_so():
    with pytest.raises(
        ValueError, match=r"could not be called on example_input \(shapes \[\(4, 7\)\]"
    ):
        read_from_run(Looking(), torch.randn(4, 7))


def test_named_arguments_are_given_as_a_mapping():
    flow = read_from_run(Looking(), {"x": torch.randn(4, 3)})
    assert flow.first == {"a"}
