"""The pipeline: from a table to a fitted ensemble.

:func:`prepare` deals out the rows and learns about the columns and the target; :func:`fit` embeds
an ensemble (:func:`embed`), trains it (:func:`train`) and calibrates it (:func:`calibrate`). Tables
that don't fit into memory are prepared by :mod:`embens.estimators.files`; all that follows is the
same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ConstantLR

import embens
from embens.ensemble import EmbeddedEnsemble
from embens.estimators import choices, network, preprocessing
from embens.estimators.choices import FAMILIES, Options
from embens.estimators.heads import Head
from embens.estimators.preprocessing import Preprocessing
from embens.estimators.tables import Table
from embens.training import Divergence, History, randomness

if TYPE_CHECKING:
    import numpy as np

BLOCK = 65_536  # rows that are predicted at a time
Tensors = tuple[Tensor, ...]  # rows as the network sees them: numbers, codes of categories, target


@dataclass(frozen=True)
class Encoding:
    """What turns rows into tensors."""

    preprocessing: Preprocessing
    head: Head
    dtype: torch.dtype = torch.float32
    mean_weight: float = 1.0  # of the rows to train on

    def __call__(
        self,
        table: Table,
        values: Tensor,
        weights: Tensor,
        rows: Tensor | None = None,
        folds: Tensor | None = None,
    ) -> Tensors:
        target = self.head.pack(values, weights / self.mean_weight, self.dtype)
        inputs = self.preprocessing.encode(table, self.dtype, rows, folds)
        return (*inputs, target if rows is None else target[rows])


@dataclass(frozen=True)
class Prepared:
    """Rows that are ready for training."""

    encoding: Encoding
    rows: int  # to train on
    train: Any  # tensors, or a loader of batches of them
    stop: Tensors | None  # to stop training by
    calibrate: Tensors | None  # to calibrate with, where those to stop by won't do


@dataclass(frozen=True)
class Fitted:
    """A fitted ensemble with all that it needs to predict."""

    preprocessing: Preprocessing
    head: Head
    ensemble: EmbeddedEnsemble
    sizes: choices.Sizes  # that it was embedded with
    run: History
    held_out: dict[str, Any] | None  # losses on the rows to stop by: "ensemble", "members"

    @property
    def dtype(self) -> torch.dtype:
        return next(self.ensemble.parameters()).dtype

    def read(
        self, table: Table, summary: Callable[[Any, Tensor], Sequence[Tensor]], dim: int = 0
    ) -> list[Tensor]:
        """Return what ``summary(head, outputs)`` makes of a block of rows after another.

        Outputs are ``(member, row, output)``; what is made of them is joined along ``dim``.
        """
        found = []
        for start in range(0, table.rows, BLOCK):
            part = table.take(slice(start, start + BLOCK))
            inputs = self.preprocessing.encode(part, self.dtype)
            found.append(summary(self.head, run_members(self.ensemble, inputs)))
        return [torch.cat(parts, dim) for parts in zip(*found, strict=True)]


def run_members(ensemble: EmbeddedEnsemble, inputs: Tensors) -> Tensor:
    """Return the members' outputs ``(member, row, output)``."""
    generator = torch.Generator().manual_seed(0)  # of fresh masks, the same every time
    return embens.predict(ensemble, inputs, task="regression", generator=generator).members


def draw_seed(random_state: Any) -> int:
    """Return the seed of a fit, from scikit-learn's ``random_state``."""
    from sklearn.utils import check_random_state

    return int(check_random_state(random_state).randint(2**31 - 1))


