"""Evaluate an ensemble on labelled data: one dictionary of scores.

Integer targets are classes and floating targets are values; the scores are those of
:mod:`embens.metrics` and :mod:`embens.mixtures`. The predictive distribution for regression is the
one of :meth:`embens.Prediction.quantile`: with ``task="gaussian"`` the mixture of the members'
normal distributions, and otherwise the normal distribution with the mean and the standard deviation
of the members' point predictions. The latter contains no observation noise, so that ``nll``,
``crps`` and ``coverage`` measure the spread of the members alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Never

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from embens import checks, metrics, mixtures, sources, synonyms
from embens.inference import (
    check_ensemble,
    check_gaussian,
    floating_dtype,
    run_batches,
    warn_about_statistics,
)
from embens.losses import default_criterion, logits_of
from embens.prediction import Prediction, Task

if TYPE_CHECKING:
    from embens.ensemble import EmbeddedEnsemble

TASKS = (None, "classification", "regression", "gaussian")


@checks.suggest(synonyms.PREDICTION)
def evaluate(
    ensemble: EmbeddedEnsemble,
    data: Any,
    *more: Never,
    batch_size: int = 1024,
    members: int | None = None,
    task: Task | None = None,
    level: float = 0.9,
    generator: torch.Generator | None = None,
) -> dict[str, float]:
    """Return the scores of an ensemble on labelled data.

    Args:
        ensemble: The ensemble; it runs in evaluation mode, and its mode is restored afterwards.
        data: Tensors or arrays ``(inputs, target)``, a data set or a loader; several inputs:
            ``((x, z), target)``. Sample weights, as in ``(x, target, weight)``, are ignored.
        *more: Not used; raises TypeError, as inputs and target are one argument.
        batch_size: Samples per batch; a loader has a fixed one.
        members: Number of masks to draw, if they are resampled, as for :func:`embens.predict`.
        task: "classification", "regression" or "gaussian", as for :func:`embens.predict`. None:
            classification for integer targets, regression for floating ones.
        level: Nominal level of the central prediction interval whose coverage is reported.
        generator: Draws masks; None: the global generator.

    Returns:
        For classification:

        - ``accuracy``: accuracy of the mean output.
        - ``nll``, ``brier``, ``ece``: negative log-likelihood (nats), Brier score and expected
          calibration error of the mean probability.
        - ``member_accuracy``: mean accuracy of the members.
        - ``disagreement``: fraction of different predictions, averaged over pairs of members.
        - ``correctness_correlation``: correlation of the members' correctness.

        The last two are NaN where they are undefined, for example for a single member.

        For regression:

        - ``rmse``: root mean squared error of the mean.
        - ``nll``, ``crps``: mean negative log-likelihood (nats) and continuous ranked probability
          score of the predictive distribution. ``nll`` may be infinite where members agree.
        - ``coverage``: fraction of targets inside the central interval of probability ``level``
          (0.9 by default); a calibrated ensemble has a coverage of ``level``.

    Raises:
        TypeError: If there are no targets, or if they are not in ``data``.
        ValueError: If the shapes of outputs and targets do not match.

    Example:
        >>> from embens import batch_ensemble, networks
        >>> ensemble = batch_ensemble(networks.mlp(4, 8, 2, outputs=3), 5)
        >>> scores = evaluate(ensemble, (torch.randn(20, 4), torch.arange(20) % 3))
        >>> list(scores)[:4]
        ['accuracy', 'nll', 'brier', 'ece']
    """
    if more:
        raise TypeError(
            f"evaluate takes inputs and target as one argument, got {1 + len(more)} after the "
            "ensemble. Call evaluate(ensemble, (x, y)), or evaluate(ensemble, ((x, z), y)) for "
            "several inputs."
        )
    check_ensemble("evaluate", ensemble)
    warn_about_statistics(ensemble)
    checks.check_choice("task", task, TASKS)
    checks.check_whole("batch_size", batch_size)
    outputs, target = run_labelled(ensemble, data, batch_size, members=members, generator=generator)
    if task is None:
        task = infer_task(outputs, target)
    if task == "classification":
        return classification_scores(outputs, target)
    check_gaussian(outputs, task)
    return regression_scores(Prediction(outputs, task), target, level)


def infer_task(outputs: Tensor, target: Tensor) -> Task:
    """Return "classification" for integer targets, "regression" for floating ones.

    Args:
        outputs: Outputs ``(member, batch, …)``.
        target: Targets ``(batch, …)``.

    Returns:
        The task.

    Raises:
        ValueError: If the targets are rows of class probabilities, which :func:`embens.fit` trains
            by cross-entropy.

    Example:
        >>> infer_task(torch.zeros(3, 2, 4), torch.tensor([0, 3]))
        'classification'
    """
    if not target.is_floating_point():
        return "classification"
    if default_criterion(outputs, target) is cross_entropy:
        raise ValueError(
            "the targets are rows of class probabilities, for which there are no scores. Pass the "
            "most probable classes, target.argmax(-1). For values pass task='regression' "
            "(evaluate) or criterion=torch.nn.functional.mse_loss (compare)."
        )
    return "regression"


def classification_scores(outputs: Tensor, target: Tensor) -> dict[str, float]:
    """Return the classification scores of :func:`evaluate`.

    Args:
        outputs: Logits ``(member, batch, class)``.
        target: Class indices ``(batch,)``.

    Returns:
        The scores by name; NaN where they are undefined.

    Example:
        >>> scores = classification_scores(torch.eye(2).expand(3, 2, 2), torch.tensor([0, 1]))
        >>> scores["accuracy"], scores["disagreement"]
        (1.0, 0.0)
    """
    scores = {
        "accuracy": metrics.ensemble_accuracy(outputs, target),
        "nll": metrics.nll(outputs, target),
        "brier": metrics.brier(outputs, target),
        "ece": metrics.expected_calibration_error(outputs, target),
        "member_accuracy": metrics.member_accuracy(outputs, target).mean(),
    }
    with warnings.catch_warnings():
        # The scores are NaN where they are undefined; a warning would repeat it.
        warnings.filterwarnings("ignore", message=".* is NaN", category=RuntimeWarning)
        scores["disagreement"] = metrics.disagreement(outputs)
        scores["correctness_correlation"] = metrics.correctness_correlation(outputs, target)
    return {name: float(value) for name, value in scores.items()}


def regression_scores(
    prediction: Prediction, target: Tensor, level: float = 0.9
) -> dict[str, float]:
    """Return the regression scores of :func:`evaluate`.

    Args:
        prediction: Prediction with the task "regression" or "gaussian".
        target: Values with the shape of ``prediction.mean``, apart from axes of length 1.
        level: Nominal level of the prediction interval.

    Returns:
        The scores by name.

    Example:
        >>> prediction = Prediction(torch.tensor([[-1.0, 4.0], [1.0, 6.0]]), "regression")
        >>> scores = regression_scores(prediction, torch.tensor([0.0, 8.0]), level=0.5)
        >>> round(scores["rmse"], 4), scores["coverage"]
        (2.1213, 0.5)
    """
    mean = prediction.mean
    target = match_shape(target, mean).to(mean.device)
    means, stds = prediction.components
    means, stds, target = means.double(), stds.double(), target.double()
    low, high = prediction.interval(level)
    is_covered = (low.double() <= target) & (target <= high.double())
    scores = {
        "rmse": (mean.double() - target).square().mean().sqrt(),
        "nll": mixtures.negative_log_likelihood(means, stds, target).mean(),
        "crps": mixtures.crps(means, stds, target).mean(),
        "coverage": is_covered.double().mean(),
    }
    return {name: float(value) for name, value in scores.items()}


def run_labelled(
    ensemble: EmbeddedEnsemble,
    data: Any,
    batch_size: int = 1024,
    *,
    members: int | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs and the targets of labelled data.

    Args:
        ensemble: The ensemble.
        data: Labelled data, as for :func:`evaluate`.
        batch_size: Samples per batch.
        members: Number of masks to draw, if they are resampled.
        generator: Draws masks.

    Returns:
        Outputs ``(member, batch, …)`` and targets ``(batch, …)``.

    Raises:
        TypeError: If the network has several outputs, or the data have no targets.
    """
    targets: list[Tensor] = []

    def inputs() -> Iterator[Any]:
        """Yield the inputs of each batch, and keep its target."""
        dtype = floating_dtype(ensemble)
        counts = sources.count_inputs(ensemble.reference.forward)
        for batch_inputs, target in sources.labelled_batches(data, batch_size, dtype, counts):
            targets.append(target)
            yield batch_inputs

    outputs = logits_of(run_batches(ensemble, inputs(), members=members, generator=generator))
    if not isinstance(outputs, Tensor):
        raise TypeError(
            "evaluate needs a network with a single output, or one with 'logits', got a "
            f"{type(outputs).__name__}. Use predict and embens.metrics for one output of several."
        )
    if not all(isinstance(target, Tensor) for target in targets):
        raise TypeError(f"target must be a tensor, got {type(targets[0]).__name__}.")
    return outputs, torch.cat(targets)


def match_shape(target: Tensor, mean: Tensor) -> Tensor:
    """Reshape the target to the shape of the mean if they differ in axes of length 1 only.

    Args:
        target: Values ``(batch, …)``.
        mean: Mean output ``(batch, …)``.

    Returns:
        The target, with the shape of the mean.

    Raises:
        ValueError: If they differ in other axes.
    """
    target_sizes = [size for size in target.shape[1:] if size != 1]
    mean_sizes = [size for size in mean.shape[1:] if size != 1]
    if len(target) != len(mean) or target_sizes != mean_sizes:
        hint = ""
        if mean.shape[-1] == 2 and 2 * target.numel() == mean.numel():
            hint = " For outputs that are a mean and a log-variance use task='gaussian'."
        raise ValueError(
            f"target must have the shape of the mean output, {tuple(mean.shape)}, got "
            f"{tuple(target.shape)}.{hint}"
        )
    return target.reshape(mean.shape)
