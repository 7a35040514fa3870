"""An ensemble is an ordinary module: everything that torch does with modules works."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from cases import ARCHITECTURES, FAMILIES, Residual, Tokens, sampled
from torch import nn
from torch.utils.checkpoint import checkpoint

import embens
from embens import laws


def mlp(*tail: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2), *tail
    )


def vision() -> tuple[nn.Module, torch.Tensor]:
    return Residual(), torch.randn(4, 3, 6, 6)


def tabular() -> tuple[nn.Module, torch.Tensor]:
    return mlp(), torch.randn(5, 3)


def text() -> tuple[nn.Module, torch.Tensor]:
    return Tokens(), torch.randint(11, (4, 5))


every_input = pytest.mark.parametrize("make", [tabular, vision, text])
sampled_families = sampled("make, family", [tabular, vision, text], list(FAMILIES))
quiet_compiler = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def build(make, family: str) -> tuple[embens.EmbeddedEnsemble, torch.Tensor]:
    reference, x = make()
    return FAMILIES[family](reference, members=3), x


def gradients(ensemble, run) -> list[torch.Tensor]:
    ensemble.zero_grad()
    run()
    return [p.grad.clone() for p in ensemble.parameters() if p.grad is not None]


def assert_same(left, right, tolerance: float = 1e-5) -> None:
    for x, y in zip(left, right, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


# State, copies, types


@sampled_families
def test_a_state_dict_can_be_loaded_into_another_ensemble(make, family):
    reference, x = make()
    first = FAMILIES[family](reference, members=3)
    second = FAMILIES[family](reference, members=3).eval()
    first(x)
    first.eval()
    second.load_state_dict(first.state_dict())

    assert torch.equal(first(x), second(x))


def test_a_plain_dictionary_of_tensors_is_a_state():
    reference, x = vision()
    first, second = (embens.batch_ensemble(reference, 3) for _ in range(2))
    first(x)
    second.load_state_dict(dict(first.state_dict()))

    assert torch.equal(second.eval()(x), first.eval()(x))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        second.load_state_dict({**first.state_dict(), "other": torch.zeros(1)})


@sampled_families
def test_copies_and_pickles_are_equal_and_separate(make, family):
    ensemble, x = build(make, family)
    ensemble.eval()
    expected = ensemble(x).detach()
    for twin in (copy.deepcopy(ensemble), pickle.loads(pickle.dumps(ensemble))):
        assert torch.equal(twin(x), expected)
        assert twin.spec == ensemble.spec
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert torch.equal(ensemble(x), expected)
        target = torch.zeros(len(x), dtype=torch.long)
        embens.objective(twin(x), target).backward()
        assert all(p.grad is None for p in ensemble.parameters())


@sampled_families
def test_types_and_devices_apply_to_everything(make, family):
    ensemble, x = build(make, family)
    expected = ensemble.eval()(x)
    double = copy.deepcopy(ensemble).to(torch.float64)
    outputs = double(x.double() if x.is_floating_point() else x)
    assert outputs.dtype == torch.float64
    torch.testing.assert_close(outputs.float(), expected, rtol=1e-4, atol=1e-5)
    meta = copy.deepcopy(ensemble).to("meta")
    for tensor in (*meta.parameters(), *meta.buffers()):
        assert tensor.device.type == "meta"
    assert meta(x.to("meta")).shape == expected.shape


@sampled_families
def test_autocast_gives_the_type_that_the_reference_gives(make, family):
    reference, x = make()
    ensemble = FAMILIES[family](reference, members=3).eval()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = ensemble(x)
        assert outputs.dtype == reference(x).dtype == torch.bfloat16
    torch.testing.assert_close(outputs.float(), ensemble(x), rtol=0.1, atol=0.1)
    outputs.float().square().sum().backward()
    for parameter in ensemble.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == parameter.dtype


def test_bfloat16_weights_give_bfloat16_outputs():
    ensemble = embens.batch_ensemble(mlp().bfloat16(), 3)
    assert ensemble.individual["0.pre"].dtype == torch.bfloat16
    for chunk in (1, 3):
        outputs = ensemble(torch.randn(5, 3, dtype=torch.bfloat16), chunk=chunk)
        assert outputs.dtype == torch.bfloat16


def test_channels_last_inputs_give_the_same_outputs():
    reference, x = vision()
    x = x.to(memory_format=torch.channels_last)
    ensemble = embens.batch_ensemble(reference.to(memory_format=torch.channels_last), 3).eval()
    torch.testing.assert_close(ensemble(x)[1], ensemble.member(1)(x), rtol=1e-4, atol=1e-5)


def test_train_and_eval_reach_every_module():
    ensemble = embens.batch_ensemble(Residual(0.5), 3)
    for mode in (True, False):
        ensemble.train(mode)
        assert {module.training for module in ensemble.modules()} == {mode}
    assert embens.batch_ensemble(Residual().eval(), 3).training is False


@every_input
@pytest.mark.parametrize("family", ["batch ensemble", "independent", "lora"])
def test_gradients_do_not_depend_on_grad_mode_of_other_passes(make, family):
    ensemble, x = build(make, family)
    ensemble.eval()
    expected = ensemble(x)
    with torch.no_grad():
        torch.testing.assert_close(ensemble(x), expected.detach())
    with torch.inference_mode():
        torch.testing.assert_close(ensemble(x).clone(), expected.detach())
    plain = gradients(ensemble, lambda: expected.square().sum().backward())
    again = gradients(ensemble, lambda: ensemble(x).square().sum().backward())

    assert_same(plain, again, 1e-4)


# Parameters


@pytest.mark.parametrize("case", ARCHITECTURES, ids=str)
def test_shared_and_individual_parameters_are_all_parameters(case):
    ensemble = embens.batch_ensemble(case.build(), 3)
    shared = [id(p) for p in ensemble.shared_parameters()]
    individual = [id(p) for p in ensemble.individual_parameters()]
    assert sorted(shared + individual) == sorted(id(p) for p in ensemble.parameters())
    groups = ensemble.parameter_groups(lr=0.1, modulation_lr=0.5)
    assert [group["lr"] for group in groups] == [0.1, 0.5]
    assert [group["weight_decay"] for group in groups] == [5e-4, 0.0]
    torch.optim.SGD(groups).step()


def test_parameters_that_the_reference_does_not_train_stay_fixed():
    reference = mlp()
    reference[0].weight.requires_grad_(False)
    ensemble = embens.independent(reference, 3)

    assert not ensemble.individual["0.weight"].requires_grad
    assert ensemble.individual["0.bias"].requires_grad
    assert not embens.batch_ensemble(reference, 3).reference[0].weight.requires_grad


# Transformations of torch


@sampled_families
def test_functional_call_uses_the_tensors_it_is_given(make, family):
    reference, x = make()
    ensemble = FAMILIES[family](reference, members=3).eval()
    other = FAMILIES[family](reference, members=3).eval()
    state = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    torch.testing.assert_close(torch.func.functional_call(ensemble, state, (x,)), other(x))

    def loss(parameters):
        return torch.func.functional_call(ensemble, parameters, (x,)).square().sum()

    parameters = {name: p.detach() for name, p in ensemble.named_parameters()}
    functional = torch.func.grad(loss)(parameters)
    plain = gradients(ensemble, lambda: ensemble(x).square().sum().backward())
    assert_same(functional.values(), plain, 1e-4)


@every_input
@pytest.mark.parametrize("reentrant", [False, True])
def test_an_ensemble_can_be_checkpointed_as_a_whole(make, reentrant):
    ensemble, x = build(make, "batch ensemble")
    ensemble.eval()
    if reentrant:
        if not x.is_floating_point():
            pytest.skip("reentrant checkpoints need an input with a gradient")
        x.requires_grad_()

    def run_checkpointed():
        checkpoint(ensemble, x, use_reentrant=reentrant).square().sum().backward()

    plain = gradients(ensemble, lambda: ensemble(x).square().sum().backward())
    assert_same(plain, gradients(ensemble, run_checkpointed))


COMPILED = [(vision, "batch ensemble"), (vision, "own last layers"), (vision, "independent")]
COMPILED += [(text, "batch ensemble"), (text, "last-layer dropout"), (text, "lora")]
COMPILED += [(tabular, family) for family in FAMILIES]
SHORT = [COMPILED[0], *((tabular, f) for f in ("batch ensemble", "own last layers", "lora"))]
every_compiled = pytest.mark.parametrize(
    ("make", "family"),
    [pair if pair in SHORT else pytest.param(*pair, marks=pytest.mark.long) for pair in COMPILED],
)


@quiet_compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at merged weights
@every_compiled
def test_the_whole_graph_compiles_forward_and_backward(make, family):
    torch._dynamo.reset()
    ensemble, x = build(make, family)
    ensemble.eval()
    compiled = torch.compile(ensemble, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), ensemble(x), rtol=1e-4, atol=1e-5)
    target = torch.zeros(len(x), dtype=torch.long)
    plain = gradients(ensemble, lambda: embens.objective(ensemble(x), target).backward())
    fast = gradients(ensemble, lambda: embens.objective(compiled(x), target).backward())
    assert_same(plain, fast, 1e-4)


@quiet_compiler
def test_the_default_compiler_gives_the_same_gradients():
    torch._dynamo.reset()
    ensemble, x = build(tabular, "batch ensemble")
    compiled = torch.compile(ensemble, fullgraph=True)
    target = torch.zeros(len(x), dtype=torch.long)
    plain = gradients(ensemble, lambda: ensemble.objective(ensemble(x), target).backward())
    fast = gradients(ensemble, lambda: ensemble.objective(compiled(x), target).backward())

    assert_same(plain, fast)


@quiet_compiler
@every_compiled
def test_an_ensemble_can_be_exported_and_stays_as_it_was(make, family):
    ensemble, x = build(make, family)
    ensemble.eval()
    expected = ensemble(x)
    exported = torch.export.export(ensemble, (x,))
    torch.testing.assert_close(exported.module()(x), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(ensemble(x), expected)
    copy.deepcopy(ensemble)


# Running


def test_inputs_of_the_wrong_shape_raise():
    ensemble, x = build(tabular, "batch ensemble")
    with pytest.raises(ValueError, match=r"batch='own' expects inputs of shape \(3, batch, …\)"):
        ensemble(x, batch="own")
    with pytest.raises(ValueError, match="batch: unknown 'spilt'; did you mean 'split'"):
        ensemble(x, batch="spilt")
    with pytest.raises(ValueError, match="needs a tensor among the positional inputs"):
        ensemble(batch="own")
    for chunk in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match=f"chunk must be a positive integer, got {chunk}"):
            ensemble(x, chunk=chunk)


class Dropping(nn.Module):
    """Layers with dropout in a place that is shared by the members or not."""

    def __init__(self, run):
        super().__init__()
        self.a, self.b, self.dropout, self.run = nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(), run

    def forward(self, x):
        return self.run(self, x)


@pytest.mark.parametrize(
    "run",
    [
        lambda net, x: net.b(net.dropout(net.a(x))),
        lambda net, x: net.b(net.a(net.dropout(x))),
        lambda net, x: net.b(net.a(F.dropout(x, 0.5, net.training))),
    ],
)
def test_members_drop_different_units_in_every_place(run):
    one = laws.Constant(1.0)
    ensemble = embens.embed(Dropping(run), 3, one, one).train()
    outputs = ensemble(torch.ones(64, 6))
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])
    same = ensemble.eval()(torch.ones(64, 6))
    torch.testing.assert_close(same[0], same[1])


def test_bind_takes_tuples_dictionaries_and_single_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x, *, scale=1.0):
            return self.head(self.layer(x) * scale)

    ensemble, x = embens.batch_ensemble(Two(), 2), torch.ones(5, 3)
    assert ensemble.bind(x) == ((x,), {})
    assert ensemble.bind([x]) == ((x,), {})
    assert ensemble.bind({"scale": 2.0, "x": x}) == ((x,), {"scale": 2.0})
    with pytest.raises(TypeError, match=r"inputs 'y' do not fit the reference, which takes \(x"):
        ensemble.bind({"y": x})


LAYERS = {
    "linear": (lambda: nn.Linear(4, 5), (3, 4)),
    "without bias": (lambda: nn.Linear(4, 5, bias=False), (3, 4)),
    "on four axes": (lambda: nn.Linear(4, 5), (3, 2, 2, 4)),
    "ntk": (lambda: embens.networks.Linear(4, 5, bias_std=0.3), (3, 4)),
    "convolution": (lambda: nn.Conv2d(4, 5, 2), (3, 4, 3, 3)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, 2, groups=2, dilation=2), (3, 4, 9, 9)),
    "padded to the same size": (lambda: nn.Conv1d(4, 5, 3, padding="same", dilation=2), (3, 4, 7)),
    "padded by reflection": (
        lambda: nn.Conv2d(4, 5, 3, padding=(2, 1), padding_mode="reflect"),
        (3, 4, 5, 5),
    ),
    "ntk convolution": (lambda: embens.networks.Conv2d(4, 5, 3), (3, 4, 5, 5)),
    "transposed": (
        lambda: nn.ConvTranspose2d(4, 6, 3, 2, padding=1, output_padding=1, groups=2),
        (3, 4, 5, 5),
    ),
    "three axes": (lambda: nn.Conv3d(4, 5, 2, bias=False), (3, 4, 3, 3, 3)),
    "batch norm": (lambda: nn.BatchNorm1d(4), (3, 4)),
    "recurrent": (lambda: nn.GRU(4, 5, batch_first=True), (3, 2, 4)),
}


class First(nn.Module):
    """A layer alone; of several outputs, the first."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        outputs = self.layer(x)
        return outputs[0] if isinstance(outputs, tuple) else outputs


@pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=LAYERS)
def test_separate_layers_of_every_kind_give_what_the_members_give(make, shape):
    torch.manual_seed(0)
    ensemble = embens.independent(First(make()), 3).eval()
    members = [ensemble.member(a) for a in range(3)]
    x = torch.randn(shape)
    expected = torch.stack([member(x) for member in members])
    for chunk in (1, 2, 3):
        torch.testing.assert_close(ensemble(x, chunk=chunk), expected)
    inputs = torch.randn(3, *shape)
    expected = torch.stack([member(x) for member, x in zip(members, inputs, strict=True)])
    torch.testing.assert_close(ensemble(inputs, batch="own"), expected)
    split = ensemble(x, batch="split")
    for i in range(len(x)):
        torch.testing.assert_close(split[i], members[i](x[i : i + 1])[0])


# State that a module keeps between passes


class Centred(nn.Module):
    """Keeps a running mean, by assignment or in place."""

    def __init__(self, in_place: bool = False, grows: bool = False):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))
        self.in_place, self.grows = in_place, grows

    def forward(self, x):
        if self.grows:
            self.mean = torch.cat([self.mean, x.detach().mean(0)])[:10]
        elif self.in_place:
            self.mean.mul_(0.5).add_(x.detach().mean(0))
        else:
            self.mean = 0.5 * self.mean + x.detach().mean(0)
        return x - self.mean[:5]


