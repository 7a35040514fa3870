import copy
import json
import math
import pickle
from dataclasses import FrozenInstanceError, dataclass
from fractions import Fraction

import pytest
import torch

from embens import laws
from embens.laws import (
    Bernoulli,
    Constant,
    Correlated,
    Discrete,
    Disjoint,
    Law,
    Masks,
    Normal,
    Rademacher,
    Shifted,
    Signs,
    Ternary,
    Uniform,
)

CASES = [
    Constant(),
    Constant(-0.5),
    Constant(0.0),
    Normal(),
    Normal(-0.4, 1.7),
    Normal(1.0, 0.5),
    Normal(0.8, 0.0),
    Shifted(0.0),
    Shifted(0.7),
    Shifted(-0.95),
    Shifted(1.0),
    Bernoulli(),
    Bernoulli(0.9, scale=1 / 0.9),
    Bernoulli(0.3, scale=-2.0),
    Bernoulli(1.0),
    Ternary(),
    Ternary(0.0),
    Ternary(0.2, scale=-3.0),
    Uniform(),
    Uniform(-0.5, 2.0),
    Uniform(0.25, 1.0),
    Rademacher(),
    Signs(0.0),
    Signs(0.7),
    Signs(-1.0),
]
SAMPLES = 200_000


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def assert_agrees(samples, expected):
    """Compare a sample mean with its expectation, within five standard errors."""
    error = samples.std().item() / math.sqrt(samples.numel())
    assert samples.mean().item() == pytest.approx(expected, rel=1e-12, abs=5 * error + 1e-12)


@pytest.fixture(params=CASES, ids=repr)
def law(request):
    return request.param


class TestEveryLaw:
    def test_survives_the_round_trip_through_json(self, law):
        assert laws.from_dict(json.loads(json.dumps(law.to_dict()))) == law

    def test_has_the_moments_of_its_samples(self, law):
        samples = law.sample(SAMPLES, generator=generator(), dtype=torch.float64)
        assert_agrees(samples, law.mean)
        assert_agrees(samples**2, law.second_moment)
        assert_agrees((samples - law.mean) ** 2, law.variance)
        assert_agrees(samples**4, law.kurtosis * law.second_moment**2)

    def test_has_the_kurtosis_of_its_quadrature_which_is_at_least_one(self, law):
        nodes, weights = law.quadrature()
        fourth = (weights @ nodes**4).item()
        assert law.kurtosis * law.second_moment**2 == pytest.approx(fourth, rel=1e-13, abs=1e-300)
        assert law.kurtosis >= 1 - 1e-15

    @pytest.mark.parametrize("sign", [1, -1])
    def test_has_the_half_moments_of_its_samples(self, law, sign):
        samples = law.sample(SAMPLES, generator=generator(), dtype=torch.float64)
        assert_agrees((sign * samples > 0).double(), law.half_moment(0, sign))
        assert_agrees((sign * samples).clamp(min=0), law.half_moment(1, sign))
        assert_agrees((sign * samples).clamp(min=0) ** 2, law.half_moment(2, sign))

    def test_splits_its_moments_into_two_half_lines(self, law):
        positive, negative = ([law.half_moment(k, sign) for k in range(3)] for sign in (1, -1))
        assert positive[0] + negative[0] <= 1 + 1e-15
        assert positive[1] - negative[1] == pytest.approx(law.mean, abs=1e-15)
        assert positive[2] + negative[2] == pytest.approx(law.second_moment, rel=1e-15)

    def test_has_a_quadrature_with_its_moments(self, law):
        nodes, weights = law.quadrature(61)
        assert nodes.dtype == weights.dtype == torch.float64
        assert (weights > 0).all()
        assert weights.sum().item() == pytest.approx(1, abs=1e-15)
        assert (weights @ nodes).item() == pytest.approx(law.mean, abs=1e-14)
        assert (weights @ nodes**2).item() == pytest.approx(law.second_moment, rel=1e-14)

    def test_has_an_overlap_between_zero_and_one(self, law):
        assert 0 <= law.overlap <= 1
        if law.second_moment > 0:
            assert law.overlap == pytest.approx(law.mean**2 / law.second_moment, abs=1e-15)

    def test_is_one_atom_exactly_if_its_variance_is_zero(self, law):
        nodes, _ = law.quadrature(11)
        assert (len(nodes) == 1) == (law.variance == 0)
        if law.variance == 0:
            assert law.overlap == 1
            assert law.sample(5, generator()).tolist() == pytest.approx([law.mean] * 5)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
    def test_samples_in_the_requested_type(self, law, dtype):
        samples = law.sample((2, 3), generator=generator(), dtype=dtype)
        assert samples.dtype == dtype
        assert samples.shape == (2, 3)

    def test_samples_low_precision_by_rounding(self, law):
        low = law.sample(100, generator=generator(), dtype=torch.bfloat16)
        high = law.sample(100, generator=generator(), dtype=torch.float32)
        torch.testing.assert_close(low, high.bfloat16(), rtol=0, atol=0)

    def test_samples_in_the_default_type_of_torch(self, law):
        assert law.sample(3, generator()).dtype == torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert law.sample(3, generator()).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)

    @pytest.mark.parametrize(
        ("shape", "size"), [(4, (4,)), ((), ()), ([2, 3], (2, 3)), (torch.Size([0, 2]), (0, 2))]
    )
    def test_samples_any_shape(self, law, shape, size):
        assert law.sample(shape, generator()).shape == size

    def test_repeats_itself_with_the_same_generator(self, law):
        first, second = (law.sample((5, 7), generator=generator(3)) for _ in range(2))
        assert torch.equal(first, second)

    def test_leaves_the_global_generator_alone_if_it_gets_a_generator(self, law):
        before = torch.get_rng_state()
        law.sample(50, generator=generator())
        assert torch.equal(torch.get_rng_state(), before)

    def test_uses_the_global_generator_by_default(self, law):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            first = law.sample(50)
            torch.manual_seed(1)
            assert torch.equal(law.sample(50), first)

    def test_draws_on_the_device_of_the_generator_and_moves_the_result(self, law):
        assert law.sample(3, generator=generator(), device="meta").device.type == "meta"

    def test_raises_for_integer_samples(self, law):
        with pytest.raises(TypeError, match=r"needs a floating dtype, got torch\.int64"):
            law.sample(3, dtype=torch.int64)

    @pytest.mark.parametrize(("k", "sign"), [(3, 1), (-1, 1), (1, 0), (1, 2)])
    def test_raises_for_other_half_moments(self, law, k, sign):
        with pytest.raises(ValueError, match=rf"k in \(0, 1, 2\).*got k={k} and sign={sign}"):
            law.half_moment(k, sign)

    def test_is_an_immutable_value_with_an_exact_repr(self, law):
        again = eval(repr(law))
        assert again == law
        assert hash(again) == hash(law)
        assert pickle.loads(pickle.dumps(law)) == copy.deepcopy(law) == law

    def test_differs_from_the_other_laws(self, law):
        assert CASES.count(law) == 1

    def test_cannot_be_changed(self, law):
        with pytest.raises(FrozenInstanceError):
            law.anything = 2.0


