"""The rules behind "auto", and how rows are dealt out."""

from __future__ import annotations

import pytest
import torch

from embens.estimators import choices
from embens.estimators.options import Options


def deal(rows, fraction="auto", **changes):
    generator = torch.Generator().manual_seed(0)
    return choices.split(rows, fraction, generator=generator, **{"calibrate": False, **changes})


@pytest.mark.parametrize("calibrate", [False, True])
@pytest.mark.parametrize("rows", [10, 49, 50, 1000])
def test_every_row_is_in_one_part(rows, calibrate):
    parts = deal(rows, calibrate=calibrate)
    assert torch.cat(parts).sort().values.tolist() == list(range(rows))
    assert len(parts.stop) + len(parts.calibrate) == (0 if rows < 50 else rows // 5)
    assert (len(parts.calibrate) > 0) == (calibrate and rows >= 50)


def test_at_most_ten_thousand_rows_are_held_out():
    assert len(deal(200_000).stop) == 10_000
    assert len(deal(1000, 0.5).stop) == 500
    assert len(deal(1000, 0).stop) == 0


def test_classes_keep_their_shares_and_none_is_held_out_whole():
    groups = torch.tensor([0] * 700 + [1] * 290 + [2] * 9 + [3])
    parts = deal(1000, groups=groups)
    held, train = groups[parts.stop].bincount(minlength=4), groups[parts.train].bincount()
    assert held.tolist() == pytest.approx([140, 58, 1.8, 0], abs=1)
    assert (train > 0).all()


def test_members_follow_the_room_down_to_a_half():
    assert choices.members_with_room(float("inf"), 16, 1000) == 16
    assert choices.members_with_room(12.9, 16, 1000) == 12
    assert choices.members_with_room(3.0, 16, 1000) == 8
    assert choices.members_with_room(3.0, 16, 20) == 16


def test_a_tiny_table_is_one_batch_without_dropout():
    sizes = choices.choose_sizes(30, Options())
    assert (sizes.batch_size, sizes.dropout) == (30, 0.0)
    assert choices.choose_sizes(10**6, Options()).epochs == 20
