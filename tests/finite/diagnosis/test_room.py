"""The room: its equation, its interval, and trained ensembles beyond it."""

from __future__ import annotations

import math

import pytest
import torch
from finite.diagnosed import X, Y, batch_ensemble, mlp, seeded
from torch import Tensor

import embens
from embens import laws, metrics, networks
from embens.finite import diagnose
from embens.finite.diagnosis.room import Room, room, room_of
from embens.theory.regime import Regime


def test_separate_networks_don_t_pull_and_have_room_for_any_number():
    report = diagnose(embens.independent(mlp(), 3, generator=seeded()), X, Y)
    assert report.regime == Regime.INDEPENDENT
    assert report.overlap == {}
    assert math.isinf(report.room)
    assert "share no parameters" in str(report)


@pytest.mark.parametrize("chance", [0.05, 0.2])
@pytest.mark.parametrize("systematic", [0.0, 1e-9, 0.002])
def test_the_room_solves_its_equation(chance, systematic):
    others = room_of(chance, systematic) - 1
    assert math.sqrt(others) * chance == pytest.approx(0.4 * (1 + others * systematic), rel=1e-6)


def test_the_tightest_layer_that_matters_limits_the_room():
    def gram(cosine: float, size: float) -> Tensor:
        return size * torch.tensor([[1.0, cosine], [cosine, 1.0]], dtype=torch.float64)

    found = room({"a": gram(0.1, 1), "b": gram(0.4, 0.5), "c": gram(1, 0.001)}, 0.0)
    assert (found.members, found.tightest) == (pytest.approx(2), "b")
    assert room({}, 0.0) == Room(math.inf, (math.inf, math.inf), None)


def test_the_interval_of_the_room_holds_what_many_members_tell():
    rooms = [diagnose(batch_ensemble(0, 16, width=32, seed=s), X, Y) for s in range(4)]
    truth = 4 / sum(1 / report.room for report in rooms)
    ends = [
        diagnose(batch_ensemble(0, 8, width=32, seed=seed), X, Y).room_interval
        for seed in range(12)
    ]
    assert sum(low <= truth <= high for low, high in ends) >= 5  # one standard error
    assert sum(truth / 4 < low < high < 4 * truth for low, high in ends) >= 5  # it says something
    few = diagnose(batch_ensemble(0, 2), X, Y)
    assert few.room_interval == (1.0, math.inf)
    assert "1 to any number" in str(few)


def test_the_room_grows_with_the_width():
    def mean_room(width: int) -> float:
        return sum(diagnose(batch_ensemble(0, 8, width=width, seed=s), X, Y).room for s in range(3))

    rooms = [mean_room(width) for width in (8, 32, 128)]
    assert rooms[0] < rooms[1] / 1.5 < rooms[2] / 3


def test_beyond_the_room_a_trained_ensemble_is_worse():
    pytest.importorskip("sklearn")
    digits = embens.data.digits().standardise().flatten()

    def made(width: int, members: int, seed: int) -> embens.EmbeddedEnsemble:
        generator = seeded(seed)
        reference = networks.mlp(
            64, width, 3, 10, weight_std=math.sqrt(2), parametrization="standard",
            generator=generator,
        )  # fmt: skip
        return embens.mc_dropout(reference, members, law=laws.Normal(), generator=generator)

    def accuracy(members: int) -> float:
        found = 0.0
        for seed in range(2):
            ensemble = made(8, members, seed)
            embens.fit(
                ensemble, tuple(digits.train), epochs=20, batch_size=64, lr=0.01, seed=seed,
                progress=False,
            )  # fmt: skip
            with torch.no_grad():
                outputs = ensemble.eval()(digits.test.inputs)
            found += metrics.ensemble_accuracy(outputs, digits.test.targets).item() / 2
        return found

    narrow, wide = (diagnose(made(w, 16, 0), *digits.train).room for w in (8, 64))
    assert 1.5 < narrow < 4.5
    assert wide > 8
    assert accuracy(round(narrow)) > accuracy(24) + 0.2
