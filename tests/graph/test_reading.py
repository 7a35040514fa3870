"""The data flow of a network, traced symbolically."""

import pytest
import torch
from cases import ARCHITECTURES
from torch import nn

from embens.graph.reading import read_flow


@pytest.mark.parametrize("case", ARCHITECTURES, ids=str)
def test_first_and_last_layers_are_those_of_the_architecture(case):
    flow = read_flow(case.build())
    assert flow.first == case.first
    assert flow.last == case.last


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        return self.inner(x) if x.sum() > 0 else x


def test_a_part_that_cannot_be_traced_is_a_black_box():
    flow = read_flow(nn.Sequential(nn.Linear(3, 3), Branching(), nn.Linear(3, 2)))
    assert flow.upstream["2"] == {"0", "1.inner"}


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        h = 1 * x
        h[:, :1].add_(self.a(x)[:, :1])
        h.add_(self.b(x))
        return self.c(h)


def test_a_value_that_is_changed_in_place_depends_on_the_change():
    assert read_flow(InPlace()).upstream["c"] == {"a", "b"}


class Updating(nn.Module):
    """Changes a parameter whenever it is called."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        for parameter in self.a.parameters():
            parameter.data.mul_(0.5)
        return self.b(self.a(x))


def test_reading_does_not_change_the_parameters():
    reference = Updating()
    weight = reference.a.weight.detach().clone()
    read_flow(reference)
    assert torch.equal(reference.a.weight, weight)


def test_a_flattened_image_has_several_features_per_channel():
    reference = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    assert read_flow(reference).repeat == {"3": 16}
