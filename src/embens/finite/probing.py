"""A probe: what laws and plan say, and what a short training and readouts show.

Two members, and beside them two separate networks, are trained for a few of the planned steps; then
the last layers of all four are solved for, by ridge regression. What these *readouts* answer for
rows that were held out is as if the training of this layer were over.
"""

import contextlib
import math
import statistics
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from embens import metrics
from embens.checks import Gamma, gradient_factor
from embens.embedding.families import independent
from embens.ensemble import EmbeddedEnsemble
from embens.ensemble.rates import gamma_of, kind_of
from embens.ensemble.wrapping import without_members
from embens.finite.diagnosis.measurement import take
from embens.finite.gradients import off_diagonal, unchanged
from embens.objective import check_labels
from embens.theory.regime import Structure

COST = 0.02  # of the planned training's time, for steps
STEP = 4e7  # floating-point operations that take as long as all that a step does beside them
MEMBERS, SEPARATE = 2, 2  # at most trained, and networks beside them
HELD, READ, STEPS = 500, 400, 8  # at most: rows held out, rows of readouts; at least: steps
SEEN = 64  # at least: rows of a first look
RIDGE = 0.01  # of the mean square of what a readout reads
TRAINED = 0.7  # of the loss of knowing the classes' shares alone: what has less has learnt
TINY = 1e-6


@dataclass(frozen=True)
class Probe:
    """What laws and plan say, and what a short training and readouts showed on rows held out.

    Attributes:
        members, steps: of the plan; ``done``: the part of these steps that was trained.
        plan: numbers of the plan as features, of sizes and rates the logarithms.
        mine: of two members: how ``alike`` their probabilities are within classes, their ``nll``,
            and ``accuracy`` and ``correlation`` of their readouts.
        alone: the same of separate networks.
        separate: whether members are separate networks themselves.
        overlap: of their laws, for other numbers of members.
    """

    members: int
    steps: int
    done: float
    plan: dict[str, float]
    mine: dict[str, float]
    alone: dict[str, float]
    separate: bool = False
    overlap: float = 0.0

    def of(self, members: int) -> "Probe":
        """Return the same for another number of members, at the natural gradient scale."""
        plan = self.plan | {"members": math.log(members)}
        plan["crowd"] = plan["members"] if plan["scale_free"] else 0.0
        plan["rate"] = math.log(gamma_of(members, self.overlap) / members)
        return replace(self, members=members, plan=plan)

    def features(self) -> dict[str, float]:
        """Return what a forecast is made from: the plan, and what was seen."""
        mine, alone = self.mine, self.alone
        guess = math.log(math.exp(self.plan["classes"]) + 1)  # the loss of knowing nothing
        return {
            **self.plan,
            "alike": mine["alike"],
            "correlation": mine["correlation"],
            "separate correlation": alone["correlation"],
            "logit": logit_of(alone["accuracy"]),
            "nll": alone["nll"] / guess,
            "lead in nll": (mine["nll"] - alone["nll"]) / guess,
        }


def run_probe(
    ensemble: EmbeddedEnsemble,
    x: Any,
    target: Tensor,
    planned: int,
    plan: dict[str, Any],
    members: int | None = None,
) -> Probe:
    """Train for a small part of the planned steps, as if there were so many members."""
    drawn = torch.Generator().manual_seed(plan["seed"])  # for what dropout draws
    with unchanged(ensemble, drawn), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # members that are always right
        return _run(ensemble, x, target, planned, plan, members or ensemble.members)


