"""Compare networks and ensembles on your data: train each, score it and measure its cost.

Candidates are compared with the first one, row by row of the test data (:mod:`embens.differences`).
"""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from embens import checks, mixtures, uncertainty
from embens.comparison_folder import open_folder
from embens.differences import Comparison, paired_differences
from embens.ensemble import EmbeddedEnsemble
from embens.evaluation import classification_scores, infer_task, match_shape, run_labelled
from embens.families import independent
from embens.flops import count_flops
from embens.logits import check_labelled, log_mean_probability
from embens.losses import Criterion, gaussian_nll, ignored_label, logits_of
from embens.prediction import Prediction, Task
from embens.training import Checkpoint, Divergence, History, fit
from embens.training.batches import batches_of, map_tensors
from embens.training.startup import reading_options

Candidate = nn.Module | Callable[[], nn.Module]


def compare(
    candidates: Mapping[str, Candidate],
    train: Any,
    validation: Any,
    test: Any,
    *,
    epochs: int,
    lr: float | Sequence[float] = 0.01,
    seeds: int = 1,
    budget: Literal["epochs", "compute"] = "epochs",
    folder: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Comparison:
    """Train candidates with the same budget, and compare their quality and cost.

    Candidates are copied before training. Validation data select the epoch, the learning rate and
    the temperature; test data are used for the scores only.

    Args:
        candidates: Networks or ensembles by name; the first one is the baseline. A plain network is
            trained as it is. A function without arguments is called once per seed, after torch's
            global generator was seeded, so that each run has new initial weights. A module starts
            every run with its present weights.
        train: Training data, as for :func:`embens.fit`.
        validation: Validation data of the same form.
        test: Test data of the same form.
        epochs: Number of epochs.
        lr: Learning rate. Of several rates, each candidate uses the one with the lowest validation
            loss in the run with seed 0.
        seeds: Number of training runs per candidate; their seeds are 0, 1, ….
        budget: "epochs" trains every candidate for ``epochs`` epochs. "compute" gives all
            candidates the same number of floating-point operations: the most expensive candidate
            is trained for ``epochs`` epochs, the others for proportionally more.
        folder: Where runs are saved. The same call continues an interrupted comparison; other
            candidates or data are refused.
        **options: Further arguments of :func:`embens.fit` for all candidates, such as
            ``batch_size``, ``optimizer`` or ``progress``.

    Returns:
        Scores and costs, and paired differences to the first candidate with intervals.

    Raises:
        ValueError: If an argument is invalid.
        Divergence: If a candidate diverges at every learning rate.

    Example:
        >>> from embens import batch_ensemble, networks
        >>> def data(rows, seed):
        ...     x = torch.randn(rows, 2, generator=torch.Generator().manual_seed(seed))
        ...     return x, (x[:, 0] > 0).long()
        >>> reference = networks.mlp(2, 16, 2, outputs=2)
        >>> result = compare(
        ...     {"one": reference, "batch": batch_ensemble(reference, 4)},
        ...     data(64, 0),
        ...     data(32, 1),
        ...     data(100, 2),
        ...     epochs=5,
        ...     lr=0.1,
        ... )
        >>> [difference.metric for difference in result.differences]
        ['accuracy', 'nll', 'calibrated_nll', 'brier']
    """
    rates = _check_arguments(candidates, epochs, lr, seeds, budget)
    data = {"train": train, "validation": validation, "test": test}
    for name, candidate in candidates.items():
        _check_candidate(name, _build(candidate, seed=0), data, options.get("criterion"))
    if folder is not None:
        folder = open_folder(folder, candidates, data)
    epochs_of = dict.fromkeys(candidates, epochs)
    if budget == "compute":
        epochs_of = _equal_compute(candidates, train, epochs)
    scores, row_values = {}, {}
    for index, (name, candidate) in enumerate(candidates.items()):
        _report(options, f"{name} ({index + 1} of {len(candidates)})")
        trainer = _Trainer(name, candidate, data, epochs_of[name], options, folder, index)
        runs = trainer.run_all(rates, seeds)
        scores[name] = _average([run.scores for run in runs])
        row_values[name] = _stack([run.row_values for run in runs])
    return Comparison(scores, paired_differences(row_values), seeds)


def _check_arguments(
    candidates: Any, epochs: int, lr: float | Sequence[float], seeds: int, budget: str
) -> Sequence[float]:
    """Return the learning rates; raise for invalid arguments."""
    if not isinstance(candidates, Mapping) or not candidates:
        raise ValueError(
            "candidates must be a dict from names to networks or ensembles with at least one "
            f"entry, got {candidates!r:.80}."
        )
    checks.check_whole("epochs", epochs)
    checks.check_whole("seeds", seeds)
    checks.check_choice("budget", budget, ("epochs", "compute"))
    rates = lr if isinstance(lr, Sequence) else [lr]
    if not rates:
        raise ValueError("lr must be a positive number or a list of them, got an empty list.")
    for rate in rates:
        checks.check_number("lr", rate, "a positive number", lambda value: value > 0)
    return rates


def _build(candidate: Candidate, seed: int) -> EmbeddedEnsemble:
    """Return a new ensemble of a candidate; a network becomes an ensemble of one member."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module: Any = candidate
        if isinstance(candidate, nn.Module):
            module = copy.deepcopy(candidate)
        elif callable(candidate):
            module = candidate()
        if isinstance(module, EmbeddedEnsemble):
            return module
        if not isinstance(module, nn.Module):
            raise TypeError(
                "candidates must be torch modules or functions that return one, got "
                f"{type(module).__name__}."
            )
        return independent(module, 1, initialise=_keep_weights)


def _keep_weights(module: nn.Module) -> None:
    """Leave the weights of the only member as they are in the user's network."""


def _check_candidate(
    name: str, ensemble: EmbeddedEnsemble, data: dict[str, Any], criterion: Criterion | None
) -> None:
    """Evaluate one batch of the validation and test data, to find errors before any training."""
    for part in ("validation", "test"):
        source = batches_of(data[part], 2, seed=None, name=part, **reading_options(ensemble))
        batch = next(iter(source.epoch(0)))
        try:
            rows = iter([(*_as_tuple(batch.inputs), batch.target)])
            outputs, target = run_labelled(ensemble, rows)
            values = _row_values(outputs, target, criterion)
            if "accuracy" in values and source.tensors is not None:
                _check_classes(source.tensors[1], classes=outputs.shape[-1])
        except (TypeError, ValueError, RuntimeError) as error:
            error.add_note(f"The candidate is {name!r}, evaluated on the {part} data.")
            raise


def _check_classes(target: Tensor, classes: int) -> None:
    """Raise if a class index of any row is out of range."""
    smallest, largest = int(target.min()), int(target.max())
    if smallest < 0 or largest >= classes:
        raise ValueError(
            f"target must be class indices from 0 to {classes - 1}, got indices from {smallest} "
            f"to {largest}."
        )


def _as_tuple(inputs: Any) -> tuple[Any, ...]:
    """Return inputs as the leading elements of a batch: a tuple, or one tensor or dict."""
    if isinstance(inputs, tuple):
        return inputs
    return (inputs,)


def _equal_compute(candidates: Mapping[str, Candidate], train: Any, epochs: int) -> dict[str, int]:
    """Return the number of epochs of each candidate for the same floating-point operations."""
    costs = {}
    for name, candidate in candidates.items():
        costs[name] = _step_cost(_build(candidate, seed=0), train)
    largest = max(costs.values())
    epochs_of = {}
    for name, cost in costs.items():
        if cost == 0:
            raise ValueError(
                f"budget='compute' cannot count the operations of {name!r}. Use budget='epochs'."
            )
        epochs_of[name] = round(epochs * largest / cost)
    return epochs_of


def _step_cost(ensemble: EmbeddedEnsemble, train: Any) -> int:
    """Return the floating-point operations of a forward and backward pass of a few rows."""
    batch = next(iter(batches_of(train, 8, seed=None, **reading_options(ensemble)).epoch(0)))
    device = next(ensemble.parameters()).device
    args, kwargs = ensemble.bind(map_tensors(lambda tensor: tensor.to(device), batch.inputs))
    return count_flops(lambda: logits_of(ensemble(*args, **kwargs)).sum().backward())


@dataclass(frozen=True)
class _Run:
    """Scores of one training run, and the values of the metrics ``(row,)``."""

    scores: dict[str, float]
    row_values: dict[str, Tensor]
    validation_loss: float


@dataclass(frozen=True)
class _Trainer:
    """Trains one candidate.

    Attributes:
        name: Name of the candidate.
        candidate: The candidate.
        data: Train, validation and test data.
        epochs: Number of epochs.
        options: Arguments of :func:`embens.fit`.
        folder: Where runs are saved; None: nowhere.
        index: Number of the candidate in the names of its runs.
    """

    name: str
    candidate: Candidate
    data: dict[str, Any]
    epochs: int
    options: dict[str, Any]
    folder: str | os.PathLike[str] | None
    index: int

    def run_all(self, rates: Sequence[float], seeds: int) -> list[_Run]:
        """Choose the learning rate with seed 0, then train with the other seeds."""
        first_runs: dict[float, _Run] = {}
        for rate in rates:
            try:
                first_runs[rate] = self.run(rate, seed=0)
            except Divergence as error:
                # A rate that diverges is not chosen; at least one rate must train.
                if rate == rates[-1] and not first_runs:
                    error.add_note(self._advice)
                    raise
        best_rate = min(first_runs, key=lambda rate: first_runs[rate].validation_loss)
        runs = [first_runs[best_rate]]
        for seed in range(1, seeds):
            try:
                runs.append(self.run(best_rate, seed))
            except Divergence as error:
                error.add_note(self._advice)
                raise
        return runs

    @property
    def _advice(self) -> str:
        return f"The candidate is {self.name!r}. Try a smaller learning rate: lr=…"

    def run(self, lr: float, seed: int) -> _Run:
        """Train and score one run."""
        ensemble = _build(self.candidate, seed)
        options = dict(self.options)
        callbacks = list(options.pop("callbacks", ()))
        if self.folder is not None:
            name = f"candidate-{self.index}-seed-{seed}-lr-{lr:g}"
            callbacks.append(Checkpoint(Path(self.folder) / name))
        history = fit(
            ensemble,
            self.data["train"],
            self.data["validation"],
            epochs=self.epochs,
            lr=lr,
            seed=seed,
            callbacks=callbacks,
            **options,
        )
        return self.score(ensemble, history, lr, seed)

    def score(self, ensemble: EmbeddedEnsemble, history: History, lr: float, seed: int) -> _Run:
        """Score a trained ensemble; validation data choose the temperature."""
        criterion = self.options.get("criterion")
        held_out, held_out_target = _predict(ensemble, self.data["validation"], seed)
        temperature = 1.0
        if not held_out_target.is_floating_point():
            temperature = uncertainty.best_temperature(held_out, held_out_target)
        validation_values = _row_values(held_out, held_out_target, criterion)
        loss_name = "nll" if "nll" in validation_values else "squared_error"
        started = time.perf_counter()
        outputs, target = _predict(ensemble, self.data["test"], seed)
        inference_seconds = time.perf_counter() - started
        values = _row_values(outputs, target, criterion, temperature)
        scores = {name: float(value.mean()) for name, value in values.items()}
        if not target.is_floating_point():
            scores = {**scores, **classification_scores(outputs, target)}
            scores["temperature"] = temperature
        scores |= {
            "parameters": sum(parameter.numel() for parameter in ensemble.parameters()),
            "training_seconds": sum(record["seconds"] for record in history.epochs),
            "inference_seconds": inference_seconds,
            "epochs": len(history.epochs),
            "lr": lr,
        }
        return _Run(scores, values, float(validation_values[loss_name].mean()))


def _predict(ensemble: EmbeddedEnsemble, data: Any, seed: int) -> tuple[Tensor, Tensor]:
    """Return outputs ``(member, row, …)`` and targets; the seed determines fresh masks."""
    generator = torch.Generator().manual_seed(seed)
    outputs, target = run_labelled(ensemble, data, generator=generator)
    return outputs.cpu(), target.cpu()


def _row_values(
    outputs: Tensor, target: Tensor, criterion: Criterion | None, temperature: float = 1.0
) -> dict[str, Tensor]:
    """Return the metrics of each row ``(row,)``, in double precision.

    Args:
        outputs: Outputs of all members ``(member, row, …)``.
        target: Classes or values ``(row, …)``.
        criterion: Criterion of the training; None: the default.
        temperature: Divides the logits for ``calibrated_nll``.
    """
    outputs = outputs.double()
    task = _task_of(criterion, outputs, target)
    if task != "classification":
        return _regression_values(Prediction(outputs, task), target)
    check_labelled(outputs, target)
    target = target.to(outputs.device)
    is_correct = outputs.mean(0).argmax(-1) == target
    probabilities = outputs.softmax(-1).mean(0)
    one_hot = nn.functional.one_hot(target, probabilities.shape[-1])
    return {
        "accuracy": is_correct.double(),
        "nll": _negative_log_likelihood(outputs, target),
        "calibrated_nll": _negative_log_likelihood(outputs / temperature, target),
        "brier": (probabilities - one_hot).square().sum(-1),
    }


def _task_of(criterion: Criterion | None, outputs: Tensor, target: Tensor) -> Task:
    """Return the task that a criterion and a target imply."""
    if getattr(criterion, "func", criterion) is gaussian_nll:
        return "gaussian"
    is_cross_entropy = ignored_label(criterion) is not None
    if target.is_floating_point() and criterion is not None and not is_cross_entropy:
        return "regression"
    return infer_task(outputs, target)


def _regression_values(prediction: Prediction, target: Tensor) -> dict[str, Tensor]:
    """Return the metrics of each row of a regression ``(row,)``."""
    target = match_shape(target, prediction.mean).to(prediction.mean)
    values = {"squared_error": (prediction.mean - target).square()}
    if prediction.task == "gaussian":
        means, stds = prediction.components
        values["nll"] = mixtures.negative_log_likelihood(means, stds, target)
        values["crps"] = mixtures.crps(means, stds, target)
    return {name: value.reshape(len(value), -1).mean(1) for name, value in values.items()}


def _negative_log_likelihood(outputs: Tensor, target: Tensor) -> Tensor:
    """Return the negative log-likelihood of the mean probability ``(row,)``."""
    return -log_mean_probability(outputs).gather(1, target[:, None]).squeeze(1)


def _average(scores: list[dict[str, float]]) -> dict[str, float]:
    """Return the means over seeds."""
    return {name: sum(each[name] for each in scores) / len(scores) for name in scores[0]}


def _stack(values: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return values ``(seed, row)`` from those of each seed."""
    return {name: torch.stack([each[name] for each in values]) for name in values[0]}


def _report(options: Mapping[str, Any], text: str) -> None:
    """Print the candidate that is trained next, if progress is shown."""
    if options.get("progress") is not False and sys.stderr is not None:
        print(text, file=sys.stderr)