class Remembering(nn.Module):
    """Keeps numbers, lists and tensors in attributes."""

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
    """Has a module whose state is changed by a method instead of a call."""

    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(5))

        def follow(self, x):
            self.mean = 0.5 * self.mean + x.mean(0)

    def __init__(self):
        super().__init__()
        self.a, self.inside, self.b = nn.Linear(3, 5), Followed.Inside(), nn.Linear(5, 2)

    def forward(self, x):
        x = torch.tanh(self.a(x))
        self.inside.follow(x.detach())
        return self.b(x - self.inside.mean)


def around(inside: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), inside, nn.Linear(5, 2))


def spectral() -> nn.Module:
    layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    for i in (0, 2):
        layers[i] = nn.utils.spectral_norm(layers[i])
        with torch.no_grad():  # far from converged, so that every power iteration shows
            u = next(buffer for name, buffer in layers[i].named_buffers() if name.endswith("_u"))
            u.copy_(nn.functional.normalize(torch.randn(u.shape), dim=0))
    return layers


STATEFUL = {
    "assigned": lambda: around(Centred()),
    "in place": lambda: around(Centred(in_place=True)),
    "attributes": lambda: around(Remembering()),
    "a method": Followed,
    "spectral norm by a hook": spectral,
}


@pytest.mark.filterwarnings("ignore:.torch.nn.utils.spectral_norm. is now:FutureWarning")
@pytest.mark.parametrize("case", STATEFUL)
@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_state_belongs_to_each_member(case, chunk):
    torch.manual_seed(0)
    ensemble = embens.batch_ensemble(STATEFUL[case]().double().train(), 4)
    x = torch.randn(6, 3, dtype=torch.float64)
    members = [ensemble.member(a) for a in range(4)]
    for _ in range(3):
        outputs = ensemble(x, chunk=chunk)
        torch.testing.assert_close(outputs, torch.stack([member(x) for member in members]))
    outputs.sum().backward()


