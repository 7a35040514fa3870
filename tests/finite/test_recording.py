"""Parameters with and without a rule, and networks without a kernel between samples."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import ARCHITECTURES, Residual, Tokens
from finite.jacobians import (
    BATCHED,
    NOT_BATCHED,
    Strange,
    assert_equal,
    build,
    find_architecture,
    naive_kernel,
)
from torch import Tensor, nn

import embens
from embens import finite
from embens.finite.recording import Recorder


def test_the_ensemble_is_left_as_it_was():
    ensemble, x = build(ARCHITECTURES[3], "batch_ensemble")
    state_before = copy.deepcopy(ensemble.state_dict())
    random_state = torch.get_rng_state()

    finite.ntk(ensemble, x)
    finite.nngp(ensemble, x)

    assert torch.equal(random_state, torch.get_rng_state())
    for name, value in ensemble.state_dict().items():
        assert torch.equal(value, state_before[name]), name
    for parameter in ensemble.parameters():
        assert parameter.grad is None
    for module in ensemble.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_kernels_are_measured_under_no_grad():
    ensemble, x = build(ARCHITECTURES[3], "batch_ensemble")
    with torch.no_grad():
        assert finite.ntk(ensemble, x, outputs="trace").shared.any()


@pytest.mark.parametrize("time_first", [True, False])
def test_positions_folded_into_the_batch_and_bare_parameters_have_exact_kernels(time_first):
    x = torch.randn(3, 3, 3, dtype=torch.float64)
    ensemble = embens.embed(
        Strange(time_first).double(), 2, sites=["input", "mixed"], example_input=x
    )
    assert_equal(finite.ntk(ensemble, x), naive_kernel(ensemble, x))


RANDOM = torch.randn(4, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
AMBIGUOUS_SAMPLES = {
    "first two equal": RANDOM[[0, 0, 2, 3]],
    "first two zero": torch.cat([torch.zeros_like(RANDOM[:2]), RANDOM[2:]]),
    "all zero": torch.zeros_like(RANDOM),
    "all equal": RANDOM[:1, :1].expand_as(RANDOM),
}


@pytest.mark.parametrize("name", AMBIGUOUS_SAMPLES)
def test_positions_before_the_batch_have_exact_kernels_for_ambiguous_samples(name):
    x = AMBIGUOUS_SAMPLES[name].clone()
    ensemble = embens.embed(Strange(True).double(), 2, sites=["input", "mixed"], example_input=x)
    assert_equal(finite.ntk(ensemble, x), naive_kernel(ensemble, x))


def test_equal_samples_of_integers_go_one_by_one():
    architecture = next(a for a in BATCHED if not a.inputs(torch.Generator()).is_floating_point())
    ensemble, x = build(architecture, "batch_ensemble")
    x = x[:1, :1].expand(2, *x.shape[1:]).clone()
    assert_equal(finite.ntk(ensemble, x), naive_kernel(ensemble, x))


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
        with pytest.raises(ValueError, match="depends on other samples of its batch"):
            finite.ntk(ensemble, samples)


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
    for module in ensemble.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    with pytest.raises(ValueError, match=r"dropout.*random.*ensemble\.eval"):
        finite.ntk(ensemble, x)


@pytest.mark.parametrize("name", NOT_BATCHED)
def test_a_batch_that_is_not_the_first_axis_is_refused(name):
    architecture = find_architecture(name)
    ensemble, x = build(architecture, "batch_ensemble")
    with pytest.raises(ValueError, match="first axis"):
        finite.ntk(ensemble, x)


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
        with pytest.raises(TypeError, match="one tensor, got tuple"):
            function(ensemble, torch.randn(4, 3))


def test_gradients_that_vanish_at_the_start_have_rules_too():
    reference = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    nn.init.zeros_(reference[2].weight)
    ensemble, x = embens.embed(reference, 2), torch.randn(4, 3, dtype=torch.float64)
    recorder = Recorder(ensemble)
    recorder.survey((x[:2],))

    assert recorder.general == {}
    assert_equal(finite.ntk(ensemble, x), naive_kernel(ensemble, x))


def test_only_the_parameters_of_attention_go_sample_by_sample_in_a_transformer():
    x = torch.randint(11, (3, 5))
    ensemble = embens.last_layer_dropout(Tokens(), 2, example_input=x).eval()
    recorder = Recorder(ensemble)
    recorder.survey((x[:2],))
    names = {id(p): name for name, p in ensemble.named_parameters()}

    assert recorder.general
    assert all("self_attn" in names[key] for key in recorder.general)


def test_a_network_that_branches_on_its_values_goes_sample_by_sample():
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
    assert_equal(finite.ntk(ensemble, x), naive_kernel(ensemble, x))


@pytest.mark.parametrize("contiguous", [True, False])
def test_images_in_any_memory_format_give_the_same_kernel(contiguous):
    class Viewing(nn.Module):
        """Code that needs images to be contiguous, or does not."""

        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv2d(2, 3, 3), nn.Linear(3 * 16, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            return self.last(x.view(len(x), -1) if contiguous else x.flatten(1))

    x = torch.randn(3, 2, 6, 6, dtype=torch.float64)
    ensemble = embens.embed(Viewing().double(), 2, example_input=x)
    recorder = Recorder(ensemble)
    recorder.survey((x[:2],))
    assert recorder.general == {}
    assert_equal(finite.ntk(ensemble, x), naive_kernel(ensemble, x))
