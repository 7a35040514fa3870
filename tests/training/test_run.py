"""The state of a run: divergence, and what callbacks can read."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from training import problem

import embens
from embens.training import Callback, Checkpoint, Divergence, fit, linear_decay


def test_divergence_restores_the_last_good_weights_and_suggests_a_fix():
    x, y = problem.data()
    ensemble, expected = problem.ensemble(), problem.ensemble()
    calls = []

    def exploding(outputs, target):
        if outputs.requires_grad:
            calls.append(1)
        exploded = len(calls) > 3 * 4 * 2 + 1  # 3 members, 4 steps, 2 epochs
        return F.cross_entropy(outputs, target) * (math.inf if exploded else 1)

    def member_by_member(outputs, target):
        return F.cross_entropy(outputs, target)

    settings = {"batch_size": 16, "scheduler": linear_decay(5, hold=1.0)}
    fit(expected, (x, y), epochs=2, criterion=member_by_member, **settings)
    message = r"epoch 3 at step 1: the loss is inf.*lower lr.*gamma.*ClipGradients"
    with pytest.raises(Divergence, match=message) as error:
        fit(ensemble, (x, y), epochs=5, criterion=exploding, **settings)
    assert "weights from after epoch 2" in str(error.value)
    assert len(error.value.history.epochs) == 2
    problem.assert_equal(problem.weights(ensemble), problem.weights(expected))


def test_a_rate_that_is_far_too_high_leaves_finite_weights_and_no_checkpoint(tmp_path):
    ensemble = problem.ensemble()
    before = problem.weights(ensemble)
    options = {"epochs": 3, "lr": 1e12, "batch_size": 16, "callbacks": [Checkpoint(tmp_path)]}

    with pytest.raises(Divergence, match="diverged in epoch 1"):
        fit(ensemble, problem.data(), **options)
    problem.assert_equal(problem.weights(ensemble), before)
    assert not list(tmp_path.iterdir())


def test_an_error_after_a_loss_that_is_not_finite_is_a_divergence():
    calls = []

    def raising(outputs, target):
        calls.append(1)
        if len(calls) > 6:
            raise RuntimeError("all elements should be between 0 and 1")
        return F.cross_entropy(outputs, target) * (math.inf if len(calls) > 3 else 1)

    with pytest.raises(Divergence, match="epoch 1 at step 2: the loss is inf"):
        fit(problem.ensemble(), problem.data(), epochs=1, batch_size=4, criterion=raising)


def test_large_finite_weights_are_no_divergence():
    ensemble = problem.ensemble()
    with torch.no_grad():
        next(iter(ensemble.shared_parameters())).fill_(1e25)

    def zero(outputs, target):
        return 0.0 * torch.nan_to_num(outputs, posinf=0.0, neginf=0.0).clamp(-1, 1).sum()

    optimizer = torch.optim.SGD(ensemble.parameter_groups(weight_decay=0.0))
    history = fit(ensemble, problem.data(), epochs=1, criterion=zero, optimizer=optimizer)
    assert len(history.epochs) == 1


class StopAfter(Callback):
    def __init__(self, steps):
        self.steps = steps

    def on_step(self, run):
        if run.steps == self.steps:
            run.stop("enough")
            run.stop("a later reason")


def test_a_callback_can_stop_the_run_within_an_epoch():
    recorder = problem.Recorder()
    callbacks = [StopAfter(6), recorder]
    history = fit(problem.ensemble(), problem.data(), epochs=9, batch_size=16, callbacks=callbacks)

    assert history.stopped == "enough"
    assert len(history.epochs) == 2
    assert recorder.steps[-1] == (1, 2, 6)


def test_rates_of_groups_that_do_not_exist_are_nan():
    import embens

    ensemble = embens.mc_dropout(problem.reference(), 3)
    history = fit(ensemble, problem.data(), epochs=1)
    assert history.epochs[0]["lr"] > 0
    assert math.isnan(history.epochs[0]["modulation_lr"])


def test_divergence_in_the_first_epoch_restores_buffers_that_members_have_separately():
    generator = torch.Generator().manual_seed(1)
    ensemble = embens.batch_ensemble(problem.Remembering(), 3, generator=generator)
    before = problem.weights(ensemble)

    def exploding(outputs, target):
        return F.cross_entropy(outputs, target) * math.inf

    with pytest.raises(Divergence, match="diverged in epoch 1"):
        fit(ensemble, problem.data(), epochs=1, criterion=exploding)
    after = ensemble.state_dict()
    assert torch.equal(after["individual.mean"], before["reference.mean"].expand(3, -1))
    assert torch.equal(after["reference.first.weight"], before["reference.first.weight"])
