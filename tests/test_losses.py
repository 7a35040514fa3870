"""Losses of the members and default criteria, against loops over members."""

import math
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import embens
from embens import objective
from embens.losses import member_losses

MEMBERS, ROWS = 4, 12


class TestDefaultCriterion:
    outputs = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(0))

    def losses(self, criterion, target) -> Tensor:
        return torch.stack([criterion(o, target) for o in self.outputs])

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
    def test_is_cross_entropy_for_integers(self, dtype):
        target = torch.tensor([0, 1, 2, 2, 1, 0], dtype=dtype)
        expected = self.losses(F.cross_entropy, target.long())
        torch.testing.assert_close(member_losses(self.outputs, target), expected)

    @pytest.mark.parametrize("few", [2, 3])
    def test_is_the_same_for_few_and_for_many_classes(self, few, monkeypatch):
        monkeypatch.setattr(sys.modules["embens.losses"], "FEW_CLASSES", few)
        for target in (torch.tensor([0, -100, 2, 2, 1, 0]), torch.rand(6, 3).softmax(-1)):
            expected = self.losses(F.cross_entropy, target)
            torch.testing.assert_close(member_losses(self.outputs, target), expected)

    def test_leaves_out_ignored_labels_as_torch_does(self):
        target = torch.tensor([0, -100, 2, 2, -100, 0])
        expected = self.losses(F.cross_entropy, target)
        torch.testing.assert_close(member_losses(self.outputs, target), expected)
        own = torch.stack([target, target.roll(1), torch.zeros_like(target), target])
        actual = member_losses(self.outputs, own, batch="own")
        expected = [F.cross_entropy(o, t) for o, t in zip(self.outputs, own, strict=True)]
        torch.testing.assert_close(actual, torch.stack(expected))

    def test_is_cross_entropy_for_rows_of_probabilities(self):
        target = torch.rand(6, 3).softmax(-1)
        expected = self.losses(F.cross_entropy, target)
        torch.testing.assert_close(member_losses(self.outputs, target), expected)
        actual = member_losses(self.outputs[0], target, batch="split", members=4)
        rows = [F.cross_entropy(self.outputs[0, a::4], target[a::4]) for a in range(4)]
        torch.testing.assert_close(actual, torch.stack(rows))

    @pytest.mark.parametrize("target", [torch.rand(6, 3), -torch.rand(6, 3).softmax(-1)])
    def test_is_squared_error_for_other_floating_targets(self, target):
        expected = self.losses(F.mse_loss, target)
        torch.testing.assert_close(member_losses(self.outputs, target), expected)

    @pytest.mark.parametrize("criterion", [None, F.mse_loss])
    def test_compares_a_vector_of_targets_with_one_column_of_outputs(self, criterion):
        outputs, target = self.outputs[..., :1], torch.randn(6)
        expected = (outputs[..., 0] - target).square().mean(1)
        torch.testing.assert_close(member_losses(outputs, target, criterion), expected)
        torch.testing.assert_close(
            member_losses(outputs[..., 0], target[:, None], criterion), expected
        )
        split = member_losses(outputs[0], target, criterion, batch="split", members=2)
        rows = [(outputs[0, a::2, 0] - target[a::2]).square().mean() for a in range(2)]
        torch.testing.assert_close(split, torch.stack(rows))

    def test_is_applied_at_every_position_of_further_axes(self):
        outputs = torch.randn(2, 4, 3, 5, 5)
        target = torch.randint(3, (4, 5, 5))
        expected = torch.stack([F.cross_entropy(o, target) for o in outputs])
        torch.testing.assert_close(member_losses(outputs, target), expected)

    @pytest.mark.parametrize(
        ("outputs", "target", "error", "message"),
        [
            (torch.zeros(4, 6, 3), torch.zeros(6), ValueError, r"\(6, 3\), got \(6,\)"),
            (torch.zeros(4, 6, 1), torch.zeros(5), ValueError, r"\(6, 1\), got \(5,\)"),
            (torch.zeros(4, 6, 1), torch.zeros(6).long(), ValueError, "at least two outputs"),
            (torch.zeros(4, 6, 3), torch.zeros(6).bool(), TypeError, r"target\.long\(\)"),
            ({"a": torch.zeros(4, 6)}, torch.zeros(6), TypeError, "got dict"),
        ],
    )
    def test_raises_where_there_is_no_default(self, outputs, target, error, message):
        with pytest.raises(error, match=message):
            objective(outputs, target)

    @pytest.mark.parametrize("batch", ["same", "own", "split"])
    def test_is_zero_for_a_batch_of_ignored_labels(self, batch):
        outputs = self.outputs[0] if batch == "split" else self.outputs
        target = torch.full((4, 6) if batch == "own" else (6,), -100)
        losses = member_losses(outputs, target, batch=batch, members=4)
        assert losses.tolist() == [0.0] * 4


