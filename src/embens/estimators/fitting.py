"""Fitting: from a table to a trained and calibrated ensemble, step by step.

Each step is a function of the estimator, whose attributes it sets; :mod:`embens.estimators.files`
takes the same steps for tables that don't fit into memory.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import embens
from embens import finite
from embens.ensemble import EmbeddedEnsemble
from embens.estimators import choices, preprocessing
from embens.estimators.heads import Classes, Gaussians
from embens.estimators.tables import Table
from embens.prediction import evaluating
from embens.training import Divergence, randomness

if TYPE_CHECKING:
    from embens.estimators.base import TableEnsemble

Head = Classes | Gaussians


def train(
    estimator: TableEnsemble, table: Table, values: Tensor, weights: Tensor | None, again: bool
) -> None:
    """Deal out the rows, learn about the columns, build, diagnose, train, calibrate.

    Args:
        estimator: to be fitted.
        table: its rows.
        values: their targets ``(row, target)``.
        weights: of the rows, all above 0.
        again: go on from the weights that there are.
    """
    seed = draw_seed(estimator)
    drawing = torch.Generator().manual_seed(randomness.combine(seed, 1))  # of rows
    parts = choices.split(
        table.rows,
        estimator.validation_fraction,
        calibrate=estimator._separate_calibration,
        groups=estimator._groups(values),
        generator=drawing,
    )
    if len(parts.train) == 0:
        raise ValueError(
            f"validation_fraction={estimator.validation_fraction} of {table.rows} rows leaves none "
            "to train on"
        )
    mine = None if weights is None else weights[parts.train]
    if again:
        dtype = next(estimator.ensemble_.parameters()).dtype
    else:
        dtype = torch.float64 if table.rows < choices.TINY else torch.float32
        look = torch.arange(len(parts.train))
        if len(look) > choices.LOOK:
            look = torch.randperm(len(look), generator=drawing)[: choices.LOOK].sort().values
        sample = table.take(parts.train[look].numpy())
        learn_columns(estimator, sample, None if mine is None else mine[look])
        estimator._scale_target(values[parts.train], mine)
    head = estimator._make_head(weights is not None)
    if weights is not None and mine is not None:
        weights = weights / mine.mean()
    target = head.pack(estimator._to_target(values), weights, dtype)
    data = [
        (*estimator.preprocessing_.encode(table, dtype, part), target[part]) if len(part) else None
        for part in parts
    ]
    sizes = estimator._sizes(len(parts.train))
    if not again:
        build(estimator, head, sizes, dtype, seed)
        diagnose(estimator, head, sizes, data[0], seed)
    run(estimator, head, sizes, data[0], data[1], seed)
    finish(estimator, head, data[1], data[2], values[parts.stop], values[parts.calibrate])


def draw_seed(estimator: TableEnsemble) -> int:
    """Return the seed of a fit, from the estimator's ``random_state``."""
    from sklearn.utils import check_random_state

    return int(check_random_state(estimator.random_state).randint(2**31 - 1))


def learn_columns(estimator: TableEnsemble, table: Table, weights: Tensor | None) -> None:
    """Learn about the columns from the training part."""
    estimator.preprocessing_ = preprocessing.fit(
        table,
        None if weights is None else weights.numpy(),
        categorical=estimator.categorical_features,
        scaling=estimator.scaling,
        bins=int(estimator.bins),
        max_categories=int(estimator.max_categories),
    )


def build(
    estimator: TableEnsemble,
    head: Head,
    sizes: choices.Sizes,
    dtype: torch.dtype,
    seed: int,
    p: float = choices.P[0],
) -> None:
    """Build the reference network and embed the members; p where it is "auto"."""
    generator = torch.Generator().manual_seed(seed)
    estimator.width_ = sizes.width
    dropout = estimator.dropout
    estimator.dropout_ = sizes.dropout if dropout == "auto" else float(dropout)
    estimator.p_ = p if estimator.p == "auto" else float(estimator.p)
    reference = estimator._reference(head.outputs, generator).to(dtype)
    estimator.ensemble_ = embed_family(
        reference, estimator.family, sizes.members, estimator.p_, estimator.law, generator
    )


def embed_family(
    reference: torch.nn.Module,
    family: str,
    members: int,
    p: float,
    law: Any,
    generator: torch.Generator | None,
) -> EmbeddedEnsemble:
    """Embed members of a family into a reference network."""
    if family == "batch_ensemble":
        return embens.batch_ensemble(reference, members, p=p, generator=generator)
    if family == "last_layer_dropout":
        return embens.last_layer_dropout(reference, members, law, generator=generator)
    if family == "mc_dropout":
        return embens.mc_dropout(reference, members, law, generator=generator)
    return embens.independent(reference, members, generator=generator)


