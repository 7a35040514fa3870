"""Training and scoring of an ensemble, as in the paper."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from embens import Divergence, EmbeddedEnsemble, embed, fit, laws, metrics, predict
from reproduction.datasets import DataSet
from reproduction.grid.cells import Cell, Row
from reproduction.grid.settings import count_parameters, load_data


def batch_ensemble(
    reference: nn.Module,
    members: int,
    p: float = 0.0,
    *,
    sites: str = "hidden",
    generator: torch.Generator | None = None,
) -> EmbeddedEnsemble:
    """Return the BatchEnsemble of the paper, with modulations N(p, 1 − p²).

    Args:
        reference: The reference network.
        members: Number of members.
        p: Mean of the modulations.
        sites: Where modulations act; see :func:`embens.embed`.
        generator: Random generator of the modulations.

    Returns:
        The ensemble.
    """
    law = laws.Shifted(p)
    return embed(reference, members, pre=law, post=law, sites=sites, generator=generator)


@dataclass(frozen=True)
class Training:
    """A trained ensemble.

    Attributes:
        ensemble: The ensemble with its last weights.
        data: The data it was trained on.
        diverged: Whether the run ended early because the loss was not finite.
        trace: Per epoch, the mean loss of the members and, on request, their test accuracy.
    """

    ensemble: EmbeddedEnsemble
    data: DataSet
    diverged: bool
    trace: list[Row]

    def evaluate(self) -> Row:
        """Return the scores on test and train data, and the number of parameters."""
        test_outputs = run(self.ensemble, self.data.test.inputs)
        train_outputs = run(self.ensemble, self.data.train.inputs)
        train_targets = self.data.train.targets
        member_accuracy = metrics.member_accuracy(train_outputs, train_targets).mean()
        return {
            **score(test_outputs, self.data.test.targets),
            "member_train_accuracy": float(member_accuracy),
            "train_accuracy": float(metrics.ensemble_accuracy(train_outputs, train_targets)),
            "train_loss": float(metrics.member_nll(train_outputs, train_targets).mean()),
            "parameters": float(count_parameters(self.ensemble)),
            "diverged": float(self.diverged),
        }


def train(
    cell: Cell,
    ensemble: EmbeddedEnsemble,
    *,
    data: DataSet | None = None,
    gamma: float | None = None,
    lr: float | None = None,
    modulation_lr: float | None = None,
    test_each_epoch: bool = False,
) -> Training:
    """Train an ensemble in place, as in the paper.

    SGD with momentum 0.9; the learning rate is constant for half of the epochs, then falls linearly
    to 1 %. A run that diverges counts as a result: it is marked and scored with its last finite
    weights.

    Args:
        cell: Its setting and seed determine the run.
        ensemble: The ensemble.
        data: The data; None: those of the setting.
        gamma: Gradient scaling of the shared weights; None: the number of members.
        lr: Learning rate; None: that of the setting.
        modulation_lr: Learning rate of the modulations; None: ``lr``.
        test_each_epoch: Record the members' test accuracy after each epoch.

    Returns:
        The trained ensemble.
    """
    setting = cell.setting
    if data is None:
        data = load_data(setting)
    if gamma is None:
        gamma = float(ensemble.members)
    if lr is None:
        lr = setting.lr
    groups = ensemble.parameter_groups(
        lr=lr, modulation_lr=modulation_lr, weight_decay=setting.weight_decay, gamma=gamma
    )
    # On the CPU, foreach is faster than the default for many small tensors.
    optimizer = torch.optim.SGD(groups, momentum=0.9, foreach=True)
    trace: list[Row] = []

    def record_epoch(ensemble: EmbeddedEnsemble, record: dict[str, Any]) -> None:
        row = {"epoch": record["epoch"], "loss": record["loss"]}
        if test_each_epoch:
            outputs = run(ensemble, data.test.inputs)
            accuracies = metrics.member_accuracy(outputs, data.test.targets)
            row["member_accuracy"] = float(accuracies.mean())
        trace.append(row)

    diverged = False
    try:
        fit(
            ensemble,
            tuple(data.train),
            epochs=setting.epochs,
            batch_size=setting.batch_size,
            optimizer=optimizer,
            seed=cell.seed,
            callbacks=[record_epoch],
            progress=False,
        )
    except Divergence:
        diverged = True
    return Training(ensemble, data, diverged, trace)


def run(ensemble: EmbeddedEnsemble, inputs: Tensor, draws: int | None = None) -> Tensor:
    """Return the outputs of an ensemble in evaluation mode.

    Outputs of a sample that overflow are replaced by zeros, so that all classes are equal.

    Args:
        ensemble: The ensemble.
        inputs: The inputs.
        draws: Number of masks to draw, for an ensemble with fresh masks.

    Returns:
        Outputs ``(member, batch, class)``.
    """
    outputs = predict(ensemble, inputs, members=draws).members
    is_finite = outputs.isfinite().all(-1, keepdim=True)
    return outputs.where(is_finite, 0.0)


def score(outputs: Tensor, target: Tensor) -> Row:
    """Return accuracy of ensemble and members, correlation of errors, and log loss.

    Args:
        outputs: Outputs ``(member, batch, class)``.
        target: Class indices ``(batch,)``.

    Returns:
        The scores by name. The correlation is NaN for one member, or members that are always right.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # undefined correlations
        correlation = float(metrics.correctness_correlation(outputs, target))
    return {
        "accuracy": float(metrics.ensemble_accuracy(outputs, target)),
        "member_accuracy": float(metrics.member_accuracy(outputs, target).mean()),
        "correlation": correlation,
        "nll": float(metrics.nll(outputs, target)),
    }


def disagreement(outputs: Tensor) -> float:
    """Return the mean disagreement of the members; 0 for one member."""
    if len(outputs) < 2:
        return 0.0
    return float(metrics.disagreement(outputs))


def scaled_gamma(cell: Cell) -> float:
    """Return the gradient scaling of a cell that sweeps ``gamma`` over ``"M"`` and ``"1"``."""
    if cell["gamma"] == "M":
        return float(cell["members"])
    return 1.0
