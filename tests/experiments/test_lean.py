"""The lean road makes the steps of ``embens.fit``."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import embens
from embens import laws, networks
from embens.experiments.lean import lean
from embens.experiments.setting import PRESETS, data_set, reference
from embens.experiments.training import evaluate, paper_rates, run, score, train
from embens.training.loop import fit
from embens.training.rates import linear_decay

SETTING = replace(PRESETS["quick"], epochs=3)


def make(family, network, generator):
    families = {
        "batch ensemble": lambda: embens.batch_ensemble(network, 3, generator=generator),
        "shifted": lambda: embens.batch_ensemble(network, 3, p=0.9, generator=generator),
        "everywhere": lambda: embens.batch_ensemble(network, 3, sites="all", generator=generator),
        "dropout": lambda: embens.mc_dropout(network, 3, generator=generator),
        "last layer": lambda: embens.last_layer_dropout(network, 3, generator=generator),
        "trainable last": lambda: embens.last_layer_dropout(
            network, 3, trainable=True, generator=generator
        ),
        "pre only": lambda: embens.embed(network, 3, post=None, generator=generator),
        "separate": lambda: embens.independent(network, 3, generator=generator),
        "one": lambda: embens.batch_ensemble(network, 1, generator=generator),
    }
    return families[family]()


FAMILIES = (
    *("batch ensemble", "shifted", "everywhere", "dropout", "last layer", "trainable last"),
    *("pre only", "separate", "one"),
)


@pytest.mark.parametrize("parametrization", ["standard", "ntk"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_lean_road_trains_as_fit_does(family, parametrization):
    generator = torch.Generator().manual_seed(0)
    bias = 0.1 if family in ("shifted", "separate") else 0.0
    network = networks.mlp(
        64, 12, 2, 10, weight_std=1.4, bias_std=bias, parametrization=parametrization,
        generator=generator,
    ).double()  # fmt: skip
    ensemble = make(family, network, generator)
    other = copy.deepcopy(ensemble)
    assert lean(ensemble) is not None
    data = data_set(SETTING).to(dtype=torch.float64)
    training = train(
        ensemble, SETTING, data, seed=5, gamma=2.0, lr=0.02, modulation_lr=0.05,
        test_each_epoch=True,
    )  # fmt: skip
    history = fit(
        other, tuple(data.train), tuple(data.test), epochs=3, batch_size=SETTING.batch_size,
        lr=0.02, modulation_lr=0.05, weight_decay=SETTING.weight_decay, gamma=2.0, keep="last",
        seed=5, progress=False,
    )  # fmt: skip
    for (name, mine), theirs in zip(ensemble.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11, msg=name)
    for row, record in zip(training.trace, history.epochs, strict=True):
        assert row["loss"] == pytest.approx(record["loss"], rel=1e-9)
        members = [m for m in history.members if m["epoch"] == row["epoch"]]
        accuracy = sum(m["validation_accuracy"] for m in members) / len(members)
        assert row["member_accuracy"] == pytest.approx(accuracy)
    torch.testing.assert_close(run(ensemble, data.test.inputs), other.eval()(data.test.inputs))


def test_rates_are_those_of_the_paper_s_schedule():
    for epochs in (1, 2, 7, 40):
        optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        factor = linear_decay(epochs)(optimiser).lr_lambdas[0]
        assert paper_rates(epochs) == pytest.approx([factor(e) for e in range(epochs)])


def test_fresh_masks_are_drawn_at_every_step_and_leave_the_global_generator_alone():
    generator = torch.Generator().manual_seed(0)
    network = reference(SETTING, generator=generator)
    ensemble = embens.mc_dropout(network, 1, law=laws.Normal(1.0, 0.1), fresh=True)
    twin = copy.deepcopy(ensemble)
    before = torch.get_rng_state()
    train(ensemble, SETTING, data_set(SETTING), seed=1)
    assert torch.equal(before, torch.get_rng_state())
    torch.randn(7)
    train(twin, SETTING, data_set(SETTING), seed=1)
    for mine, theirs in zip(ensemble.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    form = lean(ensemble)
    x = data_set(SETTING).test.inputs[:5]
    assert not torch.equal(form(x), form(x))


def test_what_is_no_perceptron_has_no_lean_form():
    images = embens.batch_ensemble(networks.cnn((2, 4), outputs=3), 2)
    normed = embens.batch_ensemble(
        nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2)), 2
    )
    assert lean(images) is None
    assert lean(normed) is None


@pytest.mark.parametrize("network", ["mlp", "cnn"])
def test_a_run_that_diverges_is_marked_and_keeps_finite_weights(network):
    setting = replace(SETTING, network=network, channels=(4, 4), train=128, test=64)
    setting = replace(setting, parametrization="standard" if network == "mlp" else "xavier")
    generator = torch.Generator().manual_seed(0)
    ensemble = embens.batch_ensemble(
        reference(setting, generator=generator), 2, generator=generator
    )
    data = data_set(setting)
    training = train(ensemble, setting, data, seed=0, lr=1e9)
    assert training.diverged
    assert all(p.isfinite().all() for p in ensemble.parameters())
    assert 0 <= evaluate(ensemble, data)["accuracy"] <= 1


def test_outputs_that_overflow_say_nothing():
    generator = torch.Generator().manual_seed(0)
    network = reference(SETTING, generator=generator)
    ensemble = embens.batch_ensemble(network, 2, generator=generator)
    inputs = data_set(SETTING).test.inputs
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


def test_the_data_are_read_once_for_settings_that_differ_in_training_alone():
    assert data_set(SETTING) is data_set(replace(SETTING, epochs=9, lr=1.0, preset="other"))
