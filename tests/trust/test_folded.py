"""Networks that the folded form would get wrong, each beside plain copies of its members."""

import copy
import random
import warnings
from enum import IntEnum

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import embens


class Net(nn.Module):
    """Layers a, b and out with a function between them; ``change`` may alter the network."""

    def __init__(self, run, change=lambda net: None):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.run = run
        self.calls = 0
        change(self)

    def forward(self, x):
        return self.out(self.run(self, torch.tanh(self.a(x))))


def assert_members_are_plain_networks(ensemble, *args):
    outputs = ensemble(*args)
    for a in range(ensemble.members):
        torch.testing.assert_close(outputs[a], ensemble.member(a)(*args))


def tie(net):
    net.b.weight = net.a.weight


def register_index(net):
    net.scale = nn.Parameter(torch.randn(6))
    net.register_buffer("index", torch.randint(6, (3, 6)))


class Axis(IntEnum):
    FEATURES = 1


RUNS = {
    "tied": (lambda net, h: torch.tanh(net.b(h)) @ net.b.weight, tie),
    "indexed": (lambda net, h: torch.tanh(net.b(h * net.scale[net.index][:1])), register_index),
    "norm": (
        lambda net, h: net.norm(torch.tanh(net.b(h)).view(-1, 2, 3)).flatten(1),
        lambda net: setattr(net, "norm", nn.InstanceNorm2d(4, affine=True)),
    ),
    "axis": (lambda net, h: torch.softmax(net.b(h), Axis.FEATURES), lambda net: None),
    "numbers": (lambda net, h: net.b(h) / np.float32(2), lambda net: None),
}


@pytest.mark.parametrize("name", RUNS)
def test_members_are_plain_networks(name):
    torch.manual_seed(0)
    net = Net(*RUNS[name])
    example = torch.randn(4, 6)
    sites = ["b"] if name == "tied" else "hidden"
    ensemble = embens.embed(net, 3, sites=sites, example_input=example)
    assert_members_are_plain_networks(ensemble, example)


def test_an_argument_by_position_and_by_name_is_refused():
    ensemble = embens.batch_ensemble(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), 2)
    with pytest.raises(TypeError, match="multiple values for argument 'input'"):
        ensemble(torch.zeros(1, 2), input=torch.ones(1, 2))


@pytest.mark.parametrize("family", [embens.low_rank, embens.independent])
def test_sequences_of_length_0_are_right(family):
    ensemble = family(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)), 2)
    assert ensemble(torch.zeros(7, 0, 6)).shape == (2, 7, 0, 3)


def test_collapsing_a_network_with_hooks_is_refused():
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    net[2].register_forward_hook(lambda module, args, outputs: outputs.square())
    ensemble = embens.last_layer_dropout(net, 3)
    with pytest.raises(ValueError, match="cannot be collapsed: '2' has a hook"):
        ensemble.collapse()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        self.encoder, self.out = nn.TransformerEncoder(layer, 1), nn.Linear(6, 3)

    def forward(self, x, mask):
        return self.out(self.encoder(x, src_key_padding_mask=mask).mean(1))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padded_positions_are_those_of_torch():
    torch.manual_seed(0)
    ensemble = embens.last_layer_dropout(Encoder(), 2).eval()
    mask = torch.tensor([[False, False, True], [False, False, False]])
    with torch.no_grad():
        assert_members_are_plain_networks(ensemble, torch.randn(2, 3, 6), mask)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        if isinstance(x, torch.Tensor):
            x = torch.tanh(self.a(x))
        return self.out(torch.tanh(self.b(x)))


def test_a_layer_that_tracing_does_not_see_is_a_guess():
    with pytest.warns(UserWarning, match="guessed: that 'a' is never called"):
        embens.batch_ensemble(Branching(), 2)
    net = Branching()
    net.b.register_forward_hook(lambda module, args, outputs: outputs)
    net.unused = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="never called"):
        embens.batch_ensemble(net, 2)


def test_a_layer_that_is_not_used_gives_no_warning():
    net = Net(lambda net, h: net.b(h))
    net.unused = nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        embens.batch_ensemble(net, 2)


def count_in_training(net, h):
    if net.training:
        net.calls += 1
    return net.b(h) * (1 + 1 / (1 + net.calls))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda ensemble: ensemble.subset([0, 1])])
def test_copies_keep_the_attributes_of_members(copied):
    torch.manual_seed(0)
    ensemble, x = embens.batch_ensemble(Net(count_in_training), 2), torch.randn(4, 6)
    ensemble(x)
    ensemble(x)
    twin = copied(ensemble)
    torch.testing.assert_close(twin.eval()(x), ensemble.eval()(x))


def test_tracing_draws_no_random_numbers():
    def draw(net, h):
        return net.b(h) * random.random() * np.random.rand()

    random.seed(0)
    np.random.seed(0)
    expected = random.getstate(), np.random.get_state()[1].tolist()
    ensemble = embens.batch_ensemble(Net(draw), 2)
    assert ensemble.executor  # traces the network
    assert (random.getstate(), np.random.get_state()[1].tolist()) == expected


COUNTS = [0]


def test_changes_outside_of_the_modules_give_a_warning():
    def count(net, h):
        COUNTS[0] += 1
        return net.b(h)

    ensemble = embens.batch_ensemble(Net(count), 2)
    with pytest.warns(UserWarning, match="changes 'a list' outside of its modules"):
        ensemble(torch.zeros(1, 6))


def test_a_weight_that_is_tied_in_the_forward_is_refused():
    def assign(net, h):
        net.b.weight = net.a.weight
        return F.relu(net.b(h))

    ensemble = embens.embed(Net(assign), 2, example_input=torch.zeros(1, 6))
    with pytest.raises(RuntimeError, match="assigns a weight of one layer to another"):
        ensemble(torch.zeros(1, 6))


class Named(nn.Module):
    def __init__(self, *names):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(6, 6) for name in names})
        self.a_b, self.a = nn.Linear(6, 6), nn.ModuleDict({"b": nn.Linear(6, 6)})
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        for layer in (*self.layers.values(), self.a_b, self.a["b"]):
            x = torch.tanh(layer(x))
        return self.out(x)


NAMES = ["hours-per-week", "a b", "class", "None", "a=b", "a'b", 'a"b', "a\\b", "a\nb", "0", "é"]


@pytest.mark.parametrize("family", [embens.batch_ensemble, embens.independent, embens.low_rank])
def test_modules_may_have_any_name(family):
    ensemble = family(Named(*NAMES), 2)
    assert_members_are_plain_networks(ensemble, torch.randn(4, 6))
    ensemble = family(Named("hours-per-week", "0", "é"), 2)
    assert_members_are_plain_networks(ensemble, torch.randn(4, 6))
    assert ensemble.executor == "folded"


def test_a_slash_in_a_name_is_refused():
    with pytest.raises(ValueError, match=r"'layers\.a/b' contains a slash"):
        embens.batch_ensemble(Named("a/b"), 2)


def test_sparse_buffers_are_compared():
    def multiply(net, h):
        return torch.tanh(net.b(net.adjacent @ h))

    def register(net):
        net.register_buffer("adjacent", torch.eye(4).to_sparse())

    ensemble = embens.embed(Net(multiply, register), 2, example_input=torch.randn(4, 6))
    assert_members_are_plain_networks(ensemble, torch.randn(4, 6))
