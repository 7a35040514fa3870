"""Code that reaches weights in unusual ways sees those of one member, or is refused."""

import copy
import functools
import types
import weakref
from collections import UserList

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from trust.story import FAMILIES, follow, grow_up, quiet, x_of

import embens


class Net(nn.Module):
    """Layers a, b and out; a function does the work."""

    def __init__(self, run, prepare=lambda s: None):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.run = run
        prepare(self)

    def forward(self, x):
        return self.run(self, torch.tanh(self.a(x)))


def all_parameters(s, h):
    return s.out(torch.tanh(s.b(h))) + sum(p.square().sum() for p in s.parameters())


def named_parameters(s, h):
    weights = dict(s.named_parameters())
    return F.linear(torch.tanh(F.linear(h, weights["b.weight"])), weights["out.weight"])


def state(s, h):
    weights = s.state_dict()
    return F.linear(torch.tanh(F.linear(h, weights["b.weight"])), weights["out.weight"])


def state_of_a_layer(s, h):
    return s.out(F.linear(h, s.b.state_dict()["weight"]))


def functional_call(s, h):
    return s.out(torch.func.functional_call(s.b, dict(s.b.named_parameters()), (h,)))


def functional_call_of_twice(s, h):
    weights = {name: 2 * p for name, p in s.b.named_parameters()}
    return s.out(torch.func.functional_call(s.b, weights, (h,)))


def mapped(s, h):
    return s.out(torch.vmap(s.b)(h))


def mapped_gradient(s, h):
    return torch.vmap(torch.func.grad(lambda row: s.out(torch.tanh(s.b(row))).sum()))(h)


def jacobian(s, h):
    return torch.vmap(torch.func.jacrev(lambda row: s.out(torch.tanh(s.b(row)))))(h)


def by_path(s, h):
    return s.out(F.linear(h, s.get_parameter("b.weight"), s.get_submodule("b").bias))


def by_children(s, h):
    layers = list(s.children())
    return layers[2](torch.tanh(layers[1](h)))


def by_dictionary(s, h):
    return s.out(F.linear(h, s.b.__dict__["_parameters"]["weight"]))


def spectral(s, h):
    weight = s.b.weight / torch.linalg.matrix_norm(s.b.weight, 2)
    return s.out(F.linear(h, weight))


def standardised(s, h):
    weight = s.b.weight - s.b.weight.mean(1, keepdim=True)
    return s.out(F.linear(h, weight, s.b.bias))


def chosen_by_norm(s, h):
    return s.out(s.b(h)) if s.b.weight.norm().item() > 2.5 else s.out(h)


def norm_of_a_weight(s, h):
    return s.out(s.b(h)) / s.b.weight.norm().item()


READS = [
    *(all_parameters, named_parameters, state, state_of_a_layer, functional_call),
    *(functional_call_of_twice, mapped, mapped_gradient, jacobian, by_path, by_children),
    *(by_dictionary, spectral, standardised, chosen_by_norm, norm_of_a_weight),
]


@pytest.mark.parametrize("index", range(len(READS)), ids=lambda index: READS[index].__name__)
@quiet
def test_code_sees_the_weights_of_its_member(index):
    ensemble = grow_up(Net(READS[index]), list(FAMILIES)[index % 3])
    follow(ensemble, [x_of(), x_of(2)])


def listed(s):
    s.weights = [s.b.weight, {"out": s.out.weight}]


def held(s):
    vars(s)["weight_of_b"] = s.b.weight


def hidden_modules(s):
    s.order = [s.b, nn.Tanh(), s.out]


def partial(s):
    s.call = functools.partial(F.linear, weight=s.b.weight)


def partial_method(s):
    s.call = functools.partial(Net.second, s)


def bound(s):
    s.call = s.b.forward


Net.second = lambda self, h: self.b(h)


def through_b(s, h):
    return s.out(F.linear(h, s.b.weight))


def through_out(s, h):
    return F.linear(s.b(h), s.out.weight)


def in_order(s, h):
    return s.out(torch.tanh(s.b(h)))


def plain(s, h):
    return s.out(s.b(h))


