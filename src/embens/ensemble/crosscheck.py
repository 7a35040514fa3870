"""One comparison of a folded network with a plain member, before the folded form is used.

torch.fx runs the user's code once, with symbols in the place of tensors. Python code can treat a
symbol differently from a tensor in more ways than can be listed. So the first call of each folded
form runs one member twice, folded and as a plain network. If the outputs differ by more than
rounding, the ensemble runs merged. If they are all zero or not finite, the next call is compared.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

from embens.ensemble.binding import private_arguments
from embens.ensemble.changes import mark_of
from embens.ensemble.copies import is_transformed
from embens.ensemble.extraction import plain_member
from embens.graph.members import Folded
from embens.graph.snapshots import unchanged_random_state

if TYPE_CHECKING:
    from embens.ensemble.module import EmbeddedEnsemble, Folding

ROUNDING = 30
"""Largest difference of outputs in units of the root of the machine precision.

Rounding errors of a deep network are far smaller, and differences of a wrong branch far larger.
"""

LARGEST_TOLERANCE = 0.2
"""Largest difference of outputs relative to the largest output, for any precision."""

MOST_DIFFERENT = 0.1
"""Largest fraction of different integers, such as indices, that rounding may cause."""

_LOCK = threading.RLock()  # comparisons share the global random generators


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
        inputs: Positional arguments of the call.
        kwargs: Its keyword arguments.
        arguments: Its tensor arguments.
    """
    with _LOCK:
        if folding.is_checked:  # another thread has compared it
            return
        per_member, precision = folding.modes.per_member, folding.modes.autocast
        if per_member:
            # The inputs of the first member stand for those of any other.
            inputs = tree_map_only(Tensor, lambda x: x[0], inputs)
            arguments = [x[0] for x in arguments]
        try:
            assert folding.folded is not None
            difference = find_difference(
                ensemble,
                folding.folded,
                inputs,
                kwargs,
                arguments,
                precision,
                per_member=per_member,
            )
        except _Undecided as undecided:
            if undecided.reason:
                # The merged pass raises the error of the user's code. The folding is forgotten, so
                # that calls with other inputs are folded.
                folding.folded = None
                folding.reason = undecided.reason
                ensemble.foldings.forget(folding)
            return
        if difference:
            folding.folded = None
            folding.reason = difference
        folding.is_checked = True


class _Undecided(Exception):
    """The outputs for the inputs of a call do not show whether a folded form is right.

    Args:
        reason: Why this call must run merged; empty if it may run folded.
    """

    def __init__(self, reason: str = ""):
        super().__init__(reason)
        self.reason = reason


def find_difference(
    ensemble: "EmbeddedEnsemble",
    folded: Folded,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    arguments: Sequence[Tensor],
    precision: torch.dtype | None,
    *,
    per_member: bool = False,
) -> str:
    """Return how a member differs between its folded form and a plain network.

    The second member is folded together with the first, which shows whether their rows mix. If the
    code draws random numbers, the member is folded alone, as the numbers would differ for two
    members. The ensemble, the inputs and the random generators stay unchanged.

    Args:
        ensemble: The ensemble.
        folded: Its folded form.
        inputs: Positional arguments of one member.
        kwargs: Keyword arguments.
        arguments: The tensors among them, as the folded form takes them.
        precision: Type of operations under autocast.
        per_member: Whether the folded form takes arguments with the rows of all members.

    Returns:
        A sentence; empty if the outputs agree.

    Raises:
        _Undecided: If the outputs cannot be compared, or all are empty, zero, infinite or NaN.
    """
    state = [getattr(module, name) for module, name in folded.tensors]
    tensors = (*state, *arguments)
    if is_transformed() or not all(_is_comparable(tensor) for tensor in tensors):
        raise _Undecided
    # Modes of torch may count operations, or record them in a graph. torch.utils.checkpoint counts
    # the tensors that are saved for the backward pass.
    with (
        _disable_current_modes(),
        saved_tensors_hooks(_identity, _identity),
        _unchanged_buffers(ensemble.reference),
        _unchanged_generators(tensors) as generators,
    ):
        a = min(ensemble.members, 2) - 1
        values = {name: stack[: a + 1] for name, stack in _sample_values(ensemble).items()}
        seed = int(torch.randint(2**31, ()))
        marks = [mark_of(tensor) for tensor in state]
        plain = plain_member(ensemble, a, values, share_parameters=True)
        before = _seed(generators, seed)
        expected = _run_plain(plain, inputs, kwargs)
        if marks != [mark_of(tensor) for tensor in state]:
            return "its code changes a parameter"
        after = [generator.get_state() for generator in generators]
        count = a + 1
        if not all(map(torch.equal, before, after)):  # the code draws random numbers
            count = 1
            values = {name: stack[a:] for name, stack in values.items()}
        if per_member:
            arguments = [torch.cat([x] * count) for x in arguments]
        _seed(generators, seed)
        try:
            outputs = _run_folded(folded, count, state, values, arguments)
        except Exception as error:  # torch.fx has misread the code
            return f"its folded form raises {type(error).__name__}"
        return _compare(outputs, expected, precision)


