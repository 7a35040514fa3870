"""Modules with tensors of each member's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import embens
from embens.ensemble.own import Own, call_with

LAYERS = {
    "linear": (lambda: nn.Linear(4, 5), (3, 4)),
    "without bias": (lambda: nn.Linear(4, 5, bias=False), (3, 4)),
    "on four axes": (lambda: nn.Linear(4, 5), (3, 2, 2, 4)),
    "parametrized": (lambda: embens.networks.Linear(4, 5, bias_std=0.3), (3, 4)),
    "convolution": (lambda: nn.Conv2d(4, 5, 2), (3, 4, 3, 3)),
    "batch norm": (lambda: nn.BatchNorm1d(4), (3, 4)),
    "recurrent": (lambda: nn.GRU(4, 5, batch_first=True), (3, 2, 4)),
}


class First(nn.Module):
    """A layer alone, or what it returns first."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        outputs = self.layer(x)
        return outputs[0] if isinstance(outputs, tuple) else outputs


@pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=LAYERS)
@pytest.mark.filterwarnings("ignore:the data flow of", "ignore:this network can't run several")
def test_every_batch_and_chunk_gives_what_the_members_give(make, shape):
    torch.manual_seed(0)
    ensemble = embens.independent(First(make()), 3)
    alone = [ensemble.member(a) for a in range(3)]
    x = torch.randn(shape)
    for chunk in (1, 2, 3):
        torch.testing.assert_close(ensemble.eval()(x, chunk=chunk), _stack(alone, [x] * 3))
    own = torch.randn(3, *shape)
    torch.testing.assert_close(ensemble(own, batch="own"), _stack(alone, own))
    split = ensemble(x, batch="split")
    for i in range(len(x)):
        torch.testing.assert_close(split[i], alone[i].eval()(x[i : i + 1])[0])


def _stack(networks, inputs):
    return torch.stack([n.eval()(x) for n, x in zip(networks, inputs, strict=True)])


def test_calling_with_other_tensors_does_not_touch_the_module():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = {k: v.clone() for k, v in module.state_dict().items()}
    mean = torch.zeros(2)
    call_with(
        module, {"0.weight": torch.ones(2, 2), "1.running_mean": mean}, (torch.ones(3, 2),), {}
    )
    assert mean.any(), "updated in place"
    unchanged = {k: v for k, v in module.state_dict().items() if "var" not in k and "num" not in k}
    assert all(torch.equal(v, before[k]) for k, v in unchanged.items())


def test_stacks_start_from_the_module_and_tied_ones_are_one():
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    second.weight, weight = first.weight, first.weight.detach().clone()
    stacks: dict[int, torch.Tensor] = {}
    one, other = (Own(m, ["weight"], 3, stacks=stacks) for m in (first, second))
    assert one.module.weight is other.module.weight
    assert torch.equal(one.module.weight[2], weight)
