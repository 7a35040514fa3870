"""Train the ensemble of a cell with :func:`embens.fit`, and measure it.

A run that diverges is a result: it is marked, and measured with its last finite weights.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from torch import Tensor, nn

from embens import metrics
from embens.data import DataSet
from embens.ensemble import EmbeddedEnsemble
from embens.experiments.contract import Row
from embens.experiments.setting import Setting, data_set
from embens.prediction import predict
from embens.training.loop import fit
from embens.training.trainer import Divergence


@dataclass(frozen=True)
class Training:
    """An ensemble that was trained."""

    ensemble: EmbeddedEnsemble  # with its last weights
    data: DataSet
    diverged: bool  # the run ended before its time
    trace: list[Row]  # of each epoch: members' mean loss and, if asked for, their test accuracy

    def evaluate(self) -> Row:
        """Return the paper's four measures, and what goes with them."""
        outputs = run(self.ensemble, self.data.test.inputs)
        fitted, target = run(self.ensemble, self.data.train.inputs), self.data.train.targets
        return {
            **score(outputs, self.data.test.targets),
            "member_train_accuracy": float(metrics.member_accuracy(fitted, target).mean()),
            "train_accuracy": float(metrics.ensemble_accuracy(fitted, target)),
            "train_loss": float(metrics.member_nll(fitted, target).mean()),
            "parameters": float(count_parameters(self.ensemble)),
            "diverged": float(self.diverged),
        }


def train(
    ensemble: EmbeddedEnsemble,
    setting: Setting,
    *,
    data: DataSet | None = None,
    seed: int,
    gamma: float | None = None,
    lr: float | None = None,
    modulation_lr: float | None = None,
    test_each_epoch: bool = False,
) -> Training:
    """Train in place, as the paper does: momentum 0.9, rate constant, then linearly to 1 %.

    ``seed`` is of the order of samples and of fresh masks, ``gamma`` is :math:`M` by default, and
    ``lr`` the setting's; so are the data.
    """
    data = data_set(setting) if data is None else data
    try:
        history = fit(
            ensemble,
            tuple(data.train),
            tuple(data.test) if test_each_epoch else None,
            epochs=setting.epochs,
            batch_size=setting.batch_size,
            lr=setting.lr if lr is None else lr,
            modulation_lr=modulation_lr,
            weight_decay=setting.weight_decay,
            gamma=float(ensemble.members) if gamma is None else gamma,
            keep="last",
            seed=seed,
            progress=False,
        )
        diverged = False
    except Divergence as error:
        history, diverged = error.history, True
    trace = [{"epoch": row["epoch"], "loss": row["loss"]} for row in history.epochs]
    if test_each_epoch:
        for row in trace:
            mine = [m["validation_accuracy"] for m in history.members if m["epoch"] == row["epoch"]]
            row["member_accuracy"] = sum(mine) / len(mine)
    return Training(ensemble, data, diverged, trace)


def run(ensemble: EmbeddedEnsemble, inputs: Tensor, draws: int | None = None) -> Tensor:
    """Return the outputs in evaluation mode, ``(member, batch, class)``.

    ``draws`` is how many masks to draw, where they are fresh. Outputs that overflow, though weights
    are finite, say nothing: all classes become equal.
    """
    outputs = predict(ensemble, inputs, members=draws).members
    return outputs.where(outputs.isfinite().all(-1, keepdim=True), 0.0)


def score(outputs: Tensor, target: Tensor) -> Row:
    """Return accuracy of ensemble and members, correlation and likelihood on test data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # one member, or members always right
        correlation = float(metrics.correctness_correlation(outputs, target))
    return {
        "accuracy": float(metrics.ensemble_accuracy(outputs, target)),
        "member_accuracy": float(metrics.member_accuracy(outputs, target).mean()),
        "correlation": correlation,
        "nll": float(metrics.nll(outputs, target)),
    }


def count_parameters(module: nn.Module) -> int:
    """Return how many numbers a module trains."""
    return sum(p.numel() for p in module.parameters())
