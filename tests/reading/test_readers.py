"""Reading code with torch.fx, and one real call."""

from __future__ import annotations

import pytest
import torch
from embens.reading.readers import read_from_run, read_symbolically
from torch import nn


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        return self.inner(x) if x.sum() > 0 else x


def test_code_that_cannot_be_traced_is_a_black_box_and_the_rest_is_read():
    flow = read_symbolically(nn.Sequential(nn.Linear(3, 3), Branching(), nn.Linear(3, 2)))
    assert flow is not None
    assert flow.opaque == {"1"}
    assert flow.upstream["2"] == {"0", "1.inner"}
    assert read_symbolically(Branching()) is None


def test_what_is_written_in_place_has_a_new_trail():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x):
            h = torch.zeros(3) + x
            h[:, :1].add_(self.a(x)[:, :1])
            h.add_(self.b(x))
            return self.c(h)

    flow = read_symbolically(Net())
    assert flow is not None
    assert flow.upstream["c"] == {"a", "b"}


def test_sizes_leave_a_mark():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x):
            return self.a(x) / x.shape[0]

    flow = read_symbolically(Net())
    assert flow is not None
    assert {s.operation for s in flow.steps if not s.clear} == {"truediv", "getitem"}


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
