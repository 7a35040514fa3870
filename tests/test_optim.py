"""The objective and the rates of an ensemble, against loops over members written by hand."""

import math
from collections.abc import Callable
from functools import partial

import cases
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import embens
from embens import laws, objective
from embens.optim import overlap
from embens.sites import Site
from embens.spec import EnsembleSpec, LowRankSite

MEMBERS, ROWS, CLASSES = 4, 12, 3


def make_reference(dtype: torch.dtype = torch.float64, outputs: int = CLASSES) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, outputs)]
    return nn.Sequential(*layers).to(dtype)


FAMILIES: dict[str, Callable[..., embens.EmbeddedEnsemble]] = {
    **cases.FAMILIES,
    "collective regime": partial(embens.batch_ensemble, p=0.9),
    "fresh masks": embens.mc_dropout,
    "trainable last layer": partial(embens.last_layer_dropout, law=laws.Normal(), trainable=True),
}
every_family = pytest.mark.parametrize("family", FAMILIES)


def make(family: str) -> embens.EmbeddedEnsemble:
    reference = make_reference()
    torch.manual_seed(3)
    return FAMILIES[family](reference, members=MEMBERS)


# Objective


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (ROWS,), generator=generator)


def run(ensemble: nn.Module, x: Tensor, **kwargs: str) -> Tensor:
    """Run with the same fresh masks in every call."""
    torch.manual_seed(7)
    return ensemble(x, **kwargs)


def gradients(ensemble: nn.Module) -> dict[str, Tensor]:
    by_name = {n: p.grad for n, p in ensemble.named_parameters() if p.grad is not None}
    ensemble.zero_grad()
    return by_name


def loop_gradients(ensemble, loss_of_member) -> dict[str, Tensor]:
    """Return the gradients of a loop over members with ordinary losses."""
    names, parameters = zip(*ensemble.named_parameters(), strict=True)
    total = {name: torch.zeros_like(p) for name, p in ensemble.named_parameters()}
    for a in range(ensemble.members):
        member_gradients = torch.autograd.grad(loss_of_member(a), parameters, allow_unused=True)
        for name, gradient in zip(names, member_gradients, strict=True):
            if gradient is not None:
                total[name] += gradient
    return total


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-8, atol=1e-11)


@every_family
def test_every_parameter_has_the_gradient_of_a_loop_over_members(family, data):
    x, y = data
    ensemble = make(family)
    loss = objective(run(ensemble, x), y)
    loss.backward()
    expected = loop_gradients(ensemble, lambda a: F.cross_entropy(run(ensemble, x)[a], y))
    assert_same(gradients(ensemble), expected)
    losses = [F.cross_entropy(output, y) for output in run(ensemble, x)]
    torch.testing.assert_close(loss, torch.stack(losses).sum())


@pytest.mark.parametrize("chunk", [1, 3])
@every_family
def test_chunks_accumulate_the_same_gradient(family, chunk, data):
    x, y = data
    ensemble = make(family)
    torch.manual_seed(7)
    value = ensemble.backward(x, y, chunk=chunk)
    expected = loop_gradients(ensemble, lambda a: F.cross_entropy(run(ensemble, x)[a], y))

    assert_same(gradients(ensemble), expected)
    torch.testing.assert_close(value, objective(run(ensemble, x), y).detach())


def gaussian_nll(outputs: Tensor, target: Tensor) -> Tensor:
    return F.gaussian_nll_loss(outputs[:, 0], target, outputs[:, 1].exp())


WEIGHT = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
CRITERIA = {
    "class weights": (partial(F.cross_entropy, weight=WEIGHT), "classes"),
    "class weights module": (nn.CrossEntropyLoss(weight=WEIGHT), "classes"),
    "label smoothing": (partial(F.cross_entropy, label_smoothing=0.1), "classes"),
    "ignored labels": (partial(F.cross_entropy, ignore_index=1), "classes"),
    "one loss per sample": (partial(F.cross_entropy, reduction="none"), "classes"),
    "summed": (partial(F.cross_entropy, reduction="sum"), "classes"),
    "mean squares": (lambda f, y: F.mse_loss(f[:, 0], y), "numbers"),
    "gaussian": (gaussian_nll, "numbers"),
    "of the user": (lambda f, y: (f.sum(1) - y).abs().pow(1.5), "numbers"),
}