def _sample_values(ensemble: "EmbeddedEnsemble") -> dict[str, Tensor]:
    """Return the values of one pass; the generator of fresh masks keeps its state."""
    generator_state = ensemble.generator_state
    if generator_state is not None:
        ensemble.generator_state = generator_state.clone()
    values = ensemble.sample_values()
    ensemble.generator_state = generator_state
    return values


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _is_comparable(tensor: Tensor) -> bool:
    """Return whether all values of a tensor are in this process; a sharded tensor has a part."""
    return type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and not tensor.is_meta


@contextmanager
def _unchanged_buffers(reference: nn.Module) -> Iterator[None]:
    """Restore buffers on exit; shared norm layers of a folded graph update their statistics."""
    buffers = []
    for buffer in reference.buffers():
        if _is_comparable(buffer) and buffer.layout is torch.strided:
            buffers.append((buffer, buffer.clone()))
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


@contextmanager
def _unchanged_generators(tensors: Iterable[Tensor]) -> Iterator[list[torch.Generator]]:
    """Yield the random generators of torch for some tensors, and restore all states on exit.

    ``torch.manual_seed`` would seed those of all devices.
    """
    generators = [torch.default_generator]
    for device in {tensor.device for tensor in tensors}:
        if device.type in ("cuda", "xpu"):
            module = torch.get_device_module(device)
            generators.append(module.default_generators[device.index])
        elif device.type == "mps":
            generators.append(torch.mps._get_default_mps_generator())
    states = [generator.get_state() for generator in generators]
    with unchanged_random_state():
        try:
            yield generators
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def _seed(generators: Iterable[torch.Generator], seed: int) -> list[Tensor]:
    """Seed generators and return their states."""
    return [generator.manual_seed(seed).get_state() for generator in generators]


def _run_plain(plain: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the outputs of a plain member.

    Raises:
        _Undecided: If the code raises an error; the merged pass raises it again.
    """
    args, named = private_arguments(inputs, kwargs)
    try:
        return _detach(plain(*args, **named))
    except Exception as error:
        raise _Undecided(f"a plain member raises {type(error).__name__}") from error


def _run_folded(
    folded: Folded,
    count: int,
    state: Sequence[Tensor],
    values: dict[str, Tensor],
    arguments: Sequence[Tensor],
) -> Any:
    """Return the outputs of some members, members first; a pass on copies, without a graph."""
    tensors = []
    for tensor in state:
        # Parameters may be large and do not change; buffers may.
        is_parameter = isinstance(tensor, nn.Parameter)
        tensors.append(_leaf(tensor) if is_parameter else _copy(tensor))
    shared = folded.prefix.forward(*tensors, *[_copy(tensor) for tensor in arguments])
    member_values = [_copy(values[name]) for name in folded.values]
    return _detach(folded.suffix.forward(count, *shared, *tensors, *member_values))


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _detach(outputs: Any) -> Any:
    """Return outputs without their graph, which would keep all activations."""
    return tree_map_only(Tensor, Tensor.detach, outputs)


def _compare(outputs: Any, expected: Any, precision: torch.dtype | None) -> str:
    """Return how the outputs of one member differ; empty if they are equal up to rounding.

    Raises:
        _Undecided: If all outputs are empty, zero, infinite or NaN.
    """
    leaves, structure = tree_flatten(outputs)
    expected_leaves, expected_structure = tree_flatten(expected)
    if structure != expected_structure:
        return "its folded form has outputs of another structure"
    is_informative = False
    for output, expected_output in zip(leaves, expected_leaves, strict=True):
        if not isinstance(output, Tensor) or not isinstance(expected_output, Tensor):
            continue
        output = output[-1]
        if output.shape != expected_output.shape or output.dtype != expected_output.dtype:
            return "its folded form has outputs of another shape or type"
        if not _agree(output, expected_output, precision):
            return "its folded form has other outputs than a plain member"
        is_informative = is_informative or _is_informative(expected_output)
    if not is_informative:
        raise _Undecided
    return ""


def _is_informative(output: Tensor) -> bool:
    """Return whether an output has a value that a wrong folded form could change."""
    if output.is_floating_point() or output.is_complex():
        return bool((output.isfinite() & (output != 0)).any())
    return output.numel() > 0


def _agree(output: Tensor, expected: Tensor, precision: torch.dtype | None) -> bool:
    """Return whether two tensors are equal up to rounding, relative to the largest value."""
    if not (output.is_floating_point() or output.is_complex()):
        # Rounding may change integers, such as an argmax over nearly equal values.
        differences = int((output != expected).sum())
        return differences <= MOST_DIFFERENT * output.numel()
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
