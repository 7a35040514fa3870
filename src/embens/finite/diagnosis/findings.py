"""Findings: what is known to go wrong with embedded ensembles, and what to do about it.

A check is a function of :class:`Facts`, what was read and measured of an ensemble, that returns
what is wrong and what to do, or None; its name is the code of the finding. ``CHECKS`` is the list
of them. Each has a test in which it must find something and one in which it must not.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embens.checks import check_choice
from embens.ensemble import EmbeddedEnsemble
from embens.ensemble.plan import Site
from embens.ensemble.rates import kind_of
from embens.finite.diagnosis.report import Diagnosis, Finding
from embens.laws import Law
from embens.theory.regime import Structure

NARROW = 8  # inputs of at most so many channels don't average their modulations out
SPREAD = 10.0  # ratio of the longest to the shortest gradient of members that is too large
FAST, FAST_GIVEN = 1.5, 1.15  # how many times its natural value a default and a given gamma may be
NEARLY_EQUAL = 0.98  # cosine of gradients, and coupling, from which members are one model
BIASED = 0.5  # pull of the others through output biases, relative to a member's own, to speak of

Trouble = tuple[str, str] | None


@dataclass(frozen=True)
class Facts:
    """What is known of an ensemble, and what is meant to be done with it."""

    ensemble: EmbeddedEnsemble
    report: Diagnosis
    last: Mapping[str, Law | None]  # the last layers, and the law of u in their inputs, if any
    shifted: list[str]  # those with a law that has a mean, or couples members in another way
    sites: list[Site]  # at which members differ
    collective: bool  # whether members are coupled in the limit by more than output biases
    biases: list[str]  # layers with shared output biases that can be trained
    bias_part: float  # their coupling in the limit, or mean part in the cosine of two gradients
    gamma_given: bool  # whether the gradient scale is not the default one
    optimizer: Any
    wanted: str | None


def equal_members(facts: Facts) -> Trouble:
    """Members that are one and the same model."""
    if not facts.report.one_model:
        return None
    laws = ", ".join(dict.fromkeys(repr(s.law) for s in facts.ensemble.plan.sites))
    nearly = "" if facts.report.coupling == 1 else "nearly "
    return (
        f"all {facts.ensemble.members} members are {nearly}one model "
        f"({laws}; cosine of their gradients {facts.report.pull.mean:.3g}): they predict the same, "
        "learn the same from the same samples, and cost as much as different ones",
        "use a law that tells members apart, such as laws.Normal() or a smaller p in "
        "batch_ensemble, or the reference alone",
    )


def shifted_laws(facts: Facts) -> Trouble:
    """Laws with a mean where independent members were wanted."""
    if facts.wanted != "independent" or not facts.collective or not facts.shifted:
        return None
    law = facts.last[facts.shifted[0]]
    return (
        f"independent members were wanted, but the law of the modulations in the input of "
        f"{_names(facts.shifted)} is not centred ({law!r}), which couples members",
        "use a centred law there, such as laws.Normal() or p=0 in batch_ensemble",
    )


def uncentred_last_layer(facts: Facts) -> Trouble:
    """Centred modulations everywhere but where it matters."""
    if not facts.collective or not facts.sites:
        return None
    bare, shifted = [n for n, law in facts.last.items() if law is None], facts.shifted
    others = [s for s in facts.sites if not (s.kind == "post" and s.layer in facts.last)]
    meant = facts.wanted == "independent" or (others and all(s.law.overlap == 0 for s in others))
    if not meant or not (bare or (shifted and facts.wanted is None)):
        return None
    return (
        f"modulations are centred elsewhere, but not in the input of {_names(bare or shifted)}: "
        "what the last hidden layer has in common couples all members",
        f"add a centred post modulation there, such as post={{{(bare or shifted)[0]!r}: "
        "laws.Normal()}, or sites='hidden' with the default laws",
    )


def shared_output_bias(facts: Facts) -> Trouble:
    """A bias of the output layer that members of an independent ensemble share."""
    centred = facts.last and None not in facts.last.values() and not facts.shifted
    others = facts.ensemble.members - 1
    pull = facts.bias_part * others
    if not facts.biases or not centred or facts.collective or pull < BIASED:
        return None
    return (
        f"members are independent but for the shared bias of {_names(facts.biases)}: through it "
        f"the {others} others together, whose pulls add up, pull on a member {pull:.2g} times "
        "as strongly as it does itself (on these samples, now)",
        "leave the bias of the output layer out (bias=False), or freeze it "
        "(bias.requires_grad_(False))",
    )


def input_modulations(facts: Facts) -> Trouble:
    """Modulations of an input with few channels."""
    inputs = [s for s in facts.sites if s.kind == "post" and not s.hidden]
    narrow = [s for s in inputs if s.size <= NARROW]
    alive = facts.report.norms[facts.report.norms > 0]
    spread = float(alive.max() / alive.min()) if len(alive) else 1.0
    if not inputs or not (narrow or spread > SPREAD):
        return None
    site = (narrow or inputs)[0]
    return (
        f"the {site.size} channels of the network's input are modulated (layer {site.layer!r}): "
        "some members see next to nothing of it; their gradients differ in length by a factor of "
        f"{spread:.3g}",
        "leave the input alone: sites='hidden'",
    )


def output_modulations(facts: Facts) -> Trouble:
    """Modulations of the outputs themselves."""
    outputs = [s for s in facts.sites if s.kind == "pre" and not s.hidden]
    if not outputs:
        return None
    return (
        f"the outputs of {_names([s.layer for s in outputs])} are modulated: every class gets a "
        "random scale and sign in each member, which does not make members independent",
        "leave the outputs alone: sites='hidden'",
    )


def converging_modulations(facts: Facts) -> Trouble:
    """Members that differ in the last layer alone, by numbers that are trained."""
    alone = facts.sites and all(s.kind == "post" and s.layer in facts.last for s in facts.sites)
    if not alone or not any(s.trainable for s in facts.sites):
        return None
    return (
        "members differ in the input of the last layer alone, and these modulations are trained: "
        "they all descend the same convex loss and converge to one another",
        "freeze them (trainable=False, as last_layer_dropout does), or modulate the other hidden "
        "sites as well",
    )


def large_gamma(facts: Facts) -> Trouble:
    """A gradient scale for independent members where they pull together."""
    natural, meant = facts.report.gamma, facts.report.gamma_as_meant
    if not facts.collective or meant <= (FAST_GIVEN if facts.gamma_given else FAST) * natural:
        return None
    return (
        f"gamma={meant:g}, but members pull together: the effective rate of what they have in "
        f"common is {meant / natural:.3g} times too large",
        f"use gamma={natural:.3g}, or divide the rate of the shared parameters",
    )


def decayed_modulations(facts: Facts) -> Trouble:
    """Weight decay on modulations."""
    modulations = {id(p) for p in facts.ensemble.individual_parameters() if p.requires_grad}
    if facts.optimizer is None or not facts.sites or not modulations:
        return None
    if isinstance(facts.optimizer, torch.optim.Optimizer):
        groups = facts.optimizer.param_groups
        groups = [g for g in groups if any(id(p) in modulations for p in g["params"])]
    else:  # a class decays all that it is given by its default
        usual = inspect.signature(optimizer_class(facts.optimizer)).parameters
        groups = [{name: parameter.default for name, parameter in usual.items()}]
    decay = [d for g in groups if isinstance(d := g.get("weight_decay"), (int, float))]
    if not any(decay):
        return None
    return (
        f"the modulations have a weight decay of {max(decay):g}, which pulls all members to the "
        "same point",
        "give the optimizer ensemble.parameter_groups(lr=…, weight_decay=…), which decays the "
        "shared parameters alone",
    )


def cancelled_gamma(facts: Facts) -> Trouble:
    """An optimizer that divides by the size of the gradient, and gamma with it."""
    meant = facts.report.gamma_as_meant
    if facts.optimizer is None or meant == 1.0 or facts.ensemble.plan.separate:
        return None
    kind, factor = optimizer_class(facts.optimizer), meant / facts.report.gamma
    if not _is_scale_free(kind):
        return None
    rate = "as it is" if abs(factor - 1) < 1e-9 else f"times {factor:.3g}"
    return (
        f"{kind.__name__} divides by the size of the gradient, and so cancels gamma={meant:.3g}",
        f"put it into the rate of the shared parameters instead (the natural one {rate}): "
        "embens.fit does, in your own loop ensemble.parameter_groups(…, "
        f"optimizer=torch.optim.{kind.__name__}) does; or use SGD",
    )


Check = Callable[[Facts], Trouble]
ALONE: tuple[Check, ...] = (input_modulations, output_modulations, cancelled_gamma)
CHECKS: tuple[Check, ...] = (
    equal_members,
    shifted_laws,
    uncentred_last_layer,
    shared_output_bias,
    input_modulations,
    output_modulations,
    converging_modulations,
    large_gamma,
    decayed_modulations,
    cancelled_gamma,
)


def find(facts: Facts) -> list[Finding]:
    """Return what the checks find."""
    checks = ALONE if facts.ensemble.members == 1 else CHECKS  # others are between members
    found = {check.__name__.replace("_", "-"): check(facts) for check in checks}
    return [Finding(code, *trouble) for code, trouble in found.items() if trouble is not None]


def optimizer_class(optimizer: Any) -> type[torch.optim.Optimizer]:
    """Return the class of an optimizer that is given as such, as its class, or by its name."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return type(optimizer)
    if isinstance(optimizer, str):
        names = {n.lower(): n for n in torch.optim.__all__ if n[0].isupper() and n != "Optimizer"}
        known = names.get(optimizer.lower(), optimizer)
        return getattr(torch.optim, check_choice("optimizer", known, names.values()))
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        return optimizer
    raise TypeError(
        f"optimizer: expected a torch optimizer, its class or its name; got {optimizer!r}"
    )


def _is_scale_free(kind: type[torch.optim.Optimizer]) -> bool:
    try:
        return kind_of(kind).scale_free  # type: ignore[arg-type]
    except TypeError:  # one that needs a closure, such as LBFGS
        return False
    except RuntimeError:  # one that takes sparse gradients alone: SparseAdam
        return "Adam" in kind.__name__


def output_biases(ensemble: EmbeddedEnsemble, structure: Structure) -> dict[str, Tensor]:
    """Return the biases of the last layers that members share and that can be trained."""
    shared = {id(p) for p in ensemble.shared_parameters() if p.requires_grad}
    biases = {name: getattr(structure.layers[name], "bias", None) for name in structure.last}
    return {name: b for name, b in biases.items() if isinstance(b, Tensor) and id(b) in shared}


def _names(layers: Iterable[str]) -> str:
    return "the layer " + ", ".join(map(repr, layers))
