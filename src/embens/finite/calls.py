"""Calls of layers in the pass of a plain member, and the gradients that follow from them.

:func:`layers_with_rules` finds the layers with gradients that factor (``factors``). Forward hooks
turn each of their calls into a :class:`Call`. After :func:`backward`, :func:`add_call` adds the
per-sample gradients of the ensemble's parameters in that call.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from embens.ensemble import EmbeddedEnsemble
from embens.finite.factors import (
    WeightUse,
    channel_rows,
    has_rule,
    is_norm,
    norm_rows,
    normalize,
    parameter_scale,
    scale_channels,
)
from embens.finite.grams import MemberGradients
from embens.finite.values import individual_tensors, site_values


@dataclass(frozen=True)
class SiteModulation:
    """The modulation of a layer's input or output, for all members.

    Attributes:
        values: ``(member, size)``.
        repeat: The number of consecutive channels that share a value.
        parameter: The trainable parameter, or None for a frozen modulation.
    """

    values: Tensor
    repeat: int
    parameter: Tensor | None

    def of(self, a: int) -> Tensor:
        """Return one member's values, ``(channel,)``."""
        return self.values[a].repeat_interleave(self.repeat)

    def rows(self, gradients: Tensor, a: int) -> Tensor:
        """Return the gradients of a member's values, ``(…, size)``.

        Args:
            gradients: Value times gradient of each channel, ``(…, channel)``; see ``factors``.
            a: The member.
        """
        of_channels = gradients / self.of(a)
        return of_channels.unflatten(-1, (-1, self.repeat)).sum(-1)


@dataclass(frozen=True)
class LayerFacts:
    """A layer with a rule: its trainable parameters in the ensemble, and its modulations."""

    name: str
    parameters: dict[str, Tensor]  # "weight", "bias"
    pre: SiteModulation | None
    post: SiteModulation | None

    @property
    def trainable_pre(self) -> bool:
        return self.pre is not None and self.pre.parameter is not None

    @property
    def trainable_post(self) -> bool:
        return self.post is not None and self.post.parameter is not None

    def parameter_keys(self) -> set[int]:
        """Return the ids of all trainable parameters."""
        keys = {id(parameter) for parameter in self.parameters.values()}
        for modulation in (self.pre, self.post):
            if modulation is not None and modulation.parameter is not None:
                keys.add(id(modulation.parameter))
        return keys

    def without(self, general: Collection[int]) -> LayerFacts:
        """Return the layer without the parameters of some ids."""
        parameters = {}
        for role, parameter in self.parameters.items():
            if id(parameter) not in general:
                parameters[role] = parameter
        modulations = []
        for modulation in (self.pre, self.post):
            if modulation is not None and id(modulation.parameter) in general:
                modulation = replace(modulation, parameter=None)
            modulations.append(modulation)
        return LayerFacts(self.name, parameters, *modulations)


@dataclass(frozen=True)
class Call:
    """One call of a layer in a member's pass.

    Attributes:
        facts: The layer in the ensemble.
        layer: The member's plain layer.
        value: The layer's input; for a norm layer the normalized input.
        output: The layer's output, kept if the pre modulation is trainable.
        edges: Where the gradients of its output, and of its input if needed, arrive.
        shapes: The shapes of these gradients.
    """

    facts: LayerFacts
    layer: nn.Module
    value: Tensor
    output: Tensor | None
    edges: list[Any]
    shapes: list[torch.Size]


def layers_with_rules(ensemble: EmbeddedEnsemble, member: nn.Module) -> dict[str, LayerFacts]:
    """Return the layers of a plain member with gradients that factor.

    Args:
        ensemble: An ensemble without fresh masks.
        member: Any of its members, as a plain network.
    """
    reference = dict(ensemble.reference.named_modules())
    stacks = individual_tensors(ensemble)
    individual = {}
    for item in ensemble.spec.per_member:
        individual[item.module] = stacks.get(item.module, {})
    low_rank = {site.layer for site in ensemble.spec.low_rank}
    sites = {(site.layer, site.kind): site for site in ensemble.spec.sites}
    layers = {}
    for name, layer in member.named_modules():
        if not has_rule(layer) or type(layer) is not type(reference.get(name)):
            continue
        parameters: dict[str, Tensor] = dict(reference[name].named_parameters(recurse=False))
        parameters.update(individual.get(name, {}))
        if name in low_rank:
            parameters.pop("weight")
        trainable = {role: p for role, p in parameters.items() if p.requires_grad}
        pre = _modulation(ensemble, sites.get((name, "pre")))
        post = _modulation(ensemble, sites.get((name, "post")))
        layers[name] = LayerFacts(name, trainable, pre, post)
    return layers