def prepare(
    table: Table,
    y: np.ndarray,
    weights: Tensor,
    head: type[Head],
    options: Options,
    seed: int,
    previous: Fitted | None = None,
) -> Prepared:
    """Deal out the rows of a table, and learn from those to train on about columns and target.

    Rows of weight 0 play no part. What a previous fit has learnt is taken from it.
    """
    from sklearn.utils.class_weight import compute_sample_weight

    columns = [y] if y.ndim == 1 else list(y.T)
    learnt = previous.head if previous else head.learn(columns, single=y.ndim == 1)
    values = learnt.values(columns)
    if options.class_weight is not None:
        used = weights.nonzero().squeeze(1)
        weights[used] *= torch.tensor(compute_sample_weight(options.class_weight, y[used.numpy()]))
    if not weights.all():
        rows = weights.nonzero().squeeze(1)
        table, values, weights = table.take(rows.numpy()), values[rows], weights[rows]
    learnt = replace(learnt, weighted=bool((weights != weights[0]).any()))
    drawing = torch.Generator().manual_seed(randomness.combine(seed, 1))  # of rows
    fraction, groups = options.validation_fraction, learnt.groups(values)
    parts = choices.split(
        table.rows, fraction, calibrate=learnt.separate, groups=groups, generator=drawing
    )
    if len(parts.train) == 0:
        raise ValueError(
            f"validation_fraction={fraction} of {table.rows} rows leaves none to train on"
        )
    mine = weights[parts.train]
    folds = torch.randint(preprocessing.FOLDS, mine.shape, generator=drawing)
    if previous:
        known, dtype = previous.preprocessing, previous.dtype
    else:
        look = torch.randperm(len(mine), generator=drawing)[: choices.LOOK].sort().values
        learnt = learnt.scaled(values[parts.train], mine)
        target = learnt.numbers(values[parts.train[look]])
        sample = table.take(parts.train[look].numpy())
        known = preprocessing.learn(sample, options, mine[look], target, folds[look])
        dtype = torch.float64 if table.rows < choices.TINY else torch.float32
    encoding = Encoding(known, learnt, dtype, float(mine.mean()))
    train = encoding(table, values, weights, parts.train, folds)
    held = (encoding(table, values, weights, rows) if len(rows) else None for rows in parts[1:])
    return Prepared(encoding, len(parts.train), train, *held)


def fit(prepared: Prepared, options: Options, seed: int, previous: Fitted | None = None) -> Fitted:
    """Embed an ensemble, or go on with the previous one; train and calibrate it."""
    sizes = choices.choose_sizes(prepared.rows, options)
    ensemble = previous.ensemble if previous else embed(prepared.encoding, sizes, options, seed)
    run = train(ensemble, prepared, sizes, options, seed)
    head, held_out = calibrate(ensemble, prepared, options)
    built = previous.sizes if previous else sizes
    return Fitted(prepared.encoding.preprocessing, head, ensemble, built, run, held_out)


def embed(
    encoding: Encoding, sizes: choices.Sizes, options: Options, seed: int
) -> EmbeddedEnsemble:
    """Build the reference network and embed the members of the family in it."""
    generator = torch.Generator().manual_seed(seed)
    known, outputs = encoding.preprocessing, encoding.head.outputs
    reference = network.build(known, outputs, options, sizes, generator).to(encoding.dtype)
    own = FAMILIES[options.family]
    argument = {own: {"p": sizes.p, "law": options.law}[own]} if own else {}
    family = getattr(embens, options.family)
    return family(reference, sizes.members, generator=generator, **argument)


def train(
    ensemble: EmbeddedEnsemble,
    prepared: Prepared,
    sizes: choices.Sizes,
    options: Options,
    seed: int,
) -> History:
    """Train an ensemble, more carefully where a run diverges."""
    head, stop = prepared.encoding.head, prepared.stop
    lr = choices.given(options.lr, choices.LR)
    own = choices.given(options.modulation_lr, lr)
    start = {name: tensor.clone() for name, tensor in ensemble.state_dict().items()}
    attempts = 4
    while True:
        try:
            return embens.fit(
                ensemble,
                prepared.train,
                stop,
                epochs=sizes.epochs if stop is not None else min(sizes.epochs, choices.BLIND),
                batch_size=sizes.batch_size,
                lr=lr,
                modulation_lr=own,
                weight_decay=options.weight_decay,
                gamma=None if options.gamma == "auto" else options.gamma,
                criterion=head.criterion,
                optimizer=torch.optim.AdamW,
                scheduler=partial(ConstantLR, factor=1.0),  # early stopping decides
                metric=head.metric if stop is not None else None,
                maximise=False,
                patience=int(options.patience) if stop is not None else None,
                seed=seed,
                progress=bool(options.verbose),
            )
        except Divergence as error:
            attempts -= 1
            if attempts == 0:
                raise
            lr, own = lr / 4, own / 4
            warnings.warn(f"{error} Trying again with lr={lr:g}.", stacklevel=4)
            ensemble.load_state_dict(start)


def calibrate(
    ensemble: EmbeddedEnsemble, prepared: Prepared, options: Options
) -> tuple[Head, dict[str, Any] | None]:
    """Return the calibrated head, and the losses on the rows that training was stopped by."""
    head = prepared.encoding.head
    stop, other = (
        None if rows is None else (run_members(ensemble, rows[:-1]), rows[-1])
        for rows in (prepared.stop, prepared.calibrate)
    )
    calibrated = head.calibrated(stop if options.calibrate else None, other or stop)
    if stop is None:
        return calibrated, None
    outputs, target = stop
    return calibrated, {
        "ensemble": float(head.metric(outputs, target)),
        "members": [float(head.metric(member[None], target)) for member in outputs],
    }
