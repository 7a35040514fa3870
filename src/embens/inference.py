"""Run an ensemble on data, in batches and without gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Never, get_args

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves, tree_map

from embens import checks, sources, synonyms
from embens.ensemble import EmbeddedEnsemble
from embens.modes import evaluating
from embens.prediction import Prediction, Task
from embens.trees import batch_size as count_rows
from embens.trees import gather

LARGEST_INITIAL_PART = 0.1
"""Largest part of the running statistics that may be older than the training."""


@checks.suggest(synonyms.PREDICTION)
def predict(
    ensemble: EmbeddedEnsemble,
    x: Any,
    *more: Never,
    batch_size: int = 1024,
    members: int | None = None,
    task: Task = "classification",
    generator: torch.Generator | None = None,
) -> Prediction:
    """Run an ensemble on data in batches, in evaluation mode and without gradients.

    Args:
        ensemble: The ensemble; its mode is restored afterwards.
        x: Inputs ``(batch, …)`` as a tensor, an array or a numeric table; a tuple for several
            inputs, or a dict by argument name; a data set or a loader, whose targets are ignored
            (the last element of an item is the target, unless it is the only one). Batches are
            moved to the device of the ensemble, outputs back to the device of the inputs. Floating
            arrays are converted to the dtype of the ensemble.
        *more: Not used; raises TypeError, as several inputs are one argument.
        batch_size: Samples per batch; a loader has a fixed one.
        members: Number of masks to draw, if the ensemble resamples its masks at each pass; one mask
            is used for all samples. None: the number of members of the ensemble.
        task: "classification" (outputs are logits), "regression" (point predictions) or "gaussian"
            (outputs ``(…, 2)`` are a mean and the logarithm of a variance).
        generator: Draws masks; None: the global generator.

    Returns:
        The outputs of all members, with their mean and uncertainty.

    Raises:
        ValueError: If ``members`` is given but masks are fixed, or inputs are not finite.

    Example:
        >>> from embens import batch_ensemble, networks
        >>> net = networks.mlp(4, 8, 2, outputs=3)
        >>> prediction = predict(batch_ensemble(net, 5), torch.zeros(2, 4))
        >>> prediction.members.shape, prediction.probabilities.shape
        (torch.Size([5, 2, 3]), torch.Size([2, 3]))
    """
    if more:
        raise TypeError(
            f"predict takes all inputs as one argument, got {1 + len(more)} after the ensemble. "
            "Call predict(ensemble, (x, z)) for several inputs, or evaluate(ensemble, (x, y)) for "
            "scores."
        )
    check_ensemble("predict", ensemble)
    warn_about_statistics(ensemble)
    checks.check_choice("task", task, get_args(Task))
    checks.check_whole("batch_size", batch_size)
    counts = sources.count_inputs(ensemble.reference.forward)
    batches = sources.input_batches(x, batch_size, floating_dtype(ensemble), counts)
    outputs = run_batches(ensemble, batches, members=members, generator=generator)
    check_gaussian(outputs, task)
    return Prediction(outputs, task)


def run_batches(
    ensemble: EmbeddedEnsemble,
    batches: Iterable[Any],
    *,
    members: int | None = None,
    generator: torch.Generator | None = None,
) -> Any:
    """Return the outputs of all members for batches of inputs, as :func:`predict` does.

    Args:
        ensemble: The ensemble.
        batches: Batches of inputs, each a tensor, or a tuple or dict of tensors.
        members: Number of masks to draw, if they are resampled; None: as many as members.
        generator: Draws masks; None: the global generator.

    Returns:
        Outputs ``(member, batch, …)`` of all batches together.
    """
    count = ensemble.members
    if members is not None:
        count = checks.check_members(members)
    seeds = _mask_seeds(ensemble, members, count, generator)
    parts = []
    first_row = 0
    with evaluating(ensemble), torch.no_grad():
        for inputs in batches:
            try:
                outputs = _run(ensemble, inputs, seeds)
            except RuntimeError as error:
                sources.note_dtypes(error, inputs, floating_dtype(ensemble))
                sources.note_features(error, inputs, ensemble.reference)
                raise
            _check_finite(inputs, outputs, first_row)
            device = tree_leaves(inputs)[0].device
            parts.append(_select_members(outputs, count, device))
            first_row += count_rows(inputs)
    if not parts:
        raise ValueError("x must contain at least one batch, got none. Has an iterator been used?")
    if len(parts) == 1:
        return parts[0]
    return gather(parts, lambda tensors: torch.cat(tensors, 1))


def floating_dtype(ensemble: EmbeddedEnsemble) -> torch.dtype:
    """Return the dtype of the first floating parameter, or the default type of torch.

    Args:
        ensemble: The ensemble.
    """
    for parameter in ensemble.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return torch.get_default_dtype()


def check_ensemble(name: str, ensemble: Any) -> None:
    """Raise unless an argument is an ensemble with values.

    Args:
        name: Of the function, for the error message.
        ensemble: Its first argument.

    Raises:
        TypeError: If it is not an ensemble.
        ValueError: If a parameter is on the meta device.
    """
    if isinstance(ensemble, EmbeddedEnsemble):
        checks.check_values(name, ensemble)
        return
    kind = type(ensemble).__name__
    hint = "Embed it first: embens.embed(network, members=…), or embens.independent(network, 1)"
    if kind in ("DistributedDataParallel", "DataParallel"):
        hint = "Pass its .module: fit itself averages over processes under torchrun"
    raise TypeError(f"{name} expects an ensemble; got {kind}. {hint}.")


def warn_about_statistics(ensemble: EmbeddedEnsemble) -> None:
    """Warn if running statistics have seen too few batches to follow the training.

    Args:
        ensemble: The ensemble.
    """
    for name, module in ensemble.reference.named_modules():
        if not isinstance(module, _NormBase) or not module.track_running_stats:
            continue
        if module.momentum is None:  # the mean over all batches
            continue
        count = _batches_seen(ensemble, name, module)
        initial_part = (1 - module.momentum) ** count
        if count == 0 or initial_part <= LARGEST_INITIAL_PART:
            continue
        checks.warn(
            f"{name or 'the reference'!r} ({type(module).__name__}) has seen {count} batches in "
            f"training mode, so {initial_part:.0%} of its running statistics are older than that, "
            "and predictions may be far worse than in training. Train for more batches, or run "
            "ensemble.train()(x) on training data a few times, inside torch.no_grad()."
        )
        return


def _batches_seen(ensemble: EmbeddedEnsemble, name: str, module: _NormBase) -> int:
    """Return the number of batches that a norm layer has counted, the least over members."""
    key = f"{name}.num_batches_tracked".lstrip(".")
    counter = module.num_batches_tracked
    if key in ensemble.individual:
        counter = ensemble.individual[key]
    return 0 if counter is None else int(counter.min())


def check_gaussian(outputs: Any, task: Task) -> None:
    """Check that outputs are pairs of a mean and a log-variance if the task says so.

    Args:
        outputs: Outputs ``(member, batch, …)``.
        task: The meaning of the outputs.
    """
    if task == "gaussian" and isinstance(outputs, Tensor) and outputs.shape[-1] != 2:
        raise ValueError(
            "task='gaussian' needs outputs (…, 2), a mean and a log-variance, got shape "
            f"{tuple(outputs.shape[1:])}. For point predictions use task='regression'."
        )


def _mask_seeds(
    ensemble: EmbeddedEnsemble,
    members: int | None,
    count: int,
    generator: torch.Generator | None,
) -> list[int | None]:
    """Return one seed per pass; a single None if masks are fixed.

    All batches use the same seeds, so that all samples see the same masks.
    """
    if any(site.fresh for site in ensemble.spec.sites):
        device = "cpu" if generator is None else generator.device
        passes = math.ceil(count / ensemble.members)
        return torch.randint(2**62, (passes,), generator=generator, device=device).tolist()
    if members is not None:
        raise ValueError(
            f"members={members} needs masks that are resampled, but the {ensemble.members} members "
            "of this ensemble are fixed. Omit members, or use mc_dropout(…, fresh=True)."
        )
    return [None]


def _run(ensemble: EmbeddedEnsemble, inputs: Any, seeds: list[int | None]) -> Any:
    """Return the outputs for one batch, with one pass per seed."""
    device = next(ensemble.parameters(), tree_leaves(inputs)[0]).device
    args, kwargs = ensemble.bind(tree_map(lambda tensor: tensor.to(device), inputs))
    cuda_devices = [device] if device.type == "cuda" else []
    outputs = []
    for seed in seeds:
        if seed is None:
            outputs.append(ensemble(*args, **kwargs))
            continue
        with torch.random.fork_rng(cuda_devices):
            torch.manual_seed(seed)
            outputs.append(ensemble(*args, **kwargs))
    if len(outputs) == 1:
        return outputs[0]
    return gather(outputs, torch.cat)


def _select_members(outputs: Any, count: int, device: torch.device) -> Any:
    """Keep the first members, and move the outputs to a device."""

    def select(leaf: Any) -> Any:
        return leaf[:count].to(device) if isinstance(leaf, Tensor) else leaf

    return tree_map(select, outputs)


def _check_finite(inputs: Any, outputs: Any, first_row: int) -> None:
    """Raise if outputs are not finite because inputs are not."""
    if not checks.find_gaps("outputs", outputs):
        return
    description = checks.find_gaps("inputs", inputs)
    if description and first_row > 0:
        description += f" of the batch that starts at row {first_row}"
    if description:
        raise ValueError(
            f"{description}, so the outputs are not finite. Remove these rows or impute the values."
        )
