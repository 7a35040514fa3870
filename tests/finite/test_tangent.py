"""The empirical kernels against naive Jacobians, one output at a time."""

from __future__ import annotations

import pytest
import torch
from cases import ARCHITECTURES, sampled
from finite.jacobians import (
    BATCHED,
    EXACT,
    FAMILIES,
    assert_equal,
    build,
    contract,
    find_architecture,
    flat_outputs,
    jacobians,
    naive_kernel,
)
from torch import Tensor, nn

import embens
from embens import finite, laws, networks
from embens.finite import tangent
from embens.finite.recording import Recorder
from embens.finite.tangent import KernelComputation


@sampled("architecture, family", BATCHED, list(FAMILIES))
def test_all_outputs_equal_a_naive_contraction(architecture, family):
    ensemble, x = build(architecture, family)
    assert_equal(finite.ntk(ensemble, x), naive_kernel(ensemble, x))


@pytest.mark.parametrize("outputs", ["trace", "target", "nll"])
@pytest.mark.parametrize("name", ["mlp", "paper's cnn", "transformer", "reused", "grouped"])
def test_reductions_equal_a_naive_contraction_for_two_sets_of_samples(name, outputs):
    architecture = find_architecture(name)
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
    options = {}
    if outputs != "trace":
        options = {"target": targets[0], "target2": targets[1]}
    kernel = finite.ntk(ensemble, x, x2, outputs=outputs, **options)
    expected = tuple(part.diagonal(dim1=-2, dim2=-1).sum(-1) for part in contract(*sides))

    assert kernel.shared.shape == (2, 2, len(x), 2)
    assert_equal(kernel, expected)


@pytest.mark.parametrize("name", ["mlp", "paper's cnn", "transformer"])
def test_single_precision_agrees_with_double(name):
    architecture = find_architecture(name)
    ensemble, x = build(architecture, "batch_ensemble")
    exact = finite.ntk(ensemble, x)
    single = finite.ntk(ensemble.float(), x.float() if x.is_floating_point() else x)
    assert single.shared.dtype == single.individual.dtype == torch.float32
    expected = (exact.shared.float(), exact.individual.float())
    assert_equal(single, expected, rtol=1e-4, atol=1e-5)


def test_kernel_of_all_outputs_is_symmetric_and_positive():
    ensemble, x = build(ARCHITECTURES[2], "batch_ensemble")

    shared = finite.ntk(ensemble, x).shared

    torch.testing.assert_close(shared, shared.permute(1, 0, 3, 2, 5, 4))
    assert_positive_semidefinite(shared.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(0, 2))


def test_trace_of_the_kernel_is_symmetric_and_positive():
    ensemble, x = build(ARCHITECTURES[2], "batch_ensemble")

    kernel = finite.ntk(ensemble, x, outputs="trace")

    torch.testing.assert_close(kernel.individual, kernel.individual.mT)
    torch.testing.assert_close(kernel.shared, kernel.shared.permute(1, 0, 3, 2))
    assert_positive_semidefinite(kernel.shared.transpose(1, 2).flatten(2).flatten(0, 1))


def assert_positive_semidefinite(matrix: Tensor) -> None:
    assert torch.linalg.eigvalsh(matrix).min() > -1e-10 * matrix.trace()


def test_frozen_parameters_do_not_count():
    ensemble, x = build(ARCHITECTURES[0], "batch_ensemble")
    parameters = [*ensemble.shared_parameters(), *ensemble.individual_parameters()]
    for parameter in parameters[::2]:
        parameter.requires_grad_(False)
    assert_equal(finite.ntk(ensemble, x), naive_kernel(ensemble, x))
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


def test_fresh_masks_are_drawn_once_for_a_kernel():
    reference = networks.mlp(4, 6, 2, 3)
    ensemble = embens.mc_dropout(reference, 3, law=laws.Normal(), fresh=True)
    x = torch.randn(5, 4)
    kernel = finite.ntk(ensemble, x, x, outputs="trace", chunk=2)
    torch.testing.assert_close(kernel.shared, kernel.shared.permute(1, 0, 3, 2))


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
    assert_equal(finite.ntk(ensemble, (x, y)), contract(rows, rows))


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
    kernels: dict[str, list[Tensor]] = {"nngp": [], "ntk_shared": [], "ntk_individual": []}
    for _ in range(16):
        network = ensemble(512)
        kernel = finite.ntk(network, x, outputs="trace")
        kernels["nngp"].append(finite.nngp(network, x))
        kernels["ntk_shared"].append(kernel.shared)
        kernels["ntk_individual"].append(kernel.individual)
    for name, values in kernels.items():
        stacked = torch.stack(values)
        mean, error = stacked.mean(0), stacked.std(0) / len(values) ** 0.5
        expected = getattr(limit, name)
        expected = expected.same if name == "ntk_individual" else expected.dense(2)
        bias = 8 / 512 * expected.abs().max()  # corrections of order 1 / width
        assert ((mean - expected).abs() < 5 * error + bias).all(), name


SMALL_X = torch.ones(5, 4)
SMALL_TARGET = torch.zeros(5, dtype=torch.int64)


