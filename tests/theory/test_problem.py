"""Invalid kernels, targets and times raise errors with a fix."""

import math

import pytest
import torch
from theory.hand_made import TEST, TRAIN, random_kernels, split, targets

from embens.theory import FlowSettings, gradient_flow
from embens.theory.kernel import Kernels, MemberKernel


class TestErrors:
    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"k_train_train": torch.eye(3)}, TypeError, "k_train_train must be Kernels.*Tensor"),
            (
                {"k_test_train": split(random_kernels())[1].mT},
                ValueError,
                r"k_test_train.*got \(7, 4\).*\.mT",
            ),
            (
                {"k_test_test": split(random_kernels())[0]},
                ValueError,
                r"k_test_test.* must have shape \(4, 4\)",
            ),
            ({"y": [1.0]}, TypeError, "y must be a tensor; got list"),
            ({"y": torch.zeros(3)}, ValueError, r"a row for each of the 7 train.*got \(3,\)"),
            ({"y": torch.full((7,), math.nan)}, ValueError, "y must be finite; got 7 values"),
            ({"members": 0}, ValueError, "members must be a positive integer, got 0"),
            ({"members": 2.0}, TypeError, "members must be a positive integer, got 2.0"),
            ({"gamma": 0.0}, ValueError, "gamma must be a positive number.*got 0.0"),
            ({"gamma": lambda m: -m}, ValueError, "gamma must be a positive number.*got -8"),
            ({"gamma": "M"}, TypeError, "gamma must be a positive number.*got 'M'"),
            (
                {"settings": FlowSettings(shared_rate=-1.0)},
                ValueError,
                "shared_rate must be a number >= 0, got -1.0",
            ),
            (
                {"settings": FlowSettings(jitter=-1e-3)},
                ValueError,
                "jitter must be a number >= 0, got -0.001",
            ),
        ],
    )
    def test_name_the_argument_and_its_value(self, change, error, message):
        train, test_train, test = split(random_kernels())
        arguments = {
            "k_train_train": train,
            "k_test_train": test_train,
            "k_test_test": test,
            "y": targets(TRAIN),
            "members": 8,
            "gamma": 8.0,
        }
        with pytest.raises(error, match=message):
            gradient_flow(**{**arguments, **change})

    def test_refuse_train_kernels_that_are_not_symmetric_or_finite(self):
        train, test_train, test = split(random_kernels())
        skew = train.ntk_shared.same.clone()
        skew[0, 1] += 1e-3
        spoiled = Kernels(train.nngp, MemberKernel(skew, train.ntk_shared.cross), train.nngp)
        with pytest.raises(ValueError, match=r"k_train_train.ntk_shared.same must be symmetric"):
            gradient_flow(spoiled, test_train, test, targets(TRAIN))
        skew[0, 0] = math.nan
        with pytest.raises(ValueError, match=r"k_train_train.ntk_shared.same must be finite"):
            gradient_flow(spoiled, test_train, test, targets(TRAIN))

    def test_refuse_kernels_that_are_conditional_on_drawn_values(self):
        same = torch.eye(TRAIN).expand(2, TRAIN, TRAIN)
        kernel = MemberKernel(same, same.expand(2, 2, TRAIN, TRAIN))
        kernels = Kernels(kernel, kernel, kernel)
        with pytest.raises(ValueError, match=r"gradient_flow does not apply: .*sites='hidden'"):
            gradient_flow(kernels, kernels, None, targets(TRAIN))

    @pytest.mark.parametrize("what", ["variance", "covariance", "ensemble_variance", "diversity"])
    def test_say_which_quantities_need_kernels_of_the_test_data(self, what):
        train, test_train, _ = split(random_kernels())
        flow = gradient_flow(train, test_train, None, targets(TRAIN))
        assert flow.mean(1.0).isfinite().all()
        with pytest.raises(ValueError, match=f"{what} needs the kernels of the test data"):
            getattr(flow, what)(1.0)

    @pytest.mark.parametrize(
        ("t", "error", "message"),
        [
            (-1.0, ValueError, "t must be a time >= 0.*got -1.0"),
            (math.nan, ValueError, "t must be a time >= 0.*got nan"),
            ("later", TypeError, "t must be a time >= 0.*got 'later'"),
            (torch.zeros(2, 2), ValueError, r"a vector of them; got shape \(2, 2\)"),
            (torch.tensor([1.0, -1.0]), ValueError, "t must be a time >= 0.*got -1.0"),
        ],
    )
    def test_say_what_a_time_is(self, t, error, message):
        flow = gradient_flow(*split(random_kernels()), targets(TRAIN))
        with pytest.raises(error, match=message):
            flow.mean(t)

    def test_say_that_covariance_takes_one_time(self):
        flow = gradient_flow(*split(random_kernels()), targets(TRAIN))
        with pytest.raises(ValueError, match="covariance takes one time; got a vector of 2"):
            flow.covariance(torch.zeros(2))

    def test_say_which_outputs_evolve_expects(self):
        flow = gradient_flow(*split(random_kernels()), targets(TRAIN, 2), members=3)
        with pytest.raises(ValueError, match=r"test outputs must be \(3, 4, 2\).*got \(3, 4\)"):
            flow.evolve(1.0, torch.zeros(3, TRAIN, 2), torch.zeros(3, TEST))
