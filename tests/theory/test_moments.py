"""State of the recursion: linear maps reach all kernels, and cross kernels are lazy."""

import pytest
import torch

from embens.theory.moments import PAIRS, Moments, State

pytestmark = pytest.mark.usefixtures("double")


def test_a_map_reaches_all_kernels_and_waits_where_they_wait():
    one, asked = torch.ones(1, 1), []

    def cross() -> Moments:
        asked.append(True)
        return Moments(2 * one)

    state = State(Moments(one, 3 * one), cross, individual=4 * one).map(lambda kernel: 10 * kernel)
    assert not asked
    assert state.same == Moments(10 * one, 30 * one)
    assert state.individual == 40 * one
    assert state.crossed == Moments(20 * one)
    assert state.crossed.ntk is None
    assert len(asked) == 1


def test_members_are_equal_until_a_modulation_differs():
    state = State(Moments(torch.ones(2, 2)))
    assert state.crossed is state.same
    assert state.map(torch.neg).cross is None


def test_pixels_are_counted_until_a_flatten():
    state = State(Moments(torch.zeros(1, 1, 2, 3, 2, 3)), layout=PAIRS, spatial=2)
    assert state.pixels == (2, 3)
    assert state.replace(flat=True).pixels == ()
    assert state.equal_pixels(state.covariance).shape == (1, 1, 2, 3)
