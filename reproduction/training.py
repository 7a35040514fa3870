"""Training and scoring of an ensemble, as in the paper."""

import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embens import Divergence, EmbeddedEnsemble, History, embed, fit, laws, metrics, predict
from embens.training import Autocast, Batches, Callback, Checkpoint, Objective
from reproduction.datasets import DataSet, Part
from reproduction.datasets.augmentation import AugmentedImages
from reproduction.grid.cells import Cell, Row
from reproduction.grid.settings import MODULATIONS, Setting, count_parameters, load_data


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
        test_outputs = outputs_of(self.ensemble, self.data.test.inputs)
        train_outputs = outputs_of(self.ensemble, self.data.train.inputs)
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
    family: str = MODULATIONS,
    lr: float | None = None,
    modulation_lr: float | None = None,
    test_each_epoch: bool = False,
    split: bool = False,
) -> Training:
    """Train an ensemble in place, as in the paper.

    SGD with momentum 0.9; the learning rate is constant for half of the epochs, then falls linearly
    to 1 %. A run that diverges counts as a result: it is marked and scored with its last finite
    weights. If the cell has a folder for checkpoints, an interrupted run continues from its last
    epoch, bit for bit.

    Args:
        cell: Its setting and seed determine the run.
        ensemble: The ensemble.
        data: The data; None: those of the setting.
        gamma: Gradient scaling of the shared weights; None: the number of members.
        family: Family whose learning rate is used.
        lr: Learning rate; None: that of the family.
        modulation_lr: Learning rate of the modulations; None: ``lr``.
        test_each_epoch: Record the members' test accuracy after each epoch.
        split: Split each batch among the members, instead of showing it to all of them.

    Returns:
        The trained ensemble.
    """
    setting = cell.setting
    if data is None:
        data = load_data(setting)
    if gamma is None:
        gamma = float(ensemble.members)
    if lr is None:
        lr = setting.rate_of(family)
    if setting.channels_last:
        use_channels_last_(ensemble)
    groups = ensemble.parameter_groups(
        lr=lr, modulation_lr=modulation_lr, weight_decay=setting.weight_decay, gamma=gamma
    )
    # On the CPU, foreach is faster than the default for many small tensors.
    optimizer = torch.optim.SGD(groups, momentum=0.9, foreach=True)
    member_test = MemberTest(data.test if test_each_epoch else None)
    callbacks: list[Callback] = [member_test]
    if setting.precision == "bfloat16":
        callbacks.append(Autocast(torch.bfloat16))
    if split:
        callbacks.append(Batches("split"))
    elif setting.chunk:
        callbacks.append(Objective(chunk=setting.chunk))
    if cell.checkpoints:
        facts = f"{lr} {modulation_lr} {gamma} {split} {len(data.train.targets)}"
        callbacks.append(Checkpoint(checkpoint_folder(cell, ensemble, facts)))
    diverged = False
    try:
        history = fit(
            ensemble,
            training_samples(setting, data),
            epochs=setting.epochs,
            batch_size=setting.batch_size,
            optimizer=optimizer,
            seed=cell.seed,
            callbacks=callbacks,
            progress=False,
        )
    except Divergence as error:
        history = error.history
        diverged = True
    return Training(ensemble, data, diverged, member_test.add_to(history))


def use_channels_last_(module: nn.Module) -> None:
    """Store shared convolution weights with channels last, so that activations are as well."""
    for parameter in module.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


def training_samples(setting: Setting, data: DataSet) -> Any:
    """Return the training samples of a setting, augmented if it says so."""
    if setting.augment and setting.network != "mlp":
        return AugmentedImages(data.train, setting.augment)
    return tuple(data.train)


def checkpoint_folder(cell: Cell, ensemble: EmbeddedEnsemble, facts: str) -> Path:
    """Return the folder of one training run of a cell.

    Its name is a hash of the initial weights and of the facts that distinguish the runs of a cell.
    """
    digest = hashlib.sha256(facts.encode())
    for tensor in ensemble.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return Path(cell.checkpoints) / digest.hexdigest()[:16]


class MemberTest(Callback):
    """Test the members after each epoch.

    Args:
        part: Test samples; None tests nothing.
    """

    def __init__(self, part: Part | None):
        self.part = part
        self.accuracies: list[float] = []

    def on_epoch(self, run: Any, record: dict[str, Any]) -> None:
        """Test the members."""
        if self.part is not None:
            outputs = outputs_of(run.ensemble, self.part.inputs)
            accuracies = metrics.member_accuracy(outputs, self.part.targets)
            self.accuracies.append(float(accuracies.mean()))

    def state_dict(self) -> dict[str, Any]:
        """Return the accuracies of the finished epochs."""
        return {"accuracies": list(self.accuracies)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the accuracies of the finished epochs."""
        self.accuracies = list(state["accuracies"])

    def add_to(self, history: History) -> list[Row]:
        """Return a row for each epoch with its loss and the members' test accuracy."""
        rows = []
        for record in history.epochs:
            rows.append({"epoch": record["epoch"], "loss": record["loss"]})
        for row, accuracy in zip(rows, self.accuracies, strict=False):
            row["member_accuracy"] = accuracy
        return rows


def outputs_of(ensemble: EmbeddedEnsemble, inputs: Tensor, draws: int | None = None) -> Tensor:
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
