"""``fit``: what it trains, on what data, and how it ends."""

from __future__ import annotations

import math
import random
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from training import problem

import embens
from embens import data, laws, metrics
from embens.training import Divergence, fit, linear_decay
from embens.training.batches import training_batches


class Pairs(Dataset):
    """A map-style data set that is no TensorDataset."""

    def __init__(self, x, y, noise=False):
        self.x, self.y, self.noise = x, y, noise

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        x = self.x[i]
        if self.noise:
            x = x + 0.1 * torch.randn(x.shape) + 0.1 * random.random()
        return x, self.y[i]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Pairs(*problem.data())[i] for i in range(problem.ROWS))


WHOLE = data.DataSet(
    data.Part(*problem.data()), None, data.Part(*problem.data()), classes=3, name="toy"
)


def bare_loop(ensemble, x, y, *, epochs, batch_size, lr=0.01, gamma=None, members=None, **kwargs):
    """Train as ``fit`` does by default, in the same order."""
    groups = ensemble.parameter_groups(lr, gamma=gamma, **kwargs)
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    scheduler = linear_decay(epochs)(optimizer)
    for epoch in range(epochs):
        order = training_batches((x, y), batch_size, seed=0).order(epoch)
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
    history = fit(ensemble, problem.data(), epochs=15, batch_size=16, lr=0.05)
    losses = [row["loss"] for row in history.epochs]
    assert losses[-1] < 0.7 * losses[0]
    assert history.epochs[-1]["ensemble_accuracy"] > 0.8
    assert len(history.members) == 15 * ensemble.members


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
            for index in training_batches((x, y), 16, seed=0).order(epoch).split(16):
                optimizer.zero_grad()
                F.cross_entropy(network(x[index]), y[index]).backward()
                optimizer.step()
            scheduler.step()
        torch.testing.assert_close(ensemble(x)[a], network(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x, y: TensorDataset(x, y),
        lambda x, y: Pairs(x, y),
        lambda x, y: [x, y],
        lambda x, y: data.Part(x, y),
    ],
    ids=["TensorDataset", "Dataset", "list", "Part"],
)
def test_data_in_any_form_gives_the_same_result(wrap):
    expected, found = problem.ensemble(), problem.ensemble()
    first = fit(expected, problem.data(), problem.data(30, 5), epochs=2, batch_size=16)
    second = fit(found, wrap(*problem.data()), wrap(*problem.data(30, 5)), epochs=2, batch_size=16)
    problem.assert_equal(problem.weights(expected), problem.weights(found))
    assert repr(problem.without_time(first)) == repr(problem.without_time(second))


def test_a_loader_is_used_as_it_is():
    x, y = problem.data()
    loader = DataLoader(TensorDataset(x, y), batch_size=20)
    ensemble, expected = problem.ensemble(), problem.ensemble()
    fit(ensemble, loader, DataLoader(TensorDataset(x, y), 7), epochs=2, keep="last")
    optimizer = torch.optim.SGD(expected.parameter_groups(), momentum=0.9)
    scheduler = linear_decay(2)(optimizer)
    for _ in range(2):
        for inputs, target in loader:
            optimizer.zero_grad()
            embens.objective(expected(inputs), target).backward()
            optimizer.step()
        scheduler.step()
    problem.assert_equal(problem.weights(ensemble), problem.weights(expected))


def test_shuffling_loaders_and_streams_are_deterministic():
    def run(data):
        ensemble = problem.ensemble()
        fit(ensemble, data, epochs=2, batch_size=16)
        return problem.weights(ensemble)

    def loader():
        return DataLoader(TensorDataset(*problem.data()), 16, shuffle=True)

    problem.assert_equal(run(loader()), run(loader()))
    problem.assert_equal(run(Stream()), run(Stream()))


def test_several_inputs_are_passed_to_the_reference():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(2, 8)
            self.head = nn.Linear(8, 3)

        def forward(self, a, b):
            return self.head(torch.relu(self.first(a) + self.second(b)))

    x, y = problem.data()
    ensemble = embens.batch_ensemble(Sum(), 2)
    history = fit(ensemble, (x, x[:, :2], y), epochs=3, lr=0.05, batch_size=16)
    assert history.epochs[-1]["loss"] < history.epochs[0]["loss"]


