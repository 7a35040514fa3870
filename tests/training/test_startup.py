"""What ``fit`` makes of its arguments before the first step."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from training import problem

import embens
from embens import laws
from embens.training import Checkpoint, KeepBest, fit
from embens.training.startup import can_fuse


def test_an_optimizer_excludes_lr_and_gamma_and_needs_parameters_of_the_ensemble():
    ensemble, other = problem.ensemble(), problem.ensemble()
    optimizer = torch.optim.SGD(ensemble.parameter_groups())

    for options in ({"lr": 0.1}, {"gamma": 1}):
        with pytest.raises(ValueError, match="leave out lr= and gamma="):
            fit(ensemble, problem.data(), epochs=1, optimizer=optimizer, **options)
    with pytest.raises(ValueError, match="no parameter of this ensemble"):
        fit(other, problem.data(), epochs=1, optimizer=optimizer)


def test_an_ensemble_without_values_is_refused():
    with torch.device("meta"):
        reference = problem.reference()
    with pytest.raises(
        ValueError, match=r"fit needs values, but 'reference\.0\.weight' is on the meta device"
    ):
        fit(embens.batch_ensemble(reference, 2), problem.data(), epochs=1)


class Counting(nn.Sequential):
    """A network with a state that is no tensor."""

    def get_extra_state(self):
        return {"passes": 3}

    def set_extra_state(self, state):
        self.passes = state["passes"]


def test_a_state_that_is_no_tensor_is_kept_but_not_in_checkpoints(tmp_path):
    ensemble = embens.batch_ensemble(Counting(problem.reference()), 2)
    fit(ensemble, problem.data(), problem.data(20), epochs=2, callbacks=[KeepBest()])
    assert ensemble.reference.passes == 3
    with pytest.raises(TypeError, match=r"'reference\._extra_state' is a dict, and a file holds"):
        fit(ensemble, problem.data(), epochs=1, callbacks=[Checkpoint(tmp_path)])


def test_updates_are_fused_only_where_the_kernel_is_correct():
    def fused(reference):
        return can_fuse(embens.embed(reference, 2, pre=None, post=laws.Rademacher(), sites="all"))

    assert fused(nn.Linear(4, 3))
    strided = nn.Linear(4, 3)
    strided.weight = nn.Parameter(torch.randn(4, 3).t())
    assert not fused(nn.Sequential(strided))
    assert not fused(nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"criterion": "mse"}, "criterion must be a function"),
        ({"criterion": nn.CrossEntropyLoss}, "criterion must be a function"),
        ({"scheduler": "cosine"}, "scheduler must be a function from the optimizer"),
        ({"scheduler": CosineAnnealingLR}, r"'T_max'\)\. Pass .* functools\.partial\(Cosine"),
    ],
)
def test_names_and_classes_in_place_of_functions_raise(arguments, message):
    with pytest.raises(TypeError, match=message):
        fit(problem.ensemble(), problem.data(), epochs=1, **arguments)