class TestExactMoments:
    @pytest.mark.parametrize(
        ("law", "mean", "second_moment", "overlap", "kurtosis"),
        [
            (Constant(-3), -3, 9, 1, 1),
            (Constant(0), 0, 0, 1, 1),
            (Normal(), 0, 1, 0, 3),
            (Normal(1, 2), 1, 5, 1 / 5, 73 / 25),
            (Normal(1, 0.5), 1, 1.25, 0.8, 1.72),
            (Shifted(0.7), 0.7, 1, 0.49, 2.5198),
            (Bernoulli(0.25, scale=4), 1, 4, 1 / 4, 4),
            (Ternary(0.2), 0, 0.8, 0, 1.25),
            (Ternary(1 / 3, math.sqrt(1.5)), 0, 1, 0, 1.5),
            (Uniform(), 0, 1, 0, 9 / 5),
            (Uniform(0, 3), 1.5, 3, 3 / 4, 9 / 5),
            (Rademacher(), 0, 1, 0, 1),
            (Signs(-0.7), -0.7, 1, 0.49, 1),
        ],
    )
    def test_equal_textbook_values(self, law, mean, second_moment, overlap, kurtosis):
        assert law.kurtosis == pytest.approx(kurtosis, rel=1e-14)
        assert law.mean == pytest.approx(mean, abs=1e-16)
        assert law.second_moment == pytest.approx(second_moment, rel=1e-15)
        assert law.overlap == pytest.approx(overlap, rel=1e-15)
        assert law.variance == pytest.approx(second_moment - mean**2, rel=1e-15)

    @pytest.mark.parametrize(
        ("law", "positive", "negative"),
        [
            (Normal(), (1 / 2, 1 / math.sqrt(2 * math.pi), 1 / 2), None),
            (Rademacher(), (1 / 2, 1 / 2, 1 / 2), None),
            (Ternary(0.4), (0.3, 0.3, 0.3), None),
            (Signs(0.5), (0.75, 0.75, 0.75), (0.25, 0.25, 0.25)),
            (Bernoulli(0.6, scale=2), (0.6, 1.2, 2.4), (0, 0, 0)),
            (Bernoulli(0.6, scale=-2), (0, 0, 0), (0.6, 1.2, 2.4)),
            (Constant(3), (1, 3, 9), (0, 0, 0)),
            (Shifted(-1), (0, 0, 0), (1, 1, 1)),
            (Uniform(-1, 3), (3 / 4, 9 / 8, 9 / 4), (1 / 4, 1 / 8, 1 / 12)),
            (Normal(2, 0), (1, 2, 4), (0, 0, 0)),
        ],
    )
    def test_of_half_lines_equal_closed_forms(self, law, positive, negative):
        for sign, expected in ((1, positive), (-1, negative or positive)):
            moments = [law.half_moment(k, sign) for k in range(3)]
            assert moments == pytest.approx(expected, rel=1e-15, abs=0)

    @pytest.mark.parametrize("law", [Normal(-0.4, 1.7), Shifted(0.7), Shifted(-0.2)], ids=repr)
    @pytest.mark.parametrize("sign", [1, -1])
    @pytest.mark.parametrize("k", [1, 2])
    def test_of_gaussian_half_lines_agree_with_quadrature(self, law, k, sign):
        nodes, weights = law.quadrature(20_001)
        step = (nodes[1] - nodes[0]).item()
        by_quadrature = (weights @ (sign * nodes).clamp(min=0) ** k).item()
        assert law.half_moment(k, sign) == pytest.approx(by_quadrature, abs=step**2)

    def test_of_gaussian_half_lines_are_accurate_in_far_tails(self):
        for mean in (8.0, 20.0, 37.0, 38.4, 1e3):
            moments = [Normal(mean).half_moment(k, -1) for k in range(2)]
            assert 0 <= moments[1] <= moments[0] < 1e-14
        density = math.exp(-450) / math.sqrt(2 * math.pi)
        mills = 1 / 30 - 1 / 30**3 + 3 / 30**5
        assert Normal(30.0).half_moment(0, -1) == pytest.approx(density * mills, rel=1e-6, abs=0)


