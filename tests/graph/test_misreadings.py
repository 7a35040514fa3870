"""Code that a trace would misread runs merged, and is right."""

import builtins
import copy
import functools
import operator
import types

import numpy as np
import pytest
import torch
from torch import is_tensor, nn
from torch.utils._pytree import tree_map_only

import embens
from embens.graph.guards import Guard
from embens.graph.misreadings import Untraceable
from embens.graph.tracing import StrictTracer


class Doubled(torch.autograd.Function):
    """Has another gradient than its forward pass."""

    @staticmethod
    def forward(context, x):
        return 2 * x

    @staticmethod
    def backward(context, gradient):
        return 5 * gradient


class Net(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 2)
        self.run = run

    def forward(self, x):
        return self.outer(self.run(torch.tanh(self.inner(x))))


def by_instance(h):
    return 2 * h if isinstance(h, torch.Tensor) else h


def by_type(h):
    return 2 * h if type(h) is torch.Tensor else h


def by_is_tensor(h):
    return 2 * h if torch.is_tensor(h) else h


def by_callable(h):
    return h if callable(h) else 2 * h


def by_attribute(h):
    return h if hasattr(h, "tensors") else 2 * h


def by_caught_error(h):
    try:
        is_tensor = isinstance(h, torch.Tensor)
    except Exception:
        is_tensor = False
    return 2 * h if is_tensor else h


def by_caught_length(h):
    try:
        rows = len(h)
    except Exception:
        rows = 7
    return h * rows


def by_autograd_function(h):
    return Doubled.apply(h)


def by_autocast(h):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        k = (h.unsqueeze(1) @ h.unsqueeze(2)).flatten(1)
    return h + k.float()


def by_no_grad(h):
    with torch.no_grad():
        k = torch.tanh(h)
    return h + k


def by_inference_mode(h):
    with torch.inference_mode():
        k = torch.tanh(h)
    return h + k


# Functions whose global variables are those of another file.
HELPERS = types.ModuleType("helpers")
HELPERS.torch = torch
exec(
    """
def double(h):
    return 2 * h if isinstance(h, torch.Tensor) else h

class Tool:
    def double(self, h):
        return 2 * h if type(h) is torch.Tensor else h
""",
    vars(HELPERS),
)
TOOL = HELPERS.Tool()
IS_INSTANCE = isinstance


def by_function_of_another_file(h):
    return HELPERS.double(h)


def by_method_of_another_file(h):
    return TOOL.double(h)


def by_another_name(h):
    return 2 * h if IS_INSTANCE(h, torch.Tensor) else h


def by_default_argument(h, kind=type):
    return 2 * h if kind(h) is torch.Tensor else h


def by_builtins(h):
    return 2 * h if builtins.isinstance(h, torch.Tensor) else h


def by_class(h):
    return 2 * h if h.__class__ is torch.Tensor else h


def by_instance_check(h):
    return 2 * h if torch.Tensor.__instancecheck__(h) else h


def by_match(h):
    match h:
        case torch.Tensor():
            return 2 * h
        case _:
            return h


def by_text(h):
    return 2 * h if "tensor" in f"{h}" else h


def by_names(h):
    return 2 * h if "new_empty" in dir(h) else h


def by_identity(h):
    return 2 * h if h.dtype is torch.float32 else h


def by_identity_function(h):
    return 2 * h if operator.is_(h.dtype, torch.float32) else h


def by_caught_format(h):
    try:
        return h * len(f"{h.shape[1]:d}")
    except TypeError:
        return 2 * h


def by_caught_assignment(h):
    k = torch.sin(h)
    try:
        k[:, 0] = 1.0
    except TypeError:
        return h
    return k


def by_set(h):
    return 2 * h if h.dtype in {torch.float32, torch.float64} else h


def by_key(h):
    return h * {3: 2.0}.get(h.shape[1], 1.0)


def by_missing_gradient(h):
    return 2 * h if h.grad_fn is None else h


def by_required_gradient(h):
    return 2 * h if h.requires_grad is True else h


def by_text_of_a_type(h):
    return 2 * h if str(h.dtype) == "torch.float32" else h


def by_attribute_of_a_type(h):
    return 2 * h if hasattr(h.dtype, "is_complex") else h


def by_caught_index(h):
    try:
        return h * len(range(h.shape[1]))
    except TypeError:
        return h


def by_tree(h):
    return tree_map_only(torch.Tensor, torch.sin, h)


def by_imported_query(h):
    return 2 * h if is_tensor(h) else h


def by_scripted_query(h):
    return 2 * h if torch.jit.isinstance(h, torch.Tensor) else h


def by_cache(h):
    return h * factor(h.dtype)


@functools.lru_cache
def factor(dtype):
    return 2.0 if dtype is torch.float32 else 1.0


def by_wrapped_function(h):
    return normalize(h)


@torch.fx.wrap
def normalize(h):
    return h - h.mean(0)


def by_copy(h):
    return h + copy.copy(h)


