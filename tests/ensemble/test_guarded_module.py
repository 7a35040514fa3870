"""Tools for plain networks raise errors that name what to use instead."""

import inspect

import pytest
import torch
from torch import nn

import embens


@pytest.fixture
def ensemble() -> embens.EmbeddedEnsemble:
    return embens.batch_ensemble(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), 3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_refused_with_another_way(ensemble):
    with pytest.raises(TypeError, match=r"torch\.jit\.script cannot.*torch\.export"):
        torch.jit.script(ensemble)


def test_the_trainer_of_transformers_is_refused_with_another_way(ensemble):
    with pytest.raises(TypeError, match=r"EnsembleTrainer.*or\s+embens\.fit"):
        _ = ensemble.accepts_loss_kwargs


def test_tools_that_read_all_attributes_do_not_meet_the_refusal_of_trainer(ensemble):
    assert "accepts_loss_kwargs" not in dict(inspect.getmembers(ensemble))
