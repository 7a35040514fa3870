"""Sums over batches agree with the metrics of all rows."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from embens import metrics
from embens.training import tally as tallies
from embens.training.tally import Tally


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
        tally.add(losses, outputs[:, rows], target[rows], len(rows))
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
    tally.add(torch.zeros(4), outputs, target, 50)
    expected = metrics.correctness_correlation(outputs[1:], target).item()
    assert tally.summary()["correlation"] == pytest.approx(expected, abs=1e-6)
    single = Tally(1)
    single.add(torch.zeros(1), outputs[1:2], target, 50)
    assert math.isnan(single.summary()["correlation"])


def test_ignored_labels_are_not_counted():
    outputs, target = outputs_and_target()
    ignored = target.clone()
    ignored[:20] = -100
    tally = Tally(4)
    tally.add(torch.zeros(4), outputs, ignored, 50)
    expected = metrics.member_accuracy(outputs[:, 20:], target[20:]).tolist()
    assert tally.summary()["member_accuracy"] == pytest.approx(expected)


def test_a_split_batch_is_counted_by_the_rows_of_each_member():
    outputs, target = outputs_and_target(10)
    tally = Tally(4, "split")
    mixed = torch.stack([outputs[i % 4, i] for i in range(10)])
    losses = [F.cross_entropy(mixed[a::4], target[a::4]) for a in range(4)]
    tally.add(torch.stack(losses), mixed, target, 10)
    tally.add(torch.stack(losses[:2]), mixed[:2], target[:2], 2)
    summary = tally.summary()
    assert tally.sums["rows"].tolist() == [4, 4, 2, 2]
    assert summary["member_loss"] == pytest.approx(torch.stack(losses).tolist())
    right = (mixed.argmax(-1) == target).double()
    again = torch.cat([right, right[:2]])
    expected = [torch.cat([right[a::4], again[10:][a : a + 1]]).mean().item() for a in range(4)]
    assert summary["member_accuracy"] == pytest.approx(expected)
