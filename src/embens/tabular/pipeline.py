"""From a table to a fitted ensemble.

:func:`prepare` splits the rows, learns the encoding of columns and target, and encodes the table.
:func:`fit` tunes, embeds an ensemble, trains it and calibrates it.
"""

import copy
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import embens
from embens import EmbeddedEnsemble, training
from embens.tabular import defaults
from embens.tabular.columns import FOLDS, Preprocessing, learn_columns
from embens.tabular.defaults import Arguments, Sizes
from embens.tabular.frames import Table, class_weight_factors
from embens.tabular.gaussians import MIN_SKEWNESS, GaussianHead
from embens.tabular.perceptron import build_network, embed
from embens.tabular.targets import ClassHead
from embens.training import Divergence, History

AnyHead = ClassHead | GaussianHead

AVERAGED_EPOCHS = 2.0  # horizon of the running average of the weights
FINAL_RATE = 0.02  # of the learning rate, at the end
TRANSFORM_ROWS = 1000  # held-out rows that choose the transform of the target
ATTEMPTS = 4  # of a training run that diverges, each with a quarter of the learning rate


@dataclass(frozen=True, eq=False)
class Rows:
    """Encoded rows of a table.

    Attributes:
        numbers: ``(row, number)``.
        codes: ``(row, categorical column)``.
        target: ``(row, target)``, with weights in the last column if there are any.
    """

    numbers: Tensor
    codes: Tensor
    target: Tensor

    @property
    def inputs(self) -> tuple[Tensor, Tensor]:
        """The arguments of the network."""
        return self.numbers, self.codes

    def __len__(self) -> int:
        return len(self.target)

    def __getitem__(self, rows: Any) -> Self:
        return replace(
            self, numbers=self.numbers[rows], codes=self.codes[rows], target=self.target[rows]
        )

    def __add__(self, other: Self) -> Self:
        return replace(
            self,
            numbers=torch.cat([self.numbers, other.numbers]),
            codes=torch.cat([self.codes, other.codes]),
            target=torch.cat([self.target, other.target]),
        )


@dataclass(frozen=True, eq=False)
class Prepared:
    """Encoded rows and everything else that training needs.

    Attributes:
        arguments: of the estimator.
        seed: of the initial weights and of training.
        deadline: when the fit has to end, by the monotonic clock.
        preprocessing: the encoding of the columns.
        head: the head of the target.
        train: training rows.
        validation: held-out rows for tuning, early stopping and temperatures, if any.
        calibration: held-out rows for conformal scores only, if any.
    """

    arguments: Arguments
    seed: int
    deadline: float
    preprocessing: Preprocessing
    head: AnyHead
    train: Rows
    validation: Rows | None
    calibration: Rows | None


@dataclass(frozen=True, eq=False)
class Fitted:
    """A fitted ensemble and everything else that predictions need.

    Attributes:
        preprocessing: the encoding of the columns.
        head: the calibrated head.
        ensemble: the trained ensemble.
        sizes: the chosen values of the arguments.
        run: the history of training.
        held_out: losses on the validation rows, of the "ensemble" and of the "members".
    """

    preprocessing: Preprocessing
    head: AnyHead
    ensemble: EmbeddedEnsemble
    sizes: Sizes
    run: History
    held_out: dict[str, Any] | None

    @property
    def dtype(self) -> torch.dtype:
        """The type of the numbers that the network takes."""
        return next(self.ensemble.parameters()).dtype