@pytest.mark.parametrize(("criterion", "kind"), CRITERIA.values(), ids=CRITERIA.keys())
def test_any_criterion_is_used_member_by_member(criterion, kind, data):
    x, classes = data
    y = classes if kind == "classes" else x.sum(1)
    ensemble = embens.batch_ensemble(make_reference(), MEMBERS, p=0.5)
    loss = objective(ensemble(x), y, criterion=criterion)
    loss.backward()
    expected = loop_gradients(ensemble, lambda a: criterion(ensemble(x)[a], y).mean())
    assert_same(gradients(ensemble), expected)
    torch.testing.assert_close(
        loss, torch.stack([criterion(o, y).mean() for o in ensemble(x)]).sum()
    )
    ensemble.backward(x, y, criterion=criterion, chunk=2)
    assert_same(gradients(ensemble), expected)


@every_family
def test_every_member_can_have_another_batch(family, data):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(MEMBERS, 6, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (MEMBERS, 6), generator=generator)
    ensemble = make(family)
    objective(run(ensemble, x, batch="own"), y, batch="own").backward()
    expected = loop_gradients(
        ensemble, lambda a: F.cross_entropy(run(ensemble, x, batch="own")[a], y[a])
    )

    assert_same(gradients(ensemble), expected)


@pytest.mark.parametrize("rows", [12, 5])
@every_family
def test_members_can_split_a_batch(family, rows, data):
    x, y = data[0][:rows], data[1][:rows]
    ensemble = make(family)

    def loss(a: int) -> Tensor:
        return F.cross_entropy(run(ensemble, x, batch="split")[a::MEMBERS], y[a::MEMBERS])

    value = ensemble.objective(run(ensemble, x, batch="split"), y, batch="split")
    value.backward()
    assert_same(gradients(ensemble), loop_gradients(ensemble, loss))
    torch.testing.assert_close(value, torch.stack([loss(a) for a in range(MEMBERS)]).sum())


def test_members_without_rows_in_a_split_batch_get_no_gradient(data):
    x, y = data[0][:2], data[1][:2]
    ensemble = embens.batch_ensemble(make_reference(), MEMBERS)
    loss = objective(ensemble(x, batch="split"), y, batch="split", members=MEMBERS)
    loss.backward()
    rows = [F.cross_entropy(ensemble(x)[a, a], y[a]) for a in range(2)]

    torch.testing.assert_close(loss, torch.stack(rows).sum())
    for parameter in ensemble.individual_parameters():
        assert parameter.grad[:2].abs().sum() > 0
        assert not parameter.grad[2:].any()


def test_the_loss_of_the_mean_replaces_the_loss_of_every_member(data):
    x, y = data
    ensemble = embens.batch_ensemble(make_reference(), MEMBERS, p=0.5)
    loss = objective(ensemble(x), y, of="mean")
    loss.backward()
    torch.testing.assert_close(loss, MEMBERS * F.cross_entropy(ensemble(x).mean(0), y))
    outputs = ensemble(x)
    mean = outputs.mean(0).detach().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(mean, y), mean)
    expected = loop_gradients(ensemble, lambda a: (ensemble(x)[a] * slope).sum())
    assert_same(gradients(ensemble), expected)


def test_gradients_accumulate_over_batches(data):
    x, y = data
    ensemble = embens.batch_ensemble(make_reference(), MEMBERS)
    objective(ensemble(x), y).backward()
    whole = gradients(ensemble)
    for part in (slice(0, 6), slice(6, 12)):
        (objective(ensemble(x[part]), y[part]) / 2).backward()

    assert_same(gradients(ensemble), whole)


def test_gradients_can_be_clipped(data):
    x, y = data
    ensemble = embens.batch_ensemble(make_reference(), MEMBERS)
    expected = loop_gradients(ensemble, lambda a: F.cross_entropy(ensemble(x)[a], y))
    norm = torch.stack([g.norm() for g in expected.values()]).norm()
    objective(ensemble(x), y).backward()
    actual = nn.utils.clip_grad_norm_(ensemble.parameters(), 0.1 * float(norm))
    torch.testing.assert_close(actual, norm)
    clipped = gradients(ensemble)
    for name, gradient in expected.items():
        torch.testing.assert_close(clipped[name], 0.1 * gradient, rtol=1e-4, atol=1e-9)