class TestQuadrature:
    @pytest.mark.parametrize(("n", "tolerance"), [(15, 1e-6), (31, 1e-13), (181, 1e-13)])
    def test_of_gaussians_converges_geometrically(self, n, tolerance):
        nodes, weights = Normal().quadrature(n)
        assert len(nodes) == n
        characteristic = (weights @ torch.cos(nodes)).item()
        assert characteristic == pytest.approx(math.exp(-1 / 2), abs=tolerance)

    def test_resolves_tanh_of_a_product_of_gaussians(self):
        def second_moment(n):
            v, weights = Normal().quadrature(n)
            return weights @ torch.tanh(v[:, None] * v) ** 2 @ weights

        torch.testing.assert_close(second_moment(181), second_moment(1441), rtol=0, atol=1e-11)

    def test_of_discrete_laws_is_their_atoms(self):
        nodes, weights = Ternary(0.5).quadrature(7)
        assert nodes.tolist() == [-1, 0, 1]
        assert weights.tolist() == [0.25, 0.5, 0.25]

    def test_leaves_out_values_of_probability_zero(self):
        assert Ternary(0.0).quadrature()[0].tolist() == [-1, 1]
        assert Bernoulli(1.0, scale=3.0).quadrature()[0].tolist() == [3]

    def test_raises_for_fewer_than_two_nodes(self):
        with pytest.raises(ValueError, match="at least 2 nodes, got n=1"):
            Normal().quadrature(1)


class TestShifted:
    @pytest.mark.parametrize("p", [-1.0, -0.3, 0.0, 0.6, 0.999, 1.0])
    def test_has_the_distribution_of_a_normal_law_but_is_not_equal_to_it(self, p):
        law, normal = Shifted(p), Normal(p, math.sqrt(1 - p * p))
        assert law != normal
        torch.testing.assert_close(law.sample(9, generator()), normal.sample(9, generator()))
        for k, sign in ((0, 1), (1, 1), (2, -1)):
            assert law.half_moment(k, sign) == pytest.approx(normal.half_moment(k, sign))

    def test_keeps_the_second_moment_at_one(self):
        assert {Shifted(p / 100).second_moment for p in range(-100, 101)} == {1.0}

    def test_has_an_accurate_deviation_near_one(self):
        p = 1 - 2.0**-50
        assert Shifted(p).std == math.sqrt(Fraction(1) - Fraction(p) ** 2)


