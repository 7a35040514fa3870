"""References that do unusual things: no member may silently be wrong."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import cases
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import embens


class Net(nn.Module):
    """Layers a … d of width 6, a head, and a forward given as a function."""

    def __init__(self, run):
        super().__init__()
        for name in "abcd":
            setattr(self, name, nn.Linear(6, 6))
        self.norm = nn.LayerNorm(6)
        self.wide = nn.Linear(6, 8)
        self.deep = nn.Linear(8, 12)
        self.narrow = nn.Linear(4, 3)
        self.act = nn.ReLU(inplace=True)
        self.block = Block()
        self.pop = Populated()
        self.out = nn.Linear(6, 3)
        self.run = run

    def forward(self, x):
        return self.run(self, x)


@dataclass
class State:
    x: Tensor


class Block(nn.Module):
    def forward(self, state):
        return State(torch.tanh(state.x) * 2)


class Populated(nn.Module):
    def forward(self, x):
        return x + 1


def in_place_after_two(s, x):
    h = s.b(s.a(x))
    h.relu_()
    return s.out(h)


def added_in_place(s, x):
    h = s.a(x)
    y = s.c(torch.tanh(s.b(x)))
    h.add_(y)
    return s.out(s.norm(h))


def added_through_a_view(s, x):
    h = s.a(x)
    y = s.c(torch.tanh(s.b(x)))
    h[:, :6].add_(y)
    return s.out(s.norm(h))


def augmented(s, x):
    h = s.a(x)
    h += 1
    return s.out(h)


def hidden_in_an_object(s, x):
    return s.out(s.block(State(s.b(torch.relu(s.a(x))))).x)


def shape_of_a_shared_value(s, x):
    h = s.wide(x)
    n, d = h.shape
    return s.narrow(s.deep(h).view(n, -1, 4) + d)


def in_place_module_on_a_value_used_twice(s, x):
    z = s.a(x)
    y = s.act(z)
    return s.out(y + s.b(z))


def in_place_keyword(s, x):
    f = s.a(x)
    return s.out(F.relu(f, inplace=True))


def two_branches(s, x):
    h = torch.tanh(s.a(x))
    return s.out(s.b(h) + s.c(h))


def around_a_shared_layer(s, x):
    h = torch.tanh(s.a(x))
    return s.out(h + s.b(h))


def stored(s, x):
    s.feature = s.a(x)
    return s.out(F.relu(s.feature))


def called_by_keyword(s, x):
    return s.out(input=torch.tanh(s.b(input=s.a(input=x))))


CASES = [
    in_place_after_two,
    added_in_place,
    added_through_a_view,
    augmented,
    hidden_in_an_object,
    shape_of_a_shared_value,
    in_place_module_on_a_value_used_twice,
    in_place_keyword,
    two_branches,
    around_a_shared_layer,
    stored,
    called_by_keyword,
]
FAMILIES = {
    "batch_ensemble": lambda r, **k: embens.batch_ensemble(r, 3, **k),
    "mc_dropout": lambda r, **k: embens.mc_dropout(r, 3, law=embens.laws.Normal(), **k),
    "last_layer_dropout": lambda r, **k: embens.last_layer_dropout(r, 3, **k),
    **{name: partial(family, members=3) for name, family in cases.FAMILIES.items()},
}


@pytest.mark.parametrize("run", CASES)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("read_from", ["code", "example"])
@pytest.mark.filterwarnings("ignore:this network can't run several", "ignore:the data flow of")
def test_members_and_gradients_are_right_whatever_the_code_does(run, family, read_from):
    x, target = torch.randn(4, 6), torch.tensor([0, 1, 2, 1])
    reference = Net(run)
    ensemble = family(reference, **({"example_input": x} if read_from == "example" else {}))
    alone = [ensemble.member(a) for a in range(3)]
    criterion = lambda o, t: F.cross_entropy(o.flatten(1)[:, :3], t)  # noqa: E731
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        for chunk in (1, 2, None):
            with mode():
                outputs = ensemble(x, chunk=chunk)
            for a in range(3):
                torch.testing.assert_close(outputs[a].clone(), alone[a](x).detach())
    names = [n for n, _ in ensemble.named_parameters()]
    gradients = []
    for chunk in (None, 1, 2, 3):
        ensemble.zero_grad()
        if chunk is None:
            ensemble.objective(ensemble(x), target, criterion=criterion).backward()
        else:
            ensemble.backward(x, target, criterion=criterion, chunk=chunk)
        gradients.append([p.grad for p in ensemble.parameters() if p.grad is not None])
    for other in gradients[1:]:
        for p, q in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(p, q)
    assert [n for n, _ in ensemble.named_parameters()] == names


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("run", [augmented, in_place_after_two, added_in_place])
def test_compiled_and_exported_members_are_right_whatever_the_code_does(run):
    x = torch.randn(4, 6)
    for chunk in (1, 2):
        ensemble = embens.last_layer_dropout(Net(run), 3)
        ensemble.chunk = chunk
        torch._dynamo.reset()
        expected = torch.stack([ensemble.member(a)(x) for a in range(3)])
        torch.testing.assert_close(torch.compile(ensemble, backend="eager")(x), expected)
        torch.testing.assert_close(torch.export.export(ensemble, (x,)).module()(x), expected)


def test_copies_of_parametrized_layers_keep_their_modulations():
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
    reference = nn.Sequential(normed, nn.ReLU(), spectral, nn.ReLU(), nn.Linear(6, 3)).eval()
    ensemble = embens.batch_ensemble(reference, 3)
    x = torch.randn(4, 6)
    assert torch.equal(copy.deepcopy(ensemble)(x), ensemble(x))
    for a in range(3):
        torch.testing.assert_close(ensemble(x)[a], ensemble.member(a)(x))


def test_a_quotient_by_a_modulated_output_does_not_collapse():
    for run in (
        lambda s, x: x[:, :3] / s.out(F.relu(s.a(x))),
        lambda s, x: 1 / s.out(F.relu(s.a(x))),
    ):
        for example in (None, torch.randn(4, 6)):
            with pytest.raises(ValueError, match="not linear"):
                embens.last_layer_dropout(Net(run), 3, example_input=example).collapse()
    ensemble = embens.last_layer_dropout(Net(lambda s, x: s.out(F.relu(s.a(x))) / 3), 3)
    x = torch.randn(4, 6)
    torch.testing.assert_close(ensemble.collapse()(x), ensemble(x).mean(0))


class StochasticDepth(nn.Module):
    def forward(self, x):
        if not self.training:
            return x
        return x * torch.empty(len(x), 1).bernoulli_(0.5)


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("example", [None, torch.ones(8, 6)])
def test_random_modules_of_the_users_own_draw_separately(mode, example):
    reference = nn.Sequential(nn.Linear(6, 6), StochasticDepth(), nn.Tanh(), nn.Linear(6, 3))
    reference.train(mode)
    ensemble = embens.mc_dropout(
        reference, 3, law=embens.laws.Constant(), sites="last", example_input=example
    )
    a, b, c = ensemble.train()(torch.randn(64, 6), chunk=1)
    assert not torch.equal(a, b)
    assert not torch.equal(b, c)


def test_layers_that_only_training_uses_are_sites_too():
    class Auxiliary(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.extra, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            h = torch.tanh(self.a(x))
            if self.training:
                h = h + self.extra(h)
            return self.out(h)

    ensemble = embens.batch_ensemble(Auxiliary().eval(), 3)
    assert "extra" in {s.layer for s in ensemble.plan.sites}


def test_reading_an_example_leaves_the_random_state_and_the_reference_alone():
    reference = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 3))
    state = torch.get_rng_state()
    statistics = copy.deepcopy(reference.state_dict())
    generator = torch.Generator().manual_seed(0)
    embens.batch_ensemble(reference, 3, example_input=torch.ones(8, 6), generator=generator)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, statistics[k]) for k, v in reference.state_dict().items())
    assert reference.training


def test_embed_works_in_several_threads_at_once():
    """torch.fx changes nn.Module while it traces; that must not be seen by other threads."""
    call = nn.Module.__call__
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(20)))
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: embens.batch_ensemble(net, 2), range(12)))
    assert nn.Module.__call__ is call
    assert all(len(e.plan.sites) == len(made[0].plan.sites) for e in made)


def test_what_other_threads_do_is_no_part_of_the_code_that_is_read():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(20)))
    stop, outputs, x = threading.Event(), [], torch.ones(2, 4)

    def use():
        while not stop.is_set():
            outputs.append((net(x), [layer[0].weight for layer in net]))

    with ThreadPoolExecutor(1) as pool:
        using = pool.submit(use)
        made = [embens.batch_ensemble(net, 2) for _ in range(20)]
        stop.set()
        using.result()
    assert all(len(e.plan.sites) == 38 for e in made)
    assert all(torch.equal(y, net(x)) and isinstance(w[0], nn.Parameter) for y, w in outputs)
