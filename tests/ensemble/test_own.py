"""Modules with tensors of each member's own."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from embens.ensemble.own import Own, call_with
from embens.ensemble.plan import OwnTensors
from torch import nn

import embens
from embens.ensemble import own

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
def test_linear_layers_run_all_members_at_once(make, shape, monkeypatch):
    ensemble = embens.independent(First(make()), 3)
    batched = isinstance(make(), nn.Linear)
    calls = []
    monkeypatch.setattr(own, "call_with", lambda *a, **k: calls.append(a) or call_with(*a, **k))
    ensemble(torch.randn(shape), chunk=3)
    assert bool(calls) != batched


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
    module, x = nn.BatchNorm1d(2), torch.randn(3, 2)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    mean = torch.zeros(2)
    doubled = call_with(module, {"weight": torch.full((2,), 2.0), "running_mean": mean}, (x,), {})
    torch.testing.assert_close(doubled, 2 * copy.deepcopy(module)(x))
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


# State of a module's own: one for every member


class Centred(nn.Module):
    """Keeps a running mean, by assignment or in place, and says what it gave last."""

    def __init__(self, in_place: bool = False, grows: bool = False):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))
        self.in_place, self.grows, self.shown = in_place, grows, None

    def forward(self, x):
        if self.grows:
            self.mean = torch.cat([self.mean, x.detach().mean(0)])[:10]
        elif self.in_place:
            self.mean.mul_(0.5).add_(x.detach().mean(0))
        else:
            self.mean = 0.5 * self.mean + x.detach().mean(0)
        self.shown = y = x - self.mean[:5]
        return y


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.history = 0, []

    def forward(self, x):
        x = x + sum(self.history) / (1 + self.calls)
        self.calls += 1
        self.history.append(x.detach())
        self.last = x if not hasattr(self, "last") else x + 0.1 * self.last.detach()
        return self.last


class Followed(nn.Module):
    """Has a module inside whose state it moves on by a method, not by a call."""

    def __init__(self):
        super().__init__()
        self.a, self.inside, self.b = nn.Linear(3, 5), Followed.Inside(), nn.Linear(5, 2)

    def forward(self, x):
        x = torch.tanh(self.a(x))
        self.inside.follow(x.detach())
        return self.b(x - self.inside.mean)

    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(5))

        def follow(self, x):
            self.mean = 0.5 * self.mean + x.mean(0)


def around(inside: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), inside, nn.Linear(5, 2))


def spectral(norm) -> nn.Module:
    layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    for i in (0, 2):
        layers[i] = norm(layers[i])
        with torch.no_grad():  # so that each step of the power iteration shows
            u = next(b for n, b in layers[i].named_buffers() if n.endswith("_u"))
            u.copy_(nn.functional.normalize(torch.randn(u.shape), dim=0))
    return layers


STATEFUL = {
    "assigned": lambda: around(Centred()),
    "in place": lambda: around(Centred(in_place=True)),
    "attributes": lambda: around(Remembering()),
    "a method": Followed,
    "spectral norm": lambda: spectral(nn.utils.parametrizations.spectral_norm),
    "spectral norm by a hook": lambda: spectral(nn.utils.spectral_norm),
}


@pytest.mark.filterwarnings("ignore:the forward assigns", "ignore:this network can't run several")
@pytest.mark.filterwarnings("ignore:.torch.nn.utils.spectral_norm. is now:FutureWarning")
@pytest.mark.parametrize("case", STATEFUL)
def test_what_a_module_keeps_belongs_to_each_member_whatever_the_chunk(case):
    torch.manual_seed(0)
    reference = STATEFUL[case]().double().train()
    ensemble = embens.batch_ensemble(reference, 4)
    x = torch.randn(6, 3, dtype=torch.float64)
    for chunk in (1, 2, 3, 4):
        running = copy.deepcopy(ensemble)
        members = [ensemble.member(a) for a in range(4)]
        for _ in range(3):
            outputs = running(x, chunk=chunk)
            expected = torch.stack([member(x) for member in members])
            torch.testing.assert_close(outputs, expected)
        outputs.sum().backward()
        again = copy.deepcopy(running)(x, chunk=1)
        alone = torch.stack([running.member(a)(x) for a in range(4)])
        torch.testing.assert_close(again, alone)
        torch.testing.assert_close(again, running(x, chunk=chunk))


def test_a_running_buffer_of_a_users_module_is_saved_for_each_member(tmp_path):
    reference = nn.Sequential(nn.Linear(3, 5), Centred(), nn.Linear(5, 2))
    with pytest.warns(
        UserWarning, match="the forward assigns '1.shown' and leaves it for others to read"
    ):
        ensemble = embens.batch_ensemble(reference, 4)
    x = torch.randn(6, 3)
    ensemble(x)
    assert ensemble.network[1].mean.shape == (4, 5)
    ensemble.save(tmp_path / "e.safetensors")
    loaded = embens.load(tmp_path / "e.safetensors", reference)
    torch.testing.assert_close(loaded(x), ensemble(x))


def test_attributes_that_a_forward_keeps_are_named_and_members_run_one_by_one():
    with pytest.warns(UserWarning, match=r"assigns '2.calls', '2.history', '2.last' and reads"):
        ensemble = embens.batch_ensemble(around(Remembering()), 3)
    assert "keeps '2.calls'" in repr(ensemble)
    pickle.loads(pickle.dumps(ensemble))


@pytest.mark.filterwarnings("ignore:the forward assigns", "ignore:this network can't run several")
def test_a_running_buffer_that_changes_its_shape_is_refused():
    ensemble = embens.batch_ensemble(around(Centred(grows=True)), 3)
    for chunk in (1, 3):
        with pytest.raises(ValueError, match=r"'mean' of a Centred went from shape \(5,\) to \(10"):
            ensemble(torch.randn(6, 3), chunk=chunk)


@pytest.mark.filterwarnings("ignore:the forward assigns")
def test_what_a_module_before_the_first_modulation_keeps_is_one_for_all_members():
    reference = nn.Sequential(nn.Linear(3, 5), Centred(), nn.Tanh(), nn.Linear(5, 2))
    ensemble = embens.last_layer_dropout(reference, 3)
    x = torch.randn(6, 3)
    for chunk in (1, 3):
        ensemble(x, chunk=chunk)
        reference(x)
    torch.testing.assert_close(ensemble.network[1].mean, reference[1].mean)