def test_a_gradient_scaler_under_autocast_gives_the_same_gradient(data):
    x, y = data[0].float(), data[1]
    ensemble = embens.batch_ensemble(make_reference(torch.float32), MEMBERS)
    optimizer = torch.optim.SGD(ensemble.parameter_groups(lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = ensemble(x)
        assert outputs.dtype == torch.bfloat16
        return objective(outputs.float(), y)

    loss().backward()
    plain = gradients(ensemble)
    scaler.scale(loss()).backward()
    scaler.unscale_(optimizer)
    for name, parameter in ensemble.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name], rtol=1e-5, atol=1e-7)
    before = {n: p.detach().clone() for n, p in ensemble.named_parameters()}
    scaler.step(optimizer)
    scaler.update()
    assert all((p != before[n]).any() for n, p in ensemble.named_parameters())
    expected = loop_gradients(ensemble, lambda a: F.cross_entropy(ensemble(x)[a], y))
    ensemble.zero_grad()
    loss().backward()  # in bfloat16 the gradient is right to about a percent
    actual, exact = (
        torch.cat([g.flatten() for g in group.values()])
        for group in (gradients(ensemble), expected)
    )
    assert (actual - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize(
    "change",
    [lambda o: o[:, :6], lambda o: o.float(), lambda o: o * 2 + 1, lambda o: o.clone()],
    ids=["sliced", "cast", "scaled", "cloned"],
)
def test_outputs_may_be_changed_before_the_objective(change, data):
    x, y = data
    ensemble = embens.batch_ensemble(make_reference(), MEMBERS)
    target = y[: change(ensemble(x)).shape[1]]
    objective(change(ensemble(x)), target).backward()
    expected = loop_gradients(ensemble, lambda a: F.cross_entropy(change(ensemble(x))[a], target))
    actual = gradients(ensemble)

    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-5, atol=1e-6)


def test_without_gradients_the_value_is_the_same(data):
    x, y = data
    ensemble = embens.batch_ensemble(make_reference(), MEMBERS)
    with torch.no_grad():
        value = objective(ensemble(x), y)
    torch.testing.assert_close(value, objective(ensemble(x), y).detach())
    split = ensemble(x, batch="split")
    with pytest.raises(TypeError, match="Pass members="):
        objective(split, y, batch="split")
    actual = ensemble.objective(split.detach(), y, F.cross_entropy, batch="split")
    torch.testing.assert_close(actual, objective(split, y, batch="split", members=MEMBERS).detach())


def test_invalid_options_of_the_objective_raise(data):
    x, y = data
    ensemble = embens.batch_ensemble(make_reference(), MEMBERS)
    outputs = ensemble(x)
    with pytest.raises(ValueError, match="batch: unknown 'spilt'; did you mean 'split'"):
        objective(outputs, y, batch="spilt")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of: unknown 'means'; did you mean 'mean'"):
        objective(outputs, y, of="means")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of='mean' needs members on the same rows"):
        objective(outputs, y, batch="own", of="mean")
    with pytest.raises(ValueError, match=r"expects a target of shape \(4, batch, …\)"):
        objective(outputs, y, batch="own")
    with pytest.raises(
        ValueError, match=r"outputs must be \(4, batch, …\), got a first axis of size 12"
    ):
        ensemble.objective(outputs.mean(0), y)


