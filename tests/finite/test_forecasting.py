"""Forecasts: what they promise, what they need, and where their coefficients come from."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import embens
from embens import laws, networks
from embens.finite import forecasting
from embens.finite.forecasting import Probe, carry, forecast, likeness

ROOT = Path(__file__).parents[2]
ALONE = {
    "accuracy": 0.65,
    "nll": 1.0,
    "train_nll": 0.9,
    "early": 0.5,
    "correlation": 0.5,
    "alike": 0.6,
    "disagreement": 0.3,
    "more": 0.04,
}
PROBE = Probe(
    8, 10, 1000, 30.0, 0.08, 0.0, 1.0, 32.0, 0.0, True, mine=ALONE | {"accuracy": 0.63}, alone=ALONE
)
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

    def test_takes_few_of_the_steps(self):
        probe = forecast(mlp(), *task(1000), epochs=40, batch_size=32).probe
        assert probe.steps == 40 * 32
        counted = probe.done * (8 + forecasting.SEPARATE) / 8 / forecasting.SMALLER
        assert counted <= 1.1 * forecasting.COST

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
            lambda net, members, generator: embens.mc_dropout(
                net, members, fresh=True, generator=generator
            ),
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
            ({"target": torch.randn(200)}, TypeError, r"whole numbers; got Tensor torch.float32"),
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

    def test_notes_a_rate_at_which_training_diverges(self):
        found = forecast(embens.batch_ensemble(mlp(), 8), *task(), epochs=60, lr=1e4)
        assert "diverged" in found.notes[0]
        assert found.notes[0] in str(found)


class TestCarry:
    def test_more_members_gain_more_and_always_less_more(self):
        gains = [carry(PROBE, members).gain.value for members in (1, 2, 4, 8, 16)]
        steps = [b - a for a, b in itertools.pairwise(gains)]
        assert all(step > 0 for step in steps)
        assert steps == sorted(steps, reverse=True)
        losses = [carry(PROBE, members).nll.value for members in (1, 2, 4, 8, 16)]
        assert losses == sorted(losses, reverse=True)

    def test_a_gain_is_the_difference_of_accuracies(self):
        found = carry(PROBE, 8)
        gain = found.accuracy.value - found.reference_accuracy.value
        assert found.gain.value == pytest.approx(gain)
        over = found.accuracy.value - found.separate_accuracy.value
        assert found.gain_over_separate.value == pytest.approx(over)


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


class TestExperience:
    def known(self, noise: float):
        x = torch.linspace(-3, 3, 30, dtype=torch.float64)[:, None]
        return forecasting.Experience(x, x.sin(), 1.0, noise), x

    def test_without_noise_it_goes_through_what_it_knows(self):
        known, x = self.known(1e-6)
        means, _ = known.expect(x[::7])
        torch.testing.assert_close(means, x[::7].sin(), atol=1e-3, rtol=0)
        between = torch.tensor([[0.31]], dtype=torch.float64)
        assert known.expect(between)[0].item() == pytest.approx(between.sin().item(), abs=0.02)

    def test_is_less_sure_of_what_lies_apart(self):
        known, x = self.known(0.1)
        _, near = known.expect(x[15:16])
        _, far = known.expect(torch.full((1, 1), 9.0, dtype=torch.float64))
        assert far > near >= 0.1**0.5 * known.scale

    def test_is_that_of_the_development(self, monkeypatch):
        if not (ROOT / "benchmarks" / "results" / "forecast" / "development.jsonl").exists():
            pytest.skip("benchmarks are not part of a package")
        monkeypatch.syspath_prepend(str(ROOT))
        from benchmarks import forecast as benchmark

        stored = json.loads(forecasting.EXPERIENCE.read_text())
        found = benchmark.known(ROOT / "benchmarks" / "results" / "forecast" / "development.jsonl")
        assert json.loads(json.dumps(found)) == stored


def test_beside_an_adapted_ensemble_stands_the_fine_tuning_of_its_network():
    torch.manual_seed(0)
    x = torch.randn(300, 6)
    y = (x[:, :3]).argmax(1)
    net = embens.networks.mlp(6, 32, 2, 3, generator=torch.Generator().manual_seed(0))
    one = embens.join([net])
    embens.fit(one, (x, y), epochs=30, lr=0.1, progress=False)
    trained, plan = one.member(0), {"epochs": 5, "lr": 1e-4}
    reached = float((trained(x).argmax(1) == y).float().mean())
    for by in ("low_rank", "modulations"):
        ensemble = embens.adapt(trained, 4, by=by, head="copied")
        found = embens.forecast(ensemble, x, y, **plan)
        assert found.probe.alone["accuracy"] > reached - 0.2  # it begins as a member
        assert any("fine-tuned" in note for note in found.notes)
    scratch = embens.forecast(embens.batch_ensemble(trained, 4), x, y, **plan)
    assert scratch.probe.alone["accuracy"] < reached - 0.3
    assert scratch.notes == ()