class TestSigns:
    def test_of_mean_zero_sample_the_same_values_as_rademacher(self):
        assert torch.equal(Signs(0).sample(99, generator()), Rademacher().sample(99, generator()))
        assert Signs(0).atoms == Rademacher().atoms

    def test_of_mean_one_are_constant(self):
        for p in (-1, 1):
            assert Signs(p).quadrature()[0].tolist() == [p]


class TestParameters:
    def test_are_converted_to_floats(self):
        assert Normal(0, 1) == Normal(0.0, 1.0) == Normal(torch.tensor(0), torch.ones(1, 1))
        assert hash(Normal(0, 1)) == hash(Normal(0.0, 1.0))
        assert repr(Normal(0, 1)) == "Normal(mean=0.0, std=1.0)"
        assert Bernoulli(Fraction(1, 2)) == Bernoulli(0.5)

    def test_may_be_numpy_numbers(self):
        numpy = pytest.importorskip("numpy")
        assert repr(Normal(numpy.float32(0.5), numpy.int64(2))) == "Normal(mean=0.5, std=2.0)"

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (
                lambda: Shifted(1.5),
                r"Shifted: p must be .* in \[-1, 1\].*use Normal.*got 1.5",
            ),
            (lambda: Shifted(-1.0001), r"p must be a number in \[-1, 1\].*got -1.0001"),
            (lambda: Signs(1.5), r"Signs: p must be a number in \[-1, 1\].*got 1.5"),
            (lambda: Normal(0, -1), r"Normal: std must be a number >= 0.*got -1"),
            (lambda: Bernoulli(0), r"Bernoulli: keep must be in \(0, 1\], one minus.*got 0"),
            (lambda: Bernoulli(1.1), r"keep must be in \(0, 1\].*got 1.1"),
            (lambda: Bernoulli(0.5, math.inf), r"scale must be a finite number.*got inf"),
            (
                lambda: Ternary(1.0),
                r"Ternary: zero must be .* in \[0, 1\).*use Constant\(0\)",
            ),
            (lambda: Uniform(1, 1), r"Uniform: high must be a number above low .*Constant.*got 1"),
            (lambda: Uniform(-math.inf), r"Uniform: low must be a finite number, got -inf"),
            (lambda: Ternary(0.5, math.nan), r"Ternary: scale must be a finite number.*got nan"),
            (lambda: Ternary(-0.1), r"zero must be a number in \[0, 1\).*got -0.1"),
            (lambda: Constant(math.nan), r"Constant: value must be a finite number.*got nan"),
            (lambda: Normal(math.inf), r"mean must be a finite number, got inf"),
            (lambda: Normal(0, math.nan), r"std must be a number >= 0.*got nan"),
            (lambda: Shifted(math.nan), r"p must be a number in \[-1, 1\].*got nan"),
        ],
    )
    def test_out_of_range_raise(self, make, message):
        with pytest.raises(ValueError, match=message):
            make()

    @pytest.mark.parametrize("value", ["1", True, None, 1j, [1.0], torch.ones(2), torch.ones(0)])
    @pytest.mark.parametrize("law", [Constant, Normal, Shifted, Signs, Bernoulli, Ternary, Uniform])
    def test_of_another_type_raise(self, law, value):
        with pytest.raises(TypeError, match=rf"{law.__name__}: \w+ must be .*, got "):
            law(value)


