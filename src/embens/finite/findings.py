"""Known problems of embedded ensembles, each with its fix.

A check is a function of :class:`Facts` that returns a :class:`Problem` or None. ``CHECKS`` maps the
code of each finding to its check.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from embens.checks import check_choice
from embens.ensemble import EmbeddedEnsemble
from embens.finite.diagnosis import Diagnosis, Finding
from embens.laws import Law

NARROW = 8
"""Modulations of inputs with up to this many channels do not average out."""

SPREAD = 10.0
"""Ratio of the longest to the shortest gradient of two members that is reported."""

DEFAULT_GAMMA_EXCESS = 1.5
"""Ratio of the default gamma to the natural one that is reported."""

CHOSEN_GAMMA_EXCESS = 1.15
"""The same for a gamma that was passed."""

NEARLY_EQUAL = 0.98
"""Cosine of gradients, and coupling, from which members count as one model."""

BIASED = 0.5
"""Effect of other members through output biases that is reported, relative to that of a member."""


class Problem(NamedTuple):
    """A problem and its fix."""

    message: str
    fix: str


@dataclass(frozen=True)
class Facts:
    """Facts about an ensemble, the input of all checks.

    Attributes:
        ensemble: The ensemble.
        diagnosis: Measurements and suggestions.
        last: The last layers, with the law of the post modulation of their inputs, or None.
        coupled_sites: The last layers with a law that is not centred or correlates members.
        sites: The sites at which members differ.
        collective: True if members are coupled in the limit by more than output biases.
        biases: The last layers with a trainable shared bias.
        bias_part: Their coupling in the limit, or their part in the cosine of two gradients.
        gamma_chosen: True if gamma was passed.
        optimizer: As passed to :func:`embens.diagnose`.
        wanted: As passed to :func:`embens.diagnose`.
    """

    ensemble: EmbeddedEnsemble
    diagnosis: Diagnosis
    last: Mapping[str, Law | None]
    coupled_sites: list[str]
    sites: list[Any]
    collective: bool
    biases: list[str]
    bias_part: float
    gamma_chosen: bool = False
    optimizer: Any = None
    wanted: str | None = None


def equal_members(facts: Facts) -> Problem | None:
    """Report members that are the same model."""
    if not facts.diagnosis.one_model:
        return None
    different_laws = dict.fromkeys(repr(site.law) for site in facts.ensemble.spec.sites)
    laws = ", ".join(different_laws)
    nearly = "" if facts.diagnosis.coupling == 1 else "nearly "
    return Problem(
        f"all {facts.ensemble.members} members are {nearly}one model ({laws}; cosine of their "
        f"gradients {facts.diagnosis.cosine.mean:.3g}): they make the same predictions and get the "
        "same gradients, at the cost of different models",
        "use a law that distinguishes members, such as laws.Normal() or a smaller p in "
        "batch_ensemble, or use the reference alone",
    )


def shifted_laws(facts: Facts) -> Problem | None:
    """Report laws with a mean where independent members are wanted."""
    if facts.wanted != "independent" or not facts.collective or not facts.coupled_sites:
        return None
    law = facts.last[facts.coupled_sites[0]]
    return Problem(
        "independent members are wanted, but the law of the modulations in the input of "
        f"{_names(facts.coupled_sites)} is not centred ({law!r}), which couples members",
        "use a centred law there, such as laws.Normal() or p=0 in batch_ensemble",
    )


def uncentred_last_layer(facts: Facts) -> Problem | None:
    """Report modulations that are centred except in the input of the last layer."""
    if not facts.collective or not facts.sites:
        return None
    unmodulated = [name for name, law in facts.last.items() if law is None]
    elsewhere = []
    for site in facts.sites:
        if site.kind != "post" or site.layer not in facts.last:
            elsewhere.append(site)
    centred_elsewhere = False
    if elsewhere:
        centred_elsewhere = all(site.law.overlap == 0 for site in elsewhere)
    if facts.wanted == "independent":
        layers = unmodulated  # laws with a mean are reported by shifted_laws
    elif centred_elsewhere:
        layers = unmodulated or facts.coupled_sites
    else:
        layers = []
    if not layers:
        return None
    return Problem(
        f"modulations are centred elsewhere, but not in the input of {_names(layers)}: the common "
        "part of the last hidden layer couples all members",
        f"add a centred post modulation there, such as post={{{layers[0]!r}: laws.Normal()}}, or "
        "use sites='hidden' with the default laws",
    )


def shared_output_bias(facts: Facts) -> Problem | None:
    """Report a shared bias of the output layer of independent members."""
    laws = facts.last.values()
    centred = bool(laws) and None not in laws and not facts.coupled_sites
    other_members = facts.ensemble.members - 1
    strength = facts.bias_part * other_members
    if not facts.biases or not centred or facts.collective or strength < BIASED:
        return None
    return Problem(
        f"members are independent except for the shared bias of {_names(facts.biases)}: through it "
        f"the {other_members} others together change a member {strength:.2g} times as strongly as "
        "it changes itself (on these samples, at the current weights)",
        "remove the bias of the output layer (bias=False), or freeze it "
        "(bias.requires_grad_(False))",
    )


def input_modulations(facts: Facts) -> Problem | None:
    """Report modulations of an input with few channels."""
    inputs = [site for site in facts.sites if site.kind == "post" and not site.hidden]
    narrow = [site for site in inputs if site.size <= NARROW]
    nonzero = facts.diagnosis.norms[facts.diagnosis.norms > 0]
    spread = 1.0
    if len(nonzero) > 0:
        spread = float(nonzero.max() / nonzero.min())
    if not inputs or not (narrow or spread > SPREAD):
        return None
    site = narrow[0] if narrow else inputs[0]
    return Problem(
        f"the {site.size} channels of the network's input are modulated (layer {site.layer!r}): "
        "some members see almost nothing of it, and the norms of their gradients differ by a "
        f"factor of {spread:.3g}",
        "do not modulate the input: sites='hidden'",
    )


def output_modulations(facts: Facts) -> Problem | None:
    """Report modulations of the outputs."""
    layers = [site.layer for site in facts.sites if site.kind == "pre" and not site.hidden]
    if not layers:
        return None
    return Problem(
        f"the outputs of {_names(layers)} are modulated: every class gets a random scale and sign "
        "in each member, which does not make members independent",
        "do not modulate the outputs: sites='hidden'",
    )


def converging_modulations(facts: Facts) -> Problem | None:
    """Report members that differ only in trainable modulations of the last layer."""
    if not facts.sites or not any(site.trainable for site in facts.sites):
        return None
    for site in facts.sites:
        if site.kind != "post" or site.layer not in facts.last:
            return None
    return Problem(
        "members differ only in the input of the last layer, and these modulations are trained: "
        "all members descend the same convex loss and become equal",
        "freeze the modulations (trainable=False, as in last_layer_dropout), or modulate the other "
        "hidden sites as well",
    )


def crowded_last_layer(facts: Facts) -> Problem | None:
    """Report fixed masks of the last layer that leave no room for all members.

    Every member needs one direction of the last hidden layer for each output. Members share
    directions as far as their masks overlap. The shared weights fit all members only if there are
    at least as many features as different directions, members × outputs × (1 − overlap).
    """
    members = facts.ensemble.members
    for site in facts.sites:
        if site.kind != "post" or site.layer not in facts.last:
            return None
        if site.trainable or site.fresh:
            return None
    for site in facts.sites:
        layer = facts.ensemble.layers[site.layer]
        if layer.inputs is None or layer.outputs is None:
            continue
        directions = members * layer.outputs * (1 - max(site.law.overlap, 0.0))
        if directions > layer.inputs:
            return Problem(
                f"members differ only in masks of the {layer.inputs} features before "
                f"{site.layer!r}, and {members} members × {layer.outputs} outputs are too many for "
                f"{site.law!r}: the shared weights cannot fit all members, which costs accuracy",
                f"use masks that overlap more, such as laws.Bernoulli(0.9), at most "
                f"{max(1, layer.inputs // layer.outputs)} members, or more features",
            )
    return None


def large_gamma(facts: Facts) -> Problem | None:
    """Report a gradient scale for independent members where members are coupled."""
    natural = facts.diagnosis.gamma
    planned = facts.diagnosis.planned_gamma
    excess = CHOSEN_GAMMA_EXCESS if facts.gamma_chosen else DEFAULT_GAMMA_EXCESS
    if not facts.collective or planned <= excess * natural:
        return None
    return Problem(
        f"gamma={planned:g}, but the gradients of members add up: the effective learning rate of "
        f"the shared parameters is {planned / natural:.3g} times too large",
        f"use gamma={natural:.3g}, or a smaller learning rate for the shared parameters",
    )


def decayed_modulations(facts: Facts) -> Problem | None:
    """Report weight decay on modulations."""
    modulations = {id(p) for p in facts.ensemble.individual_parameters() if p.requires_grad}
    if facts.optimizer is None or not facts.sites or not modulations:
        return None
    decay = _largest_decay(facts.optimizer, modulations)
    if decay == 0:
        return None
    return Problem(
        f"the modulations have a weight decay of {decay:g}, which moves all members to the same "
        "point",
        "pass ensemble.parameter_groups(lr=…, weight_decay=…) to the optimizer, which decays only "
        "the shared parameters",
    )


def cancelled_gamma(facts: Facts) -> Problem | None:
    """Report an optimizer that divides by the size of the gradient, and cancels gamma."""
    planned = facts.diagnosis.planned_gamma
    if facts.optimizer is None or planned == 1.0 or facts.ensemble.spec.separate:
        return None
    kind = optimizer_class(facts.optimizer)
    if not ignores_gradient_scale(kind):
        return None
    factor = planned / facts.diagnosis.gamma
    rate = "unchanged" if abs(factor - 1) < 1e-9 else f"times {factor:.3g}"
    return Problem(
        f"{kind.__name__} divides by the size of the gradient, which cancels gamma={planned:.3g}",
        f"scale the learning rate of the shared parameters instead (the natural one {rate}): "
        "embens.fit does; in a hand-written loop use ensemble.parameter_groups(…, "
        f"optimizer=torch.optim.{kind.__name__}), or use SGD",
    )


Check = Callable[[Facts], Problem | None]

CHECKS: dict[str, Check] = {
    "equal-members": equal_members,
    "shifted-laws": shifted_laws,
    "uncentred-last-layer": uncentred_last_layer,
    "shared-output-bias": shared_output_bias,
    "input-modulations": input_modulations,
    "output-modulations": output_modulations,
    "converging-modulations": converging_modulations,
    "crowded-last-layer": crowded_last_layer,
    "large-gamma": large_gamma,
    "decayed-modulations": decayed_modulations,
    "cancelled-gamma": cancelled_gamma,
}
"""All checks by the codes of their findings."""

SINGLE_MEMBER_CODES = ("input-modulations", "output-modulations", "cancelled-gamma")
"""Codes of the checks that make sense for an ensemble of one member."""


def find(facts: Facts) -> list[Finding]:
    """Return the problems that the checks report.

    Args:
        facts: Facts about the ensemble.
    """
    findings = []
    for code, check in CHECKS.items():
        if facts.ensemble.members == 1 and code not in SINGLE_MEMBER_CODES:
            continue
        problem = check(facts)
        if problem is not None:
            findings.append(Finding(code, problem.message, problem.fix))
    return findings


def optimizer_class(optimizer: Any) -> type[torch.optim.Optimizer]:
    """Return the class of an optimizer.

    Args:
        optimizer: An optimizer, its class, or its name in ``torch.optim``.

    Example:
        >>> optimizer_class("adamw").__name__
        'AdamW'
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return type(optimizer)
    if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        return optimizer
    if isinstance(optimizer, str):
        names = {}
        for name in torch.optim.__all__:
            if name[0].isupper() and name != "Optimizer":
                names[name.lower()] = name
        name = names.get(optimizer.lower(), optimizer)
        return getattr(torch.optim, check_choice("optimizer", name, names.values()))
    raise TypeError(
        f"optimizer must be a torch optimizer, its class or its name, got {optimizer!r}."
    )


