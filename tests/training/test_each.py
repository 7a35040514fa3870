"""Settings of each member's own: against members that were trained alone with these settings."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from training import problem

import embens
from embens import EachMember

MEMBERS = 3


def networks() -> embens.EmbeddedEnsemble:
    generator = torch.Generator().manual_seed(2)
    return embens.independent(problem.reference(), MEMBERS, generator=generator)


def fit(ensemble, train=None, **options):
    options = {"epochs": 3, "batch_size": 16, "lr": 0.05, "weight_decay": 0.01} | options
    return embens.fit(ensemble, problem.data() if train is None else train, **options)


def alone(a: int, train=None, **options) -> dict:
    """Return the weights of a member that was trained by itself."""
    single = networks().subset([a])
    fit(single, train, **options)
    return problem.weights(single)


def assert_members(ensemble, expected) -> None:
    for a, weights in enumerate(expected):
        for name, stack in ensemble.state_dict().items():
            torch.testing.assert_close(stack[a], weights[name][0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer", [None, torch.optim.Adam, torch.optim.AdamW])
def test_a_factor_of_the_rate_is_that_rate(optimizer):
    ensemble, factors = networks(), [1.0, 0.3, 2.0]
    fit(ensemble, each=EachMember(rates=torch.tensor(factors)), optimizer=optimizer)
    trained = [alone(a, lr=0.05 * f, optimizer=optimizer) for a, f in enumerate(factors)]
    assert_members(ensemble, trained)


def test_modulations_have_rates_of_their_own_and_what_is_shared_has_one():
    ensemble, plain = problem.ensemble(3), problem.ensemble(3)
    before = problem.weights(ensemble)
    one_step = {"epochs": 1, "batch_size": 60, "weight_decay": 0.0}
    fit(ensemble, each=EachMember(rates=[0.0, 1.0, 0.5]), **one_step)
    fit(plain, **one_step)
    own = {id(p) for p in ensemble.individual_parameters()}
    for name, parameter in ensemble.named_parameters():
        moved, expected = parameter - before[name], plain.state_dict()[name] - before[name]
        factors = torch.tensor([0.0, 1.0, 0.5])[:, None] if id(parameter) in own else 1.0
        torch.testing.assert_close(moved, factors * expected, rtol=1e-3, atol=3e-7)


class Dropping(nn.Module):
    """Dropout before the first layer, and behind it."""

    def __init__(self, rate: float):
        super().__init__()
        self.drop, self.more = nn.Dropout(rate), nn.AlphaDropout(rate)
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(self.more(F.relu(self.a(self.drop(x)))))


def dropping(rate: float, family) -> embens.EmbeddedEnsemble:
    torch.manual_seed(0)
    return family(Dropping(rate), MEMBERS, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("batch", ["same", "own"])
@pytest.mark.parametrize("family", [embens.independent, embens.batch_ensemble])
def test_all_members_at_one_rate_of_dropout_are_networks_with_that_rate(family, batch):
    ensemble, expected = dropping(0.7, family), dropping(0.2, family)
    expected.chunk = 1
    torch.manual_seed(4)
    fit(ensemble, each=EachMember(dropout=[0.2] * 3), batch=batch, epochs=2)
    torch.manual_seed(4)
    fit(expected, batch=batch, epochs=2)
    torch.testing.assert_close(problem.weights(ensemble), problem.weights(expected))
    assert ensemble.network.drop.p == 0.7


def test_a_member_without_dropout_trains_as_if_there_were_none():
    ensemble = dropping(0.5, embens.independent)
    fit(ensemble, each=EachMember(dropout=[0.0, 0.5, 0.9]), epochs=2)
    plain = dropping(0.0, embens.independent)
    fit(plain, epochs=2)
    outputs, expected = (e.eval()(problem.data()[0]) for e in (ensemble, plain))
    torch.testing.assert_close(outputs[0], expected[0], rtol=1e-4, atol=1e-6)
    assert (outputs[1:] - expected[1:]).abs().amax((1, 2)).min() > 1e-2


def test_members_drop_at_their_own_rates():
    reference = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 64))
    seen = {a: [] for a in range(MEMBERS)}

    def watch(module, args):
        seen[watched.current.run.start].append(float((args[0] == 0).float().mean()))

    watched = embens.batch_ensemble(reference, MEMBERS)
    watched.network[2].register_forward_pre_hook(watch)
    targets = torch.zeros(60, 64)
    fit(watched, (problem.data()[0], targets), each=EachMember(dropout=[0.0, 0.1, 0.6]), lr=1e-4)
    for a, rate in enumerate([0.0, 0.1, 0.6]):
        zeros, calls = sum(seen[a]) / len(seen[a]), len(seen[a])
        error = (rate * (1 - rate) / (calls * 12 * 64)) ** 0.5
        assert abs(zeros - rate) <= 4 * error, f"member {a}"


def test_label_smoothing_is_torchs():
    ensemble, shares = networks(), [0.0, 0.1, 0.4]
    fit(ensemble, each=EachMember(label_smoothing=shares))
    trained = [
        alone(a, criterion=partial(F.cross_entropy, label_smoothing=s))
        for a, s in enumerate(shares)
    ]
    assert_members(ensemble, trained)


@pytest.mark.parametrize("batch", ["same", "own"])
def test_rows_of_weight_zero_do_not_count_for_that_member(batch):
    x, y = problem.data()
    weights = torch.ones(MEMBERS, len(y))
    weights[1, ::2] = 0
    wrong = y.clone()
    wrong[::2] = 0  # targets that member 1 can't see
    options = {"batch": batch, "each": EachMember(weights=weights)}
    first, second = networks(), networks()
    fit(first, (x, y), **options)
    fit(second, (x, wrong), **options)
    for name, stack in first.state_dict().items():
        assert torch.equal(stack[1], second.state_dict()[name][1])
    assert not torch.equal(first(x)[0], second(x)[0])


@pytest.mark.parametrize("regression", [False, True])
def test_weights_multiply_the_losses_of_rows(regression):
    x, y = problem.data()
    weights = torch.rand(MEMBERS, len(y), generator=torch.Generator().manual_seed(0))
    ensemble = networks()
    y = x[:, :3] * 2 if regression else y
    fit(ensemble, (x, y), each=EachMember(weights=weights), batch_size=60)

    def weighted(outputs, target):  # the weight rides in the target
        target, weight = target[:, :-1], target[:, -1]
        if regression:
            return weight * (outputs - target).square().mean(1)
        return weight * F.cross_entropy(outputs, target[:, 0].long(), reduction="none")

    y = y if regression else y[:, None].float()
    targets = [torch.cat([y, w[:, None]], 1) for w in weights]
    options = {"criterion": weighted, "batch_size": 60}
    assert_members(ensemble, [alone(a, (x, t), **options) for a, t in enumerate(targets)])


@pytest.mark.parametrize("batch", ["same", "own"])
def test_targets_of_each_member_take_the_place_of_those_of_all(batch):
    x, _ = problem.data()
    targets = torch.randn(MEMBERS, len(x), 3, generator=torch.Generator().manual_seed(0))
    ensemble = networks()
    history = fit(
        ensemble, (x, targets[0]), each=EachMember(targets=targets), batch=batch, epochs=5
    )
    if batch == "same":
        assert_members(ensemble, [alone(a, (x, targets[a]), epochs=5) for a in range(MEMBERS)])
    losses = [r["loss"] for r in history.members if r["epoch"] == 5]
    expected = (ensemble(x) - targets).square().flatten(1).mean(1)
    torch.testing.assert_close(torch.tensor(losses), expected.detach(), rtol=0.1, atol=0.0)


def test_a_run_goes_on_with_the_settings_and_is_refused_with_others(tmp_path):
    class Stop:
        def on_step(self, ensemble, record):
            if record["step"] == 6:
                raise KeyboardInterrupt

    settings = {"rates": [1.0, 0.5, 0.1], "label_smoothing": [0.1, 0.0, 0.2]}
    settings["dropout"] = [0.0, 0.3, 0.5]
    each = EachMember(**settings)

    def networks():
        generator = torch.Generator().manual_seed(2)
        return embens.independent(problem.reference(dropout=0.1), MEMBERS, generator=generator)

    def fit_adamw(*args, **options):
        return fit(*args, optimizer=torch.optim.AdamW, **options)

    whole, again = networks(), networks()
    fit_adamw(whole, each=each)
    with pytest.raises(KeyboardInterrupt):
        fit_adamw(again, each=each, checkpoint=tmp_path, every=3, callbacks=[Stop()])
    again = networks()
    fit_adamw(again, each=each, checkpoint=tmp_path, every=3)
    problem.assert_equal(problem.weights(again), problem.weights(whole))
    other = EachMember(**settings | {"dropout": [0.0, 0.3, 0.6]})
    with pytest.raises(ValueError, match="different run: each"):
        fit_adamw(networks(), each=other, checkpoint=tmp_path, every=3)


def test_loaders_take_what_needs_no_numbers_of_rows():
    loader = DataLoader(TensorDataset(*problem.data()), 16)
    fit(networks(), loader, each=EachMember(rates=[1, 1, 2], label_smoothing=[0, 0, 0.1]))
    with pytest.raises(ValueError, match="need rows with numbers"):
        fit(networks(), loader, each=EachMember(weights=torch.ones(3, 60)))


class NotProportional(torch.optim.SGD):
    """Its step does not grow with the rate."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(0.01 * p.grad.sign())


