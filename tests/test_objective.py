"""The objective against a naive loop over members, for every family and criterion."""

from __future__ import annotations

import math
import sys
from functools import partial

import cases
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import embens
from embens import laws, objective
from embens.objective import member_losses

MEMBERS, ROWS, CLASSES = 4, 12, 3


def make_reference(dtype: torch.dtype = torch.float64, outputs: int = CLASSES) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, outputs)]
    return nn.Sequential(*layers).to(dtype)


FAMILIES = {
    "independent regime": lambda net: embens.batch_ensemble(net, MEMBERS),
    "collective regime": lambda net: embens.batch_ensemble(net, MEMBERS, p=0.9),
    "fixed masks": lambda net: embens.mc_dropout(net, MEMBERS),
    "fresh masks": lambda net: embens.mc_dropout(net, MEMBERS, fresh=True),
    "last layer": lambda net: embens.last_layer_dropout(net, MEMBERS),
    "trainable last layer": lambda net: embens.last_layer_dropout(net, MEMBERS, trainable=True),
    "independent networks": lambda net: embens.independent(net, MEMBERS),
    **{
        name: partial(family, members=MEMBERS)
        for name, family in (cases.FAMILIES | cases.STOCHASTIC).items()
    },
    "bayesian": lambda net: cases.bayesian(net, MEMBERS).to(next(net.parameters()).dtype),
    "only pre": lambda net: embens.embed(net, MEMBERS, pre=laws.Rademacher(), post=None),
}


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (ROWS,), generator=generator)


def run(ensemble: nn.Module, x: Tensor, **kwargs: str) -> Tensor:
    """Run with the same fresh masks every time."""
    torch.manual_seed(7)
    return ensemble(x, **kwargs)


def gradients(ensemble: nn.Module) -> dict[str, Tensor]:
    found = {n: p.grad for n, p in ensemble.named_parameters() if p.grad is not None}
    ensemble.zero_grad()
    return found


def naive(ensemble, loss_of_member) -> dict[str, Tensor]:
    """Return each parameter's gradient from a loop over members with ordinary losses."""
    names, parameters = zip(*ensemble.named_parameters(), strict=True)
    total = {name: torch.zeros_like(p) for name, p in ensemble.named_parameters()}
    for a in range(ensemble.members):
        found = torch.autograd.grad(loss_of_member(a), parameters, allow_unused=True)
        for name, gradient in zip(names, found, strict=True):
            if gradient is not None:
                total[name] += gradient
    return total


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_every_parameter_has_the_gradient_of_a_naive_loop(family, data):
    x, y = data
    ensemble = family(make_reference())
    loss = objective(run(ensemble, x), y)
    loss.backward()
    expected = naive(ensemble, lambda a: F.cross_entropy(run(ensemble, x)[a], y))
    assert_same(gradients(ensemble), expected)
    losses = [F.cross_entropy(output, y) for output in run(ensemble, x)]
    torch.testing.assert_close(loss, torch.stack(losses).sum())


@pytest.mark.parametrize("chunk", [1, 3, 4])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_chunks_accumulate_the_same_gradient(family, chunk, data):
    x, y = data
    ensemble = family(make_reference())
    torch.manual_seed(7)
    value = ensemble.backward(x, y, chunk=chunk)
    expected = naive(ensemble, lambda a: F.cross_entropy(run(ensemble, x)[a], y))
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
    "a user's own": (lambda f, y: (f.sum(1) - y).abs().pow(1.5), "numbers"),
}


@pytest.mark.parametrize(("criterion", "kind"), CRITERIA.values(), ids=CRITERIA.keys())
def test_any_criterion_is_used_member_by_member(criterion, kind, data):
    x, classes = data
    y = classes if kind == "classes" else x.sum(1)
    ensemble = embens.batch_ensemble(make_reference(), MEMBERS, p=0.5)
    loss = objective(ensemble(x), y, criterion=criterion)
    loss.backward()
    expected = naive(ensemble, lambda a: criterion(ensemble(x)[a], y).mean())
    assert_same(gradients(ensemble), expected)
    torch.testing.assert_close(
        loss, torch.stack([criterion(o, y).mean() for o in ensemble(x)]).sum()
    )
    ensemble.backward(x, y, criterion=criterion, chunk=2)
    assert_same(gradients(ensemble), expected)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_members_can_have_batches_of_their_own(family, data):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(MEMBERS, 6, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (MEMBERS, 6), generator=generator)
    ensemble = family(make_reference())
    objective(run(ensemble, x, batch="own"), y, batch="own").backward()
    expected = naive(ensemble, lambda a: F.cross_entropy(run(ensemble, x, batch="own")[a], y[a]))
    assert_same(gradients(ensemble), expected)


