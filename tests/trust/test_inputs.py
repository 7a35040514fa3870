"""Forwards that change their inputs in place: no member, chunk or caller sees it."""

import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from trust.story import FAMILIES, follow, grow_up, quiet, x_of

import embens


class Net(nn.Module):
    """A small network whose inputs go through a function first."""

    def __init__(self, prepare):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("shift", torch.tensor(0.5))
        self.relu = nn.ReLU(inplace=True)
        self.prepare = prepare

    def forward(self, x):
        return self.out(torch.tanh(self.b(torch.tanh(self.a(self.prepare(self, x))))))


def subtract(s, x):
    x.sub_(0.5)
    return x


def augmented(s, x):
    x += s.shift
    return x


def augmented_minus(s, x):
    x -= 1
    return x


def augmented_power(s, x):
    x **= 2
    return x


def augmented_modulo(s, x):
    x %= 2
    return x


def augmented_floor(s, x):
    x //= 2
    return x


def item(s, x):
    x[:, 0] = 0
    return x


def rows(s, x):
    x[0] = 1.0
    return x


def ellipsis_item(s, x):
    x[..., 1:3] = 7.0
    return x


def mask(s, x):
    x[x > 0] = 0
    return x


def filled(s, x):
    x.masked_fill_(x > 0, 0.0)
    return x


def view(s, x):
    x[:, :2].zero_()
    return x


def flat_view(s, x):
    x.view(-1).add_(1)
    return x


def transposed(s, x):
    x.t().mul_(2)
    return x


def attribute_view(s, x):
    x.T.mul_(2)
    return x


def real_part(s, x):
    x.real.mul_(2)
    return x


def data(s, x):
    x.data.mul_(2)
    return x


def data_assigned(s, x):
    x.data = x.data * 2
    return x


def detached(s, x):
    x.detach().mul_(2)
    return x


def numpy_view(s, x):
    x.detach().numpy()[:] *= 2
    return x


def no_gradient(s, x):
    with torch.no_grad():
        x.mul_(2)
    return x


def out(s, x):
    torch.add(x, 1, out=x)
    return x


def out_of_a_product(s, x):
    torch.mul(x, 2.0, out=x)
    return x


def out_of_a_method(s, x):
    torch.clamp(x, 0, 1, out=x)
    return x


def foreach(s, x):
    torch._foreach_add_([x], 1.0)
    return x


def functional(s, x):
    return F.relu(x, inplace=True)


def functional_underscore(s, x):
    return F.relu_(x)


def torch_underscore(s, x):
    return torch.sigmoid_(x)


def module(s, x):
    return s.relu(x)


def same_type(s, x):
    y = x.double()
    y.add_(1)
    return y


def same_device(s, x):
    y = x.cpu()
    y.add_(1)
    return y


def contiguous(s, x):
    y = x.contiguous()
    y.add_(1)
    return y


def expanded(s, x):
    y = x.expand(-1, 6)
    y.add_(1)
    return y


def chunks(s, x):
    left, right = x.chunk(2, dim=1)
    left.zero_()
    return torch.cat([left, right], 1)


def copied_into(s, x):
    x.copy_(x.flip(1))
    return x


def resized(s, x):
    x.set_((x * 2).detach())
    return x


def in_a_helper(s, x):
    def shift(values):
        for value in values:
            value.sub_(1)

    shift([x])
    return x


def initialised(s, x):
    with torch.no_grad():
        nn.init.constant_(x, 0.3)
    return x


CHANGES = [
    *(subtract, augmented, augmented_minus, augmented_power, augmented_modulo, augmented_floor),
    *(item, rows, ellipsis_item, mask, filled, view, flat_view, transposed, attribute_view),
    *(real_part, data, data_assigned, detached, numpy_view, no_gradient, out, out_of_a_product),
    *(out_of_a_method, foreach, functional, functional_underscore, torch_underscore, module),
    *(same_type, same_device, contiguous, expanded, chunks, copied_into, resized, in_a_helper),
    initialised,
]


@pytest.mark.parametrize("index", range(len(CHANGES)), ids=lambda index: CHANGES[index].__name__)
@quiet
def test_changes_of_the_input_stay_within_a_member(index):
    family = list(FAMILIES)[index % len(FAMILIES)]
    ensemble = grow_up(Net(CHANGES[index]), family)
    x = x_of()
    follow(ensemble, [x, x, lambda m: m.eval(), x], chunk=(None, 2)[index % 2])


class Nested(nn.Module):
    """Takes a dictionary of lists, and an object that it fills."""

    def __init__(self, change):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.change = change

    def forward(self, batch, cache=None):
        x = self.change(batch)
        if cache is not None:
            cache.keys.append(x)
            x = x + sum(cache.keys)
            cache.total += 1
            x = x * cache.total
        return self.out(torch.tanh(self.b(torch.tanh(self.a(x)))))


def leaf_changed(batch):
    batch["x"][0].mul_(2)
    return batch["x"][0] + batch["x"][1]


def entry_removed(batch):
    return batch.pop("x")[0]


def entry_replaced(batch):
    batch["x"][0] = batch["x"][0] * 2
    return batch["x"][0]


def list_extended(batch):
    batch["x"].append(batch["x"][0])
    return sum(batch["x"])