@pytest.mark.parametrize(
    ("each", "options", "message"),
    [
        (EachMember(rates=[1.0, 2.0]), {}, r"rates of shape \(3,\); got \(2,\)"),
        (EachMember(rates=[1.0, -2.0, 1.0]), {}, "rates must be finite, and from 0 to inf"),
        (EachMember(label_smoothing=[0.0, 2.0, 0.0]), {}, "finite, and from 0 to 1"),
        (EachMember(weights=torch.ones(3, 59)), {}, r"weights of shape \(3, 60\); got \(3, 59\)"),
        (EachMember(weights=-torch.ones(3, 60)), {}, "weights must be finite, and from 0"),
        (EachMember(targets=torch.ones(3, 59, 2)), {}, r"targets of shape \(3, 60\)"),
        (EachMember(label_smoothing=[0.1] * 3), {"criterion": nn.MSELoss()}, "default criterion"),
        (EachMember(weights=torch.ones(3, 60)), {"criterion": nn.CrossEntropyLoss()}, "each row"),
        (EachMember(rates=[1, 1, 2]), {"chunk": 1}, "all members at once"),
        (EachMember(rates=[1, 1, 2]), {"batch": "split"}, "all members at once"),
        (EachMember(rates=[1, 1, 2]), {"optimizer": NotProportional}, "not proportional"),
        (EachMember(dropout=[0, 0, 1.5]), {}, "dropout must be finite, and from 0 to 1"),
        (EachMember(dropout=[0, 0, 0.5]), {}, "no nn.Dropout at a rate above 0"),
        (EachMember(dropout=[0, 0, 0.5]), {"compile": True}, "can't be compiled"),
    ],
)
def test_what_can_not_be_is_refused(each, options, message):
    with pytest.raises(ValueError, match=message):
        fit(networks(), each=each, **options)


def test_members_that_run_as_one_network_have_no_dropout_of_their_own():
    reference = problem.reference(dropout=0.1)
    with pytest.raises(ValueError, match="runs once for all members"):
        fit(embens.mimo(reference, 3), batch="own", each=EachMember(dropout=[0, 0, 0.5]))
    attention = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    with pytest.raises(ValueError, match="inside attention or recurrent layers"):
        fit(embens.batch_ensemble(attention, 3), each=EachMember(dropout=[0, 0, 0.5]))
