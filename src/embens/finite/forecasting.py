r"""``embens.forecast``: what an ensemble will be worth, before it is trained.

A *probe* trains two members, and beside them two separate networks, for a few steps, and then
solves for the last layers of all four: what these *readouts* answer for other rows is as if the
training of this layer were over. What it shows, what laws and plan say, and what became of many
ensembles that were probed and trained to their end (:mod:`embens.finite.experience`) give the
forecast. ``benchmarks/forecast.py`` judges forecasts on tasks that nothing was fixed by, with the
errors that ``docs/how-to/is-my-ensemble-an-ensemble.md`` has.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from embens import metrics
from embens.checks import Gamma, check_members, check_number, check_whole, gradient_factor, suggest
from embens.embedding.families import batch_ensemble, independent
from embens.ensemble import EmbeddedEnsemble
from embens.ensemble.rates import MakeOptimizer, kind_of
from embens.ensemble.wrapping import without_members
from embens.finite import checks
from embens.finite.diagnosis.measurement import take
from embens.finite.experience import TINY, Probe, expect
from embens.finite.gradients import off_diagonal
from embens.objective import check_labels
from embens.theory.regime import Structure

COST = 0.02  # of the planned training's time, for steps
STEP = 4e7  # floating-point operations that take as long as all that a step does beside them
MEMBERS, SEPARATE = 2, 2  # at most trained, and networks beside them
HELD, READ, STEPS = 500, 400, 8  # at most: rows held out, rows of readouts; at least: steps
RIDGE = 0.01  # of the mean square of what a readout reads
LEAST = 64  # rows with which a forecast can be made at all
REACH = 1.28  # standard deviations on either side that hold 80 %
ENOUGH = 8  # members have 7/8 of all that there is to gain
ONE_MODEL = 0.8  # correlation above which more members are not worth their cost
SEEDS = 0.01  # by which the accuracy of a network differs from draw to draw
SGD = functools.partial(torch.optim.SGD, momentum=0.9)


@dataclass(frozen=True)
class Estimate:
    """A number to expect, and the ends of an interval that holds it in 80 % of cases."""

    value: float
    low: float
    high: float

    def __float__(self) -> float:
        return self.value


@dataclass(frozen=True)
class Forecast:
    """What to expect of an ensemble on data like that held out; see :func:`forecast`.

    Correlation is that of two members' correctness, disagreement how often they will predict
    different classes, ``nll`` the log loss. The reference is the network alone, ``separate_…`` are
    as many separate networks; gains are of accuracy, over the reference or over these.
    ``best_members`` have nearly all of the gain; ``notes`` say what went wrong.
    """

    correlation: Estimate
    separate_correlation: Estimate
    disagreement: Estimate
    member_accuracy: Estimate
    accuracy: Estimate
    nll: Estimate
    reference_accuracy: Estimate
    reference_nll: Estimate
    separate_accuracy: Estimate
    separate_nll: Estimate
    gain: Estimate
    gain_over_separate: Estimate
    best_members: Estimate
    members: int
    probe: Probe
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """One sentence: do members differ, what is gained, how many are enough."""
        low, high = (round(100 * end) for end in (self.correlation.low, self.correlation.high))
        separate = f"separate networks: {100 * self.separate_correlation.value:.0f} %"
        few, many = (100 * end for end in (self.gain.low, self.gain.high))
        gain = f"expect {few:+.0f} to {many:+.0f} points over one network"
        if self.members == 1:
            return f"{gain.capitalize()}."
        alone = self.best_members.value == 1
        return (
            f"Members will {'be nearly one model: they will ' if alone else ''}agree on "
            f"{low}–{high} % of their errors ({separate}); {gain}"
            f"; {'one network' if alone else f'M = {self.best_members.value:.0f}'} is enough."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as numbers, strings, lists and dicts."""
        return asdict(self) | {"verdict": self.verdict}

    def __str__(self) -> str:
        def line(name: str, *values: Estimate) -> str:
            told = "   ".join(f"{v.value:6.3f} ({v.low:.3f} to {v.high:.3f})" for v in values)
            return f"{name:22}{told}"

        rows = [
            self.verdict,
            f"{'':22}{'ensemble':>9}{'':21}separate networks",
            line("correlation", self.correlation, self.separate_correlation),
            line("accuracy", self.accuracy, self.separate_accuracy),
            line("log loss", self.nll, self.separate_nll),
            line("accuracy of a member", self.member_accuracy, self.reference_accuracy),
            line("disagreement", self.disagreement),
            line("gain over one network", self.gain),
            f"(80 % intervals; {self.members} members, from a probe of "
            f"{100 * self.probe.done:.1f} % of {self.probe.steps} steps)",
        ]
        return "\n".join([*rows, *(f"note: {note}" for note in self.notes)])


