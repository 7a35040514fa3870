"""From one run to an ensemble: which networks are kept, what is drawn, and going on again."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from training import problem

import embens
from embens.training.snapshots import SCHEDULES, Course, rate


def normed() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers = nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3)
        return nn.Sequential(*layers)


def run(schedule, net=None, **options):
    options = {"members": 3, "epochs": 6, "batch_size": 16, "lr": 0.05} | options
    net = problem.reference() if net is None else net
    return embens.snapshots(net, problem.data(), schedule=schedule, **options)


class Watch:
    """A callback that writes down every step's rate and weights."""

    def __init__(self):
        self.rates, self.weights, self.epochs = [], [], []

    def on_step(self, ensemble, record):
        self.rates.append(record["modulation_lr"])
        self.weights.append(problem.weights(ensemble))

    def on_epoch(self, ensemble, record):
        self.epochs.append(problem.weights(ensemble))


@pytest.mark.parametrize("schedule", ["cosine", "triangular"])
def test_members_are_the_networks_at_the_lowest_rates_of_the_cycles(schedule):
    watch = Watch()
    ensemble = run(schedule, epochs=5, callbacks=[watch])  # 20 steps in 3 cycles: 7, 7, 6
    assert ensemble.members == 3
    at = {"cosine": [6, 13, 19], "triangular": [2, 9, 16]}[schedule]
    low = [
        t
        for t in range(20)
        if watch.rates[t] <= watch.rates[t - 1] * (t > 0) + 9 * (t == 0)
        and (t == 19 or watch.rates[t] <= watch.rates[t + 1] + 1e-9)
    ]
    assert set(at) <= set(low)
    for a, t in enumerate(at):
        mine = {name: stack[a : a + 1] for name, stack in ensemble.state_dict().items()}
        problem.assert_equal(mine, watch.weights[t])


def test_the_rates_are_those_of_the_papers():
    lr, steps, members = 0.2, 40, 4
    cycle = math.ceil(steps / members)
    for t in range(1, steps + 1):  # Huang et al. 2017, equation 2
        expected = lr / 2 * (math.cos(math.pi * ((t - 1) % cycle) / cycle) + 1)
        assert lr * rate(Course("cosine", steps, members), t - 1) == pytest.approx(expected)
    low = lr / 100
    for i in range(1, steps + 1):  # Garipov et al. 2018, section 4
        t = ((i - 1) % cycle + 1) / cycle
        if t <= 0.5:
            expected = (1 - 2 * t) * lr + 2 * t * low
        else:
            expected = (2 - 2 * t) * low + (2 * t - 1) * lr
        assert lr * rate(Course("triangular", steps, members), i - 1) == pytest.approx(expected)


def test_swag_members_are_draws_of_the_law_of_the_path():
    watch, net, members = Watch(), embens.networks.Linear(4, 3, bias_std=1.0), 400
    net.reset_parameters(torch.Generator().manual_seed(0))
    options = {"epochs": 6, "rank": 3, "members": members, "callbacks": [watch]}
    ensemble = run("swag", net, **options)
    assert watch.rates == [0.05] * 24
    flat = lambda s: torch.cat([t.flatten(1) for t in s.values()], 1).double()  # noqa: E731
    start = {f"network.module.{k}": v[None] for k, v in net.state_dict().items()}
    assert start.keys() == watch.epochs[0].keys()
    path = torch.cat([flat(start), *map(flat, watch.epochs)])
    means = torch.stack([path[: i + 1].mean(0) for i in range(len(path))])
    columns = (path - means)[-3:]
    law = (torch.diag(path.var(0, correction=0)) + columns.mT @ columns / 2) / 2
    drawn = flat(ensemble.state_dict())
    error = (law.diagonal() / members).sqrt()
    assert ((drawn.mean(0) - means[-1]).abs() < 4.5 * error).all()
    sizes = law.diagonal()[:, None] * law.diagonal()
    errors = ((sizes + law.square()) / members).sqrt()
    assert ((drawn.mT.cov() - law).abs() < 4.5 * errors).all()
    assert ((drawn.mT.cov() - torch.diag(law.diagonal())).abs() > 6 * errors).any()