def prepare(
    table: Table,
    y: np.ndarray,
    weights: Tensor,
    arguments: Arguments,
    random_state: np.random.RandomState,
    deadline: float = math.inf,
    previous: Fitted | None = None,
    classes: Any = None,
) -> Prepared:
    """Split the rows of a table and learn its encoding from the training rows.

    Args:
        table: the features.
        y: the target, ``(row,)`` or ``(row, target)``.
        weights: sample weights ``(row,)``; rows of weight 0 are ignored.
        arguments: of the estimator.
        random_state: source of the seeds of training and of the split.
        deadline: when the fit has to end, by the monotonic clock.
        previous: a previous fit, whose encoding is used again.
        classes: all classes, if ``y`` does not have all of them.
    """
    seed = int(random_state.randint(2**31 - 1))
    generator = torch.Generator().manual_seed(int(random_state.randint(2**31 - 1)))
    head = previous.head if previous else arguments.head_class.learn(y, arguments, classes)
    values = head.values(y)
    if arguments.class_weight is not None:
        weights = weights * class_weight_factors(arguments.class_weight, y, weights)
    if not weights.all():
        used = weights.nonzero().squeeze(1)
        table, values, weights = table.take(used.numpy()), values[used], weights[used]
    head = replace(head, weighted=bool((weights != weights[0]).any()))
    split = defaults.split_rows(
        table.rows,
        arguments.validation_fraction,
        stride=head.calibration_stride,
        strata=head.strata(values),
        generator=generator,
    )
    folds = torch.randint(FOLDS, split.train.shape, generator=generator)
    if previous is None:
        head = head.scaled(values[split.train], weights[split.train])
        # A large table needs only a sample of its rows for bins and categories.
        sample = torch.randperm(len(split.train), generator=generator)
        sample = sample[: defaults.MAX_LEARNING_ROWS].sort().values
        rows = split.train[sample]
        statistics_target = head.statistics_target(values[rows])
        preprocessing = learn_columns(
            table.take(rows.numpy()), arguments, weights[rows], statistics_target, folds[sample]
        )
        # In float64 a weight of 2 equals two rows, to rounding.
        dtype = torch.float64 if table.rows < defaults.TINY_ROWS else torch.float32
    else:
        preprocessing = previous.preprocessing
        dtype = previous.dtype
    # Training rows use the target statistics without their fold, held-out rows those of all rows.
    row_folds = torch.zeros(table.rows, dtype=torch.int64)
    row_folds[split.train] = 1 + folds
    numbers, codes = preprocessing.encode(table, dtype, row_folds)
    target = head.pack(values, weights / weights[split.train].mean(), dtype)
    encoded = Rows(numbers, codes, target)
    return Prepared(
        arguments,
        seed,
        deadline,
        preprocessing,
        head,
        train=encoded[split.train],
        validation=encoded[split.validation] if len(split.validation) else None,
        calibration=encoded[split.calibration] if len(split.calibration) else None,
    )


def fit(prepared: Prepared, previous: Fitted | None = None) -> Fitted:
    """Train and calibrate an ensemble.

    Args:
        prepared: the encoded rows.
        previous: a previous fit, whose ensemble is trained further in place.
    """
    arguments = prepared.arguments
    sizes = defaults.choose_sizes(len(prepared.train), arguments)
    if previous is not None:
        run = train(previous.ensemble, prepared, sizes)
        head, held_out = calibrate(previous.ensemble, prepared)
        return replace(previous, head=head, run=run, held_out=held_out)
    if arguments.tune and prepared.validation is not None:
        prepared = choose_transform(prepared, sizes)
        sizes = race(prepared, sizes)
    validation = prepared.validation
    refit = arguments.refit and validation is not None
    ensemble = build_ensemble(prepared, sizes)
    run = train(ensemble, prepared, sizes, share=0.5 if refit else 0.95)
    head, held_out = calibrate(ensemble, prepared)
    if arguments.refit and validation is not None:
        # The temperature stays that of the first run: no validation rows are left to choose it.
        all_rows = prepared.train + validation
        prepared = replace(prepared, train=all_rows, validation=None)
        ensemble = build_ensemble(prepared, sizes)
        train(ensemble, prepared, replace(sizes, epochs=run.best_epoch or sizes.epochs))
        if prepared.calibration is not None:
            outputs = run_members(ensemble, prepared.calibration.inputs)
            head = head.with_scores(outputs, prepared.calibration.target)
    return Fitted(prepared.preprocessing, head, ensemble, sizes, run, held_out)