def test_a_buffer_that_changes_its_shape_raises():
    ensemble = embens.batch_ensemble(around(Centred(grows=True)), 3)
    for chunk in (1, 3):
        with pytest.raises((RuntimeError, ValueError), match=r"mean'.*shape"):
            ensemble(torch.randn(6, 3), chunk=chunk)


# Members


@pytest.mark.parametrize("a", [3, -4, 1.0, True, "0"])
def test_an_index_that_is_no_member_raises(a):
    with pytest.raises((IndexError, TypeError), match="member"):
        embens.batch_ensemble(mlp(), 3).member(a)


def test_negative_indices_count_from_the_end():
    ensemble, x = build(tabular, "batch ensemble")
    assert torch.equal(ensemble.member(-1)(x), ensemble.member(2)(x))


@sampled("case, family", ARCHITECTURES, list(FAMILIES))
def test_a_member_has_the_classes_of_the_reference_and_shares_no_tensor(case, family):
    reference = case.build()
    ensemble = FAMILIES[family](reference, members=2)
    member = ensemble.member(0)
    assert [type(m) for m in member.modules()] == [type(m) for m in reference.modules()]
    assert list(member.state_dict()) == list(reference.state_dict())
    pointers = {tensor.data_ptr() for tensor in ensemble.state_dict().values()}
    assert not pointers & {tensor.data_ptr() for tensor in member.state_dict().values()}


