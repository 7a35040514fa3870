"""The paper's measures of dependence between members, compared with explicit sums."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import embens
from embens import finite, laws, networks

MEMBERS = 4
NATURAL_GAMMA = 2.5


@pytest.fixture
def kernel() -> finite.FiniteKernel:
    """A random kernel of four members and three samples."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(MEMBERS, MEMBERS, 3, 3, generator=generator, dtype=torch.float64)
    individual = torch.randn(MEMBERS, 3, 3, generator=generator, dtype=torch.float64)
    return finite.FiniteKernel(shared, individual, natural_gamma=NATURAL_GAMMA)


def combine(kernel: finite.FiniteKernel, gamma: float) -> Tensor:
    """Return the kernel of training, block by block."""
    theta = gamma / MEMBERS * kernel.shared
    for a in range(MEMBERS):
        theta[a, a] += kernel.individual[a]
    return theta


def mean_square(blocks: list[Tensor]) -> Tensor:
    return torch.stack(blocks).square().mean()


@pytest.mark.parametrize("gamma", [4.0, 1.0])
def test_ratio_divides_mean_squares_between_members_by_those_within(kernel, gamma):
    theta = combine(kernel, gamma)
    within = [theta[a, a] for a in range(MEMBERS)]
    between = [theta[a, b] for a, b in itertools.permutations(range(MEMBERS), 2)]

    ratio = finite.ntk_ratio(kernel.ntk(gamma))

    torch.testing.assert_close(ratio, mean_square(between) / mean_square(within))


def test_ratio_of_a_finite_kernel_has_gamma_equal_to_the_members(kernel):
    torch.testing.assert_close(finite.ntk_ratio(kernel), finite.ntk_ratio(kernel.ntk(4.0)))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_weight_of_others_is_the_mean_over_all_sets_of_other_members(kernel, count):
    theta = combine(kernel, gamma=4.0)
    pulls_of_others = []
    for a in range(MEMBERS):
        others = [b for b in range(MEMBERS) if b != a]
        for subset in itertools.combinations(others, count):
            pulls_of_others.append(theta[a, list(subset)].sum(0).mean(1))
    pulls_of_itself = [theta[a, a].mean(1) for a in range(MEMBERS)]

    weight = finite.other_members_weight(kernel, count)

    expected = mean_square(pulls_of_others) / mean_square(pulls_of_itself)
    torch.testing.assert_close(weight, expected)


def test_limit_can_replace_the_measured_kernel_within_members(kernel):
    limit = torch.full((3, 3), 2.0)
    theta = combine(kernel, gamma=4.0)
    within = mean_square([theta[a, a] for a in range(MEMBERS)])

    ratio = finite.ntk_ratio(kernel, same=limit)

    torch.testing.assert_close(ratio, finite.ntk_ratio(kernel) * within / limit.square().mean())


def test_drift_is_relative_to_the_kernel_before(kernel):
    after = finite.FiniteKernel(kernel.shared + 0.1, kernel.individual, NATURAL_GAMMA)
    theta = combine(kernel, gamma=4.0)
    norm_of_change = (0.01 * theta.numel()) ** 0.5

    drift = finite.ntk_drift(kernel, after)

    torch.testing.assert_close(drift, norm_of_change / theta.square().sum().sqrt())
    assert finite.ntk_drift(kernel, kernel) == 0


def test_gamma_scales_the_shared_part_only(kernel):
    torch.testing.assert_close(kernel.ntk(), combine(kernel, NATURAL_GAMMA))
    torch.testing.assert_close(kernel.ntk(4.0), combine(kernel, 4.0))
    torch.testing.assert_close(kernel.same, kernel.shared[range(MEMBERS), range(MEMBERS)])


def measure_dependence(law: laws.Law, width: int, generator: torch.Generator) -> list[float]:
    """Return ratio, weight of one other member, and weight of five, as means over networks."""
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    measurements = []
    for _ in range(3):
        reference = networks.mlp(
            16, width, 2, 6, weight_std=2**0.5, parametrization="standard", generator=generator
        )
        ensemble = embens.embed(reference, 6, pre=law, post=law, generator=generator)
        kernel = finite.ntk(ensemble, x, outputs="target", target=torch.arange(6))
        ratio = finite.ntk_ratio(kernel)
        weight_of_one = finite.other_members_weight(kernel, 1)
        weight_of_five = finite.other_members_weight(kernel, 5)
        measurements.append(torch.stack([ratio, weight_of_one, weight_of_five]))
    return torch.stack(measurements).mean(0).tolist()


def test_dependence_of_centred_members_falls_with_width():
    """The figure of the paper in small: ∝ 1/width and ∝ m."""
    generator = torch.Generator().manual_seed(0)

    narrow_ratio, *_ = measure_dependence(laws.Normal(), 32, generator)
    wide_ratio, weight_of_one, weight_of_five = measure_dependence(laws.Normal(), 512, generator)

    assert wide_ratio < narrow_ratio / 4  # 1/16 in the limit
    assert 2 < weight_of_five / weight_of_one < 10  # 5 for independent pulls


def test_dependence_of_shifted_members_does_not_fall_with_width():
    """The figure of the paper in small: constant and ∝ m²."""
    generator = torch.Generator().manual_seed(0)
    law = laws.Shifted(0.5**0.5)

    narrow_ratio, *_ = measure_dependence(law, 32, generator)
    wide_ratio, weight_of_one, weight_of_five = measure_dependence(law, 512, generator)

    assert wide_ratio > narrow_ratio / 3
    assert 12 < weight_of_five / weight_of_one <= 25.01  # 25 for equal pulls


def measure_drift(width: int, generator: torch.Generator) -> Tensor:
    """Return how far twenty steps move the kernel of a new network."""
    data_generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 5, generator=data_generator)
    y = torch.randn(8, 1, generator=data_generator)
    reference = networks.mlp(5, width, 1, 1, activation="erf", generator=generator)
    ensemble = embens.batch_ensemble(reference, 2, generator=generator)
    before = finite.ntk(ensemble, x, outputs="trace")
    optimizer = torch.optim.SGD(ensemble.parameter_groups(0.2, weight_decay=0.0, gamma=2.0))
    for _ in range(20):
        optimizer.zero_grad()
        ensemble.objective(ensemble(x), y, torch.nn.functional.mse_loss).backward()
        optimizer.step()
    return finite.ntk_drift(before, finite.ntk(ensemble, x, outputs="trace"))


def test_training_moves_the_kernel_of_a_narrow_network_more():
    generator = torch.Generator().manual_seed(0)

    # Medians, because drifts of networks with products of normal modulations have long tails.
    narrow = torch.stack([measure_drift(16, generator) for _ in range(9)]).median()
    wide = torch.stack([measure_drift(1024, generator) for _ in range(9)]).median()

    assert 0 < wide < narrow / 3  # between 8 (one over the root of the width) and 64


def test_invalid_kernels_raise_errors(kernel):
    with pytest.raises(ValueError, match="from 1 to 3"):
        finite.other_members_weight(kernel, 4)
    with pytest.raises(ValueError, match="Reduce the classes"):
        finite.ntk_ratio(torch.zeros(2, 2, 3, 3, 4, 4))
    with pytest.raises(ValueError, match="one member"):
        finite.ntk_ratio(torch.ones(1, 1, 3, 3))
    with pytest.raises(ValueError, match="same members and samples"):
        finite.ntk_drift(kernel.shared, kernel.shared[:2, :2])
