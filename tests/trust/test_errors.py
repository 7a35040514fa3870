"""References at the edge of what torch can do: right, or an error of ours that says what to do."""

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn
from trust.story import follow, quiet, x_of

import embens
from embens import laws


class Energy(nn.Module):
    """Returns the gradient of a scalar with respect to its input."""

    def __init__(self, create_graph=True, detach=True, enable=True):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.create_graph, self.detach, self.enable = create_graph, detach, enable

    def forward(self, x):
        with torch.set_grad_enabled(self.enable or torch.is_grad_enabled()):
            if self.detach:
                x = x.detach()
            x.requires_grad_()
            energy = self.out(torch.tanh(self.b(torch.tanh(self.a(x))))).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=self.create_graph)
        return force


@pytest.mark.parametrize("create_graph", [True, False])
@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@quiet
def test_energy_models_are_right(create_graph, detach, grad):
    ensemble = embens.batch_ensemble(Energy(create_graph, detach).double(), 3)
    with torch.set_grad_enabled(grad):
        follow(ensemble, [x_of(), x_of()])
        x = x_of()
        ensemble(x)
        assert not x.requires_grad
    if create_graph and grad:
        ensemble(x_of()).square().sum().backward()
        assert ensemble.reference.a.weight.grad is not None


@quiet
def test_an_energy_model_without_gradients_raises_torchs_error():
    ensemble = embens.batch_ensemble(Energy(enable=False).double(), 3)
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
        ensemble(x_of())


FAMILIES = {
    "batch ensemble": embens.batch_ensemble,
    "own": lambda r, m: embens.embed(r, m, own="0"),
    "low rank": lambda r, m: embens.low_rank(r, m, rank=1),
    "independent": embens.independent,
    "last layer": embens.last_layer_dropout,
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@quiet
def test_sparse_embeddings_are_right(family, kind):
    layers = [nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)]
    if kind is nn.Embedding:
        layers.insert(0, nn.Flatten(1))
        layers[1] = nn.Linear(8, 5)
    if kind is nn.EmbeddingBag and family == "own":
        pytest.skip("not a layer of its own")
    reference = nn.Sequential(kind(7, 4, sparse=True), *layers).double()
    ensemble = FAMILIES[family](reference, 3)
    tokens = torch.tensor([[1, 2], [3, 1], [6, 6]])
    follow(ensemble, [tokens, tokens])
    optimizer = torch.optim.SGD(ensemble.parameters(), 0.1)
    members = [ensemble.member(a) for a in range(3)]
    ensemble(tokens).square().sum().backward()
    optimizer.step()
    assert all(bool(p.isfinite().all()) for p in ensemble.parameters())
    assert not torch.equal(ensemble.member(0)(tokens), members[0](tokens))


def mlp():
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("family", ["batch ensemble", "own", "low rank", "independent"])
def test_ensembles_on_the_meta_device_have_shapes_and_counts(family, training):
    with torch.device("meta"):
        reference = mlp()
    ensemble = FAMILIES[family](reference, 3).train(training)
    outputs = ensemble(torch.empty(4, 6, device="meta"))
    assert outputs.shape == (3, 4, 3)
    assert outputs.is_meta
    real = FAMILIES[family](mlp(), 3)
    counts = [sum(p.numel() for p in e.parameters()) for e in (ensemble, real)]
    assert counts[0] == counts[1]
    assert all(p.is_meta for p in ensemble.parameters())
    assert "members=3" in repr(ensemble)


