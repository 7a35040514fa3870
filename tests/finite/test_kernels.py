"""The empirical kernels against naive Jacobians, one output at a time."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from cases import ARCHITECTURES, Architecture, Residual, Tokens
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import embens
from embens import finite, laws, networks
from embens.finite.empirical import blocks, contraction, kernels
from embens.finite.empirical.recording import Recorder

EXACT = {"rtol": 1e-10, "atol": 1e-12}
FAMILIES = {
    "batch_ensemble": lambda reference, x: embens.batch_ensemble(reference, 2, example_input=x),
    "all sites": lambda reference, x: embens.embed(reference, 2, sites="all", example_input=x),
    "last_layer_dropout": lambda reference, x: embens.last_layer_dropout(
        reference, 2, example_input=x
    ),
    "independent": lambda reference, x: embens.independent(reference, 2),
}
NOT_BATCHED = ("unbatched conv", "encoder layer, time first")
BATCHED = [a for a in ARCHITECTURES if a.name not in NOT_BATCHED]


@pytest.fixture(autouse=True)
def _seed():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


class Few(nn.Module):
    """A few of the outputs, where a naive Jacobian of all would take long."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, ::7][:, :6]


def build(architecture: Architecture, family: str) -> tuple[embens.EmbeddedEnsemble, Tensor]:
    x = architecture.inputs(torch.Generator().manual_seed(1))
    x = x.double() if x.is_floating_point() else x
    reference = architecture.build().double().eval()
    if architecture.name not in NOT_BATCHED and reference(x)[0].numel() > 10:
        reference = nn.Sequential(reference, Few())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # guesses about the data flow are not the matter here
        return FAMILIES[family](reference, x).eval(), x


