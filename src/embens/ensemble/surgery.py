"""Carry out a plan on a copy of the reference."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from embens import reading as dataflow
from embens.ensemble.layers import Modulated, ModulatedAttention, Modulation, channel_axes
from embens.ensemble.module import EmbeddedEnsemble
from embens.ensemble.plan import Plan, site_module
from embens.ensemble.run import Cursor, Once, Own


def operate(
    reference: nn.Module, plan: Plan, generator: torch.Generator | None = None
) -> EmbeddedEnsemble:
    """Carry out a plan on a copy of the reference.

    A deep copy looks every object up in a memo first; putting the replacements there puts them
    wherever the reference holds the originals, in lists and attributes as well.
    """
    layers = dataflow.parameter_layers(reference)
    cursor = Cursor()
    modules = dict(reference.named_modules())
    shared = {name: (random, keep) for name, random, keep in plan.shared}
    modulations: dict[str, dict[str, Modulation]] = {}
    for site in plan.sites:
        layer = layers[site.layer]
        like = next(layer.parameters())
        owner = site_module(site.layer, layers)
        key = site.kind if owner == site.layer else f"{site.layer.rpartition('.')[2]}_{site.kind}"
        modulations.setdefault(owner, {})[key] = Modulation(
            site.law,
            plan.members,
            site.size,
            repeat=site.repeat,
            trailing=channel_axes(layer),
            trainable=site.trainable,
            fresh=site.fresh,
            like=like,
            generator=generator,
        )
    memo: dict[int, Any] = {}
    by_depth = sorted(modules, key=lambda n: (-n.count(".") - bool(n), n))
    own = dict(plan.own)
    for name in by_depth:
        module = modules[name]
        if name not in modulations and name not in own and name not in shared:
            continue
        copied: nn.Module = copy.deepcopy(module, memo)
        if name in own:
            copied = Own(copied, own[name], plan.members)
        if name in shared:
            random, keep = shared[name]
            copied = Once(copied, cursor, random=random, keep=keep)
        if name in modulations:
            mine = modulations[name]
            if isinstance(module, nn.MultiheadAttention):
                copied = ModulatedAttention(copied, mine)  # type: ignore[arg-type]
            else:
                copied = Modulated(copied, mine.get("pre"), mine.get("post"))
        memo[id(module)] = copied
    network = copy.deepcopy(reference, memo)
    dataflow.disable_fast_paths(network)
    for name in plan.overwriting:
        network.get_submodule(name).inplace = True  # type: ignore[assignment]
    return EmbeddedEnsemble(network, plan, cursor)
