"""``fit``: what it trains, on what data, and how it ends."""

from __future__ import annotations

import math
from functools import partial

import cases
import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from training import problem

import embens
from embens import data, laws, metrics
from embens.training import fit, linear_decay
from embens.training.batches import batches_of
from embens.training.loop import Settings, describe

WHOLE = data.DataSet(
    data.Part(*problem.data()), None, data.Part(*problem.data()), classes=3, name="toy"
)


def bare_loop(ensemble, x, y, *, epochs, batch_size, lr=0.01, gamma=None, members=None, **kwargs):
    """Train as ``fit`` does by default, in the same order."""
    groups = ensemble.parameter_groups(lr, gamma=gamma, **kwargs)
    optimizer = torch.optim.SGD(groups, momentum=0.9, fused=True)
    scheduler = linear_decay(epochs)(optimizer)
    for epoch in range(epochs):
        order = batches_of((x, y), batch_size, seed=0).order(epoch)
        for index in order.split(batch_size):
            optimizer.zero_grad()
            embens.objective(ensemble(x[index]), y[index]).backward()
            optimizer.step()
        scheduler.step()


def test_fit_is_the_plain_loop():
    x, y = problem.data()
    mine, theirs = problem.ensemble(), problem.ensemble()
    fit(mine, (x, y), epochs=4, batch_size=16, lr=0.05, modulation_lr=0.2, gamma=2)
    bare_loop(theirs, x, y, epochs=4, batch_size=16, lr=0.05, modulation_lr=0.2, gamma=2)
    problem.assert_equal(problem.weights(mine), problem.weights(theirs))


FAMILIES = {
    "independent regime": lambda: problem.ensemble(),
    "collective regime": lambda: problem.ensemble(p=0.9),
    "fixed masks": lambda: embens.mc_dropout(problem.reference(), 3),
    "fresh masks": lambda: embens.mc_dropout(problem.reference(), 3, fresh=True),
    "last layer": lambda: embens.last_layer_dropout(problem.reference(), 3),
    "independent networks": lambda: embens.independent(
        problem.reference(), 3, generator=torch.Generator().manual_seed(0)
    ),
    **{
        name: partial(lambda family: family(problem.reference(), 3), family)
        for name, family in (cases.FAMILIES | cases.STOCHASTIC).items()
    },
    "bayesian": lambda: cases.bayesian(
        problem.reference(), 3, generator=torch.Generator().manual_seed(0)
    ),
    "one network, drawn anew": lambda: embens.independent(
        problem.reference(), 1, generator=torch.Generator().manual_seed(0)
    ),
    "the reference itself": lambda: embens.embed(
        problem.reference(), 1, pre=None, post=laws.Constant(), trainable=False
    ),
}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_every_family_and_baseline_is_trained_by_the_same_call(family):
    ensemble = family()
    lr = 0.2 if ensemble.plan.family == "bayesian" else 0.05  # a penalty, and NTK's rates
    history = fit(ensemble, problem.data(), epochs=15, batch_size=16, lr=lr)
    losses = [row["loss"] for row in history.epochs]
    assert losses[-1] < 0.7 * losses[0]
    assert history.epochs[-1]["ensemble_accuracy"] > 0.8
    assert len(history.members) == 15 * ensemble.members


def mimo(mix=None, repetition=0.0):
    generator = torch.Generator().manual_seed(0)
    return embens.mimo(problem.reference(), 2, repetition, mix, generator=generator)


@pytest.mark.parametrize("mix", [None, "linear"])
@pytest.mark.parametrize("wrap", ["tensors", "loader"])
def test_networks_with_an_input_for_each_member_learn_on_rows_of_their_own(mix, wrap):
    x, y = problem.data(200)
    train = (x, y) if wrap == "tensors" else DataLoader(TensorDataset(x, y), 16)
    ensemble = mimo(mix)
    options = {"epochs": 30, "batch_size": 16, "lr": 0.05, "keep": "last"}
    history = fit(ensemble, train, problem.data(50, 3), **options)
    assert history.epochs[-1]["validation_ensemble_accuracy"] > 0.75
    again = mimo(mix)
    fit(again, train, problem.data(50, 3), **options)
    problem.assert_equal(problem.weights(ensemble), problem.weights(again))


