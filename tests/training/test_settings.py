"""What determines a run, and how it is written down."""

from __future__ import annotations

import math
from dataclasses import fields
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training import problem

import embens
from embens import laws, metrics
from embens.training import fit
from embens.training.settings import Settings, describe


def test_metrics_have_their_directions():
    train, validation = problem.data(), problem.data(40, 9)
    for metric, best in (("accuracy", max), ("loss", min), (metrics.nll, min)):
        history = fit(problem.ensemble(), train, validation, epochs=5, lr=0.1, metric=metric)
        values = [row["metric"] for row in history.epochs]
        assert history.best_epoch == values.index(best(values)) + 1
    with pytest.raises(ValueError, match="pass maximise=True or maximise=False"):
        fit(problem.ensemble(), train, validation, epochs=1, metric=lambda o, t: 0.0)
    with pytest.raises(ValueError, match="metric: unknown 'acuracy'; did you mean 'accuracy'"):
        fit(problem.ensemble(), train, validation, epochs=1, metric="acuracy")


def test_any_torch_scheduler_is_used():
    def rates(scheduler, **kwargs):
        history = fit(problem.ensemble(), problem.data(), epochs=4, scheduler=scheduler, **kwargs)
        return [row["lr"] for row in history.epochs]

    schedulers = torch.optim.lr_scheduler
    assert rates(None) == pytest.approx([0.01, 0.01, 0.01, 0.01 * 0.505])
    step = partial(schedulers.MultiStepLR, milestones=[1, 3], gamma=0.1)
    assert rates(step) == pytest.approx([0.01, 0.001, 0.001, 0.0001])
    plateau = partial(schedulers.ReduceLROnPlateau, patience=0, threshold=1e3, threshold_mode="abs")
    assert rates(plateau, validation=problem.data()) == pytest.approx([1e-2, 1e-2, 1e-3, 1e-4])


def test_updates_are_fused_where_torch_does_it_right():
    """On the CPU its kernel takes any memory for contiguous, and refuses sparse gradients."""
    settings = Settings(
        **{field.name: None for field in fields(Settings)}
        | {"lr": 0.1, "weight_decay": 0.0, "modulation_weight_decay": 0.0}
    )

    def fused(reference):
        ensemble = embens.embed(reference, 2, pre=None, post=laws.Rademacher(), sites="all")
        return settings.make_optimizer(ensemble).param_groups[0]["fused"]

    assert fused(nn.Linear(4, 3))
    strided = nn.Linear(4, 3)
    strided.weight = nn.Parameter(torch.randn(4, 3).t())
    assert not fused(nn.Sequential(strided))
    assert not fused(nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3)))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (0.5, 0.5),
        (math.nan, "nan"),
        ((1, "a", [True]), [1, "a", [True]]),
        (torch.arange(2), [0, 1]),
        (torch.zeros(40, 40), [40, 40]),
        (F.mse_loss, "torch.nn.functional.mse_loss"),
        (
            partial(F.mse_loss, reduction="sum"),
            ["torch.nn.functional.mse_loss", [], [["reduction", "sum"]]],
        ),
        (nn.MSELoss(), ["MSELoss()"]),
        (problem, "module"),
    ],
)
def test_what_determines_a_run_is_written_down_as_json(value, expected):
    assert describe(value) == expected
