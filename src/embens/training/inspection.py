"""Checks of the training data before the first step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from embens.modes import evaluating
from embens.training import parallel, randomness
from embens.training.batches import AnySource, LoaderSource
from embens.training.options import BatchKind
from embens.training.passes import refuse_gaps

if TYPE_CHECKING:
    from embens.training.run import Run


def check_data(run: Run) -> None:
    """Raise ValueError for data that would fail during the run.

    Tensors are checked here, batches of a loader when they arrive.
    """
    _check_finite(run, run.train, run.options.batch)
    if run.validation is not None:
        _check_finite(run, run.validation, "same")
    if run.steps == 0:
        _check_last_batch(run)


@torch.no_grad()
def _check_finite(run: Run, source: AnySource, batch: BatchKind) -> None:
    """Evaluate non-finite data once: the network and criterion may turn them into finite losses."""
    if source.tensors is None:
        return
    gaps = run.passes.inspect(source.name, *source.tensors)
    if not gaps:
        return
    criterion = run.passes.criterion
    with evaluating(run.ensemble), randomness.seeded(run.seed):
        for result in run.passes.evaluate(source, run.ensemble, batch):
            loss = result.losses.sum()
            parallel.sum_(source.world, [loss])
            refuse_gaps(source.name, gaps, loss)
    run.passes.criterion = criterion


@torch.no_grad()
def _check_last_batch(run: Run) -> None:
    """Rehearse a small last batch: BatchNorm needs two rows of each member."""
    source = run.train
    if isinstance(source, LoaderSource):
        return
    rows = (source.count - 1) % source.batch_size + 1
    members_per_row = run.ensemble.members if run.options.batch == "split" else 1
    if rows >= 2 * source.world.size * members_per_row:
        return
    (last,) = source.epoch(0, len(source) - 1)
    name = f"train: the last of {source.count} rows in batches of {source.batch_size} are {rows}"
    weights = {key: value.clone() for key, value in run.ensemble.state_dict().items()}
    args, kwargs = run.ensemble.bind(run.passes.move(last.inputs))
    run.ensemble.train()
    try:
        with explain_batch_norm(name), randomness.seeded(run.seed), run.passes.autocast():
            run.ensemble(*args, batch=run.options.batch, **kwargs)
    finally:
        run.ensemble.load_state_dict(weights)


@contextmanager
def explain_batch_norm(name: str) -> Iterator[None]:
    """Add the fix to the error that BatchNorm raises for a single row."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise ValueError(
            f"{name}, and BatchNorm needs at least two rows of each member in training. Choose "
            "another batch_size, or pass a DataLoader with drop_last=True."
        ) from error