def test_other_losses_and_penalties_can_be_added(data):
    x, y = data
    ensemble = embens.batch_ensemble(make_reference(), MEMBERS)
    inputs = x.clone().requires_grad_()
    outputs = ensemble(inputs)
    (slope,) = torch.autograd.grad(outputs.square().sum(), inputs, create_graph=True)
    losses = (
        objective(outputs, y),
        objective(outputs, x[:, :CLASSES], F.mse_loss),
        0.1 * outputs.var(0).sum(),
        slope.square().sum(),
        sum(p.square().sum() for p in ensemble.parameters()),
    )
    parameters = list(ensemble.parameters())
    expected = [torch.zeros_like(p) for p in parameters]
    for loss in losses:
        for total, gradient in zip(
            expected, torch.autograd.grad(loss, parameters, retain_graph=True), strict=True
        ):
            total += gradient
    sum(losses).backward()

    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_criterion_can_take_nested_outputs_and_targets():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.label = nn.Linear(4, 8), nn.Linear(8, 3)
            self.value = nn.Linear(8, 1)

        def forward(self, a, b):
            hidden = torch.relu(self.body(a * b))
            return {"label": self.label(hidden), "value": self.value(hidden)}

    def criterion(outputs, target):
        label, value = target
        error = (outputs["value"][:, 0] - value).square().mean()
        return F.cross_entropy(outputs["label"], label) + 0.5 * error

    ensemble = embens.batch_ensemble(Heads(), 3)
    a, b, target = torch.randn(6, 4), torch.randn(6, 4), (torch.arange(6) % 3, torch.randn(6))
    loss = objective(ensemble(a, b), target, criterion)
    loss.backward()
    members = [ensemble.member(m)(a, b) for m in range(3)]
    torch.testing.assert_close(loss, sum(criterion(outputs, target) for outputs in members))

    def of_member(m):
        return criterion({name: value[m] for name, value in ensemble(a, b).items()}, target)

    expected = loop_gradients(ensemble, of_member)
    for name, gradient in gradients(ensemble).items():
        torch.testing.assert_close(gradient, expected[name])
    calls = (((a, b), target), ({"b": b, "a": a}, target), (a, b, target))
    for arguments in calls:
        ensemble.zero_grad()
        total = ensemble.backward(*arguments, criterion=criterion, chunk=2)
        torch.testing.assert_close(total, loss.detach())
        for name, gradient in gradients(ensemble).items():
            torch.testing.assert_close(gradient, expected[name])
    split = ensemble.objective(ensemble(a, b, batch="split"), target, criterion, batch="split")
    rows = [
        criterion(ensemble.member(m)(a[m::3], b[m::3]), tuple(t[m::3] for t in target))
        for m in range(3)
    ]
    torch.testing.assert_close(split, sum(rows))


# Learning rates

GAMMAS = {"number": 2.5, "zero": 0, "callable": lambda m: m / 3, "natural": None}
LR, MODULATION_LR, DECAY, STEPS = 0.1, 0.3, 0.05, 3
every_gamma = pytest.mark.parametrize("gamma", GAMMAS.values(), ids=GAMMAS)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (12,), generator=generator)


def gamma_value(gamma, ensemble) -> float:
    if gamma is None:
        return ensemble.natural_gamma
    return gamma(ensemble.members) if callable(gamma) else gamma


def train(ensemble, make_optimizer, groups, steps: int = STEPS) -> dict[str, Tensor]:
    """Take steps with an optimizer of torch; return the parameters."""
    optimizer = make_optimizer(groups)
    for step in range(steps):
        x, y = batch(step)
        torch.manual_seed(step)  # decides fresh masks
        optimizer.zero_grad()
        objective(ensemble(x), y).backward()
        optimizer.step()
    return {name: p.detach() for name, p in ensemble.named_parameters()}


def train_by_hand(ensemble, gamma, update, steps: int = STEPS) -> dict[str, Tensor]:
    r"""Take the same steps, member by member.

    ``update(name, value, gradient, rate, decay)`` returns the change of a parameter. The gradient
    of a shared parameter is :math:`(\gamma/M) \sum_a \partial L_a`.
    """
    factor = gamma_value(gamma, ensemble) / ensemble.members
    shared = {id(p) for p in ensemble.shared_parameters()}
    per_member = set()
    for item in ensemble.spec.per_member:
        for tensor in item.tensors:
            per_member.add(id(ensemble.individual[f"{item.module}.{tensor}"]))
    for step in range(steps):
        x, y = batch(step)

        def member_loss(a: int, x=x, y=y, step=step) -> Tensor:
            torch.manual_seed(step)
            return F.cross_entropy(ensemble(x)[a], y)

        total = loop_gradients(ensemble, member_loss)
        with torch.no_grad():
            for name, p in ensemble.named_parameters():
                if id(p) in shared:
                    if factor > 0 and not ensemble.spec.frozen:
                        p += update(name, p, factor * total[name], LR, DECAY)
                elif id(p) in per_member:
                    p += update(name, p, total[name], LR, DECAY)
                else:
                    p += update(name, p, total[name], MODULATION_LR, 0.0)
    return {name: p.detach() for name, p in ensemble.named_parameters()}


@every_family
def test_one_step_of_every_family_is_the_update_of_the_paper(family):
    ensemble, expected = make(family), make(family)
    groups = ensemble.parameter_groups(LR, MODULATION_LR, DECAY)

    def update(name, value, gradient, rate, decay):
        return -rate * (gradient + decay * value)

    actual = train(ensemble, optim.SGD, groups, steps=1)
    assert_same(actual, train_by_hand(expected, None, update, steps=1))