def _modulation(ensemble: EmbeddedEnsemble, site: Any) -> SiteModulation | None:
    if site is None:
        return None
    stack = site_values(ensemble, site)
    values = stack.detach()
    # The rule divides by the values, so a site with zeros is left to autograd.
    if stack.requires_grad and bool((values != 0).all()):
        return SiteModulation(values, site.repeat, stack)
    return SiteModulation(values, site.repeat, None)


def separate_input(layer: nn.Module, args: tuple) -> tuple:
    """Replace a layer's input by a view of it, which separates the gradients of this use."""
    value, *arguments = args
    if value.requires_grad:
        return (value.view_as(value), *arguments)
    return (value.detach().requires_grad_(), *arguments)


def make_call(facts: LayerFacts, layer: nn.Module, value: Tensor, output: Tensor) -> Call:
    """Return the record of a call.

    Args:
        facts: The layer in the ensemble.
        layer: The member's plain layer.
        value: Its input, from :func:`separate_input` if the post modulation is trainable.
        output: Its output, part of a graph.
    """
    edges = [get_gradient_edge(output)]
    shapes = [output.shape]
    if facts.trainable_post:
        edges.append(get_gradient_edge(value))
        shapes.append(value.shape)
    saved_output = None
    if facts.trainable_pre:
        saved_output = output.detach().clone()  # the network may change its output in place
    value = value.detach()
    if is_norm(layer):
        with torch.no_grad():
            value = normalize(layer, value)
    return Call(facts, layer, value, saved_output, edges, shapes)


def add_call(
    member: MemberGradients,
    call: Call,
    gradients: list[Tensor],
    a: int,
    batch: int,
) -> None:
    """Add the gradients of a layer's parameters in one call.

    Args:
        member: Receives the gradients.
        call: The record of the call.
        gradients: Gradients of the layer's output and, if needed, of its input,
            ``(class, row, ...)``.
        a: The member.
        batch: The number of samples.
    """
    facts = call.facts
    layer = call.layer
    gradient = gradients[0]
    pre = None if facts.pre is None else facts.pre.of(a)
    post = None if facts.post is None else facts.post.of(a)
    for role, parameter in facts.parameters.items():
        if is_norm(layer):
            product = gradient if role == "bias" else gradient * call.value
            member.add_rows(parameter, norm_rows(layer, product, batch))
        elif role == "weight":
            use = WeightUse(layer, call.value, gradient, post, pre)
            member.add_weight(parameter, use)
        else:
            rows = channel_rows(layer, scale_channels(layer, gradient, pre), batch)
            member.add_rows(parameter, rows * parameter_scale(layer, role))
    if facts.pre is not None and facts.pre.parameter is not None:
        assert call.output is not None
        rows = channel_rows(layer, gradient * call.output, batch)
        member.add_rows(facts.pre.parameter, facts.pre.rows(rows, a))
    if facts.post is not None and facts.post.parameter is not None:
        rows = channel_rows(layer, gradients[1] * call.value, batch)
        member.add_rows(facts.post.parameter, facts.post.rows(rows, a))


def backward(output: Tensor, calls: list[Call], cotangents: Tensor) -> list[list[Tensor]]:
    """Return for each call the gradients ``(class, ...)`` at its edges."""
    edges = []
    shapes = []
    for call in calls:
        edges += call.edges
        shapes += call.shapes
    if not edges:
        return []
    by_class = []
    for cotangent in cotangents:
        arrived = torch.autograd.grad(
            output,
            edges,
            cotangent,
            retain_graph=True,
            allow_unused=True,
        )
        gradients = []
        for gradient, shape in zip(arrived, shapes, strict=True):
            if gradient is None:
                gradient = output.new_zeros(shape)
            gradients.append(gradient)
        by_class.append(gradients)
    if len(by_class) == 1:
        stacked = [gradient.unsqueeze(0) for gradient in by_class[0]]  # without a copy
    else:
        stacked = [torch.stack(gradients) for gradients in zip(*by_class, strict=True)]
    gradients_of_calls = []
    start = 0
    for call in calls:
        stop = start + len(call.edges)
        gradients_of_calls.append(stacked[start:stop])
        start = stop
    return gradients_of_calls