@pytest.mark.parametrize("rows", [12, 10, 5])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_members_can_split_a_batch(family, rows, data):
    x, y = data[0][:rows], data[1][:rows]
    ensemble = family(make_reference())

    def loss(a: int) -> Tensor:
        return F.cross_entropy(run(ensemble, x, batch="split")[a::MEMBERS], y[a::MEMBERS])

    value = ensemble.objective(run(ensemble, x, batch="split"), y, batch="split")
    value.backward()
    assert_same(gradients(ensemble), naive(ensemble, loss))
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


def test_the_loss_of_the_mean_takes_the_place_of_every_members_loss(data):
    x, y = data
    ensemble = embens.batch_ensemble(make_reference(), MEMBERS, p=0.5)
    loss = objective(ensemble(x), y, of="mean")
    loss.backward()
    torch.testing.assert_close(loss, MEMBERS * F.cross_entropy(ensemble(x).mean(0), y))
    outputs = ensemble(x)
    mean = outputs.mean(0).detach().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(mean, y), mean)
    expected = naive(ensemble, lambda a: (ensemble(x)[a] * slope).sum())
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
    expected = naive(ensemble, lambda a: F.cross_entropy(ensemble(x)[a], y))
    norm = torch.stack([g.norm() for g in expected.values()]).norm()
    objective(ensemble(x), y).backward()
    found = nn.utils.clip_grad_norm_(ensemble.parameters(), 0.1 * float(norm))
    torch.testing.assert_close(found, norm)
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
    expected = naive(ensemble, lambda a: F.cross_entropy(ensemble(x)[a], y))
    ensemble.zero_grad()
    loss().backward()  # in bfloat16 the gradient is right to about a percent
    found, exact = (
        torch.cat([g.flatten() for g in group.values()])
        for group in (gradients(ensemble), expected)
    )
    assert (found - exact).norm() < 0.05 * exact.norm()


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
    expected = naive(ensemble, lambda a: F.cross_entropy(change(ensemble(x))[a], target))
    found = gradients(ensemble)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)


def test_without_gradients_the_value_is_the_same(data):
    x, y = data
    ensemble = embens.batch_ensemble(make_reference(), MEMBERS)
    with torch.no_grad():
        value = objective(ensemble(x), y)
    torch.testing.assert_close(value, objective(ensemble(x), y).detach())
    split = ensemble(x, batch="split")
    with pytest.raises(TypeError, match="how many members there are; pass members="):
        objective(split, y, batch="split")
    found = ensemble.objective(split.detach(), y, F.cross_entropy, batch="split")
    torch.testing.assert_close(found, objective(split, y, batch="split", members=MEMBERS).detach())


def test_wrong_options_say_what_is_expected(data):
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
    with pytest.raises(ValueError, match=r"outputs \(4, batch, …\); their first axis has 12"):
        ensemble.objective(outputs.mean(0), y)
    with pytest.raises(TypeError, match="no argument 'critrion'; did you mean 'criterion'"):
        objective(outputs, y, critrion=F.cross_entropy)


def test_a_gamma_is_told_where_it_went(data):
    x, y = data
    ensemble = embens.batch_ensemble(make_reference(), MEMBERS)
    for function in (objective, ensemble.objective):
        for gamma in (None, 2.0):
            with pytest.raises(TypeError, match=r"parameter_groups\(lr, gamma=…\).*fit\(gamma=…\)"):
                function(ensemble(x), y, gamma=gamma)


def test_any_other_loss_and_penalty_may_be_added(data):
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


