"""Changes of parameters and buffers by the code of a reference."""

import pytest
import torch
from torch import nn

import embens
from embens.ensemble.changes import StateGuard
from embens.ensemble.copies import MemberCopy


@pytest.fixture
def copied():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    return MemberCopy(embens.embed(net, 2, pre=None, sites="last"))


def change_version(module):
    with torch.no_grad():
        module[0].bias.add_(1)


CHANGES = {
    "changes its parameter '0.bias'": [
        change_version,
        lambda module: module[0].bias.data.add_(1),
        lambda module: setattr(module[0].bias, "data", torch.zeros(3)),
        lambda module: setattr(module[0], "bias", nn.Parameter(torch.zeros(3))),
    ],
    "registers the parameter '1.late'": [
        lambda module: module[1].register_parameter("late", nn.Parameter(torch.zeros(1)))
    ],
    "registers the buffer 'late'": [lambda module: module.register_buffer("late", torch.zeros(1))],
    "removes the buffer '1.running_var'": [lambda module: delattr(module[1], "running_var")],
    "changes the modules of 'the reference'": [lambda module: module.append(nn.ReLU())],
}
CASES = [(change, message) for message, changes in CHANGES.items() for change in changes]


@pytest.mark.parametrize(("change", "message"), CASES)
def test_changes_are_refused_by_name(copied, change, message):
    guard = StateGuard(copied, compare=True)
    guard.check()
    change(copied.module)
    with pytest.raises(RuntimeError, match=message):
        guard.check()


def test_updated_buffers_are_returned_with_both_values(copied):
    guard = StateGuard(copied, compare=True)
    copied.module[1].running_mean.data.add_(1)
    (change,) = guard.buffer_changes()
    assert (change.module, change.name) == ("1", "running_mean")
    assert torch.equal(change.after, change.before + 1)


@pytest.mark.parametrize("value", [None, torch.zeros(4), torch.zeros(3).double()])
def test_buffers_of_another_kind_are_refused_by_name(copied, value):
    guard = StateGuard(copied, compare=True)
    copied.module[1].running_mean = value
    with pytest.raises(RuntimeError, match=r"changes the buffer '1.running_mean'"):
        guard.buffer_changes()
