"""The pipeline: from a table to a fitted ensemble.

:func:`prepare` deals out the rows and learns about the columns and the target; :func:`fit` embeds
an ensemble (:func:`embed`), trains it (:func:`train`) and calibrates it (:func:`calibrate`).
"""

import copy
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any, Self

import numpy as np
import torch
from sklearn.utils.class_weight import compute_sample_weight
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import embens
from embens.ensemble import EmbeddedEnsemble
from embens.estimators import choices, network, preprocessing
from embens.estimators.gaussians import SKEWED, AnyHead, Gaussians
from embens.estimators.preprocessing import Preprocessing
from embens.estimators.tables import Table
from embens.laws import Signs
from embens.training import Divergence, History, randomness

BLOCK = 65_536  # rows that are predicted at a time
HORIZON = 2.0  # epochs that weights are averaged over
FLOOR = 0.02  # of the rate, at the end
JUDGED = 1000  # rows that a transform of the target is chosen by, at most
Tensors = tuple[Tensor, ...]  # rows as the network sees them: numbers, codes of categories, target


@dataclass(frozen=True)
class Prepared:
    """Rows that are ready for training, and what to do with them."""

    options: choices.Options
    seed: int
    deadline: float  # by the monotonic clock
    preprocessing: Preprocessing
    head: AnyHead
    train: Tensors
    stop: Tensors | None  # to stop training by
    calibrate: Tensors | None  # for conformal scores

    def transformed(self, transform: str) -> Self:
        """Return the same with another transform of the target."""
        old: Any = self.head
        new: Any = replace(old, transform=transform).scaled(*old.unpack(self.train[-1]))
        train, stop, other = (
            rows and (*rows[:-1], new.pack(*old.unpack(rows[-1]), rows[-1].dtype))
            for rows in (self.train, self.stop, self.calibrate)
        )
        return replace(self, head=new, train=train, stop=stop, calibrate=other)


@dataclass(frozen=True)
class Fitted:
    """A fitted ensemble with all that it needs to predict."""

    preprocessing: Preprocessing
    head: AnyHead
    ensemble: EmbeddedEnsemble
    sizes: choices.Sizes  # that it was embedded with
    run: History
    held_out: dict[str, Any] | None  # losses on the rows to stop by: "ensemble", "members"

    @property
    def dtype(self) -> torch.dtype:
        return next(self.ensemble.parameters()).dtype


def run_members(ensemble: EmbeddedEnsemble, inputs: Tensors) -> Tensor:
    """Return the members' outputs ``(member, row, output)``."""
    generator = torch.Generator().manual_seed(0)  # of fresh masks, the same every time
    return embens.predict(ensemble, inputs, task="regression", generator=generator).members


def judge(ensemble: EmbeddedEnsemble, rows: Tensors) -> tuple[Tensor, Tensor]:
    """Return the members' outputs for some rows, and the target."""
    return run_members(ensemble, rows[:-1]), rows[-1]


def prepare(
    table: Table,
    y: np.ndarray,
    weights: Tensor,
    options: choices.Options,
    seed: int,
    deadline: float,
    previous: Fitted | None = None,
    known: Any = None,
) -> Prepared:
    """Deal out the rows of a table, and learn from those to train on about columns and target.

    Rows of weight 0 play no part. What a previous fit has learnt is taken from it. ``known`` are
    all classes, if they are known beforehand.
    """
    head = previous.head if previous else options.head.learn(y, options, known)
    values = head.values(y)
    given: Any = options.class_weight
    if given is not None:
        used = weights.nonzero().squeeze(1)
        numbers = not isinstance(given, dict) or all(isinstance(v, Real) for v in given.values())
        factors = compute_sample_weight(given, y[used.numpy()]) if numbers else [math.nan]
        factors = torch.tensor(factors)
        if not (factors.isfinite() & (factors >= 0)).all() or not factors.any():
            raise ValueError(
                f"class_weight: expected numbers ≥ 0, one of them above 0; got {given!r}"
            )
        weights[used] *= factors
    if not weights.all():
        rows = weights.nonzero().squeeze(1)
        table, values, weights = table.take(rows.numpy()), values[rows], weights[rows]
    learnt = replace(head, weighted=bool((weights != weights[0]).any()))
    drawing = torch.Generator().manual_seed(randomness.combine(seed, 1))  # of rows
    fraction, groups = options.validation_fraction, learnt.groups(values)
    parts = choices.split(
        table.rows, fraction, apart=learnt.apart, groups=groups, generator=drawing
    )
    if len(parts.train) == 0:
        raise ValueError(f"validation_fraction={fraction}: no row of {table.rows} is left to train")
    mine = weights[parts.train]
    folds = torch.randint(preprocessing.FOLDS, mine.shape, generator=drawing)
    if previous:
        columns, dtype = previous.preprocessing, previous.dtype
    else:
        look = torch.randperm(len(mine), generator=drawing)[: choices.LOOK].sort().values
        learnt = learnt.scaled(values[parts.train], mine)
        target = learnt.numbers(values[parts.train[look]])
        sample = table.take(parts.train[look].numpy())
        columns = preprocessing.learn(sample, options, mine[look], target, folds[look])
        dtype = torch.float64 if table.rows < choices.TINY else torch.float32
    target = learnt.pack(values, weights / float(mine.mean()), dtype)
    tensors: list[Any] = [
        (*columns.encode(table, dtype, rows, dealt), target[rows]) if len(rows) else None
        for rows, dealt in zip(parts, (folds, None, None), strict=True)
    ]
    return Prepared(options, seed, deadline, columns, learnt, *tensors)


