"""Comparison of the two executors and of single members, for tests of the contract.

A member is defined by the merged executor. The folded executor and ``ensemble.member(a)`` have to
give the same outputs, gradients and buffers.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import embens
from embens.trees import gather

Result = tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]


def run_merged(
    ensemble: embens.EmbeddedEnsemble, inputs: tuple, kwargs: dict[str, Any], *, own: bool = False
) -> Any:
    """Return the outputs of the merged executor, members first."""
    values = ensemble.sample_values()
    outputs = list(ensemble.merged.run_members(inputs, kwargs, values, per_member=own))
    return gather(outputs, torch.cat)


def tensors_of(outputs: Any) -> list[Tensor]:
    """Return the floating tensors of a nested output."""
    leaves = tree_leaves(outputs)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def cloned(inputs: Any) -> Any:
    """Return a copy of inputs, which code may change in place."""
    return tree_map_only(Tensor, Tensor.clone, inputs)


def measure(module: nn.Module, run: Callable[[], Any]) -> Result:
    """Return outputs, gradients of their squared norm, and buffers after one pass."""
    module.zero_grad(set_to_none=True)
    outputs = tensors_of(run())
    differentiable = [output for output in outputs if output.requires_grad]
    if differentiable:
        torch.stack([output.square().sum() for output in differentiable]).sum().backward()
    gradients = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and bool(parameter.grad.any()):
            gradients[name] = parameter.grad
    buffers = dict(module.named_buffers())
    return [output.detach() for output in outputs], gradients, buffers


def assert_same(left: Any, right: Any, message: str, tolerance: float = 1e-9) -> None:
    """Assert that two results, or dictionaries or lists of tensors, are equal up to rounding."""
    if isinstance(left, dict):
        assert left.keys() == right.keys(), f"{message}: {left.keys() ^ right.keys()}"
        left, right = list(left.values()), [right[key] for key in left]
    if isinstance(left, (list, tuple)):
        assert len(left) == len(right), message
        for first, second in zip(left, right, strict=True):
            assert_same(first, second, message, tolerance)
        return
    assert left.shape == right.shape, f"{message}: {left.shape} and {right.shape}"
    assert left.dtype == right.dtype, f"{message}: {left.dtype} and {right.dtype}"
    left, right = left.to_dense(), right.to_dense()
    torch.testing.assert_close(
        left, right, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{message}: {m}"
    )


def check_agreement(
    ensemble: embens.EmbeddedEnsemble,
    inputs: Any,
    kwargs: dict[str, Any] | None = None,
    *,
    chunks: Iterable[int | None] = (None, 1, 2),
    passes: int = 2,
    tolerance: float = 1e-9,
) -> None:
    """Assert that every way to run an ensemble gives the outputs of its members.

    The ensemble is not changed: every comparison runs on a copy, for several passes, so that state
    that a pass leaves behind is compared as well.
    """
    if not isinstance(inputs, tuple):
        inputs = (inputs,)
    kwargs = kwargs or {}
    members = [ensemble.member(a).train(ensemble.training) for a in range(ensemble.members)]
    expected = _check_merged(ensemble, members, inputs, kwargs, passes, tolerance)
    for chunk in chunks:
        running = copy.deepcopy(ensemble)
        inputs_of_chunk = cloned(inputs)

        def run(running=running, chunk=chunk, inputs_of_chunk=inputs_of_chunk):
            return running(*inputs_of_chunk, chunk=chunk, **cloned(kwargs))

        for expected_outputs, expected_gradients, _ in expected:
            outputs, gradients, _ = measure(running, run)
            message = f"chunk {chunk}, {running.executor}"
            assert_same(outputs, expected_outputs, f"outputs with {message}", tolerance)
            assert_same(gradients, expected_gradients, f"gradients with {message}", tolerance)
            assert_same(inputs_of_chunk, inputs, f"inputs are changed with {message}", tolerance)
        _check_buffers(running, members, tolerance)


def _check_merged(
    ensemble: embens.EmbeddedEnsemble,
    members: list[nn.Module],
    inputs: tuple,
    kwargs: dict[str, Any],
    passes: int,
    tolerance: float,
) -> list[Result]:
    """Compare the merged executor with single members, and return the results of its passes.

    The buffers of the members change as those of the ensemble do.
    """
    merged = copy.deepcopy(ensemble)
    results = []
    for _ in range(passes):
        result = measure(merged, lambda: run_merged(merged, cloned(inputs), cloned(kwargs)))
        outputs_of_members = []
        for member in members:
            outputs, _, _ = measure(member, lambda m=member: m(*cloned(inputs), **cloned(kwargs)))
            outputs_of_members.append(outputs)
        for index, output in enumerate(result[0]):
            stacked = torch.stack([outputs[index] for outputs in outputs_of_members])
            assert_same(output, stacked, "merged differs from member(a)", tolerance)
        results.append(result)
    for a, member in enumerate(members):
        buffers = dict(merged.member(a).named_buffers())
        assert_same(buffers, dict(member.named_buffers()), f"buffers of member {a}", tolerance)
    return results


def _check_buffers(
    ensemble: embens.EmbeddedEnsemble, members: list[nn.Module], tolerance: float
) -> None:
    """Compare the buffers that an ensemble stores, without building its members again."""
    shared = dict(ensemble.reference.named_buffers())
    for a, member in enumerate(members):
        for name, buffer in member.named_buffers():
            stored = ensemble.individual[name][a] if name in ensemble.individual else shared[name]
            assert_same(stored, buffer, f"buffer {name!r} of member {a}", tolerance)