def jacobians(ensemble: embens.EmbeddedEnsemble, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of outputs (member, batch, class) by one call for each of them."""
    shared = [p for p in ensemble.shared_parameters() if p.requires_grad]
    own = [p for p in ensemble.individual_parameters() if p.requires_grad]
    rows: tuple[list, list] = ([], [])
    for a, of_member in enumerate(outputs):
        for value in of_member.flatten():
            gradients = torch.autograd.grad(
                value, shared + own, retain_graph=True, materialize_grads=True
            )
            nothing = outputs.new_zeros(1)
            rows[0].append(torch.cat([nothing, *(g.flatten() for g in gradients[: len(shared)])]))
            rows[1].append(
                torch.cat([nothing, *(g[a].flatten() for g in gradients[len(shared) :])])
            )
    first, second = (torch.stack(r).view(*outputs.shape, -1) for r in rows)
    return first, second


def naive(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Contract Jacobians."""
    shared = torch.einsum("aikp,bjlp->abijkl", left[0], right[0])
    return shared, torch.einsum("aikp,ajlp->aijkl", left[1], right[1])


def flat_outputs(ensemble: embens.EmbeddedEnsemble, x: Tensor) -> Tensor:
    return ensemble(x).flatten(2)


def assert_equal(kernel: finite.FiniteKernel, expected: tuple[Tensor, Tensor], **tolerance) -> None:
    for part, other in zip((kernel.shared, kernel.individual), expected, strict=True):
        scale = other.abs().max().clamp(min=1e-30)
        torch.testing.assert_close(part / scale, other / scale, **(tolerance or EXACT))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("architecture", BATCHED, ids=str)
def test_all_outputs_equal_a_naive_contraction(architecture, family):
    ensemble, x = build(architecture, family)
    rows = jacobians(ensemble, flat_outputs(ensemble, x))
    assert_equal(finite.ntk(ensemble, x), naive(rows, rows))


@pytest.mark.parametrize("outputs", ["trace", "target", "nll"])
@pytest.mark.parametrize("name", ["mlp", "paper's cnn", "transformer", "reused", "grouped"])
def test_reductions_equal_a_naive_contraction_for_two_sets_of_samples(name, outputs, monkeypatch):
    monkeypatch.setattr(blocks, "CLASSES_AT_ONCE", 2)
    architecture = next(a for a in ARCHITECTURES if a.name == name)
    ensemble, x = build(architecture, "batch_ensemble")
    x2 = x.flip(0)[:2] * 2 % 7  # tokens stay tokens
    sides, targets = [], []
    for samples in (x, x2):
        values = flat_outputs(ensemble, samples)
        target = torch.arange(len(samples)) % values.shape[2]
        if outputs == "target":
            values = values[:, range(len(samples)), target][..., None]
        elif outputs == "nll":
            values = -values.log_softmax(2)[:, range(len(samples)), target][..., None]
        sides.append(jacobians(ensemble, values))
        targets.append(target)
    given = {} if outputs == "trace" else {"target": targets[0], "target2": targets[1]}
    kernel = finite.ntk(ensemble, x, x2, outputs=outputs, **given)
    expected = tuple(part.diagonal(dim1=-2, dim2=-1).sum(-1) for part in naive(*sides))
    assert kernel.shared.shape == (2, 2, len(x), 2)
    assert_equal(kernel, expected)


@pytest.mark.parametrize("outputs", ["all", "nll"])
@pytest.mark.parametrize("name", ["paper's cnn", "cross attention", "tied", "transposed"])
def test_chunks_and_tiles_do_not_change_the_kernel(name, outputs, monkeypatch):
    architecture = next(a for a in ARCHITECTURES if a.name == name)
    ensemble, x = build(architecture, "batch_ensemble")
    given = {}
    if outputs == "nll":
        given = {"target": torch.arange(len(x)) % 2}
    whole = finite.ntk(ensemble, x, outputs=outputs, **given)
    monkeypatch.setattr(contraction, "TILE_BYTES", 1)
    monkeypatch.setattr(blocks, "SMALL", 0)
    for chunk in (1, 2, 100):
        kernel = finite.ntk(ensemble, x, outputs=outputs, chunk=chunk, **given)
        assert_equal(kernel, (whole.shared, whole.individual))
    rectangular = finite.ntk(
        ensemble,
        x,
        x,
        outputs=outputs,
        chunk=2,
        **given,
        **({"target2": given["target"]} if given else {}),
    )
    assert_equal(rectangular, (whole.shared, whole.individual))


def test_memory_of_one_chunk_does_not_grow_with_the_samples(monkeypatch):
    ensemble, _ = build(ARCHITECTURES[0], "batch_ensemble")
    rows: list[int] = []
    record = Recorder.record
    monkeypatch.setattr(
        Recorder, "record", lambda self, inputs: rows.append(len(inputs[0])) or record(self, inputs)
    )
    finite.ntk(ensemble, torch.randn(7, 5, dtype=torch.float64), chunk=3)
    assert rows == [3, 3, 1, 3, 1, 1]  # each pair of chunks once
    monkeypatch.setattr(blocks, "PASS_BYTES", 1)
    rows.clear()
    finite.ntk(ensemble, torch.randn(3, 5, dtype=torch.float64))
    assert set(rows) == {1}


@pytest.mark.parametrize("outputs", ["trace", "target", "nll"])
def test_reductions_hold_no_more_classes_at_once_than_a_constant(outputs, monkeypatch):
    held: list[int] = []
    group = blocks.group_uses

    def counting(terms, cotangents, individual):
        held.extend(len(c) for c in cotangents)
        return group(terms, cotangents, individual)

    monkeypatch.setattr(blocks, "group_uses", counting)
    for classes in (3, 40):
        held.clear()
        ensemble = embens.batch_ensemble(networks.mlp(4, 6, 2, classes), 2)
        given = {} if outputs == "trace" else {"target": torch.tensor([0, 1])}
        finite.ntk(ensemble, torch.randn(2, 4), outputs=outputs, **given)
        assert max(held) <= (1 if outputs != "trace" else blocks.CLASSES_AT_ONCE)


def test_nll_takes_one_backward_pass_for_each_member_whatever_the_samples(monkeypatch):
    ensemble = embens.batch_ensemble(networks.mlp(4, 6, 2, 10), 3)
    calls: list[int] = []
    gradient = torch.autograd.grad
    monkeypatch.setattr(
        torch.autograd, "grad", lambda *args, **kw: calls.append(1) or gradient(*args, **kw)
    )
    finite.ntk(ensemble, torch.randn(9, 4), outputs="nll", target=torch.arange(9))
    assert len(calls) == 3


@pytest.mark.parametrize("name", ["mlp", "paper's cnn", "transformer"])
def test_single_precision_agrees_with_double(name):
    architecture = next(a for a in ARCHITECTURES if a.name == name)
    ensemble, x = build(architecture, "batch_ensemble")
    exact = finite.ntk(ensemble, x)
    single = finite.ntk(ensemble.float(), x.float() if x.is_floating_point() else x)
    assert single.shared.dtype == single.individual.dtype == torch.float32
    expected = (exact.shared.float(), exact.individual.float())
    assert_equal(single, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("outputs", ["all", "trace"])
def test_the_kernel_of_samples_with_themselves_is_symmetric_and_positive(outputs):
    ensemble, x = build(ARCHITECTURES[2], "batch_ensemble")
    kernel = finite.ntk(ensemble, x, outputs=outputs)
    shared, own = kernel.shared, kernel.individual
    if outputs == "all":
        torch.testing.assert_close(shared, shared.permute(1, 0, 3, 2, 5, 4))
        matrix = shared.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(0, 2)
    else:
        torch.testing.assert_close(shared, shared.permute(1, 0, 3, 2))
        matrix = shared.transpose(1, 2).flatten(2).flatten(0, 1)
        torch.testing.assert_close(own, own.mT)
    assert torch.linalg.eigvalsh(matrix).min() > -1e-10 * matrix.trace()


def test_frozen_parameters_do_not_count():
    ensemble, x = build(ARCHITECTURES[0], "batch_ensemble")
    parameters = [*ensemble.shared_parameters(), *ensemble.individual_parameters()]
    for parameter in parameters[::2]:
        parameter.requires_grad_(False)
    rows = jacobians(ensemble, flat_outputs(ensemble, x))
    assert_equal(finite.ntk(ensemble, x), naive(rows, rows))
    for parameter in parameters:
        parameter.requires_grad_(False)
    assert not finite.ntk(ensemble, x).shared.any()


def test_separate_networks_share_nothing():
    ensemble, x = build(ARCHITECTURES[0], "independent")
    kernel = finite.ntk(ensemble, x)
    assert not kernel.shared.any()
    single = embens.embed(
        ensemble.member(1), 1, pre=laws.Constant(1.0), post=laws.Constant(1.0), trainable=False
    )
    alone = finite.ntk(single, x)
    torch.testing.assert_close(kernel.individual[1], alone.shared[0, 0], **EXACT)
    assert not alone.individual.any()


def test_the_ensemble_is_left_as_it_was():
    ensemble, x = build(ARCHITECTURES[3], "batch_ensemble")
    before = copy.deepcopy(ensemble.state_dict())
    state = torch.get_rng_state()
    finite.ntk(ensemble, x)
    finite.nngp(ensemble, x)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in ensemble.state_dict().items())
    assert all(p.grad is None for p in ensemble.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in ensemble.modules())
    with torch.no_grad():
        assert finite.ntk(ensemble, x, outputs="trace").shared.any()


def test_fresh_masks_are_drawn_once_for_a_kernel():
    reference = networks.mlp(4, 6, 2, 3)
    ensemble = embens.mc_dropout(reference, 3, law=laws.Normal(), fresh=True)
    x = torch.randn(5, 4)
    kernel = finite.ntk(ensemble, x, x, outputs="trace", chunk=2)
    torch.testing.assert_close(kernel.shared, kernel.shared.permute(1, 0, 3, 2))


class Strange(nn.Module):
    """Parameters in unusual places: positions folded into the batch, a bare one, a used twice."""

    def __init__(self, time_first: bool):
        super().__init__()
        self.time_first = time_first
        self.input = nn.Linear(3, 4)
        self.mixed = nn.Linear(4, 4)
        self.token = nn.Parameter(torch.randn(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows, times, _ = x.shape
        x = torch.tanh(self.input(x))
        x = x.transpose(0, 1) if self.time_first else x
        x = torch.tanh(self.mixed(x.reshape(rows * times, 4)))
        x = (
            x.reshape(times, rows, 4).mean(0)
            if self.time_first
            else x.reshape(rows, times, 4).mean(1)
        )
        x = x * self.token + self.mixed(self.token)
        return self.head(x) * self.head.weight.square().mean()


@pytest.mark.parametrize("time_first", [True, False])
def test_positions_folded_into_the_batch_and_bare_parameters_are_found_out(time_first):
    x = torch.randn(3, 3, 3, dtype=torch.float64)
    ensemble = embens.embed(
        Strange(time_first).double(), 2, sites=["input", "mixed"], example_input=x
    )
    rows = jacobians(ensemble, flat_outputs(ensemble, x))
    assert_equal(finite.ntk(ensemble, x), naive(rows, rows))


@pytest.mark.parametrize("blind", ["first two equal", "first two zero", "all zero", "all equal"])
def test_positions_before_the_batch_are_found_out_whatever_the_first_samples_are(blind):
    x = torch.randn(4, 3, 3, dtype=torch.float64)
    if blind == "first two equal":
        x[1] = x[0]
    elif blind == "all equal":
        x[:] = x[0, 0]
    else:
        x[: 2 if blind == "first two zero" else 4] = 0.0
    ensemble = embens.embed(Strange(True).double(), 2, sites=["input", "mixed"], example_input=x)
    rows = jacobians(ensemble, flat_outputs(ensemble, x))
    assert_equal(finite.ntk(ensemble, x), naive(rows, rows))


def test_equal_samples_of_whole_numbers_leave_nothing_to_structure():
    architecture = next(a for a in BATCHED if not a.inputs(torch.Generator()).is_floating_point())
    ensemble, x = build(architecture, "batch_ensemble")
    x = x[:1, :1].expand(2, *x.shape[1:]).clone()
    rows = jacobians(ensemble, flat_outputs(ensemble, x))
    assert_equal(finite.ntk(ensemble, x), naive(rows, rows))


def test_samples_that_mix_are_refused_also_where_the_first_two_are_equal():
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.first(x))
            return self.last(x - 0.5 * x.mean(0))

    ensemble, x = embens.batch_ensemble(Mixing(), 2), torch.randn(5, 4)
    x[1] = x[0]
    for samples in (x, x[:2]):
        with pytest.raises(ValueError, match="depend on the samples beside it"):
            finite.ntk(ensemble, samples)


def test_groups_of_parameters_without_structure_do_not_change_the_kernel(monkeypatch):
    x = torch.randn(4, 3, 3, dtype=torch.float64)
    ensemble = embens.embed(Strange(True).double(), 2, sites=["input", "mixed"], example_input=x)
    groups: list[int] = []
    rows = blocks.Samplewise.rows

    def counting(self, *args):
        groups.append(len(self.parameters))
        return rows(self, *args)

    monkeypatch.setattr(blocks.Samplewise, "rows", counting)
    expected = finite.ntk(ensemble, x, outputs="trace")
    (together,) = set(groups)
    groups.clear()
    monkeypatch.setattr(blocks, "PASS_BYTES", 1)
    found = finite.ntk(ensemble, x, outputs="trace")
    assert max(groups) < together
    assert_equal(found, (expected.shared, expected.individual))


def test_a_trace_holds_no_square_of_the_number_of_classes(monkeypatch):
    sizes: list[int] = []
    cotangents = blocks.Run._cotangents

    def measuring(self, *args):
        found = cotangents(self, *args)
        sizes.append(found.untyped_storage().nbytes() // found.element_size())
        return found

    monkeypatch.setattr(blocks.Run, "_cotangents", measuring)
    ensemble = embens.batch_ensemble(networks.mlp(4, 6, 1, 50), 2)
    finite.ntk(ensemble, torch.randn(2, 4), outputs="trace")
    assert max(sizes) == blocks.CLASSES_AT_ONCE * 50


def test_the_trace_of_some_outputs_is_the_sum_of_theirs():
    ensemble = embens.batch_ensemble(networks.mlp(4, 6, 2, 5), 2).double()
    x, chosen = torch.randn(3, 4, dtype=torch.float64), torch.tensor([1, 4])
    every = finite.ntk(ensemble, x)
    found = kernels.trace_of(ensemble, x, chosen=chosen, memory=1e9)
    parts = (part[..., chosen, chosen].sum(-1) for part in (every.shared, every.individual))
    assert_equal(found, tuple(parts))  # type: ignore[arg-type]


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.input, self.core, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.core, torch.tanh(self.input(x)), use_reentrant=False)
        return self.head(torch.tanh(x))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.input, self.head = nn.Linear(4, 5), nn.Linear(6, 2)
        self.core = nn.LSTM(5, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.core(torch.tanh(self.input(x)))[0][:, -1])


class Overwriting(nn.Module):
    def __init__(self):
        super().__init__()
        self.input, self.core = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding="same")
        self.head, self.relu = nn.Linear(4, 2), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.input(x))
        y = self.core(x)
        y += x
        return self.head(self.relu(y.mul_(2.0)).mean((2, 3)))