def fit(prepared: Prepared, previous: Fitted | None = None) -> Fitted:
    """Embed an ensemble, or go on with the previous one; train and calibrate it."""
    options = prepared.options
    sizes = choices.choose_sizes(len(prepared.train[-1]), options)
    if previous is None and options.tune and prepared.stop is not None:
        prepared = choose_transform(prepared, sizes)
        sizes = race(prepared, sizes)
    ensemble = previous.ensemble if previous else embed(prepared, sizes)
    again = options.refit and previous is None and prepared.stop is not None
    run = train(ensemble, prepared, sizes, share=0.5 if again else 0.95)
    head, held_out = calibrate(ensemble, prepared)
    if again:
        assert prepared.stop is not None
        pairs = zip(prepared.train, prepared.stop, strict=True)
        prepared = replace(prepared, train=tuple(map(torch.cat, pairs)), stop=None)
        ensemble = embed(prepared, sizes)
        same = sizes._replace(epochs=run.best_epoch or sizes.epochs)
        train(ensemble, prepared, same)
        if prepared.calibrate is not None:
            head = head.scored(*judge(ensemble, prepared.calibrate))
    if options.select is not None and prepared.stop is not None:
        rows = (prepared.stop[:-1], prepared.stop[-1])
        metric = replace(head, temperature=1.0).metric
        ensemble = embens.select(ensemble, rows, int(options.select), metric=metric)
        head, held_out = calibrate(ensemble, prepared)
    built = previous.sizes if previous else sizes
    return Fitted(prepared.preprocessing, head, ensemble, built, run, held_out)


def choose_transform(prepared: Prepared, sizes: choices.Sizes) -> Prepared:
    """Return the rows with the transform of a skewed target that has the best held-out CRPS."""
    head = prepared.head
    if not isinstance(head, Gaussians) or prepared.options.target_transform != "auto":
        return prepared
    values = prepared.train[-1][:, : head.targets].double()  # of mean 0 and variance 1
    if (values - values.mean(0)).pow(3).mean(0).abs().max() < SKEWED:
        return prepared
    candidates = [prepared, prepared.transformed("quantile")]
    if (head.unpack(prepared.train[-1])[0] >= 0).all():
        candidates.append(prepared.transformed("log"))
    short = choices.shortened(sizes)
    losses = []
    for mine in candidates:
        ensemble = embed(mine, short)
        train(ensemble, mine, short, 0.05, quiet=True)
        found: Any = mine.head
        rows = tuple(tensor[:JUDGED] for tensor in mine.stop or ())
        losses.append(float(found.crps(*judge(ensemble, rows))))
    return candidates[losses.index(min(losses))]