class TestDefaultCriterion:
    outputs = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(0))

    def losses(self, criterion, target) -> Tensor:
        return torch.stack([criterion(o, target) for o in self.outputs])

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
    def test_is_cross_entropy_for_whole_numbers(self, dtype):
        target = torch.tensor([0, 1, 2, 2, 1, 0], dtype=dtype)
        expected = self.losses(F.cross_entropy, target.long())
        torch.testing.assert_close(member_losses(self.outputs, target), expected)

    @pytest.mark.parametrize("few", [2, 3])
    def test_is_the_same_for_few_and_for_many_classes(self, few, monkeypatch):
        monkeypatch.setattr(sys.modules["embens.objective"], "FEW_CLASSES", few)
        for target in (torch.tensor([0, -100, 2, 2, 1, 0]), torch.rand(6, 3).softmax(-1)):
            expected = self.losses(F.cross_entropy, target)
            torch.testing.assert_close(member_losses(self.outputs, target), expected)

    def test_leaves_out_ignored_labels_as_torch_does(self):
        target = torch.tensor([0, -100, 2, 2, -100, 0])
        expected = self.losses(F.cross_entropy, target)
        torch.testing.assert_close(member_losses(self.outputs, target), expected)
        own = torch.stack([target, target.roll(1), torch.zeros_like(target), target])
        found = member_losses(self.outputs, own, batch="own")
        expected = [F.cross_entropy(o, t) for o, t in zip(self.outputs, own, strict=True)]
        torch.testing.assert_close(found, torch.stack(expected))

    def test_is_cross_entropy_for_rows_of_probabilities(self):
        target = torch.rand(6, 3).softmax(-1)
        expected = self.losses(F.cross_entropy, target)
        torch.testing.assert_close(member_losses(self.outputs, target), expected)
        found = member_losses(self.outputs[0], target, batch="split", members=4)
        rows = [F.cross_entropy(self.outputs[0, a::4], target[a::4]) for a in range(4)]
        torch.testing.assert_close(found, torch.stack(rows))

    @pytest.mark.parametrize("target", [torch.rand(6, 3), -torch.rand(6, 3).softmax(-1)])
    def test_is_squared_error_for_other_numbers(self, target):
        expected = self.losses(F.mse_loss, target)
        torch.testing.assert_close(member_losses(self.outputs, target), expected)

    @pytest.mark.parametrize("criterion", [None, F.mse_loss])
    def test_targets_of_one_number_meet_their_rows(self, criterion):
        outputs, target = self.outputs[..., :1], torch.randn(6)
        expected = (outputs[..., 0] - target).square().mean(1)
        torch.testing.assert_close(member_losses(outputs, target, criterion), expected)
        torch.testing.assert_close(
            member_losses(outputs[..., 0], target[:, None], criterion), expected
        )
        split = member_losses(outputs[0], target, criterion, batch="split", members=2)
        rows = [(outputs[0, a::2, 0] - target[a::2]).square().mean() for a in range(2)]
        torch.testing.assert_close(split, torch.stack(rows))

    def test_is_by_position_where_outputs_have_more_axes(self):
        outputs = torch.randn(2, 4, 3, 5, 5)
        target = torch.randint(3, (4, 5, 5))
        expected = torch.stack([F.cross_entropy(o, target) for o in outputs])
        torch.testing.assert_close(member_losses(outputs, target), expected)

    @pytest.mark.parametrize(
        ("outputs", "target", "error", "message"),
        [
            (torch.zeros(4, 6, 3), torch.zeros(6), ValueError, r"\(6, 3\); got \(6,\)"),
            (torch.zeros(4, 6, 1), torch.zeros(5), ValueError, r"\(6, 1\); got \(5,\)"),
            (torch.zeros(4, 6, 1), torch.zeros(6).long(), ValueError, "fewer than two"),
            (torch.zeros(4, 6, 3), torch.zeros(6).bool(), TypeError, r"target\.long\(\)"),
            ({"a": torch.zeros(4, 6)}, torch.zeros(6), TypeError, "got a dict"),
        ],
    )
    def test_refuses_what_it_can_not_know(self, outputs, target, error, message):
        with pytest.raises(error, match=message):
            objective(outputs, target)

    @pytest.mark.parametrize("batch", ["same", "own", "split"])
    def test_a_batch_without_a_label_that_counts_has_no_loss(self, batch):
        outputs = self.outputs[0] if batch == "split" else self.outputs
        target = torch.full((4, 6) if batch == "own" else (6,), -100)
        losses = member_losses(outputs, target, batch=batch, members=4)
        assert losses.tolist() == [0.0] * 4


def test_a_criterion_over_members_gives_the_same_objective_in_one_call():
    ensemble = embens.batch_ensemble(torch.nn.Sequential(torch.nn.Linear(4, 3)), 5, sites="all")
    x, target = torch.randn(6, 4), torch.randn(6, 3)
    calls = []

    def each(outputs, target):
        calls.append(outputs.shape)
        return (outputs - target).square().sum(-1)

    def once(outputs, target):
        return each(outputs, target)

    once.over_members = True
    values, gradients = [], []
    for criterion in (each, once):
        ensemble.zero_grad()
        loss = ensemble.objective(ensemble(x), target, criterion)
        loss.backward()
        values.append(loss.detach())
        gradients.append([p.grad.clone() for p in ensemble.parameters()])
    assert calls == [(6, 3)] * 5 + [(5, 6, 3)]
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*gradients)


