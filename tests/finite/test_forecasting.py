"""Forecasts: what they promise, and what they need."""

from __future__ import annotations

import copy
import itertools
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import embens
from embens import laws, networks
from embens.finite import forecasting, probing
from embens.finite.forecasting import carry, forecast
from embens.finite.probing import Probe

ALONE = {"nll": 1.0, "alike": 0.6, "accuracy": 0.8, "correlation": 0.5}
PLAN = {
    "classes": 2.3,
    "members": 2.1,
    "epochs": 3.4,
    "lr": -4.6,
    "rate": 0.0,
    "width": 3.5,
    "time": 2.3,
    "crowd": 0.0,
    "rows": 6.9,
    "inputs": 4.2,
    "batch": 3.5,
    "scale": 0.3,
    "scale_free": 0.0,
    "convolution": 0.0,
    "trained": 1.0,
    "likeness": 0.0,
    "own v": 1.0,
    "tails of v": 0.0,
    "v": 1.0,
    "own u": 1.0,
    "tails of u": 0.0,
    "depth": 4.0,
    "bias": 0.0,
    "norm": 0.0,
}
PROBE = Probe(8, 1000, 0.03, PLAN, mine=ALONE | {"nll": 1.1}, alone=ALONE)
ESTIMATES = (
    *("correlation", "separate_correlation", "disagreement", "member_accuracy", "accuracy", "nll"),
    *("reference_accuracy", "reference_nll", "separate_accuracy", "separate_nll", "gain"),
    *("gain_over_separate", "best_members"),
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mlp(width: int = 16) -> nn.Module:
    return networks.mlp(6, width, 2, 3, weight_std=2**0.5, generator=seeded())


def task(rows: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, 6, generator=seeded(1))
    return x, (x[:, :3] + 0.5 * torch.randn(rows, 3, generator=seeded(2))).argmax(1)


class TestForecast:
    def test_depends_on_its_arguments_alone_and_changes_nothing(self):
        ensemble = embens.batch_ensemble(mlp(), 8, generator=seeded())
        before = copy.deepcopy(ensemble.state_dict())
        torch.manual_seed(3)
        first = forecast(ensemble, *task(), epochs=12)
        state = torch.get_rng_state()
        torch.manual_seed(4)
        again = forecast(ensemble, *task(), epochs=12)
        assert first == again
        torch.manual_seed(3)
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(v, before[k]) for k, v in ensemble.state_dict().items())
        assert first != forecast(ensemble, *task(), epochs=12, seed=1)

    def test_has_an_interval_around_every_number(self):
        found = forecast(embens.batch_ensemble(mlp(), 4, generator=seeded()), *task(), epochs=12)
        for name in ESTIMATES:
            estimate = getattr(found, name)
            assert estimate.low <= estimate.value <= estimate.high, name
        assert json.loads(json.dumps(found.to_dict()))["members"] == 4
        assert found.verdict in str(found)

    @pytest.mark.parametrize("width", [16, 1024])
    def test_takes_few_of_the_steps(self, width):
        """Of a small network a step takes as long for two members as for eight."""
        probe = forecast(mlp(width), *task(1000), epochs=80, batch_size=32).probe
        assert probe.steps == 80 * 32
        shares = {16: 1 / 2, 1024: 8 / (probing.MEMBERS + probing.SEPARATE)}
        assert probe.done == pytest.approx(probing.COST * shares[width], rel=0.15)

    def test_an_explicit_gamma_is_a_pace_that_some_of_the_members_keep(self):
        ensemble = embens.batch_ensemble(mlp(), 8, generator=seeded())
        assert ensemble.natural_gamma == 8
        found = [forecast(ensemble, *task(), epochs=12, gamma=g).probe for g in (None, 8.0, 4.0)]
        assert found[0] == found[1]
        assert found[2].mine["nll"] != found[0].mine["nll"]
        assert found[2].alone == found[0].alone

    def test_masks_that_are_drawn_anew_are_forecast_as_fixed_ones(self):
        with pytest.raises(ValueError, match="use fresh=False"):
            forecast(embens.mc_dropout(mlp(), 4, fresh=True), *task())

    def test_refuses_what_begins_as_a_pretrained_network(self):
        ensemble = embens.adapt(mlp(), 4, by="low_rank", head="copied")
        with pytest.raises(ValueError, match=r"trained from scratch.*rows that you hold out"):
            forecast(ensemble, *task())
        report = embens.diagnose(ensemble, *task())
        assert report.forecast is None
        assert "no forecast was made" in report.verdict

    def test_knows_members_that_are_one_model(self):
        ensemble = embens.batch_ensemble(mlp(), 8, p=1.0, generator=seeded())
        found = forecast(ensemble, *task(), epochs=12)
        assert found.correlation == forecasting.Estimate(1.0, 1.0, 1.0)
        assert found.best_members.value == 1
        assert "nearly one model" in found.verdict

    def test_expects_more_alike_members_of_more_alike_laws(self):
        found = [
            forecast(
                embens.embed(mlp(32), 8, pre=law, post=law, generator=seeded()), *task(), epochs=20
            ).correlation.value
            for law in (laws.Signs(0.0), laws.Signs(0.8), laws.Shifted(0.99))
        ]
        assert found == sorted(found)

    def test_of_a_network_is_that_of_its_batch_ensemble(self):
        ensemble = embens.batch_ensemble(mlp(), 8, generator=seeded(0))
        assert forecast(mlp(), *task(), epochs=12) == forecast(ensemble, *task(), epochs=12)

    @pytest.mark.parametrize(
        "family",
        [
            embens.independent,
            embens.last_layer_dropout,
            embens.mc_dropout,
            embens.masksembles,
            embens.mimo,
            embens.rank1,
            lambda net, members, generator: embens.low_rank(
                net, members, rank=1, kind="additive", generator=generator
            ),
            lambda net, members, generator: embens.embed(
                net, members, pre=None, post=None, own="last", generator=generator
            ),
        ],
    )
    def test_is_made_for_any_family(self, family):
        found = forecast(family(mlp(), 4, generator=seeded()), *task(), epochs=12)
        assert 0 <= found.correlation.value <= 1
        assert found.members == 4

    def test_takes_several_inputs(self):
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(6, 8), nn.Linear(6, 8)
                self.out = nn.Linear(8, 3)

            def forward(self, x, z):
                return self.out(torch.relu(self.a(x) + self.b(z)))

        x, y = task()
        ensemble = embens.batch_ensemble(Two(), 4, generator=seeded())
        assert forecast(ensemble, (x, -x), y, epochs=6).members == 4
        assert forecast(ensemble, {"x": x, "z": -x}, y, epochs=6).members == 4

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"target": torch.randn(200)}, TypeError, r"such as y.long.* got Tensor torch.float32"),
            ({"target": [0] * 200}, TypeError, "got list"),
            ({"ensemble": 3}, TypeError, "an ensemble or a network; got int"),
            ({"epochs": 0}, ValueError, "epochs must be at least 1"),
            ({"lr": -1.0}, ValueError, "lr must be a number above 0"),
            ({"members": 0}, ValueError, "members must be at least 1"),
        ],
    )
    def test_says_what_it_expects(self, change, error, message):
        x, y = task()
        given = {"ensemble": mlp(), "x": x, "target": y} | change
        with pytest.raises(error, match=message):
            forecast(given.pop("ensemble"), given.pop("x"), given.pop("target"), **given)

    def test_needs_enough_rows(self):
        with pytest.raises(ValueError, match="at least 64 samples; got 20"):
            forecast(mlp(), *task(20))
        x, y = task()
        with pytest.raises(ValueError, match="200 and 100"):
            forecast(mlp(), x, y[:100])

    def test_refuses_labels_that_are_no_classes(self):
        x, y = task()
        for wrong, message in ((y + 1, "from 0 to 2"), (y - 1, "from 0; got"), (0 * y, "two")):
            with pytest.raises(ValueError, match=message):
                forecast(mlp(), x, wrong)

    def test_refuses_a_rate_at_which_training_diverges(self):
        ensemble = embens.batch_ensemble(mlp(), 8)
        with pytest.raises(ValueError, match=r"would diverge: the loss is .* a smaller lr"):
            forecast(ensemble, *task(), epochs=60, lr=1e4)
        x, y = task()
        report = embens.diagnose(ensemble, 1e6 * x, y)
        assert report.forecast is None
        assert "would diverge" in str(report)

    def test_separate_members_are_what_it_says_of_separate_networks(self):
        found = forecast(embens.independent(mlp(), 4, generator=seeded()), *task(), epochs=12)
        for name in ("correlation", "accuracy", "nll"):
            assert getattr(found, name) == getattr(found, f"separate_{name}")
        assert found.gain_over_separate.value == 0
        assert found.member_accuracy == found.reference_accuracy

    def test_for_other_numbers_of_members_is_made_as_if_there_were_so_many(self):
        law = {"pre": laws.Signs(0.5), "post": laws.Signs(0.5)}
        four, sixteen = (embens.embed(mlp(), m, **law, generator=seeded()) for m in (4, 16))
        given = {"epochs": 12, "optimizer": torch.optim.Adam, "lr": 0.001}
        for plan in ({}, given):
            asked = forecast(four, *task(), members=16, **plan).probe
            assert asked.plan == forecast(sixteen, *task(), **plan).probe.plan
            assert forecast(four, *task(), **plan).probe.of(16).plan == pytest.approx(asked.plan)

    def test_draws_of_dropout_are_its_own(self):
        network = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
        ensemble, state = embens.batch_ensemble(network, 4), torch.get_rng_state()
        first = forecast(ensemble, *task(), epochs=12)
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(5)
        assert forecast(ensemble, *task(), epochs=12) == first
        with torch.no_grad():
            assert forecast(ensemble, *task(), epochs=12) == first

    def test_takes_bare_parameters(self):
        class Shifted(nn.Module):
            def __init__(self):
                super().__init__()
                self.shift, self.body = nn.Parameter(torch.zeros(6)), mlp()

            def forward(self, x):
                return self.body(x + self.shift)

        assert forecast(Shifted(), *task(), epochs=12, members=4).members == 4
        found = embens.advise(Shifted(), *task(), epochs=6, members=(2,), proposals=99)
        assert found
        assert not any("independent" in p.call for p in found)  # which it can't redraw

    def test_warns_of_networks_that_are_trained_and_refuses_frozen_ones(self):
        x, y = task()
        alone = embens.independent(mlp(), 1, generator=seeded())
        embens.fit(alone, (x, y), epochs=40, lr=0.1, progress=False)
        for trained in (alone.member(0), alone, embens.mc_dropout(alone.member(0), 4)):
            with pytest.warns(UserWarning, match=r"trained already: its loss is .* guessing"):
                forecast(trained, x, y, batch_size=2, epochs=2)
        frozen = embens.low_rank(mlp(), 4, rank=1, kind="additive", shared="frozen")
        with pytest.raises(ValueError, match=r"are frozen here"):
            forecast(frozen, x, y)


