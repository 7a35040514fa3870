"""``embens.select``: the greedy choice of members on held-out data (Caruana et al. 2004)."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from embens.checks import check_whole
from embens.ensemble import EmbeddedEnsemble
from embens.objective import default_criterion, logits_of, squared_error
from embens.prediction import predict
from embens.training.batches import batches_of

ROWS = 1024  # that run at a time; a loader has its own


def select(
    ensemble: EmbeddedEnsemble,
    data: Any,
    size: int = 8,
    *,
    metric: Callable[[Tensor, Tensor], Any] | None = None,
) -> EmbeddedEnsemble:
    """Choose members one by one, each the best to add, with replacement.

    Every step adds the member with which all chosen so far are together best on the data; of equals
    the first. Under log loss and squared error, which are convex, the chosen are never worse than
    the best single member; where another metric ends worse than that, the best of the shorter
    choices is taken.

    Args:
        ensemble: of any family with fixed members; not changed.
        data: as for :func:`embens.fit`; rows that nothing was trained on.
        size: how many members to choose; one that is chosen twice counts twice.
        metric: a function of ``(outputs, target)`` such as ``embens.metrics.brier``, the less the
            better; None: log loss for classes, squared error for other targets.

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
    parts, targets = [], []
    for batch in batches_of(data, ROWS, seed=None, name="data").epoch(0):
        parts.append(logits_of(predict(ensemble, batch.inputs, batch_size=batch.rows).members))
        targets.append(batch.target)
    if not all(isinstance(v, Tensor) for v in (*parts, *targets)):
        raise TypeError("select expects a network that returns one tensor, and one target of each")
    outputs, target = torch.cat(parts, 1).double(), torch.cat(targets)
    target = target.double() if target.is_floating_point() else target
    metric = metric or _loss
    path: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(size):
        candidates = [[*path[-1][1], a] for a in range(ensemble.members)]
        scores = [float(metric(outputs[members], target)) for members in candidates]
        best = min((value for value in scores if not math.isnan(value)), default=None)
        if best is None:
            raise ValueError("the metric is NaN for every choice; are all outputs finite?")
        path.append((best, candidates[scores.index(best)]))
    last = path[-1] if path[-1][0] <= path[1][0] else min(path[1:])
    return ensemble.subset(last[1])


def _loss(outputs: Tensor, target: Tensor) -> Tensor:
    if default_criterion(outputs, target) is squared_error:
        return squared_error(outputs.mean(0), target)
    mean = outputs.log_softmax(2).logsumexp(0)  # logarithms of probabilities, but for a constant
    return F.cross_entropy(mean, target)