class TestUserDefinedLaw:
    class Share(Law):
        mean, second_moment = 0.5, 1 / 3

        def sample(self, shape, generator=None, dtype=None, device=None):
            return torch.rand(shape, generator=generator, dtype=dtype, device=device)

    def test_needs_mean_second_moment_and_sample(self):
        law = self.Share()
        assert law.overlap == pytest.approx(3 / 4)
        assert law.variance == pytest.approx(1 / 12)

    def test_raises_where_a_method_is_missing(self):
        with pytest.raises(NotImplementedError, match=r"Share has no half-line.*Define half_mom"):
            self.Share().half_moment(1, 1)
        for method in (self.Share.quadrature, self.Share.kurtosis.fget):
            with pytest.raises(NotImplementedError, match=r"Share has no quadrature.*Define quad"):
                method(self.Share())

    def test_cannot_be_created_without_its_moments(self):
        class Moments(Law):
            pass

        with pytest.raises(TypeError, match=r"mean.*sample.*second_moment"):
            Moments()

    def test_needs_only_atoms_if_it_is_discrete(self):
        class Die(Discrete):
            atoms = tuple((face, 1 / 6) for face in range(1, 7))

        law = Die()
        samples = law.sample(SAMPLES, generator=generator(), dtype=torch.float64)
        assert_agrees(samples, 3.5)
        assert samples.unique().tolist() == [1, 2, 3, 4, 5, 6]
        assert law.half_moment(2, 1) == pytest.approx(91 / 6)

    def test_is_registered_by_name_when_it_is_defined(self):
        @dataclass(frozen=True)
        class Spread(Discrete):
            width: float = 1.0

            @property
            def atoms(self):
                return ((-self.width, 0.5), (self.width, 0.5))

        assert laws.registered()["Spread"] is Spread
        assert "Discrete" not in laws.registered()
        assert laws.from_dict({"law": "Spread", "width": 3.0}) == Spread(3.0)
        with pytest.raises(ValueError, match=r"did you mean 'Spread'.*import its module"):
            laws.from_dict({"law": "Spraed"})
        with pytest.raises(TypeError, match="height"):
            laws.from_dict({"law": "Spread", "height": 3.0})

    def test_cannot_be_saved_if_two_laws_have_its_name(self):
        def make():
            return dataclass(frozen=True)(type("Twin", (Discrete,), {"atoms": ((1.0, 1.0),)}))

        first, _ = make(), make()
        with pytest.raises(ValueError, match="two laws are called Twin"):
            first().to_dict()

    def test_can_be_saved_only_with_fields_and_a_unique_name(self):
        with pytest.raises(TypeError, match=r"Share has no fields .* frozen dataclass"):
            self.Share().to_dict()

        @dataclass(frozen=True)
        class Ternary(Discrete):
            atoms = ((1.0, 1.0),)

        with pytest.raises(ValueError, match="two laws are called Ternary"):
            Ternary().to_dict()
        assert laws.from_dict({"law": "Ternary", "zero": 0.5}) == laws.Ternary(0.5)

    @pytest.mark.parametrize("probabilities", [(0.5, 0.6), (-0.5, 1.5), (math.nan, 0.5)])
    def test_must_have_probabilities_that_sum_to_one(self, probabilities):
        class Coin(Discrete):
            atoms = tuple(enumerate(probabilities))

        with pytest.raises(ValueError, match="Coin: the probabilities in atoms must be >= 0"):
            _ = Coin().mean


JOINT = [Masks(), Masks(0.2), Masks(1.0), Disjoint(), Correlated(0.6), Correlated(-1 / 3)]


@pytest.fixture(params=JOINT, ids=repr)
def joint(request):
    return request.param


class TestJointLaws:
    def test_survive_the_round_trip_through_json(self, joint):
        assert laws.from_dict(json.loads(json.dumps(joint.to_dict()))) == joint
        assert pickle.loads(pickle.dumps(joint)) == joint

    def test_have_the_moments_of_their_samples(self, joint):
        samples = torch.stack(
            [joint.sample((4, 512), generator(i), torch.float64) for i in range(200)]
        )
        assert_agrees(samples.square().mean((1, 2)), joint.second_moment)
        alone = joint.marginal(4)
        fourth = samples.pow(4).mean((1, 2))
        error = 5 * fourth.std().item() / math.sqrt(len(fourth))
        assert fourth.mean().item() == pytest.approx(alone.kurtosis, abs=error + 1e-2)
        with pytest.raises(TypeError, match=r"The kurtosis of .*marginal\(M\)"):
            _ = joint.kurtosis
        squares = samples.square().mean(2)
        assert bool((squares - 1).abs().max() < 1e-9) == joint.balanced
        assert samples.mean().item() == pytest.approx(alone.mean, abs=6e-3)
        assert alone.second_moment == pytest.approx(1)
        for a in range(4):
            for b in range(a):
                pair = (samples[:, a] * samples[:, b]).mean(1)
                error = 5 * pair.std().item() / math.sqrt(len(pair))
                assert pair.mean().item() == pytest.approx(joint.pair_moment(4), abs=error + 2e-3)

    def test_have_pair_moments_made_of_half_lines(self, joint):
        signs = [(a, b) for a in (1, -1) for b in (1, -1)]
        parts = {pair: joint.pair_half_moment(*pair) for pair in signs}
        total = math.fsum(a * b * parts[a, b] for a, b in signs)
        assert total == pytest.approx(joint.pair_moment(4), abs=1e-15)
        u, v = joint.sample((2, 200_000), generator(), torch.float64)
        if isinstance(joint, Correlated):
            for (a, b), part in parts.items():
                assert_agrees((a * u).clamp(min=0) * (b * v).clamp(min=0), part)

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

    def test_agree_with_independent_laws_on_the_interface(self):
        for law in CASES:
            assert law.pair_moment(5) == law.mean**2
            assert law.marginal(5) is law
            product = law.half_moment(1, 1) * law.half_moment(1, -1)
            assert law.pair_half_moment(1, -1) == product


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
