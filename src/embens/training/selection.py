"""``embens.select``: the greedy choice of members on held-out data (Caruana et al. 2004)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from embens import metrics
from embens.checks import check_whole
from embens.ensemble import EmbeddedEnsemble
from embens.objective import default_criterion, logits_of, squared_error
from embens.prediction import predict
from embens.training.batches import batches_of
from embens.training.settings import Metric, more_is_better


def select(
    ensemble: EmbeddedEnsemble,
    data: Any,
    size: int = 8,
    *,
    metric: Metric = None,
    maximise: bool | None = None,
    batch_size: int = 1024,
) -> EmbeddedEnsemble:
    """Choose members one by one, each the best to add, with replacement.

    Every step adds the member with which all chosen so far are together best on the data; of equals
    the first. Under log loss and squared error, which are convex, the chosen are never worse than
    the best single member; where another metric ends worse than that, the best of the shorter
    choices is taken.

    Args:
        ensemble: of any family with fixed members; not changed.
        data: tensors ``(inputs, targets)``, a ``Dataset`` or a ``DataLoader``, as for
            :func:`embens.fit`; rows that nothing was trained on.
        size: how many members to choose; one that is chosen twice counts twice.
        metric: "loss" (None: the same): log loss for classes, squared error for other targets;
            "accuracy"; or a function of ``(outputs, target)`` such as ``embens.metrics.brier``.
        maximise: whether more is better, for a function of your own.
        batch_size: how many samples to run at a time; a loader has its own.

    Returns:
        ``ensemble.subset`` of the chosen; its ``plan.subset.members`` says which they were.

    Example:
        >>> from embens import independent, networks
        >>> ensemble = independent(networks.mlp(2, 8, 2, outputs=2), members=5)
        >>> x = torch.randn(40, 2)
        >>> select(ensemble, (x, (x[:, 0] > 0).long()), size=3).members
        3
    """
    check_whole("size", size)
    if any(site.fresh for site in ensemble.plan.sites):
        raise ValueError("masks are drawn anew at each pass: there are no members to choose from")
    more = more_is_better("loss" if metric is None else metric, maximise)
    outputs, target = _run(ensemble, data, check_whole("batch_size", batch_size))
    if metric is None or isinstance(metric, str):
        numbers = default_criterion(outputs, target) is squared_error
        loss = _squared if numbers else _log_loss
        metric = metrics.ensemble_accuracy if metric == "accuracy" else loss

    def score(members: list[int]) -> float:
        value = float(metric(outputs[members], target))
        return -value if more else value

    path: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(size):
        candidates = [[*path[-1][1], a] for a in range(ensemble.members)]
        scores = [score(members) for members in candidates]
        best = min((value for value in scores if not math.isnan(value)), default=None)
        if best is None:
            raise ValueError("the metric is NaN for every choice; are all outputs finite?")
        path.append((best, candidates[scores.index(best)]))
    last = path[-1] if path[-1][0] <= path[1][0] else min(path[1:])
    return ensemble.subset(last[1])


def _run(ensemble: EmbeddedEnsemble, data: Any, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return the outputs of all members and the targets, in double precision."""
    outputs, targets = [], []
    for batch in batches_of(data, batch_size, seed=None, name="data").epoch(0):
        outputs.append(logits_of(predict(ensemble, batch.inputs, batch_size=batch.rows).members))
        targets.append(batch.target)
    if not all(isinstance(v, Tensor) for v in (*outputs, *targets)):
        raise TypeError("select expects a network that returns one tensor, and one target of each")
    target = torch.cat(targets)
    return torch.cat(outputs, 1).double(), target.double() if target.is_floating_point() else target


def _squared(outputs: Tensor, target: Tensor) -> Tensor:
    return squared_error(outputs.mean(0), target)


def _log_loss(outputs: Tensor, target: Tensor) -> Tensor:
    mean = outputs.log_softmax(2).logsumexp(0) - math.log(len(outputs))
    return F.cross_entropy(mean, target)  # the logarithms of probabilities are logits
