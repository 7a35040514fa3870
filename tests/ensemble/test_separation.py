"""Buffers that become per-member buffers when the code of a member changes them."""

import copy
import pickle

import pytest
import torch
from torch import nn

import embens
from embens.ensemble.separation import separate_buffer


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x):
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        return x - self.mean


def make_reference() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), Centred(), nn.Linear(5, 2))


def test_buffers_that_become_separate_are_saved_copied_and_loaded(tmp_path):
    reference = make_reference()
    ensemble = embens.batch_ensemble(reference, 4)
    x = torch.randn(6, 3)
    ensemble(x)
    assert ensemble.individual["2.mean"].shape == (4, 5)
    ensemble.save(tmp_path / "ensemble.safetensors")
    loaded = embens.load(tmp_path / "ensemble.safetensors", reference)
    fresh = embens.batch_ensemble(reference, 4)
    fresh.load_state_dict(ensemble.state_dict())
    twins = [loaded, fresh, copy.deepcopy(ensemble), pickle.loads(pickle.dumps(ensemble))]
    expected = ensemble(x)
    for twin in twins:
        torch.testing.assert_close(twin(x), expected)


def test_a_separate_buffer_begins_with_one_value_for_all_members():
    ensemble = embens.batch_ensemble(make_reference(), 4)
    stack = separate_buffer(ensemble, "2", "mean", torch.arange(5.0))

    assert torch.equal(stack, torch.arange(5.0).expand(4, 5))
    assert ensemble.individual["2.mean"] is stack
    assert "mean" not in ensemble.reference[2]._buffers
    assert any(item.module == "2" and "mean" in item.tensors for item in ensemble.spec.per_member)


def test_a_state_from_before_the_separation_is_loaded():
    ensemble = embens.batch_ensemble(make_reference(), 4)
    before = copy.deepcopy(ensemble.state_dict())
    x = torch.randn(6, 3)
    expected = ensemble(x)
    ensemble.load_state_dict(before)

    torch.testing.assert_close(ensemble(x), expected)


def test_shared_weights_are_no_state_of_separate_layers():
    shared = embens.batch_ensemble(make_reference(), 4)
    separate = embens.embed(make_reference(), 4, own=["0"])
    with pytest.raises(RuntimeError, match="Missing key"):
        separate.load_state_dict(shared.state_dict())
