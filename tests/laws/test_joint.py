"""Joint laws: moments of their samples, shapes, masks and bounds."""

import itertools
import json
import math
import pickle

import pytest
import torch
from laws.sampling import assert_agrees, generator

from embens import laws
from embens.laws import Correlated, Disjoint, Masks

JOINT = [Masks(), Masks(0.2), Masks(1.0), Disjoint(), Correlated(0.6), Correlated(-1 / 3)]


MEMBERS = 4
DRAWS = 200
SIGNS = list(itertools.product((1, -1), repeat=2))


def draw_often(joint: laws.Joint) -> torch.Tensor:
    """Return many draws of 512 units, ``(draw, member, unit)``."""
    draws = [joint.sample((MEMBERS, 512), generator(i), torch.float64) for i in range(DRAWS)]
    return torch.stack(draws)


def standard_errors(values: torch.Tensor) -> float:
    """Return five standard errors of the mean."""
    return 5 * values.std().item() / math.sqrt(len(values))


@pytest.fixture(params=JOINT, ids=repr)
def joint(request):
    return request.param


class TestJointLaws:
    def test_survive_the_round_trip_through_json(self, joint):
        assert laws.from_dict(json.loads(json.dumps(joint.to_dict()))) == joint
        assert pickle.loads(pickle.dumps(joint)) == joint

    def test_have_the_second_moment_of_their_samples(self, joint):
        samples = draw_often(joint)
        squares = samples.square().mean(2)

        assert_agrees(samples.square().mean((1, 2)), joint.second_moment)
        assert bool((squares - 1).abs().max() < 1e-9) == joint.balanced

    def test_have_marginals_with_the_moments_of_their_samples(self, joint):
        samples = draw_often(joint)
        marginal = joint.marginal(MEMBERS)

        fourth_moments = samples.pow(4).mean((1, 2))
        assert samples.mean().item() == pytest.approx(marginal.mean, abs=6e-3)
        assert marginal.second_moment == pytest.approx(1)
        error = standard_errors(fourth_moments)
        assert fourth_moments.mean().item() == pytest.approx(marginal.kurtosis, abs=error + 1e-2)

    def test_have_the_pair_moment_of_their_samples_in_every_pair(self, joint):
        samples = draw_often(joint)

        for a, b in itertools.combinations(range(MEMBERS), 2):
            products = (samples[:, a] * samples[:, b]).mean(1)
            error = standard_errors(products)
            expected = joint.pair_moment(MEMBERS)
            assert products.mean().item() == pytest.approx(expected, abs=error + 2e-3)

    def test_have_no_kurtosis_without_a_number_of_members(self, joint):
        with pytest.raises(TypeError, match=r"The kurtosis of .*marginal\(M\)"):
            _ = joint.kurtosis

    def test_have_pair_moments_made_of_half_lines(self, joint):
        total = 0.0
        for a, b in SIGNS:
            total += a * b * joint.pair_half_moment(a, b)

        assert total == pytest.approx(joint.pair_moment(MEMBERS), abs=1e-15)

    @pytest.mark.parametrize("shape", [(), 4, (4, 7), (4, 3, 5), (4, 0)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_sample_shapes_and_types(self, joint, shape, dtype):
        if isinstance(joint, Disjoint) and shape == 4:
            shape = (1, 4)
        samples = joint.sample(shape, generator(), dtype)
        assert samples.dtype == dtype
        assert samples.shape == ((shape,) if isinstance(shape, int) else shape)

    def test_repeat_themselves_with_the_same_generator(self, joint):
        before = torch.get_rng_state()
        first, second = (joint.sample((4, 20), generator(3)) for _ in range(2))
        assert torch.equal(first, second)
        assert torch.equal(torch.get_rng_state(), before)
        joint.sample((4, 20))
        assert not torch.equal(torch.get_rng_state(), before)

    def test_have_no_mean_without_a_number_of_members(self, joint):
        with pytest.raises(TypeError, match=r"depends on the number of members.*marginal\(M\)"):
            assert joint.mean


class TestMasks:
    @pytest.mark.parametrize("units", [1, 3, 10, 64, 257])
    @pytest.mark.parametrize("members", [1, 2, 4, 16])
    @pytest.mark.parametrize("overlap", [1e-9, 0.01, 0.2, 0.5, 0.9, 1.0])
    def test_have_equal_ones_and_use_every_unit(self, units, members, overlap):
        masks = Masks(overlap).sample((members, units), generator(), torch.float64)
        ones = (masks > 0).sum(1)
        formula = units * overlap / (1 - (1 - overlap) ** members)  # Durasov et al.

        assert (ones == ones[0]).all()
        assert ones[0] == max(round(formula), math.ceil(units / members))
        assert (masks > 0).any(0).all()
        assert masks[masks > 0].tolist() == pytest.approx([math.sqrt(units / ones[0])] * ones.sum())

    @pytest.mark.parametrize(("units", "overlap"), [(400, 0.5), (400, 0.1), (64, 0.5), (1000, 0.9)])
    def test_have_their_overlap_in_every_pair(self, units, overlap):
        draws = [Masks(overlap).sample((5, units), generator(i)) > 0 for i in range(200)]
        masks = torch.stack(draws).float()
        shares = torch.einsum("dai,dbi->dab", masks, masks) / masks.sum(2)[:, :1, None]
        for a in range(5):
            for b in range(a):
                error = 5 * shares[:, a, b].std().item() / math.sqrt(len(draws))
                rounding = 1 / masks[0, 0].sum().item()  # m is a whole number
                assert shares[:, a, b].mean().item() == pytest.approx(overlap, abs=error + rounding)


class TestDisjoint:
    @pytest.mark.parametrize(("members", "units"), [(3, 3), (4, 10), (8, 67), (1, 5)])
    def test_every_unit_belongs_to_one_member_and_shares_are_equal(self, members, units):
        masks = Disjoint().sample((members, units), generator(), torch.float64)
        assert ((masks > 0).sum(0) == 1).all()
        shares = (masks > 0).sum(1)
        assert shares.max() - shares.min() <= 1
        assert masks.max().item() == pytest.approx(math.sqrt(members))

    def test_the_larger_shares_go_to_random_members(self):
        owners = [
            int((Disjoint().sample((3, 4), generator(i)) > 0).sum(1).argmax()) for i in range(99)
        ]
        assert set(owners) == {0, 1, 2}

    def test_raises_for_more_members_than_units(self):
        with pytest.raises(ValueError, match=r"got 5 members and 4 units\. Use fewer members"):
            Disjoint().sample((5, 4))


class TestCorrelated:
    @pytest.mark.parametrize("rho", [0.6, -1 / 3])
    @pytest.mark.parametrize(("a", "b"), SIGNS)
    def test_has_the_pair_half_moments_of_its_samples(self, rho, a, b):
        law = Correlated(rho)
        u, v = law.sample((2, 200_000), generator(), torch.float64)

        products = (a * u).clamp(min=0) * (b * v).clamp(min=0)
        assert_agrees(products, law.pair_half_moment(a, b))

    @pytest.mark.parametrize("rho", [1.0, 0.3, 0.0, -0.1, -1 / 7])
    def test_has_this_covariance(self, rho):
        samples = Correlated(rho).sample((8, 100_000), generator(), torch.float64)
        covariance = samples @ samples.T / samples.shape[1]
        exact = (1 - rho) * torch.eye(8) + rho
        torch.testing.assert_close(covariance, exact.double(), rtol=0, atol=0.02)

    def test_at_its_bound_members_sum_to_zero(self):
        samples = Correlated(-1 / 7).sample((8, 50), generator(), torch.float64)
        assert samples.sum(0).abs().max() < 1e-6

    def test_raises_below_its_bound(self):
        message = r"at least -1/\(M - 1\) = -0.333333 for 4 members, got -0.4"
        for method in (Correlated(-0.4).pair_moment, Correlated(-0.4).marginal):
            with pytest.raises(ValueError, match=message):
                method(4)
        with pytest.raises(ValueError, match=message):
            Correlated(-0.4).sample((4, 3))
        assert Correlated(-0.4).pair_moment(3) == -0.4

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: Correlated(1.1), "rho"),
            (lambda: Correlated(-1.1), "rho"),
            (lambda: Masks(0.0), r"overlap.*\(0, 1\]"),
            (lambda: Masks(1.5), r"overlap.*\(0, 1\]"),
            (lambda: Masks(float("nan")), "overlap"),
        ],
    )
    def test_out_of_range_parameters_raise(self, make, message):
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.parametrize(
    "law", [laws.Masks(0.5), laws.Disjoint(), laws.Correlated(-0.2), laws.Shifted(0.4)]
)
def test_pairs_of_members_have_their_moments(law):
    first, second, weights = law.pair_quadrature(4)
    assert weights.sum().item() == pytest.approx(1)
    assert (weights @ first**2).item() == pytest.approx(1)
    assert (weights @ second**4).item() == pytest.approx(law.marginal(4).kurtosis)
    assert (weights @ (first * second)).item() == pytest.approx(law.pair_moment(4))


@pytest.mark.parametrize(("members", "overlap"), [(2, 0.5), (4, 0.5), (4, 0.3)])
def test_masks_of_a_fixed_size_overlap_evenly(members, overlap):
    law = laws.Masks(overlap)
    generator = torch.Generator().manual_seed(0)
    overlaps = []
    for _ in range(400):
        masks = law.sample((members, 512), generator).double()
        products = masks @ masks.mT / 512
        overlaps.append(products[~torch.eye(members, dtype=torch.bool)])
    measured = 512 * torch.stack(overlaps).var(0).mean().item()

    # 400 draws of few pairs: a relative standard error of about 5 %.
    assert law.overlap_variance(members) == pytest.approx(measured, rel=0.2, abs=1e-12)
    assert law.overlap_variance(members) < law.second_moment**2 - overlap**2


def test_disjoint_masks_never_overlap():
    assert laws.Disjoint().overlap_variance(4) == 0


def test_joint_laws_without_pairs_raise():
    class Other(laws.Joint):
        overlap = 0.0

        def marginal(self, members):
            return laws.Normal()

        def _arrange(self, noise):
            return noise

    with pytest.raises(NotImplementedError, match=r"Define pair_quadrature\(members, n\)"):
        Other().pair_quadrature(2)
