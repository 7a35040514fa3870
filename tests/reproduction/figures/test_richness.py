"""richness: its battery, on tables of which its claims are true, or false."""

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


def rows(c, true, noise):
    rows = []
    for loss in (0.5, 0.1):
        scale, width, late = math.log2(c["scale"]), math.log2(c["width"]), loss == 0.1
        if c["family"] == "separate":
            correlation = 0.4
        elif true:  # small effects, and a transition near p=0.97 wherever one looks
            steep = max(0.0, (c["p"] - 0.94) / 0.06) * 0.95
            effect = 0.02 * late - 0.005 * scale - 0.005 * width
            correlation = 0.4 + 0.6 * (steep + (effect if c["p"] >= 0.9 else 0.0))
        else:  # the other way round, and a transition that moves with the scale
            middle = 0.35 + 0.05 * scale
            correlation = 0.4 + 0.6 * min(0.7, 0.5 * c["p"] / middle)
            correlation += 0.01 * scale + 0.01 * width - 0.05 * late if c["p"] >= 0.9 else 0.0
        rows.append(
            {
                "loss": loss,
                "accuracy": 0.9,
                "correlation": correlation + noise(0.0005),
                "change": 0.3 + (-0.05 if true else 0.05) * scale + noise(0.001),
            }
        )
    return rows


class TestRichness(Battery):
    name, rows = "richness", staticmethod(rows)


def made_up(correlations):
    rows = [{"family": "separate", "p": 0.0, "correlation": 0.4}]
    rows += [{"family": "embedded", "p": p, "correlation": r} for p, r in correlations.items()]
    return Rows(pandas.DataFrame(rows).assign(seed=0, width=1.0, scale=2.0, loss=0.1))


def test_the_collective_part_is_relative_to_separate_networks():
    table = collective(made_up({0.0: 0.4, 0.9: 0.7, 0.95: 1.0}))
    assert list(table["c"]) == pytest.approx([0.0, 0.5, 1.0])


def test_half_way_is_from_the_correlation_at_zero_to_one():
    assert list(transition_points(made_up({0.0: 0.2, 0.8: 0.4, 0.9: 0.8}))) == pytest.approx([0.85])
    assert list(transition_points(made_up({0.0: 0.2, 0.9: 0.4}))) == pytest.approx(
        [0.9 + 0.1 * 0.25 / 0.75]
    )


def test_features_are_the_inputs_of_the_last_layer():
    ensemble = embed(networks.mlp(4, 6, 2, 3), members=3)
    x = torch.randn(5, 4)
    features = features_of(ensemble, x)
    assert features.shape == (3, 5, 6)
    for a in range(3):
        last = list(ensemble.member(a).children())[-1]
        assert isinstance(last, nn.Module)
        assert torch.allclose(last(features[a]), ensemble(x)[a], atol=1e-6)


def test_alignment_knows_no_scale_and_no_rotation_and_falls_for_other_features():
    features = torch.randn(2, 50, 8, generator=torch.Generator().manual_seed(0))
    rotation = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))[0]
    assert alignment(features, 3 * features @ rotation + 1) == pytest.approx(1.0, abs=1e-5)
    other = torch.randn(2, 50, 8, generator=torch.Generator().manual_seed(2))
    assert alignment(features, other) < 0.5
