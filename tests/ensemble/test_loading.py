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


def test_values_without_shared_weights_need_a_reference_with_values(tmp_path):
    embens.batch_ensemble(mlp(), members=3).save(tmp_path / "e", shared=False)
    with pytest.raises(Refused, match=r"'reference.*has no values to compare.*Load its values"):
        embens.load(tmp_path / "e", mlp("meta"))
    with pytest.raises(ValueError, match="has no values to compare"):
        embens.batch_ensemble(mlp("meta"), 3).save(tmp_path / "f", shared=False)
    assert not (tmp_path / "f").exists()


def mlp(device="cpu"):
    with torch.device(device):
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


MAKERS = {
    "batch_ensemble": embens.batch_ensemble,
    "own": lambda reference, members: embens.embed(reference, members, own="last"),
    "low_rank": lambda reference, members: embens.low_rank(reference, members, rank=2),
    "independent": embens.independent,
}


@pytest.mark.parametrize("family", MAKERS)
def test_a_reference_without_memory_gets_its_weights_from_the_file(family, tmp_path):
    ensemble = MAKERS[family](mlp(), 3).eval()
    ensemble.save(tmp_path / "e.safetensors")
    loaded = embens.load(tmp_path / "e.safetensors", mlp("meta")).eval()
    x = torch.randn(2, 4)
    torch.testing.assert_close(loaded(x), ensemble(x))


def test_low_rank_factors_of_other_shapes_are_refused(tmp_path):
    embens.low_rank(mlp(), 3, rank=2).save(tmp_path / "e.safetensors")
    wider = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    with pytest.raises(Refused, match=r"'0.right' has shape \(3, 2, 4\)"):
        embens.load(tmp_path / "e.safetensors", wider)


@pytest.mark.parametrize("reference", [nn.Linear, None])
def test_a_reference_that_is_no_module_raises(reference, tmp_path):
    path = tmp_path / "ensemble.safetensors"
    embens.batch_ensemble(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2).save(path)
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module.*got"):
        embens.load(path, reference)