UNUSUAL = {
    "recomputed": (Recomputed, (3, 4)),
    "recurrent": (Recurrent, (3, 5, 4)),
    "overwriting": (Overwriting, (3, 2, 5, 5)),
    "norms": (
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh()),
            *(nn.Conv2d(4, 4, 3, dilation=2), nn.InstanceNorm2d(4, affine=True), nn.Tanh()),
            *(nn.Flatten(), nn.Linear(16, 6), nn.RMSNorm(6), nn.Linear(6, 2)),
        ),
        (3, 2, 8, 8),
    ),
    "transposed with output padding": (
        lambda: nn.Sequential(
            nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1, groups=2),
            *(nn.Tanh(), nn.Flatten(), nn.Linear(4 * 36, 2)),
        ),
        (3, 2, 3, 3),
    ),
    "weight norm": (
        lambda: nn.Sequential(
            nn.Linear(4, 6), nn.Tanh(), weight_norm(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 2)
        ),
        (3, 4),
    ),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_layers_equal_a_naive_contraction(name):
    make, shape = UNUSUAL[name]
    x = torch.randn(shape, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ensemble = embens.embed(make().double(), 2, norm_affine="member", example_input=x).eval()
    rows = jacobians(ensemble, flat_outputs(ensemble, x))
    assert_equal(finite.ntk(ensemble, x, chunk=2), naive(rows, rows))


def test_the_padding_token_of_an_embedding_has_no_gradient():
    reference = nn.Sequential(nn.Embedding(4, 5, padding_idx=0), nn.Flatten(), nn.Linear(15, 2))
    x = torch.tensor([[0, 1, 2], [0, 0, 3], [1, 1, 0]])
    ensemble = embens.embed(reference.double(), 2)
    rows = jacobians(ensemble, flat_outputs(ensemble, x))
    assert_equal(finite.ntk(ensemble, x), naive(rows, rows))


def test_networks_that_vmap_cannot_take_go_sample_by_sample():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.input, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.input(x)) * self.scale
            return self.head(y) if x.abs().sum().item() >= 0 else y

    x = torch.randn(3, 3, dtype=torch.float64)
    ensemble = embens.embed(Branching().double(), 2, example_input=x)
    rows = jacobians(ensemble, flat_outputs(ensemble, x))
    assert_equal(finite.ntk(ensemble, x), naive(rows, rows))


