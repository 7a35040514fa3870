"""The battery of the experiment richness, and how it measures transitions and features."""

from __future__ import annotations

import math

import pandas
import pytest
import torch
from torch import nn

from embens import embed, networks
from reproduction.figures.richness import alignment, collective, features_of, transition_points
from reproduction.rows import Rows
from tests.reproduction.battery import Battery

LOSSES = (0.5, 0.1)
SEPARATE_CORRELATION = 0.4


class TestRichness(Battery):
    name = "richness"

    @staticmethod
    def confirming_rows(cell, noise):
        scale, width = math.log2(cell["scale"]), math.log2(cell["width"])
        rows = []
        for loss in LOSSES:
            correlation = SEPARATE_CORRELATION
            if cell["family"] != "separate":
                # The transition lies near p=0.97 for all scales and widths.
                correlation += 0.57 * max(0.0, (cell["p"] - 0.94) / 0.06)
            if cell["family"] != "separate" and cell["p"] >= 0.9:
                correlation += 0.012 * is_late(loss) - 0.003 * scale - 0.003 * width
            rows.append(make_row(loss, correlation, 0.3 - 0.05 * scale, noise))
        return rows

    @staticmethod
    def contradicting_rows(cell, noise):
        scale, width = math.log2(cell["scale"]), math.log2(cell["width"])
        rows = []
        for loss in LOSSES:
            correlation = SEPARATE_CORRELATION
            if cell["family"] != "separate":
                # The transition moves with the scale.
                half_way = 0.35 + 0.05 * scale
                correlation += 0.6 * min(0.7, 0.5 * cell["p"] / half_way)
            if cell["family"] != "separate" and cell["p"] >= 0.9:
                correlation += 0.01 * scale + 0.01 * width - 0.05 * is_late(loss)
            rows.append(make_row(loss, correlation, 0.3 + 0.05 * scale, noise))
        return rows


def is_late(loss):
    """Return 1 at the smaller train loss, which is reached later, and 0 at the larger one."""
    return int(loss == min(LOSSES))


def make_row(loss, correlation, change, noise):
    return {
        "loss": loss,
        "accuracy": 0.9,
        "correlation": correlation + noise(0.0005),
        "change": change + noise(0.001),
    }


def make_table(correlations):
    """Return a table of one seed from the correlation of embedded members at each p."""
    rows = [{"family": "separate", "p": 0.0, "correlation": SEPARATE_CORRELATION}]
    for p, correlation in correlations.items():
        rows.append({"family": "embedded", "p": p, "correlation": correlation})
    return Rows(pandas.DataFrame(rows).assign(seed=0, width=1.0, scale=2.0, loss=0.1))


def test_collective_part_is_relative_to_separate_networks():
    table = collective(make_table({0.0: 0.4, 0.9: 0.7, 0.95: 1.0}))

    assert list(table["c"]) == pytest.approx([0.0, 0.5, 1.0])


def test_transition_is_half_way_from_the_correlation_at_zero_to_one():
    between_points = make_table({0.0: 0.2, 0.8: 0.4, 0.9: 0.8})
    above_the_last_point = make_table({0.0: 0.2, 0.9: 0.4})

    assert list(transition_points(between_points)) == pytest.approx([0.85])
    expected = 0.9 + 0.1 * 0.25 / 0.75
    assert list(transition_points(above_the_last_point)) == pytest.approx([expected])


def test_features_are_the_inputs_of_the_last_layer():
    ensemble = embed(networks.mlp(4, 6, 2, 3), members=3)
    x = torch.randn(5, 4)

    features = features_of(ensemble, x)

    assert features.shape == (3, 5, 6)
    for a in range(3):
        last_layer = list(ensemble.member(a).children())[-1]
        assert isinstance(last_layer, nn.Module)
        torch.testing.assert_close(last_layer(features[a]), ensemble(x)[a])


def test_alignment_ignores_scale_rotation_and_offset():
    features = torch.randn(2, 50, 8, generator=torch.Generator().manual_seed(0))
    square = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    rotation = torch.linalg.qr(square).Q

    assert alignment(features, 3 * features @ rotation + 1) == pytest.approx(1.0, abs=1e-5)


def test_alignment_of_independent_features_is_small():
    features = torch.randn(2, 50, 8, generator=torch.Generator().manual_seed(0))
    independent = torch.randn(2, 50, 8, generator=torch.Generator().manual_seed(2))

    assert alignment(features, independent) < 0.5
