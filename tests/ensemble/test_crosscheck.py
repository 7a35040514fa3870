"""The first call of a folded form compares one member with a plain network."""

import operator
import random
import threading

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


class Squeezing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)).squeeze(1))


def test_an_axis_that_a_squeeze_keeps_runs_merged():
    ensemble = embens.batch_ensemble(Squeezing(), 4)
    assert ensemble(torch.randn(5, 2, 3)).shape == (4, 5, 2, 2)
    assert ensemble.executor.startswith("merged")


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_the_comparison_changes_nothing_but_the_executor(training, grad):
    ensemble = embed(training=training)
    x = torch.randn(5, 6)
    before = {name: tensor.clone() for name, tensor in ensemble.state_dict().items()}
    state, inputs = torch.get_rng_state(), x.clone()
    with torch.set_grad_enabled(grad):
        ensemble.foldings.find((x,), {})
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
            ensemble.foldings.find((torch.ones(2, 6),), {})
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


def test_a_first_call_that_fails_does_not_decide_how_later_calls_run():
    ensemble = embed()
    with pytest.raises(RuntimeError):
        ensemble(torch.randn(5, 4))
    ensemble(torch.randn(5, 6))
    assert ensemble.executor == "folded"


@pytest.mark.parametrize("first", [torch.full((5, 6), torch.nan), torch.zeros(0, 6)])
def test_outputs_that_say_nothing_are_compared_again(first):
    ensemble = embed(MISREAD["identity of sizes"])
    ensemble(first)
    x = torch.randn(5, 6)
    torch.testing.assert_close(ensemble(x)[1], ensemble.member(1)(x))


class Choice(Network):
    """Returns integers or booleans."""

    def __init__(self, choose):
        super().__init__(MISREAD["identity of sizes"])
        self.choose = choose

    def forward(self, x: Tensor) -> Tensor:
        h = self.last(torch.tanh(self.first(x)))
        if self.condition(self.first(x)):
            h = -h
        return self.choose(h)


@pytest.mark.parametrize("choose", [lambda h: h.argmax(1), lambda h: h > 0])
def test_integers_are_compared(choose):
    ensemble = embens.batch_ensemble(Choice(choose).eval(), members=3)
    x = torch.randn(20, 6)
    assert torch.equal(ensemble(x)[2], ensemble.member(2)(x))


def test_transforms_of_torch_func_may_be_the_first_call():
    ensemble, x = embed(), torch.randn(4, 6)
    parameters = dict(ensemble.named_parameters())

    def loss(parameters, row):
        return torch.func.functional_call(ensemble, parameters, (row[None],)).sum()

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    ensemble(x).sum().backward()
    for name, parameter in ensemble.named_parameters():
        torch.testing.assert_close(gradients[name].sum(0), parameter.grad)


def test_a_call_in_a_transform_leaves_the_comparison_to_the_next_call():
    ensemble, x = embed(MISREAD["identity of sizes"]), torch.randn(5, 6)
    torch.func.vmap(ensemble)(x[None])
    torch.testing.assert_close(ensemble(x)[1], ensemble.member(1)(x))


def test_the_comparison_is_not_recorded():
    from torch.fx.experimental.proxy_tensor import make_fx

    ensemble, x = embed(), torch.randn(5, 6)
    first = make_fx(ensemble)(x)
    second = make_fx(ensemble)(x)
    assert len(first.graph.nodes) == len(second.graph.nodes)


def test_generators_of_other_devices_are_not_seeded(monkeypatch):
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    embed(training=True)(torch.randn(5, 6))
    assert seeds == []


def test_random_generators_of_python_stay_unchanged(monkeypatch):
    from embens.ensemble import crosscheck

    plain_member = crosscheck.plain_member

    def drawing(*args, **kwargs):
        random.random()
        return plain_member(*args, **kwargs)

    monkeypatch.setattr(crosscheck, "plain_member", drawing)
    state = random.getstate()
    embed()(torch.randn(5, 6))
    assert random.getstate() == state


def test_parameters_are_not_copied(monkeypatch):
    from embens.ensemble import crosscheck

    addresses = []
    plain_member = crosscheck.plain_member

    def recording(*args, **kwargs):
        network = plain_member(*args, **kwargs)
        addresses.append(network.norm.weight.data_ptr())
        return network

    monkeypatch.setattr(crosscheck, "plain_member", recording)
    ensemble = embed(training=True)
    ensemble(torch.randn(5, 6)).sum().backward()
    assert addresses == [ensemble.reference.norm.weight.data_ptr()]


def test_threads_wait_for_the_comparison(monkeypatch):
    from embens.ensemble import crosscheck

    compare, started, finish = crosscheck.find_difference, threading.Event(), threading.Event()

    def slowly(*args, **kwargs):
        started.set()
        finish.wait(10)
        return compare(*args, **kwargs)

    monkeypatch.setattr(crosscheck, "find_difference", slowly)
    ensemble, x = embed(MISREAD["identity of sizes"]), torch.randn(5, 6)
    outputs = []
    threads = [threading.Thread(target=lambda: outputs.append(ensemble(x))) for _ in range(2)]
    threads[0].start()
    started.wait(10)
    threads[1].start()
    threads[1].join(0.5)
    assert outputs == []
    finish.set()
    for thread in threads:
        thread.join()
    expected = ensemble.member(0)(x)
    for output in outputs:
        torch.testing.assert_close(output[0], expected)


class Meeting(Network):
    """Adds two rows of each sample to one, which broadcasts in a batch of one sample."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return h.view(-1, 3) + h[:, :3]


@pytest.mark.parametrize("batch", ["same", "own"])
def test_rows_of_two_members_are_compared(batch):
    torch.manual_seed(0)
    ensemble = embens.embed(Meeting().eval(), members=3, pre=laws.Normal(), sites=["first"])
    x = torch.randn(1, 6)
    inputs = x.expand(3, 1, 6) if batch == "own" else x
    outputs = ensemble(inputs, batch=batch)
    for a in range(3):
        torch.testing.assert_close(outputs[a], ensemble.member(a)(x))


def test_statistics_of_shared_norm_layers_stay_the_same():
    class Normalised(Network):
        def forward(self, x):
            return super().forward(self.norm(x))

    ensemble = embens.last_layer_dropout(Normalised(), members=3, law=laws.Bernoulli(0.9))
    before = {name: tensor.clone() for name, tensor in ensemble.state_dict().items()}
    ensemble.foldings.find((torch.randn(5, 6),), {})
    assert ensemble.executor == "folded"
    for name, tensor in ensemble.state_dict().items():
        assert torch.equal(tensor, before[name]), name