class TestCarry:
    def test_more_members_have_more_of_what_there_is_to_gain(self):
        """With all else equal: (1 − 1/M) of it."""
        gains = [carry(replace(PROBE, members=m)).gain.value for m in (1, 2, 4, 8, 16)]
        steps = [b - a for a, b in itertools.pairwise(gains)]
        assert all(step > 0 for step in steps)
        assert steps == sorted(steps, reverse=True)
        losses = [carry(replace(PROBE, members=m)).nll.value for m in (1, 2, 4, 8, 16)]
        assert losses == sorted(losses, reverse=True)

    def test_members_differ_at_least_where_one_is_right_and_one_is_not(self, monkeypatch):
        means, errors = forecasting.expect(PROBE)
        none = (means | {"disagreement": 0.0}, errors | {"disagreement": 0.0})
        monkeypatch.setattr(forecasting, "expect", lambda _: none)
        found = carry(PROBE)
        right, alike = found.member_accuracy.value, found.correlation.value
        assert found.disagreement.value == pytest.approx(2 * right * (1 - right) * (1 - alike))
        assert found.disagreement.value > 0.01

    def test_a_gain_is_the_difference_of_accuracies(self):
        found = carry(PROBE)
        gain = found.accuracy.value - found.reference_accuracy.value
        assert found.gain.value == pytest.approx(gain)
        over = found.accuracy.value - found.separate_accuracy.value
        assert found.gain_over_separate.value == pytest.approx(over)


@pytest.mark.parametrize("given", [torch.optim.Adam, "AdamW", None])
def test_a_diagnosis_forecasts_with_the_optimizer_that_is_meant(given):
    ensemble = embens.batch_ensemble(mlp(), 4, generator=seeded())
    found = embens.diagnose(ensemble, *task(), optimizer=given).forecast
    kind = getattr(torch.optim, given) if isinstance(given, str) else given
    assert found == forecast(ensemble, *task(), optimizer=kind)


def test_an_optimizer_that_is_made_has_its_rate():
    ensemble = embens.batch_ensemble(mlp(), 4, generator=seeded())
    made = torch.optim.SGD(ensemble.parameter_groups(lr=0.02), lr=0.02, momentum=0.9)
    found = embens.diagnose(ensemble, *task(), optimizer=made).forecast
    assert found == forecast(ensemble, *task(), lr=0.02)
