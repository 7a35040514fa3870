"""Sums of units with factors by hand, and the factors themselves."""

from __future__ import annotations

import torch
from theory.hand_made import close

from embens import laws
from embens.spec import LowRankSite, Site
from embens.theory.moments import Addend, Moments, State
from embens.theory.pending import addends_of, settle, with_addends
from embens.theory.placement import Modulation


def moments(nngp: float, ntk: float) -> Moments:
    return Moments(torch.tensor([[nngp]]), torch.tensor([[ntk]]))


def modulation(law, *, trainable: bool) -> Modulation:
    return Modulation(Site("0", "pre", law, 1, trainable=trainable), members=4)


def test_nothing_that_waits_changes_nothing():
    state = State(moments(1.0, 1.0), gaussian=True)
    assert settle(state) is state


def test_a_trained_modulation_adds_the_covariance_to_individual_tangents():
    v = modulation(laws.Normal(1.0, 2.0), trainable=True)
    individual = torch.tensor([[0.5]])
    state = State(moments(3.0, 7.0), individual=individual, pre=v, gaussian=True)

    after = settle(state)

    assert not after.gaussian
    close(after.covariance, torch.tensor([[5 * 3.0]]))
    close(after.same.ntk, torch.tensor([[5 * 7.0]]))
    close(after.individual, torch.tensor([[5 * 0.5 + 3.0]]))
    close(after.crossed.nngp, torch.tensor([[1 * 3.0]]))
    close(after.crossed.ntk, torch.tensor([[1 * 7.0]]))


def test_rows_of_matrices_scale_units_within_a_member_only():
    site = LowRankSite("0", rank=2, kind="multiplicative", scale=0.5)
    after = settle(State(moments(3.0, 7.0), low_rank=site))

    close(after.covariance, torch.tensor([[1.25 * 3.0]]))
    close(after.crossed.nngp, torch.tensor([[3.0]]))
    close(after.individual, torch.tensor([[2.25 * 3.0]]))


def test_trainable_scales_add_the_covariance_to_shared_tangents():
    after = settle(State(moments(3.0, 7.0), scales=frozenset(["first", "second"])))
    close(after.same.ntk, torch.tensor([[7.0 + 2 * 3.0]]))


def test_addends_without_factors_become_one():
    v = modulation(laws.Signs(0.5), trainable=False)
    parts = [Addend(moments(1.0, 2.0)), Addend(moments(4.0, 8.0), pre=v), Addend(moments(1.0, 1.0))]
    state = with_addends(State(moments(0.0, 0.0), gaussian=True), tuple(parts))

    assert [addend.covariance.item() for addend in addends_of(state)] == [2.0, 4.0]
    assert state.gaussian
    close(state.covariance, torch.tensor([[6.0]]))
    close(state.crossed.nngp, torch.tensor([[2.0 + 0.25 * 4.0]]))


def test_maps_act_on_addends():
    v = modulation(laws.Signs(0.5), trainable=False)
    parts = Addend(moments(1.0, 2.0)), Addend(moments(4.0, 8.0), pre=v)
    state = with_addends(State(moments(0.0, 0.0)), parts).map(lambda kernel: 3 * kernel)
    assert [addend.covariance.item() for addend in state.addends] == [3.0, 12.0]
