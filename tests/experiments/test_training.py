"""Training as the paper does it, and what is measured afterwards."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch

import embens
from embens import laws
from embens.experiments.setting import PRESETS, data_set, reference
from embens.experiments.training import run, score, train

SETTING = replace(PRESETS["quick"], epochs=3)


def ensemble_of(setting=SETTING, make=embens.batch_ensemble, members=2, **options):
    generator = torch.Generator().manual_seed(0)
    network = reference(setting, generator=generator)
    return make(network, members, generator=generator, **options)


def test_it_is_fit_with_the_setting_s_arguments_and_gamma_m():
    ensemble, other = ensemble_of(members=3), ensemble_of(members=3)
    training = train(ensemble, SETTING, seed=5, modulation_lr=0.01, test_each_epoch=True)
    data = data_set(SETTING)
    history = embens.fit(
        other, tuple(data.train), tuple(data.test), epochs=3, batch_size=64, lr=SETTING.lr,
        modulation_lr=0.01, weight_decay=5e-4, gamma=3.0, keep="last", seed=5, progress=False,
    )  # fmt: skip
    for mine, theirs in zip(ensemble.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert [row["loss"] for row in training.trace] == [row["loss"] for row in history.epochs]
    accuracy = training.evaluate()["member_accuracy"]
    assert training.trace[-1]["member_accuracy"] == pytest.approx(accuracy)


def test_fresh_masks_depend_on_the_seed_alone_and_leave_the_global_generator_alone():
    ensemble = ensemble_of(make=embens.mc_dropout, members=1, law=laws.Normal(1.0, 0.1), fresh=True)
    twin = copy.deepcopy(ensemble)
    before = torch.get_rng_state()
    train(ensemble, SETTING, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    torch.randn(7)
    train(twin, SETTING, seed=1)
    for mine, theirs in zip(ensemble.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("network", ["mlp", "cnn"])
def test_a_run_that_diverges_is_marked_and_keeps_finite_weights(network):
    setting = replace(SETTING, network=network, channels=(4, 4), train=128, test=64)
    setting = replace(setting, parametrization="standard" if network == "mlp" else "xavier")
    training = train(ensemble_of(setting), setting, seed=0, lr=1e9)
    assert training.diverged
    assert all(p.isfinite().all() for p in training.ensemble.parameters())
    found = training.evaluate()
    assert 0 <= found["accuracy"] <= 1
    assert found["diverged"] == 1.0


def test_outputs_that_overflow_say_nothing():
    ensemble, inputs = ensemble_of(), data_set(SETTING).test.inputs
    before = run(ensemble, inputs)
    with torch.no_grad():
        next(ensemble.individual_parameters())[1] = math.inf
    after = run(ensemble, inputs)
    torch.testing.assert_close(after[0], before[0])
    assert (after[1] == 0).all()


def test_members_that_are_always_right_have_no_correlation():
    outputs = torch.tensor([[[1.0, 0.0]], [[2.0, 0.0]]])
    found = score(outputs, torch.tensor([0]))
    assert math.isnan(found["correlation"])
    assert found["accuracy"] == found["member_accuracy"] == 1.0
