"""Heads: losses, metrics and calibration against independent computations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from embens.tabular.gaussians import GaussianHead
from embens.tabular.targets import ClassHead, read_weights

TWO = np.arange(2)
THREE = np.arange(3)


class TestClassHead:
    def test_the_metric_is_the_log_loss_of_the_mean_probability(self):
        from sklearn.metrics import log_loss

        generator = torch.Generator().manual_seed(0)
        outputs = torch.randn(5, 30, 3, generator=generator, dtype=torch.float64)
        codes = torch.arange(30).remainder(3)[:, None]
        weights = torch.rand(30, generator=generator, dtype=torch.float64)
        chance = outputs.softmax(-1).mean(0).numpy()
        head = ClassHead((THREE,))
        for row_weights in (torch.ones(30), weights):
            found = head.metric(outputs, head.pack(codes, row_weights, torch.float64))
            expected = log_loss(codes[:, 0], chance, sample_weight=row_weights.numpy())
            assert found.item() == pytest.approx(expected)

    def test_a_weighted_criterion_is_the_weighted_mean_of_the_plain_one(self):
        generator = torch.Generator().manual_seed(0)
        outputs = torch.randn(20, 5, generator=generator)
        codes = torch.stack([torch.arange(20) % 3, torch.arange(20) % 2], 1)
        head = ClassHead((THREE, TWO))
        weights = torch.rand(20, generator=generator)
        one = head.criterion(outputs, head.pack(codes, torch.ones(20), torch.float32))
        other = head.criterion(outputs, head.pack(codes, weights, torch.float32))

        torch.testing.assert_close(other, one * weights)

    def test_the_constant_prediction_has_the_weighted_frequencies(self):
        head = ClassHead((THREE, TWO))
        codes = torch.tensor([[0, 1], [1, 1], [1, 0]])
        target = head.pack(codes, torch.tensor([4.0, 1.0, 1.0]), torch.float64)
        first, second = head.probabilities(head.constant_outputs(target))

        np.testing.assert_allclose(first[0, 0], np.array([4, 2, 0.5]) / 6.5)
        np.testing.assert_allclose(second[0, 0], [1 / 6, 5 / 6])


class TestMixtureOfGroups:
    def simulated(self):
        """Return outputs of four overconfident groups ``(group, 1, row, class)`` and a target."""
        generator = torch.Generator().manual_seed(0)
        logit = torch.randn(20_000, generator=generator, dtype=torch.float64)
        noise = torch.randn(4, 20_000, generator=generator, dtype=torch.float64)
        codes = torch.rand(20_000, generator=generator) < logit.sigmoid()
        outputs = 1.5 * (logit + noise)
        outputs = torch.stack([-outputs / 2, outputs / 2], -1).unsqueeze(1)
        return outputs, torch.stack([codes, torch.ones(20_000)], 1)

    def test_it_has_a_lower_loss_than_with_the_temperature_of_a_group(self):
        outputs, target = self.simulated()
        group = ClassHead((TWO,)).calibrated(outputs[0], target)
        mixture = group.for_mixture_of_groups(4)

        assert 1 < mixture.temperature < group.temperature
        assert mixture.metric(outputs[:, 0], target) < group.metric(outputs[:, 0], target)

    def test_one_group_and_groups_that_are_not_too_confident_keep_their_temperature(self):
        assert ClassHead((TWO,), temperature=2.0).for_mixture_of_groups(1).temperature == 2.0
        assert ClassHead((TWO,), temperature=0.5).for_mixture_of_groups(4).temperature == 0.5

    def test_four_groups_keep_three_quarters_of_the_logarithm(self):
        head = ClassHead((TWO,), temperature=16.0).for_mixture_of_groups(4)
        assert head.temperature == pytest.approx(8.0)


@pytest.mark.parametrize(
    "head",
    [
        ClassHead((THREE,)),
        ClassHead((TWO, THREE)),
        GaussianHead(2),
        GaussianHead(1),
        GaussianHead(2, loss="squared"),
        GaussianHead(2, loss="student"),
        GaussianHead(2, loss="quantile"),
    ],
)
def test_the_criterion_of_all_members_equals_that_of_each_member(head):
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(4, 7, head.outputs, generator=generator, dtype=torch.float64)
    labels = len(head.labels) if isinstance(head, ClassHead) else head.targets
    values = torch.randint(2, (7, labels), generator=generator)
    weights = torch.rand(7, generator=generator).double()
    target = head.pack(values, weights, torch.float64)
    together = head.criterion(outputs, target)
    alone = torch.stack([head.criterion(o, target) for o in outputs])
    torch.testing.assert_close(together, alone)
    if isinstance(head, ClassHead):
        chances = torch.stack([p.softmax(-1)[:, :, 0] for p in outputs.split(head.sizes, -1)])
        zero = head.pack(torch.zeros_like(values), weights, torch.float64)
        by_hand = -chances.log().sum(0) * weights
        torch.testing.assert_close(head.criterion(outputs, zero), by_hand)


def test_the_prior_of_the_factor_matters_for_few_rows_only():
    rng = np.random.default_rng(0)
    factors = []
    for rows in (7, 10_000):
        near = torch.from_numpy(0.25 * rng.normal(size=(rows, 1)))
        outputs = torch.zeros(4, rows, 2)
        target = torch.cat([near, torch.ones_like(near)], 1)
        head = GaussianHead(1).calibrated(outputs, target)
        factors.append(float(head.temperature[0]))
        by_hand = math.sqrt((float((near**2).sum()) + 30) / (rows + 30))
        assert factors[-1] == pytest.approx(by_hand, abs=1e-3)

    assert factors[0] > 0.85
    assert factors[1] < 0.3


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, 2.0], r"must have shape \(3,\), got \(2,\)"),
        ([[1.0], [1.0], [1.0]], r"must have shape \(3,\), got \(3, 1\)"),
        ([1.0, -1.0, 1.0], "Negative values"),
        ([0.0, 0.0, 0.0], "all weights are zero"),
        ([1.0, np.nan, 1.0], "NaN"),
    ],
)
def test_invalid_sample_weights_are_errors(weights, message):
    with pytest.raises(ValueError, match=message):
        read_weights(weights, 3)


def test_one_sample_weight_is_that_of_all_rows():
    assert read_weights(2, 3).tolist() == [2.0, 2.0, 2.0]
    assert read_weights(None, 3).tolist() == [1.0, 1.0, 1.0]