def test_a_seed_determines_the_run_and_the_global_generators_are_left_alone():
    def run(seed):
        ensemble = problem.ensemble(dropout=0.3)
        history = fit(ensemble, Pairs(*problem.data(), noise=True), epochs=2, seed=seed)
        return problem.weights(ensemble), problem.without_time(history)

    torch.manual_seed(11)
    random.seed(11)
    before = torch.get_rng_state(), random.getstate()
    first = run(3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    torch.manual_seed(12)
    random.seed(12)
    second, other = run(3), run(4)
    problem.assert_equal(first[0], second[0])
    assert repr(first[1]) == repr(second[1])
    assert any(
        not torch.equal(a, b)
        for a, b in zip(*(run[0].values() for run in (first, other)), strict=True)
    )


def test_validation_does_not_change_the_training():
    def run(validation):
        net = problem.reference(dropout=0.3)
        ensemble = embens.mc_dropout(net, 3, fresh=True, generator=torch.Generator().manual_seed(0))
        fit(ensemble, problem.data(), validation, epochs=3, batch_size=16, keep="last")
        return problem.weights(ensemble)

    problem.assert_equal(run(None), run(problem.data(20, 5)))


def test_the_mode_of_every_module_is_restored():
    ensemble = problem.ensemble(dropout=0.3)
    ensemble.eval()
    ensemble.network[0].train()
    modes = [m.training for m in ensemble.modules()]
    fit(ensemble, problem.data(), problem.data(20, 5), epochs=1)
    assert [m.training for m in ensemble.modules()] == modes


@pytest.mark.parametrize("batch", ["same", "own", "split"])
def test_batches_can_be_common_own_or_split(batch):
    ensemble = problem.ensemble()
    history = fit(ensemble, problem.data(), epochs=30, batch_size=16, lr=0.05, batch=batch)
    assert metrics.ensemble_accuracy(ensemble(problem.data()[0]), problem.data()[1]) > 0.8
    assert len(history.members) == 90
    assert history.members[-1]["accuracy"] > 0.6
    last = history.epochs[-1]
    assert math.isnan(last["correlation"]) == (batch != "same")
    assert math.isnan(last["ensemble_accuracy"]) == (batch != "same")


def test_own_batches_are_different_orders_of_the_same_rows():
    batches = training_batches(problem.data(), 16, seed=0, own=3)
    orders = batches.order(0)
    assert orders.shape == (3, problem.ROWS)
    assert all(torch.equal(o.sort().values, torch.arange(problem.ROWS)) for o in orders)
    assert not torch.equal(orders[0], orders[1])
    (x,), y, rows, total = next(batches.epoch(0))
    assert x.shape == (3, 16, 4)
    assert y.shape == (3, 16)
    assert (rows, total) == (16, 16)
    assert torch.equal(x[1], problem.data()[0][orders[1, :16]])


def test_members_can_be_backpropagated_in_chunks():
    whole, chunked = problem.ensemble(members=5), problem.ensemble(members=5)
    first = fit(whole, problem.data(), epochs=2, batch_size=16)
    second = fit(chunked, problem.data(), epochs=2, batch_size=16, chunk=2)
    for name, tensor in problem.weights(whole).items():
        torch.testing.assert_close(chunked.state_dict()[name], tensor, rtol=1e-4, atol=1e-6)
    for a, b in zip(first.members, second.members, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        assert a["accuracy"] == pytest.approx(b["accuracy"], abs=0.05)


def test_the_loss_of_the_mean_can_be_trained():
    ensemble = problem.ensemble()
    history = fit(ensemble, problem.data(), epochs=10, batch_size=16, lr=0.05, of="mean")
    assert history.epochs[-1]["loss"] < history.epochs[0]["loss"]


def test_regression_has_losses_and_no_accuracies():
    x, _ = problem.data()
    ensemble = problem.ensemble(outputs=1)
    history = fit(
        ensemble,
        (x, x.sum(1, keepdim=True)),
        (x, x.sum(1, keepdim=True)),
        criterion=F.mse_loss,
        epochs=20,
        batch_size=16,
    )
    assert history.epochs[-1]["loss"] < 0.5 * history.epochs[0]["loss"]
    assert math.isnan(history.epochs[0]["ensemble_accuracy"])
    assert history.epochs[0]["metric"] == history.epochs[0]["validation_loss"]
    values = [row["metric"] for row in history.epochs]
    assert history.best_epoch == values.index(min(values)) + 1


def test_the_best_weights_are_kept_and_patience_stops():
    train, validation = problem.data(), problem.data(40, 9)
    kept = []

    def metric(outputs, target):
        kept.append(outputs.clone())
        return [0.3, 0.7, 0.7, 0.1, 0.9, 0.2][len(kept) - 1]

    ensemble = problem.ensemble()
    history = fit(
        ensemble, train, validation, epochs=6, lr=0.05, metric=metric, maximise=True, patience=2
    )
    assert history.stopped == "patience"
    assert history.best_epoch == 2
    assert [row["metric"] for row in history.epochs] == [0.3, 0.7, 0.7, 0.1]
    torch.testing.assert_close(ensemble(validation[0]), kept[1])
    kept.clear()
    ensemble = problem.ensemble()
    history = fit(ensemble, train, validation, epochs=6, metric=metric, maximise=False, keep="last")
    assert (history.stopped, history.best_epoch) == ("epochs", 4)
    torch.testing.assert_close(ensemble(validation[0]), kept[5])


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


def test_divergence_says_what_to_try_and_leaves_the_last_good_weights():
    x, y = problem.data()
    ensemble = problem.ensemble()
    seen = []

    def exploding(outputs, target):
        if outputs.requires_grad:
            seen.append(1)
        return F.cross_entropy(outputs, target) * (math.inf if len(seen) > 3 * 4 * 2 + 1 else 1)

    expected = problem.ensemble()
    each = partial(fit, criterion=lambda outputs, target: F.cross_entropy(outputs, target))
    each(expected, (x, y), epochs=2, batch_size=16, scheduler=linear_decay(2, hold=1.0))
    with pytest.raises(
        Divergence, match=r"epoch 3 at step 1: the loss is inf.*lower lr.*gamma"
    ) as e:
        fit(
            ensemble,
            (x, y),
            epochs=5,
            batch_size=16,
            criterion=exploding,
            scheduler=linear_decay(5, hold=1.0),
        )
    assert "weights from after epoch 2" in str(e.value)
    assert len(e.value.history.epochs) == 2
    problem.assert_equal(problem.weights(ensemble), problem.weights(expected))


def test_a_rate_that_is_far_too_high_ends_in_finite_weights(tmp_path):
    ensemble = problem.ensemble()
    before = problem.weights(ensemble)
    with pytest.raises(Divergence, match="diverged in epoch 1"):
        fit(ensemble, problem.data(), epochs=3, lr=1e12, batch_size=16, checkpoint=tmp_path)
    problem.assert_equal(problem.weights(ensemble), before)
    assert all(torch.isfinite(v).all() for v in ensemble.state_dict().values())
    assert not list(tmp_path.iterdir())


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


def test_no_epochs_change_nothing():
    ensemble = problem.ensemble()
    before = problem.weights(ensemble)
    assert fit(ensemble, problem.data(), epochs=0).epochs == []
    problem.assert_equal(problem.weights(ensemble), before)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"epochs": -1}, ValueError, "epochs: expected a whole number of at least 0; got -1"),
        ({"batch_size": 0}, ValueError, "batch_size: expected a whole number of at least 1"),
        ({"every": 0}, ValueError, "every: expected a whole number of steps"),
        ({"patience": 3}, ValueError, "patience: early stopping needs validation data"),
        ({"keep": "bets"}, ValueError, "keep: unknown 'bets'; did you mean 'best'"),
        ({"batch": "spilt"}, ValueError, "batch: unknown 'spilt'; did you mean 'split'"),
        ({"chunk": 2, "batch": "own"}, ValueError, "Leave chunk out"),
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
        ({"train": (problem.data()[0], problem.data()[1][:5])}, ValueError, "as many inputs as"),
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


def test_progress_is_quiet_unless_asked_for(capsys, monkeypatch):
    fit(problem.ensemble(), problem.data(), epochs=2)
    assert capsys.readouterr() == ("", "")
    fit(problem.ensemble(), problem.data(), problem.data(), epochs=2, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(":")[0] for line in err.splitlines()] == ["epoch 1/2", "epoch 2/2"]
    assert "validation accuracy" in err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fit(problem.ensemble(), problem.data(), epochs=2)
    assert "epoch 2/2" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    fit(problem.ensemble(), problem.data(), epochs=2)
    assert "epoch 2/2" in capsys.readouterr().err