def momentum_update(momentum: float, nesterov: bool):
    velocity: dict[str, Tensor] = {}

    def update(name, value, gradient, rate, decay):
        gradient = gradient + decay * value
        velocity[name] = momentum * velocity.get(name, 0) + gradient
        step = gradient + momentum * velocity[name] if nesterov else velocity[name]
        return -rate * step

    return update


@every_gamma
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("family", ["collective regime", "own last layers", "lora", "fresh masks"])
def test_steps_with_momentum_are_those_of_the_paper_for_every_gamma(family, gamma, nesterov):
    ensemble, expected = make(family), make(family)
    groups = ensemble.parameter_groups(LR, MODULATION_LR, DECAY, gamma=gamma)
    actual = train(ensemble, partial(optim.SGD, momentum=0.9, nesterov=nesterov), groups)
    assert_same(actual, train_by_hand(expected, gamma, momentum_update(0.9, nesterov)))


def adam_update(decoupled: bool, paces: dict[str, float]):
    """Return Adam with rates multiplied by the pace of each parameter."""
    states: dict[str, list] = {}

    def update(name, value, gradient, rate, decay):
        step = gradient if decoupled else gradient + decay * value
        first, second, count = states.get(name, [0, 0, 0])
        first, second = 0.9 * first + 0.1 * step, 0.999 * second + 0.001 * step.square()
        count += 1
        states[name] = [first, second, count]
        direction = first / (1 - 0.9**count) / (second / (1 - 0.999**count)).sqrt()
        direction = torch.where(first == 0, 0.0, direction)  # units that every mask removes
        change = -rate * paces[name] * direction
        return change - rate * decay * value if decoupled else change

    return update


@every_gamma
@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
@pytest.mark.parametrize("family", ["collective regime", "own last layers", "lora", "fresh masks"])
def test_steps_of_adam_have_gamma_in_the_rate_and_not_in_the_decay(family, gamma, kind):
    ensemble, expected = make(family), make(family)
    make_optimizer = partial(kind, eps=1e-30)
    groups = ensemble.parameter_groups(
        LR / 10, MODULATION_LR / 10, DECAY * 10, gamma=gamma, optimizer=make_optimizer
    )
    actual = train(ensemble, make_optimizer, groups)
    shared = {id(p) for p in expected.shared_parameters()}
    pace = gamma_value(gamma, expected) / expected.natural_gamma
    paces = {name: pace if id(p) in shared else 1.0 for name, p in expected.named_parameters()}
    update = adam_update(kind is optim.AdamW, paces)

    def slower(name, value, gradient, rate, decay):
        return update(name, value, gradient, rate / 10, decay * 10)

    assert_same(actual, train_by_hand(expected, gamma, slower))


@pytest.mark.parametrize("optimizer", [optim.SGD, optim.AdamW])
def test_the_decay_of_a_step_does_not_depend_on_gamma(optimizer):
    def weights_after_a_step(gamma: float, decay: float) -> Tensor:
        ensemble = make("collective regime")
        groups = ensemble.parameter_groups(0.1, None, decay, gamma=gamma, optimizer=optimizer)
        train(ensemble, optimizer, groups, steps=1)
        return torch.cat([p.detach().flatten() for p in ensemble.shared_parameters()])

    start = make("collective regime")
    weights = torch.cat([p.detach().flatten() for p in start.shared_parameters()])
    for gamma in (0.5, 1.0, MEMBERS):
        change = weights_after_a_step(gamma, 1e-5) - weights_after_a_step(gamma, 0.0)
        torch.testing.assert_close(change, -0.1 * 1e-5 * weights, rtol=1e-3, atol=1e-12)


@pytest.mark.parametrize("optimizer", [optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop])
@pytest.mark.parametrize("family", ["collective regime", "own last layers", "lora"])
def test_with_gamma_zero_shared_parameters_do_not_move(family, optimizer):
    ensemble = make(family)
    before = [p.detach().clone() for p in ensemble.shared_parameters()]
    groups = ensemble.parameter_groups(gamma=0, optimizer=optimizer)
    train(ensemble, optimizer, groups)

    for parameter, start in zip(ensemble.shared_parameters(), before, strict=True):
        assert torch.equal(parameter, start)