def test_a_criterion_over_members_that_averages_them_is_refused():
    ensemble = embens.batch_ensemble(torch.nn.Sequential(torch.nn.Linear(4, 3)), 5, sites="all")

    def averaged(outputs, target):
        return (outputs - target).square().mean()

    averaged.over_members = True
    with pytest.raises(ValueError, match=r"expected losses \(\d, batch"):
        ensemble.objective(ensemble(torch.randn(6, 4)), torch.randn(6, 3), averaged)


TORCHS = {
    "mse": nn.MSELoss(),
    "l1": F.l1_loss,
    "huber": partial(F.huber_loss, delta=0.5),
    "smooth l1": nn.SmoothL1Loss(reduction="none"),
    "logits": nn.BCEWithLogitsLoss(),
}


@pytest.mark.parametrize("batch", ["same", "own", "split"])
@pytest.mark.parametrize("criterion", TORCHS.values(), ids=TORCHS.keys())
def test_no_loss_of_torch_broadcasts_a_target(criterion, batch):
    """Targets (n,) meet outputs (n, 1) row by row; by itself torch would compare all pairs."""
    outputs, target = torch.randn(3, 6, 1), torch.rand(6)
    same = outputs[0] if batch == "split" else outputs
    targets = target.expand(3, 6) if batch == "own" else target
    found = objective(same, targets, criterion, batch=batch, members=3)
    if batch == "split":
        parts = [(outputs[0, a::3, 0], target[a::3]) for a in range(3)]
    else:
        parts = [(o[:, 0], target) for o in outputs]
    torch.testing.assert_close(found, sum(criterion(o, t).mean() for o, t in parts))
    for wrong in (torch.rand(6, 6), torch.rand(1), torch.rand(1, 6)):
        with pytest.raises(ValueError, match=r"expected targets of the shape.*\(6, 1\)"):
            objective(outputs, wrong, criterion)
    if criterion is not TORCHS["logits"]:
        whole = objective(outputs, torch.arange(6), criterion)
        torch.testing.assert_close(whole, objective(outputs, torch.arange(6.0), criterion))


def test_a_users_own_criterion_has_the_target_as_it_is():
    outputs, target = torch.randn(3, 6, 1), torch.rand(6)
    found = objective(outputs, target, lambda o, t: (o.squeeze(1) - t).square().mean())
    torch.testing.assert_close(found, objective(outputs, target))


@pytest.mark.parametrize(
    "criterion", [F.cross_entropy, nn.CrossEntropyLoss(), partial(F.cross_entropy, reduction="sum")]
)
@pytest.mark.parametrize("target", [torch.zeros(6), torch.zeros(6, 1), torch.zeros(6).long()])
def test_cross_entropy_of_one_output_is_refused(criterion, target):
    with pytest.raises(ValueError, match="fewer than two"):
        objective(torch.randn(3, 6, 1), target, criterion)


@pytest.mark.parametrize("criterion", [None, F.cross_entropy, nn.CrossEntropyLoss()])
def test_a_column_of_classes_is_refused(criterion):
    with pytest.raises(ValueError, match=r"targets of shape \(6,\) for .*; got \(6, 1\)\. Squeeze"):
        objective(torch.randn(3, 6, 4), torch.zeros(6, 1).long(), criterion)


@pytest.mark.parametrize("few", [2, 32])
@pytest.mark.parametrize("batch", ["same", "own", "split"])
def test_labels_that_are_no_classes_are_named(batch, few, monkeypatch):
    monkeypatch.setattr(sys.modules["embens.objective"], "FEW_CLASSES", few)
    outputs = torch.randn(6, 3) if batch == "split" else torch.randn(2, 6, 3)
    target = torch.tensor([0, 1, 2, 7, -1, 0])
    target = target.expand(2, 6) if batch == "own" else target
    message = r"classes from 0 to 2, one for each output; got .* in row.*-100 marks"
    with pytest.raises(ValueError, match=message):
        objective(outputs, target, batch=batch, members=2)