def ignores_gradient_scale(kind: type[torch.optim.Optimizer]) -> bool:
    """Return True if an optimizer takes the same steps for any multiple of the gradient.

    Args:
        kind: A class of optimizers, which is tried on a small parameter.

    Example:
        >>> ignores_gradient_scale(torch.optim.Adam), ignores_gradient_scale(torch.optim.SGD)
        (True, False)
    """
    try:
        small = _trial_step(kind, 1.0)
        large = _trial_step(kind, 8.0)
    except TypeError:  # step() needs a closure, as in LBFGS
        return False
    except RuntimeError:  # gradients must be sparse, as in SparseAdam
        return "Adam" in kind.__name__
    size = float(small.norm())
    return size > 0 and float((large - small).norm()) <= 0.01 * size


def _trial_step(kind: Callable[..., torch.optim.Optimizer], scale: float) -> Tensor:
    """Return the tenth step on a small parameter; some optimizers need a few steps to start."""
    start = torch.linspace(1.0, 2.0, 6).reshape(2, 3)
    parameter = nn.Parameter(start.clone())
    optimizer = kind([{"params": [parameter], "lr": 0.01, "weight_decay": 0.0}])
    before = start
    for turn in range(10):
        before = parameter.detach().clone()
        parameter.grad = scale * torch.cos(start * (3.0 + turn) * 2)
        optimizer.step()
    return parameter.detach() - before


def _largest_decay(optimizer: Any, modulations: set[int]) -> float:
    """Return the largest weight decay of the modulations, given by the ids of parameters."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        # A class applies its default weight decay to all parameters.
        parameters = inspect.signature(optimizer_class(optimizer)).parameters
        if "weight_decay" not in parameters:
            return 0.0
        return float(parameters["weight_decay"].default)
    decays = [0.0]
    for group in optimizer.param_groups:
        if any(id(parameter) in modulations for parameter in group["params"]):
            decays.append(float(group.get("weight_decay", 0.0)))
    return max(decays)


def _names(layers: Iterable[str]) -> str:
    return "the layer " + ", ".join(repr(layer) for layer in layers)