def test_groups_have_the_factor_of_their_rate():
    ensemble = embens.batch_ensemble(make_reference(), 4, p=0.9)
    shared, modulations = ensemble.parameter_groups(0.2, 0.5, 1e-3, gamma=2)
    assert (shared["lr"], shared["weight_decay"], shared["gamma_factor"]) == (0.1, 2e-3, 0.5)
    assert (modulations["lr"], modulations["weight_decay"]) == (0.5, 0.0)
    assert modulations["gamma_factor"] == 1.0
    natural = ensemble.natural_gamma
    shared, _ = ensemble.parameter_groups(0.2, gamma=2, optimizer=optim.AdamW)
    assert shared["lr"] == pytest.approx(0.2 * 2 / natural)
    assert shared["weight_decay"] == pytest.approx(5e-4 * natural / 2)
    shared, _ = ensemble.parameter_groups(0.2, gamma=2, optimizer=optim.Adam)
    assert shared["lr"] == pytest.approx(0.2 * 2 / natural)
    assert shared["weight_decay"] == pytest.approx(5e-4 * 4 / 2)


def test_per_member_layers_have_the_ordinary_rate_and_decay():
    separate = embens.independent(make_reference(), 3)
    (group,) = separate.parameter_groups(0.2, 0.5, 1e-3, gamma=2, modulation_weight_decay=0.7)
    assert (group["lr"], group["weight_decay"]) == (0.2, 1e-3)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    ensemble = embens.embed(net, 3, norm_affine="member")
    groups = ensemble.parameter_groups(0.2, 0.5, 1e-3)
    assert [(g["lr"], g["weight_decay"]) for g in groups[1:]] == [(0.5, 0.0), (0.2, 1e-3)]
    assert sum(p.numel() for p in groups[2]["params"]) == 3 * (4 + 4)
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in ensemble.parameters())


def test_separately_drawn_last_layers_have_a_group_and_make_gamma_m():
    ensemble = embens.batch_ensemble(make_reference(), 4, p=0.5, own="last")
    shared, modulations, per_member = ensemble.parameter_groups(0.1, 0.5, 1e-3)

    assert {tuple(p.shape) for p in per_member["params"]} == {(4, 3, 7), (4, 3)}
    assert per_member["gamma_factor"] == 1.0
    assert modulations["lr"] == 0.5
    assert shared["lr"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"lr": -1.0}, ValueError, "lr must be finite and not negative, got -1"),
        ({"lr": "fast"}, ValueError, "lr must be finite and not negative, got 'fast'"),
        ({"modulation_lr": math.nan}, ValueError, "modulation_lr must be finite"),
        ({"gamma": -1}, ValueError, "gamma must be finite and not negative, got -1"),
        ({"gamma": "natural"}, TypeError, "gamma must be a number, a function"),
        ({"optimizer": lambda g: None}, TypeError, "a function from parameter groups"),
        ({"optimizer": optim.SGD([torch.zeros(1)])}, TypeError, "a function from parameter groups"),
        ({"optimizer": lambda g: optim.LBFGS(g[0]["params"])}, TypeError, "need a closure"),
    ],
)
def test_invalid_arguments_of_parameter_groups_raise(arguments, error, message):
    ensemble = embens.batch_ensemble(make_reference(), 3)
    with pytest.raises(error, match=message):
        ensemble.parameter_groups(**arguments)


