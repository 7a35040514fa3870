"""The greedy choice of members, against a choice by hand and against all choices."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import embens
from embens import laws, metrics
from embens.training import selection


def case(seed: int = 0, outputs: int = 3, members: int = 6):
    generator = torch.Generator().manual_seed(seed)
    reference = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, outputs))
    ensemble = embens.independent(reference, members, generator=generator)
    with torch.no_grad():
        for parameter in ensemble.parameters():
            parameter.mul_(3)
    return ensemble, torch.randn(40, 4, generator=generator), generator


def by_hand(values: torch.Tensor, loss, size: int) -> list[int]:
    """Choose with running sums of what is averaged (probabilities, or outputs)."""
    chosen: list[int] = []
    total = torch.zeros_like(values[0])
    for k in range(1, size + 1):
        losses = torch.stack([loss((total + v) / k) for v in values])
        best = int((losses <= losses.min() + 1e-12).nonzero()[0])
        chosen.append(best)
        total = total + values[best]
    return chosen


@pytest.mark.parametrize("seed", range(4))
def test_classes_are_chosen_for_by_log_loss(seed):
    ensemble, x, generator = case(seed)
    y = torch.randint(3, (40,), generator=generator)
    selected = embens.select(ensemble, (x, y), size=5)
    p = ensemble(x).double().softmax(-1).detach()
    expected = by_hand(p, lambda mean: F.nll_loss(mean.log(), y), 5)
    assert list(selected.plan.subset.members) == expected
    torch.testing.assert_close(selected(x), ensemble(x)[expected])
    single = metrics.member_nll(ensemble(x), y)
    assert metrics.nll(selected(x), y) <= single.min()
    pair = embens.select(ensemble, (x, y), size=2)
    others = (p[[a, b]].mean(0) for a, b in itertools.combinations_with_replacement(range(6), 2))
    least = min(F.nll_loss(mean.log(), y) for mean in others)
    assert metrics.nll(pair(x), y) >= least - 1e-6


@pytest.mark.parametrize("shape", [(40,), (40, 1)])
def test_numbers_are_chosen_for_by_squared_error(shape):
    ensemble, x, generator = case(outputs=1)
    y = torch.randn(shape, generator=generator)
    selected = embens.select(ensemble, (x, y), size=8)
    outputs = ensemble(x).double().detach()

    def loss(mean):
        return (mean.flatten() - y.flatten()).square().mean()

    assert list(selected.plan.subset.members) == by_hand(outputs, loss, 8)
    assert loss(selected(x).mean(0)) <= min(map(loss, outputs)) + 1e-6


def test_rows_of_probabilities_are_classes_too():
    ensemble, x, generator = case()
    y = torch.randint(3, (40,), generator=generator)
    hard = embens.select(ensemble, (x, y), size=4)
    soft = embens.select(ensemble, (x, F.one_hot(y, 3).float()), size=4)
    assert soft.plan == hard.plan


def test_of_equal_members_the_first_is_chosen_whatever_the_order_of_batches():
    ensemble, x, generator = case(members=3)
    twins = ensemble.subset([1, 1, 2, 1, 0, 2, 0])
    y = torch.randint(3, (40,), generator=generator)
    expected = embens.select(ensemble, (x, y), size=6).plan.subset.members
    assert embens.select(twins, (x, y), size=6).plan.subset.members == expected
    loader = DataLoader(TensorDataset(x, y), batch_size=7)
    assert embens.select(twins, loader, size=6).plan.subset.members == expected


def test_members_run_once_in_evaluation_mode_and_get_their_mode_back(monkeypatch):
    ensemble, x, generator = case()
    y = torch.randint(3, (40,), generator=generator)
    calls = []
    ensemble.register_forward_hook(lambda module, args, out: calls.append(module.training))
    monkeypatch.setattr(selection, "ROWS", 10)
    selected = embens.select(ensemble.train(), (x, y), size=8)
    assert calls == [False] * 4
    assert ensemble.training
    assert selected.training


@pytest.mark.parametrize("seed", range(6))
def test_no_metric_makes_the_chosen_worse_than_the_best_single_member(seed):
    ensemble, x, generator = case(seed)
    y = torch.randint(3, (40,), generator=generator)
    best = metrics.member_accuracy(ensemble(x), y).max()

    def errors(outputs, target):
        return 1 - metrics.ensemble_accuracy(outputs, target)

    selected = embens.select(ensemble, (x, y), size=6, metric=errors)
    assert metrics.ensemble_accuracy(selected(x), y) >= best
    assert selected.members <= 6


def test_a_metric_of_ones_own_is_made_small():
    ensemble, x, _ = case()
    y = torch.zeros(40, dtype=torch.long)

    def spread(outputs, target):
        return outputs.std(0, correction=0).sum()

    alike = embens.select(ensemble, (x, y), 3, metric=spread)
    assert alike.plan.subset.members == (0, 0, 0)
    apart = embens.select(ensemble, (x, y), 2, metric=lambda o, t: -spread(o, t))
    assert len(set(apart(x))) == 2


def test_logits_among_outputs_are_what_is_chosen_by():
    class Named(nn.Sequential):
        def forward(self, rows):
            return {"logits": super().forward(rows)}

    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    x, y = torch.randn(30, 4), torch.arange(30) % 3
    one, other = (
        embens.batch_ensemble(net, 4, generator=torch.Generator().manual_seed(0))
        for net in (plain, Named(*plain))
    )
    expected = embens.select(one, (x, y), size=3).plan.subset
    assert embens.select(other, ({"rows": x}, y), size=3).plan.subset == expected


def test_what_can_not_be_chosen_from_is_refused():
    ensemble, x, _ = case()
    y = torch.zeros(40, dtype=torch.long)
    with pytest.raises(ValueError, match="at least 1"):
        embens.select(ensemble, (x, y), size=0)
    fresh = embens.mc_dropout(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), 3, fresh=True)
    with pytest.raises(ValueError, match="drawn anew"):
        embens.select(fresh, (x, y))
    with pytest.raises(ValueError, match="NaN in rows"):
        embens.select(ensemble, (x * float("nan"), y))
    with pytest.raises(ValueError, match="NaN for every choice"):
        embens.select(ensemble, (x, y), metric=lambda o, t: math.nan)


def test_a_choice_is_saved_with_the_ensemble_and_has_no_limit_if_members_are_repeated(tmp_path):
    reference = embens.networks.mlp(4, 16, 2, 3)
    ensemble = embens.batch_ensemble(reference, 5, generator=torch.Generator().manual_seed(0))
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    selected = embens.select(ensemble, (x, torch.arange(30) % 3), size=12)
    selected.save(tmp_path / "chosen")
    assert embens.load(tmp_path / "chosen", reference).plan == selected.plan
    assert selected.plan.repeats
    assert selected.plan.drawn == 5
    with pytest.raises(ValueError, match="members of this ensemble are the same"):
        embens.theory.kernels(selected, x)
    once = embens.theory.kernels(ensemble.subset([0, 1]), x).nngp
    torch.testing.assert_close(once.same, embens.theory.kernels(ensemble, x).nngp.same)


def test_masks_may_be_chosen_as_well():
    reference = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    ensemble = embens.mc_dropout(reference, 6, law=laws.Bernoulli(0.5))
    x, y = torch.randn(20, 4), torch.arange(20) % 3
    selected = embens.select(ensemble, (x, y), size=3)
    assert metrics.nll(selected(x), y) <= metrics.member_nll(ensemble(x), y).min() + 1e-6