# Collapse


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: embens.batch_ensemble(mlp(), 3), "multiply each other"),
        (lambda: embens.independent(mlp(), 3), "separate networks"),
        (
            lambda: embens.last_layer_dropout(mlp(nn.LogSoftmax(-1)), 3),
            "not linear in the output of '4'",
        ),
        (lambda: embens.embed(mlp(), 3, sites=["0"]), "not linear in the output of '0'"),
        (lambda: embens.batch_ensemble(Residual(), 3), "separate tensors in"),
        (lambda: embens.embed(mlp(), 3, None, None, own="2"), "not linear in the output of '2'"),
        (lambda: embens.embed(mlp(), 3, own="last"), "multiply each other"),
        (lambda: embens.low_rank(mlp(), 4, rank=2), "multiply each other"),
    ],
)
def test_an_ensemble_whose_mean_is_not_one_network_raises_with_the_reason(make, reason):
    with pytest.raises(ValueError, match=reason):
        make().collapse()


@pytest.mark.parametrize("kind", ["multiplicative", "additive"])
def test_low_rank_members_of_the_last_layer_collapse(kind):
    ensemble = embens.low_rank(mlp(), 4, rank=2, kind=kind, scale=0.5, sites="last")
    x = torch.randn(6, 3)
    torch.testing.assert_close(ensemble.collapse()(x), ensemble(x).mean(0))


def test_modulations_on_both_sides_of_the_last_layer_collapse():
    ensemble = embens.embed(mlp(), 5, sites=["4"]).double()
    x = torch.randn(7, 3).double()
    torch.testing.assert_close(ensemble.collapse()(x), ensemble(x).mean(0))


