"""Validation of the arguments of measurements, before any work is done."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves

from embens.checks import check_rows, find_gaps
from embens.ensemble import EmbeddedEnsemble

Inputs = tuple[Tensor, ...]
Criterion = Callable[[Any, Any], Tensor]


def check_measurement(
    ensemble: Any,
    x: Any,
    target: Any = None,
    criterion: Any = F.mse_loss,
) -> None:
    """Raise if gradients of members cannot be measured on these samples.

    Args:
        ensemble: Must be an ensemble.
        x: Must contain tensors with at least one sample and finite values.
        target: If it is a tensor, it must have as many samples as ``x`` and finite values.
        criterion: Must be callable.
    """
    check_ensemble(ensemble)
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "this measurement needs gradients, which torch.inference_mode() disables. Call it "
            "outside of that context; torch.no_grad() is allowed."
        )
    if not callable(criterion):
        raise TypeError(
            "criterion must be a function of one member's outputs and the target, for example "
            f"torch.nn.functional.cross_entropy, got {criterion!r}."
        )
    check_inputs(x)
    if isinstance(target, Tensor):
        check_target(x, target)
        check_finite("target", target)


def check_ensemble(ensemble: Any) -> None:
    """Raise if the argument is not an ensemble."""
    if isinstance(ensemble, EmbeddedEnsemble):
        return
    source = "it" if isinstance(ensemble, nn.Module) else "a network"
    raise TypeError(
        f"expected an ensemble, got {type(ensemble).__name__}. Make one from {source}: "
        "embens.batch_ensemble(net, 4)."
    )


def check_inputs(x: Any, name: str = "x") -> None:
    """Raise if inputs contain no tensors, are empty, or are not finite."""
    if isinstance(x, Mapping):
        x = dict(x)
    tensors = [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]
    if not tensors:
        raise TypeError(
            f"{name}: expected a tensor with samples along its first axis, or a tuple or dict of "
            f"tensors, got {type(x).__name__}. Convert it: torch.as_tensor({name})."
        )
    for tensor in tensors:
        if tensor.dim() > 0 and len(tensor) == 0:
            raise ValueError(
                f"{name}: expected at least one sample, got shape {tuple(tensor.shape)}."
            )
    check_finite(name, x)


def check_target(x: Any, target: Tensor) -> None:
    """Raise if the target has another number of samples than the inputs."""
    if target.dim() == 0 or len(target) == 0:
        raise ValueError(f"target: expected at least one sample, got shape {tuple(target.shape)}.")
    counts = {len(leaf) for leaf in tree_leaves(x) if isinstance(leaf, Tensor)}
    if len(counts) == 1 and counts != {len(target)}:
        raise ValueError(
            "x and target must have the same number of samples, got "
            f"{counts.pop()} and {len(target)}. Take both from the same batch."
        )


def check_finite(name: str, values: Any) -> None:
    """Raise if values are NaN or infinite."""
    gaps = find_gaps(name, values)
    if gaps:
        raise ValueError(f"{gaps}; expected finite values. Leave these samples out.")


def as_inputs(x: Tensor | Inputs, name: str = "x") -> Inputs:
    """Return the inputs of a network as a tuple of tensors.

    Args:
        x: A tensor, or a tuple or list of tensors for a network with several arguments.
        name: The name of the argument, for error messages.
    """
    check_inputs(x, name)
    inputs = tuple(x) if isinstance(x, (tuple, list)) else (x,)
    check_rows(name, inputs, "a tensor with samples along its first axis, or a tuple of them")
    return inputs


def as_classes(target: Any) -> Any:
    """Return integer targets as int64 without a trailing axis of length 1; others unchanged."""
    if not isinstance(target, Tensor):
        return target
    if target.is_floating_point() or target.is_complex():
        return target
    if target.dim() > 1:
        target = target.squeeze(1)
    return target.long()


def check_output(output: Any, batch: int) -> Tensor:
    """Return a member's output if it is one tensor with the batch as its first axis."""
    if not isinstance(output, Tensor):
        raise TypeError(
            f"a kernel needs a network whose output is one tensor, got {type(output).__name__}. "
            "Wrap the reference in a module that returns that tensor, and embed the wrapper."
        )
    if output.shape[:1] != (batch,):
        raise ValueError(
            f"outputs of a batch of {batch} must have the batch as their first axis, got shape "
            f"{tuple(output.shape)}. Add a batch axis to x, or let the network keep it first."
        )
    return output


def check_modes(network: nn.Module) -> None:
    """Raise if a module's mode makes the output of a sample random or dependent on others.

    Args:
        network: A plain member.
    """
    for name, module in network.named_modules():
        if isinstance(module, _NormBase):
            updates = module.training and module.track_running_stats
            without_statistics = isinstance(module, _BatchNorm) and not module.track_running_stats
            if updates or without_statistics:
                raise ValueError(
                    f"{name!r} ({type(module).__name__}) uses the statistics of the batch, so a "
                    "single sample has no gradient. Call ensemble.eval(). A layer with "
                    "track_running_stats=False has no other statistics and cannot be used."
                )
        if isinstance(module, _DropoutNd) and module.training and module.p > 0:
            raise ValueError(
                f"{name!r} ({type(module).__name__}) is random in training mode, and so is the "
                "kernel. Call ensemble.eval()."
            )
