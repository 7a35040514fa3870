"""What determines a run, how it is written down, and what gamma means to its steps."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from training import problem

import embens
from embens import laws, metrics
from embens.training import fit, linear_decay
from embens.training.settings import Settings, describe


def test_metrics_have_their_directions():
    train, validation = problem.data(), problem.data(40, 9)
    for metric, best in (("accuracy", max), ("loss", min), (metrics.nll, min)):
        history = fit(problem.ensemble(), train, validation, epochs=5, lr=0.1, metric=metric)
        values = [row["metric"] for row in history.epochs]
        assert history.best_epoch == values.index(best(values)) + 1
    with pytest.raises(ValueError, match="pass maximise=True or False"):
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
        lr=0.1,
        modulation_lr=None,
        weight_decay=0.0,
        modulation_weight_decay=0.0,
        gamma=None,
        optimizer=None,
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


def test_the_paper_s_schedule_is_constant_then_linear():
    optimizer = optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.01)
    scheduler = linear_decay(1000)(optimizer)
    found = []
    for _ in range(1000):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert found[:501] == [0.01] * 501
    assert found[750] == pytest.approx((0.01 + 1e-4) / 2)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)
    with pytest.raises(ValueError, match="fractions from 0 to 1"):
        linear_decay(10, hold=2)


@pytest.mark.parametrize(
    ("gamma", "p", "factor"),
    [
        (None, 0.0, 1.0),
        (4, 0.0, 1.0),
        (1, 0.0, 0.25),
        (None, 1.0, 1.0),
        (2, 1.0, 2.0),
        (0, 0.0, 0.0),
    ],
)
def test_with_adam_gamma_is_in_the_shared_rate(gamma, p, factor):
    ensemble = problem.ensemble(members=4, p=p)
    before = problem.weights(ensemble)
    run = partial(fit, ensemble, problem.data(), epochs=1, lr=1e-3, weight_decay=0.0, gamma=gamma)
    row = run(optimizer=optim.Adam, batch_size=problem.ROWS).epochs[0]
    assert row["lr"] == pytest.approx(1e-3 * factor)
    assert row["modulation_lr"] == pytest.approx(1e-3)
    shared = {id(p) for p in ensemble.shared_parameters()}
    for key, parameter in ensemble.named_parameters():  # Adam's first step has the size of the rate
        step = (parameter.detach() - before[key]).abs().max().item()
        expected = 1e-3 * factor if id(parameter) in shared else 1e-3
        assert step == pytest.approx(expected, rel=1e-3, abs=1e-9)


def test_with_adam_and_sgd_gamma_changes_the_first_step_by_the_same_factor():
    def step(optimizer, gamma):
        ensemble = problem.ensemble(members=4)
        before = [p.detach().clone() for p in ensemble.shared_parameters()]
        options = {"optimizer": optimizer, "gamma": gamma, "weight_decay": 0.0, "lr": 1e-3}
        fit(ensemble, problem.data(), epochs=1, batch_size=problem.ROWS, **options)
        after = ensemble.shared_parameters()
        return torch.cat([(p - q).flatten() for p, q in zip(after, before, strict=True)])

    for optimizer in (optim.SGD, optim.Adam):
        natural = step(optimizer, None)
        torch.testing.assert_close(step(optimizer, 1), natural / 4, rtol=0.01, atol=1e-7)
        assert not step(optimizer, 0).any()


def test_with_adam_a_member_learns_at_most_at_the_pace_of_the_reference():
    """The first-order change of losses by the shared step, against that of members alone."""
    members, rate = 8, 1e-4
    generator = torch.Generator().manual_seed(1)
    net = embens.networks.mlp(16, 256, depth=2, outputs=1, generator=generator)
    ensemble = embens.batch_ensemble(net, members, generator=generator)
    x, y = (torch.randn(4, size, generator=generator) for size in (16, 1))
    (hidden,) = (p for p in ensemble.shared_parameters() if p.numel() == 256 * 256)
    losses = [F.mse_loss(ensemble(x)[a], y) for a in range(members)]
    own = [torch.autograd.grad(loss, hidden)[0] for loss in losses]
    before = hidden.detach().clone()
    options = {"criterion": F.mse_loss, "optimizer": optim.Adam, "weight_decay": 0.0, "lr": rate}
    fit(ensemble, (x, y), epochs=1, **options)
    together = sum(float((gradient * (hidden.detach() - before)).sum()) for gradient in own)
    alone = sum(float(-rate * g.abs().sum()) for g in own)  # Adam's first step is the sign
    assert members**-0.5 < together / alone < 1


def test_an_optimizer_of_one_s_own_is_used_with_its_options():
    seen = []

    def factory(groups):
        seen.append(groups)
        return optim.SGD(groups, momentum=0.5, nesterov=True)

    ensemble, expected = problem.ensemble(), problem.ensemble()
    x, y = problem.data()
    fit(ensemble, (x, y), epochs=1, batch_size=len(y), optimizer=factory, gamma=2)
    assert len(seen[-1]) == 2
    optimizer = optim.SGD(expected.parameter_groups(gamma=2), momentum=0.5, nesterov=True)
    expected.objective(expected(x), y).backward()
    optimizer.step()
    for key, tensor in problem.weights(expected).items():
        torch.testing.assert_close(ensemble.state_dict()[key], tensor)
