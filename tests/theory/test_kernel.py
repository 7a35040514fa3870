"""The gradient scale at which many members train as fast as one."""

from __future__ import annotations

import math

import pytest
import torch
from theory.hand_made import flatten, gram, random_kernels
from theory.measured import points

import embens
from embens import networks, theory
from embens.theory import kernel as module
from embens.theory.kernel import (
    Kernels,
    MemberKernel,
    largest_eigenpair,
    natural_gamma,
    resolve_gamma,
    zero_cross,
)


def kernels_of(same, cross, individual=None):
    shared = MemberKernel(same, cross)
    own = torch.zeros_like(same) if individual is None else individual
    return Kernels(shared, shared, MemberKernel(own, zero_cross(own)))


def top(matrix):
    return torch.linalg.eigvalsh(matrix)[-1].item()


class TestNaturalGamma:
    @pytest.mark.parametrize("members", [1, 2, 7, 1000])
    @pytest.mark.parametrize("individual", [0.0, 2.0])
    def test_is_exact_where_members_share_nothing_or_everything(self, members, individual):
        generator = torch.Generator().manual_seed(0)
        same, own = gram(generator, 6), individual * gram(generator, 6)
        assert natural_gamma(kernels_of(same, zero_cross(same), own), members) == members
        assert natural_gamma(kernels_of(same, torch.zeros_like(same), own), members) == members
        assert natural_gamma(kernels_of(same, same.clone(), own), members) == 1

    @pytest.mark.parametrize("members", [2, 5, 50])
    @pytest.mark.parametrize("rates", [(1.0, 1.0), (0.3, 2.0), (1.0, 0.0)])
    @pytest.mark.parametrize("seed", range(4))
    def test_solves_its_equation(self, members, rates, seed):
        k = random_kernels(seed, coupling=0.1 * seed + 0.05)
        shared, individual = rates
        gamma = natural_gamma(k, members, shared_rate=shared, individual_rate=individual)
        com, ind = k.ntk_shared, k.ntk_individual.same
        mean = com.same + (members - 1) * com.cross
        left = top(shared * gamma / members * mean + individual * ind)

        assert left == pytest.approx(top(shared * com.same + individual * ind), rel=1e-12)
        assert 0 < gamma < members

    def test_is_the_simple_formula_where_kernels_are_proportional(self):
        same = gram(torch.Generator().manual_seed(0), 6)
        for r in (0.01, 0.3, 0.9):
            for members in (2, 10, 100):
                expected = members / (1 + (members - 1) * r)
                assert natural_gamma(kernels_of(same, r * same), members) == pytest.approx(expected)

    def test_is_near_the_simple_formula_where_one_direction_dominates(self):
        generator = torch.Generator().manual_seed(0)
        ones = torch.ones(12, 12, dtype=torch.float64)
        cross = 0.2 * ones + 0.01 * gram(generator, 12)
        k = kernels_of(ones + 0.2 * gram(generator, 12) + cross, cross)
        r = top(cross) / top(k.ntk_shared.same)
        for members in (2, 10, 100):
            expected = members / (1 + (members - 1) * r)
            assert natural_gamma(k, members) == pytest.approx(expected, rel=4e-3)

    @pytest.mark.parametrize("individual", [0.0, 0.5])
    @pytest.mark.parametrize("coupling", [-0.3, -0.1, 0.05])
    def test_is_that_of_all_members_together_also_where_they_repel(self, coupling, individual):
        k, members = random_kernels(individual=individual), 4
        shared = k.ntk_shared
        shared = MemberKernel(shared.same, coupling * shared.same + 0.01 * shared.cross)
        k = Kernels(k.nngp, shared, k.ntk_individual)
        gamma = natural_gamma(k, members)
        together = top(flatten(k.ntk(members, gamma).dense(members)))

        assert together == pytest.approx(top(shared.same + k.ntk_individual.same), rel=1e-10)
        assert 0 < gamma < members

    def test_at_the_bound_is_finite(self):
        same = gram(torch.Generator().manual_seed(0), 5)
        assert natural_gamma(kernels_of(same, -same / 3), 4) == pytest.approx(3.0)

    def test_grows_with_members_towards_a_limit(self):
        k = random_kernels()
        values = [natural_gamma(k, m) for m in (1, 2, 4, 8, 10**3, 10**6)]
        assert values == sorted(values)
        assert values[-1] == pytest.approx(values[-2], rel=1e-2)

    def test_is_all_members_where_nothing_is_shared(self):
        own = gram(torch.Generator().manual_seed(0), 4)
        none = torch.zeros_like(own)
        assert natural_gamma(kernels_of(none, zero_cross(none), own), 6) == 6
        k = random_kernels()
        assert natural_gamma(k, 6, shared_rate=0.0) == 6

    def test_of_many_inputs_uses_an_iterative_solver(self, monkeypatch):
        k = random_kernels(n=60)
        exact = natural_gamma(k, 5)
        dense = torch.linalg.eigh

        def small(matrix, **options):
            assert len(matrix) < 10, "the dense solver was used"
            return dense(matrix, **options)

        monkeypatch.setattr(module, "MAX_DENSE_INPUTS", 10)
        monkeypatch.setattr(torch.linalg, "eigh", small)
        assert natural_gamma(k, 5) == pytest.approx(exact, rel=1e-10)

    def test_uses_a_direct_solver_if_the_iterative_one_does_not_converge(self, monkeypatch):
        monkeypatch.setattr(module, "MAX_DENSE_INPUTS", 10)
        k = gram(torch.Generator().manual_seed(0), 20)
        start = torch.ones(20, 1, dtype=torch.float64) / math.sqrt(20)
        monkeypatch.setattr(torch, "lobpcg", lambda *_, **__: (torch.ones(1), start))
        value, vector = largest_eigenpair(k)

        assert value == pytest.approx(top(k))
        torch.testing.assert_close(k @ vector, value * vector)

    def test_of_many_inputs_is_right_where_rows_sum_to_zero(self, monkeypatch):
        """As of odd functions on inputs and their negatives."""
        monkeypatch.setattr(module, "MAX_DENSE_INPUTS", 10)
        half = gram(torch.Generator().manual_seed(0), 8)
        odd = torch.cat([torch.cat([half, -half], 1), torch.cat([-half, half], 1)])
        assert largest_eigenpair(odd)[0] == pytest.approx(2 * top(half))

    def test_needs_kernels_of_inputs_with_themselves(self):
        with pytest.raises(ValueError, match=r"inputs with themselves.*shape \(3, 5\)"):
            natural_gamma(random_kernels()[:3, :5])
        with pytest.raises(ValueError, match="inputs with themselves"):
            random_kernels()[:3, 4:7].ntk(members=4)

    def test_needs_exchangeable_members(self):
        same = torch.eye(3).expand(2, 3, 3)
        k = MemberKernel(same, same.expand(2, 2, 3, 3))
        with pytest.raises(ValueError, match="natural_gamma does not apply: it needs exchangeable"):
            natural_gamma(Kernels(k, k, k), 2)

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"members": 0}, ValueError, "members must be a positive integer, got 0"),
            ({"shared_rate": -1}, ValueError, "shared_rate must be a number >= 0, got -1"),
            ({"individual_rate": "1"}, TypeError, "individual_rate must be a number >= 0, got '1'"),
        ],
    )
    def test_says_what_it_expects(self, arguments, error, message):
        with pytest.raises(error, match=message):
            natural_gamma(random_kernels(), **arguments)


