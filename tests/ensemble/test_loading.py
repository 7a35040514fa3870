"""Reading ensembles from files; the tests of saving cover the other direction."""

import pytest
import torch
from torch import nn

import embens
from embens.files import Refused


def perceptron(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))


@pytest.mark.parametrize("shared", [True, False])
def test_a_loaded_ensemble_has_the_same_outputs(tmp_path, shared):
    reference = perceptron()
    ensemble = embens.batch_ensemble(reference, members=3)
    ensemble.save(tmp_path / "ensemble.safetensors", shared=shared)
    loaded = embens.load(tmp_path / "ensemble.safetensors", reference)
    x = torch.randn(5, 4)
    assert torch.equal(loaded(x), ensemble(x))


def test_another_architecture_is_refused(tmp_path):
    embens.batch_ensemble(perceptron(), members=3).save(tmp_path / "ensemble.safetensors")
    with pytest.raises((Refused, ValueError), match="another shape"):
        embens.load(tmp_path / "ensemble.safetensors", perceptron(width=9))


def test_values_without_shared_weights_need_the_same_reference(tmp_path):
    ensemble = embens.batch_ensemble(perceptron(), members=3)
    ensemble.save(tmp_path / "ensemble.safetensors", shared=False)
    with pytest.raises(Refused, match="other weights"):
        embens.load(tmp_path / "ensemble.safetensors", perceptron())
