"""From encoded rows to a fitted ensemble: search, train, calibrate.

With a time limit, a few rows are first used to measure how long calibration and training take on
this machine. If the time is too short, fewer rows are held out, the search is skipped, or training
ends early.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from embens import EmbeddedEnsemble
from embens.tabular.columns import Preprocessing
from embens.tabular.defaults import Sizes, size_candidates
from embens.tabular.descent import train
from embens.tabular.gaussians import MIN_SKEWNESS, GaussianHead
from embens.tabular.perceptron import (
    Encoder,
    Rows,
    build_ensemble,
    predict_constant_,
    predict_rows,
)
from embens.tabular.preparation import AnyHead, Prepared
from embens.tabular.targets import calibrate_head
from embens.training import History

if TYPE_CHECKING:
    from embens.tabular.groups import GroupedEnsemble

TRANSFORM_ROWS = 1000  # held-out rows that choose the transform of the target
MEASURED_ROWS = 128  # rows that measure the speed of this machine, if time is limited
SEARCH_SHARE = 0.15  # of the remaining time, for one round of the search
CALIBRATION_SHARE = 0.05  # of the remaining time, for a calibration; there can be two
SELECTION_ROWS = 1000  # validation rows that choose the members to keep


@dataclass(frozen=True, eq=False)
class Fitted:
    """A fitted ensemble and everything else that predictions need.

    Attributes:
        preprocessing: The encoding of the columns.
        encoder: The inputs of the network.
        head: The calibrated head.
        ensemble: The trained ensemble; several groups if ``folds`` is above 1.
        sizes: The chosen values of the arguments.
        run: The history of training.
        held_out: Losses on the validation rows, of the "ensemble", of the "members", of the best
            "constant" prediction, and of "all_members" if only some were kept; None without
            validation rows.
        remarks: What the user should know about the fit.
    """

    preprocessing: Preprocessing
    encoder: Encoder
    head: AnyHead
    ensemble: "EmbeddedEnsemble | GroupedEnsemble"
    sizes: Sizes
    run: History
    held_out: dict[str, Any] | None
    remarks: list[str] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the network and its inputs."""
        return next(self.ensemble.parameters()).dtype


def fit(
    prepared: Prepared, sizes: Sizes, deadline: float = math.inf, previous: Fitted | None = None
) -> Fitted:
    """Train and calibrate an ensemble.

    Args:
        prepared: The encoded rows.
        sizes: Values of the arguments; the search may change them.
        deadline: When the fit has to end, by the monotonic clock.
        previous: A previous fit, whose ensemble is trained further in place.
    """
    arguments = prepared.arguments
    is_first_fit = previous is None and len(prepared.validation) > 0
    can_search = arguments.tune and is_first_fit
    can_refit = arguments.refit and is_first_fit
    if previous is None:
        ensemble = build_ensemble(prepared, sizes)
    elif isinstance(previous.ensemble, EmbeddedEnsemble):
        ensemble = previous.ensemble
    else:
        raise ValueError("folds cannot become 1 in a warm start. Use the folds of the first fit.")
    if deadline < math.inf:
        prepared, deadline, has_spare_time = plan_time(ensemble, prepared, sizes, deadline)
        can_search = can_search and has_spare_time
    if can_search:
        prepared, sizes = search(prepared, sizes, deadline)
        ensemble = build_ensemble(prepared, sizes)
    train_deadline = deadline
    if can_refit:
        train_deadline = share_of(deadline, 0.5)
    verbose = bool(arguments.verbose)
    run = train(ensemble, prepared, sizes, deadline=train_deadline, verbose=verbose)
    fitted = finish(ensemble, prepared, sizes, run)
    if can_refit:
        fitted = refit(fitted, prepared, deadline)
    return fitted


def finish(ensemble: EmbeddedEnsemble, prepared: Prepared, sizes: Sizes, run: History) -> Fitted:
    """Select members, calibrate, and collect what the user should know about the fit."""
    arguments = prepared.arguments
    remarks = list(prepared.remarks)
    all_members_loss = math.nan
    if arguments.keep_members != "all" and arguments.keep_members < ensemble.members:
        if len(prepared.validation):
            ensemble, all_members_loss = keep_best(ensemble, prepared)
            sizes = replace(sizes, members=ensemble.members)
        else:
            remarks.append("keep_members needs validation rows. All members are kept.")
    head, held_out, problem = calibrate(ensemble, prepared)
    if run.stopped == "time":
        remarks.append(
            f"time_limit={arguments.time_limit:g} ended training in epoch {len(run.epochs)} of "
            f"{sizes.epochs}. A longer limit may give a better model."
        )
        if problem:
            constant = prepared.head.constant_outputs(prepared.train.target)
            predict_constant_(ensemble, constant.flatten())
            head, held_out, _ = calibrate(ensemble, prepared)
            problem = (
                "The training was too short to be better than a constant prediction. The model "
                f"predicts {head.constant_name} for every row."
            )
    if problem:
        remarks.append(problem)
    if held_out is not None and not math.isnan(all_members_loss):
        held_out["all_members"] = all_members_loss
    return Fitted(
        prepared.preprocessing, prepared.encoder, head, ensemble, sizes, run, held_out, remarks
    )


