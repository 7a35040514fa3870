"""The merged executor, and changes of a reference between calls."""

import copy
import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from agreement import check_agreement
from cases import Recurrent
from torch import nn
from torch.nn.utils import parametrize

import embens

X = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
FLAG = 1.0


class Net(nn.Module):
    """Three layers and some attributes; ``mix`` makes it run merged."""

    factor = 1.0

    def __init__(self, mix: bool = False):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.mix, self.scale, self.options, self.items = mix, 1.0, {"scale": 1.0}, [1.0]
        self.double()

    def forward(self, x):
        h = torch.tanh(self.b(torch.tanh(self.a(x))))
        h = h * self.scale * self.options["scale"] * sum(self.items) * self.factor * FLAG
        h = h * getattr(self, "late", 1.0)
        return self.out(h - h.mean(0) if self.mix else h)


class Double(nn.Module):
    def forward(self, weight):
        return 2 * weight


def outputs_of_members(ensemble, *inputs):
    return torch.stack([ensemble.member(a)(*inputs) for a in range(ensemble.members)])


CHANGES = {
    "an attribute": lambda net, patch: setattr(net, "scale", 3.0),
    "a new attribute": lambda net, patch: setattr(net, "late", 3.0),
    "a dictionary": lambda net, patch: net.options.update(scale=3.0),
    "a list": lambda net, patch: net.items.append(3.0),
    "a class attribute": lambda net, patch: patch.setattr(Net, "factor", 3.0),
    "a global variable": lambda net, patch: patch.setitem(globals(), "FLAG", 3.0),
    "a module": lambda net, patch: setattr(net, "b", nn.Linear(6, 6).double()),
    "a parameter": lambda net, patch: setattr(
        net.b, "weight", nn.Parameter(torch.randn(6, 6, dtype=torch.float64))
    ),
    "a hook": lambda net, patch: net.b.register_forward_hook(lambda m, x, y: 3 * y),
    "a hook of the network": lambda net, patch: net.register_forward_pre_hook(
        lambda m, x: (3 * x[0],)
    ),
    "a parametrization": lambda net, patch: parametrize.register_parametrization(
        net.b, "weight", Double()
    ),
}


@pytest.mark.parametrize("mix", [False, True], ids=["folded", "merged"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_of_the_reference_after_a_call_are_seen(change, mix, monkeypatch):
    ensemble = embens.batch_ensemble(Net(mix), 3)
    before = ensemble(X)
    assert ensemble.executor.startswith("merged" if mix else "folded")
    change(ensemble.reference, monkeypatch)
    torch.testing.assert_close(ensemble(X), outputs_of_members(ensemble, X))
    assert not torch.allclose(ensemble(X), before)


@pytest.mark.parametrize("mix", [False, True], ids=["folded", "merged"])
def test_another_type_after_a_call_is_seen(mix):
    ensemble = embens.batch_ensemble(Net(mix), 3)
    expected = ensemble(X).float()
    torch.testing.assert_close(ensemble.float()(X.float()), expected)
    torch.testing.assert_close(ensemble.double()(X).float(), expected)


class Counting(nn.Module):
    """Scales by the number of its calls."""

    def __init__(self):
        super().__init__()
        self.a, self.out, self.calls = nn.Linear(4, 6), nn.Linear(6, 3), 0
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.calls += 1
        h = torch.tanh(self.a(x))
        self.mean = 0.5 * self.mean + 0.5 * h.detach().mean(0)
        return self.out(h * self.calls - self.mean)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda ensemble: pickle.loads(pickle.dumps(ensemble)),
    "subset": lambda ensemble: ensemble.subset([0, 1, 2]),
}


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
def test_copies_keep_the_state_of_members(make_copy):
    ensemble = embens.batch_ensemble(Counting().double(), 3)
    for _ in range(3):
        ensemble(X)
    copied, members = make_copy(ensemble), outputs_of_members(ensemble, X)
    expected = ensemble(X)

    torch.testing.assert_close(members, expected)
    torch.testing.assert_close(copied(X), expected)


class MomentumEncoder(nn.Module):
    """A second encoder that follows the first one."""

    def __init__(self, update):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 3)
        self.update = update

    def forward(self, x):
        with torch.no_grad():
            self.update(self.a.weight, self.b.weight)
        return self.out(torch.tanh(self.a(x)) + torch.tanh(self.b(x)))


def by_data(source, target):
    target.data.mul_(0.9).add_(source.data, alpha=0.1)


def in_place(source, target):
    target.lerp_(source, 0.1)


@pytest.mark.parametrize("update", [by_data, in_place])
def test_a_parameter_that_the_code_changes_is_refused_by_name(update):
    reference = MomentumEncoder(update)
    weight = reference.b.weight.detach().clone()
    ensemble = embens.batch_ensemble(reference, 3)

    assert torch.equal(reference.b.weight, weight)
    with pytest.raises(RuntimeError, match=r"changes its parameter 'b\.weight'"):
        ensemble(X.float())