class Cache:
    """A cache that a forward fills."""

    def __init__(self):
        self.keys = []
        self.total = 0


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("change", [leaf_changed, entry_removed, entry_replaced, list_extended])
@quiet
def test_nested_inputs_and_caches_stay_as_they_are(change, cached):
    ensemble = grow_up(Nested(change), "batch ensemble")
    members = [ensemble.member(a) for a in range(3)]
    x = x_of()
    for _ in range(3):
        batch = {"x": [x.clone(), x.clone()]}
        cache = Cache() if cached else None
        outputs = ensemble(batch, cache)
        assert len(batch["x"]) == 2
        assert torch.equal(batch["x"][0], x)
        assert cache is None or (cache.keys == [] and cache.total == 0)
        for a, member in enumerate(members):
            expected = member({"x": [x.clone(), x.clone()]}, Cache() if cached else None)
            torch.testing.assert_close(outputs[a], expected)


@pytest.mark.parametrize("is_leaf", [True, False], ids=["leaf", "result"])
def test_gradients_reach_tensors_deep_in_an_argument(is_leaf):
    ensemble = grow_up(Nested(lambda batch: batch.inner.x), "batch ensemble")
    x = x_of().requires_grad_()

    def gradient_of(network):
        inner = types.SimpleNamespace(x=x if is_leaf else 2 * x)
        outputs = network(types.SimpleNamespace(inner=inner))
        return torch.autograd.grad(outputs.square().sum(), x)[0]

    expected = sum(gradient_of(ensemble.member(a)) for a in range(3))
    torch.testing.assert_close(gradient_of(ensemble), expected)


@pytest.mark.parametrize("is_folded", [True, False], ids=["folded", "merged"])
@quiet
def test_attributes_of_an_input_are_seen(is_folded):
    def masked(s, x):
        x = x * x.mask if hasattr(x, "mask") else x
        return x if is_folded else x * len(x)

    ensemble = grow_up(Net(masked), "batch ensemble")
    x = x_of()
    follow(ensemble, [x])
    x.mask = torch.zeros(4, 1, dtype=torch.float64)
    outputs = ensemble(x)
    for a in range(3):
        torch.testing.assert_close(outputs[a], ensemble.member(a)(x))


class Doubling(torch.Tensor):
    """A tensor with another product."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return 2 * result if func is torch.nn.functional.linear else result


@quiet
def test_inputs_of_other_classes_do_what_they_do_in_a_member():
    ensemble = grow_up(Net(lambda s, x: x), "batch ensemble")
    x = x_of(60).as_subclass(Doubling)
    outputs = ensemble(x)
    for a in range(3):
        torch.testing.assert_close(outputs[a], ensemble.member(a)(x))


def test_an_argument_that_cannot_be_copied_is_refused():
    class Locked:
        def __deepcopy__(self, memo):
            raise TypeError("no copies of me")

    ensemble = grow_up(Nested(lambda batch: batch["x"]), "batch ensemble")
    with pytest.raises(TypeError, match="argument of type Locked cannot be copied for each member"):
        ensemble({"x": x_of()}, Locked())


@pytest.mark.parametrize("batch", ["same", "own", "split"])
@pytest.mark.parametrize("prepare", [subtract, view, data, module])
@quiet
def test_gradients_of_an_input_that_the_forward_changes_are_those_of_the_members(prepare, batch):
    ensemble = grow_up(Net(prepare), "batch ensemble")
    members = [ensemble.member(a) for a in range(3)]
    x = x_of(6)
    if batch == "own":
        x = torch.stack([x, 2 * x, 3 * x])
    for _ in range(2):
        given = x.clone().requires_grad_()
        outputs = ensemble(given, batch=batch)
        (gradient,) = torch.autograd.grad(outputs.square().sum(), given)
        again = x.clone().requires_grad_()
        copied = again.clone()
        expected = []
        for a, member in enumerate(members):
            rows = {"same": copied, "own": copied[a], "split": copied[a::3]}[batch]
            expected.append(member(rows.clone()))
        loss = torch.stack([output.square().sum() for output in expected]).sum()
        (expected_gradient,) = torch.autograd.grad(loss, again)
        torch.testing.assert_close(gradient, expected_gradient)
        assert torch.equal(given, x)


@pytest.mark.parametrize("change", [subtract])
@quiet
def test_compiled_members_do_not_change_the_input(change):
    ensemble = grow_up(Net(change), "batch ensemble")
    x = x_of()
    expected = ensemble(x)
    given = x.clone()
    compiled = torch.compile(ensemble, backend="eager")
    torch.testing.assert_close(compiled(given), expected)
    assert torch.equal(given, x)


@quiet
def test_backward_in_chunks_does_not_change_the_input():
    ensemble = grow_up(Net(subtract), "batch ensemble")
    x = x_of()
    given = x.clone()
    loss = ensemble.backward(given, torch.tensor([0, 1, 2, 0]))
    expected = embens.objective(ensemble(x), torch.tensor([0, 1, 2, 0]))
    torch.testing.assert_close(loss, expected.detach())
    assert torch.equal(given, x)


class Views(Net):
    """Changes one argument, of which the other is a view."""

    def forward(self, x, part):
        x.mul_(2)
        return super().forward(x + part.mean(1, keepdim=True))


@quiet
def test_arguments_that_share_memory_share_that_of_their_copies():
    ensemble = grow_up(Views(lambda s, x: x), "batch ensemble")
    member = ensemble.member(1)
    x = x_of()
    given = x.clone()
    outputs = ensemble(given, given[:, :2])
    assert torch.equal(given, x)

    torch.testing.assert_close(outputs[1], member(given, given[:, :2]))