def test_a_criterion_over_members_is_called_once_and_gives_the_same_objective():
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


def test_a_criterion_over_members_that_averages_them_raises():
    ensemble = embens.batch_ensemble(torch.nn.Sequential(torch.nn.Linear(4, 3)), 5, sites="all")

    def averaged(outputs, target):
        return (outputs - target).square().mean()

    averaged.over_members = True
    with pytest.raises(ValueError, match=r"must return losses \(5, batch"):
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
def test_losses_of_torch_do_not_broadcast_a_target(criterion, batch):
    """Targets (n,) are compared with outputs (n, 1) by row; torch would compare all pairs."""
    outputs, target = torch.randn(3, 6, 1), torch.rand(6)
    same = outputs[0] if batch == "split" else outputs
    targets = target.expand(3, 6) if batch == "own" else target
    actual = objective(same, targets, criterion, batch=batch, members=3)
    if batch == "split":
        parts = [(outputs[0, a::3, 0], target[a::3]) for a in range(3)]
    else:
        parts = [(o[:, 0], target) for o in outputs]
    torch.testing.assert_close(actual, sum(criterion(o, t).mean() for o, t in parts))
    for wrong in (torch.rand(6, 6), torch.rand(1), torch.rand(1, 6)):
        with pytest.raises(ValueError, match=r"targets must have the shape.*\(6, 1\)"):
            objective(outputs, wrong, criterion)
    if criterion is not TORCHS["logits"]:
        whole = objective(outputs, torch.arange(6), criterion)
        torch.testing.assert_close(whole, objective(outputs, torch.arange(6.0), criterion))


def test_a_criterion_of_the_user_gets_the_target_unchanged():
    outputs, target = torch.randn(3, 6, 1), torch.rand(6)
    actual = objective(outputs, target, lambda o, t: (o.squeeze(1) - t).square().mean())
    torch.testing.assert_close(actual, objective(outputs, target))


@pytest.mark.parametrize(
    "criterion", [F.cross_entropy, nn.CrossEntropyLoss(), partial(F.cross_entropy, reduction="sum")]
)
@pytest.mark.parametrize("target", [torch.zeros(6), torch.zeros(6, 1), torch.zeros(6).long()])
def test_cross_entropy_of_one_output_raises(criterion, target):
    with pytest.raises(ValueError, match="at least two outputs"):
        objective(torch.randn(3, 6, 1), target, criterion)


@pytest.mark.parametrize("criterion", [None, F.cross_entropy, nn.CrossEntropyLoss()])
def test_a_column_of_classes_raises(criterion):
    with pytest.raises(ValueError, match=r"targets of shape \(6,\) for .*, got \(6, 1\)\. Squeeze"):
        objective(torch.randn(3, 6, 4), torch.zeros(6, 1).long(), criterion)


@pytest.mark.parametrize("few", [2, 32])
@pytest.mark.parametrize("batch", ["same", "own", "split"])
def test_invalid_labels_raise_with_their_rows(batch, few, monkeypatch):
    for name in ("embens.losses", "embens.optim"):
        monkeypatch.setattr(sys.modules[name], "FEW_CLASSES", few)
    outputs = torch.randn(6, 3) if batch == "split" else torch.randn(2, 6, 3)
    target = torch.tensor([0, 1, 2, 7, -1, 0])
    target = target.expand(2, 6) if batch == "own" else target
    message = r"labels must be from 0 to 2, one for each output, got .* in row.*-100 marks"
    with pytest.raises(ValueError, match=message):
        objective(outputs, target, batch=batch, members=2)


