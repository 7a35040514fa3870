"""Training of an ensemble on encoded rows: a plain PyTorch loop.

:func:`embens.fit` does more: checkpoints, several processes, any network. Tables need AdamW on the
ensemble's parameter groups, a learning rate that rises and then falls along a cosine, a running
average of the weights, and early stopping on the validation rows. The averaged weights are
validated after an epoch, or after several epochs of few steps, and the best ones are kept.
"""

import copy
import functools
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from embens import EmbeddedEnsemble
from embens.checks import warn
from embens.tabular import defaults
from embens.tabular.defaults import Sizes
from embens.tabular.perceptron import EncodedBatches, predict_rows
from embens.tabular.preparation import Prepared
from embens.training import Divergence, History

ATTEMPTS = 4  # if training diverges; each attempt has a quarter of the previous learning rate
AVERAGED_EPOCHS = 2.0  # horizon of the running average of the weights
FINAL_RATE = 0.02  # learning rate at the end, as a fraction of the largest
VALIDATED_STEPS = 40  # made between two validations, unless patience is short
TEMPERATURE_ROWS = 256  # held-out rows that choose the temperature of an epoch


def train(
    ensemble: EmbeddedEnsemble,
    prepared: Prepared,
    sizes: Sizes,
    *,
    deadline: float = math.inf,
    verbose: bool = False,
) -> History:
    """Train an ensemble in place; restart with a lower learning rate if the run diverges.

    Args:
        ensemble: The ensemble.
        prepared: The rows and the head.
        sizes: Epochs, batch size, rates and patience.
        deadline: When the run has to end, on the monotonic clock. At least one step is made.
        verbose: Whether to print a line after each epoch.

    Returns:
        The history of losses.

    Raises:
        Divergence: If a loss is not finite in four attempts.
    """
    start = copy.deepcopy(ensemble.state_dict())
    for _ in range(ATTEMPTS - 1):
        try:
            return run_once(ensemble, prepared, sizes, deadline, verbose)
        except Divergence as error:
            sizes = replace(sizes, lr=sizes.lr / 4)
            warn(f"{error} Trying again with lr={sizes.lr:g}.")
            ensemble.load_state_dict(start)
    return run_once(ensemble, prepared, sizes, deadline, verbose)


def run_once(
    ensemble: EmbeddedEnsemble, prepared: Prepared, sizes: Sizes, deadline: float, verbose: bool
) -> History:
    """Train until the last epoch, the end of patience, or the deadline."""
    run = Descent(ensemble, prepared, sizes, deadline)
    # Dropout draws from the global generator, which is left as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(prepared.seed)
        while run.stopped is None:
            run.train_epoch()
            run.end_epoch()
            if verbose:
                print(run.describe_epoch(), file=sys.stderr)
    ensemble.load_state_dict(run.best_weights)
    ensemble.eval()
    return History(run.member_rows, run.epoch_rows, run.best_epoch, run.stopped)


