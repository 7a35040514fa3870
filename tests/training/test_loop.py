"""``fit``: its steps, its arguments, and every family."""

from __future__ import annotations

import inspect
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import optim
from torch.utils.data import DataLoader, TensorDataset
from training import problem

import embens
from embens import laws
from embens.training import KeepLast, fit, linear_decay
from embens.training.batches import batches_of
from embens.training.hints import REMOVED_ARGUMENTS


def bare_loop(ensemble, optimizer, x, y, *, epochs, batch_size):
    """Train as ``fit`` does, in the same order."""
    scheduler = linear_decay(epochs)(optimizer)
    for epoch in range(epochs):
        order = batches_of((x, y), batch_size, seed=0).order(epoch)
        for index in order.split(batch_size):
            optimizer.zero_grad()
            embens.objective(ensemble(x[index]), y[index]).backward()
            optimizer.step()
        scheduler.step()


def test_fit_has_the_promised_arguments():
    names = list(inspect.signature(fit).parameters)
    assert names == [
        "ensemble",
        "train",
        "validation",
        "epochs",
        "batch_size",
        "lr",
        "gamma",
        "optimizer",
        "scheduler",
        "criterion",
        "seed",
        "callbacks",
        "progress",
    ]


def test_fit_is_the_plain_loop():
    x, y = problem.data()
    fitted, expected = problem.ensemble(), problem.ensemble()
    fit(fitted, (x, y), epochs=4, batch_size=16, lr=0.05, gamma=2)
    groups = expected.parameter_groups(lr=0.05, gamma=2)
    optimizer = torch.optim.SGD(groups, momentum=0.9, fused=True)
    bare_loop(expected, optimizer, x, y, epochs=4, batch_size=16)

    problem.assert_equal(problem.weights(fitted), problem.weights(expected))


def test_optimizer_sets_all_rates_and_decays():
    x, y = problem.data()
    ensemble, expected = problem.ensemble(), problem.ensemble()

    def make_optimizer(ensemble):
        groups = ensemble.parameter_groups(
            lr=0.05, modulation_lr=0.2, weight_decay=0.01, modulation_weight_decay=0.02, gamma=2
        )
        return torch.optim.AdamW(groups)

    fit(ensemble, (x, y), optimizer=make_optimizer(ensemble), epochs=4, batch_size=16)
    bare_loop(expected, make_optimizer(expected), x, y, epochs=4, batch_size=16)

    problem.assert_equal(problem.weights(ensemble), problem.weights(expected))


def generator():
    return torch.Generator().manual_seed(0)


FAMILIES = {
    "independent regime": lambda net: embens.batch_ensemble(net, 3, generator=generator()),
    "collective regime": lambda net: embens.batch_ensemble(net, 3, p=0.9, generator=generator()),
    "fixed masks": lambda net: embens.mc_dropout(net, 3, fresh=False, generator=generator()),
    "fresh masks": lambda net: embens.mc_dropout(net, 3, fresh=True),
    "last layer": lambda net: embens.last_layer_dropout(net, 3, generator=generator()),
    "masksembles": lambda net: embens.masksembles(net, 3, generator=generator()),
    "low rank": lambda net: embens.low_rank(net, 3, generator=generator()),
    "own last layer": lambda net: embens.embed(net, 3, own="last", generator=generator()),
    "independent networks": lambda net: embens.independent(net, 3, generator=generator()),
    "one network": lambda net: embens.independent(net, 1, generator=generator()),
    "the reference": lambda net: embens.embed(
        net, 1, pre=None, post=laws.Constant(), trainable=False
    ),
}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_every_family_is_trained_by_the_same_call(family):
    ensemble = family(problem.reference())
    history = fit(ensemble, problem.data(), epochs=15, batch_size=16, lr=0.05)
    losses = [row["loss"] for row in history.epochs]

    assert losses[-1] < 0.7 * losses[0]
    assert history.epochs[-1]["ensemble_accuracy"] > 0.8
    assert len(history.members) == 15 * ensemble.members


