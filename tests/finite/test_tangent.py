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
    flat_outputs,
    jacobians,
    naive,
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
    rows = jacobians(ensemble, flat_outputs(ensemble, x))
    assert_equal(finite.ntk(ensemble, x), naive(rows, rows))


@pytest.mark.parametrize("outputs", ["trace", "target", "nll"])
@pytest.mark.parametrize("name", ["mlp", "paper's cnn", "transformer", "reused", "grouped"])
def test_reductions_equal_a_naive_contraction_for_two_sets_of_samples(name, outputs):
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
    options = {}
    if outputs != "trace":
        options = {"target": targets[0], "target2": targets[1]}
    kernel = finite.ntk(ensemble, x, x2, outputs=outputs, **options)
    expected = tuple(part.diagonal(dim1=-2, dim2=-1).sum(-1) for part in naive(*sides))
    assert kernel.shared.shape == (2, 2, len(x), 2)
    assert_equal(kernel, expected)


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


def test_wrong_arguments_say_what_was_expected():
    ensemble = embens.batch_ensemble(networks.mlp(4, 6, 2, 3), 2)
    x = torch.randn(5, 4)
    target = torch.zeros(5, dtype=torch.int64)
    for message, options in {
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
            finite.ntk(ensemble, x, **options)
    with pytest.raises(TypeError, match="tensor with samples"):
        finite.ntk(ensemble, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one"):
        finite.ntk(ensemble, x[:0])
    for kernel in (finite.ntk, finite.nngp):
        with pytest.raises(TypeError, match="expected an ensemble, got Sequential"):
            kernel(networks.mlp(4, 6, 2, 3), x)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"got ndarray\. Convert it"):
            kernel(ensemble, x.numpy())  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="expected finite values"):
            kernel(ensemble, x / 0)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        finite.ntk(ensemble, x)
    column = finite.ntk(ensemble, x, outputs="nll", target=target[:, None].int())
    assert torch.equal(column.shared, finite.ntk(ensemble, x, outputs="nll", target=target).shared)
    four_axes = embens.batch_ensemble(ARCHITECTURES[1].build(), 2)
    y = torch.randn(2, 3, 2, 5)
    with pytest.raises(ValueError, match="is for classification"):
        finite.ntk(four_axes, y, outputs="target", target=target[:2])


def test_memory_of_one_chunk_does_not_grow_with_the_samples(monkeypatch):
    ensemble, _ = build(ARCHITECTURES[0], "batch_ensemble")
    rows: list[int] = []
    record = Recorder.record
    monkeypatch.setattr(
        Recorder, "record", lambda self, samples: rows.append(len(samples)) or record(self, samples)
    )
    finite.ntk(ensemble, torch.randn(7, 5, dtype=torch.float64), chunk=3)
    assert rows == [3, 3, 1, 3, 1, 1]  # each pair of chunks once
    monkeypatch.setattr(tangent, "PASS_BYTES", 1)
    rows.clear()
    finite.ntk(ensemble, torch.randn(3, 5, dtype=torch.float64))
    assert set(rows) == {1}


@pytest.mark.parametrize("outputs", ["trace", "target", "nll"])
def test_reductions_hold_one_class_at_a_time(outputs, monkeypatch):
    held: list[int] = []
    compute = Recorder.gradients

    def counting(self, recording, cotangents):
        held.extend(len(cotangent) for cotangent in cotangents)
        return compute(self, recording, cotangents)

    monkeypatch.setattr(Recorder, "gradients", counting)
    for classes in (3, 40):
        held.clear()
        ensemble = embens.batch_ensemble(networks.mlp(4, 6, 2, classes), 2)
        options = {} if outputs == "trace" else {"target": torch.tensor([0, 1])}
        finite.ntk(ensemble, torch.randn(2, 4), outputs=outputs, **options)
        assert max(held) == 1


def test_nll_takes_one_backward_pass_for_each_member_whatever_the_samples(monkeypatch):
    ensemble = embens.batch_ensemble(networks.mlp(4, 6, 2, 10), 3)
    calls: list[int] = []
    gradient = torch.autograd.grad
    monkeypatch.setattr(
        torch.autograd, "grad", lambda *args, **kw: calls.append(1) or gradient(*args, **kw)
    )
    counts = []
    for samples in (9, 2):
        calls.clear()
        x, y = torch.randn(samples, 4), torch.arange(samples)
        finite.ntk(ensemble, x, outputs="nll", target=y)
        counts.append(len(calls))
    survey = 2  # by autograd for one sample, by the rules for two
    assert counts == [3 + survey] * 2


def test_a_trace_holds_no_square_of_the_number_of_classes(monkeypatch):
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
