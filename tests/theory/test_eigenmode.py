"""Kernels with null directions, and steps of gradient descent."""

import math

import pytest
import torch
from theory.hand_made import TRAIN, close, random_kernels, split, targets

import embens
from embens.theory import FlowSettings, gradient_descent, gradient_flow
from embens.theory.kernel import Kernels, MemberKernel

INF = math.inf


def zeros_like(kernel: MemberKernel) -> MemberKernel:
    return MemberKernel(torch.zeros_like(kernel.same), torch.zeros_like(kernel.same))


class TestSingularKernels:
    """Equal inputs: rows and columns of kernels are repeated."""

    index = torch.tensor([0, 1, 2, 2, 3])

    def parts(self):
        train, test_train, test = split(random_kernels())
        return train[self.index, :][:, self.index], test_train[:, self.index], test

    def test_are_reported(self):
        flow = gradient_flow(*self.parts(), targets(4)[self.index], members=3)
        assert flow.rank == (4, 4)
        assert flow.jitter == 0
        assert "rank=(4, 4), jitter=0" in repr(flow)

    def test_give_the_solution_without_repetitions_where_targets_agree(self):
        y = targets(4)
        whole = gradient_flow(*self.parts(), y[self.index], members=3, gamma=2.0)
        train, test_train, test = split(random_kernels())
        four = slice(None, 4)
        once = gradient_flow(train[four, four], test_train[:, four], test, y, members=3, gamma=2.0)
        with pytest.warns(UserWarning, match=r"singular: rank 4 of 5.*agree with that.*jitter="):
            mean = whole.mean(INF)
        close(mean, once.mean(INF))
        close(whole.mean(1e12), mean, rtol=1e-6, atol=1e-6)

    def test_of_low_rank_stay_finite_at_long_times(self):
        """As the kernel of linear functions of three inputs."""
        features = targets(12, 3)
        kernel = MemberKernel(features @ features.mT, 0.3 * features @ features.mT)
        parts = split(Kernels(kernel, kernel, zeros_like(kernel)), train=8)
        flow = gradient_flow(*parts, targets(8), members=3)
        assert flow.rank == (3, 3)
        with pytest.warns(UserWarning, match="rank 3 of 8"):
            limit = flow.mean(INF)
        fit = torch.linalg.lstsq(features[:8], targets(8)).solution
        close(limit, features[8:] @ fit)
        close(flow.mean(1e14), limit)
        close(flow.variance(1e14), torch.zeros(4, dtype=torch.float64))

    def test_ignore_eigenvalues_of_the_size_of_rounding_errors(self):
        """The most negative eigenvalue shows how far a kernel is off; an inverse would be noise."""
        features, y = targets(12, 3), targets(8)
        noise = 1e-9 * targets(12, 12, seed=3)
        wrong = features @ features.mT + noise + noise.mT
        kernel = MemberKernel(wrong, torch.zeros_like(wrong))
        train, test_train, _ = split(Kernels(kernel, kernel, zeros_like(kernel)), train=8)
        flow = gradient_flow(train, test_train, None, y, members=1)
        assert flow.rank.mean == 3
        fit = torch.linalg.lstsq(features[:8], y).solution
        with pytest.warns(UserWarning, match="singular"):
            mean = flow.mean(INF)
        worst = torch.linalg.solve(train.ntk_shared.same, y)
        assert (test_train.ntk_shared.same @ worst - features[8:] @ fit).abs().max() > 0.01
        close(mean, features[8:] @ fit, rtol=0, atol=1e-7)

    def test_say_where_targets_contradict_each_other(self):
        y = torch.tensor([0.0, 0.0, 1.0, -1.0, 0.0])
        flow = gradient_flow(*self.parts(), y, members=3)
        with pytest.warns(UserWarning, match="a share 1 of the targets cannot be fitted"):
            assert flow.mean(INF).abs().max() < 1e-9

    def test_are_cured_by_a_jitter_that_acts_as_a_ridge(self):
        y = targets(5)
        train, test_train, test = self.parts()
        members, jitter = 3, 0.1
        settings = FlowSettings(jitter=jitter)

        flow = gradient_flow(train, test_train, test, y, members, gamma=2.0, settings=settings)

        mean_train, _ = train.ntk(members, 2.0).modes(members)
        mean_test_train, _ = test_train.ntk(members, 2.0).modes(members)
        ridge = mean_train + jitter * torch.eye(5, dtype=torch.float64)
        close(flow.mean(INF), mean_test_train @ torch.linalg.solve(ridge, y))
        assert flow.jitter == jitter
        assert flow.rank == (5, 5)

    def test_grow_linearly_where_only_test_data_respond(self):
        """A kernel that no network has: the limit of (1 - exp(-λt/B)) / λ as λ goes to 0."""
        zero = MemberKernel(torch.zeros(1, 1), torch.zeros(1, 1))
        one = MemberKernel(torch.ones(1, 1), torch.zeros(1, 1))
        train = Kernels(one, zero, zero)
        test_train = Kernels(zero, one, zero)
        y = torch.tensor([3.0])

        flow = gradient_flow(train, test_train, None, y, members=1, gamma=1.0)
        assert flow.mean(5.0).tolist() == [15.0]

        descent = gradient_descent(train, test_train, None, y, members=1, gamma=1.0, rate=0.5)
        assert descent.mean(4).tolist() == [6.0]
        assert flow.largest_stable_rate == (INF, INF)

    def test_that_are_no_kernels_give_a_warning_and_no_limit(self):
        train, test_train, test = split(random_kernels())
        wrong = MemberKernel(train.ntk_shared.same, 3 * train.ntk_shared.same)
        train = Kernels(train.nngp, wrong, zeros_like(wrong))
        with pytest.warns(UserWarning, match="deviation mode's kernel .* not positive semi-def"):
            flow = gradient_flow(train, test_train, test, targets(TRAIN), members=2, gamma=1.0)
        with pytest.raises(ValueError, match="training does not converge: the deviation mode"):
            flow.mean(INF)


def test_duplicates_do_not_drift_at_long_times_far_from_the_data():
    """Rounding in null directions grows with the test inputs; time must not blow it up."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    train = torch.cat([x, x[:1]])
    test = 100 * torch.randn(3, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(7, generator=generator, dtype=torch.float64)
    ensemble = embens.embed(embens.networks.mlp(4, 4, 2), 2)
    parts = embens.theory.kernels(ensemble, train), embens.theory.kernels(ensemble, test, train)
    flow = gradient_flow(*parts, None, y, members=2)
    with pytest.warns(UserWarning, match="rank"):
        limit = flow.mean(math.inf)

    torch.testing.assert_close(flow.mean(1e18), limit, rtol=1e-6, atol=1e-6)
