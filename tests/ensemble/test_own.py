"""Modules with tensors of each member's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import embens
from embens.ensemble import own
from embens.ensemble.own import Own, call_with
from embens.ensemble.plan import OwnTensors

LAYERS = {
    "linear": (lambda: nn.Linear(4, 5), (3, 4)),
    "without bias": (lambda: nn.Linear(4, 5, bias=False), (3, 4)),
    "on four axes": (lambda: nn.Linear(4, 5), (3, 2, 2, 4)),
    "parametrized": (lambda: embens.networks.Linear(4, 5, bias_std=0.3), (3, 4)),
    "convolution": (lambda: nn.Conv2d(4, 5, 2), (3, 4, 3, 3)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, 2, groups=2, dilation=2), (3, 4, 9, 9)),
    "padded to the same size": (lambda: nn.Conv1d(4, 5, 3, padding="same", dilation=2), (3, 4, 7)),
    "padded by reflection": (
        lambda: nn.Conv2d(4, 5, 3, padding=(2, 1), padding_mode="reflect"),
        (3, 4, 5, 5),
    ),
    "parametrized convolution": (lambda: embens.networks.Conv2d(4, 5, 3), (3, 4, 5, 5)),
    "transposed": (
        lambda: nn.ConvTranspose2d(4, 6, 3, 2, padding=1, output_padding=1, groups=2),
        (3, 4, 5, 5),
    ),
    "three axes": (lambda: nn.Conv3d(4, 5, 2, bias=False), (3, 4, 3, 3, 3)),
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


@pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=LAYERS)
@pytest.mark.filterwarnings("ignore:the data flow of", "ignore:this network can't run several")
def test_layers_of_torch_run_all_members_at_once(make, shape, monkeypatch):
    ensemble = embens.independent(First(make()), 3)
    torch_layer = isinstance(make(), (nn.Linear, nn.modules.conv._ConvNd))
    calls = []
    monkeypatch.setattr(own, "call_with", lambda *a, **k: calls.append(a) or call_with(*a, **k))
    ensemble(torch.randn(shape), chunk=3)
    assert bool(calls) != torch_layer


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"max_norm": 0.5}])
def test_embeddings_of_the_members_own_are_looked_up_at_once(options):
    reference = nn.Sequential(nn.Embedding(7, 4, **options), nn.Tanh(), nn.Linear(4, 2))
    ensemble = embens.embed(reference, 3, None, None, own="0")
    alone = [ensemble.member(a) for a in range(3)]
    x = torch.randint(7, (5, 6))
    for chunk in (1, 2, 3):
        torch.testing.assert_close(ensemble(x, chunk=chunk), _stack(alone, [x] * 3))
    ensemble(x).square().sum().backward()
    table = ensemble.network[0].module.weight
    for a in range(3):
        alone[a](x).square().sum().backward()
        torch.testing.assert_close(table.grad[a], alone[a][0].weight.grad)


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
    one, other = (Own(m, OwnTensors("", ("weight",)), 3, stacks=stacks) for m in (first, second))
    assert one.module.weight is other.module.weight
    assert torch.equal(one.module.weight[2], weight)
