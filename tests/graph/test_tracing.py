"""A strict trace is right for every call, or an error."""

import pytest
import torch
from torch import nn

from embens.graph.misreadings import Untraceable
from embens.graph.reading import copy_module
from embens.graph.tracing import StrictTracer


class Net(nn.Module):
    """Calls a function between two layers."""

    def __init__(self, function):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)
        self.function = function

    def forward(self, x):
        return self.b(self.function(self, self.a(x)))


def update(net, x):
    for parameter in net.a.parameters():
        parameter.data.mul_(0.5)
    return x


def catch(net, x):
    try:
        return x if x.sum() > 0 else -x
    except ValueError:
        return x


CODE = [
    (update, "computes with tensors that are not inputs"),
    (catch, "looks at values"),
    (lambda net, x: x * len(x), "length of a batch"),
    (lambda net, x: x * float(x.mean()), "looks at values"),
    (lambda net, x: torch.stack(list(x)), "iterates over a tensor"),
    (lambda net, x: x.unknown, "no attribute 'unknown'"),
]


@pytest.mark.parametrize(("function", "problem"), CODE)
def test_a_strict_trace_refuses_code_that_the_graph_would_get_wrong(function, problem):
    root = copy_module(Net(function))
    with pytest.raises((Untraceable, AttributeError), match=problem):
        StrictTracer(root, ["x"], {}).trace_graph(root)


def test_a_strict_trace_refuses_other_autocast_states():
    def switch(net, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x + x

    root = copy_module(Net(switch))
    with pytest.raises(Untraceable, match="switches autocast"):
        StrictTracer(root, ["x"], {}).trace_graph(root)


def test_a_strict_trace_of_plain_code_is_a_graph():
    root = copy_module(Net(lambda net, x: torch.relu(x)))
    graph = StrictTracer(root, ["x"], {}).trace_graph(root)
    assert [str(n.target) for n in graph.nodes if n.op == "call_module"] == ["a", "b"]