def choose_transform(prepared: Prepared, sizes: Sizes) -> Prepared:
    """Choose the transform of a skewed target by the CRPS of short runs on held-out rows."""
    head = prepared.head
    if not isinstance(head, GaussianHead) or prepared.arguments.target_transform != "auto":
        return prepared
    standardised = prepared.train.target[:, : head.targets].double()
    skewness = (standardised - standardised.mean(0)).pow(3).mean(0).abs().max()
    if skewness < MIN_SKEWNESS:
        return prepared
    candidates = [prepared, with_transform(prepared, "quantile")]
    values, _ = head.unpack(prepared.train.target)
    if (values >= 0).all():
        candidates.append(with_transform(prepared, "log"))
    short = defaults.shorten(sizes)
    losses = []
    for candidate in candidates:
        ensemble = build_ensemble(candidate, short)
        train(ensemble, candidate, short, share=0.05, verbose=False)
        candidate_head: Any = candidate.head
        rows: Any = candidate.validation
        rows = rows[:TRANSFORM_ROWS]
        losses.append(float(candidate_head.crps(run_members(ensemble, rows.inputs), rows.target)))
    return candidates[losses.index(min(losses))]


def with_transform(prepared: Prepared, transform: str) -> Prepared:
    """Return the same rows with another transform of the target."""
    old: Any = prepared.head
    values, weights = old.unpack(prepared.train.target)
    head = replace(old, transform=transform).scaled(values, weights)

    def convert(rows: Rows | None) -> Rows | None:
        if rows is None:
            return None
        values, weights = old.unpack(rows.target)
        return replace(rows, target=head.pack(values, weights, rows.target.dtype))

    return replace(
        prepared,
        head=head,
        train=convert(prepared.train),
        validation=convert(prepared.validation),
        calibration=convert(prepared.calibration),
    )