def test_a_reference_of_several_arguments_takes_a_tuple():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.head(torch.tanh(self.first(x) + self.second(y)))

    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    ensemble = embens.embed(Two().double(), 2)
    rows = jacobians(ensemble, ensemble(x, y))
    assert_equal(finite.ntk(ensemble, (x, y)), naive(rows, rows))


def test_the_training_kernel_predicts_a_small_step_of_the_outputs():
    """Shared gradients weighted by gamma / M, individual ones as they are."""
    ensemble, x = build(ARCHITECTURES[0], "batch_ensemble")
    target = torch.randn(2, len(x), 3, dtype=torch.float64)[0]
    before = ensemble(x)
    theta = finite.ntk(ensemble, x).ntk(gamma=1.5)
    residual = (before - target).detach() / len(x)
    expected = -torch.einsum("abijkl,bjl->aik", theta, residual)
    loss = ensemble.objective(before, target, lambda f, y: (f - y).square().sum() / (2 * len(x)))
    loss.backward()
    step = 1e-6
    torch.optim.SGD(ensemble.parameter_groups(step, weight_decay=0.0, gamma=1.5)).step()
    with torch.no_grad():
        moved = (ensemble(x) - before) / step
    torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


# Covariance


@pytest.mark.parametrize("parametrization", ["ntk", "standard", "xavier"])
def test_the_covariance_is_that_of_redrawing_the_last_layer(parametrization):
    reference = networks.mlp(
        4, 8, 2, 5, bias_std=0.5, weight_std=1.3, parametrization=parametrization
    ).double()
    ensemble = embens.embed(reference, 3, sites="all")
    x = torch.randn(2, 4, dtype=torch.float64)
    sigma = finite.nngp(ensemble, x)
    head = next(m for m in ensemble.modules() if getattr(m, "out_features", 0) == 5)
    draws, generator = [], torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(600):
            head.reset_parameters(generator)
            draws.append(ensemble(x))
    f = torch.stack(draws).movedim(-1, 1)  # (draw, class, member, batch)
    products = torch.einsum("nkai,nkbj->nkabij", f, f).mean(1)
    error = products.std(0) / len(draws) ** 0.5
    assert ((products.mean(0) - sigma).abs() < 5 * error).all()


