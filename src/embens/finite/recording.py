"""Per-sample gradients of all members, from passes of plain members with forward hooks.

A :class:`Recorder` runs the members as plain networks and records the inputs and outputs of the
layers that have a rule (``factors``). One backward pass per member and class then gives the
gradients of all samples. :meth:`Recorder.survey` tests this on two samples first:

- The output of a sample must not depend on the other samples of its batch. Batch statistics,
  random layers and a batch that is not the first axis raise an error.
- The rules must reproduce the gradients of autograd. Parameters for which they do not (bare
  parameters, attention, recurrent layers, grouped convolutions, low-rank factors, tied weights) are
  *general*: their gradients are computed by autograd through the ensemble, one sample at a time.
  That is slow, and right for any network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from embens.ensemble import EmbeddedEnsemble
from embens.finite.arguments import Inputs, check_modes, check_output
from embens.finite.calls import (
    Call,
    LayerFacts,
    add_call,
    backward,
    layers_with_rules,
    make_call,
    separate_input,
)
from embens.finite.grams import MemberGradients, SampleGradients
from embens.finite.verification import (
    VANISHING,
    is_close,
    keeps_samples_first,
    reproduces,
    try_rules,
    with_noise,
)


@dataclass(frozen=True)
class Samples:
    """Inputs, with the classes of their targets."""

    inputs: Inputs
    target: Tensor | None = None

    def __len__(self) -> int:
        return len(self.inputs[0])

    def split(self, size: int) -> list[Samples]:
        """Return the samples in chunks."""
        chunks = []
        for start in range(0, len(self), size):
            rows = slice(start, start + size)
            target = None if self.target is None else self.target[rows]
            chunks.append(Samples(tuple(x[rows] for x in self.inputs), target))
        return chunks


@dataclass(frozen=True)
class Recording:
    """One pass of all members: the output ``(batch, ...)`` and the layer calls of each."""

    samples: Samples
    outputs: list[Tensor]
    calls: list[list[Call]]


class Recorder:
    """Runs the members of an ensemble and returns their per-sample gradients.

    Args:
        ensemble: An ensemble without fresh masks.

    Attributes:
        general: The trainable parameters without a rule, by id; set by :meth:`survey`.
        classes: The number of outputs per sample; set by :meth:`survey`.
        size: Approximate memory of one sample of one member, in entries; set by :meth:`survey`.
    """

    def __init__(self, ensemble: EmbeddedEnsemble):
        self.ensemble = ensemble
        self.individual = {id(p) for p in ensemble.individual_parameters()}
        self.trainable = {id(p): p for p in ensemble.parameters() if p.requires_grad}
        self.general: dict[int, Tensor] = {}
        self.classes = 0
        self.size = 0
        self._networks = []
        for a in range(ensemble.members):
            network = ensemble.member(a)
            network.requires_grad_(True)  # gradients must pass through frozen layers as well
            self._networks.append(network)
        self._layers = layers_with_rules(ensemble, self._networks[0])
        self._calls: list[Call] | None = None
        self._channels_last = True

    def record(self, samples: Samples) -> Recording:
        """Run all members and keep the calls of layers with a rule."""
        outputs = []
        calls = []
        for a in range(self.ensemble.members):
            output, member_calls = self._run(samples.inputs, a)
            outputs.append(output)
            calls.append(member_calls)
        return Recording(samples, outputs, calls)

    def gradients(self, recording: Recording, cotangents: Sequence[Tensor]) -> SampleGradients:
        """Return the gradients of all members' outputs, contracted with cotangents.

        Args:
            recording: A pass of all members.
            cotangents: For each member ``(class, batch, ...)``.
        """
        members = []
        batch = len(recording.samples)
        for a, output in enumerate(recording.outputs):
            calls = recording.calls[a]
            members.append(self._factored(a, calls, output, cotangents[a], batch))
        if self.general:
            self._add_general(members, recording.samples.inputs, cotangents)
        return SampleGradients(batch, members)

    # Members

    def _run(self, inputs: Inputs, a: int) -> tuple[Tensor, list[Call]]:
        if self._channels_last:
            inputs = tuple(_to_channels_last(x) for x in inputs)  # faster for convolutions
        calls: list[Call] = []
        with torch.enable_grad(), self._watching(a):
            self._calls = calls
            try:
                output = self._networks[a](*inputs)
            finally:
                self._calls = None
        return check_output(output, len(inputs[0])), calls

    @contextmanager
    def _watching(self, a: int) -> Iterator[None]:
        """Keep hooks on the layers of a member during its pass."""
        handles = []
        for name, module in self._networks[a].named_modules():
            facts = self._layers.get(name)
            if facts is None:
                continue
            if facts.trainable_post:
                handles.append(module.register_forward_pre_hook(separate_input))
            hook = self._hook(facts)
            handles.append(module.register_forward_hook(hook, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, facts: LayerFacts) -> Callable:
        def record(layer: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            # Backward passes with checkpoints call layers again; these calls are not recorded.
            if self._calls is None:
                return
            if not isinstance(output, Tensor) or not output.requires_grad:
                return
            # make_call runs norm layers again; that call is not recorded.
            calls, self._calls = self._calls, None
            value = args[0] if args else next(iter(kwargs.values()))
            calls.append(make_call(facts, layer, value, output))
            self._calls = calls

        return record

    def _factored(
        self,
        a: int,
        calls: list[Call],
        output: Tensor,
        cotangents: Tensor,
        batch: int,
    ) -> MemberGradients:
        """Return a member's gradients of the parameters with a rule."""
        member = MemberGradients()
        gradients_of_calls = backward(output, calls, cotangents)
        for call, gradients in zip(calls, gradients_of_calls, strict=True):
            add_call(member, call, gradients, a, batch)
        return member

    # Parameters without a rule

    def _add_general(
        self,
        members: list[MemberGradients],
        inputs: Inputs,
        cotangents: Sequence[Tensor],
    ) -> None:
        """Add the gradients of general parameters, by autograd for one sample at a time."""
        batch = len(inputs[0])
        rows: list[dict[int, list[Tensor]]] = []
        for _ in members:
            rows.append({key: [] for key in self.general})
        for i in range(batch):
            with torch.enable_grad():
                sample = [x[i : i + 1] for x in inputs]
                outputs = self.ensemble(*sample, chunk=1).unbind()
            for a, member_rows in enumerate(rows):
                for cotangent in cotangents[a]:
                    gradients = self._autograd(outputs[a], cotangent[i : i + 1], a)
                    for key, gradient in gradients.items():
                        member_rows[key].append(gradient)
        for member, member_rows in zip(members, rows, strict=True):
            for key, parameter in self.general.items():
                stacked = torch.stack(member_rows[key])
                member.add_rows(parameter, stacked.unflatten(0, (batch, -1)))

    def _autograd(self, output: Tensor, cotangent: Tensor, a: int) -> dict[int, Tensor]:
        """Return a member's gradients of the general parameters, each as a vector."""
        parameters = list(self.general.values())
        gradients = torch.autograd.grad(
            output,
            parameters,
            cotangent,
            retain_graph=True,
            materialize_grads=True,
        )
        vectors = {}
        for key, gradient in zip(self.general, gradients, strict=True):
            if key in self.individual:
                gradient = gradient[a]
            vectors[key] = gradient.flatten()
        return vectors

    # Survey

    def survey(self, pair: Inputs) -> None:
        """Find the parameters with rules that hold; raise if samples depend on each other.

        Args:
            pair: Two samples. Noise is added to them, so that they differ.

        Raises:
            ValueError: If a sample's output depends on the other samples, or is random.
        """
        check_modes(self._networks[0])
        probe = with_noise(pair)
        try:
            general, calls = self._find_general(probe)
        except (RuntimeError, IndexError):
            # The network takes no noisy inputs, or only contiguous images.
            probe = pair
            self._channels_last = False
            general, calls = self._find_general(probe)
        if all(torch.equal(x[0], x[1]) for x in probe):
            general = set(self.trainable)  # two equal samples cannot reveal the batch axis
        self.general = {key: p for key, p in self.trainable.items() if key in general}
        layers = {}
        for name, facts in self._layers.items():
            remaining = facts.without(general)
            if remaining.parameter_keys():
                layers[name] = remaining
        self._layers = layers
        size = 0
        for call in calls:
            if call.facts.name in layers:
                embeddings = getattr(call.layer, "num_embeddings", 1)
                size += 2 * call.value.numel() * embeddings
        self.size = math.ceil(size / len(pair[0]))

    def _find_general(self, inputs: Inputs) -> tuple[set[int], list[Call]]:
        """Return the ids of the parameters with rules that do not hold, and all recorded calls."""
        sample = tuple(x[:1] for x in inputs)
        output, calls = self._run(inputs, 0)
        self.classes = output[0].numel()
        if not output.isfinite().all():
            raise RuntimeError("outputs are not finite; check the inputs and the weights")
        alone = self._run_alone(sample, output)
        weights = torch.cos(1.0 + torch.arange(output.numel()))  # generic values
        cotangent = weights.to(output).view_as(output)
        expected = self._expected_gradients(sample, cotangent[:1])
        gradients, general = try_rules(output, calls, cotangent[None])
        sizes = [float(gradient.abs().max()) for gradient in expected.values()]
        threshold = VANISHING * max(sizes, default=0.0)
        for key, gradient in expected.items():
            if float(gradient.abs().max()) > threshold:
                holds = reproduces(gradients, key, gradient)
            else:
                holds = keeps_samples_first(key, calls, alone)
            if not holds:
                general.add(key)
        # Other samples may use parameters that this one does not.
        with_rule = set()
        for facts in self._layers.values():
            with_rule |= facts.parameter_keys()
        unused = set(self.trainable) - set(expected)
        return general | (unused - with_rule), calls

    def _expected_gradients(self, sample: Inputs, cotangent: Tensor) -> dict[int, Tensor]:
        """Return the first member's gradients by autograd through the ensemble.

        Returns:
            From the ids of the parameters that are used to their gradients.
        """
        single = self.ensemble.subset([0])  # its parameters come in the same order
        keys = [id(p) for p in _parameters(self.ensemble) if p.requires_grad]
        parameters = [p for p in _parameters(single) if p.requires_grad]
        with torch.enable_grad():
            output = single(*sample)[0]
        if not parameters or not output.requires_grad:
            return {}
        gradients = torch.autograd.grad(output, parameters, cotangent, allow_unused=True)
        expected = {}
        for key, gradient in zip(keys, gradients, strict=True):
            if gradient is not None:
                expected[key] = gradient
        return expected

    def _run_alone(self, sample: Inputs, output: Tensor) -> list[Call]:
        """Run the first sample alone; raise if its output is another one."""
        try:
            first, calls = self._run(sample, 0)
        except (RuntimeError, ValueError) as error:
            shapes = ", ".join(str(tuple(x.shape)) for x in sample)
            raise ValueError(
                f"the network cannot run on a batch of one sample, of shape {shapes} ({error}). A "
                "kernel between samples needs the batch as the first axis of inputs and outputs."
            ) from error
        if first.shape[1:] != output.shape[1:] or not is_close(output[:1], first):
            raise ValueError(
                "the output of a sample depends on other samples of its batch, or is random. A "
                "kernel between samples needs outputs that are functions of one sample. Call "
                "ensemble.eval() for Dropout and batch statistics, and make the batch the first "
                "axis of inputs and outputs."
            )
        return calls


def _parameters(ensemble: EmbeddedEnsemble) -> list[Tensor]:
    return [*ensemble.shared_parameters(), *ensemble.individual_parameters()]


def _to_channels_last(x: Tensor) -> Tensor:
    if x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    return x