@pytest.mark.parametrize("case", ARCHITECTURES, ids=str)
def test_separate_last_layers_collapse(case):
    if case.name in ("encoder layer, time first", "tied"):
        pytest.skip("the last layer is followed by a norm, or tied to the first")
    reference = case.build().double().eval()
    x = case.inputs(torch.Generator().manual_seed(0))
    x = x.double() if x.is_floating_point() else x
    ensemble = embens.embed(reference, 5, None, None, own="last", example_input=x)

    torch.testing.assert_close(ensemble.collapse()(x), ensemble(x).mean(0))


class Heads(nn.Module):
    """Two heads that are combined."""

    def __init__(self, combine):
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)
        self.combine = combine

    def forward(self, x):
        hidden = torch.relu(self.trunk(x))
        return self.combine(self.a(hidden), 3 * self.b(hidden))


def test_two_heads_collapse_when_they_are_added():
    ensemble, x = embens.last_layer_dropout(Heads(torch.add), 4), torch.randn(5, 3)
    torch.testing.assert_close(ensemble.collapse()(x), ensemble(x).mean(0))


@pytest.mark.parametrize(
    "combine",
    [
        torch.mul,
        lambda a, b: a * b,
        lambda a, b: a * a,
        lambda a, b: a / (b.exp() + 1),
        torch.maximum,
    ],
)
def test_two_heads_do_not_collapse_when_the_result_is_not_linear(combine):
    with pytest.raises(ValueError, match="not linear"):
        embens.last_layer_dropout(Heads(combine), 4).collapse()


def test_a_loaded_ensemble_collapses(tmp_path):
    reference, x = tabular()
    embens.last_layer_dropout(reference, 4).save(tmp_path / "ensemble")
    loaded = embens.load(tmp_path / "ensemble", reference)
    torch.testing.assert_close(loaded.collapse()(x), loaded(x).mean(0))


# Arguments of the reference that are called batch or chunk


class Graphs(nn.Module):
    """Adds up the nodes of each graph, as networks for graphs do."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x, batch, chunk=None):
        sums = torch.zeros(3, 8).index_add(0, batch, torch.tanh(self.first(x)))
        return self.last(sums) * (1 if chunk is None else chunk)


def test_arguments_of_the_reference_may_have_the_names_of_the_ensemble():
    x, graph, scale = torch.randn(5, 4), torch.tensor([0, 0, 1, 2, 2]), torch.tensor(2.0)
    ensemble = embens.batch_ensemble(Graphs(), 2, example_input=(x, graph))
    expected = torch.stack([ensemble.member(a)(x, graph) for a in range(2)])
    torch.testing.assert_close(ensemble(x, graph), expected)
    torch.testing.assert_close(ensemble(x, batch=graph), expected)
    torch.testing.assert_close(ensemble(x=x, batch=graph), expected)
    torch.testing.assert_close(ensemble(x, batch=graph, chunk=scale), 2 * expected)
    torch.testing.assert_close(ensemble(x, graph, scale), 2 * expected)
    inputs = {"x": x, "batch": graph}
    torch.testing.assert_close(embens.predict(ensemble, inputs).members, expected.detach())
    ensemble.backward(inputs, torch.tensor([0, 1, 1]))
    with pytest.raises(TypeError, match="chunk=2 may be meant for the ensemble or for the ref"):
        ensemble(x, graph, chunk=2)


def test_keyword_only_arguments_with_the_names_of_the_ensemble_are_refused():
    class Named(Graphs):
        def forward(self, x, *, batch):
            return super().forward(x, batch)

    with pytest.raises(ValueError, match=r"keyword-only argument 'batch'.*by position"):
        embens.batch_ensemble(Named(), 2)


def test_a_default_chunk_counts_the_rows_of_one_member(monkeypatch):
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    ensemble, x = embens.batch_ensemble(net, 8), torch.randn(512, 4)
    sizes = []
    chunks = embens.EmbeddedEnsemble.chunks

    def record(self, folded, arguments, chunk):
        sizes.append(chunks(self, folded, arguments, chunk))
        return sizes[-1]

    monkeypatch.setattr(embens.EmbeddedEnsemble, "chunks", record)
    ensemble(x)
    ensemble(x.expand(8, 512, 4), batch="own")
    assert sizes[0] == sizes[1]