HELD = {
    "list": (lambda s, h: s.out(F.linear(h, s.weights[0])), listed, through_b),
    "dictionary": (lambda s, h: F.linear(s.b(h), s.weights[1]["out"]), listed, through_out),
    "attribute": (lambda s, h: s.out(F.linear(h, s.weight_of_b)), held, through_b),
    "modules": (
        lambda s, h: s.order[2](s.order[1](s.order[0](h))),
        hidden_modules,
        in_order,
    ),
    "partial of a method": (lambda s, h: s.out(s.call(h)), partial_method, plain),
    "bound method": (lambda s, h: s.out(s.call(h)), bound, plain),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", HELD)
@quiet
def test_weights_in_attributes_are_those_of_the_member_or_refused(case, family):
    run, prepare, same_run = HELD[case]
    reference, twin = Net(run, prepare), Net(same_run)
    twin.load_state_dict(reference.state_dict())
    if family == "own last layer" and prepare is listed:
        with pytest.raises(ValueError, match="'weights' of 'the reference' holds the parameter"):
            grow_up(reference, family)
        return
    ensemble = grow_up(reference, family)
    follow(ensemble, [x_of(), x_of(2)])
    expected = grow_up(twin, family)
    torch.testing.assert_close(ensemble(x_of()), expected(x_of()))
    torch.testing.assert_close(ensemble.member(1)(x_of()), expected(x_of())[1])


def in_an_object(s):
    s.store = types.SimpleNamespace(weight=s.b.weight)


def in_a_nested_object(s):
    s.store = [types.SimpleNamespace(inner={"b": types.SimpleNamespace(weight=s.b.weight)})]


def in_a_set(s):
    s.store = {s.b.weight}


def as_a_key(s):
    s.store = {s.b.weight: 1.0}


def in_a_list_of_another_class(s):
    s.store = UserList([s.b.weight])


HIDDEN = {
    in_an_object: lambda s, h: s.out(F.linear(h, s.store.weight)),
    in_a_nested_object: lambda s, h: s.out(F.linear(h, s.store[0].inner["b"].weight)),
    in_a_set: lambda s, h: s.out(F.linear(h, next(iter(s.store)))),
    as_a_key: lambda s, h: s.out(F.linear(h, next(iter(s.store)))),
    in_a_list_of_another_class: lambda s, h: s.out(F.linear(h, s.store[0])),
}


@pytest.mark.parametrize("prepare", HIDDEN, ids=lambda prepare: prepare.__name__)
@quiet
def test_weights_in_other_objects_are_refused_by_name(prepare):
    ensemble = grow_up(Net(HIDDEN[prepare], prepare), "batch ensemble")
    with pytest.raises(ValueError, match=r"finds the tensor 'b\.weight' in an object"):
        ensemble(x_of())
    with pytest.raises(ValueError, match=r"finds the tensor 'b\.weight' in an object"):
        ensemble.member(0)
    with pytest.raises(ValueError, match=r"finds the tensor 'b\.weight' in an object"):
        embens.embed(Net(HIDDEN[prepare], prepare), 3, own="b")
    # Members of this family do not differ in the layer b.
    follow(grow_up(Net(HIDDEN[prepare], prepare), "last layer"), [x_of()])


def by_a_computed_name(s, h):
    return s.out(getattr(s, "ab"[1:])(h))


@pytest.mark.parametrize("run", [plain, by_a_computed_name], ids=lambda run: run.__name__)
@quiet
def test_an_optimizer_in_an_attribute_that_the_forward_does_not_use_is_no_problem(run):
    def prepare(s):
        s.optimizer = torch.optim.SGD(s.parameters(), 0.1)

    follow(grow_up(Net(run, prepare), "batch ensemble", sites=["b"]), [x_of()])


def closed(s):
    s.call = lambda h: s.b(h)


def closed_over_a_layer(s):
    layer = s.b
    s.call = lambda h: layer(h)


def closed_over_a_weight(s):
    weight = s.b.weight
    s.call = lambda h: F.linear(h, weight)


def closed_in_a_list(s):
    s.call = [lambda h: s.b(h)]


def default_argument(s):
    s.call = lambda h, layer=s.b: layer(h)


def hooked(s):
    s.kept = {}
    s.b.register_forward_hook(lambda module, args, output: s.kept.update(b=output))


def weak(s):
    s.call = weakref.ref(s.b)


def weak_proxy(s):
    s.call = [weakref.proxy(s.b)]


REFUSED = {
    "partial with a weight": partial,
    "closure": closed,
    "closure over a layer": closed_over_a_layer,
    "closure over a weight": closed_over_a_weight,
    "closure in a list": closed_in_a_list,
    "default argument": default_argument,
    "hook": hooked,
    "weak reference": weak,
    "weak proxy": weak_proxy,
}


@pytest.mark.parametrize("family", ["batch ensemble", "independent"])
@pytest.mark.parametrize("case", REFUSED)
@quiet
def test_functions_that_hold_the_original_network_are_refused_by_name(case, family):
    reference = Net(lambda s, h: s.out(s.b(h)), REFUSED[case])
    make = embens.independent if family == "independent" else embens.batch_ensemble
    name = "hook" if case == "hook" else "'call'"
    with pytest.raises(ValueError, match=f"{name}.* refers to the reference"):
        make(reference, 3)


class Branching(nn.Module):
    """A shared module that members call a different number of times."""

    def __init__(self, choose):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6)
        self.choose = choose

    def forward(self, x):
        h = torch.tanh(self.a(x))
        if self.choose(h):
            h = self.norm(torch.tanh(self.b(h)))
        h = torch.tanh(self.b(h))
        while h.square().sum() > 8:
            h = 0.5 * torch.tanh(self.b(h))
        return self.out(h)


BRANCHES = {
    "sum": lambda h: h.sum() > 0,
    "number": lambda h: h.mean().item() > 0,
    "largest": lambda h: h.argmax() % 2 == 0,
    "never in the example": lambda h: h.abs().max() > 0.999,
    "always": lambda h: h.abs().max() > -1,
}


