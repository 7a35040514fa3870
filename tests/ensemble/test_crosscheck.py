"""The first call of a folded form compares one member with a plain network."""

import operator

import pytest
import torch
from torch import Tensor, nn

import embens
from embens import laws

MISREAD = {
    "identity of sizes": lambda h: operator.is_(h.shape[1], 6),
    "documentation of a value": lambda h: h.__doc__ is None,
    "module of a value": lambda h: h.__module__ == "torch",
}
"""Conditions that have another value while torch.fx traces the code."""


class Network(nn.Module):
    """A perceptron with user code; ``condition`` selects a branch."""

    def __init__(self, condition=lambda h: False):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(6, 3)
        self.condition = condition

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.dropout(self.norm(self.first(x))))
        if self.condition(h):
            h = h * 1.5
        return self.last(h)


def embed(*args, training=False, **kwargs):
    return embens.batch_ensemble(Network(*args).train(training), members=3, **kwargs)


@pytest.mark.parametrize("condition", MISREAD.values(), ids=MISREAD)
def test_a_network_that_is_traced_wrongly_runs_merged(condition):
    ensemble = embed(condition)
    x = torch.randn(5, 6)
    outputs = ensemble(x)
    for a in range(3):
        torch.testing.assert_close(outputs[a], ensemble.member(a)(x))
    assert "merged" in ensemble.executor


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_the_comparison_changes_nothing_but_the_executor(training, grad):
    ensemble = embed(training=training)
    x = torch.randn(5, 6)
    before = {name: tensor.clone() for name, tensor in ensemble.state_dict().items()}
    state, inputs = torch.get_rng_state(), x.clone()
    with torch.set_grad_enabled(grad):
        ensemble.folded_for((x,), {}, False)
    assert ensemble.executor == "folded"
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, inputs)
    for name, tensor in ensemble.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_fresh_masks_with_a_generator_stay_the_same():
    def outputs(compared):
        network = Network().eval()
        torch.nn.init.ones_(network.first.weight)
        torch.nn.init.ones_(network.last.weight)
        generator = torch.Generator().manual_seed(1)
        ensemble = embens.mc_dropout(network, members=3, generator=generator)
        if compared:
            ensemble.folded_for((torch.ones(2, 6),), {}, False)
        return ensemble(torch.ones(2, 6)) - network(torch.ones(2, 6))

    torch.testing.assert_close(outputs(True).std(), outputs(False).std())


@pytest.mark.parametrize("batch", ["same", "own", "split"])
def test_every_kind_of_batch_is_compared_and_folded(batch):
    ensemble = embed()
    shape = (3, 4, 6) if batch == "own" else (6, 6)
    ensemble(torch.randn(shape), batch=batch)
    assert ensemble.executor == "folded"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rounding_is_no_difference(dtype):
    ensemble = embed().to(dtype)
    ensemble(torch.randn(5, 6, dtype=dtype))
    assert ensemble.executor == "folded"


def test_outputs_that_are_infinite_or_nan_in_both_forms_agree():
    ensemble = embens.embed(Network().eval(), 2, pre=laws.Constant(), post=laws.Constant())
    ensemble(torch.tensor([[float("nan")] * 6, [float("inf")] * 6, [1.0] * 6]))
    assert ensemble.executor == "folded"
