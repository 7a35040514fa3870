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
    flat_outputs,
    jacobians,
    naive,
)
from torch import Tensor, nn

import embens
from embens import finite
from embens.finite.recording import Recorder


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


@pytest.mark.parametrize("time_first", [True, False])
def test_positions_folded_into_the_batch_and_bare_parameters_have_exact_kernels(time_first):
    x = torch.randn(3, 3, 3, dtype=torch.float64)
    ensemble = embens.embed(
        Strange(time_first).double(), 2, sites=["input", "mixed"], example_input=x
    )
    rows = jacobians(ensemble, flat_outputs(ensemble, x))
    assert_equal(finite.ntk(ensemble, x), naive(rows, rows))


@pytest.mark.parametrize("blind", ["first two equal", "first two zero", "all zero", "all equal"])
def test_positions_before_the_batch_have_exact_kernels_for_any_first_samples(blind):
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


def test_equal_samples_of_integers_go_one_by_one():
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
    architecture = next(a for a in ARCHITECTURES if a.name == name)
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
    rows = jacobians(ensemble, flat_outputs(ensemble, x))
    assert_equal(finite.ntk(ensemble, x), naive(rows, rows))


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
    rows = jacobians(ensemble, flat_outputs(ensemble, x))
    assert_equal(finite.ntk(ensemble, x), naive(rows, rows))


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
    rows = jacobians(ensemble, flat_outputs(ensemble, x))
    recorder = Recorder(ensemble)
    recorder.survey((x[:2],))
    assert recorder.general == {}
    assert_equal(finite.ntk(ensemble, x), naive(rows, rows))