def test_independent_networks_train_as_each_would_alone():
    ensemble = embens.independent(problem.reference(), 2, generator=generator())
    networks = [ensemble.member(a) for a in range(2)]
    x, y = problem.data()

    fit(ensemble, (x, y), epochs=2, batch_size=16, lr=0.05)

    for a, network in enumerate(networks):
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
    next(iter(ensemble.children())).train()
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
        ({"epochs": -1}, ValueError, "epochs must be"),
        ({"batch_size": 0}, ValueError, "batch_size must be"),
        ({"seed": -1}, ValueError, "seed must be"),
        ({"lr": -1.0}, ValueError, "lr must be"),
        ({"optimiser": torch.optim.Adam}, TypeError, "'optimiser'; did you mean 'optimizer'"),
        ({"schedule": linear_decay(1)}, TypeError, "'schedule'; did you mean 'scheduler'"),
        (
            {"optimizer": lambda groups: None},
            TypeError,
            "optimizer",
        ),
        ({"optimizer": lambda g: torch.optim.LBFGS(g[0]["params"])}, TypeError, "need a closure"),
        ({"train": problem.data()[0]}, TypeError, "train: expected tensors"),
        ({"train": (problem.data()[0], problem.data()[1][:5])}, ValueError, "rows in all"),
        ({"train": problem}, TypeError, "train: expected tensors"),
        (
            {"train": SimpleNamespace(train=1, test=2)},
            TypeError,
            r"got SimpleNamespace\. Pass one part: data\.train",
        ),
        ({"train": DataLoader(torch.zeros(5, 4))}, TypeError, r"batches \(inputs, targets\)"),
        ({"train": TensorDataset(torch.zeros(0, 4), torch.zeros(0))}, ValueError, "at least one"),
    ],
)
def test_wrong_arguments_raise(arguments, error, message):
    arguments = {"train": problem.data(), "epochs": 1, **arguments}
    with pytest.raises(error, match=message):
        fit(problem.ensemble(), **arguments)


@pytest.mark.parametrize("name", REMOVED_ARGUMENTS)
def test_removed_arguments_name_their_replacement(name):
    with pytest.raises(TypeError, match=f"fit has no argument '{name}'\\. P") as error:
        fit(problem.ensemble(), problem.data(), epochs=1, **{name: 1})
    message = str(error.value)
    callbacks = re.findall(r"embens\.training\.(\w+)", message)
    for callback in callbacks:
        assert hasattr(embens.training, callback)
    if not callbacks and name != "each":
        assert "parameter_groups" in message


def test_a_network_that_is_no_ensemble_raises():
    with pytest.raises(TypeError, match=r"got Sequential\. Embed it first"):
        fit(problem.reference(), problem.data(), epochs=1)  # type: ignore[arg-type]


SCHEDULERS = {
    "default": (None, [0.01, 0.01, 0.01, 0.01 * 0.505]),
    "steps": (
        partial(optim.lr_scheduler.MultiStepLR, milestones=[1, 3], gamma=0.1),
        [0.01, 0.001, 0.001, 0.0001],
    ),
    "plateau": (
        partial(
            optim.lr_scheduler.ReduceLROnPlateau, patience=0, threshold=1e3, threshold_mode="abs"
        ),
        [1e-2, 1e-2, 1e-3, 1e-4],
    ),
}


@pytest.mark.parametrize(("scheduler", "rates"), SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_schedulers_of_torch_set_the_rates(scheduler, rates):
    data = problem.data()
    history = fit(problem.ensemble(), data, data, epochs=4, scheduler=scheduler)
    assert [row["lr"] for row in history.epochs] == pytest.approx(rates)


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
    groups = ensemble.parameter_groups(1e-3, weight_decay=0.0, gamma=gamma, optimizer=optim.Adam)
    options = {"epochs": 1, "batch_size": problem.ROWS, "optimizer": optim.Adam(groups)}

    row = fit(ensemble, problem.data(), **options).epochs[0]

    assert row["lr"] == pytest.approx(1e-3 * factor)
    assert row["modulation_lr"] == pytest.approx(1e-3)
    shared = {id(parameter) for parameter in ensemble.shared_parameters()}
    for name, parameter in ensemble.named_parameters():
        # Adam's first step has the size of the rate.
        rate = 1e-3 * factor if id(parameter) in shared else 1e-3
        step = (parameter.detach() - before[name]).abs().max().item()
        assert step == pytest.approx(rate, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam])
