"""Recording how parameters are used: a pass over all members, and a survey before it.

A :class:`Recorder` watches the layers that have a :class:`Term` and keeps one
for each call. The :meth:`~Recorder.survey` tries it on two samples that differ, and on the first
alone, to find

- whether samples keep to themselves at all: batch statistics, a batch that is not the first axis
  or random layers make "the gradient of one sample" meaningless, and are an error;
- which parameters are *structured*: their terms give the gradients that autograd gives. Everything
  else (bare parameters, convolutions in groups, layers with a forward of their own) has its
  gradients sample by sample: slow, and right for any network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from embens import networks
from embens.checks import check_rows
from embens.ensemble import EmbeddedEnsemble
from embens.ensemble.layers import Modulated, Modulation
from embens.ensemble.lowrank import LowRank
from embens.finite.checks import check_inputs
from embens.finite.empirical.contraction import (
    Affine,
    Gradients,
    Scale,
    Term,
    by_parameter,
    contract,
)
from embens.reading.layers import NORMS, spatial_axes

Inputs = tuple[Tensor, ...]
Call = tuple[nn.Module, Term]
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}  # of numbers when samples run together


@dataclass(frozen=True)
class Samples:
    """Inputs, with the classes of their targets."""

    inputs: Inputs
    target: Tensor | None = None

    def __len__(self) -> int:
        return len(self.inputs[0])

    def split(self, size: int) -> list[Samples]:
        """Return them in chunks."""
        inputs = list(zip(*(x.split(size) for x in self.inputs), strict=True))
        targets = [None] * len(inputs) if self.target is None else self.target.split(size)
        return [Samples(*chunk) for chunk in zip(inputs, targets, strict=True)]


@dataclass(frozen=True)
class Recording:
    """One pass of all members: outputs ``(batch, …)`` and terms of each."""

    samples: Samples
    outputs: list[Tensor]
    terms: list[list[Term]]


class Recorder:
    """Runs an ensemble and keeps the terms of its trainable parameters."""

    def __init__(self, ensemble: EmbeddedEnsemble):
        self.ensemble = ensemble
        self.numbers: list[Tensor] = []  # the members' own, as they are in the first pass
        self.individual = {id(p) for p in ensemble.individual_parameters()}
        self.trainable = {id(p): p for p in ensemble.parameters() if p.requires_grad}
        self.general: dict[int, nn.Parameter] = {}  # those without terms; set by the survey
        self.size = 0  # how many numbers one sample's terms hold for one member; so is this
        self.classes = 0  # how many outputs a sample has; and this
        self._structured: dict[int, nn.Parameter] = dict(self.trainable)
        self._channels_last = True
        self._calls: list[Call] | None = None

    def record(self, samples: Samples) -> Recording:
        """Run all members and keep their terms."""
        passes = self._run(samples.inputs, range(self.ensemble.members))
        outputs, calls = [output for output, _ in passes], [found for _, found in passes]
        if len(calls) > 1:  # what ran for the first member alone is computed once for all
            again = {id(module) for module, _ in calls[1]}
            once = [call for call in calls[0] if id(call[0]) not in again]
            calls = [calls[0], *([*once, *found] for found in calls[1:])]
        return Recording(samples, outputs, [[term for _, term in found] for found in calls])

    def _run(self, inputs: Inputs, members: Iterable[int]) -> list[tuple[Tensor, list[Call]]]:
        if self._channels_last:  # faster for images, the same for all else
            inputs = tuple(
                x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
                for x in inputs
            )
        found = []
        with torch.enable_grad(), self.ensemble.run(inputs, chunk=1) as run:
            self.numbers = self.numbers or run.numbers  # fresh ones are drawn once
            for a in members:
                self._calls = calls = []
                try:
                    output = run.member(a, numbers=[stack[a] for stack in self.numbers])
                finally:
                    self._calls = None
                found.append((check_output(output, len(inputs[0])), calls))
        return found

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep hooks on all layers that have terms."""
        modules = [] if self.ensemble.plan.recompute else list(self.ensemble.network.modules())
        built = {id(m.inner()) for m in modules if isinstance(m, LowRank)}
        layers = [m for m in modules if id(m) not in built and _is_known(m)]  # before our hooks
        with ExitStack() as stack:
            for module in modules:
                if isinstance(module, Modulated) and not isinstance(module.inner(), nn.RNNBase):
                    for handle in self._watch_modulated(module):
                        stack.callback(handle.remove)
            for module in layers:
                roles = {r: p for r, p in module._parameters.items() if id(p) in self.trainable}
                if roles:
                    hook = self._keep_layer(module, roles)  # type: ignore[arg-type]
                    stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            yield

    def _keep_layer(self, layer: nn.Module, roles: dict[str, nn.Parameter]) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            calls, self._calls = self._calls, None  # a term may call the layer itself
            if calls is not None and isinstance(output, Tensor) and output.requires_grad:
                value = args[0] if args else next(iter(kwargs.values()))
                with torch.no_grad():
                    term = _term(module, self._wanted(roles), value, output)
                if term.parameters:
                    calls.append((layer, term))  # the module may be a copy for one member
            self._calls = calls

        return hook

    def _wanted(self, roles: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        return {role: p for role, p in roles.items() if id(p) in self._structured}

    def _watch_modulated(self, module: Modulated) -> list[Any]:
        seen: list[Any] = []

        def scale(numbers: Modulation | None, value: Tensor, product: Tensor) -> None:
            if numbers is None or len(numbers.tensors()) > 1:
                return
            if id(numbers.values) not in self._structured:
                return
            edge = torch.autograd.graph.get_gradient_edge(product)
            shape = (numbers.size * numbers.repeat, *(1,) * spatial_axes(module.inner()))
            use = ({"weight": numbers.values}, value.detach(), edge, product.shape)
            self._calls.append((module, Scale(*use, shape, numbers.repeat)))  # type: ignore[union-attr, arg-type]

        def inside(_: nn.Module, args: tuple, output: Tensor) -> None:
            seen[:] = args[0], output

        def after(_: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> None:
            if self._calls is not None and seen:
                value, (product, through) = args[0] if args else kwargs["input"], seen
                scale(module.post, value, product)
                scale(module.pre, through, output)
            seen.clear()

        return [
            module.layer.register_forward_hook(inside),
            module.register_forward_hook(after, with_kwargs=True),
        ]

    def rows(self, a: int, inputs: Inputs, cotangents: Tensor) -> dict[int, Tensor]:
        """Return a member's gradients of parameters without terms, ``(batch, class, number)``.

        Every sample runs alone. Cotangents are ``(class, batch, …)``.
        """
        parameters = list(self.general.values())
        stacks = {id(stack) for stack in self.numbers}  # of all members
        found: dict[int, list[Tensor]] = {id(p): [] for p in parameters}
        for i in range(len(inputs[0])):
            ((output, _),) = self._run(tuple(x[i : i + 1] for x in inputs), [a])
            for cotangent in cotangents[:, i : i + 1]:
                options = {"retain_graph": True, "materialize_grads": True}
                gradients = torch.autograd.grad(output, parameters, cotangent, **options)
                for key, gradient in zip(found, gradients, strict=True):
                    found[key].append((gradient[a] if key in stacks else gradient).flatten())
        shape = len(inputs[0]), len(cotangents)
        return {key: torch.stack(rows).unflatten(0, shape) for key, rows in found.items()}

    def survey(self, pair: Inputs) -> None:
        """Find out which parameters are structured; raise where samples do not stand alone.

        Two samples are run, with some noise, so that they differ. Equal samples of whole numbers
        leave no way to find structure.
        """
        check_modes(self.ensemble)
        probe = _with_noise(pair)
        try:
            general, terms = self._unstructured(probe)
        except (RuntimeError, IndexError):  # the network takes no noise, or contiguous images only
            probe, self._channels_last = pair, False
            general, terms = self._unstructured(probe)
        if all(torch.equal(x[0], x[1]) for x in probe):
            general = set(self.trainable)
        self.general = {k: p for k, p in self.trainable.items() if k in general}
        self._structured = {k: p for k, p in self.trainable.items() if k not in general}
        sizes = [term.size for term in terms if self._wanted(term.parameters)]
        self.size = math.ceil(sum(sizes) / len(pair[0]))

    def _unstructured(self, inputs: Inputs) -> tuple[set[int], list[Term]]:
        """Return the parameters whose terms don't give autograd's gradients; and all terms."""
        batch = len(inputs[0])
        ((output, calls),) = self._run(inputs, [0])
        terms, self.classes = [term for _, term in calls], output[0].numel()
        if not output.isfinite().all():
            raise RuntimeError("outputs are not finite; check the inputs and the weights")
        first, alone = self._alone(inputs, output)
        if not output.requires_grad:
            return set(), terms
        chosen = torch.cos(1.0 + torch.arange(output.numel())).to(output).view_as(output)
        options = {"retain_graph": True, "allow_unused": True}
        trained, edges = list(self.trainable.values()), [term.edge for term in terms]
        expected = torch.autograd.grad(first, trained, chosen[:1], **options)
        arrived = torch.autograd.grad(output, edges, chosen, **options) if terms else ()
        uses = by_parameter(
            terms,
            [
                torch.zeros(1, *term.shape).to(output) if g is None else g[None]
                for term, g in zip(terms, arrived, strict=True)
            ],
        )
        largest = max((float(g.abs().max()) for g in expected if g is not None), default=0.0)
        general = set()
        for parameter, gradient in zip(self.trainable, expected, strict=True):
            keys = [key for key in uses if key[1] == parameter]
            kinds = {type(term) for key in keys for term, _ in uses[key]}
            if gradient is None:
                continue  # not used at all
            try:
                known = len(keys) == len(kinds) == 1
                if known and gradient.abs().max() > 1e-5 * largest:
                    square = contract(keys[0], Gradients(batch, [uses]), None)[0, 0]
                    known = _is_close(square, gradient.square().sum())
                elif known:  # nothing but rounding: what is multiplied must do
                    pairs = zip(terms, alone, strict=True)
                    mine = [(t, s) for t, s in pairs if parameter in map(id, t.parameters.values())]
                    known = all(len(t.value) == batch * len(s.value) for t, s in mine) and all(
                        _is_close(t.value[: len(s.value)], s.value) for t, s in mine
                    )
            except (RuntimeError, ValueError):  # a use without the batch, or another number of uses
                known = False
            if not known:
                general.add(parameter)
        return general, terms

    def _alone(self, inputs: Inputs, output: Tensor) -> tuple[Tensor, list[Term]]:
        """Return output and terms of the first sample alone; raise where the output is another."""
        sample = tuple(x[:1] for x in inputs)
        try:
            ((first, calls),) = self._run(sample, [0])
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                "the network can't run on a batch of one sample, of shape "
                f"{', '.join(str(tuple(x.shape)) for x in sample)} ({error}). A kernel between "
                "samples needs the batch as the first axis of inputs and outputs."
            ) from error
        if first.shape[1:] != output.shape[1:] or not _is_close(output[:1], first):
            raise ValueError(
                "a sample's outputs depend on the samples beside it, or are random: a kernel "
                "between samples needs outputs that are functions of one sample. Call "
                "ensemble.eval() for Dropout and batch statistics, and let the batch be the "
                "first axis of inputs and outputs."
            )
        return first, [term for _, term in calls]


def _is_close(found: Tensor, expected: Tensor) -> bool:
    error, size = (found - expected).abs().max(), expected.abs().max()
    return bool(error <= TOLERANCE.get(expected.dtype, 0.05) * size)


def _with_noise(inputs: Inputs) -> Inputs:
    source = torch.Generator().manual_seed(0)

    def noisy(x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=source, dtype=torch.float64).to(x)
        return x + 0.1 * (x.abs().amax() or 1.0) * noise

    return tuple(noisy(x) if x.is_floating_point() else x for x in inputs)


def as_inputs(x: Tensor | Inputs, name: str = "x") -> Inputs:
    """Return the inputs of a network as a tuple, checked."""
    check_inputs(x, name)
    inputs = tuple(x) if isinstance(x, (tuple, list)) else (x,)
    check_rows(name, inputs, "a tensor with samples along its first axis, or a tuple of them")
    return inputs


def _is_known(module: nn.Module) -> bool:
    """Return whether a term may describe a layer; the survey finds out whether it does."""
    if isinstance(module, NORMS):
        return type(module).__module__.startswith("torch.nn.")
    odd = any(getattr(module, n, False) for n in ("scale_grad_by_freq", "sparse", "transposed"))
    known = isinstance(module, nn.Linear | nn.Embedding | _ConvNd)
    return known and not odd and getattr(module, "groups", 1) == 1


def _term(
    module: nn.Module, parameters: dict[str, nn.Parameter], value: Tensor, output: Tensor
) -> Term:
    use = (torch.autograd.graph.get_gradient_edge(output), output.shape)
    if isinstance(module, NORMS):
        plain = {
            name: torch.full_like(p, float(name == "weight"))
            for name, p in module._parameters.items()
            if p is not None
        }
        normed = torch.func.functional_call(module, plain, (value.detach(),))
        shape = tuple(next(iter(plain.values())).shape)
        if isinstance(module, (_NormBase, nn.GroupNorm)):
            shape = (*shape, *(1,) * (output.dim() - 2))
        return Scale(parameters, normed, *use, shape)
    scales = {"weight": 1.0, "bias": 1.0}
    if isinstance(module, networks.Parametrized) and module.parametrization == "ntk":
        weight_scale = module.weight_std / math.sqrt(module.fan_in)
        scales = {"weight": weight_scale, "bias": module.bias_std}
    return Affine(parameters, value.detach(), *use, module, scales)


def check_output(output: Any, batch: int) -> Tensor:
    """Return a member's output, if it is one tensor with the batch as its first axis."""
    if not isinstance(output, Tensor):
        raise TypeError(
            f"a kernel needs a network whose output is one tensor; got {type(output).__name__}. "
            "Wrap the reference in a module that returns the tensor in question, and embed that."
        )
    if output.shape[:1] != (batch,):
        raise ValueError(
            f"outputs of a batch of {batch} must have the batch as their first axis; got shape "
            f"{tuple(output.shape)}. Add a batch axis to x, or let the network keep it first."
        )
    return output


def check_modes(ensemble: EmbeddedEnsemble) -> None:
    """Raise where modules are in a mode in which samples don't stand alone."""
    for name, module in ensemble.network.named_modules():
        updates = isinstance(module, _NormBase) and module.training and module.track_running_stats
        mixes = isinstance(module, _BatchNorm) and not module.track_running_stats
        if updates or mixes:
            raise ValueError(
                f"{name!r} ({type(module).__name__}) uses the statistics of the batch, so that no "
                "sample has a gradient of its own. Call ensemble.eval(); a layer with "
                "track_running_stats=False has no other statistics and can't be used."
            )
        if isinstance(module, _DropoutNd) and module.training and module.p > 0:
            raise ValueError(
                f"{name!r} ({type(module).__name__}) is random in training mode, and so would the "
                "kernel be. Call ensemble.eval()."
            )
