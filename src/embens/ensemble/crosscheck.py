"""One comparison of a folded network with a plain member, before the folded form is used.

torch.fx runs the user's code once, with symbols in the place of tensors. Python code can treat a
symbol differently from a tensor in more ways than can be listed. So the first call of each folded
form runs one member twice, folded and as a plain network, on copies of all tensors and with the
same random numbers. If the outputs differ by more than rounding, the ensemble runs merged.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from embens.ensemble.merged import (
    computed_tensors,
    member_tensors,
    modulations_by_layer,
    plain_network,
    private_arguments,
)
from embens.graph.members import Folded

if TYPE_CHECKING:
    from embens.ensemble.module import EmbeddedEnsemble, Folding

LARGEST_TOLERANCE = 0.2
ROUNDING = 30
"""Largest difference of outputs in units of the root of the machine precision.

Rounding errors of a deep network are far smaller, and those of a wrong branch far larger.
"""


def check_folding(
    ensemble: "EmbeddedEnsemble",
    folding: "Folding",
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    arguments: list[Tensor],
) -> None:
    """Compare one member with a plain network; on a difference such calls run merged.

    Args:
        ensemble: The ensemble.
        folding: Its folded form for the call, which is changed in place.
        inputs: Positional arguments of the first call.
        kwargs: Its keyword arguments.
        arguments: Its tensor arguments.
    """
    assert folding.folded is not None
    folding.is_checked = True
    per_member, _, precision = folding.modes
    if per_member:
        inputs = tree_map_only(Tensor, lambda x: x[0], inputs)
        arguments = [x[0] for x in arguments]
    difference = find_difference(ensemble, folding.folded, inputs, kwargs, arguments, precision)
    if difference:
        folding.folded = None
        folding.reason = difference


def find_difference(
    ensemble: "EmbeddedEnsemble",
    folded: Folded,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    arguments: Sequence[Tensor],
    precision: torch.dtype | None,
) -> str:
    """Return how the first member differs between its folded form and a plain network.

    The ensemble, the inputs and the random generators stay unchanged.

    Args:
        ensemble: The ensemble.
        folded: Its folded form.
        inputs: Positional arguments of one member.
        kwargs: Keyword arguments.
        arguments: The tensors among them, as the folded form takes them.
        precision: Type of operations under autocast.

    Returns:
        A sentence; empty if the outputs agree, or cannot be compared.
    """
    state = [getattr(module, name) for module, name in folded.tensors]
    if not all(_is_comparable(tensor) for tensor in (*state, *arguments)):
        return ""
    devices = {tensor.device for tensor in (*state, *arguments) if tensor.is_cuda}
    generator_state = ensemble.generator_state
    with torch.random.fork_rng(sorted(device.index for device in devices)):
        if generator_state is not None:
            ensemble.generator_state = generator_state.clone()
        values = {name: stack[:1] for name, stack in ensemble.sample_values().items()}
        ensemble.generator_state = generator_state
        seed = int(torch.randint(2**31, ()))
        plain = _plain_network(ensemble, values)
        torch.manual_seed(seed)
        args, named = private_arguments(inputs, kwargs)
        try:
            expected = plain(*args, **named)
        except Exception as error:  # any error of the user's code; the merged pass raises it again
            return f"a plain member raises {type(error).__name__}"
        torch.manual_seed(seed)
        try:
            outputs = _run_folded(folded, state, values, arguments)
        except Exception as error:  # torch.fx has misread the code
            return f"its folded form raises {type(error).__name__}"
    return _compare(outputs, expected, precision)


def _is_comparable(tensor: Tensor) -> bool:
    """Return whether a tensor has values in this process; sharded tensors have only a part."""
    return type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and not tensor.is_meta


def _plain_network(ensemble: "EmbeddedEnsemble", values: dict[str, Tensor]) -> nn.Module:
    """Return the first member as a plain network with copies of all tensors."""
    member_values = {name: stack[0].detach() for name, stack in values.items()}
    spec, reference = ensemble.spec, ensemble.reference
    with torch.no_grad():
        computed = computed_tensors(reference)
        tensors = member_tensors(reference, ensemble.layers, spec, member_values, computed)
        scales = modulations_by_layer(spec, member_values)
        attributes = ensemble.merged.member_attributes()[0]
        return plain_network(ensemble, {**computed, **tensors}, scales, attributes)


def _run_folded(
    folded: Folded,
    state: Sequence[Tensor],
    values: dict[str, Tensor],
    arguments: Sequence[Tensor],
) -> Any:
    """Return the outputs of the first member on copies of all tensors, with a member axis."""
    tensors = [_copy(tensor) for tensor in state]
    shared = folded.prefix.forward(*tensors, *[_copy(tensor) for tensor in arguments])
    member_values = [_copy(values[name]) for name in folded.values]
    return folded.suffix.forward(1, *shared, *tensors, *member_values)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _compare(outputs: Any, expected: Any, precision: torch.dtype | None) -> str:
    """Return how the outputs of one member differ; empty if they are equal up to rounding."""
    leaves, structure = tree_flatten(outputs)
    expected_leaves, expected_structure = tree_flatten(expected)
    if structure != expected_structure:
        return "its folded form has outputs of another structure"
    for output, expected_output in zip(leaves, expected_leaves, strict=True):
        if not isinstance(output, Tensor) or not isinstance(expected_output, Tensor):
            continue
        output = output.detach()[0]
        expected_output = expected_output.detach()
        if output.shape != expected_output.shape or output.dtype != expected_output.dtype:
            return "its folded form has outputs of another shape or type"
        # Indices of nearly equal values may differ by rounding.
        is_continuous = output.is_floating_point() or output.is_complex()
        if is_continuous and not _agree(output, expected_output, precision):
            return "its folded form has other outputs than a plain member"
    return ""


def _agree(output: Tensor, expected: Tensor, precision: torch.dtype | None) -> bool:
    """Return whether two tensors are equal up to rounding, relative to the largest value."""
    epsilon = torch.finfo(output.dtype).eps
    if precision is not None:
        epsilon = max(epsilon, torch.finfo(precision).eps)
    tolerance = min(LARGEST_TOLERANCE, ROUNDING * epsilon**0.5)
    if output.is_complex():
        output, expected = torch.view_as_real(output), torch.view_as_real(expected)
    finite = expected[expected.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    atol = tolerance * largest + epsilon
    return torch.allclose(output, expected, rtol=0.0, atol=atol, equal_nan=True)
