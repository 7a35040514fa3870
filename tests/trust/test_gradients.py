"""Code that changes gradients but not outputs, in ensembles whose members equal the reference.

With modulations of 1 the mean of the members' losses has the gradients of the reference.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import embens
from embens import laws

MEMBERS = 3


class Net(nn.Module):
    """Layers a, b and out with a function between them; ``change`` may alter the network."""

    def __init__(self, run, change=None):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.run = run
        if change is not None:
            change(self)

    def forward(self, x):
        return self.out(self.run(self, torch.tanh(self.a(x))))


class Doubled(torch.autograd.Function):
    """The identity, with twice its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


@torch.no_grad()
def without_gradients(net, h):
    return net.b(h)


def plain(net, h):
    return torch.tanh(net.b(h))


def straight_through(net, h):
    h = net.b(h)
    return h + (h.sign() - h).detach()


def half_without_gradients(net, h):
    with torch.no_grad():
        scale = net.b(h)
    return h * scale


def switched_off(net, h):
    torch.set_grad_enabled(False)
    scale = net.b(h)
    torch.set_grad_enabled(True)
    return h * scale


def hooked_value(net, h):
    h = net.b(h)
    if h.requires_grad:
        h.register_hook(lambda gradient: 2 * gradient)
    return h


def recomputed(net, h):
    return checkpoint(net.b, h, use_reentrant=False)


def recomputed_by_reentry(net, h):
    return checkpoint(net.b, h, use_reentrant=True)


def scale_module_gradients(net):
    net.b.register_full_backward_hook(lambda module, inputs, outputs: (2 * inputs[0],))


def freeze(net):
    net.b.weight.requires_grad_(False)


CASES = {
    "plain": (plain,),
    "in place": (lambda net, h: F.relu(net.b(h), inplace=True),),
    "detached": (lambda net, h: h * net.b(h).detach(),),
    "weight detached": (lambda net, h: F.linear(h, net.b.weight.detach()),),
    "data": (lambda net, h: h * net.b(h).data,),
    "straight through": (straight_through,),
    "no_grad": (half_without_gradients,),
    "no_grad as decorator": (lambda net, h: h * without_gradients(net, h),),
    "set_grad_enabled": (switched_off,),
    "autograd function": (lambda net, h: Doubled.apply(net.b(h)),),
    "hook of a value": (hooked_value,),
    "hook of a module": (plain, scale_module_gradients),
    "frozen": (plain, freeze),
    "checkpoint": (recomputed,),
    "reentrant checkpoint": (recomputed_by_reentry,),
    "ties": (lambda net, h: torch.maximum(net.b(h), net.b(h)),),
    "zero times infinity": (lambda net, h: torch.where(h > 9, h.sqrt(), net.b(h)),),
}


def gradients(module, x, members):
    """Return the gradients of the mean over members of the sum of the squared outputs."""
    x = x.clone().requires_grad_()
    (module(x) ** 2).sum().div(members).backward()
    named = {"input": x.grad}
    reference = module if members == 1 else module.reference
    for name, parameter in reference.named_parameters():
        named[name] = parameter.grad
    return named


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("sites", ["hidden", "last"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_reference(name, sites):
    torch.manual_seed(0)
    reference = Net(*CASES[name]).double()
    ensemble = embens.embed(
        copy.deepcopy(reference),
        MEMBERS,
        pre=None,
        post=laws.Constant(1.0),
        sites=sites,
        trainable=False,
        example_input=torch.randn(4, 6, dtype=torch.float64),
    )
    x = torch.randn(4, 6, dtype=torch.float64)
    expected = gradients(reference, x, 1)
    computed = gradients(ensemble, x, MEMBERS)
    for key, gradient in expected.items():
        torch.testing.assert_close(computed[key], gradient, equal_nan=True, msg=key)


def branching(net, h):
    return net.b(h) if h.sum() < 1e9 else h


@pytest.mark.parametrize(("run", "executor"), [(plain, "folded"), (branching, "merged")])
def test_hooks_of_parameters_see_the_gradient_of_all_members(run, executor):
    reference = Net(run).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    one = laws.Constant(1.0)
    ensemble = embens.embed(reference, MEMBERS, pre=None, post=one, example_input=x)
    for module in (reference, ensemble.reference):
        module.b.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    expected = gradients(reference, x, 1)
    computed = gradients(ensemble, x, MEMBERS)
    assert ensemble.executor.startswith(executor)
    torch.testing.assert_close(computed["b.weight"], expected["b.weight"])
    with pytest.warns(UserWarning, match=r"'b.weight' has hooks, which torch does not copy"):
        embens.batch_ensemble(reference, 2, example_input=x)
