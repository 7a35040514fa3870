"""Times and samples of ensembles in training."""

from __future__ import annotations

import math

import pytest
import torch
from theory.hand_made import TEST, TRAIN, close, random_kernels, split, targets

from embens.theory import gradient_flow

INF = math.inf


class TestTimes:
    def test_begin_at_the_prior(self):
        parts = split(random_kernels())
        flow = gradient_flow(*parts, targets(TRAIN), members=4, gamma=2.0)
        assert not flow.mean(0).any()
        prior, nngp = flow.covariance(0), parts[2].nngp
        close(prior.same, nngp.same)
        close(prior.cross, nngp.cross)

    @pytest.mark.parametrize("members", [1, 4])
    def test_end_in_interpolation_of_the_train_data_by_every_member(self, members):
        train, _, _ = split(random_kernels())
        y = targets(TRAIN, 2)
        flow = gradient_flow(train, train, train, y, members, gamma=1.0)
        close(flow.mean(INF), y)
        close(flow.variance(INF), torch.zeros(TRAIN, dtype=torch.float64))

    def test_may_be_a_vector(self):
        flow = gradient_flow(*split(random_kernels()), targets(TRAIN, 2), members=3)
        times = torch.tensor([0.0, 0.5, INF])
        for method in (flow.mean, flow.variance, flow.ensemble_variance, flow.diversity):
            close(method(times), torch.stack([method(t) for t in times.tolist()]))
        assert flow.mean([1, 2]).shape == flow.mean(times[:2].numpy()).shape == (2, TEST, 2)

    def test_scale_with_the_number_of_samples(self):
        """Two copies of all data make the same mean loss, and the same training."""
        parts = split(random_kernels())
        y = targets(TRAIN)
        index = torch.arange(TRAIN).repeat(2)
        twice = parts[0][index, :][:, index], parts[1][:, index], parts[2]
        one = gradient_flow(*parts, y, members=3, gamma=2.0)
        two = gradient_flow(*twice, y.repeat(2), members=3, gamma=2.0)
        for t in (0.7, 30.0):
            close(one.mean(t), two.mean(t))
            close(one.variance(t), two.variance(t))


class TestSample:
    def test_has_the_mean_and_covariances_of_the_table(self):
        parts = split(random_kernels())
        flow = gradient_flow(*parts, targets(TRAIN, 2), members=3, gamma=2.0)
        draws, t = 20_000, 1.0
        outputs = flow.sample(t, draws, generator=torch.Generator().manual_seed(0))
        assert outputs.shape == (draws, 3, TEST, 2)
        same, cross = flow.covariance(t).same, flow.covariance(t).cross
        error = same.diagonal().max().item() * 5 / math.sqrt(draws)
        close(outputs.mean((0, 1)), flow.mean(t), rtol=0, atol=math.sqrt(error))
        centred = outputs - flow.mean(t)
        close((centred[:, 0, :, 0].mT @ centred[:, 0, :, 0]) / draws, same, rtol=0, atol=error)
        close((centred[:, 0, :, 1].mT @ centred[:, 2, :, 1]) / draws, cross, rtol=0, atol=error)
        between = (centred[:, 0, :, 0].mT @ centred[:, 0, :, 1]) / draws
        close(between, torch.zeros_like(between), rtol=0, atol=error)
        spread = outputs.var(1, correction=0).mean((0, 2))
        close(spread, flow.diversity(t), rtol=0, atol=error)

    def test_is_the_same_for_the_same_generator(self):
        flow = gradient_flow(*split(random_kernels()), targets(TRAIN), members=3)
        one, two = (flow.sample(1.0, generator=torch.Generator().manual_seed(1)) for _ in range(2))
        assert torch.equal(one, two)
