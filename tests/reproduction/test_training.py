"""Training and scoring of an ensemble."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch

import embens
from embens import laws
from reproduction.grid.cells import Cell
from reproduction.grid.settings import PRESETS, build_reference, load_data
from reproduction.training import (
    batch_ensemble,
    disagreement,
    outputs_of,
    scaled_gamma,
    score,
    train,
)

SETTING = replace(PRESETS["quick"], epochs=3)


def cell_of(members, seed=0, setting=SETTING):
    return Cell(setting, {"members": members, "seed": seed})


def ensemble_of(setting=SETTING, family=batch_ensemble, members=2, **options):
    generator = torch.Generator().manual_seed(0)
    network = build_reference(setting, generator=generator)
    return family(network, members, generator=generator, **options)


@pytest.mark.parametrize("p", [0.0, 0.6])
def test_the_batch_ensemble_has_the_laws_of_the_paper(p):
    ensemble = batch_ensemble(build_reference(SETTING), 2, p=p)
    assert {site.law for site in ensemble.spec.sites} == {laws.Shifted(p)}


def test_training_is_sgd_with_the_schedule_of_the_paper():
    """One epoch against a loop written by hand, then the schedule."""
    setting = replace(SETTING, epochs=1, train=64)
    ensemble, expected = ensemble_of(setting, members=3), ensemble_of(setting, members=3)
    train(cell_of(3, 5, setting), ensemble, modulation_lr=0.01)
    inputs, targets = load_data(setting).train
    groups = expected.parameter_groups(lr=setting.lr, modulation_lr=0.01, gamma=3.0)
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    # All samples are in one batch, so their order does not matter.
    expected.objective(expected(inputs), targets).backward()
    optimizer.step()

    for parameter, other in zip(ensemble.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter, other)


def test_the_trace_has_losses_and_test_accuracies_of_the_last_weights():
    training = train(cell_of(2), ensemble_of(), test_each_epoch=True)
    assert [row["epoch"] for row in training.trace] == [1, 2, 3]
    assert all(math.isfinite(row["loss"]) for row in training.trace)
    accuracy = training.evaluate()["member_accuracy"]
    assert training.trace[-1]["member_accuracy"] == pytest.approx(accuracy)


def test_testing_each_epoch_does_not_change_the_weights():
    plain, tested = ensemble_of(), ensemble_of()
    train(cell_of(2), plain)
    train(cell_of(2), tested, test_each_epoch=True)
    for parameter, other in zip(plain.parameters(), tested.parameters(), strict=True):
        assert torch.equal(parameter, other)


def test_fresh_masks_depend_on_the_seed_and_not_on_the_global_generator():
    ensemble = ensemble_of(
        family=embens.mc_dropout, members=1, law=laws.Normal(1.0, 0.1), fresh=True
    )
    twin = copy.deepcopy(ensemble)
    before = torch.get_rng_state()
    train(cell_of(1, 1), ensemble)
    assert torch.equal(before, torch.get_rng_state())
    torch.randn(7)
    train(cell_of(1, 1), twin)
    for parameter, other in zip(ensemble.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter, other)


@pytest.mark.parametrize("network", ["mlp", "cnn"])
def test_a_run_that_diverges_is_marked_and_keeps_finite_weights(network):
    parametrization = "standard" if network == "mlp" else "xavier"
    setting = replace(
        SETTING,
        network=network,
        channels=(4, 4),
        train=128,
        test=64,
        parametrization=parametrization,
    )
    training = train(cell_of(2, 0, setting), ensemble_of(setting), lr=1e9)
    assert training.diverged
    assert all(parameter.isfinite().all() for parameter in training.ensemble.parameters())
    scores = training.evaluate()
    assert 0 <= scores["accuracy"] <= 1
    assert scores["diverged"] == 1.0


def test_outputs_that_overflow_become_zero():
    ensemble, inputs = ensemble_of(), load_data(SETTING).test.inputs
    before = outputs_of(ensemble, inputs)
    with torch.no_grad():
        next(iter(ensemble.individual_parameters()))[1] = math.inf
    after = outputs_of(ensemble, inputs)

    torch.testing.assert_close(after[0], before[0])
    assert (after[1] == 0).all()


def test_members_that_are_always_right_have_no_correlation():
    outputs = torch.tensor([[[1.0, 0.0]], [[2.0, 0.0]]])
    scores = score(outputs, torch.tensor([0]))
    assert math.isnan(scores["correlation"])
    assert scores["accuracy"] == scores["member_accuracy"] == 1.0


def test_one_member_does_not_disagree():
    assert disagreement(torch.zeros(1, 3, 2)) == 0.0


@pytest.mark.parametrize(("gamma", "expected"), [("M", 4.0), ("1", 1.0)])
def test_gamma_is_the_number_of_members_or_one(gamma, expected):
    assert scaled_gamma(Cell(SETTING, {"members": 4, "gamma": gamma})) == expected
