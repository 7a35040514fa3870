"""The paper's measures of dependence between members, against explicit sums."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import embens
from embens import finite, laws, networks


@pytest.fixture
def kernel() -> finite.FiniteKernel:
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(4, 4, 3, 3, generator=generator, dtype=torch.float64)
    own = torch.randn(4, 3, 3, generator=generator, dtype=torch.float64)
    return finite.FiniteKernel(shared, own, natural_gamma=2.5)


def combined(kernel: finite.FiniteKernel, gamma: float) -> Tensor:
    theta = torch.zeros_like(kernel.shared)
    for a, b in itertools.product(range(4), repeat=2):
        theta[a, b] = gamma / 4 * kernel.shared[a, b] + (kernel.individual[a] if a == b else 0)
    return theta


@pytest.mark.parametrize("gamma", [None, 1.0])
def test_the_ratio_is_that_of_two_means_over_pairs(kernel, gamma):
    theta = combined(kernel, 4.0 if gamma is None else gamma)
    cross = [theta[a, b] ** 2 for a in range(4) for b in range(4) if a != b]
    same = [theta[a, a] ** 2 for a in range(4)]
    expected = torch.stack(cross).mean() / torch.stack(same).mean()
    given = kernel if gamma is None else kernel.ntk(gamma)
    torch.testing.assert_close(finite.ntk_ratio(given), expected)


@pytest.mark.parametrize("m", [1, 2, 3])
def test_the_weight_of_others_is_the_mean_over_all_sets_of_them(kernel, m):
    theta = combined(kernel, 4.0)
    numerators = []
    for a in range(4):
        others = [b for b in range(4) if b != a]
        for chosen in itertools.combinations(others, m):
            numerators.append(theta[a, list(chosen)].sum(0).mean(1).square())
    own = torch.stack([theta[a, a].mean(1).square() for a in range(4)])
    expected = torch.stack(numerators).mean() / own.mean()
    torch.testing.assert_close(finite.other_members_weight(kernel, m), expected)


def test_a_limit_can_take_the_place_of_the_measured_kernel(kernel):
    limit = torch.full((3, 3), 2.0)
    theta = combined(kernel, 4.0)
    measured = torch.stack([theta[a, a] for a in range(4)])
    ratio = finite.ntk_ratio(kernel) * measured.square().mean() / 4
    torch.testing.assert_close(finite.ntk_ratio(kernel, same=limit), ratio)


def test_drift_is_relative_to_the_kernel_before(kernel):
    after = finite.FiniteKernel(kernel.shared + 0.1, kernel.individual, 2.5)
    theta = combined(kernel, 4.0)
    expected = (0.01 * theta.numel()) ** 0.5 / theta.square().sum().sqrt()
    torch.testing.assert_close(finite.ntk_drift(kernel, after), expected)
    assert finite.ntk_drift(kernel, kernel) == 0


def test_the_combined_kernel_has_gamma_on_the_shared_part_only(kernel):
    torch.testing.assert_close(kernel.ntk(), combined(kernel, 2.5))
    torch.testing.assert_close(kernel.ntk(4.0), combined(kernel, 4.0))
    torch.testing.assert_close(kernel.same, kernel.shared[range(4), range(4)])


def test_centred_members_grow_independent_with_width_and_shifted_ones_do_not():
    """The figure of the paper in small: ∝ 1/width and ∝ m against constant and ∝ m²."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 16, generator=generator)
    target = torch.arange(6)

    def numbers(law: laws.Law, width: int) -> Tensor:
        computed = []
        for _ in range(3):
            reference = networks.mlp(
                16, width, 2, 6, weight_std=2**0.5, parametrization="standard", generator=generator
            )
            ensemble = embens.embed(reference, 6, pre=law, post=law, generator=generator)
            kernel = finite.ntk(ensemble, x, outputs="target", target=target)
            weights = [finite.other_members_weight(kernel, m) for m in (1, 5)]
            computed.append(torch.stack([finite.ntk_ratio(kernel), *weights]))
        return torch.stack(computed).mean(0)

    centred = [numbers(laws.Normal(), width) for width in (32, 512)]
    shifted = [numbers(laws.Shifted(0.5**0.5), width) for width in (32, 512)]
    assert centred[1][0] < centred[0][0] / 4  # 1/16 in the limit
    assert shifted[1][0] > shifted[0][0] / 3
    assert 2 < centred[1][2] / centred[1][1] < 10  # 5 for independent pulls
    assert 12 < shifted[1][2] / shifted[1][1] <= 25.01  # 25 for equal ones


def test_training_moves_the_kernel_of_a_narrow_network_more():
    """By the median over seeds: products of normal modulations make single seeds stray far."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 5, generator=generator)
    y = torch.randn(8, 1, generator=generator)

    def drift(width: int) -> Tensor:
        reference = networks.mlp(5, width, 1, 1, activation="erf", generator=generator)
        ensemble = embens.batch_ensemble(reference, 2, generator=generator)
        before = finite.ntk(ensemble, x, outputs="trace")
        optimizer = torch.optim.SGD(ensemble.parameter_groups(0.2, weight_decay=0.0, gamma=2.0))
        for _ in range(20):
            optimizer.zero_grad()
            ensemble.objective(ensemble(x), y, torch.nn.functional.mse_loss).backward()
            optimizer.step()
        return finite.ntk_drift(before, finite.ntk(ensemble, x, outputs="trace"))

    narrow, wide = (torch.stack([drift(w) for _ in range(9)]).median() for w in (16, 1024))
    assert 0 < wide < narrow / 3  # between 8 (one over the root of the width) and 64


def test_wrong_kernels_say_what_was_expected(kernel):
    with pytest.raises(ValueError, match="from 1 to 3"):
        finite.other_members_weight(kernel, 4)
    with pytest.raises(ValueError, match="Reduce the classes"):
        finite.ntk_ratio(torch.zeros(2, 2, 3, 3, 4, 4))
    with pytest.raises(ValueError, match="one member"):
        finite.ntk_ratio(torch.ones(1, 1, 3, 3))
    with pytest.raises(ValueError, match="same members and samples"):
        finite.ntk_drift(kernel.shared, kernel.shared[:2, :2])