def test_numbers_of_the_target_that_are_not_finite_are_named():
    outputs, target = torch.randn(3, 6, 1), torch.rand(6)
    target[[1, 4]] = math.nan
    with pytest.raises(ValueError, match=r"targets have NaN in rows 1, 4\. Leave"):
        objective(outputs, target)

    def masked(outputs, target):
        return (outputs[:, 0] - target)[target.isfinite()].square().mean()

    assert objective(outputs, target, masked).isfinite()
    assert objective(outputs * math.nan, torch.rand(6)).isnan()  # a run that diverges is seen


def test_several_heads_and_targets_go_through_a_criterion_of_trees():
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

    expected = naive(ensemble, of_member)
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


class TestMomentsOfAllMembers:
    """Outputs are a mean and a log-variance; one normal law has the moments of the mixture."""

    outputs = torch.randn(MEMBERS, ROWS, 2, generator=torch.Generator().manual_seed(4)).double()
    target = torch.randn(ROWS, generator=torch.Generator().manual_seed(5)).double()

    def test_a_members_own_loss_is_torchs_gaussian_nll(self):
        pairs = zip(*self.outputs.unbind(-1), strict=True)
        losses = [F.gaussian_nll_loss(mean, self.target, s.exp()) for mean, s in pairs]
        found = member_losses(self.outputs, self.target, embens.gaussian_nll)
        torch.testing.assert_close(found, torch.stack(losses))
        column = objective(self.outputs, self.target[:, None], embens.gaussian_nll)
        torch.testing.assert_close(column, found.sum())

    @pytest.mark.parametrize("criterion", [None, embens.gaussian_nll])
    def test_the_joint_loss_is_that_of_one_normal_law(self, criterion):
        means, variances = self.outputs[..., 0], self.outputs[..., 1].exp()
        second = (variances + means.square()).mean(0)  # of the mixture, by its raw moments
        loss = nn.GaussianNLLLoss()(means.mean(0), self.target, second - means.mean(0).square())
        found = objective(self.outputs, self.target, criterion, of="moments")
        torch.testing.assert_close(found, MEMBERS * loss)

    def test_its_variance_is_that_of_a_prediction(self):
        prediction = embens.Prediction(self.outputs, "gaussian")
        law = torch.distributions.Normal(prediction.mean, prediction.variance.sqrt())
        expected = -law.log_prob(self.target).mean() - math.log(2 * math.pi) / 2
        found = objective(self.outputs, self.target, of="moments")
        torch.testing.assert_close(found, MEMBERS * expected)

    def test_one_member_has_the_same_loss_either_way(self):
        one = self.outputs[:1]
        own = objective(one, self.target, embens.gaussian_nll)
        torch.testing.assert_close(objective(one, self.target, of="moments"), own)

    def test_it_trains_and_disagreement_pays_for_errors(self, tmp_path):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(80, 5, generator=generator)
        y = x[:, 0] + 0.3 * torch.randn(80, generator=generator)
        net = make_reference(torch.float32, outputs=2)
        ensemble = embens.batch_ensemble(net, 3, generator=generator)
        before = objective(ensemble(x), y, of="moments").item() / 3
        options = {"epochs": 30, "lr": 0.02, "of": "moments", "checkpoint": tmp_path}
        history = embens.fit(ensemble, (x, y), (x, y), **options)
        after = objective(ensemble(x), y, of="moments").item() / 3
        assert after < before - 0.3
        last = history.epochs[history.best_epoch - 1]
        assert last["validation_loss"] == pytest.approx(after, rel=1e-4)
        assert ensemble.objective(ensemble(x), y, of="moments").item() == pytest.approx(3 * after)

    def test_other_outputs_and_batches_are_refused(self):
        with pytest.raises(ValueError, match="a mean and a log-variance"):
            objective(self.outputs[..., :1], self.target, of="moments")
        with pytest.raises(ValueError, match="of='moments' needs members on the same rows"):
            objective(self.outputs, self.target.expand(MEMBERS, -1), of="moments", batch="own")
        with pytest.raises(ValueError, match="expected targets of the shape"):
            objective(self.outputs, self.target[:-1], of="moments")
        ensemble = embens.batch_ensemble(make_reference(), 3)
        with pytest.raises(ValueError, match="of='moments' needs batch='same'"):
            embens.fit(ensemble, (self.target, self.target), epochs=1, of="moments", batch="split")


def test_a_criterion_that_returns_no_tensor_is_explained():
    with pytest.raises(TypeError, match=r"expected a tensor.*got tuple"):
        objective(torch.zeros(2, 3, 4), torch.arange(3), lambda o, t: (o, t))