def small_ensemble() -> embens.EmbeddedEnsemble:
    return embens.batch_ensemble(networks.mlp(4, 6, 2, 3), 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outputs": "tracee"}, "did you mean 'trace'"),
        ({"outputs": "nll"}, "needs target="),
        ({"target": SMALL_TARGET}, "uses no target"),
        ({"outputs": "nll", "target": SMALL_TARGET[:2]}, "each of 5 samples"),
        ({"outputs": "nll", "target": SMALL_TARGET + 3}, "3 classes, counted from 0"),
        (
            {"outputs": "nll", "target": SMALL_TARGET, "target2": SMALL_TARGET},
            "target2 belongs to x2",
        ),
        ({"outputs": "nll", "target": SMALL_TARGET, "x2": SMALL_X}, "needs target2="),
        ({"chunk": 0}, "chunk must be"),
    ],
)
def test_invalid_options_raise_errors(options, message):
    with pytest.raises(ValueError, match=message):
        finite.ntk(small_ensemble(), SMALL_X, **options)


@pytest.mark.parametrize("function", [finite.ntk, finite.nngp])
def test_invalid_samples_raise_errors(function):
    ensemble = small_ensemble()
    with pytest.raises(TypeError, match="expected an ensemble, got Sequential"):
        function(networks.mlp(4, 6, 2, 3), SMALL_X)
    with pytest.raises(TypeError, match=r"got ndarray\. Convert it"):
        function(ensemble, SMALL_X.numpy())
    with pytest.raises(TypeError, match="tensor with samples"):
        function(ensemble, 3)
    with pytest.raises(ValueError, match="expected finite values"):
        function(ensemble, SMALL_X / 0)
    with pytest.raises(ValueError, match="at least one"):
        function(ensemble, SMALL_X[:0])


def test_inference_mode_raises_an_error():
    ensemble = small_ensemble()
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        finite.ntk(ensemble, SMALL_X)


def test_targets_of_outputs_with_several_axes_raise_an_error():
    ensemble = embens.batch_ensemble(ARCHITECTURES[1].build(), 2)
    x = torch.randn(2, 3, 2, 5)
    with pytest.raises(ValueError, match="is for classification"):
        finite.ntk(ensemble, x, outputs="target", target=SMALL_TARGET[:2])


def test_targets_can_be_a_column_of_any_integer_type():
    ensemble = small_ensemble()
    x = torch.randn(5, 4)
    target = torch.arange(5) % 3

    expected = finite.ntk(ensemble, x, outputs="nll", target=target)
    column = finite.ntk(ensemble, x, outputs="nll", target=target[:, None].int())

    assert torch.equal(column.shared, expected.shared)


def test_passes_of_a_chunk_do_not_grow_with_the_samples(monkeypatch):
    ensemble, _ = build(ARCHITECTURES[0], "batch_ensemble")
    batch_sizes = record_batch_sizes(monkeypatch)

    finite.ntk(ensemble, torch.randn(7, 5, dtype=torch.float64), chunk=3)

    assert batch_sizes == [3, 3, 1, 3, 1, 1]  # each pair of chunks once


def test_passes_hold_one_sample_if_memory_is_short(monkeypatch):
    ensemble, _ = build(ARCHITECTURES[0], "batch_ensemble")
    batch_sizes = record_batch_sizes(monkeypatch)
    monkeypatch.setattr(tangent, "PASS_BYTES", 1)

    finite.ntk(ensemble, torch.randn(3, 5, dtype=torch.float64))

    assert set(batch_sizes) == {1}


def record_batch_sizes(monkeypatch) -> list[int]:
    """Return a list to which every recorded pass adds its number of samples."""
    batch_sizes: list[int] = []
    record = Recorder.record

    def recording(self, samples):
        batch_sizes.append(len(samples))
        return record(self, samples)

    monkeypatch.setattr(Recorder, "record", recording)
    return batch_sizes


@pytest.mark.parametrize("classes", [3, 40])
@pytest.mark.parametrize("outputs", ["trace", "target", "nll"])
def test_reductions_hold_one_class_at_a_time(outputs, classes, monkeypatch):
    class_counts: list[int] = []
    gradients = Recorder.gradients

    def counting(self, recording, cotangents):
        class_counts.extend(len(cotangent) for cotangent in cotangents)
        return gradients(self, recording, cotangents)

    monkeypatch.setattr(Recorder, "gradients", counting)
    ensemble = embens.batch_ensemble(networks.mlp(4, 6, 2, classes), 2)
    options = {} if outputs == "trace" else {"target": torch.tensor([0, 1])}
    finite.ntk(ensemble, torch.randn(2, 4), outputs=outputs, **options)

    assert max(class_counts) == 1


@pytest.mark.parametrize("samples", [9, 2])
def test_nll_takes_one_backward_pass_per_member_for_any_number_of_samples(samples, monkeypatch):
    members = 3
    ensemble = embens.batch_ensemble(networks.mlp(4, 6, 2, 10), members)
    calls: list[bool] = []
    grad = torch.autograd.grad

    def counting(*args, **kwargs):
        calls.append(True)
        return grad(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", counting)
    finite.ntk(ensemble, torch.randn(samples, 4), outputs="nll", target=torch.arange(samples))

    survey = 2  # by autograd for one sample, by the rules for two
    assert len(calls) == members + survey


def test_trace_holds_no_square_of_the_number_of_classes(monkeypatch):
    sizes: list[int] = []
    cotangents = KernelComputation._cotangents

    def measuring(self, *args):
        result = cotangents(self, *args)
        sizes.append(result.untyped_storage().nbytes() // result.element_size())
        return result

    monkeypatch.setattr(KernelComputation, "_cotangents", measuring)
    ensemble = embens.batch_ensemble(networks.mlp(4, 6, 1, 50), 2)
    finite.ntk(ensemble, torch.randn(2, 4), outputs="trace")

    assert max(sizes) == 50
