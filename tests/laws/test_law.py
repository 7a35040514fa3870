"""One battery over every law of independent members, and laws defined by users."""

import copy
import json
import math
import pickle
from dataclasses import FrozenInstanceError, dataclass

import pytest
import torch
from laws.sampling import SAMPLES, assert_agrees, generator

from embens import laws
from embens.laws import (
    Bernoulli,
    Constant,
    Discrete,
    Law,
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

    def test_has_the_pair_moments_of_independent_members(self, law):
        assert law.pair_moment(5) == law.mean**2
        assert law.marginal(5) is law
        product = law.half_moment(1, 1) * law.half_moment(1, -1)
        assert law.pair_half_moment(1, -1) == product


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