class LayerDrop(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.draw, self.random = draw, random.Random(0)

    def forward(self, x):
        h = self.a(x)
        if self.training and self.draw(self) < 0.5:
            return self.out(h)
        return self.out(torch.tanh(self.b(h)))


DRAWS = {
    "torch": lambda net: torch.rand(1).item(),
    "random": lambda net: random.random(),
    "a generator": lambda net: net.random.random(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_code_that_draws_random_numbers_runs_merged_in_training(draw):
    ensemble = embens.batch_ensemble(LayerDrop(draw), 3)
    ensemble.train()(X.float())
    assert ensemble.executor.startswith("merged")
    ensemble.eval()(X.float())
    if draw is DRAWS["a generator"]:
        assert "its code has changed 'random', so members differ in it" in ensemble.executor
    else:
        assert ensemble.executor == "folded"


def test_sparse_and_renormalised_embeddings_are_right():
    tokens = torch.randint(7, (5, 2))
    for options in ({"sparse": True}, {"max_norm": 1.0}):
        reference = nn.Sequential(nn.Embedding(7, 6, **options), nn.Flatten(), nn.Linear(12, 3))
        ensembles = [embens.batch_ensemble(reference.double(), 3)]
        if "sparse" in options:
            ensembles += [
                embens.embed(reference, 3, own="0"),
                embens.low_rank(reference, 3, rank=1),
            ]
        for ensemble in ensembles:
            check_agreement(ensemble, tokens, passes=1)


def test_recurrent_layers_run_merged():
    ensemble = embens.batch_ensemble(Recurrent().double(), 3)
    check_agreement(ensemble, torch.randint(11, (3, 5)))
    assert "the states of 'core'" in ensemble.executor or "merged" in ensemble.executor


@pytest.mark.parametrize("mix", [False, True], ids=["folded", "merged"])
def test_threads_get_the_outputs_and_gradients_of_their_batches(mix):
    ensemble = embens.batch_ensemble(Net(mix), 4)
    batches = [torch.randn(3, 4, dtype=torch.float64) for _ in range(6)]
    parameters = list(ensemble.parameters())

    def run(x):
        outputs = ensemble(x)
        return [outputs.detach(), *torch.autograd.grad(outputs.square().sum(), parameters)]

    expected = [run(x) for x in batches]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            torch.testing.assert_close(list(pool.map(run, batches)), expected)


@pytest.mark.parametrize("mix", [False, True], ids=["folded", "merged"])
def test_everything_stays_on_the_device_of_the_reference(mix):
    ensemble = embens.batch_ensemble(Net(mix).to("meta"), 3)
    outputs = ensemble(X.to("meta"))
    ensemble.objective(outputs, torch.zeros_like(outputs[0])).backward()
    assert all(parameter.grad.is_meta for parameter in ensemble.parameters())


@pytest.mark.parametrize("mix", [False, True], ids=["folded", "merged"])
def test_functional_calls_of_the_ensemble_use_the_parameters_that_are_passed(mix):
    ensemble = embens.batch_ensemble(Net(mix), 3)
    before = ensemble(X)
    changed = copy.deepcopy(ensemble)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(1.5)
    parameters = dict(changed.named_parameters())
    outputs = torch.func.functional_call(ensemble, parameters, (X,))

    torch.testing.assert_close(outputs, changed(X))
    torch.testing.assert_close(ensemble(X), before)


@pytest.mark.parametrize("mix", [False, True], ids=["folded", "merged"])
def test_passes_in_inference_mode_leave_the_ensemble_trainable(mix):
    ensemble = embens.batch_ensemble(nn.Sequential(nn.BatchNorm1d(4).double(), Net(mix)), 3)
    with torch.inference_mode():
        ensemble.train()(X)
    ensemble(X).sum().backward()
    assert all(parameter.grad is not None for parameter in ensemble.individual_parameters())


@pytest.mark.parametrize("mix", [False, True], ids=["folded", "merged"])
def test_autocast_gives_members_of_the_lower_precision(mix):
    ensemble = embens.batch_ensemble(Net(mix).float(), 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs, expected = ensemble(X.float()), outputs_of_members(ensemble, X.float())
    assert outputs.dtype == expected.dtype
    torch.testing.assert_close(outputs, expected, rtol=0.1, atol=0.1)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("mix", [False, True], ids=["folded", "merged"])
def test_compiled_ensembles_are_right(mix):
    torch._dynamo.reset()
    ensemble = embens.batch_ensemble(Net(mix), 3)
    expected = ensemble(X)
    torch.testing.assert_close(torch.compile(ensemble, backend="eager")(X), expected)


class CountingPasses(nn.Module):
    """Counts its passes in a buffer."""

    def __init__(self):
        super().__init__()
        self.a, self.out = nn.Linear(4, 6), nn.Linear(6, 3)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        return self.out(torch.tanh(self.a(x))) * self.passes


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compilation_before_the_first_pass_is_a_warning():
    torch._dynamo.reset()
    compiled = torch.compile(embens.batch_ensemble(CountingPasses().double(), 3), backend="eager")
    with pytest.warns(UserWarning, match=r"before its first pass.*Call the ensemble once"):
        compiled(X)
    with pytest.warns(UserWarning, match="before its first pass"):
        torch.export.export(embens.batch_ensemble(CountingPasses().double(), 3), (X,))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_members_have_the_state_that_a_pass_has_shown():
    torch._dynamo.reset()
    ensemble = embens.batch_ensemble(CountingPasses().double(), 3)
    ensemble(X)
    members = [ensemble.member(a) for a in range(3)]
    compiled = torch.compile(ensemble, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(X), torch.stack([member(X) for member in members]))


def test_frozen_norms_that_are_trained_later_have_statistics_of_members():
    reference = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    ensemble = embens.batch_ensemble(reference, 3).train()
    ensemble.reference[1].eval()
    ensemble(X)
    check_agreement(ensemble.train(), X)


def test_outputs_whose_tensors_are_hidden_are_refused():
    import dataclasses

    @dataclasses.dataclass
    class Output:
        logits: torch.Tensor

    class Hiding(Net):
        def forward(self, x):
            return Output(super().forward(x))

    ensemble = embens.embed(Hiding(), 3, example_input=X)
    with pytest.raises(TypeError, match="returns a Output, whose tensors cannot be found"):
        ensemble(X)


def test_an_error_of_the_reference_leaves_the_ensemble_usable():
    ensemble = embens.batch_ensemble(Net(mix=True), 3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ensemble(torch.zeros(4, 5, dtype=torch.float64))
    assert ensemble(X).shape == (3, 5, 3)
    assert F.relu(ensemble(X[:0])).shape == (3, 0, 3)


class Remembering(nn.Module):
    """Reads a buffer with a gradient and updates it, in place or by assignment."""

    def __init__(self, in_place):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 3)
        self.register_buffer("average", torch.ones(4, 4))
        self.in_place = in_place

    def forward(self, x):
        h = torch.tanh(self.inner(x))
        if self.in_place:
            self.average.lerp_(self.inner.weight.detach(), 0.5)
            return self.outer(h @ self.average)
        h = h @ self.average
        self.average = 0.5 * self.average
        return self.outer(h)


@pytest.mark.parametrize("in_place", [False, True])
def test_updates_of_one_member_leave_what_autograd_has_saved_for_others(in_place):
    reference = Remembering(in_place).double()
    check_agreement(embens.batch_ensemble(reference, 3).train(), X, passes=3)
    check_agreement(embens.independent(reference, 3).train(), X, passes=3)


class Penalised(nn.Module):
    """Adds a penalty on all parameters, of which a parametrized layer has others than a plain."""

    def __init__(self):
        super().__init__()
        self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.outer = nn.Linear(4, 3)

    def forward(self, x):
        penalty = sum(parameter.square().sum() for parameter in self.parameters())
        return self.outer(torch.tanh(self.inner(x))) + penalty


def test_parameters_of_parametrized_layers_are_those_of_the_reference():
    reference = Penalised().double()
    one = embens.laws.Constant(1)
    ensemble = embens.last_layer_dropout(reference, 2, law=one, example_input=X)
    torch.testing.assert_close(ensemble(X)[0], reference(X))


def test_a_layer_with_a_changing_parametrization_is_called_once():
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    ensemble = embens.batch_ensemble(nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 3)), 2)
    with pytest.raises(RuntimeError, match=r"'0' is called twice .* or call the layer once"):
        ensemble.train()(X.float())
    assert ensemble.eval()(X.float()).shape == (2, 5, 3)


def test_code_that_goes_through_separate_parameters_is_right():
    class Doubling(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            weights = {name: 2 * p for name, p in self.inner.named_parameters()}
            return self.outer(torch.func.functional_call(self.inner, weights, (x,)))

    check_agreement(embens.independent(Doubling().double(), 2), X)


def test_two_buffers_of_one_module_make_one_entry_of_the_spec():
    class CountingPasses(Net):
        def __init__(self):
            super().__init__(mix=True)
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("rows", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            self.rows += len(x)
            return super().forward(x)

    ensemble = embens.embed(CountingPasses(), 2, example_input=X)
    ensemble(X)
    (item,) = [item for item in ensemble.spec.per_member if not item.module]
    assert item.tensors == ("calls", "rows")


def test_merged_members_run_in_transforms_without_gradients():
    ensemble = embens.batch_ensemble(Net(mix=True), 3)
    batches = torch.stack([X, 2 * X])
    expected = torch.stack([ensemble(x) for x in batches])
    with torch.no_grad():
        outputs = torch.func.vmap(ensemble)(batches)
        jacobian = torch.func.jacrev(lambda x: ensemble.member(0)(x))(X)

    torch.testing.assert_close(outputs, expected.detach())
    assert jacobian.shape == (5, 3, 5, 4)
