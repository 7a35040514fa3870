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


def _ring(shift):
    """Return a matrix whose sums along and across the rows do not depend on the shift."""
    return torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])[[shift, 1 - shift, 2]]


CHANGES = {
    "changes its parameter '0.bias'": [
        change_version,
        lambda module: module[0].bias.data.add_(1),
        lambda module: setattr(module[0].bias, "data", torch.zeros(3)),
        lambda module: setattr(module[0], "bias", nn.Parameter(torch.zeros(3))),
        lambda module: module[0].bias.data.copy_(module[0].bias.data.flip(0)),
    ],
    "changes its parameter '0.weight'": [
        lambda module: module[0].weight.data.copy_(module[0].weight.data.flip(0)),
        lambda module: module[0].weight.data.copy_(module[0].weight.data.flip(1)),
        lambda module: module[0].weight.data.copy_(_ring(1)),
    ],
    "registers the parameter '1.late'": [
        lambda module: module[1].register_parameter("late", nn.Parameter(torch.zeros(1)))
    ],
    "registers the buffer 'late'": [lambda module: module.register_buffer("late", torch.zeros(1))],
    "removes the buffer '1.running_var'": [lambda module: delattr(module[1], "running_var")],
    "changes the modules of 'the reference'": [lambda module: module.append(nn.ReLU())],
}
CASES = [(change, message) for message, changes in CHANGES.items() for change in changes]


def give_gradients(module):
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_a_pass_erases_are_refused_by_name(copied, to_none):
    give_gradients(copied.module[0])
    guard = StateGuard(copied, compare=True)
    guard.check()
    for parameter in copied.module.parameters():
        if parameter.grad is not None:
            parameter.grad = None if to_none else torch.zeros_like(parameter)
    with pytest.raises(RuntimeError, match=r"erases the gradient of '0\.weight'"):
        guard.check()


@pytest.mark.parametrize("to_none", [True, False])
def test_a_pass_may_erase_gradients_that_are_none_and_add_to_others(copied, to_none):
    give_gradients(copied.module[0])
    guard = StateGuard(copied, compare=True)
    copied.module[1].zero_grad(set_to_none=to_none)
    copied.module[0].weight.grad += 1
    guard.check()


class Forgetful(nn.Module):
    """A network that erases its gradients at the beginning of each pass."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        for parameter in self.parameters():
            if parameter.is_leaf:
                parameter.grad = None
        return self.b(torch.tanh(self.a(x)))


def test_a_forward_that_erases_gradients_of_other_members_is_refused():
    x = torch.randn(6, 4)
    ensemble = embens.batch_ensemble(Forgetful(), 3, example_input=x)
    embens.objective(ensemble(x), torch.zeros(6, 3)).backward()
    with pytest.raises(RuntimeError, match=r"erases the gradient of 'b\.bias'"):
        ensemble.backward(x, torch.zeros(6, 3))


class ErasingOneLayer(nn.Module):
    """A network that erases the gradients of a layer whose weight is computed for each member."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        self.b.zero_grad()
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def test_zero_grad_of_a_modulated_layer_is_refused_once_there_are_gradients():
    x, y = torch.randn(6, 4), torch.zeros(6, 3)
    ensemble = embens.batch_ensemble(ErasingOneLayer(), 3)
    outputs = ensemble(x)
    for a in range(3):
        torch.testing.assert_close(outputs[a], ensemble.member(a)(x))
    embens.objective(outputs, y).backward()
    for call in (lambda: ensemble(x), lambda: ensemble.backward(x, y)):
        with pytest.raises(RuntimeError, match=r"calls zero_grad\(\)"):
            call()
    ensemble.zero_grad()
    with pytest.raises(RuntimeError, match=r"calls zero_grad\(\)"):
        ensemble.backward(x, y)  # the second member would erase the gradients of the first


class Swapping(nn.Module):
    """A network that swaps the rows of a weight at a later pass."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.passes = nn.Linear(4, 5), nn.Linear(5, 3), 0

    def forward(self, x):
        self.passes += 1
        if self.passes > 2:
            self.b.weight.data.copy_(self.b.weight.data.flip(0))
        return self.b(torch.tanh(self.a(x)))


def test_parameters_are_compared_at_every_pass():
    net, x = Swapping(), torch.randn(6, 4)
    ensemble = embens.embed(net, 2, own="a")
    for _ in range(2):
        ensemble(x)
    with pytest.raises(RuntimeError, match=r"changes its parameter 'b\.weight'"):
        ensemble(x)


@pytest.mark.parametrize(("change", "message"), CASES)
def test_changes_are_refused_by_name(copied, change, message):
    with torch.no_grad():
        copied.module[0].weight.copy_(_ring(0))
        copied.module[0].bias.copy_(torch.arange(3.0))
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
