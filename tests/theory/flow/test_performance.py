"""What an infinitely wide ensemble is expected to achieve, on real digits."""

import math

import pytest
import torch
from theory.hand_made import TEST, TRAIN, random_kernels, split

import embens
from embens import metrics, networks
from embens.theory.blocks import kernels
from embens.theory.flow import gradient_flow
from embens.theory.flow.performance import centred_targets, performance

NAMES = ("accuracy", "member_accuracy", "nll", "brier", "calibration_error")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def digits():
    data = embens.data.digits().subset(train=150, test=150, generator=generator())
    return data.standardise().flatten()


@pytest.fixture(scope="module")
def on_digits(digits):
    """Return what an ensemble of M members with modulations N(p, 1 - p²) achieves."""
    net = networks.mlp(64, 8, 2, 10, weight_std=math.sqrt(2))
    found = {}

    def evaluate(members, p, **options):
        if p not in found:
            ensemble = embens.batch_ensemble(net, 2, p=p)
            x, x_test = digits.train.inputs, digits.test.inputs
            found[p] = [kernels(ensemble, *pair) for pair in ((x,), (x_test, x), (x_test,))]
        y = centred_targets(digits.train.targets, 10, scale=5.0)
        flow = gradient_flow(*found[p], y, members)
        return performance(flow, digits.test.targets, generator=generator(), **options)

    return evaluate


class TestOnDigits:
    def test_is_sensible(self, on_digits):
        found = on_digits(4, 0.0)
        assert 0.85 < found.accuracy < 1
        assert found.member_accuracy <= found.accuracy
        assert found.nll < math.log(10) / 2
        assert 0 < found.brier < 0.9
        assert 0 < found.calibration_error < 1
        untrained = on_digits(4, 0.0, t=0.0)
        assert untrained.accuracy == pytest.approx(0.1, abs=0.03)

    def test_improves_with_members_where_they_are_independent(self, on_digits):
        found = [on_digits(m, 0.0, draws=48) for m in (1, 2, 8)]
        error = [max(f.error["accuracy"], f.error["nll"]) for f in found]
        assert found[0].accuracy + 3 * error[0] < found[2].accuracy
        assert found[0].nll > found[1].nll + error[0] > found[2].nll
        assert found[0].member_accuracy == pytest.approx(found[2].member_accuracy, abs=0.01)

    def test_does_not_depend_on_members_where_they_are_equal(self, on_digits):
        for name in NAMES:
            one, many = (getattr(on_digits(m, 1.0, draws=48), name) for m in (1, 8))
            error = on_digits(1, 1.0, draws=48).error[name]
            assert abs(one - many) < 4 * math.sqrt(2) * error
        assert on_digits(8, 1.0).accuracy == pytest.approx(on_digits(8, 1.0).member_accuracy)

    def test_gains_less_from_members_the_more_they_are_coupled(self, on_digits):
        gains = []
        for p in (0.0, 0.95, 1.0):
            found = on_digits(8, p)
            gains.append(found.accuracy - found.member_accuracy)
        assert gains[0] > gains[1] > gains[2]


class TestPerformance:
    def flow(self, members=3):
        y = centred_targets(torch.arange(TRAIN) % 3, 3)
        return gradient_flow(*split(random_kernels()), y, members, gamma=2.0)

    def test_is_the_mean_of_the_metrics_over_draws(self):
        flow, labels = self.flow(), torch.arange(TEST) % 3
        found = performance(flow, labels, t=2.0, draws=7, generator=generator())
        drawn = flow.sample(2.0, 7, generator=generator())
        values = torch.stack([metrics.nll(o, labels) for o in drawn])
        assert found.nll == pytest.approx(values.mean().item())
        assert found.error["nll"] == pytest.approx(values.std().item() / math.sqrt(7))
        assert set(found.error) == set(NAMES)

    def test_needs_an_output_for_each_class(self):
        flow = gradient_flow(*split(random_kernels()), torch.zeros(TRAIN))
        with pytest.raises(ValueError, match=r"one output for each class.*got \(7,\)"):
            performance(flow, torch.zeros(TEST).long())

    def test_needs_a_draw(self):
        with pytest.raises(ValueError, match="draws must be at least 1; got 0"):
            performance(self.flow(), torch.zeros(TEST).long(), draws=0)

    def test_has_centred_targets_of_a_given_height(self):
        y = centred_targets(torch.tensor([0, 2]), 3, scale=6.0)
        assert y.tolist() == [[4.0, -2.0, -2.0], [-2.0, -2.0, 4.0]]