def test_the_covariance_of_a_plain_linear_layer_uses_its_own_numbers():
    ensemble, x = build(ARCHITECTURES[0], "batch_ensemble")
    head = [m for m in ensemble.modules() if isinstance(m, nn.Linear)][-1]
    features: list[Tensor] = []
    handle = head.register_forward_hook(lambda m, args, out: features.append(args[0]))
    ensemble(x, chunk=1)
    handle.remove()
    h = torch.stack(features)
    expected = torch.einsum("aif,bjf->abij", h, h) * head.weight.square().mean()
    torch.testing.assert_close(finite.nngp(ensemble, x), expected + head.bias.square().mean())
    torch.testing.assert_close(finite.nngp(ensemble, x, x[:2]), finite.nngp(ensemble, x)[..., :2])


def test_other_networks_average_over_outputs():
    architecture = next(a for a in ARCHITECTURES if a.name == "conv1d")
    ensemble, x = build(architecture, "batch_ensemble")
    f = flat_outputs(ensemble, x)
    expected = torch.einsum("aik,bjk->abij", f, f) / f.shape[2]
    torch.testing.assert_close(finite.nngp(ensemble, x), expected)


def test_separate_networks_have_no_covariance():
    ensemble, x = build(ARCHITECTURES[0], "independent")
    sigma = finite.nngp(ensemble, x)
    assert sigma.shape == (2, 2, 4, 4)
    assert not sigma[0, 1].any()
    assert (sigma[1, 1].diagonal() > 0).all()


