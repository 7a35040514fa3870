"""Steps with the groups of an ensemble against the paper's update, written out by hand."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from test_objective import FAMILIES, MEMBERS, make_reference
from torch import Tensor, nn, optim

import embens
from embens.ensemble.own import Own
from embens.ensemble.rates import Kind, kind_of

GAMMAS = {"number": 2.5, "zero": 0, "callable": lambda m: m / 3, "natural": None}
LR, MODULATION_LR, DECAY, STEPS = 0.1, 0.3, 0.05, 3
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
every_gamma = pytest.mark.parametrize("gamma", GAMMAS.values(), ids=GAMMAS)


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (12,), generator=generator)


def value_of(gamma, ensemble) -> float:
    if gamma is None:
        return ensemble.natural_gamma
    return gamma(ensemble.members) if callable(gamma) else gamma


def make(family) -> embens.EmbeddedEnsemble:
    torch.manual_seed(3)
    return family(make_reference())


def train(ensemble, make_optimizer, groups) -> dict[str, Tensor]:
    """Take steps with a torch optimizer; return the parameters."""
    optimizer = make_optimizer(groups)
    for step in range(STEPS):
        x, y = data(step)
        torch.manual_seed(step)  # of fresh masks
        optimizer.zero_grad()
        embens.objective(ensemble(x), y).backward()
        optimizer.step()
    return {name: p.detach() for name, p in ensemble.named_parameters()}


def train_by_hand(ensemble, gamma, update) -> dict[str, Tensor]:
    r"""Take the same steps, member by member.

    ``update(name, value, gradient, rate, decay)`` returns the change; the gradient of what is
    shared is :math:`(\gamma/M) \sum_a \partial L_a`, its rate in units of :math:`\eta` is 1.
    """
    factor = value_of(gamma, ensemble) / ensemble.members
    individual = {id(p) for p in ensemble.individual_parameters()}
    copied = [[*m.tensors().values()] for m in ensemble.modules() if isinstance(m, Own)]
    own = {id(tensor) for tensors in copied for tensor in tensors}
    for step in range(STEPS):
        x, y = data(step)
        total = {name: torch.zeros_like(p) for name, p in ensemble.named_parameters()}
        for a in range(ensemble.members):
            torch.manual_seed(step)
            loss = F.cross_entropy(ensemble(x)[a], y)
            found = torch.autograd.grad(loss, list(ensemble.parameters()), allow_unused=True)
            for (name, p), gradient in zip(ensemble.named_parameters(), found, strict=True):
                if gradient is not None:
                    total[name] += gradient if id(p) in individual else factor * gradient
        with torch.no_grad():
            for name, p in ensemble.named_parameters():
                if id(p) not in individual:
                    if factor > 0:
                        p += update(name, p, total[name], LR, DECAY)
                elif id(p) in own:  # what is drawn to its start is not drawn to 0
                    decay = 0.0 if ensemble.plan.family == "bayesian" else DECAY
                    p += update(name, p, total[name], LR, decay)
                else:
                    p += update(name, p, total[name], MODULATION_LR, 0.0)
    return {name: p.detach() for name, p in ensemble.named_parameters()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-8, atol=1e-11, msg=name)


def momentum_update(momentum: float, nesterov: bool = False):
    velocity: dict[str, Tensor] = {}

    def update(name, value, gradient, rate, decay):
        gradient = gradient + decay * value
        velocity[name] = momentum * velocity.get(name, 0) + gradient
        step = gradient + momentum * velocity[name] if nesterov else velocity[name]
        return -rate * step

    return update


@every_gamma
@every_family
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_steps_of_sgd_are_the_paper_s(family, gamma, momentum, nesterov):
    ensemble, expected = make(family), make(family)
    groups = ensemble.parameter_groups(LR, MODULATION_LR, DECAY, gamma=gamma)
    found = train(ensemble, partial(optim.SGD, momentum=momentum, nesterov=nesterov), groups)
    by_hand = train_by_hand(expected, gamma, momentum_update(momentum, nesterov))
    assert_same(found, by_hand)


def adam_update(decoupled: bool, pace):
    """Return Adam with the rate of what is shared multiplied by the pace."""
    states: dict[str, list] = {}

    def update(name, value, gradient, rate, decay):
        step = gradient if decoupled else gradient + decay * value
        first, second, count = states.get(name, [0, 0, 0])
        first, second = 0.9 * first + 0.1 * step, 0.999 * second + 0.001 * step.square()
        count += 1
        states[name] = [first, second, count]
        direction = first / (1 - 0.9**count) / (second / (1 - 0.999**count)).sqrt()
        direction = torch.where(first == 0, 0.0, direction)  # of a unit that every mask leaves dead
        change = -rate * pace(name) * direction
        return change - rate * decay * value if decoupled else change

    return update


@every_gamma
@every_family
@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
def test_steps_of_adam_have_gamma_in_the_rate_and_the_same_decay_whatever_it_is(
    family, gamma, kind
):
    """The decay of Adam is a part of the gradient, that of AdamW a part of the weight."""
    ensemble, expected = make(family), make(family)
    make_optimizer = partial(kind, eps=1e-30)
    groups = ensemble.parameter_groups(
        LR / 10, MODULATION_LR / 10, DECAY * 10, gamma=gamma, optimizer=make_optimizer
    )
    found = train(ensemble, make_optimizer, groups)
    shared = {id(p) for p in expected.shared_parameters()}
    pace = value_of(gamma, expected) / expected.natural_gamma
    paces = {name: pace if id(p) in shared else 1.0 for name, p in expected.named_parameters()}
    update = adam_update(kind is optim.AdamW, paces.__getitem__)

    def slower(name, value, gradient, rate, decay):
        return update(name, value, gradient, rate / 10, decay * 10)

    assert_same(found, train_by_hand(expected, gamma, slower))


@pytest.mark.parametrize("optimizer", [optim.SGD, optim.AdamW])
def test_what_decay_takes_away_does_not_depend_on_gamma(optimizer):
    """By the difference that it makes to one step; for Adam see the loop by hand."""
    changes = []
    for gamma in (0.5, 1.0, MEMBERS):
        weights = []
        for decay in (0.0, 1e-5):
            ensemble = make(FAMILIES["collective regime"])
            groups = ensemble.parameter_groups(0.1, None, decay, gamma=gamma, optimizer=optimizer)
            x, y = data(0)
            made = optimizer(groups)
            embens.objective(ensemble(x), y).backward()
            made.step()
            weights.append(torch.cat([p.detach().flatten() for p in ensemble.shared_parameters()]))
        changes.append(weights[1] - weights[0])
    start = make(FAMILIES["collective regime"])
    decayed = -0.1 * 1e-5 * torch.cat([p.detach().flatten() for p in start.shared_parameters()])
    for change in changes:
        torch.testing.assert_close(change, decayed, rtol=1e-3, atol=1e-12)


@every_family
@pytest.mark.parametrize("optimizer", [optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop])
def test_with_gamma_zero_nothing_shared_moves(family, optimizer):
    ensemble = make(family)
    before = [p.detach().clone() for p in ensemble.shared_parameters()]
    groups = ensemble.parameter_groups(gamma=0, optimizer=optimizer)
    train(ensemble, optimizer, groups)
    for p, start in zip(ensemble.shared_parameters(), before, strict=True):
        assert torch.equal(p, start)


def test_groups_say_what_gamma_did_to_their_rate():
    ensemble = embens.batch_ensemble(make_reference(), 4, p=0.9)
    shared, modulations = ensemble.parameter_groups(0.2, 0.5, 1e-3, gamma=2)
    assert (shared["lr"], shared["weight_decay"], shared["gamma_factor"]) == (0.1, 2e-3, 0.5)
    assert (modulations["lr"], modulations["weight_decay"]) == (0.5, 0.0)
    assert modulations["gamma_factor"] == 1.0
    natural = ensemble.natural_gamma
    (shared, _) = ensemble.parameter_groups(0.2, gamma=2, optimizer=optim.AdamW)
    assert shared["lr"] == pytest.approx(0.2 * 2 / natural)
    assert shared["weight_decay"] == pytest.approx(5e-4 * natural / 2)
    (shared, _) = ensemble.parameter_groups(0.2, gamma=2, optimizer=optim.Adam)
    assert shared["lr"] == pytest.approx(0.2 * 2 / natural)
    assert shared["weight_decay"] == pytest.approx(5e-4 * 4 / 2)


def test_layers_of_the_members_own_have_the_ordinary_rate_and_decay():
    separate = embens.independent(make_reference(), 3)
    (group,) = separate.parameter_groups(0.2, 0.5, 1e-3, gamma=2, modulation_weight_decay=0.7)
    assert (group["lr"], group["weight_decay"]) == (0.2, 1e-3)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    ensemble = embens.embed(net, 3, norm_affine="member")
    groups = ensemble.parameter_groups(0.2, 0.5, 1e-3)
    assert [(g["lr"], g["weight_decay"]) for g in groups[1:]] == [(0.5, 0.0), (0.2, 1e-3)]
    assert sum(p.numel() for p in groups[2]["params"]) == 3 * (4 + 4)
    together = [id(p) for group in groups for p in group["params"]]
    assert sorted(together) == sorted(map(id, ensemble.parameters()))


SCALE_FREE = {
    "Adam": (optim.Adam, False),
    "AdamW": (optim.AdamW, True),
    "Adam, decoupled": (partial(optim.Adam, decoupled_weight_decay=True), True),
    "Adam, amsgrad": (partial(optim.Adam, amsgrad=True), False),
    "AdamW, by a function": (lambda groups: optim.AdamW(groups, fused=False), True),
    "NAdam": (optim.NAdam, False),
    "NAdam, decoupled": (partial(optim.NAdam, decoupled_weight_decay=True), True),
    "RAdam": (optim.RAdam, False),
    "Adamax": (optim.Adamax, False),
    "Adagrad": (optim.Adagrad, False),
    "RMSprop": (optim.RMSprop, False),
    "Rprop": (optim.Rprop, False),
    "Adadelta": (optim.Adadelta, False),
    "Adafactor": (optim.Adafactor, True),
}


@pytest.mark.parametrize(("optimizer", "decoupled"), SCALE_FREE.values(), ids=SCALE_FREE)
def test_optimizers_that_cancel_a_scale_are_recognised(optimizer, decoupled):
    assert kind_of(optimizer) == Kind(True, decoupled)


@pytest.mark.parametrize(
    "optimizer",
    [optim.SGD, partial(optim.SGD, momentum=0.9), lambda g: optim.SGD(g, momentum=0.9), optim.ASGD],
)
def test_optimizers_that_keep_the_scale_are_recognised(optimizer):
    assert kind_of(optimizer) == Kind(False, False)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"lr": -1.0}, ValueError, "lr must be finite and not negative; got -1"),
        ({"modulation_lr": math.nan}, ValueError, "modulation_lr must be finite"),
        ({"gamma": -1}, ValueError, "gamma must be finite and not negative; got -1"),
        ({"gamma": "natural"}, TypeError, "gamma must be a number, a function"),
        ({"optimizer": lambda g: None}, TypeError, "a function from parameter groups"),
        ({"optimizer": optim.SGD([torch.zeros(1)])}, TypeError, "a function from parameter groups"),
        ({"optimizer": lambda g: optim.LBFGS(g[0]["params"])}, TypeError, "need a closure"),
    ],
)
def test_wrong_arguments_say_what_is_expected(arguments, error, message):
    ensemble = embens.batch_ensemble(make_reference(), 3)
    with pytest.raises(error, match=message):
        ensemble.parameter_groups(**arguments)