def test_targets_that_are_not_finite_raise_with_their_rows():
    outputs, target = torch.randn(3, 6, 1), torch.rand(6)
    target[[1, 4]] = math.nan
    with pytest.raises(ValueError, match=r"targets have NaN in rows 1, 4\. Remove"):
        objective(outputs, target)

    def masked(outputs, target):
        return (outputs[:, 0] - target)[target.isfinite()].square().mean()

    assert objective(outputs, target, masked).isfinite()
    assert objective(outputs * math.nan, torch.rand(6)).isnan()  # a diverging run is not an error


class TestMixtureMoments:
    """Outputs are a mean and a log-variance; the loss is that of the mixture's moments."""

    outputs = torch.randn(MEMBERS, ROWS, 2, generator=torch.Generator().manual_seed(4)).double()
    target = torch.randn(ROWS, generator=torch.Generator().manual_seed(5)).double()

    def test_the_loss_of_a_member_is_the_gaussian_nll_of_torch(self):
        pairs = zip(*self.outputs.unbind(-1), strict=True)
        losses = [F.gaussian_nll_loss(mean, self.target, s.exp()) for mean, s in pairs]
        actual = member_losses(self.outputs, self.target, embens.gaussian_nll)
        torch.testing.assert_close(actual, torch.stack(losses))
        column = objective(self.outputs, self.target[:, None], embens.gaussian_nll)
        torch.testing.assert_close(column, actual.sum())

    @pytest.mark.parametrize("criterion", [None, embens.gaussian_nll])
    def test_the_joint_loss_is_that_of_one_normal_distribution(self, criterion):
        means, variances = self.outputs[..., 0], self.outputs[..., 1].exp()
        second = (variances + means.square()).mean(0)
        loss = nn.GaussianNLLLoss()(means.mean(0), self.target, second - means.mean(0).square())
        actual = objective(self.outputs, self.target, criterion, of="moments")
        torch.testing.assert_close(actual, MEMBERS * loss)

    def test_its_variance_is_that_of_a_prediction(self):
        prediction = embens.Prediction(self.outputs, "gaussian")
        law = torch.distributions.Normal(prediction.mean, prediction.variance.sqrt())
        expected = -law.log_prob(self.target).mean() - math.log(2 * math.pi) / 2
        actual = objective(self.outputs, self.target, of="moments")
        torch.testing.assert_close(actual, MEMBERS * expected)

    def test_one_member_has_the_same_loss_with_and_without_moments(self):
        one = self.outputs[:1]
        own = objective(one, self.target, embens.gaussian_nll)
        torch.testing.assert_close(objective(one, self.target, of="moments"), own)

    def test_its_minimum_is_found_by_gradient_descent(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(80, 5, generator=generator)
        y = x[:, 0] + 0.3 * torch.randn(80, generator=generator)
        reference = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
        ensemble = embens.batch_ensemble(reference, 3, generator=generator)
        optimizer = optim.SGD(ensemble.parameter_groups(lr=0.02), momentum=0.9)
        before = ensemble.objective(ensemble(x), y, of="moments").item() / 3
        for _ in range(60):
            optimizer.zero_grad()
            ensemble.objective(ensemble(x), y, of="moments").backward()
            optimizer.step()
        after = ensemble.objective(ensemble(x), y, of="moments").item() / 3

        assert after < before - 0.3

    def test_other_outputs_and_batches_raise(self):
        with pytest.raises(ValueError, match="a mean and a log-variance"):
            objective(self.outputs[..., :1], self.target, of="moments")
        with pytest.raises(ValueError, match="of='moments' needs members on the same rows"):
            objective(self.outputs, self.target.expand(MEMBERS, -1), of="moments", batch="own")
        with pytest.raises(ValueError, match="targets must have the shape"):
            objective(self.outputs, self.target[:-1], of="moments")


def test_a_criterion_that_returns_no_tensor_raises():
    with pytest.raises(TypeError, match=r"must return a tensor, got tuple"):
        objective(torch.zeros(2, 3, 4), torch.arange(3), lambda o, t: (o, t))