class Descent:
    """The state of a training run.

    Args:
        ensemble: The ensemble, changed in place.
        prepared: The rows and the head.
        sizes: Epochs, batch size, rates and patience.
        deadline: When the run has to end.

    Attributes:
        validation_interval: Number of epochs from one validation to the next.
        average: Ensemble with the running average of the weights.
        pairs: Each parameter of the average with the trained parameter that it follows.
        steps: Number of steps so far.
        epoch_rows: One row for each epoch, as in :class:`embens.History`.
        member_rows: One row for each epoch and member.
        best_epoch: The epoch with the best metric; None without validation rows.
        best_weights: The averaged weights of the best epoch; without validation rows, the present
            ones.
        stopped: "epochs", "patience" or "time"; None while the run continues.
    """

    def __init__(
        self, ensemble: EmbeddedEnsemble, prepared: Prepared, sizes: Sizes, deadline: float
    ):
        self.ensemble = ensemble
        self.prepared = prepared
        self.head = replace(prepared.head, temperature=1.0)
        self.patience = sizes.patience
        self.deadline = deadline
        self.epochs = sizes.epochs
        if len(prepared.validation) == 0:
            self.epochs = min(self.epochs, defaults.MAX_EPOCHS_WITHOUT_VALIDATION)
        generator = torch.Generator().manual_seed(prepared.seed)
        self.batches = EncodedBatches(prepared.train, prepared.encoder, sizes.batch_size, generator)
        interval = math.ceil(VALIDATED_STEPS / len(self.batches))
        self.validation_interval = max(1, min(interval, self.patience // 4))
        groups = ensemble.parameter_groups(
            lr=sizes.lr, weight_decay=sizes.weight_decay, optimizer=torch.optim.AdamW
        )
        self.optimizer = torch.optim.AdamW(groups, fused=True)
        self.average = copy.deepcopy(ensemble)
        self.pairs = list(zip(self.average.parameters(), ensemble.parameters(), strict=True))
        self.steps = 0
        self.best_weights = self.average.state_dict()
        self.best_metric = math.inf
        self.best_epoch: int | None = None
        self.epoch_rows: list[dict[str, Any]] = []
        self.member_rows: list[dict[str, Any]] = []
        self.stopped: str | None = None
        self.autocast = torch.autocast("cpu", torch.bfloat16, enabled=self._uses_bfloat16())
        # The last epoch is validated too, so the time of a validation has to remain.
        self.validation_seconds = 0.0
        if deadline < math.inf and len(prepared.validation):
            start = time.monotonic()
            self.validate()
            self.validation_seconds = time.monotonic() - start
        seconds = max(1e-3, deadline - self.validation_seconds - time.monotonic())
        factor = cosine_schedule(len(self.batches), self.epochs, seconds)
        self.scheduler = LambdaLR(self.optimizer, factor)

    def _uses_bfloat16(self) -> bool:
        is_float32 = self.prepared.train.numbers.dtype == torch.float32
        is_fast = torch.cpu.get_capabilities().get("avx512_bf16", False)
        return is_float32 and bool(is_fast)

    def train_epoch(self) -> None:
        """Make the steps of an epoch, or those until the deadline."""
        start = time.monotonic()
        self.ensemble.train()
        loss_sums = torch.zeros(self.ensemble.members)
        rows = 0
        for inputs, target in self.batches:
            with self.autocast:
                outputs = self.ensemble(inputs)
            # As in embens.objective: the sum over members of the mean over rows.
            losses = self.head.criterion(outputs.to(target.dtype), target).mean(-1)
            losses.sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self._update_average()
            loss_sums += len(target) * losses.detach()
            rows += len(target)
            if time.monotonic() + self.validation_seconds > self.deadline:
                self.stopped = "time"
                break
        self.losses = loss_sums / rows
        self.seconds = time.monotonic() - start

    @torch.no_grad()
    def _update_average(self) -> None:
        """Move the running average towards the weights of this step."""
        self.steps += 1
        weight = averaging_weight(self.steps, len(self.batches))
        for mean, value in self.pairs:
            mean.lerp_(value, weight)

    def end_epoch(self) -> None:
        """Write the history; validate the averaged weights if it is due, and keep the best."""
        epoch = len(self.epoch_rows) + 1
        loss = float(self.losses.mean())
        weights = torch.cat([p.detach().flatten() for p in self.ensemble.parameters()])
        if not math.isfinite(loss) or not weights.isfinite().all():
            raise Divergence(
                f"Training diverged in epoch {epoch}: the loss is {loss:.4g}.",
                History(self.member_rows, self.epoch_rows),
            )
        if epoch == self.epochs and self.stopped is None:
            self.stopped = "epochs"
        row = {"epoch": epoch, "loss": loss}
        members = {"loss": self.losses.tolist()}
        is_due = epoch % self.validation_interval == 0 or self.stopped is not None
        if is_due and len(self.prepared.validation):
            metric, validation_losses = self.validate()
            row["validation_loss"] = float(validation_losses.mean())
            row["metric"] = metric
            members["validation_loss"] = validation_losses.tolist()
            self._keep_best(epoch, metric)
        row["lr"] = self.optimizer.param_groups[0]["lr"]
        row["seconds"] = self.seconds
        self.epoch_rows.append(row)
        for member in range(self.ensemble.members):
            values = {name: column[member] for name, column in members.items()}
            self.member_rows.append({"epoch": epoch, "member": member, **values})

    def _keep_best(self, epoch: int, metric: float) -> None:
        """Keep the averaged weights if they are the best, or count the patience."""
        if self.best_epoch is None or metric < self.best_metric:
            self.best_metric = metric
            self.best_epoch = epoch
            self.best_weights = copy.deepcopy(self.average.state_dict())
        elif epoch - self.best_epoch >= self.patience and self.stopped is None:
            self.stopped = "patience"

    def validate(self) -> tuple[float, Tensor]:
        """Return the metric of early stopping and the losses of the members.

        The metric is taken at the best temperature: an overconfident network can still be the most
        informative one (Berta et al., 2025). A part of the rows chooses it, to save time.
        """
        rows = self.prepared.validation
        with self.autocast:  # as in training, because it is faster
            outputs = predict_rows(self.average, self.prepared.encoder, rows)
        outputs = outputs.to(rows.target.dtype)
        few = slice(TEMPERATURE_ROWS)
        calibrated = self.head.calibrated(outputs[:, few], rows.target[few])
        metric = float(calibrated.metric(outputs, rows.target))
        return metric, self.head.criterion(outputs, rows.target).mean(-1)

    def describe_epoch(self) -> str:
        """Return the last row of the history as text."""
        row = self.epoch_rows[-1]
        text = f"epoch {row['epoch']}/{self.epochs}: loss {row['loss']:.4g}"
        if "metric" in row:
            text += f", validation {row['metric']:.4g}"
        return f"{text}, {row['seconds']:.2g} s"


def averaging_weight(step: int, steps_per_epoch: int) -> float:
    r"""Return the weight of the newest weights in their running average after a step.

    It is :math:`1 / \min(h, 1 + (s - 1)/9)` after step :math:`s = 1, 2, \dots`, where :math:`h` is
    the number of steps in :data:`AVERAGED_EPOCHS` epochs.

    Example:
        >>> averaging_weight(1, 10), averaging_weight(10, 10), averaging_weight(500, 10)
        (1.0, 0.5, 0.05)
    """
    horizon = max(1.0, AVERAGED_EPOCHS * steps_per_epoch)
    return 1 / min(horizon, 1 + (step - 1) / 9)


def cosine_schedule(steps_per_epoch: int, epochs: int, seconds: float) -> Callable[[int], float]:
    """Return factors of the learning rate: a rise in the first epoch, then a cosine.

    Args:
        steps_per_epoch: Number of steps of an epoch.
        epochs: Number of epochs.
        seconds: Time of the whole run; may be infinite.

    Progress is the fraction of epochs or of time that is used, whichever is larger.
    """
    start = time.monotonic()

    # The scheduler asks once for each group of parameters, which all need the same factor.
    @functools.lru_cache(maxsize=1)
    def factor(step: int) -> float:
        time_used = (time.monotonic() - start) / seconds
        progress = min(1.0, max(step / (steps_per_epoch * epochs), time_used))
        cosine = FINAL_RATE + (1 - FINAL_RATE) * (1 + math.cos(math.pi * progress)) / 2
        # Without enough time for an epoch, the rise takes a tenth of the time.
        warm_up = min(1.0, max((step + 1) / steps_per_epoch, 10 * time_used))
        return warm_up * cosine

    return factor