class TestResolveGamma:
    def test_takes_a_number_a_function_of_members_or_none(self):
        k = random_kernels()
        assert resolve_gamma(k, 6, 2) == 2.0
        assert resolve_gamma(k, 6, torch.tensor(2.5)) == 2.5
        assert resolve_gamma(k, 9, math.sqrt) == 3.0
        assert resolve_gamma(k, 9, None) == natural_gamma(k, 9)
        assert resolve_gamma(k, 9, individual_rate=5.0) == natural_gamma(k, 9, individual_rate=5.0)

    def test_gives_the_kernel_its_default(self):
        k = random_kernels()
        torch.testing.assert_close(k.ntk(4).cross, k.ntk(4, natural_gamma(k, 4)).cross)

    @pytest.mark.parametrize("gamma", [0, -1.0, math.inf, math.nan, lambda _: 0.0])
    def test_refuses_what_is_not_positive(self, gamma):
        with pytest.raises(ValueError, match="gamma must be a positive number"):
            resolve_gamma(random_kernels(), 6, gamma)

    @pytest.mark.parametrize("gamma", ["M", True, lambda _: None])
    def test_refuses_what_is_no_number(self, gamma):
        with pytest.raises(TypeError, match="gamma must be a positive number"):
            resolve_gamma(random_kernels(), 6, gamma)


def test_conditional_kernels_say_that_modes_do_not_exist():
    ensemble = embens.embed(networks.mlp(5, 4, 2), 3, sites="all")
    k = theory.kernels(ensemble, points())
    with pytest.raises(ValueError, match="needs exchangeable members"):
        k.nngp.modes(3)
