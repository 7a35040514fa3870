"""What a traced graph depends on besides its inputs."""

import pytest
from torch import nn

from embens.graph.guards import Guard, attributes_of, random_state, snapshot

SCALE = 1.0


class Scaled(nn.Module):
    offset = 0.0

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.factors = [1.0, 2.0]
        self.factor = 1.0

    def forward(self, x):
        return self.layer(x) * self.factor * self.factors[0] * SCALE + self.offset


def test_a_guard_holds_while_nothing_changes():
    assert Guard(Scaled()).holds()


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module, "factor", 2.0),
        lambda module: module.factors.append(3.0),
        lambda module: module.eval(),
        lambda module: setattr(module, "layer", nn.Linear(2, 2)),
        lambda module: module.layer.register_forward_hook(lambda *_: None),
    ],
)
def test_a_guard_notices_changes_of_the_module(change):
    module = Scaled()
    guard = Guard(module)
    change(module)
    assert not guard.holds()


def test_a_guard_notices_global_and_class_variables(monkeypatch):
    guard = Guard(Scaled())
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    assert not guard.holds()
    guard = Guard(Scaled())
    monkeypatch.setattr(Scaled, "offset", 1.0)
    assert not guard.holds()


def test_snapshots_compare_contents_of_containers():
    values = {"a": [1, 2]}
    before = snapshot(values, set())
    assert snapshot(values, set()) == before
    values["a"].append(3)
    assert snapshot(values, set()) != before


def test_attributes_include_buffers_and_parameters():
    names = attributes_of(Scaled())
    assert {"factor", "factors", "layer", "layer.weight"} <= set(names)


def test_random_state_changes_with_every_draw():
    import torch

    before = random_state()
    assert random_state() == before
    torch.rand(1)
    assert random_state() != before