def keep_best(ensemble: EmbeddedEnsemble, prepared: Prepared) -> tuple[EmbeddedEnsemble, float]:
    """Keep the ``keep_members`` members that predict the validation rows best together.

    Members are added one after another, each time the one that reduces the loss most.

    Returns:
        The smaller ensemble, and the loss of all members on the validation rows.
    """
    head = prepared.head
    outputs = predict_rows(ensemble, prepared.encoder, prepared.validation)
    few_rows = slice(SELECTION_ROWS)
    target = prepared.validation.target[few_rows]
    kept: list[int] = []
    while len(kept) < prepared.arguments.keep_members:
        losses = {}
        for a in range(ensemble.members):
            if a not in kept:
                losses[a] = float(head.metric(outputs[[*kept, a]][:, few_rows], target))
        kept.append(min(losses, key=losses.__getitem__))
    all_members_loss = float(head.metric(outputs, prepared.validation.target))
    return ensemble.subset(sorted(kept)), all_members_loss


def refit(fitted: Fitted, prepared: Prepared, deadline: float) -> Fitted:
    """Train again with the validation rows included, as long as the best epoch of the first run.

    The temperature stays that of the first run: no validation rows are left to choose it.
    """
    all_rows = prepared.train + prepared.validation
    prepared = replace(prepared, train=all_rows, validation=prepared.validation[:0])
    sizes = replace(fitted.sizes, epochs=fitted.run.best_epoch or fitted.sizes.epochs)
    ensemble = build_ensemble(prepared, sizes)
    train(ensemble, prepared, sizes, deadline=deadline)
    head = fitted.head
    if len(prepared.calibration):
        outputs = predict_rows(ensemble, prepared.encoder, prepared.calibration)
        head = head.with_scores(outputs, prepared.calibration.target)
    return replace(fitted, ensemble=ensemble, head=head)


# Time


def share_of(deadline: float, share: float) -> float:
    """Return the deadline of a part of the fit: a share of the remaining time from now on."""
    now = time.monotonic()
    return now + share * (deadline - now)


def plan_time(
    ensemble: EmbeddedEnsemble, prepared: Prepared, sizes: Sizes, deadline: float
) -> tuple[Prepared, float, bool]:
    """Measure the speed of this machine and divide the remaining time.

    Args:
        ensemble: The ensemble before training.
        prepared: The encoded rows.
        sizes: Epochs and batch size of the training.
        deadline: When the fit has to end.

    Returns:
        The rows, with fewer held-out rows if their calibration would take too long; the deadline
        of training, which leaves time for calibration; and whether the full training would end
        before it, so that there is time for a search.
    """
    sample = replace(
        prepared,
        train=prepared.train.thinned(MEASURED_ROWS),
        validation=prepared.validation.thinned(MEASURED_ROWS),
        calibration=prepared.calibration.thinned(MEASURED_ROWS),
    )
    calibrate(ensemble, sample)  # the first call traces the network and imports libraries
    start = time.monotonic()
    predict_rows(ensemble, prepared.encoder, sample.train)
    middle = time.monotonic()
    calibrate(ensemble, sample)
    end = time.monotonic()
    # Forward and backward take about three times as long as forward alone.
    row_seconds = 3 * (middle - start) / len(sample.train)
    calibration_seconds = (end - middle) / MEASURED_ROWS
    remaining = deadline - end
    most = max(MEASURED_ROWS, int(CALIBRATION_SHARE * remaining / calibration_seconds))
    validation = prepared.validation.thinned(most)
    calibration = prepared.calibration.thinned(most)
    held_out_rows = max(MEASURED_ROWS, len(validation), len(calibration))
    # A model that has to become a constant is calibrated twice.
    reserve = 2 * calibration_seconds * held_out_rows + row_seconds * sizes.batch_size
    prepared = replace(prepared, validation=validation, calibration=calibration)
    training_seconds = row_seconds * len(prepared.train) * sizes.epochs
    return prepared, deadline - reserve, training_seconds < remaining - reserve


# Search


