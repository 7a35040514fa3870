"""Attention in traced forwards: operations of scores and weights that have a rule, and others."""

from __future__ import annotations

import pytest
import torch
from theory.peer_networks import Code, dense
from torch import nn
from torch.nn import functional as F

from embens import theory

pytestmark = pytest.mark.usefixtures("double")
X = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def network(attend, **layers) -> nn.Module:
    """Return one attention block; ``attend`` takes the network, scaled scores and values."""

    def forward(net, x):
        x = net.stem(x)
        queries = net.query(x)
        mixed = attend(net, queries @ queries.mT / 8, net.value(x))
        return net.head(mixed.mean(1))

    names = ("query", "value", "head")
    return Code(forward, stem=dense(5), **{name: dense() for name in names}, **layers)


def kernel(attend, **layers) -> torch.Tensor:
    return theory.kernels(network(attend, **layers), X).ntk_shared.same


SAME = {
    "function": (lambda net, s, v: F.softmax(s, 2) @ v, {}),
    "module": (lambda net, s, v: net.softmax(s) @ v, {"softmax": nn.Softmax(-1)}),
    "number": (lambda net, s, v: (2 * s * 0.5).softmax(-1) @ v, {}),
    "mask first": (lambda net, s, v: (torch.zeros(3, 3) + s).softmax(-1) @ v, {}),
    "idle dropout": (lambda net, s, v: F.dropout(s.softmax(-1), 0.5, training=False) @ v, {}),
    "idle module": (
        lambda net, s, v: net.drop(net.same(s).softmax(-1)) @ v,
        {"drop": nn.Dropout(0.0), "same": nn.Identity()},
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_ways_to_write_attention_have_the_same_kernels(name):
    attend, layers = SAME[name]
    expected = kernel(lambda net, s, v: s.softmax(-1) @ v)
    torch.testing.assert_close(kernel(attend, **layers), expected, rtol=1e-12, atol=0)


REFUSED = {
    "other axis": lambda net, s, v: s.softmax(1) @ v,
    "bias that is trained": lambda net, s, v: (s + net.bias.weight[:3, :3]).softmax(-1) @ v,
    "elementwise": lambda net, s, v: s.tanh() @ v,
    "sum of weights": lambda net, s, v: (s.softmax(-1) + 1.0) @ v,
    "two scores": lambda net, s, v: (s + s).softmax(-1) @ v,
    "weights first": lambda net, s, v: v.mT @ s.softmax(-1),
    "random dropout": lambda net, s, v: F.dropout(s.softmax(-1), 0.5) @ v,
    "where of two scores": lambda net, s, v: torch.where(s > 0, s, 0.0).softmax(-1) @ v,
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_operations_are_refused_with_their_line(name):
    with pytest.raises((TypeError, ValueError), match=r"test_attention_rules\.py"):
        kernel(REFUSED[name], bias=dense())