def test_a_step_of_networks_with_an_input_for_each_member_is_that_of_the_loop():
    x, y = problem.data()
    mine, theirs = mimo(repetition=0.5), mimo(repetition=0.5)
    fit(mine, (x, y), epochs=2, batch_size=16, lr=0.05)
    groups = theirs.parameter_groups(0.05)
    optimizer = torch.optim.SGD(groups, momentum=0.9, fused=True)
    scheduler = linear_decay(2)(optimizer)
    for epoch in range(2):
        order = batches_of((x, y), 16, seed=0, own=2, repetition=0.5).order(epoch)
        for index in order.split(16, 1):
            optimizer.zero_grad()
            outputs = theirs(x[index], batch="own")
            embens.objective(outputs, y[index], batch="own").backward()
            optimizer.step()
        scheduler.step()
    problem.assert_equal(problem.weights(mine), problem.weights(theirs))
    with pytest.raises(ValueError, match="'split' has no meaning"):
        fit(mine, (x, y), epochs=1, batch="split")


def test_independent_networks_train_as_each_would_alone():
    generator = torch.Generator().manual_seed(0)
    ensemble = embens.independent(problem.reference(), 2, generator=generator)
    alone = [ensemble.member(a) for a in range(2)]
    x, y = problem.data()
    fit(ensemble, (x, y), epochs=2, batch_size=16, lr=0.05)
    for a, network in enumerate(alone):
        optimizer = torch.optim.SGD(network.parameters(), 0.05, 0.9, weight_decay=5e-4)
        scheduler = linear_decay(2)(optimizer)
        for epoch in range(2):
            for index in batches_of((x, y), 16, seed=0).order(epoch).split(16):
                optimizer.zero_grad()
                F.cross_entropy(network(x[index]), y[index]).backward()
                optimizer.step()
            scheduler.step()
        torch.testing.assert_close(ensemble(x)[a], network(x), rtol=1e-4, atol=1e-5)


def test_the_mode_of_every_module_is_restored():
    ensemble = problem.ensemble(dropout=0.3)
    ensemble.eval()
    ensemble.network[0].train()
    modes = [m.training for m in ensemble.modules()]
    fit(ensemble, problem.data(), problem.data(20, 5), epochs=1)
    assert [m.training for m in ensemble.modules()] == modes


def test_no_epochs_change_nothing():
    ensemble = problem.ensemble()
    before = problem.weights(ensemble)
    assert fit(ensemble, problem.data(), epochs=0).epochs == []
    problem.assert_equal(problem.weights(ensemble), before)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"epochs": -1}, ValueError, "epochs must be at least 0; got -1"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1"),
        ({"every": 0}, ValueError, "every must be at least 1"),
        ({"patience": 3}, ValueError, "patience: early stopping needs validation data"),
        ({"keep": "bets"}, ValueError, "keep: unknown 'bets'; did you mean 'best'"),
        ({"batch": "spilt"}, ValueError, "batch: unknown 'spilt'; did you mean 'split'"),
        ({"chunk": 2, "batch": "own"}, ValueError, "chunk= needs batch=.same."),
        ({"of": "mean", "batch": "own"}, ValueError, "of='mean' needs batch='same'"),
        ({"lr": -1.0}, ValueError, "lr must be finite and not negative"),
        ({"optimiser": torch.optim.Adam}, TypeError, "'optimiser'; did you mean 'optimizer'"),
        ({"schedule": linear_decay(1)}, TypeError, "'schedule'; did you mean 'scheduler'"),
        (
            {"optimizer": lambda groups: None},
            TypeError,
            "expected a function from parameter groups",
        ),
        ({"optimizer": lambda g: torch.optim.LBFGS(g[0]["params"])}, TypeError, "need a closure"),
        ({"train": problem.data()[0]}, TypeError, "train: expected tensors"),
        ({"train": (problem.data()[0], problem.data()[1][:5])}, ValueError, "as many rows in all"),
        ({"train": data}, TypeError, "train: expected tensors"),
        ({"train": WHOLE}, TypeError, r"got DataSet\. Pass one part: data\.train"),
        ({"train": DataLoader(torch.zeros(5, 4))}, TypeError, r"batches \(inputs, targets\)"),
        ({"train": TensorDataset(torch.zeros(0, 4), torch.zeros(0))}, ValueError, "at least one"),
    ],
)
def test_wrong_arguments_say_what_is_expected(arguments, error, message):
    arguments = {"train": problem.data(), "epochs": 1, **arguments}
    with pytest.raises(error, match=message):
        fit(problem.ensemble(), **arguments)


def test_what_is_no_ensemble_is_refused_with_a_hint():
    with pytest.raises(TypeError, match=r"got Sequential\. Embed it first"):
        fit(problem.reference(), problem.data(), epochs=1)  # type: ignore[arg-type]


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
