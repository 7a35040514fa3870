"""Last layers are trained on features that are computed once."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training import problem

import embens
from embens.training import CacheFeatures, Checkpoint, KeepBest, fit

X, Y = problem.data()


class Counting(nn.Module):
    """Counts the calls of a trunk with BatchNorm."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.head(self.trunk(x))


def adapted(network: nn.Module | None = None, **options) -> embens.EmbeddedEnsemble:
    network = problem.reference() if network is None else network
    generator = torch.Generator().manual_seed(0)
    return embens.adapt(network, 3, by="head", generator=generator, **options)


@pytest.mark.parametrize("kind", ["tensors", "loader", "weights"])
def test_training_on_features_equals_training_on_inputs(kind):
    data = (X, Y, torch.rand(len(Y)) + 0.1) if kind == "weights" else (X, Y)
    if kind == "loader":
        data = DataLoader(TensorDataset(X, Y), 60)
    plain, cached = adapted(), adapted()
    options = {"epochs": 5, "lr": 0.1, "batch_size": 60}
    history = fit(plain, data, **options)
    again = fit(cached, data, callbacks=[CacheFeatures()], **options)

    for name, tensor in problem.weights(plain).items():
        torch.testing.assert_close(cached.state_dict()[name], tensor)
    assert again.epochs[-1]["nll"] == pytest.approx(history.epochs[-1]["nll"], rel=1e-4)
    assert embens.evaluate(cached, (X, Y))["nll"] < embens.evaluate(adapted(), (X, Y))["nll"]


def test_the_trunk_is_unchanged_and_the_best_epoch_is_kept(tmp_path):
    network = Counting()
    before = copy.deepcopy(network.state_dict())
    ensemble = adapted(network)
    callbacks = [CacheFeatures(), KeepBest("nll"), Checkpoint(tmp_path)]
    history = fit(ensemble, (X, Y), (X, Y), epochs=4, lr=0.1, callbacks=callbacks)
    best = history.epochs[history.best_epoch - 1]

    assert embens.evaluate(ensemble, (X, Y))["nll"] == pytest.approx(best["validation_nll"])
    for name, tensor in ensemble.reference.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_other_ensembles_and_outputs_are_refused():
    with pytest.raises(ValueError, match=r"CacheFeatures needs a frozen trunk.*by='head'"):
        fit(problem.ensemble(), (X, Y), epochs=1, callbacks=[CacheFeatures()])
    with pytest.raises(ValueError, match="CacheFeatures needs a frozen trunk"):
        fit(adapted(trunk="trained"), (X, Y), epochs=1, callbacks=[CacheFeatures()])
    followed = nn.Sequential(*problem.reference(), nn.LogSoftmax(-1))
    with pytest.raises(ValueError, match=r"other operations follow it.*Train without"):
        fit(adapted(followed), (X, Y), epochs=1, callbacks=[CacheFeatures()])
