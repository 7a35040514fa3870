"""Norm layers with per-member statistics."""

import pytest
from torch import nn

from embens.embed import Source
from embens.norm_statistics import separate_norms
from embens.spec import PerMember

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@pytest.fixture
def source() -> Source:
    reference = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
    )
    return Source(reference, 2)


def test_statistics_are_separate_where_members_have_different_inputs(source):
    items = separate_norms(source, {"2", "4"}, separate_layers=(), has_affine=False)

    assert items == (PerMember("3", STATISTICS),)


def test_norm_layers_are_separate_altogether_on_request(source):
    items = separate_norms(source, {"2", "4"}, separate_layers=(), has_affine=True)

    tensors = ("weight", "bias", *STATISTICS)
    assert items == (PerMember("1", tensors), PerMember("3", tensors))


def test_norm_layers_that_are_separate_already_are_left_out(source):
    assert separate_norms(source, {"0"}, separate_layers=["1", "3"], has_affine=False) == ()