def by_numpy_scalar(h):
    return h / np.sqrt(6)


def by_operator_in_place(h):
    k = torch.sin(h)
    same = k
    same *= 2
    return h + k


def by_operator_on_a_view(h):
    k = torch.sin(h)
    same = +k
    same *= 2
    return h + k


def by_data(h):
    k = torch.sin(h)
    k.data = 2 * k.data
    return k


def by_squeeze(h):
    return h.unsqueeze(1).squeeze(1)


def by_named_factor(h):
    return torch.bmm(h.unsqueeze(1), mat2=h.unsqueeze(2)).flatten(1) + h


CODES = [by_identity_function, by_caught_format, by_caught_assignment]
CODES += [by_identity, by_set, by_key, by_missing_gradient, by_required_gradient]
CODES += [by_text_of_a_type, by_attribute_of_a_type, by_caught_index, by_tree, by_imported_query]
CODES += [by_scripted_query, by_cache, by_wrapped_function, by_copy, by_numpy_scalar]
CODES += [by_operator_in_place, by_operator_on_a_view, by_data, by_squeeze, by_named_factor]
CODES += [by_instance, by_type, by_is_tensor, by_callable, by_attribute, by_caught_error]
CODES += [by_caught_length, by_autograd_function, by_autocast, by_no_grad, by_inference_mode]
CODES += [by_function_of_another_file, by_method_of_another_file, by_another_name, by_builtins]
CODES += [by_default_argument, by_class, by_instance_check, by_match, by_text, by_names]


@pytest.mark.parametrize("run", CODES, ids=lambda run: run.__name__)
def test_code_that_looks_at_types_is_right(run):
    torch.manual_seed(0)
    ensemble = embens.batch_ensemble(Net(run), members=2)
    x = torch.randn(3, 3)
    outputs = ensemble(x)
    outputs.sum().backward()
    gradient = ensemble.individual["outer.post"].grad
    weight = ensemble.reference.outer.weight
    for a in range(2):
        member = ensemble.member(a)
        expected = member(x)
        assert torch.allclose(outputs[a], expected)
        expected.sum().backward()
        assert torch.allclose(gradient[a], (member.outer.weight.grad * weight).sum(0), atol=1e-5)


@pytest.mark.parametrize("run", [by_autograd_function, by_autocast, by_no_grad, by_inference_mode])
def test_gradients_are_those_of_the_code(run):
    torch.manual_seed(0)
    ensemble = embens.last_layer_dropout(Net(run), members=2)
    ensemble(torch.ones(1, 3)).sum().backward()
    gradient = ensemble.reference.inner.bias.grad.clone()
    total = torch.zeros_like(gradient)
    for a in range(2):
        member = ensemble.member(a)
        member(torch.ones(1, 3)).sum().backward()
        total += member.inner.bias.grad
    assert torch.allclose(gradient, total)


def test_types_of_modules_may_be_asked_for():
    class Choosy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)])

        def forward(self, x):
            for layer in self.layers:
                is_class = isinstance(type(layer), type)
                if is_class and (isinstance(layer, nn.Linear) or type(layer) is nn.Tanh):
                    x = layer(x)
            return x

    ensemble = embens.batch_ensemble(Choosy(), members=2)
    ensemble(torch.ones(1, 3))
    assert ensemble.executor == "folded"


def test_nothing_is_left_behind():
    net = Net(by_type)
    before = dict(globals())
    apply = torch.autograd.Function.apply
    tracer = StrictTracer(net, ["x"], {})
    with pytest.raises(Untraceable, match=r"the type of a tensor \(type\)"):
        tracer.trace_graph(net)
    assert globals() == before
    assert isinstance is builtins.isinstance
    assert torch.is_tensor(torch.ones(1))
    assert torch.autograd.Function.apply == apply


def test_namespaces_of_helpers_are_included():
    namespaces = Guard(Net(by_function_of_another_file)).namespaces.values()
    assert any(namespace is globals() for namespace in namespaces)
    assert any(namespace is vars(HELPERS) for namespace in namespaces)


def test_a_layer_with_another_call_is_called_once():
    class Doubling(nn.Linear):
        def __call__(self, x):
            return 2 * super().__call__(x)

    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(3, 3), Doubling(3, 3), nn.Tanh(), nn.Linear(3, 2))
    ensemble = embens.batch_ensemble(reference, members=2)
    x = torch.randn(3, 3)
    outputs = ensemble(x)
    for a in range(2):
        assert torch.allclose(outputs[a], ensemble.member(a)(x))


def test_a_symbol_in_place_of_a_buffer_is_no_error():
    class Replacing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 2)
            self.last = torch.zeros(3)

        def forward(self, x):
            self.last = self.inner(x)
            return self.outer(torch.tanh(self.last))

    ensemble = embens.batch_ensemble(Replacing(), members=2)
    assert ensemble(torch.ones(2, 3)).shape == (2, 2, 2)
    assert ensemble.executor.startswith("merged")