# The limit


@pytest.mark.parametrize("bias_std", [0.0, 0.4])
def test_wide_networks_have_the_kernels_of_the_limit(bias_std):
    theory = pytest.importorskip("embens.theory")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 8, generator=generator, dtype=torch.float64)

    def ensemble(width: int) -> embens.EmbeddedEnsemble:
        reference = networks.mlp(
            8, width, 2, 1, activation="erf", weight_std=1.4, bias_std=bias_std, generator=generator
        )
        law = laws.Shifted(0.7)
        return embens.embed(reference.double(), 2, pre=law, post=law, generator=generator)

    limit = theory.kernels(ensemble(8), x)
    found: dict[str, list[Tensor]] = {"nngp": [], "ntk_shared": [], "ntk_individual": []}
    for _ in range(16):
        network = ensemble(512)
        kernel = finite.ntk(network, x, outputs="trace")
        found["nngp"].append(finite.nngp(network, x))
        found["ntk_shared"].append(kernel.shared)
        found["ntk_individual"].append(kernel.individual)
    for name, values in found.items():
        stacked = torch.stack(values)
        mean, error = stacked.mean(0), stacked.std(0) / len(values) ** 0.5
        expected = getattr(limit, name)
        expected = expected.same if name == "ntk_individual" else expected.dense(2)
        bias = 8 / 512 * expected.abs().max()  # corrections of order 1 / width
        assert ((mean - expected).abs() < 5 * error + bias).all(), name


