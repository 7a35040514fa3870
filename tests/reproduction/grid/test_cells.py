"""Experiments by name, what their cells have in common, and training as the paper does it."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace

import pytest
import torch

import embens
from embens import laws
from reproduction.figures import NAMES
from reproduction.grid import cells as contract
from reproduction.training import batch_ensemble, run, score, train
from reproduction.grid.settings import PRESETS, load_data, reference

QUICK = PRESETS["quick"]


def cell_of(width, members, seed=0, setting=QUICK):
    return Cell(setting, {"width": width, "members": members, "seed": seed})


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_an_experiment(name):
    words = describe(load_experiment(name).__doc__)
    assert all(words.values())
    assert not set("`:") & set(words["about"].replace(": ", ""))  # plain text, for a page


def test_the_ensemble_of_the_paper_has_the_laws_of_the_paper():
    network = reference(QUICK)
    for ensemble, p in (
        (batch_ensemble(network, 2), 0.0),
        (batch_ensemble(network, 2, p=0.6), 0.6),
    ):
        assert {site.law for site in ensemble.plan.sites} == {laws.Shifted(p)}
    for name in set(NAMES) - {"laws"}:  # whatever the library's default is
        assert load_experiment(name).__dict__.get("batch_ensemble") in (None, batch_ensemble)


def test_a_sweep_has_a_cell_for_each_combination():
    cells = sweep(width=(0.5, 1.0), members={"quick": (1, 2)})(QUICK)
    assert [(c["width"], c["members"]) for c in cells] == [(0.5, 1), (0.5, 2), (1.0, 1), (1.0, 2)]
    assert sweep(width=1.0, members=2)(QUICK) == [cell_of(1.0, 2)]
    assert cells[0].with_values(seed=3).values == {"width": 0.5, "members": 1, "seed": 3}


def test_a_cell_says_what_it_has_where_something_else_is_read():
    with pytest.raises(AttributeError, match=r"gamma: the cell has .*'width', 'members', 'seed'"):
        print(cell_of(1.0, 2).gamma)
    assert copy.deepcopy(cell_of(1.0, 2)) == pickle.loads(pickle.dumps(cell_of(1.0, 2)))


def test_seeds_are_the_preset_s_or_those_asked_for():
    assert {c.seed for c in cells_of("widths", QUICK)} == set(range(5))
    assert {c.seed for c in cells_of("gradients", QUICK)} == set(range(30))
    assert {c.seed for c in cells_of("widths", QUICK, [7, 8])} == {7, 8}


def test_a_shortened_cell_weighs_as_much_less_as_it_has_less_to_train():
    cell, weight = cell_of(1.0, 2), training_cost
    assert weight(cell) / weight(cell.shortened(epochs=2)) == QUICK.epochs / 2
    images = replace(cell, setting=replace(PRESETS["paper"], epochs=4))
    factor = weight(images) / weight(images.shortened(epochs=2, train=500))
    assert factor == pytest.approx(2 * 40_000 / 500)


def test_a_cell_draws_its_network_and_goes_on_from_there():
    network, generator = cell_of(2.0, 2, seed=5).build_reference()
    same = torch.Generator().manual_seed(5)
    expected = reference(QUICK, 2.0, generator=same)
    for mine, theirs in zip(network.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(generator.get_state(), same.get_state())


SETTING = replace(PRESETS["quick"], epochs=3)


def ensemble_of(setting=SETTING, make=embens.batch_ensemble, members=2, **options):
    generator = torch.Generator().manual_seed(0)
    network = reference(setting, generator=generator)
    return make(network, members, generator=generator, **options)


def test_it_is_fit_with_the_setting_s_arguments_and_gamma_m():
    ensemble, other = ensemble_of(members=3), ensemble_of(members=3)
    training = train(
        cell_of(1.0, 3, 5, SETTING), ensemble, modulation_lr=0.01, test_each_epoch=True
    )
    data = load_data(SETTING)
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
    train(cell_of(1.0, 1, 1, SETTING), ensemble)
    assert torch.equal(before, torch.get_rng_state())
    torch.randn(7)
    train(cell_of(1.0, 1, 1, SETTING), twin)
    for mine, theirs in zip(ensemble.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("network", ["mlp", "cnn"])
def test_a_run_that_diverges_is_marked_and_keeps_finite_weights(network):
    setting = replace(SETTING, network=network, channels=(4, 4), train=128, test=64)
    setting = replace(setting, parametrization="standard" if network == "mlp" else "xavier")
    training = train(cell_of(1.0, 2, 0, setting), ensemble_of(setting), lr=1e9)
    assert training.diverged
    assert all(p.isfinite().all() for p in training.ensemble.parameters())
    found = training.evaluate()
    assert 0 <= found["accuracy"] <= 1
    assert found["diverged"] == 1.0


def test_outputs_that_overflow_say_nothing():
    ensemble, inputs = ensemble_of(), load_data(SETTING).test.inputs
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
