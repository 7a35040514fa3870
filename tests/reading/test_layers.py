"""Kinds of parameter layers: how each holds its weight, and how others become known."""

from __future__ import annotations

import pytest
import torch
from embens.reading import layers as kinds
from torch import nn

import embens


class Swapped(nn.Module):
    """A Linear whose weight is (in, out), as in GPT-2."""

    def __init__(self, takes: int, gives: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(takes, gives) / takes**0.5)
        self.bias = nn.Parameter(torch.randn(gives))

    def forward(self, x):
        return x @ self.weight + self.bias


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(3, 6), Swapped(6, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(kinds, "_KINDS", dict(kinds._KINDS))


def test_an_unknown_layer_with_a_weight_is_named():
    with pytest.warns(UserWarning, match=r"do not differ in 'second'.*Swapped.*register_layer"):
        ensemble = embens.embed(Net(), 3)
    assert {s.layer for s in ensemble.plan.sites} == {"first", "head"}


@pytest.mark.parametrize("weight", ["", "in out"])
def test_one_line_makes_a_layer_known(registry, weight):
    embens.register_layer(Swapped, lambda layer: tuple(layer.weight.shape), weight=weight)
    ensemble = embens.embed(Net(), 3)
    assert {(s.layer, s.kind, s.size) for s in ensemble.plan.sites} >= {
        ("second", "pre", 5),
        ("second", "post", 6),
    }
    x = torch.randn(4, 3)
    members = [ensemble.member(a) for a in range(3)]
    assert (type(members[0].second) is Swapped) is bool(weight)
    for chunk in (1, 3):
        for output, member in zip(ensemble(x, chunk=chunk), members, strict=True):
            torch.testing.assert_close(output, member(x))
    individual = {n: m for n, m in ensemble.individuals.items() if n.startswith("second")}
    ensemble(x).square().sum().backward()
    assert all(bool((m.values.grad != 0).all()) for m in individual.values())


def test_a_layer_can_be_named_by_text(registry):
    kinds.register_layer(f"{Swapped.__module__}.Swapped", lambda layer: tuple(layer.weight.shape))
    assert kinds.is_layer(Swapped(3, 4))


def test_gpt2s_layer_is_known_by_its_name():
    class Conv1D(Swapped):
        pass

    Conv1D.__module__, Conv1D.__qualname__ = "transformers.pytorch_utils", "Conv1D"
    assert kinds.channels(Conv1D(3, 4)) == (3, 4)


def test_a_wrong_registration_is_refused():
    with pytest.raises(ValueError, match="weight: unknown 'inout'; did you mean 'in out'"):
        embens.register_layer(Swapped, lambda layer: (1, 1), weight="inout")
    with pytest.raises(TypeError, match="channels must be a function of a layer"):
        embens.register_layer(Swapped, (1, 1))


LAYERS = {
    "linear": lambda: nn.Linear(6, 4),
    "conv": lambda: nn.Conv2d(6, 4, 3),
    "grouped conv": lambda: nn.Conv2d(6, 4, 3, groups=2),
    "conv1d": lambda: nn.Conv1d(6, 4, 3),
    "transposed": lambda: nn.ConvTranspose2d(6, 4, 3),
    "grouped transposed": lambda: nn.ConvTranspose1d(6, 4, 3, groups=2),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("sides", ["pre", "post", "both", "none"])
def test_a_modulated_weight_is_a_modulated_activation(make, sides):
    layer = make().double()
    axes = kinds.spatial_axes(layer)
    x = torch.randn(2, 6, *(5,) * axes, dtype=torch.float64)
    v = torch.randn(4, dtype=torch.float64) if sides in ("pre", "both") else None
    u = torch.randn(6, dtype=torch.float64) if sides in ("post", "both") else None
    shape = (-1, *(1,) * axes)
    expected = layer(x if u is None else x * u.view(shape))
    expected = expected if v is None else expected * v.view(shape)
    with torch.no_grad():
        layer.weight.copy_(kinds.modulate_weight(layer, layer.weight, v, u))
        if v is not None:
            layer.bias.mul_(v)
    torch.testing.assert_close(layer(x), expected)


def test_several_members_weights_at_once_are_those_of_each():
    layer = nn.Conv2d(6, 4, 3, groups=2)
    v, u = torch.randn(3, 4), torch.randn(3, 6)
    stacked = kinds.modulate_weight(layer, layer.weight, v, u)
    for a in range(3):
        torch.testing.assert_close(
            stacked[a], kinds.modulate_weight(layer, layer.weight, v[a], u[a])
        )