def diagnose(
    estimator: TableEnsemble, head: Head, sizes: choices.Sizes, rows: Any, seed: int
) -> None:
    """Diagnose the ensemble on a few rows, and follow what that says where it is "auto"."""
    few = [tensor[: choices.diagnosed_rows(head.outputs)] for tensor in rows]
    estimator.diagnosis_ = _diagnosis(estimator, head, few)
    if estimator.p == "auto" and estimator.family == "batch_ensemble":
        for p in choices.P[1:]:
            if estimator.diagnosis_.room >= sizes.members:
                break
            build(estimator, head, sizes, few[0].dtype, seed, p)
            estimator.diagnosis_ = _diagnosis(estimator, head, few)
    fewer = choices.members_with_room(estimator.diagnosis_.room, sizes.members, len(rows[0]))
    if estimator.members == "auto" and fewer < sizes.members:
        fewer_sizes = sizes._replace(members=fewer)
        build(estimator, head, fewer_sizes, few[0].dtype, seed, estimator.p_)
        estimator.diagnosis_ = _diagnosis(estimator, head, few)
    estimator.gamma_ = float(estimator.diagnosis_.gamma)


def _diagnosis(estimator: TableEnsemble, head: Head, rows: list[Tensor]) -> finite.Diagnosis:
    with evaluating(estimator.ensemble_):
        return finite.diagnose(
            estimator.ensemble_,
            tuple(rows[:-1]),
            rows[-1],
            criterion=head.criterion,
            gamma=None if estimator.gamma == "auto" else estimator.gamma,
        )


def run(
    estimator: TableEnsemble, head: Head, sizes: choices.Sizes, rows: Any, stop: Any, seed: int
) -> None:
    """Train, more carefully where a run diverges."""
    ensemble = estimator.ensemble_
    lr = choices.LR if estimator.lr == "auto" else float(estimator.lr)
    own = choices.MODULATION_FACTOR * lr
    own = own if estimator.modulation_lr == "auto" else float(estimator.modulation_lr)
    start = {k: v.clone() for k, v in ensemble.state_dict().items()}
    for attempt in range(4):
        try:
            estimator.run_ = embens.fit(
                ensemble,
                rows,
                stop,
                epochs=sizes.epochs if stop is not None else min(sizes.epochs, choices.BLIND),
                batch_size=sizes.batch_size,
                lr=lr,
                modulation_lr=own,
                weight_decay=estimator.weight_decay,
                gamma=estimator.gamma_ if estimator.gamma == "auto" else float(estimator.gamma),
                criterion=head.criterion,
                optimizer=torch.optim.AdamW,
                scheduler=constant,
                metric=head.metric if stop is not None else None,
                maximise=False,
                patience=int(estimator.patience) if stop is not None else None,
                seed=seed,
                progress=bool(estimator.verbose),
            )
            return
        except Divergence as error:
            if attempt == 3:
                raise
            lr, own = lr / 4, own / 4
            warnings.warn(f"{error} Trying again with lr={lr:g}.", stacklevel=4)
            ensemble.load_state_dict(start)


def finish(
    estimator: TableEnsemble,
    head: Head,
    stop: Any,
    calibrate: Any,
    stop_values: Tensor | None,
    calibrate_values: Tensor | None,
) -> None:
    """Keep what each member scores on the held-out part, and calibrate."""
    estimator._forget_calibration()
    estimator.held_out_ = None
    if stop is None:
        return
    outputs, target = estimator._run_members(stop[:-1]), stop[-1]
    other, other_values = outputs, stop_values
    if calibrate is not None:
        other, other_values = estimator._run_members(calibrate[:-1]), calibrate_values
    assert stop_values is not None
    assert other_values is not None
    weights = target[:, -1].double() if head.weighted else None
    estimator._calibrate((outputs, stop_values), (other, other_values), weights)
    estimator.held_out_ = {
        "ensemble": float(head.metric(outputs, target)),
        "members": [float(head.metric(outputs[a : a + 1], target)) for a in range(len(outputs))],
    }


def constant(optimiser: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a schedule that leaves the rate as it is: early stopping decides."""
    return torch.optim.lr_scheduler.LambdaLR(optimiser, _one)


def _one(epoch: int) -> float:
    return 1.0


@contextmanager
def threads(n_jobs: int | None) -> Iterator[None]:
    """Run with so many threads; None: as torch is set; -1: all, -2: all but one, …."""
    if n_jobs is None:
        yield
        return
    if isinstance(n_jobs, bool) or not isinstance(n_jobs, Integral) or n_jobs == 0:
        raise ValueError(f"n_jobs: expected a number of threads, -1 for all, or None; got {n_jobs}")
    before = torch.get_num_threads()
    count = int(n_jobs) if n_jobs > 0 else max(1, (os.cpu_count() or 1) + 1 + n_jobs)
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
