"""The data flow of a network, read from one call."""

import copy

import pytest
import torch
from cases import ARCHITECTURES
from torch import nn

import embens
from embens.graph.reading import read_flow
from embens.graph.watching import watch_flow


@pytest.mark.parametrize("case", ARCHITECTURES, ids=str)
def test_an_example_and_the_code_have_the_same_flow(case):
    reference = case.build()
    watched = watch_flow(reference, case.inputs(torch.Generator().manual_seed(0)))
    traced = read_flow(reference)
    assert (watched.first, watched.last) == (case.first, case.last)
    if not traced.guesses:
        assert watched.upstream == traced.upstream
        assert watched.repeat == traced.repeat


class Looking(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        h = self.a(x)
        return self.b(h if bool(h.sum() > 0) else -h)


def test_code_that_looks_at_values_is_followed():
    assert watch_flow(Looking(), torch.randn(4, 3)).upstream == {"a": set(), "b": {"a"}}


class Copying(Looking):
    def forward(self, x):
        return self.b(copy.deepcopy(self.a)(torch.tanh(self.a(x))))


def test_copies_of_layers_that_the_code_makes_are_followed():
    assert watch_flow(Copying(), torch.randn(4, 3)).upstream == {"a": set(), "b": {"a"}}


def test_keyword_arguments_are_passed_as_a_dictionary():
    assert watch_flow(Looking(), {"x": torch.randn(4, 3)}).first == {"a"}


def test_an_example_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"could not be called on example_input \(shapes \[\(4, 7"):
        watch_flow(Looking(), torch.randn(4, 7))


def test_watching_changes_neither_the_reference_nor_the_random_numbers():
    reference = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 3))
    state = copy.deepcopy(reference.state_dict())
    random_state = torch.get_rng_state()
    watch_flow(reference, torch.ones(8, 6))
    assert torch.equal(torch.get_rng_state(), random_state)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(tensor, state[name])


class Transposing(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2)
        self.read = read

    def forward(self, x):
        return self.b(self.read(torch.tanh(self.a(x))))


def assign_data(x):
    y = torch.zeros_like(x)
    y.data = x
    return y


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.mT.mT,
        lambda x: x.T.T,
        lambda x: x.H.H,
        lambda x: x.data,
        lambda x: x.real,
        assign_data,
    ],
)
def test_values_are_followed_through_properties(read):
    flow = watch_flow(Transposing(read), torch.randn(3, 3))
    assert flow.upstream == {"a": set(), "b": {"a"}}
    assert (flow.first, flow.last) == ({"a"}, {"b"})


CONSTANT = torch.ones(3)


@pytest.mark.parametrize(
    ("read", "is_guess"),
    [
        (lambda x: torch.tensor(x.tolist()), False),
        (lambda x: torch.as_tensor([[float(value) for value in row] for row in x]), False),
        (lambda x: torch.tensor(x.numpy()), False),
        (lambda x: torch.from_numpy(x.numpy().copy()), True),
        (torch.vmap(torch.sin), True),
        (lambda x: x.detach() + torch.vmap(torch.sin)(x), True),
        (lambda x: x * CONSTANT, False),
    ],
)
def test_values_are_followed_through_python_and_compiled_functions(read, is_guess):
    flow = watch_flow(Transposing(read), torch.randn(3, 3))
    assert flow.upstream == {"a": set(), "b": {"a"}}
    assert bool(flow.guesses) == is_guess


def test_a_guess_from_a_call_is_a_warning():
    reference = Transposing(torch.vmap(torch.sin))
    with pytest.warns(UserWarning, match=r"depends on all layers .* name the layers in sites"):
        ensemble = embens.batch_ensemble(reference, 2, example_input=torch.randn(3, 3))
    assert [site.key for site in ensemble.spec.sites] == ["a.pre", "b.post"]
