"""Carry out a plan, a new one or that of a file, on a copy of the reference.

A deep copy looks every object up in a memo first; putting the replacements there puts them wherever
the reference holds the originals, in lists and attributes as well.
"""

import copy
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embens.ensemble import storage
from embens.ensemble.heads import InputHeads
from embens.ensemble.layers import Modulated, Modulation, Once, Stochastic
from embens.ensemble.lowrank import LowRank
from embens.ensemble.module import EmbeddedEnsemble
from embens.ensemble.ntkgp import NTKGP
from embens.ensemble.own import Own
from embens.ensemble.plan import Plan
from embens.files import read_tensors, refusing
from embens.reading.flow import left_over, opened
from embens.reading.layers import parameter_layers


def operate(
    reference: nn.Module, plan: Plan, generator: torch.Generator | None = None
) -> EmbeddedEnsemble:
    """Return the ensemble that a plan makes of a reference, which is not changed."""
    reference = opened(reference)
    modules, layers = dict(reference.named_modules()), parameter_layers(reference)
    modulations: dict[str, dict[str, Modulation]] = {}  # by layer, then by side
    low_rank = {site.layer: site for site in plan.low_rank}
    for site in plan.sites:
        kind = Modulation if site.prior_std is None else Stochastic
        drawn = kind(site, plan.members, next(layers[site.layer].parameters()), generator)
        drawn.drawn = plan.drawn
        modulations.setdefault(site.layer, {})[site.kind] = drawn
    own = {o.module: o for o in plan.own}
    shared = {s.module: s for s in plan.shared}
    border = set(plan.folding.border)
    memo: dict[int, Any] = left_over(reference)
    stacks: dict[int, Tensor] = {}
    for name in sorted(modules, key=lambda n: (-n.count(".") - bool(n), n)):
        module, mine = modules[name], modulations.get(name)
        if not (mine or name in {*own, *shared, *low_rank}) or id(module) in memo:
            continue
        copied: nn.Module = copy.deepcopy(module, memo)
        if name in own:
            kind = InputHeads if plan.heads and name in plan.heads.first else Own
            copied = kind(copied, own[name], plan.members, border=name in border, stacks=stacks)
        if name in low_rank:
            place = {"border": name in border, "generator": generator}
            copied = LowRank(copied, low_rank[name], plan.members, **place)
        if name in shared:
            copied = Once(copied, shared[name])
        if mine:
            copied = Modulated(copied, mine.get("pre"), mine.get("post"), border=name in border)
        memo[id(module)] = copied
    network = copy.deepcopy(reference, memo)
    ensemble = EmbeddedEnsemble(network, plan)
    for parameter in ensemble.shared_parameters() if plan.frozen else ():
        parameter.requires_grad_(False)
    return ensemble


def load(path: str | os.PathLike[str], reference: nn.Module) -> EmbeddedEnsemble:
    """Read an ensemble from a file, or from a folder of :meth:`EmbeddedEnsemble.save_pretrained`.

    The reference is a network of the same architecture and type, which is not changed; its weights
    are used where the file was written with ``shared=False``, and have to be the same then. A file
    with another checksum, or of other shapes or types, is refused; NaN in it is warned of.
    """
    path = Path(path) / storage.FILE if Path(path).is_dir() else path
    header, tensors = read_tensors(path, storage.FORMAT)
    with refusing(path):
        plan = Plan.from_dict(header["plan"])
        reference = NTKGP(reference) if plan.family == "bayesian" else opened(reference)
        plan.check(reference, sum(t.numel() for t in tensors.values()))
        ensemble = operate(reference, plan)
        if "shared" in header:
            shared, _ = ensemble.state_parts()
            storage.check_shared(Path(path).name, header["shared"], shared)
            tensors = {**shared, **tensors}
        storage.check_tensors(Path(path).name, tensors, ensemble.state_dict())
        ensemble.load_state_dict(tensors)
    return ensemble