@suggest()
def forecast(
    ensemble: EmbeddedEnsemble | nn.Module,
    x: Any,
    target: Any,
    *,
    epochs: int = 30,
    members: int | None = None,
    batch_size: int = 128,
    lr: float = 0.01,
    modulation_lr: float | None = None,
    weight_decay: float = 5e-4,
    gamma: Gamma = None,
    optimizer: MakeOptimizer | None = None,
    seed: int = 0,
) -> Forecast:
    """Say what an ensemble will be worth after a training that is planned, from a few of its steps.

    The ensemble is not changed, and the result depends on the arguments alone. The training itself
    is that of :func:`embens.fit` with the same arguments.

    Args:
        ensemble: of any family, untrained; or a network, for ``batch_ensemble`` of it. Adapted
            ensembles of pretrained networks are refused: nothing is known of these.
        x: the inputs that will be trained on: a tensor, or a tuple or dict of them.
        target: their classes.
        epochs: how many are planned.
        members: for so many members; None: those of the ensemble, 8 of a network.
        batch_size: samples in a step.
        lr: rate of the shared parameters.
        modulation_lr: of the members' own; None: ``lr``.
        weight_decay: of the shared parameters.
        gamma: factor of the shared rate; None: the natural value.
        optimizer: a function from parameter groups to an optimizer; None: SGD with momentum 0.9.
        seed: of the rows that are held out, and of the training.

    Example:
        >>> from embens import data, networks
        >>> digits = data.digits().standardise().flatten()
        >>> net = networks.mlp(64, 32, 2, 10, generator=torch.Generator().manual_seed(0))
        >>> found = forecast(net, *digits.train, epochs=20)
        >>> found.correlation.low < found.correlation.value < found.correlation.high
        True
    """
    check_whole("epochs", epochs)
    check_whole("batch_size", batch_size)
    check_number("lr", lr, "a number above 0", lambda rate: rate > 0)
    if not isinstance(ensemble, EmbeddedEnsemble):
        if not isinstance(ensemble, nn.Module):
            raise TypeError(f"expected an ensemble or a network; got {type(ensemble).__name__}")
        drawn = torch.Generator().manual_seed(seed)
        ensemble = batch_ensemble(ensemble, members or 8, generator=drawn)
    if ensemble.plan.pretrained:
        raise ValueError(
            "forecasts are of networks that are trained from scratch, and wrong for an ensemble "
            "that begins as a pretrained network: train it, and look at rows that you hold out"
        )
    count = ensemble.members if members is None else check_members(members)
    checks.check_inputs(x)
    target = _classes(target)
    checks.check_target(x, target)
    plan = {"lr": lr, "modulation_lr": modulation_lr, "weight_decay": weight_decay, "gamma": gamma}
    plan |= {"batch_size": batch_size, "optimizer": optimizer or SGD, "seed": seed}
    planned = epochs * math.ceil(len(target) / batch_size)
    probe, notes = run_probe(ensemble, x, target, planned, plan)
    return carry(probe, count, notes)


