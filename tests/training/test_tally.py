"""Losses and metrics of the members, counted over batches."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from embens import metrics
from embens.training import tally as tallies
from embens.training.tally import BatchResult, Tally


def classified(losses, outputs, target, rows, log_probabilities=None):
    """Return the result of a batch of a classification."""
    return BatchResult(losses, outputs, target, rows, "classification", log_probabilities)


def outputs_and_target(rows: int = 50):
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(4, rows, 3, generator=generator)
    return outputs, torch.randint(3, (rows,), generator=generator)


@pytest.mark.parametrize("buffer", [1, 100, 2**20])
def test_a_tally_agrees_with_the_metrics(buffer, monkeypatch):
    monkeypatch.setattr(tallies, "BUFFER_SIZE", buffer)
    outputs, target = outputs_and_target()
    tally = Tally(4)
    for rows in torch.arange(50).split(15):
        losses = torch.stack([F.cross_entropy(o[rows], target[rows]) for o in outputs])
        tally.add(classified(losses, outputs[:, rows], target[rows], len(rows)))
    summary = tally.summary()
    assert summary["member_loss"] == pytest.approx(metrics.member_nll(outputs, target).tolist())
    assert summary["loss"] == pytest.approx(metrics.member_nll(outputs, target).mean().item())
    accuracies = metrics.member_accuracy(outputs, target).tolist()
    assert summary["member_accuracy"] == pytest.approx(accuracies)
    expected = metrics.ensemble_accuracy(outputs, target).item()
    assert summary["ensemble_accuracy"] == pytest.approx(expected)
    expected = metrics.correctness_correlation(outputs, target).item()
    assert summary["correlation"] == pytest.approx(expected, abs=1e-6)


def test_members_that_are_always_right_leave_the_correlation():
    outputs, target = outputs_and_target()
    outputs[0] = 100 * F.one_hot(target, 3)
    tally = Tally(4)
    tally.add(classified(torch.zeros(4), outputs, target, 50))
    expected = metrics.correctness_correlation(outputs[1:], target).item()
    assert tally.summary()["correlation"] == pytest.approx(expected, abs=1e-6)
    single = Tally(1)
    single.add(classified(torch.zeros(1), outputs[1:2], target, 50))
    assert math.isnan(single.summary()["correlation"])


def test_ignored_labels_are_not_counted():
    outputs, target = outputs_and_target()
    ignored = target.clone()
    ignored[:20] = -100
    tally = Tally(4)
    tally.add(classified(torch.zeros(4), outputs, ignored, 50))
    expected = metrics.member_accuracy(outputs[:, 20:], target[20:]).tolist()

    assert tally.summary()["member_accuracy"] == pytest.approx(expected)


def test_a_split_batch_is_counted_by_the_rows_of_each_member():
    outputs, target = outputs_and_target(10)
    tally = Tally(4, "split")
    mixed = torch.stack([outputs[i % 4, i] for i in range(10)])
    losses = [F.cross_entropy(mixed[a::4], target[a::4]) for a in range(4)]
    tally.add(classified(torch.stack(losses), mixed, target, 10))
    tally.add(classified(torch.stack(losses[:2]), mixed[:2], target[:2], 2))
    summary = tally.summary()
    assert tally.sums["rows"].tolist() == [4, 4, 2, 2]
    assert summary["member_loss"] == pytest.approx(torch.stack(losses).tolist())
    right = (mixed.argmax(-1) == target).double()
    again = torch.cat([right, right[:2]])
    expected = [torch.cat([right[a::4], again[10:][a : a + 1]]).mean().item() for a in range(4)]
    assert summary["member_accuracy"] == pytest.approx(expected)


def test_the_log_loss_is_that_of_the_mean_probability():
    outputs, target = outputs_and_target()
    target[:20] = -100
    tally = Tally(4)
    for rows in torch.arange(50).split(15):
        tally.add(classified(torch.zeros(4), outputs[:, rows], target[rows], len(rows)))
    expected = metrics.nll(outputs[:, 20:], target[20:]).item()

    assert tally.summary()["nll"] == pytest.approx(expected)


@pytest.mark.parametrize("ignored", [0, 7])
def test_losses_that_are_left_out_are_cross_entropies_of_the_outputs(ignored):
    generator = torch.Generator().manual_seed(0)
    complete, deferred = Tally(4), Tally(4)
    for rows in (20, 13):
        outputs = torch.randn(4, rows, 3, generator=generator)
        target = torch.randint(3, (rows,), generator=generator)
        target[:ignored] = -100
        losses = torch.stack([F.cross_entropy(output, target) for output in outputs])
        complete.add(classified(losses, outputs, target, rows))
        deferred.add(classified(None, outputs, target, rows))
    expected = complete.summary()

    for name, value in deferred.summary().items():
        assert value == pytest.approx(expected[name], rel=1e-6)


def test_sums_do_not_depend_on_when_they_are_counted():
    generator = torch.Generator().manual_seed(0)
    late, early = Tally(4), Tally(4)
    for ignored in (0, 3, 0):
        outputs = torch.randn(4, 20, 3, generator=generator)
        target = torch.randint(3, (20,), generator=generator)
        target[:ignored] = -100
        for tally in (late, early):
            tally.add(classified(None, outputs, target, 20))
        early.flush()

    assert late.summary() == early.summary()


def test_batches_with_and_without_losses_can_be_mixed():
    outputs = torch.zeros(2, 3, 2)
    tally = Tally(2)
    tally.add(classified(torch.tensor([1.0, 5.0]), outputs, torch.tensor([0, 1, 1]), 3))
    tally.add(classified(None, outputs, torch.tensor([0, 1, 1]), 3))
    expected = [(1 + math.log(2)) / 2, (5 + math.log(2)) / 2]

    assert tally.summary()["member_loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("batch", ["same", "own"])
def test_the_first_of_several_largest_outputs_is_the_answer(batch):
    outputs = torch.tensor([[[1.0, 1.0, 0.0], [0.0, 2.0, 2.0], [3.0, 0.0, 0.0]]])
    target = torch.tensor([1, 1, 0])
    tally = Tally(1, batch)
    tally.add(classified(torch.zeros(1), outputs, target if batch == "same" else target[None], 3))
    assert tally.summary()["member_accuracy"] == [pytest.approx(2 / 3)]


@pytest.mark.parametrize("batch", ["same", "own", "split"])
def test_answers_are_those_of_argmax(batch):
    generator = torch.Generator().manual_seed(0)
    shape = (30, 5) if batch == "split" else (3, 30, 5)
    # All outputs of the second case are tied.
    for values in (torch.randn(shape, generator=generator), torch.zeros(shape)):
        rows = shape[:-1] if batch != "same" else (30,)
        target = torch.randint(5, rows, generator=generator)
        tally = Tally(3, batch)
        tally.add(classified(torch.zeros(3), values, target, 30))
        answers = values.argmax(-1) == target
        if batch == "split":
            expected = [answers[a::3].double().mean().item() for a in range(3)]
        else:
            expected = answers.double().mean(1).tolist()
        assert tally.summary()["member_accuracy"] == pytest.approx(expected)


@pytest.mark.parametrize("scale", [1.0, 1e-9])
def test_log_probabilities_of_the_loss_change_no_metric(scale):
    # Outputs of 1e-9 have equal log-probabilities, but answers are those of the outputs.
    outputs, target = outputs_and_target()
    outputs = scale * outputs
    plain, reused = Tally(4), Tally(4)
    plain.add(classified(None, outputs, target, 50))
    log_probabilities = outputs.movedim(2, 1).log_softmax(1)
    reused.add(classified(None, outputs, target, 50, log_probabilities))
    summary = reused.summary()

    assert summary == plain.summary()
    assert summary["member_accuracy"] == pytest.approx(
        metrics.member_accuracy(outputs, target).tolist()
    )
    assert summary["ensemble_accuracy"] == pytest.approx(
        metrics.ensemble_accuracy(outputs, target).item()
    )


def test_batches_without_a_metric_keep_no_outputs():
    tally = Tally(2)
    tally.add(BatchResult(torch.tensor([1.0, 3.0]), {"any": "outputs"}, None, 5))
    assert tally.summary() == {"loss": 2.0, "member_loss": [1.0, 3.0]}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_labels_may_be_small_integers(dtype):
    outputs, target = outputs_and_target()
    expected, actual = Tally(4), Tally(4)
    expected.add(classified(torch.zeros(4), outputs, target, 50))
    actual.add(classified(torch.zeros(4), outputs, target.to(dtype), 50))
    assert actual.summary() == expected.summary()