@pytest.mark.parametrize("example", [True, False])
@pytest.mark.parametrize("case", BRANCHES)
@pytest.mark.parametrize("training", [False, True])
@quiet
def test_members_take_branches_of_their_own(case, example, training):
    options = {"example_input": x_of()} if example else {}
    ensemble = grow_up(Branching(BRANCHES[case]), "batch ensemble", **options).train(training)
    follow(ensemble, [x_of(seed=seed) for seed in range(4)])


def view_of_a_weight(s):
    s.call = s.b.weight.detach()[0]


def listed_views(s):
    s.call = [s.b.weight.data.T]


def view_of_a_buffer(s):
    s.register_buffer("mean", torch.zeros(6))
    s.call = {"mean": s.mean.view(1, 6)}


@pytest.mark.parametrize("prepare", [view_of_a_weight, listed_views, view_of_a_buffer])
@pytest.mark.parametrize("make", [embens.batch_ensemble, embens.last_layer_dropout])
@quiet
def test_views_of_weights_in_attributes_are_refused_by_name(prepare, make):
    reference = Net(lambda s, h: s.out(s.b(h)), prepare)
    with pytest.raises(ValueError, match="'call' of 'the reference' is a view of"):
        make(reference, 3)


@pytest.mark.parametrize("inner", [False, True], ids=["reference", "part"])
@quiet
def test_a_module_that_returns_itself_as_its_copy_is_refused_by_name(inner):
    class Single(Net):
        def __deepcopy__(self, memo):
            return self

    reference = Single(plain)
    name = "'the reference'"
    if inner:
        reference = Net(lambda s, h: s.out(s.part(h)), lambda s: setattr(s, "part", Single(plain)))
        reference.out = nn.Linear(3, 3)
        name = "'part'"
    with pytest.raises(TypeError, match=f"{name} \\(Single\\) returns itself when it is copied"):
        embens.batch_ensemble(reference, 3)


class Standardised(nn.Conv1d):
    """A convolution that standardises its weight, in the method that the stock forward calls."""

    def _conv_forward(self, input, weight, bias):
        weight = weight - weight.mean((1, 2), keepdim=True)
        return super()._conv_forward(input, weight / weight.std((1, 2), keepdim=True), bias)


def test_a_convolution_that_computes_its_weight_has_scaled_inputs_and_outputs():
    torch.manual_seed(0)
    first, second = Standardised(2, 3, 2).double(), Standardised(3, 3, 2).double()
    head = nn.Linear(3, 2).double()
    reference = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.AdaptiveAvgPool1d(1))
    reference.append(nn.Flatten()).append(head)
    ensemble = embens.batch_ensemble(reference, 3)
    x = torch.randn(4, 2, 6, dtype=torch.float64)
    outputs = ensemble(x)
    values = ensemble.individual.tensors()
    for a in range(3):
        h = torch.tanh(first(x) * values["0.pre"][a, :, None])
        h = second(h * values["2.post"][a, :, None]) * values["2.pre"][a, :, None]
        expected = head(torch.tanh(h).mean(2) * values["6.post"][a])
        torch.testing.assert_close(outputs[a], expected)


def fast_weights(s, h):
    with torch.enable_grad():
        loss = s.b(h).square().mean()
        gradients = torch.autograd.grad(loss, list(s.b.parameters()), create_graph=True)
    weight, bias = (p - 0.1 * g for p, g in zip(s.b.parameters(), gradients, strict=True))
    return s.out(torch.tanh(F.linear(h, weight, bias)))


@pytest.mark.parametrize("family", FAMILIES)
@quiet
def test_code_may_differentiate_by_weights_where_a_pass_needs_no_gradients(family):
    ensemble = grow_up(Net(fast_weights), family)
    follow(ensemble, [x_of()])
    with torch.no_grad():
        follow(ensemble, [x_of()])


@quiet
def test_gradients_that_the_forward_switches_off_are_refused():
    def run(s, h):
        s.b.requires_grad_(False)
        return s.out(s.b(h))

    with pytest.raises(RuntimeError, match="switches gradients of a parameter off"):
        grow_up(Net(run), "batch ensemble")(x_of())


def copied_layer(s, h):
    return s.out(s.b(copy.deepcopy(s.b)(h)))


def trained_inside(s, h):
    optimizer = torch.optim.SGD(s.b.parameters(), 0.1)
    s.b(h).square().mean().backward()
    optimizer.step()
    return s.out(s.b(h))


ONLY_LEAVES = {copied_layer: "copy.deepcopy", trained_inside: "makes an optimizer"}


@pytest.mark.parametrize("example", [True, False])
@pytest.mark.parametrize("run", ONLY_LEAVES, ids=lambda run: run.__name__)
@quiet
def test_code_that_needs_leaves_is_refused_by_name(run, example):
    if example and run is trained_inside:
        pytest.skip("examples are called without gradients")
    options = {"example_input": x_of()} if example else {}
    ensemble = grow_up(Net(run), "batch ensemble", **options)
    with pytest.raises(RuntimeError, match=ONLY_LEAVES[run]):
        ensemble(x_of())