def race(prepared: Prepared, sizes: Sizes) -> Sizes:
    """Choose dropout and weight decay by successive halving of short runs with few members."""
    candidates = defaults.race_candidates(sizes, prepared.arguments)
    # Each of the two rounds may take 15 % of the remaining time.
    epochs = defaults.shorten(sizes).epochs
    share = 0.3 / (2 * len(candidates))
    while len(candidates) > 1:
        losses = {}
        for candidate in candidates:
            short = replace(defaults.shorten(candidate), epochs=epochs, patience=epochs)
            ensemble = build_ensemble(prepared, short)
            run = train(ensemble, prepared, short, share=share, verbose=False)
            losses[candidate] = min(row["metric"] for row in run.epochs)
        candidates = sorted(candidates, key=losses.__getitem__)[: len(candidates) // 2]
        epochs *= 2
        share *= 2
    return candidates[0]


def build_ensemble(prepared: Prepared, sizes: Sizes) -> EmbeddedEnsemble:
    """Build the reference network and embed an ensemble in it."""
    generator = torch.Generator().manual_seed(prepared.seed)
    head, arguments = prepared.head, prepared.arguments
    reference = build_network(prepared.preprocessing, head, arguments, sizes, generator)
    reference = reference.to(prepared.train.numbers.dtype)
    return embed(reference, head, arguments, sizes, generator)


def train(
    ensemble: EmbeddedEnsemble,
    prepared: Prepared,
    sizes: Sizes,
    *,
    share: float = 0.95,
    verbose: bool = True,
) -> History:
    """Train an ensemble in place; restart with a lower learning rate if the run diverges.

    Args:
        ensemble: the ensemble.
        prepared: the rows.
        sizes: epochs, batch size, rates and patience.
        share: fraction of the remaining time that the run may take.
        verbose: whether to show progress if the user asked for it.
    """
    start = copy.deepcopy(ensemble.state_dict())
    attempt = 1
    while True:
        seconds = max(1e-3, share * (prepared.deadline - time.monotonic()))
        try:
            return run_training(ensemble, prepared, sizes, seconds, verbose)
        except Divergence as error:
            if attempt == ATTEMPTS:
                raise
            attempt += 1
            sizes = replace(sizes, lr=sizes.lr / 4)
            warnings.warn(f"{error} Trying again with lr={sizes.lr:g}.", stacklevel=4)
            ensemble.load_state_dict(start)


def run_training(
    ensemble: EmbeddedEnsemble, prepared: Prepared, sizes: Sizes, seconds: float, verbose: bool
) -> History:
    """Call :func:`embens.fit`."""
    head = replace(prepared.head, temperature=1.0)
    train_rows, validation = prepared.train, prepared.validation
    epochs = sizes.epochs
    validation_data = None
    callbacks = [training.ScheduleEveryStep(), training.WeightAveraging(AVERAGED_EPOCHS)]
    if validation is None:
        epochs = min(epochs, defaults.MAX_EPOCHS_WITHOUT_VALIDATION)
    else:
        validation_data = (validation.inputs, validation.target)
        callbacks.append(
            training.EarlyStopping(sizes.patience, head.calibrated_metric, maximise=False)
        )
    if seconds < math.inf:
        callbacks.append(training.TimeLimit(seconds))
    is_float32 = train_rows.numbers.dtype == torch.float32
    if head.allows_bfloat16 and is_float32 and has_fast_bfloat16():
        callbacks.append(training.Autocast(torch.bfloat16))
    groups = ensemble.parameter_groups(
        lr=sizes.lr, weight_decay=sizes.weight_decay, optimizer=torch.optim.AdamW
    )
    steps_per_epoch = math.ceil(len(train_rows) / sizes.batch_size)
    return embens.fit(
        ensemble,
        (train_rows.inputs, train_rows.target),
        validation_data,
        epochs=epochs,
        batch_size=sizes.batch_size,
        optimizer=torch.optim.AdamW(groups, fused=True),
        scheduler=cosine_schedule(steps_per_epoch, epochs, seconds),
        criterion=head.criterion,
        seed=prepared.seed,
        callbacks=callbacks,
        progress=bool(prepared.arguments.verbose) and verbose,
    )


def has_fast_bfloat16() -> bool:
    """Return whether the processor has instructions for bfloat16."""
    return bool(torch.cpu.get_capabilities().get("avx512_bf16", False))


def cosine_schedule(
    steps_per_epoch: int, epochs: int, seconds: float
) -> Callable[[torch.optim.Optimizer], LambdaLR]:
    """Return a schedule that rises during the first epoch and then falls along a cosine.

    Progress is the fraction of epochs or of time that is used, whichever is larger.
    """
    start = time.monotonic()

    def factor(step: int) -> float:
        time_used = (time.monotonic() - start) / seconds
        progress = min(1.0, max(step / (steps_per_epoch * epochs), time_used))
        cosine = FINAL_RATE + (1 - FINAL_RATE) * (1 + math.cos(math.pi * progress)) / 2
        warm_up = min(1.0, (step + 1) / steps_per_epoch)
        return warm_up * cosine

    return lambda optimizer: LambdaLR(optimizer, factor)


def run_members(ensemble: EmbeddedEnsemble, inputs: tuple[Tensor, Tensor]) -> Tensor:
    """Return the outputs of the members, ``(member, row, output)``."""
    return embens.predict(ensemble, inputs, task="regression").members


def calibrate(
    ensemble: EmbeddedEnsemble, prepared: Prepared
) -> tuple[AnyHead, dict[str, Any] | None]:
    """Return the calibrated head and the losses on the validation rows, if there are any."""
    head = replace(prepared.head, temperature=1.0, scores=None)
    rows = prepared.validation
    if rows is None:
        return head, None
    outputs = run_members(ensemble, rows.inputs)
    held_out = {
        "ensemble": float(head.metric(outputs, rows.target)),
        "members": [float(head.metric(member, rows.target)) for member in outputs.split(1)],
    }
    if prepared.arguments.calibrate:
        head = head.calibrated(outputs, rows.target)
    if prepared.calibration is not None:  # None if there are fewer held-out rows than the stride
        rows = prepared.calibration
        outputs = run_members(ensemble, rows.inputs)
    return head.with_scores(outputs, rows.target), held_out