def _run(
    ensemble: EmbeddedEnsemble,
    x: Any,
    target: Tensor,
    planned: int,
    plan: dict[str, Any],
    members: int,
) -> Probe:
    generator = torch.Generator().manual_seed(plan["seed"])
    order = torch.randperm(len(target), generator=generator)
    held, train = order.split([count := min(HELD, len(order) // 3), len(order) - count])
    batch = min(plan["batch_size"], len(train))
    reference, some = _reference(ensemble), ensemble.subset(range(min(MEMBERS, ensemble.members)))
    if not any(p.requires_grad for p in reference.parameters()):
        raise ValueError(
            "forecasts are of networks that are trained, and the weights that members share are "
            "frozen here: train it, and look at rows that you hold out"
        )
    first = train[: max(batch, SEEN)]
    args, named = ensemble.bind(take(x, first))
    with torch.no_grad():
        with FlopCounterMode(display=False) as counter:
            logits = reference(*args, **named)
        outputs = some(*args, **named)
    check_labels("target", target, logits.shape[-1])
    _warn_of_training([logits, *outputs], target[first], target)
    work = counter.get_total_flops() * batch / len(first)
    step = STEP / max(1, 3 * work)  # and backward takes twice as long
    share = COST * (step + members) / (2 * step + some.members + SEPARATE)
    steps = min(planned, max(STEPS, round(share * planned)))
    natural = ensemble.natural_gamma
    natural = natural if members == ensemble.members else gamma_of(members, ensemble.overlap)
    rate = gradient_factor(plan["gamma"], members, natural)
    pace = rate * members / natural
    wanted = F.one_hot(target[train[:READ]], classes := int(target.max()) + 1).double()
    readable = (*ensemble.bind(take(x, torch.cat([train[:READ], held]))), wanted)
    labels = target[held]

    def trained(one: EmbeddedEnsemble, gamma: Gamma) -> dict[str, float]:
        rates = (plan[name] for name in ("lr", "modulation_lr", "weight_decay"))
        make = plan["optimizer"]
        optimizer = make(one.parameter_groups(*rates, gamma=gamma, optimizer=make))
        turns = range(math.ceil(steps * batch / len(train)) + 1)
        turns = [train[torch.randperm(len(train), generator=generator)] for _ in turns]
        one.train()
        for number, rows in enumerate(torch.cat(turns).split(batch)[:steps]):
            args, named = one.bind(take(x, rows))
            outputs = one(*args, **named)
            targets = target[rows].expand(len(outputs), -1).flatten()
            loss = F.cross_entropy(outputs.flatten(0, 1), targets) * len(outputs)
            if not loss.isfinite():
                raise ValueError(
                    f"training would diverge: the loss is {loss.item()} after {number} steps. Take "
                    "a smaller lr, or inputs of mean 0 and variance 1."
                )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return look(one.eval())

    @torch.no_grad()
    def look(one: EmbeddedEnsemble) -> dict[str, float]:
        args, named = one.bind(take(x, held))
        outputs = _finite(one(*args, **named))
        networks = [one.member(a).eval() for a in range(one.members)]
        read = torch.stack([_read(network, *readable) for network in networks])
        together = metrics.correctness_correlation(read, labels) if one.members > 1 else 1.0
        found = {
            "nll": metrics.member_nll(outputs, labels).mean(),
            "alike": _alike(outputs, labels),
            "accuracy": metrics.member_accuracy(read, labels).mean(),
            "correlation": together,
        }
        return {k: float(torch.as_tensor(v).nan_to_num(1.0)) for k, v in found.items()}

    done, separate = steps / planned, ensemble.plan.separate
    mine = {} if separate else trained(some, pace * some.natural_gamma)
    others = independent(reference, SEPARATE, initialise=_redraw, generator=generator)
    alone = trained(others, None)
    mine = mine or alone
    given = {"classes": math.log(classes)}
    given |= describe(ensemble, reference, plan, len(target), planned, members, rate)
    return Probe(members, planned, done, given, mine, alone, separate, ensemble.overlap)


def _warn_of_training(networks: list[Tensor], target: Tensor, whole: Tensor) -> None:
    """Warn of networks, by their logits, that know more than how frequent classes are."""
    shares = whole.bincount().double() / len(whole)
    guess = float(torch.special.entr(shares).sum())
    loss = min(float(F.cross_entropy(logits, target)) for logits in networks)
    if loss < TRAINED * guess:
        warnings.warn(
            f"this network seems to be trained already: its loss is {loss:.2g}, that of guessing "
            f"{guess:.2g}. A forecast is of a training from scratch, and may be far off here.",
            stacklevel=5,
        )


def _redraw(module: nn.Module) -> None:
    """Draw the parameters of a module anew, if it can; bare parameters stay as they are."""
    reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
    if reset is not None:
        reset()


def describe(
    ensemble: EmbeddedEnsemble,
    reference: nn.Module,
    plan: dict[str, Any],
    rows: int,
    planned: int,
    members: int,
    rate: float,
) -> dict[str, float]:
    """Return what laws, network and plan are, as numbers; of sizes and rates the logarithms."""
    layers = [p.detach() for p in reference.parameters() if p.dim() > 1]
    scales = [float(p.square().mean().sqrt() * p[0].numel() ** 0.5) + TINY for p in layers]
    free = kind_of(plan["optimizer"]).scale_free
    logs = {
        "members": members,
        "epochs": planned * plan["batch_size"] / rows,
        "lr": plan["lr"],
        "rate": max(TINY, rate),  # of the shared parameters, relative to one network's
        "width": statistics.geometric_mean([len(p) for p in layers[:-1]] or [1]),
        "time": planned * (0.01 if free else plan["lr"]),
        "crowd": members if free else 1,  # steps of the Adam kind serve all members at once
        "rows": rows,
        "inputs": layers[0][0].numel() if layers else 1,
        "batch": plan["batch_size"],
        "scale": statistics.geometric_mean(scales or [1]),
    }
    pre, post = (_spread(ensemble, kind) for kind in ("pre", "post"))
    others = {
        "scale_free": free,
        "convolution": any(p.dim() > 2 for p in layers),
        "trained": any(p.requires_grad for p in ensemble.individual_parameters()),
        "likeness": likeness(ensemble),
        **dict(zip(("own v", "tails of v", "v", "own u", "tails of u"), pre + post, strict=False)),
        "depth": len(layers),
        "bias": any(p.dim() == 1 for p in reference.parameters()),
        "norm": any("norm" in type(m).__name__.lower() for m in reference.modules()),
    }
    return {k: math.log(v) for k, v in logs.items()} | {k: float(v) for k, v in others.items()}


def _read(network: nn.Module, args: tuple, named: dict[str, Any], wanted: Tensor) -> Tensor:
    """Return what the best last layer for the first rows answers for the others."""
    last: list[Tensor] = []
    for layer in network.modules():
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() > 1:
            layer.register_forward_pre_hook(lambda _, given: last.extend(given[:1]))
    outputs = network(*args, **named)
    fed = last[-1] if last and len(last[-1]) == len(outputs) else outputs
    seen, other = _finite(fed.flatten(1)).double().tensor_split([count := len(wanted)])
    centre = seen.mean(0)
    gram = (seen - centre) @ (seen - centre).T
    gram.diagonal().add_((RIDGE * gram.trace() / count).clamp(min=TINY))
    weights = torch.linalg.solve(gram, wanted - wanted.mean(0))
    return (other - centre) @ ((seen - centre).T @ weights) + wanted.mean(0)


def _spread(ensemble: EmbeddedEnsemble, kind: str) -> tuple[float, float, float]:
    """Return what laws of a kind leave members of their own, their tails, and if there are any."""
    found = [site.law for site in ensemble.plan.sites if site.kind == kind]
    tails = 0.0
    with contextlib.suppress(NotImplementedError):  # a law of one's own without a kurtosis
        kurtoses = [law.marginal(ensemble.members).kurtosis for law in found]
        tails = statistics.fmean(map(math.log, kurtoses or [1.0]))
    own = statistics.fmean(1 - max(0.0, law.overlap) for law in found) if found else 0.0
    return own, tails, float(bool(found))


def _finite(outputs: Tensor) -> Tensor:
    return outputs.where(outputs.isfinite().all(-1, keepdim=True), 0.0)


def likeness(ensemble: EmbeddedEnsemble) -> float:
    """Return the mean overlap of what two members feed to the shared layers but the last."""
    plan = ensemble.plan
    if plan.separate or plan.heads is not None:
        return 0.0
    structure = Structure(ensemble)
    last = structure.flow.last
    overlaps = {layer: 1.0 for layer in structure.layers if layer not in last}
    for site in plan.sites:
        if not (site.kind == "post" and site.layer in last):
            overlap = overlaps.get(site.layer, 1.0)
            overlaps[site.layer] = overlap * max(0.0, site.law.overlap)
    return statistics.fmean(overlaps.values()) if overlaps else 1.0


def _alike(outputs: Tensor, target: Tensor) -> float:
    """Return the correlation of two members' probabilities within the classes."""
    if len(outputs) < 2:
        return 1.0
    probabilities = outputs.double().softmax(-1)
    for kind in target.unique():
        rows = target == kind
        probabilities[:, rows] -= probabilities[:, rows].mean(1, keepdim=True)
    return float(off_diagonal(torch.corrcoef(probabilities.flatten(1))).nanmean().nan_to_num(1.0))


def _reference(ensemble: EmbeddedEnsemble) -> nn.Module:
    """Return a network like the one that the ensemble was made of."""
    plan = ensemble.plan
    whole = plan.own or plan.heads is not None or plan.low_rank or plan.separate
    return ensemble.member(0) if whole else without_members(ensemble.network)


def logit_of(share: float) -> float:
    """Return the logit of an accuracy that may be 0 or 1."""
    share = min(max(share, 0.01), 0.99)
    return math.log(share / (1 - share))
