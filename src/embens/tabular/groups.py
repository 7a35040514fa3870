"""Cross-fitting: groups of members, each with a separate held-out fold.

With ``folds=K`` the rows are divided into K folds and the members into K groups. A group is an
embedded ensemble that is trained on all folds but one. Early stopping uses its metric on the
held-out fold. The predictions of a group for its held-out fold are *out-of-fold* predictions. The
out-of-fold predictions of all groups cover every row. They give the temperature and the conformal
scores, so every row is used for training and for calibration. Both belong to one group, but
predictions are those of all groups, whose errors are smaller; both are corrected for this.

Groups share no weights. In one ensemble with row weights of 0 a held-out row would still train the
shared weights through the other members, and its prediction would be too good (ADR 9).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embens import EmbeddedEnsemble
from embens.tabular.defaults import TINY_ROWS, Sizes
from embens.tabular.descent import train
from embens.tabular.perceptron import build_ensemble, predict_rows
from embens.tabular.pipeline import Fitted, finish, search, with_transform
from embens.tabular.preparation import AnyHead, Prepared
from embens.tabular.targets import calibrate_head
from embens.training import History

SPREAD_ROWS = 1000  # training rows that show how much the groups differ


class GroupedEnsemble(nn.Module):
    """Several ensembles as one: the members of the first, then those of the second, and so on.

    Args:
        groups: The ensembles.

    Attributes:
        groups: The ensembles.

    Shape:
        ``(row, input)`` becomes ``(member, row, output)``.

    Example:
        >>> import embens
        >>> network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> ensembles = [embens.batch_ensemble(network, members=2) for _ in range(3)]
        >>> GroupedEnsemble(ensembles)(torch.zeros(5, 3)).shape
        torch.Size([6, 5, 2])
    """

    def __init__(self, groups: Sequence[EmbeddedEnsemble]):
        super().__init__()
        self.groups = nn.ModuleList(groups)

    @property
    def members(self) -> int:
        """Number of members of all groups."""
        return sum(group.members for group in self.groups)  # type: ignore[misc]

    def member(self, a: int) -> nn.Module:
        """Return member ``a``, counted over all groups, as a plain module."""
        for group in self.groups:
            ensemble: Any = group
            if 0 <= a < ensemble.members:
                return ensemble.member(a)
            a -= ensemble.members
        raise IndexError(f"members are counted from 0 to {self.members - 1}.")

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([group(inputs) for group in self.groups])


def assign_folds(rows: int, folds: int, strata: np.ndarray | None, seed: int) -> Tensor:
    """Assign rows to folds at random; every fold has nearly the same classes.

    Args:
        rows: Number of rows.
        folds: Number of folds.
        strata: Classes ``(row,)``, or None.
        seed: Seed of the assignment.

    Returns:
        The fold of each row, ``(row,)``.

    Example:
        >>> assign_folds(8, 4, np.array([0, 0, 0, 0, 1, 1, 1, 1]), seed=0)[:4].sort().values
        tensor([0, 1, 2, 3])
    """
    order = np.random.RandomState(seed).permutation(rows)
    if strata is not None:
        order = order[np.argsort(strata[order], kind="stable")]
    fold_of_row = np.empty(rows, dtype=np.int64)
    fold_of_row[order] = np.arange(rows) % folds
    return torch.from_numpy(fold_of_row)


def fit_groups(prepared: Prepared, sizes: Sizes, previous: Fitted | None = None) -> Fitted:
    """Train and calibrate groups of members with cross-fitting.

    Args:
        prepared: The encoded rows, all of them training rows.
        sizes: Values of the arguments, for all members together; the search may change them.
        previous: A previous fit with the same number of folds, whose groups are trained further in
            place.
    """
    if previous is not None and len(prepared.train) < TINY_ROWS:
        return _continue_groups(prepared, sizes, previous)
    # Three parts: search on the first fold, train each group, calibrate on all folds.
    folds = prepared.folds
    fold_of_row = assign_folds(len(prepared.train), folds, prepared.strata, prepared.seed)
    if prepared.arguments.tune and previous is None:
        candidate, sizes = search(_hold_out(prepared, fold_of_row, 0), sizes, math.inf)
        transform = getattr(candidate.head, "transform", None)
        if transform != getattr(prepared.head, "transform", None):
            prepared = with_transform(prepared, str(transform))
    group_sizes = replace(sizes, members=sizes.members // folds)
    groups, runs, outputs, member_losses = [], [], [], []
    for fold in range(folds):
        part = _hold_out(prepared, fold_of_row, fold)
        if previous is None:
            ensemble = build_ensemble(part, group_sizes)
        else:
            ensemble = _previous_groups(previous)[fold]
        runs.append(train(ensemble, part, sizes, verbose=bool(part.arguments.verbose)))
        fold_outputs = predict_rows(ensemble, part.encoder, part.validation)
        for member in fold_outputs.split(1):
            member_losses.append(float(part.head.metric(member, part.validation.target)))
        groups.append(ensemble)
        outputs.append(fold_outputs)
    # Outputs of fold 0, of fold 1, …: put them back into the order of the rows.
    order = torch.argsort(fold_of_row, stable=True)
    out_of_fold = torch.empty_like(torch.cat(outputs, 1))
    out_of_fold[:, order] = torch.cat(outputs, 1)
    target = prepared.train.target
    head, held_out, problem = calibrate_head(
        prepared.head, out_of_fold, target, target, prepared.arguments.calibrate
    )
    held_out["members"] = member_losses
    if prepared.arguments.calibrate:
        head = head.for_mixture_of_groups(folds)
    head = head.with_scores(out_of_fold, target)
    head = _for_mean_of_groups(head, groups, prepared, fold_of_row)
    remarks = list(prepared.remarks)
    if problem:
        remarks.append(problem)
    return Fitted(
        prepared.preprocessing,
        prepared.encoder,
        head,
        GroupedEnsemble(groups),
        sizes,
        join_histories(runs),
        held_out,
        remarks,
    )


def _for_mean_of_groups(
    head: AnyHead, groups: Sequence[EmbeddedEnsemble], prepared: Prepared, fold_of_row: Tensor
) -> AnyHead:
    """Correct the conformal scores of single groups; some of the rows are enough."""
    rows = len(prepared.train)
    some = torch.linspace(0, rows - 1, min(rows, SPREAD_ROWS)).long()
    some_rows = prepared.train[some]
    outputs = [predict_rows(group, prepared.encoder, some_rows) for group in groups]
    return head.for_mean_of_groups(torch.stack(outputs), fold_of_row[some])


def _continue_groups(prepared: Prepared, sizes: Sizes, previous: Fitted) -> Fitted:
    """Train all groups further with a few rows, of which none is held out."""
    ensemble: Any = previous.ensemble
    runs = [
        train(group, replace(prepared, seed=prepared.seed + fold), sizes)
        for fold, group in enumerate(ensemble.groups)
    ]
    return finish(ensemble, prepared, sizes, join_histories(runs))


def _hold_out(prepared: Prepared, fold_of_row: Tensor, fold: int) -> Prepared:
    """Return the rows of a group: all folds but one to train on, that one to validate."""
    return replace(
        prepared,
        train=prepared.train[fold_of_row != fold],
        validation=prepared.train[fold_of_row == fold],
        seed=prepared.seed + fold,
    )


def _previous_groups(previous: Fitted) -> Any:
    """Return the ensembles of an earlier fit, one for each fold."""
    ensemble = previous.ensemble
    if not isinstance(ensemble, GroupedEnsemble):
        raise ValueError("folds must stay 1 in a warm start, as in the first fit.")
    return ensemble.groups


def join_histories(runs: Sequence[History]) -> History:
    """Return the history of all groups.

    Losses of an epoch are means over the groups that were still training and have them, and seconds
    are sums. The best epoch is the median of the groups.
    """
    epochs = []
    for epoch in range(1, max(len(run.epochs) for run in runs) + 1):
        rows = [run.epochs[epoch - 1] for run in runs if len(run.epochs) >= epoch]
        row: dict[str, Any] = {"epoch": epoch}
        for name in ("loss", "validation_loss", "metric", "lr"):
            values = [other[name] for other in rows if name in other]
            if values:
                row[name] = float(np.mean(values))
        row["seconds"] = float(sum(other["seconds"] for other in rows))
        epochs.append(row)
    members = []
    first_member = 0
    for run in runs:
        count = len({row["member"] for row in run.members})
        for row in run.members:
            members.append({**row, "member": first_member + row["member"]})
        first_member += count
    best_epochs = [run.best_epoch or len(run.epochs) for run in runs]
    stopped = "patience"
    if all(run.stopped == "epochs" for run in runs):
        stopped = "epochs"
    return History(members, epochs, int(np.median(best_epochs)), stopped)
