"""Checks of what a measurement is given, before any work: the ensemble, inputs, and targets."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from embens.checks import find_gaps
from embens.ensemble import EmbeddedEnsemble


def check_call(ensemble: Any, x: Any, target: Any = None, criterion: Any = F.mse_loss) -> None:
    """Raise where gradients of the members on these samples can't be taken."""
    check_ensemble(ensemble)
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "gradients are needed, which torch.inference_mode() rules out. Leave it for this "
            "call; torch.no_grad() does no harm."
        )
    if not callable(criterion):
        raise TypeError(
            "criterion: expected a function of one member's outputs and the target, such as "
            f"torch.nn.functional.cross_entropy; got {criterion!r}"
        )
    check_inputs(x)
    if isinstance(target, Tensor):
        check_target(x, target)
        check_gaps("target", target)


def check_target(x: Any, target: Tensor) -> None:
    """Raise where a target does not belong to the inputs."""
    if target.dim() == 0 or len(target) == 0:
        raise ValueError(f"target: expected at least one sample; got shape {tuple(target.shape)}")
    counts = {len(v) for v in tree_leaves(x) if isinstance(v, Tensor)}
    if len(counts) == 1 and counts != {len(target)}:
        raise ValueError(
            "x and target must have the same number of samples; got "
            f"{counts.pop()} and {len(target)}. Take both from the same batch."
        )


def at_test(ensemble: Any) -> Any:
    """Return a network with an input for each member (mimo) as it is where all have the same.

    That is an ensemble whose first layers are the sums of blocks, and whose last are members' own.
    """
    heads = isinstance(ensemble, EmbeddedEnsemble) and ensemble.plan.heads is not None
    return ensemble.subset(range(ensemble.members)) if heads else ensemble


def check_ensemble(ensemble: Any) -> None:
    """Raise where something else was given."""
    if not isinstance(ensemble, EmbeddedEnsemble):
        what = "it" if isinstance(ensemble, nn.Module) else "a network"
        raise TypeError(
            f"expected an ensemble; got {type(ensemble).__name__}. Make one of {what}: "
            "embens.batch_ensemble(net, 8)"
        )
    ensemble.plan.require_embedded("this measurement")


def check_inputs(x: Any, name: str = "x") -> None:
    """Raise where inputs are no tensors, empty, or not finite."""
    x = dict(x) if isinstance(x, Mapping) else x
    tensors = [v for v in tree_leaves(x) if isinstance(v, Tensor)]
    if not tensors:
        raise TypeError(
            f"{name}: expected a tensor with samples along its first axis, or a tuple or dict of "
            f"them; got {type(x).__name__}. Convert it: torch.as_tensor({name})"
        )
    for value in tensors:
        if value.dim() and len(value) == 0:
            raise ValueError(
                f"{name}: expected at least one sample; got shape {tuple(value.shape)}"
            )
    check_gaps(name, x)


def check_gaps(name: str, values: Any) -> None:
    """Raise where numbers are NaN or infinite."""
    if gaps := find_gaps(name, values):
        raise ValueError(f"{gaps}; expected finite numbers. Leave these samples out.")


def as_classes(target: Any) -> Any:
    """Return whole numbers as int64, without an axis of length 1 for them; others as they are."""
    if not isinstance(target, Tensor) or target.is_floating_point() or target.is_complex():
        return target
    return target.long().squeeze(1) if target.dim() > 1 else target.long()