@pytest.mark.parametrize("family", ["batch ensemble", "own", "low rank", "independent"])
@pytest.mark.parametrize("moved", [False, True])
@quiet
def test_merged_ensembles_move_to_the_meta_device(family, moved):
    class Mixed(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + x.mean()

    reference = Mixed(*mlp())
    ensemble = FAMILIES[family](reference, 3).eval()
    if moved:
        ensemble(torch.randn(4, 6))
    ensemble = ensemble.to("meta")
    assert ensemble(torch.empty(4, 6, device="meta")).shape == (3, 4, 3)


MOVES = {
    "half": lambda e: e.to(torch.bfloat16),
    "double": lambda e: e.double(),
    "and back": lambda e: e.double().float(),
    "copy": copy.deepcopy,
    "pickle": lambda e: pickle.loads(pickle.dumps(e)),
    "copy of a copy": lambda e: copy.deepcopy(copy.deepcopy(e)),
}


def saved(ensemble):
    file = io.BytesIO()
    torch.save(ensemble, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


MOVES["torch.save"] = saved


class Mixing(nn.Module):
    """Runs merged, and keeps a mean."""

    def __init__(self):
        super().__init__()
        self.a, self.out, self.calls = nn.Linear(6, 6), nn.Linear(6, 3), 0
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        h = torch.tanh(self.a(x))
        self.calls += 1
        self.mean += h.detach().mean(0)
        return self.out(h - self.mean) * self.calls


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("build", [mlp, Mixing])
@quiet
def test_moved_and_copied_ensembles_are_right(build, move):
    torch.manual_seed(0)
    ensemble = embens.batch_ensemble(build(), 3)
    x = torch.randn(4, 6)
    ensemble(x)
    ensemble = MOVES[move](ensemble)
    x = x.to(next(ensemble.parameters()).dtype)
    members = [ensemble.member(a).train(ensemble.training) for a in range(3)]
    tolerance = 0.1 if move == "half" else 1e-5
    for _ in range(2):
        expected = torch.stack([member(x) for member in members])
        torch.testing.assert_close(ensemble(x), expected, atol=tolerance, rtol=tolerance)


class Holding(nn.Module):
    """Holds something that cannot be pickled or copied."""

    def __init__(self, thing):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.thing = thing

    def forward(self, x):
        return self.out(torch.tanh(self.b(torch.tanh(self.a(x)))))


def numbers():
    yield 1


class Uncopied:
    def __deepcopy__(self, memo):
        raise TypeError("no copies of me")


THINGS = {
    "lambda": lambda: lambda x: x,
    "lock": threading.Lock,
    "generator": numbers,
    "file": lambda: open(__file__, encoding="utf-8"),  # noqa: SIM115
    "object": Uncopied,
    "torch generator": torch.Generator,
    "thread": threading.Thread,
    "local": threading.local,
}


@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize("family", ["batch ensemble", "independent"])
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@quiet
def test_references_with_things_that_cannot_be_copied_are_right_or_refused(thing, family):
    held = THINGS[thing]()
    reference = Holding(held).double()
    if thing in ("lambda", "torch generator"):
        follow(FAMILIES[family](reference, 3), [x_of(), x_of()])
    else:
        with pytest.raises(TypeError, match=r"the attribute 'thing' \(.*\) cannot be copied"):
            FAMILIES[family](reference, 3)
    getattr(held, "close", lambda: None)()


class Mix(nn.Module):
    """The same network folded or merged."""

    def __init__(self, mixes):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.mixes = mixes

    def forward(self, x):
        h = torch.tanh(self.b(torch.tanh(self.a(x))))
        return self.out(h - h.mean(0) if self.mixes else h)


def bias_removed(e):
    e.reference.b.bias = None


def bias_added(e):
    e.reference.b.bias = nn.Parameter(torch.ones(6))


def layer_replaced(e):
    e.reference.b = nn.Linear(6, 6)


def layer_replaced_by_another_kind(e):
    e.reference.b = nn.Identity()


def layer_of_another_size(e):
    e.reference.out = nn.Linear(6, 5)


def input_of_another_size(e):
    e.reference.a = nn.Linear(7, 6)


def layer_frozen(e):
    e.reference.b.requires_grad_(False)


def weight_assigned(e):
    e.reference.b.weight = nn.Parameter(torch.ones(6, 6))


def weight_of_another_size(e):
    e.reference.b.weight = nn.Parameter(torch.ones(6, 7))


CHANGES = [
    *(bias_removed, bias_added, layer_replaced, layer_replaced_by_another_kind),
    *(layer_of_another_size, input_of_another_size, layer_frozen, weight_assigned),
    weight_of_another_size,
]


@pytest.mark.parametrize("mixes", [False, True], ids=["folded", "merged"])
@pytest.mark.parametrize("called", [False, True], ids=["before a call", "after a call"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@quiet
def test_changed_layers_are_followed_or_refused(change, called, mixes):
    torch.manual_seed(0)
    reference = Mix(mixes)
    if change is bias_added:
        reference.b.bias = None
    ensemble = embens.batch_ensemble(reference, 3)
    x = torch.randn(4, 6)
    if called:
        ensemble(x)
    change(ensemble)
    if change in (
        *(layer_replaced_by_another_kind, weight_of_another_size),
        *(layer_of_another_size, input_of_another_size),
    ):
        with pytest.raises(ValueError, match="was changed after embedding"):
            ensemble(x)
        return
    outputs = ensemble(x)
    expected = torch.stack([ensemble.member(a)(x) for a in range(3)])
    torch.testing.assert_close(outputs, expected)
    if change is bias_removed:
        assert ensemble.member(0).b.bias is None
    if change is bias_added:
        pre = ensemble.individual["b.pre"][0]
        torch.testing.assert_close(ensemble.member(0).b.bias, pre)


def test_members_with_outputs_of_different_shapes_are_refused():
    class Selecting(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.out = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            h = torch.tanh(self.a(x))
            return self.out(h[h.sum(1) > 0])

    torch.manual_seed(0)
    ensemble = embens.batch_ensemble(Selecting(), 3)
    with pytest.raises(ValueError, match="members return outputs of different shapes"):
        ensemble(torch.randn(9, 6))


class Returning(nn.Module):
    """Returns whatever a function makes of its outputs."""

    def __init__(self, function):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.function = function

    def forward(self, x):
        return self.function(self.out(torch.tanh(self.b(torch.tanh(self.a(x))))))


class Box:
    """Hides a tensor."""

    def __init__(self, value):
        self.value = value


OUTPUTS = {
    "object": (Box, "returns a Box, whose tensors cannot be found"),
    "distribution": (
        lambda y: torch.distributions.Normal(y, 1.0),
        "returns a Normal, whose tensors cannot be found",
    ),
    "number": (lambda y: (y, float(y.detach().sum())), "different values of type float"),
    "array": (lambda y: (y, y.detach().numpy()), "different values of type ndarray"),
    "length": (lambda y: [y] * (1 + int(y[0, 0] > 0)), "outputs of different structures"),
    "None": (lambda y: (y, y if y[0, 0] > 0 else None), "outputs of different structures"),
}


@pytest.mark.parametrize("case", OUTPUTS)
@pytest.mark.parametrize("batch", ["same", "split"])
@quiet
def test_outputs_that_cannot_be_stacked_are_refused(case, batch):
    function, message = OUTPUTS[case]
    torch.manual_seed(1)
    ensemble = embens.batch_ensemble(Returning(function), 8, law=embens.laws.Shifted)
    with pytest.raises((TypeError, ValueError), match=message):
        ensemble(torch.randn(9, 6), batch=batch)


@quiet
def test_equal_values_among_the_outputs_are_returned():
    ensemble = embens.batch_ensemble(Returning(lambda y: (y, "name", {1, 2}, float("nan"))), 3)
    assert ensemble(torch.randn(4, 6))[1:3] == ("name", {1, 2})


class Attending(nn.Module):
    """Returns attention weights that it does not ask for."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.attention(h, h, h, need_weights=False)


@quiet
def test_modules_with_several_outputs_are_right():
    attending = embens.batch_ensemble(Attending(), 3)
    outputs, weights = attending(torch.randn(4, 5, 6))
    assert outputs.shape == (3, 4, 5, 6)
    assert weights is None
    layers = [nn.Conv1d(2, 4, 3), nn.Tanh(), nn.Conv1d(4, 4, 3)]
    pooling = embens.batch_ensemble(nn.Sequential(*layers, nn.MaxPool1d(2, return_indices=True)), 3)
    x = torch.randn(5, 2, 8)
    outputs, indices = pooling(x)
    for a in range(3):
        expected = pooling.member(a)(x)
        torch.testing.assert_close(outputs[a], expected[0])
        assert torch.equal(indices[a], expected[1])


@quiet
def test_every_member_draws_its_regions_of_fractional_pooling():
    layers = [nn.FractionalMaxPool2d(2, output_size=3), nn.Flatten(), nn.Linear(9, 4)]
    reference = nn.Sequential(*layers, nn.Tanh(), nn.Linear(4, 2))
    ensemble = embens.embed(reference, 8, pre=None, post=laws.Constant()).eval()
    torch.manual_seed(0)
    outputs = ensemble(torch.randn(2, 1, 9, 9))
    assert len({tuple(output.flatten().tolist()) for output in outputs}) > 1


@pytest.mark.parametrize("is_called", [False, True], ids=["before a call", "after a call"])
@quiet
def test_hooks_of_all_modules_are_called(is_called):
    torch.manual_seed(0)
    ensemble = embens.batch_ensemble(Returning(lambda y: y), 3)
    x = torch.randn(4, 6)
    before = ensemble(x) if is_called else None

    def double(module, args, output):
        return 2 * output if isinstance(module, nn.Linear) else None

    handle = nn.modules.module.register_module_forward_hook(double)
    try:
        outputs = ensemble(x)
        expected = torch.stack([ensemble.member(a)(x) for a in range(3)])
    finally:
        handle.remove()
    torch.testing.assert_close(outputs, expected)
    if before is not None:
        torch.testing.assert_close(ensemble(x), before)


@pytest.mark.parametrize("kind", ["scripted", "traced"])
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_scripted_modules_are_refused_by_name(kind):
    layer = nn.Linear(6, 6)
    if kind == "scripted":
        compiled = torch.jit.script(layer)
    else:
        compiled = torch.jit.trace(layer, (torch.ones(1, 6),))
    reference = nn.Sequential(compiled, nn.Tanh(), nn.Linear(6, 2))
    with pytest.raises(TypeError, match=r"contains a .*Module, which cannot be embedded"):
        embens.batch_ensemble(reference, 3)


def test_a_lazy_layer_in_user_code_is_refused_by_name():
    reference = Returning(lambda y: y)
    reference.b = nn.LazyLinear(6)
    with pytest.raises(ValueError, match=r"'b\.weight' has no shape yet"):
        embens.batch_ensemble(reference, 3)


def test_code_may_read_the_type_of_a_weight_and_is_folded():
    class Casting(Returning):
        def forward(self, x):
            return super().forward(x.to(self.b.weight.dtype))

    torch.manual_seed(0)
    ensemble = embens.batch_ensemble(Casting(torch.tanh), 3)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        ensemble.to(dtype)
        outputs = ensemble(torch.ones(4, 6))
        assert ensemble.executor == "folded"
        assert outputs.dtype is dtype
        expected = torch.stack([ensemble.member(a)(torch.ones(4, 6)) for a in range(3)])
        torch.testing.assert_close(outputs, expected, rtol=0.05, atol=0.05)