# Errors


def test_batch_statistics_are_refused():
    x = torch.randn(4, 3, 6, 6)
    ensemble = embens.batch_ensemble(Residual(), 2).train()
    for function in (finite.ntk, finite.nngp):
        with pytest.raises(ValueError, match=r"norm1.*statistics of the batch.*ensemble\.eval"):
            function(ensemble, x)


def test_random_layers_are_refused_in_training_mode_only():
    x = torch.randn(4, 3, 6, 6)
    ensemble = embens.batch_ensemble(Residual(dropout=0.5), 2).eval()
    finite.ntk(ensemble, x, outputs="trace")
    ensemble.network.get_submodule("dropout").train()
    with pytest.raises(ValueError, match=r"dropout.*random.*ensemble\.eval"):
        finite.ntk(ensemble, x)


@pytest.mark.parametrize("name", NOT_BATCHED)
def test_a_batch_that_is_not_the_first_axis_is_refused(name):
    architecture = next(a for a in ARCHITECTURES if a.name == name)
    ensemble, x = build(architecture, "batch_ensemble")
    with pytest.raises(ValueError, match="first axis"):
        finite.ntk(ensemble, x)


def test_wrong_arguments_say_what_was_expected():
    ensemble = embens.batch_ensemble(networks.mlp(4, 6, 2, 3), 2)
    x = torch.randn(5, 4)
    target = torch.zeros(5, dtype=torch.int64)
    for message, given in {
        "did you mean 'trace'": {"outputs": "tracee"},
        "needs target=": {"outputs": "nll"},
        "uses no target": {"target": target},
        "each of 5 samples": {"outputs": "nll", "target": target[:2]},
        "3 classes, counted from 0": {"outputs": "nll", "target": target + 3},
        "target2 belongs to x2": {"outputs": "nll", "target": target, "target2": target},
        "needs target2=": {"outputs": "nll", "target": target, "x2": x},
        "chunk must be": {"chunk": 0},
    }.items():
        with pytest.raises(ValueError, match=message):
            finite.ntk(ensemble, x, **given)
    with pytest.raises(TypeError, match="tensor with samples"):
        finite.ntk(ensemble, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one"):
        finite.ntk(ensemble, x[:0])
    for kernel in (finite.ntk, finite.nngp):
        with pytest.raises(TypeError, match="expected an ensemble; got Sequential"):
            kernel(networks.mlp(4, 6, 2, 3), x)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"got ndarray\. Convert it"):
            kernel(ensemble, x.numpy())  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="expected finite numbers"):
            kernel(ensemble, x / 0)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        finite.ntk(ensemble, x)
    column = finite.ntk(ensemble, x, outputs="nll", target=target[:, None].int())
    assert torch.equal(column.shared, finite.ntk(ensemble, x, outputs="nll", target=target).shared)
    four_axes = embens.batch_ensemble(ARCHITECTURES[1].build(), 2)
    y = torch.randn(2, 3, 2, 5)
    with pytest.raises(ValueError, match="is for classification"):
        finite.ntk(four_axes, y, outputs="target", target=target[:2])


def test_outputs_that_are_no_tensor_are_refused():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = torch.tanh(self.a(x))
            return y, self.b(y)

    ensemble = embens.embed(Pair(), 2)
    for function in (finite.ntk, finite.nngp):
        with pytest.raises(TypeError, match="one tensor; got tuple"):
            function(ensemble, torch.randn(4, 3))


def test_a_transformer_uses_terms_for_all_but_its_attention():
    x = torch.randint(11, (3, 5))
    ensemble = embens.last_layer_dropout(Tokens(), 2, example_input=x).eval()
    recorder = Recorder(ensemble)
    with recorder.watching():
        recorder.survey((x[:2],))
    names = {id(p): name for name, p in ensemble.named_parameters()}
    assert all("self_attn" in names[p] for p in recorder.general)