def test_gamma_changes_the_first_step_by_the_same_factor(kind):
    def first_step(gamma):
        ensemble = problem.ensemble(members=4)
        before = problem.weights(ensemble)
        make = partial(kind, weight_decay=0.0)
        groups = ensemble.parameter_groups(1e-3, weight_decay=0.0, gamma=gamma, optimizer=make)
        options = {"epochs": 1, "batch_size": problem.ROWS, "optimizer": make(groups)}
        fit(ensemble, problem.data(), **options)
        shared = {id(parameter) for parameter in ensemble.shared_parameters()}
        steps = []
        for name, parameter in ensemble.named_parameters():
            if id(parameter) in shared:
                steps.append((parameter.detach() - before[name]).flatten())
        return torch.cat(steps)

    natural = first_step(None)

    assert natural.any()
    torch.testing.assert_close(first_step(1), natural / 4, rtol=0.01, atol=1e-7)
    assert not first_step(0).any()


def test_with_adam_a_member_learns_at_most_at_the_pace_of_the_reference():
    """The first-order change of losses by the shared step, against that of members alone."""
    members, rate = 8, 1e-4
    generator = torch.Generator().manual_seed(1)
    net = embens.networks.mlp(16, 256, depth=2, outputs=1, generator=generator)
    ensemble = embens.batch_ensemble(net, members, generator=generator)
    x = torch.randn(4, 16, generator=generator)
    y = torch.randn(4, 1, generator=generator)
    (hidden,) = (p for p in ensemble.shared_parameters() if p.numel() == 256 * 256)
    gradients = []
    for a in range(members):
        loss = F.mse_loss(ensemble(x)[a], y)
        gradients.append(torch.autograd.grad(loss, hidden)[0])
    before = hidden.detach().clone()
    groups = ensemble.parameter_groups(rate, weight_decay=0.0, optimizer=optim.Adam)

    fit(ensemble, (x, y), epochs=1, criterion=F.mse_loss, optimizer=optim.Adam(groups))

    step = hidden.detach() - before
    change_together = sum(float((gradient * step).sum()) for gradient in gradients)
    # Adam's first step is the sign of the gradient.
    change_alone = sum(float(-rate * gradient.abs().sum()) for gradient in gradients)
    assert members**-0.5 < change_together / change_alone < 1


def test_function_that_makes_an_optimizer_is_used_with_its_options():
    calls = []

    def make_optimizer(groups):
        calls.append(groups)
        return optim.SGD(groups, momentum=0.5, nesterov=True)

    x, y = problem.data()
    ensemble = problem.ensemble()
    fit(ensemble, (x, y), epochs=1, batch_size=len(y), optimizer=make_optimizer, gamma=2)

    expected = problem.ensemble()
    optimizer = optim.SGD(expected.parameter_groups(gamma=2), momentum=0.5, nesterov=True)
    expected.objective(expected(x), y).backward()
    optimizer.step()
    assert len(calls[-1]) == 2  # groups of shared and of individual parameters
    for name, tensor in problem.weights(expected).items():
        torch.testing.assert_close(ensemble.state_dict()[name], tensor)


def test_the_default_criterion_is_chosen_once():
    """Multi-label targets: some batches look like probabilities."""
    x, _ = problem.data()
    y = (x[:, :3] > 0.5).float()
    y[:8] = F.one_hot(torch.arange(8) % 3, 3).float()
    first, second = problem.ensemble(), problem.ensemble()
    loader = DataLoader(TensorDataset(x, y), 4)
    history = fit(first, loader, epochs=2)
    expected = fit(second, loader, epochs=2, criterion=F.cross_entropy)

    assert history.epochs[-1]["loss"] == pytest.approx(expected.epochs[-1]["loss"])
    problem.assert_equal(problem.weights(first), problem.weights(second))


def test_validation_does_not_change_the_training():
    def run(validation):
        net = problem.reference(dropout=0.3)
        ensemble = embens.mc_dropout(net, 3, fresh=True, generator=generator())
        options = {"epochs": 3, "batch_size": 16, "callbacks": [KeepLast()]}
        fit(ensemble, problem.data(), validation, **options)
        return problem.weights(ensemble)

    problem.assert_equal(run(None), run(problem.data(20, 5)))


def test_regression_has_losses_and_no_accuracies():
    x, _ = problem.data()
    ensemble, data = problem.ensemble(outputs=1), (x, x.sum(1, keepdim=True))
    history = fit(ensemble, data, data, criterion=F.mse_loss, epochs=20, batch_size=16)
    assert history.epochs[-1]["loss"] < 0.5 * history.epochs[0]["loss"]
    assert "ensemble_accuracy" not in history.epochs[0]
    values = [row["metric"] for row in history.epochs]
    assert values == [row["validation_loss"] for row in history.epochs]
    assert history.best_epoch == values.index(min(values)) + 1
