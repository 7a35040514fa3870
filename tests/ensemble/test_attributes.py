"""Attributes that the forward of members sets, as files hold them."""

import copy
from collections import deque

import pytest
import torch
from torch import nn

import embens
from embens.ensemble.attributes import (
    attribute_names,
    check_attributes,
    read_attributes,
    restore_attributes,
)
from embens.files import Refused

X = torch.linspace(-1, 1, 12).view(3, 4)


class Net(nn.Module):
    """Keeps a counter and its last result, which it reads again, and a loss, which it does not."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 2)
        self.calls, self.result, self.past = 0, None, deque(maxlen=2)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        if self.training:
            self.calls += 1
            self.result = h.mean(0)
            self.loss = h.square().mean()
        if self.result is not None:
            h = h + self.result
        return self.last(h) / (1 + self.calls)


def trained() -> embens.EmbeddedEnsemble:
    torch.manual_seed(0)
    ensemble = embens.batch_ensemble(Net(), 3)
    for _ in range(2):
        ensemble(X)
    return ensemble


def test_attributes_that_the_code_reads_are_returned_without_graphs():
    attributes = read_attributes(trained())
    assert [sorted(member[""]) for member in attributes] == 3 * [["calls", "result"]]
    assert [member[""]["calls"] for member in attributes] == [2, 2, 2]
    assert not any(member[""]["result"].requires_grad for member in attributes)
    assert attribute_names(attributes) == ["'calls' (int)", "'result' (Tensor)"]
    assert attribute_names(attributes, unwritable=True) == []


def test_members_without_changed_attributes_have_nothing_to_save():
    torch.manual_seed(0)
    ensemble = embens.batch_ensemble(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)), 3)
    ensemble(X)
    assert read_attributes(ensemble) == []


@pytest.mark.parametrize("is_called_first", [False, True])
def test_an_ensemble_with_restored_attributes_gives_the_same_outputs(is_called_first):
    ensemble = trained()
    other = embens.batch_ensemble(Net(), 3)
    other.load_state_dict(ensemble.state_dict())
    if is_called_first:
        other(X)
    restore_attributes(other, read_attributes(ensemble))

    torch.testing.assert_close(other.eval()(X), ensemble.eval()(X))
    torch.testing.assert_close(other.train()(X), ensemble.train()(X))
    torch.testing.assert_close(other.eval()(X), ensemble.eval()(X))


def test_values_that_a_file_cannot_hold_are_named():
    attributes = [{"": {"past": deque([1]), "calls": 1, "table": {"a": [1.0, (None, "b")]}}}]
    assert attribute_names(attributes, unwritable=True) == ["'past' (deque)"]


def test_an_ensemble_is_saved_without_attributes_and_warns(tmp_path):
    with pytest.warns(UserWarning, match=r"will not hold 'calls' \(int\), 'result' \(Tensor\)"):
        trained().save(tmp_path / "ensemble.safetensors")


FORGED = {
    "number of members": lambda values: values.pop(),
    "member": lambda values: values.__setitem__(0, 3),
    "module": lambda values: values[0].update(other={"calls": 1}),
    "table": lambda values: values[0].update({"": [1]}),
    "type": lambda values: values[0][""].update(calls="2"),
    "true": lambda values: values[0][""].update(calls=True),
    "method": lambda values: values[0][""].update(forward=1),
    "private": lambda values: values[0][""].update(_parameters={}),
    "layer": lambda values: values[0][""].update(first=1),
    "parameter": lambda values: values[0].update(first={"weight": 1}),
    "mode": lambda values: values[0][""].update(training=False),
    "hook": lambda values: values[0][""].update(register_forward_hook=1),
    "name": lambda values: values[0][""].update({3: 1}),
}


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED)
def test_forged_attributes_are_refused(change):
    ensemble = trained()
    values = copy.deepcopy(read_attributes(ensemble))
    check_attributes(ensemble, values, "file")
    change(values)
    with pytest.raises(Refused, match=r"^file"):
        check_attributes(ensemble, values, "file")


class Stateful(nn.Module):
    """Adds its hidden state of the call before; ``reset`` forgets it."""

    def __init__(self):
        super().__init__()
        self.a, self.out = nn.Linear(6, 6), nn.Linear(6, 3)
        self.reset()

    def reset(self):
        self.hidden = None

    def forward(self, x):
        h = torch.tanh(self.a(x))
        if self.hidden is not None:
            h = h + self.hidden
        self.hidden = h.detach()
        return self.out(h)


def test_attributes_of_members_can_be_reset():
    ensemble, x = embens.batch_ensemble(Stateful(), 3), torch.randn(4, 6)
    first, second = ensemble(x), ensemble(x)
    ensemble.reference.reset()
    ensemble.reset_attributes()

    assert not torch.equal(first, second)
    torch.testing.assert_close(ensemble(x), first)
    torch.testing.assert_close(ensemble(x), second)