def race(prepared: Prepared, sizes: choices.Sizes) -> choices.Sizes:
    """Return the best of the candidates on held-out rows: a few members, a short run, by halves."""
    running = choices.candidates(sizes, prepared.options)
    epochs = choices.shortened(sizes).epochs
    share = 0.3 / (2 * len(running))
    while len(running) > 1:
        losses = {}
        for mine in running:
            short = choices.shortened(mine)._replace(epochs=epochs, patience=epochs)
            run = train(embed(prepared, short), prepared, short, share, quiet=True)
            losses[mine] = min(row["metric"] for row in run.epochs)
        running = sorted(running, key=losses.__getitem__)[: len(running) // 2]
        epochs, share = 2 * epochs, 2 * share
    return running[0]


def embed(prepared: Prepared, sizes: choices.Sizes) -> EmbeddedEnsemble:
    """Build the reference network and embed the members of the family in it."""
    generator = torch.Generator().manual_seed(prepared.seed)
    options, head = prepared.options, prepared.head
    reference = network.build(prepared.preprocessing, head, options, sizes, generator)
    reference = reference.to(prepared.train[0].dtype)
    given: dict[str, Any] = {"members": sizes.members, "generator": generator}
    if options.family != "batch_ensemble":
        law = {} if options.family == "independent" else {"law": options.law}
        return getattr(embens, options.family)(reference, **given, **law)
    law = options.law or Signs(sizes.p)
    given |= {"own": "last" if options.own else (), "family": options.family}
    sites = head.sites if options.sites == "auto" else options.sites
    if sites == "first":
        first = next(n for n, m in reference.named_modules() if isinstance(m, torch.nn.Linear))
        return embens.embed(reference, pre={first: law}, post=None, **given)
    return embens.embed(reference, pre=law, post=law, sites=sites, **given)


def train(
    ensemble: EmbeddedEnsemble,
    prepared: Prepared,
    sizes: choices.Sizes,
    share: float = 0.95,
    *,
    quiet: bool = False,
    tries: int = 4,
) -> History:
    """Train an ensemble within a share of the time that is left; more slowly where it diverges."""
    options, head, stop = prepared.options, replace(prepared.head, temperature=1.0), prepared.stop
    epochs = sizes.epochs if stop is not None else min(sizes.epochs, choices.BLIND)
    half = head.half and prepared.train[0].dtype == torch.float32
    half = half and torch.cpu.get_capabilities().get("avx512_bf16", False)
    steps = -(-len(prepared.train[-1]) // sizes.batch_size)
    seconds = max(1e-3, share * (prepared.deadline - time.monotonic()))
    start = copy.deepcopy(ensemble.state_dict())
    try:
        return embens.fit(
            ensemble,
            prepared.train,
            stop,
            epochs=epochs,
            batch_size=sizes.batch_size,
            lr=sizes.lr,
            weight_decay=sizes.weight_decay,
            criterion=head.criterion,
            optimizer=partial(torch.optim.AdamW, fused=True),
            scheduler=falling(steps, epochs, seconds),
            schedule_by="step",
            metric=head.refined,
            maximise=False,
            patience=None if stop is None else sizes.patience,
            average=HORIZON,
            autocast=torch.bfloat16 if half else None,
            seed=prepared.seed,
            time_limit=None if seconds == math.inf else seconds,
            progress=bool(options.verbose) and not quiet,
        )
    except Divergence as error:
        if tries == 1:
            raise
        slower = sizes._replace(lr=sizes.lr / 4)
        warnings.warn(f"{error} Trying again with lr={slower.lr:g}.", stacklevel=4)
        ensemble.load_state_dict(start)
        return train(ensemble, prepared, slower, share, quiet=quiet, tries=tries - 1)


def falling(steps: int, epochs: int, seconds: float) -> Callable[[torch.optim.Optimizer], LambdaLR]:
    """Return a schedule: up during the first epoch, and along a cosine down.

    By the epochs that are done or the time that is spent, whichever is further.
    """
    began = time.monotonic()

    def factor(step: int) -> float:
        spent = (time.monotonic() - began) / seconds
        done = min(1.0, max(step / (steps * epochs), spent))
        fall = FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * done)) / 2
        return min(1.0, (step + 1) / steps) * fall

    return lambda optimizer: LambdaLR(optimizer, factor)


def calibrate(ensemble: EmbeddedEnsemble, prepared: Prepared) -> tuple[AnyHead, dict | None]:
    """Return the calibrated head, and the losses on the rows that training was stopped by."""
    head = replace(prepared.head, temperature=1.0, scores=None)
    if prepared.stop is None:
        return head, None
    outputs, target = judge(ensemble, prepared.stop)
    loss, *members = (float(head.metric(some, target)) for some in (outputs, *outputs.split(1)))
    head = head.tempered(outputs, target) if prepared.options.calibrate else head
    scored = judge(ensemble, prepared.calibrate) if prepared.calibrate else (outputs, target)
    return head.scored(*scored), {"ensemble": loss, "members": members}