def search(prepared: Prepared, sizes: Sizes, deadline: float) -> tuple[Prepared, Sizes]:
    """Choose the transform of a skewed target, then dropout and weight decay.

    Candidates are compared on the validation rows by successive halving of short runs.
    """

    def target_loss(candidate: Prepared, ensemble: EmbeddedEnsemble, run: History) -> float:
        head: Any = candidate.head
        rows = candidate.validation[:TRANSFORM_ROWS]
        return float(head.crps(predict_rows(ensemble, candidate.encoder, rows), rows.target))

    def best_metric(candidate: Prepared, ensemble: EmbeddedEnsemble, run: History) -> float:
        return min(row["metric"] for row in run.epochs if "metric" in row)

    transforms = [(candidate, sizes) for candidate in transform_candidates(prepared)]
    prepared, _ = halve(transforms, target_loss, deadline)
    arguments = prepared.arguments
    regularised = [(prepared, candidate) for candidate in size_candidates(sizes, arguments)]
    return halve(regularised, best_metric, deadline)


def halve(
    candidates: list[tuple[Prepared, Sizes]],
    score: Callable[[Prepared, EmbeddedEnsemble, History], float],
    deadline: float,
) -> tuple[Prepared, Sizes]:
    """Return the best candidate by successive halving.

    A round trains all candidates with a quarter of the members. The better half goes on to the next
    round, which is twice as long.

    Args:
        candidates: Rows and hyperparameters; the first candidate is the default.
        score: The loss of a candidate after a short run.
        deadline: Deadline of the whole fit. A round takes at most ``SEARCH_SHARE`` of the time
            that remains.
    """
    epochs = max(4, candidates[0][1].epochs // 4)
    while len(candidates) > 1:
        losses = []
        share = SEARCH_SHARE / len(candidates)
        for prepared, sizes in candidates:
            members = max(1, sizes.members // 4)
            short = replace(sizes, members=members, epochs=epochs, patience=epochs)
            ensemble = build_ensemble(prepared, short)
            run = train(ensemble, prepared, short, deadline=share_of(deadline, share))
            losses.append(score(prepared, ensemble, run))
        order = np.argsort(losses, kind="stable")
        candidates = [candidates[index] for index in order[: len(candidates) // 2]]
        epochs *= 2
    return candidates[0]


def transform_candidates(prepared: Prepared) -> list[Prepared]:
    """Return the rows with possible transforms of a skewed target; the first one has none."""
    head = prepared.head
    if not isinstance(head, GaussianHead) or prepared.arguments.target_transform != "auto":
        return [prepared]
    standardised = prepared.train.target[:, : head.targets].double()
    skewness = (standardised - standardised.mean(0)).pow(3).mean(0).abs().max()
    if skewness < MIN_SKEWNESS:
        return [prepared]
    candidates = [prepared, with_transform(prepared, "quantile")]
    if (torch.as_tensor(head.smallest) >= 0).all():
        candidates.append(with_transform(prepared, "log"))
    return candidates


def with_transform(prepared: Prepared, transform: str) -> Prepared:
    """Return the same rows with another transform of the target."""
    old: Any = prepared.head
    values, weights = old.unpack(prepared.train.target)
    # Targets are stored as float32: a 0 may come back as a small negative number.
    values = old.within_bounds(values)
    head = replace(old, transform=transform).scaled(values, weights)

    def convert(rows: Rows) -> Rows:
        values, weights = old.unpack(rows.target)
        return replace(rows, target=head.pack(values, weights, rows.target.dtype))

    return replace(
        prepared,
        head=head,
        train=convert(prepared.train),
        validation=convert(prepared.validation),
        calibration=convert(prepared.calibration),
    )


# Calibration


def calibrate(
    ensemble: EmbeddedEnsemble, prepared: Prepared
) -> tuple[AnyHead, dict[str, Any] | None, str]:
    """Fit the temperature and conformal scores, and compare with a constant prediction.

    Returns:
        The calibrated head; losses on the validation rows, or None if there are none; and a
        sentence if the ensemble is worse than the best constant prediction, else "".
    """
    rows = prepared.validation
    has_validation = len(rows) > 0
    if not has_validation:
        rows = prepared.train.thinned(TRANSFORM_ROWS)
    outputs = predict_rows(ensemble, prepared.encoder, rows)
    can_calibrate = has_validation and prepared.arguments.calibrate
    head, losses, problem = calibrate_head(
        prepared.head, outputs, rows.target, prepared.train.target, can_calibrate
    )
    if not has_validation:
        return head, None, problem
    if len(prepared.calibration):
        # Rows that nothing else has used. With too few of them the validation rows are used again.
        rows = prepared.calibration
        outputs = predict_rows(ensemble, prepared.encoder, rows)
    return head.with_scores(outputs, rows.target), losses, problem
