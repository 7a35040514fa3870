"""Train the ensemble of a cell, and measure it.

Small perceptrons take the lean road (:mod:`embens.experiments.lean`), everything else
:func:`embens.fit`; both make the same steps in the same order. A run that diverges is a result: it
is marked, and measured with its last finite weights.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field

import torch
from torch import Tensor

from embens import metrics
from embens.data import DataSet
from embens.ensemble import EmbeddedEnsemble
from embens.experiments.lean import Lean, Steps, lean
from embens.experiments.setting import Setting
from embens.prediction import predict
from embens.training import randomness
from embens.training.batches import Shuffled, training_batches
from embens.training.loop import fit
from embens.training.rates import linear_decay
from embens.training.trainer import Divergence

Row = dict[str, float]


@dataclass
class Training:
    """What became of a run.

    Attributes:
        diverged: whether it ended before its time.
        trace: one row for each epoch: the members' mean loss over the epoch's steps and, if asked
            for, their accuracy on the test data after it.
    """

    diverged: bool = False
    trace: list[Row] = field(default_factory=list)


def train(
    ensemble: EmbeddedEnsemble,
    setting: Setting,
    data: DataSet,
    *,
    seed: int,
    gamma: float | None = None,
    lr: float | None = None,
    modulation_lr: float | None = None,
    test_each_epoch: bool = False,
    schedule: bool = True,
) -> Training:
    """Train in place, as the paper does: momentum 0.9, rate constant, then linearly to 1 %.

    Args:
        ensemble: to train.
        setting: epochs, batch size, rate, decay.
        data: its train part is used.
        seed: of the order of samples and of fresh masks.
        gamma: gradient scale; None: :math:`M`, as in the paper's experiments.
        lr: another rate than the setting's.
        modulation_lr: another rate for the modulations.
        test_each_epoch: add the members' test accuracy to the trace.
        schedule: False keeps the rate constant.
    """
    gamma = float(ensemble.members) if gamma is None else gamma
    lr = setting.lr if lr is None else lr
    modulation_lr = lr if modulation_lr is None else modulation_lr
    form = lean(ensemble)
    if form is not None:
        rates = paper_rates(setting.epochs) if schedule else [1.0] * setting.epochs
        return _train_lean(
            ensemble, form, setting, data, seed, gamma, (lr, modulation_lr), rates, test_each_epoch
        )
    try:
        history = fit(
            ensemble,
            tuple(data.train),
            tuple(data.test) if test_each_epoch else None,
            epochs=setting.epochs,
            batch_size=setting.batch_size,
            lr=lr,
            modulation_lr=modulation_lr,
            weight_decay=setting.weight_decay,
            gamma=gamma,
            scheduler=None if schedule else linear_decay(setting.epochs, hold=1.0),
            keep="last",
            seed=seed,
            progress=False,
        )
        diverged = False
    except Divergence as error:
        history, diverged = error.history, True
    trace: list[Row] = []
    for row in history.epochs:
        trace.append({"epoch": row["epoch"], "loss": row["loss"]})
        if test_each_epoch:
            mine = [m for m in history.members if m["epoch"] == row["epoch"]]
            accuracy = [m["validation_accuracy"] for m in mine]
            trace[-1]["member_accuracy"] = sum(accuracy) / len(accuracy)
    return Training(diverged, trace)


def paper_rates(epochs: int) -> list[float]:
    """Return the factors of the rate, epoch by epoch, that :func:`linear_decay` gives.

    Without an optimiser, because torch's take a second to import.

    Example:
        >>> [round(rate, 3) for rate in paper_rates(4)]
        [1.0, 1.0, 1.0, 0.505]
    """
    half = max(epochs / 2, 1e-12)
    return [0.01 + 0.99 * min(1.0, (epochs - epoch) / half) for epoch in range(epochs)]


def _train_lean(
    ensemble: EmbeddedEnsemble,
    form: Lean,
    setting: Setting,
    data: DataSet,
    seed: int,
    gamma: float,
    lr: tuple[float, float],
    rates: list[float],
    test_each_epoch: bool,
) -> Training:
    inputs, targets = data.train
    size = setting.batch_size
    steps = Steps(
        form,
        factor=gamma / form.members,
        weight_decay=setting.weight_decay,
        separate=ensemble.plan.separate,
    )
    batches = training_batches((inputs, targets), size, seed=seed)  # for its order alone
    assert isinstance(batches, Shuffled)
    result = Training()
    with randomness.seeded(seed):
        for epoch, rate in enumerate(rates):
            good = [value.clone() for value in steps.values]
            order = batches.order(epoch).to(inputs.device)
            pairs = zip(inputs[order].split(size), targets[order].split(size), strict=True)
            total = torch.zeros((), dtype=torch.float64, device=inputs.device)
            for x, y in pairs:
                loss = steps.take(x, y, lr=lr[0] * rate, modulation_lr=lr[1] * rate)
                total += loss * len(y)
            finite = math.isfinite(total) and all(bool(v.isfinite().all()) for v in steps.values)
            if not finite:
                for value, last in zip(steps.values, good, strict=True):
                    value.copy_(last)
                result.diverged = True
                break
            row: Row = {"epoch": epoch + 1, "loss": float(total) / len(targets)}
            if test_each_epoch:
                outputs = run(ensemble, data.test.inputs, form)
                accuracy = metrics.member_accuracy(outputs, data.test.targets)
                row["member_accuracy"] = float(accuracy.mean())
            result.trace.append(row)
    return result


@torch.no_grad()
def run(ensemble: EmbeddedEnsemble, inputs: Tensor, form: Lean | None = None) -> Tensor:
    """Return the outputs in evaluation mode, ``(member, batch, class)``.

    Weights may be finite and so large that outputs are not; such an output says nothing, and all
    its classes become equal.
    """
    form = lean(ensemble) if form is None else form
    outputs = predict(ensemble, inputs).members if form is None else form(inputs)
    return outputs.where(outputs.isfinite().all(-1, keepdim=True), 0.0)


def evaluate(ensemble: EmbeddedEnsemble, data: DataSet) -> Row:
    """Return the paper's four measures, and what goes with them."""
    form = lean(ensemble)
    outputs = run(ensemble, data.test.inputs, form)
    fitted = run(ensemble, data.train.inputs, form)
    return {
        **score(outputs, data.test.targets),
        "member_train_accuracy": float(metrics.member_accuracy(fitted, data.train.targets).mean()),
        "train_accuracy": float(metrics.ensemble_accuracy(fitted, data.train.targets)),
        "train_loss": float(metrics.member_nll(fitted, data.train.targets).mean()),
        "parameters": float(sum(p.numel() for p in ensemble.parameters())),
    }


def score(outputs: Tensor, target: Tensor) -> Row:
    """Return accuracy of ensemble and members, correlation and likelihood on test data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # one member, or members always right
        correlation = float(metrics.correctness_correlation(outputs, target))
    members = metrics.member_accuracy(outputs, target)
    return {
        "accuracy": float(metrics.ensemble_accuracy(outputs, target)),
        "member_accuracy": float(members.mean()),
        "correlation": correlation,
        "nll": float(metrics.nll(outputs, target)),
    }