def test_norm_layers_of_drawn_members_have_the_statistics_of_the_train_data():
    net = normed()
    ensemble = run("swag", net, batch_size=60)
    x, _ = problem.data()
    for a in range(3):
        member = ensemble.member(a)
        hidden = member[0](x)
        torch.testing.assert_close(member[1].running_mean, hidden.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(member[1].running_var, hidden.var(0), rtol=1e-4, atol=1e-5)
        assert member[1].momentum == 0.1
    assert ensemble.training == net.training


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("after", "every"), [(9, 3), (13, None)])
def test_a_run_that_was_interrupted_ends_bit_for_bit_as_one_that_was_not(
    schedule, after, every, tmp_path
):
    class Stop:
        def on_step(self, ensemble, record):
            if record["step"] == after:
                raise KeyboardInterrupt

    whole = run(schedule, normed())
    again = partial(run, schedule, normed(), checkpoint=tmp_path, every=every)
    with pytest.raises(KeyboardInterrupt):
        again(callbacks=[Stop()])
    problem.assert_equal(problem.weights(again()), problem.weights(whole))
    problem.assert_equal(problem.weights(again()), problem.weights(whole))  # from the last step
    with pytest.raises(ValueError, match="different run"):
        again(rank=4, members=3 if schedule == "swag" else 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_result_is_an_ensemble_like_any_other(schedule, tmp_path):
    net, (x, y) = normed(), problem.data()
    before = problem.weights(net)
    ensemble = run(schedule, net, seed=5).eval()
    problem.assert_equal(before, problem.weights(net))
    outputs = ensemble(x)
    assert outputs.std(0).min() > 0
    for a in range(3):
        torch.testing.assert_close(ensemble.member(a)(x), outputs[a])
    ensemble.save(tmp_path / "file")
    torch.testing.assert_close(embens.load(tmp_path / "file", net).eval()(x), outputs)
    torch.testing.assert_close(copy.deepcopy(ensemble)(x), outputs)
    assert embens.metrics.ensemble_accuracy(outputs, y) > 0.6
    same, other = run(schedule, net, seed=5), run(schedule, net, seed=6)
    problem.assert_equal(problem.weights(same), problem.weights(ensemble))
    assert not torch.equal(other.eval()(x), outputs)
    assert embens.select(ensemble, (x, y), size=2).members <= 2
    with pytest.raises(ValueError, match="draws of their own"):
        embens.theory.kernels(ensemble, x)


def test_tied_weights_stay_tied_in_drawn_members():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(torch.tanh(self.first(x)))[:, :3]

    state = run("swag", Tied()).state_dict()
    first, second = (state[k] for k in state if k.endswith("weight"))
    assert torch.equal(first, second)
    assert not torch.equal(first[0], first[1])


def test_loaders_and_several_inputs_are_taken():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = normed()

        def forward(self, x, z):
            return self.layers(x + z)

    x, y = problem.data()
    loader = DataLoader(TensorDataset(x, 0 * x, y), 16)
    assert embens.snapshots(Two(), loader, 2, epochs=2, schedule="swag")(x, x).shape[0] == 2


def test_what_can_not_be_is_refused_before_anything_is_spent():
    with pytest.raises(ValueError, match="at least 7, as 7 members"):
        run("cosine", members=7)
    with pytest.raises(ValueError, match="two deviations"):
        run("swag", epochs=1)
    with pytest.raises(ValueError, match="at least two steps"):
        run("triangular", members=6, batch_size=60)
    with pytest.raises(ValueError, match="did you mean 'cosine'"):
        run("cosin")
    with pytest.raises(ValueError, match="rank must be at least 2"):
        run("swag", rank=1)
    with pytest.raises(TypeError, match="did you mean 'epochs'"):
        embens.snapshots(nn.Linear(4, 3), problem.data(), epoch=3)

    class Stream(IterableDataset):
        def __iter__(self):
            yield from zip(*problem.data(), strict=True)

    with pytest.raises(ValueError, match="does not know its length"):
        embens.snapshots(nn.Linear(4, 3), DataLoader(Stream(), 16), 2, epochs=4)