class TestRates:
    """Gamma is a ratio of learning rates, which schedulers and loops cannot lose silently."""

    def optimizer(self, kind=optim.SGD, lr: float = 0.1, **options):
        ensemble = embens.batch_ensemble(make_reference(), 4, p=0.9)
        groups = ensemble.parameter_groups(lr, gamma=1, optimizer=kind, **options)
        for parameter in ensemble.parameters():
            parameter.grad = torch.ones_like(parameter)
        return kind(groups)

    @pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW])
    @pytest.mark.parametrize(
        "overwrite",
        [
            lambda o: optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
            lambda o: optim.lr_scheduler.OneCycleLR(o, max_lr=0.7, total_steps=10),
            lambda o: optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
            lambda o: [group.update(lr=0.05) for group in o.param_groups],
        ],
        ids=["one cycle", "one cycle, other rate", "cyclic", "loop"],
    )
    def test_one_absolute_rate_for_all_groups_raises(self, kind, overwrite):
        optimizer = self.optimizer(kind)
        optimizer.step()
        overwrite(optimizer)
        with pytest.raises(ValueError, match=r"without gamma \(factor 0\..*gamma_factor"):
            optimizer.step()

    def test_a_single_group_with_the_full_rate_raises(self):
        ensemble = embens.mc_dropout(make_reference(), 4)
        optimizer = optim.SGD(ensemble.parameter_groups(0.1, gamma=1))
        optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10, cycle_momentum=False)
        with pytest.raises(ValueError, match=r"set to 0\.1 without gamma"):
            optimizer.step()

    @pytest.mark.parametrize(
        "make_scheduler",
        [
            lambda o: optim.lr_scheduler.StepLR(o, 1),
            lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 5),
            lambda o: optim.lr_scheduler.LinearLR(o),
            lambda o: optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
            lambda o: optim.lr_scheduler.OneCycleLR(
                o, [0.1 * g["gamma_factor"] for g in o.param_groups], 7, cycle_momentum=False
            ),
        ],
    )
    @pytest.mark.parametrize("options", [{}, {"modulation_lr": 0.5}, {"modulation_lr": 0.025}])
    def test_rates_in_the_planned_ratio_pass(self, make_scheduler, options):
        optimizer = self.optimizer(**options)
        scheduler = make_scheduler(optimizer)
        for _ in range(5):
            optimizer.step()
            scheduler.step()

    def test_a_ratio_that_drifts_is_reported_once(self):
        optimizer = self.optimizer()
        scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, 10, eta_min=0.01)

        def train():
            for _ in range(13):
                optimizer.step()
                scheduler.step()

        with pytest.warns(UserWarning, match=r"so gamma changes.*eta_min=0") as caught:
            train()
        assert [warning.filename for warning in caught] == [__file__]

    @pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW, optim.NAdam])
    def test_groups_for_sgd_in_an_optimizer_of_the_adam_kind_are_reported_once(self, kind):
        optimizer = kind(self.optimizer(optim.SGD).param_groups)
        with pytest.warns(UserWarning, match=f"optimizer=torch.optim.{kind.__name__}") as caught:
            optimizer.step()
        optimizer.step()
        assert [warning.filename for warning in caught] == [__file__]
        self.optimizer(kind).step()

    def test_groups_for_sgd_fit_adam_if_the_natural_gamma_is_the_number_of_members(self):
        ensemble = embens.batch_ensemble(make_reference(), 4, p=0.0)
        groups = ensemble.parameter_groups(0.1, gamma=1)
        expected = ensemble.parameter_groups(0.1, gamma=1, optimizer=optim.AdamW)
        assert [g["lr"] for g in groups] == [g["lr"] for g in expected]
        assert [g["weight_decay"] for g in groups] == [g["weight_decay"] for g in expected]
        optim.AdamW(groups).step()

    def test_the_check_survives_saving_the_optimizer(self):
        optimizer = self.optimizer()
        optimizer.load_state_dict(optimizer.state_dict())
        for group in optimizer.param_groups:
            group["lr"] = 0.05
        with pytest.raises(ValueError, match="without gamma"):
            optimizer.step()

    def test_other_optimizers_are_left_alone(self):
        self.optimizer()
        parameter = nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        optim.SGD([{"params": [parameter], "lr": 0.1}]).step()
        assert torch.equal(parameter.detach(), torch.tensor([0.9, 0.9]))


def test_the_overlap_is_the_product_over_hidden_post_sites_and_low_rank_layers():
    half, quarter = laws.Shifted(0.5**0.5), laws.Shifted(0.5)
    modulated = (
        Site("0", "pre", laws.Normal(), 4),
        Site("0", "post", laws.Normal(), 3, hidden=False),
        Site("2", "post", half, 4),
        Site("4", "post", quarter, 4),
    )
    assert overlap(EnsembleSpec("embed", 3, modulated)) == pytest.approx(0.5 * 0.25)
    with_low_rank = EnsembleSpec("embed", 3, modulated, (LowRankSite("2", 1, "additive", 1.0),))
    assert overlap(with_low_rank) == pytest.approx(0.5 * 0.25 / 2)
    assert overlap(EnsembleSpec("embed", 3, modulated, individual_head=True)) == 0
    assert overlap(EnsembleSpec("embed", 3)) == 1
