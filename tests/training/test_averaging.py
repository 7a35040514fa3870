"""Averaged weights are validated and returned."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from training import problem

import embens
from embens.training import Callback, KeepBest, WeightAveraging, fit


def test_the_average_follows_the_recursion():
    ensemble = problem.ensemble()
    means = problem.weights(ensemble)

    class Average(Callback):
        def on_step(self, run):
            for name, weight in problem.weights(run.ensemble).items():
                means[name] += (weight - means[name]) / min(2 * 4, 1 + run.steps / 9)

    callbacks = [WeightAveraging(2.0), Average()]
    fit(ensemble, problem.data(), epochs=12, batch_size=16, lr=0.05, callbacks=callbacks)
    for name, tensor in problem.weights(ensemble).items():
        torch.testing.assert_close(tensor, means[name])


def test_the_average_is_validated_and_its_best_epoch_is_kept():
    train, validation = problem.data(), problem.data(40, 9)

    def run(*callbacks):
        seen = []

        def metric(outputs, target):
            seen.append(outputs.clone())
            return [3, 1, 2, 4][len(seen) - 1]

        ensemble = problem.ensemble()
        callbacks = [KeepBest(metric, maximise=False), *callbacks]
        fit(ensemble, train, validation, epochs=4, batch_size=16, lr=0.05, callbacks=callbacks)
        torch.testing.assert_close(ensemble(validation[0]), seen[1])
        return seen[1]

    difference = run(WeightAveraging(1.0)) - run()
    assert difference.abs().max() > 0.01


def test_statistics_of_norm_layers_are_copied():
    reference = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    )
    buffers = []
    for callbacks in ([], [WeightAveraging(1.0)]):
        generator = torch.Generator().manual_seed(1)
        ensemble = embens.batch_ensemble(reference, 2, generator=generator)
        fit(ensemble, problem.data(), epochs=2, batch_size=20, callbacks=callbacks)
        buffers.append(list(ensemble.buffers()))
    for plain, averaged in zip(*buffers, strict=True):
        torch.testing.assert_close(plain, averaged)


def test_a_loader_of_unknown_length_raises():
    loader = DataLoader(TensorDataset(*problem.data()), 16)
    batches = (batch for batch in loader)
    with pytest.raises(ValueError, match="the length of this loader is unknown"):
        fit(problem.ensemble(), batches, epochs=1, callbacks=[WeightAveraging(1.0)])


def test_a_length_that_is_not_positive_raises():
    with pytest.raises(ValueError, match="epochs must be a number above 0"):
        WeightAveraging(-1.0)
