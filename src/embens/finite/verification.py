"""Checks of gradient rules on two samples, before a :class:`Recorder` relies on them."""

from __future__ import annotations

import torch
from torch import Tensor

from embens.finite.arguments import Inputs
from embens.finite.calls import Call, add_call, backward
from embens.finite.grams import MemberGradients, SampleGradients, contract

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
"""Relative rounding differences between a sample in a batch and the same sample alone."""

VANISHING = 1e-5
"""Gradients that are smaller than this, relative to the largest, say nothing about a rule."""


def try_rules(
    output: Tensor,
    calls: list[Call],
    cotangents: Tensor,
) -> tuple[SampleGradients, set[int]]:
    """Return the first member's gradients, and the ids of parameters with rules that fail."""
    member = MemberGradients()
    failed = set()
    gradients_of_calls = backward(output, calls, cotangents)
    for call, gradients in zip(calls, gradients_of_calls, strict=True):
        try:
            add_call(member, call, gradients, 0, len(output))
        except RuntimeError:  # the layer was called without the batch axis
            failed |= call.facts.parameter_keys()
    return SampleGradients(len(output), [member]), failed


def reproduces(gradients: SampleGradients, key: int, expected: Tensor) -> bool:
    """Return True if the first sample's gradient has the norm that autograd gives."""
    member = gradients.members[0]
    uses = member.weights.get(key, [])
    if (key in member.rows) == bool(uses):
        return False  # no use, or uses of different kinds
    if len({type(use.layer) for use in uses}) > 1:
        return False  # a weight tied between layers of different kinds
    try:
        square = contract(key, gradients)[0, 0]
    except RuntimeError:  # the layer was called without the batch axis
        return False
    return is_close(square, expected.square().sum())


def keeps_samples_first(key: int, calls: list[Call], alone: list[Call]) -> bool:
    """Return True if a parameter's layers see the first sample's rows first.

    Args:
        key: The id of a parameter with a gradient of 0, which cannot be compared.
        calls: Calls in a pass of two samples.
        alone: Calls in a pass of the first sample alone.
    """
    if len(calls) != len(alone):
        return False
    used = False
    for call, single_call in zip(calls, alone, strict=True):
        if key not in call.facts.parameter_keys():
            continue
        used = True
        rows = len(single_call.value)
        if len(call.value) != 2 * rows:
            return False
        if not is_close(call.value[:rows], single_call.value):
            return False
    return used


def is_close(value: Tensor, expected: Tensor) -> bool:
    """Return True if tensors are equal up to rounding, relative to the largest entry."""
    if value.shape != expected.shape:
        return False
    error = (value - expected).abs().max()
    return bool(error <= TOLERANCE.get(expected.dtype, 0.05) * expected.abs().max())


def with_noise(inputs: Inputs) -> Inputs:
    """Add fixed noise to floating-point inputs."""
    generator = torch.Generator().manual_seed(0)
    noisy = []
    for x in inputs:
        if x.is_floating_point():
            noise = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
            scale = float(x.abs().max()) or 1.0
            x = x + 0.1 * scale * noise
        noisy.append(x)
    return tuple(noisy)
