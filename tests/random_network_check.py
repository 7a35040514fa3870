"""Comparison of an ensemble of a random network with members that are made by hand.

:func:`check_network` runs both through the same passes and returns how the ensemble ran. Wrong
results and errors that are not ours raise :class:`Mistake`, with the source of the network.
"""

import copy
import linecache
import random
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from handmade import HandMember, parameters_of
from random_networks import Network
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import embens
from embens import laws
from embens.trees import gather

MEMBERS = 3
SOURCE = str(Path(embens.__file__).parent)


def _shake(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter.add_(0.1 * torch.randn_like(parameter))


FAMILIES: dict[str, Callable[..., embens.EmbeddedEnsemble]] = {
    "both": embens.batch_ensemble,
    "pre": partial(embens.embed, post=None),
    "post": partial(embens.embed, pre=None),
    "all sites": partial(embens.embed, sites="all"),
    "fixed masks": partial(embens.mc_dropout, law=laws.Bernoulli(0.7), fresh=False),
    "fresh masks": partial(embens.mc_dropout, law=laws.Bernoulli(0.7)),
    "last layer": partial(embens.last_layer_dropout, law=laws.Normal()),
    "low rank": partial(embens.low_rank, rank=1),
    "additive": partial(embens.low_rank, kind="additive", scale=0.5),
    "separate last layer": partial(embens.batch_ensemble, own="last"),
    "separate layers": partial(embens.embed, pre=None, post=None, own="*", own_weights=_shake),
    "separate norms": partial(embens.embed, norm_affine="member"),
    "independent": partial(embens.independent, initialise=_shake),
}


@dataclass(frozen=True)
class Pass:
    """One call of the ensemble: mode, number of rows, members per chunk, autograd or not."""

    training: bool
    rows: int
    chunk: int | None
    has_grad: bool = True


PASSES = [
    Pass(True, 7, None),
    Pass(True, 2, 2),
    Pass(False, 7, 1),
    Pass(False, 1, None, has_grad=False),
    Pass(True, 7, 1),
    Pass(False, 2, 2),
    Pass(True, 1, None),
]


class Mistake(AssertionError):
    """An ensemble that is wrong, or that raises an error which is not ours."""


class Invalid(Exception):
    """A pass that the plain network does not survive."""


def check_network(network: Network, family: str, passes: list[Pass] = PASSES) -> str:
    """Compare an ensemble of a network with members that are made by hand.

    Returns:
        "folded" or "merged" for the executor that ran, "mixed" for both, "refused" for an error of
        ours, or "invalid" if the plain network raises.

    Raises:
        Mistake: with the seed, the family and the source of the network.
    """
    with warnings.catch_warnings(action="ignore"):
        try:
            outcome = _check(network, family, passes, is_merged=False)
            if outcome in ("folded", "mixed"):
                _check(network, family, passes, is_merged=True)
        except Exception as error:
            if is_refusal(error):
                return "refused"
            report = "".join(traceback.format_exception(error)[-6:])
            raise Mistake(
                f"network {network.seed}, family {family!r}:\n{network.source}\n{report}"
            ) from None
    return outcome


def check_derivative(network: Network, family: str) -> bool:
    """Compare the derivative along a random direction with finite differences.

    Returns:
        Whether there was something to compare: not for a refusal, an error of the plain network,
        or masks that are drawn at each pass.
    """
    if family == "fresh masks":
        return False
    with warnings.catch_warnings(action="ignore"):
        try:
            args, kwargs = network.inputs(5)
            loss_of(network.build().eval()(*cloned(args), **cloned(kwargs)))
        except Exception:  # the code of a pattern may raise anything
            return False
        try:
            reference = network.build().eval()
            generator = torch.Generator().manual_seed(network.seed)
            ensemble = FAMILIES[family](reference, members=MEMBERS, generator=generator)
            derivative, expected = _derivatives(ensemble, args, kwargs)
        except Exception as error:
            if is_refusal(error):
                return False
            raise Mistake(
                f"network {network.seed}, family {family!r}:\n{network.source}"
            ) from error
    assert abs(derivative - expected) < 1e-5 * (1 + abs(expected)), (
        f"network {network.seed}, family {family!r}: derivative {derivative}, by finite "
        f"differences {expected}:\n{network.source}"
    )
    return True


def _derivatives(
    ensemble: embens.EmbeddedEnsemble, args: tuple, kwargs: dict
) -> tuple[float, float]:
    """Return the derivative of a loss along a random direction by autograd and by differences."""
    original = copy.deepcopy(ensemble)  # a call may change state
    backward(loss_of(ensemble(*cloned(args), **cloned(kwargs))))
    generator = torch.Generator().manual_seed(0)
    derivative = 0.0
    directions = []
    for parameter in ensemble.parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if not parameter.requires_grad:
            direction.zero_()
        directions.append(direction.to(parameter.dtype))
        derivative += float((gradient_of(parameter) * directions[-1]).real.sum())
    losses = []
    step = 1e-6
    for sign in (1, -1):
        moved = copy.deepcopy(original)
        with torch.no_grad():
            for parameter, direction in zip(moved.parameters(), directions, strict=True):
                parameter.add_(direction, alpha=sign * step)
        losses.append(float(loss_of(moved(*cloned(args), **cloned(kwargs)))))
    return derivative, (losses[0] - losses[1]) / (2 * step)


def is_refusal(error: Exception) -> bool:
    """Return whether an error is raised by a statement of ours, and says what to do."""
    if type(error) not in (ValueError, TypeError, NotImplementedError, RuntimeError):
        return False
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    is_ours = frame.filename.startswith(SOURCE) and line.startswith("raise ")
    sentences = [text for text in str(error).split(". ") if text]
    return is_ours and len(sentences) > 1 and str(error).endswith(".")


def _check(network: Network, family: str, passes: list[Pass], is_merged: bool) -> str:
    reference = network.build()
    options: dict[str, Any] = {"generator": torch.Generator().manual_seed(network.seed)}
    if family != "independent":
        options["example_input"] = network.example()
    ensemble = FAMILIES[family](reference, members=MEMBERS, **options)
    running = Comparison(network, reference, ensemble, is_merged)
    executors = set()
    for index, one in enumerate(passes):
        try:
            running.check(one, index)
        except Invalid:
            break
        is_folded = not is_merged and ensemble.executor == "folded"
        executors.add("folded" if is_folded else "merged")
    for name, tensor in network.build().state_dict().items():
        message = f"{name!r} of the reference has changed"
        assert torch.equal(tensor, reference.state_dict()[name]), message
    if not executors:
        return "invalid"
    return executors.pop() if len(executors) == 1 else "mixed"


class Comparison:
    """An ensemble and its members by hand, which go through the same passes.

    Args:
        network: the random network.
        reference: the module that was embedded.
        ensemble: the ensemble.
        is_merged: whether the ensemble has to run merged.
    """

    def __init__(
        self,
        network: Network,
        reference: nn.Module,
        ensemble: embens.EmbeddedEnsemble,
        is_merged: bool,
    ):
        self.network = network
        self.ensemble = ensemble
        self.is_merged = is_merged
        self.members = [HandMember(network.build(), ensemble.spec) for _ in range(MEMBERS)]
        for a, member in enumerate(self.members):
            self._set_buffers(member, a)
        self.shared: dict[str, Tensor] = {}
        leaves: dict[int, Tensor] = {}
        for name, parameter in parameters_of(reference):
            leaf = parameter.detach().clone().requires_grad_(parameter.requires_grad)
            self.shared[name] = leaves.setdefault(id(parameter), leaf)
        self.values: dict[str, Tensor] = {}
        self.random_state: Any = None
        ensemble.sample_values = self._sample_values  # type: ignore[method-assign]

    def _set_buffers(self, member: HandMember, a: int) -> None:
        """Copy per-member buffers, which may be drawn separately, into a plain member."""
        for name, stack in self.ensemble.individual.tensors().items():
            if name in dict(member.module.named_buffers()):
                member.module.get_buffer(name).copy_(stack[a])

    def _draw_values(self) -> None:
        """Draw the values of a pass, and remember the state of the random generators."""
        self.values = type(self.ensemble).sample_values(self.ensemble)
        self.random_state = (torch.get_rng_state(), random.getstate(), np.random.get_state())

    def _sample_values(self) -> dict[str, Tensor]:
        """Return the values of a pass, from which on members draw random numbers."""
        self._restore_random_state()
        return self.values

    def _restore_random_state(self) -> None:
        torch.set_rng_state(self.random_state[0])
        random.setstate(self.random_state[1])
        np.random.set_state(self.random_state[2])

    def check(self, one: Pass, index: int) -> None:
        """Compare outputs, gradients, buffers and inputs of one pass."""
        if self.network.is_random and one.training and one.chunk != 1:
            one = Pass(True, one.rows, 1, one.has_grad)  # members draw one after another
        torch.manual_seed(1000 * self.network.seed + index)
        random.seed(index)
        np.random.seed(index)
        args, kwargs = self.network.inputs(one.rows)
        self._draw_values()
        expected = self._run_members(one, args, kwargs)
        label = f"pass {index}, {one}, {'merged' if self.is_merged else 'as it likes'}"
        outputs, gradients, input_gradients = self._run_ensemble(one, args, kwargs, label)
        where = label
        if not self.is_merged:
            where = f"{label}, {self.ensemble.executor}"
        compare = partial(assert_equal, tolerance=self.network.tolerance)
        compare(tensors_of(outputs), expected[0], f"outputs of {where}")
        compare(gradients, expected[1], f"gradients of {where}")
        compare(input_gradients, expected[2], f"gradients of the input of {where}")
        for a, member in enumerate(self.members):
            for name, buffer in member.module.named_buffers():
                compare(
                    [self._buffer(name, a)], [buffer], f"buffer {name!r} of member {a}, {where}"
                )

    def _buffer(self, name: str, a: int) -> Tensor:
        if name in self.ensemble.individual:
            return self.ensemble.individual[name][a]
        return self.ensemble.reference.get_buffer(name)

    def _run_ensemble(
        self, one: Pass, args: tuple, kwargs: dict, label: str
    ) -> tuple[Any, dict[str, Tensor], list[Tensor]]:
        ensemble = self.ensemble.train(one.training)
        ensemble.zero_grad(set_to_none=True)
        leaves, (own_args, own_kwargs) = with_leaves((args, kwargs), one.has_grad)
        with torch.set_grad_enabled(one.has_grad):
            if self.is_merged:
                values = ensemble.sample_values()
                chunks = ensemble.merged.run_members(own_args, own_kwargs, values, per_member=False)
                outputs = gather(list(chunks), torch.cat)
            else:
                outputs = ensemble(*own_args, chunk=one.chunk, **own_kwargs)
            assert_equal(
                tensors_of((own_args, own_kwargs)),
                tensors_of((args, kwargs)),
                f"the inputs are changed by {label}",
                0.0,
            )
            if one.has_grad:
                backward(loss_of(outputs))
        gradients = {}
        for name, parameter in parameters_of(ensemble.reference):
            gradients[name] = gradient_of(parameter)
        for name, stack in ensemble.individual.tensors().items():
            if isinstance(stack, nn.Parameter):
                gradients[f"individual {name}"] = gradient_of(stack)
        return outputs, gradients, [gradient_of(leaf) for leaf in leaves]

    def _run_members(
        self, one: Pass, args: tuple, kwargs: dict
    ) -> tuple[list[Tensor], dict[str, Tensor], list[Tensor]]:
        self._restore_random_state()
        stacks = {}
        leaves: dict[int, Tensor] = {}
        for name, stack in self.ensemble.individual.tensors().items():
            # Tied stacks stay tied.
            leaf = leaves.setdefault(id(stack), stack.detach().clone())
            stacks[name] = leaf.requires_grad_(stack.requires_grad)  # layers may be frozen
        for name, stack in self.values.items():
            stacks.setdefault(name, stack.detach().clone())
        for leaf in self.shared.values():
            leaf.grad = None
        outputs = []
        input_leaves, inputs = with_leaves((args, kwargs), one.has_grad)
        for a, member in enumerate(self.members):
            values = {name: stack[a] for name, stack in stacks.items()}
            binding = member.bind(self.shared, values)
            outputs.append(_run_plain(member.module.train(one.training), cloned(inputs), one))
            binding.backward()
        stacked = [torch.stack(column) for column in zip(*outputs, strict=True)]
        gradients = {}
        for name, _ in parameters_of(self.ensemble.reference):
            gradients[name] = gradient_of(self.shared[name])
        for name, stack in self.ensemble.individual.tensors().items():
            if isinstance(stack, nn.Parameter):
                gradients[f"individual {name}"] = gradient_of(stacks[name])
        return stacked, gradients, [gradient_of(leaf) for leaf in input_leaves]


def _run_plain(module: nn.Module, inputs: tuple[tuple, dict], one: Pass) -> list[Tensor]:
    """Return the outputs of a plain network, and compute its gradients."""
    args, kwargs = inputs
    try:
        with torch.set_grad_enabled(one.has_grad):
            result = module(*args, **kwargs)
            if one.has_grad:
                backward(loss_of(result))
    except Exception as error:  # the code of a pattern may raise anything
        raise Invalid from error
    return tensors_of(result)


def cloned(inputs: Any) -> Any:
    """Return a copy of inputs, which code may change in place."""
    return tree_map_only(Tensor, Tensor.clone, inputs)


def with_leaves(inputs: Any, has_grad: bool) -> tuple[list[Tensor], Any]:
    """Return leaves that need gradients, and inputs computed from them, for code in place."""
    leaves: list[Tensor] = []

    def attach(x: Tensor) -> Tensor:
        if not has_grad or not x.is_floating_point():
            return x.clone()
        leaf = x.clone().requires_grad_()
        leaves.append(leaf)
        return leaf.clone()

    return leaves, tree_map_only(Tensor, attach, inputs)


def tensors_of(values: Any) -> list[Tensor]:
    """Return the tensors of a nested value, and of unregistered dataclasses."""
    tensors = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif hasattr(leaf, "__dataclass_fields__"):
            tensors += tensors_of(list(vars(leaf).values()))
    return tensors


def loss_of(outputs: Any) -> Tensor:
    """Return a sum over all floating outputs, in which every entry has its own weight."""
    loss = torch.zeros((), dtype=torch.float64)
    for tensor in tensors_of(outputs):
        if tensor.is_floating_point() or tensor.is_complex():
            value = tensor.abs() if tensor.is_complex() else tensor  # without a kink at 0
            loss = loss + torch.sin(value + 1.0).sum().double()
            loss = loss + tensor.real.sum().double()
    return loss


def backward(loss: Tensor) -> None:
    """Compute gradients, if there are any."""
    if loss.requires_grad:
        loss.backward()


def gradient_of(leaf: Tensor) -> Tensor:
    """Return the gradient of a leaf; none is zero."""
    if leaf.grad is None:
        return torch.zeros_like(leaf)
    return leaf.grad.detach().to_dense()


def assert_equal(left: Any, right: Any, message: str, tolerance: float) -> None:
    """Raise unless lists or dictionaries of tensors are equal up to rounding."""
    if isinstance(left, dict):
        assert left.keys() == right.keys(), f"{message}: {left.keys() ^ right.keys()}"
        for name in left:
            assert_equal([left[name]], [right[name]], f"{message}, {name!r}", tolerance)
        return
    assert len(left) == len(right), f"{message}: {len(left)} and {len(right)} tensors"
    for first, second in zip(left, right, strict=True):
        assert first.shape == second.shape, f"{message}: {first.shape} and {second.shape}"
        torch.testing.assert_close(
            first.detach(),
            second.detach(),
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            check_dtype=True,
            msg=lambda m: f"{message}: {m}",
        )