def run_probe(
    ensemble: EmbeddedEnsemble, x: Any, target: Tensor, planned: int, plan: dict[str, Any]
) -> tuple[Probe, tuple[str, ...]]:
    """Train for a small part of the planned steps; return what it showed, and what went wrong."""
    generator, members = torch.Generator().manual_seed(plan["seed"]), ensemble.members
    order = torch.randperm(len(target), generator=generator)
    held, train = order.split([count := min(HELD, len(order) // 3), len(order) - count])
    batch = min(plan["batch_size"], len(train))
    reference, some = _reference(ensemble), ensemble.subset(range(min(MEMBERS, members)))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        args, named = ensemble.bind(take(x, train[:batch]))
        logits = reference(*args, **named)
    check_labels("target", target, logits.shape[-1])
    step = STEP / max(1, 3 * counter.get_total_flops())  # and backward takes twice as long
    share = COST * (step + members) / (2 * step + some.members + SEPARATE)
    steps = min(planned, max(STEPS, round(share * planned)))
    rate = gradient_factor(plan["gamma"], members, ensemble.natural_gamma)
    pace = rate * members / ensemble.natural_gamma
    wanted = F.one_hot(target[train[:READ]], classes := int(target.max()) + 1).double()
    readable = (*ensemble.bind(take(x, torch.cat([train[:READ], held]))), wanted)
    labels, notes = target[held], []

    def trained(one: EmbeddedEnsemble, gamma: Gamma) -> dict[str, float]:
        rates = (plan[name] for name in ("lr", "modulation_lr", "weight_decay"))
        make = plan["optimizer"]
        optimizer = make(one.parameter_groups(*rates, gamma=gamma, optimizer=make))
        turns = range(math.ceil(steps * batch / len(train)) + 1)
        turns = [train[torch.randperm(len(train), generator=generator)] for _ in turns]
        one.train()
        for rows in torch.cat(turns).split(batch)[:steps]:
            args, named = one.bind(take(x, rows))
            outputs = one(*args, **named)
            targets = target[rows].expand(len(outputs), -1).flatten()
            loss = F.cross_entropy(outputs.flatten(0, 1), targets) * len(outputs)
            if not loss.isfinite():
                notes.append("the probe diverged at the planned rate: take a smaller one")
                break
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

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # members that are always right
        mine = trained(some, pace * some.natural_gamma)
        alone = trained(independent(reference, SEPARATE, generator=generator), None)
    given = {"classes": math.log(classes)} | describe(
        ensemble, reference, plan, len(target), planned
    )
    return Probe(members, planned, steps / planned, given, mine, alone), tuple(dict.fromkeys(notes))


def describe(
    ensemble: EmbeddedEnsemble,
    reference: nn.Module,
    plan: dict[str, Any],
    rows: int,
    planned: int,
) -> dict[str, float]:
    """Return what laws, network and plan are, as numbers; of sizes and rates the logarithms."""
    layers = [p.detach() for p in reference.parameters() if p.dim() > 1]
    scales = [float(p.square().mean().sqrt() * p[0].numel() ** 0.5) + TINY for p in layers]
    free, members = kind_of(plan["optimizer"]).scale_free, ensemble.members
    rate = gradient_factor(plan["gamma"], members, ensemble.natural_gamma)
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


def carry(probe: Probe, members: int, notes: tuple[str, ...] = ()) -> Forecast:
    """Carry what a probe said to the end of training, for this number of members."""
    means, errors = expect(probe)
    if probe.mine["alike"] > 1 - TINY:  # equal members stay equal, and are the network itself
        means |= {"correlation": 1.0, "disagreement": 0.0, "lead": 0.0, "more": 0.0}
        means |= {"lead_log_nll": 0.0, "more_log_nll": 0.0}
        errors |= {"correlation": 0.0, "disagreement": 0.0, "gain": SEEDS}
    share = 1 - 1 / members
    gain = means["lead"] + share * means["more"]
    separate = share * max(0.0, means["separate_more"])
    half = REACH * errors["gain"]

    def around(name: str, more: float = 0.0, link: Callable[[float], float] = _unit) -> Estimate:
        return _around(means[name], REACH * errors[name], lambda v: _unit(link(v) + more))

    def accuracy(more: float) -> Estimate:
        return around("logit", more, lambda v: 1 / (1 + math.exp(-v)))

    def loss(more: float) -> Estimate:
        return _around(means["log_nll"] + more, REACH * errors["log_nll"], math.exp)

    correlation = around("correlation")
    enough = (1, 1, 1) if correlation.value > ONE_MODEL else (ENOUGH, ENOUGH // 2, 2 * ENOUGH)
    return Forecast(
        correlation=correlation,
        separate_correlation=around("separate_correlation"),
        disagreement=around("disagreement"),
        member_accuracy=accuracy(means["lead"]),
        accuracy=accuracy(gain),
        nll=loss(means["lead_log_nll"] + share * means["more_log_nll"]),
        reference_accuracy=accuracy(0.0),
        reference_nll=loss(0.0),
        separate_accuracy=accuracy(separate),
        separate_nll=loss(share * min(0.0, means["separate_more_log_nll"])),
        gain=_around(gain, half, lambda v: min(v, max(gain, 1 - accuracy(0.0).value))),
        gain_over_separate=_around(gain - separate, half),
        best_members=Estimate(*enough),
        members=members,
        probe=probe,
        notes=notes,
    )


def _around(value: float, half: float, link: Callable[[float], float] = lambda v: v) -> Estimate:
    return Estimate(link(value), link(value - half), link(value + half))


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


def _classes(target: Any) -> Tensor:
    if not isinstance(target, Tensor) or target.is_floating_point() or target.dim() != 1:
        raise TypeError(
            "a forecast is made for classes: target must be a tensor (n,) of whole numbers; got "
            f"{type(target).__name__} {getattr(target, 'dtype', '')}"
        )
    if len(target) < LEAST:
        raise ValueError(f"a forecast needs at least {LEAST} samples; got {len(target)}")
    if (low := int(target.min())) < 0 or low == int(target.max()):
        raise ValueError(
            "target: expected two classes or more, counted from 0; got "
            f"{target.unique().tolist()[:5]}. Leave out rows without a label."
        )
    return target.long()


def _unit(value: float) -> float:
    return min(max(value, 0.0), 1.0)
