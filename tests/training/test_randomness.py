"""Random states: seeded inside, as they were outside."""

from __future__ import annotations

import random

import pytest
import torch
from training import problem

from embens.training import fit, randomness


def test_a_seed_determines_the_run_and_the_global_generators_are_left_alone():
    def run(seed):
        ensemble = problem.ensemble(dropout=0.3)
        history = fit(ensemble, problem.Pairs(*problem.data(), noise=True), epochs=2, seed=seed)
        return problem.weights(ensemble), problem.without_time(history)

    torch.manual_seed(11)
    random.seed(11)
    before = torch.get_rng_state(), random.getstate()
    first = run(3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    torch.manual_seed(12)
    random.seed(12)
    second, other = run(3), run(4)
    problem.assert_equal(first[0], second[0])
    assert repr(first[1]) == repr(second[1])
    assert any(
        not torch.equal(a, b)
        for a, b in zip(*(run[0].values() for run in (first, other)), strict=True)
    )


def test_seeds_made_of_several_numbers_are_different_and_stay_the_same():
    seeds = {randomness.combine(a, b) for a in range(30) for b in range(30)}
    assert len(seeds) == 900
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert randomness.combine(0, 1) == randomness.combine(0, 1) != randomness.combine(1, 0)


def test_generators_go_on_after_a_block_as_if_nothing_had_happened():
    numpy = pytest.importorskip("numpy")

    def draw():
        return torch.rand(()).item(), random.random(), numpy.random.rand()

    with randomness.seeded(1):
        first = draw()
    states = randomness.get_states()
    after = draw()
    with randomness.seeded(1):
        assert draw() == first
    randomness.set_states(states)
    assert draw() == after
