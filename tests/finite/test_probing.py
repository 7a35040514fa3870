"""Probes: what laws and plan are as numbers, and what readouts answer."""

from __future__ import annotations

import math

import pytest
import torch
from finite.test_forecasting import mlp, task
from torch import nn

import embens
from embens import laws
from embens.finite import probing
from embens.finite.probing import describe, likeness


class TestDescribe:
    def test_has_the_plan_as_logarithms_and_the_scale_of_the_weights(self):
        plan = {"lr": 0.1, "batch_size": 20, "gamma": None, "optimizer": torch.optim.SGD}
        sizes = {"rows": 100, "planned": 50, "members": 4, "rate": 1.0}
        found = describe(embens.batch_ensemble(mlp(), 4), mlp(), plan, **sizes)
        assert found["lr"] == math.log(0.1)
        assert found["epochs"] == pytest.approx(math.log(10))
        assert found["time"] == pytest.approx(math.log(5))
        assert found["width"] == pytest.approx(math.log(16))
        assert found["tails of u"] == pytest.approx(math.log(3))
        tenth = mlp()
        with torch.no_grad():
            for p in tenth.parameters():
                p.mul_(0.1)
        smaller = describe(embens.batch_ensemble(tenth, 4), tenth, plan, **sizes)
        assert smaller["scale"] == pytest.approx(found["scale"] - math.log(10), abs=1e-4)


class TestLikeness:
    @pytest.mark.parametrize(
        ("given", "expected"),
        [  # two shared layers but the last: v; u v
            ({"pre": laws.Signs(0.0), "post": laws.Signs(0.0)}, 0.0),
            ({"pre": laws.Shifted(0.5), "post": laws.Shifted(0.5)}, (0.25 + 0.25**2) / 2),
            ({"pre": None, "post": laws.Signs(0.5)}, (1 + 0.25) / 2),
            ({"pre": None, "post": None, "own": "last"}, 1.0),
        ],
    )
    def test_is_the_mean_overlap_of_what_is_fed_to_shared_layers(self, given, expected):
        assert likeness(embens.embed(mlp(), 4, **given)) == pytest.approx(expected)

    def test_separate_networks_have_none(self):
        assert likeness(embens.independent(mlp(), 4)) == 0


class TestReadout:
    def test_is_the_ridge_regression_of_what_the_last_layer_is_fed(self):
        from sklearn.linear_model import Ridge

        network, (x, y) = mlp(), task()
        wanted = nn.functional.one_hot(y[:150]).double()
        with torch.no_grad():
            found = probing._read(network, (x,), {}, wanted)
            fed = nn.Sequential(*list(network)[:-1])(x).double()
        seen = fed[:150] - fed[:150].mean(0)
        ridge = Ridge(probing.RIDGE * float(seen.square().sum()) / 150)
        expected = ridge.fit(fed[:150].numpy(), wanted.numpy()).predict(fed[150:].numpy())
        torch.testing.assert_close(found, torch.from_numpy(expected), atol=1e-6, rtol=1e-6)

    def test_without_layers_it_reads_the_outputs(self):
        class Own(nn.Module):
            def __init__(self):
                super().__init__()
                self.own = nn.Parameter(torch.eye(6)[:, :3].clone())

            def forward(self, x):
                return x @ self.own

        x, y = task()
        with torch.no_grad():
            found = probing._read(Own(), (x,), {}, nn.functional.one_hot(y[:150]).double())
        assert float((found.argmax(1) == y[150:]).double().mean()) > 0.5
