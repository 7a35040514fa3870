r"""``embens.forecast``: what an ensemble will be worth, before it is trained.

A *probe* trains the ensemble, and beside it two separate networks, with half of the planned batch
on two thirds of the rows, until :data:`COST` of the arithmetic of the planned training is spent.
What it shows on the other rows (:class:`Probe`: how good and how alike members are, beside
networks alone), what laws and plan say, and what became of some hundred ensembles that were probed
and trained to their end (``experience.json``) give the forecast: a Gaussian process on the features
of these, with one kernel for all quantities, so that forecasts add up as the quantities do.
``benchmarks/forecast.py`` makes the table and judges forecasts on tasks that are not in it;
``docs/how-to/is-my-ensemble-an-ensemble.md`` has the errors.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from embens import metrics
from embens.checks import Gamma, check_members, check_number, check_whole, gradient_factor, suggest
from embens.embedding.families import batch_ensemble, independent, join
from embens.ensemble import EmbeddedEnsemble
from embens.ensemble.rates import MakeOptimizer
from embens.ensemble.wrapping import without_members
from embens.finite import checks
from embens.finite.diagnosis.measurement import effective_widths, take
from embens.finite.gradients import off_diagonal
from embens.prediction import predict
from embens.theory.regime import Structure
from embens.training import Divergence, fit

COST = 0.05  # of the planned training's passes of members over rows
SMALLER = 2  # times smaller batches: more steps for the same cost
SEPARATE = 2  # networks beside the members
MEMBERS, HELD, STEPS = 16, 1000, 8  # at most: members, rows held out; at least: steps
LEAST = 64  # rows with which a forecast can be made at all
REACH = 1.28  # standard deviations on either side that hold 80 %
ENOUGH = 8  # members have 7/8 of all that there is to gain
ONE_MODEL = 0.8  # correlation above which more members are not worth their cost
SEEDS = 0.01  # by which the accuracy of a network differs from draw to draw
TINY = 1e-6
EXPERIENCE = Path(__file__).with_name("experience.json")


@dataclass(frozen=True)
class Estimate:
    """A number that is expected, and the ends of an interval that holds it in 80 % of cases."""

    value: float
    low: float
    high: float

    def __float__(self) -> float:
        return self.value


@dataclass(frozen=True)
class Probe:
    r"""What laws and plan say, and what a short training showed on rows held out.

    Attributes:
        members, classes, steps, epochs: of the plan; ``done``: the part of its steps trained.
        likeness: mean overlap of what two members feed to the shared layers.
        rate: of the shared parameters relative to one network's, :math:`\gamma / M`.
        width: geometric mean of the layers' outputs, but for the last layer.
        tails: logarithm of effective width over width; 0 where it is not known.
        trained: whether members' own numbers are.
        mine: ``accuracy``, ``nll`` and ``train_nll`` of a member, and its ``early`` accuracy
            half-way; ``correlation`` of two members' correctness, ``alike`` of their probabilities
            within classes, ``disagreement``, and what the ensemble has ``more`` in accuracy.
        alone: the same of separate networks.
    """

    members: int
    classes: int
    steps: int
    epochs: float
    done: float
    likeness: float
    rate: float
    width: float
    tails: float
    trained: bool
    mine: dict[str, float]
    alone: dict[str, float]

    def features(self) -> list[float]:
        """Return what a forecast is made from."""
        mine, alone = self.mine, self.alone
        return [
            math.log(self.members),
            math.log(self.classes),
            math.log(self.steps),
            math.log(self.epochs),
            math.log(self.done),
            self.likeness,
            math.log(self.rate),
            math.log(self.width),
            self.tails,
            float(self.trained),
            mine["accuracy"] - alone["accuracy"],
            mine["early"] - alone["early"],
            logit_of(mine["accuracy"]) - logit_of(alone["accuracy"]),
            log_of(mine["nll"]) - log_of(alone["nll"]),
            log_of(mine["train_nll"]) - log_of(alone["train_nll"]),
            logit_of(alone["accuracy"]),
            alone["nll"] / math.log(self.classes + 1),
            log_of(alone["train_nll"]) - log_of(alone["nll"]),
            alone["accuracy"] - alone["early"],
            *(mine[name] for name in ("correlation", "alike", "disagreement", "more")),
            alone["alike"],
        ]


class Experience:
    r"""A Gaussian process on the probes of ensembles whose training was seen to its end.

    .. math::
        k(x, x') = \tfrac12 e^{-|x - x'|^2 / 2 \ell^2} + \tfrac12 \frac{x \cdot x'}{d}

    of standardised features, with noise :math:`\sigma^2` of standardised outcomes.
    """

    def __init__(self, features: Tensor, outcomes: Tensor, length: float, noise: float):
        self.centre, self.spread = features.mean(0), features.std(0).clamp(min=1e-6)
        self.mean, self.scale = outcomes.mean(0), outcomes.std(0)
        self.length, self.noise = length, noise
        self.known = self._standard(features)
        joint = self._kernel(self.known, self.known)
        joint += noise * torch.eye(len(features), dtype=torch.float64)
        self.factor = torch.linalg.cholesky(joint)
        self.weights = torch.cholesky_solve((outcomes - self.mean) / self.scale, self.factor)

    def _standard(self, features: Tensor) -> Tensor:
        return ((features - self.centre) / self.spread).clamp(-3, 3)

    def _kernel(self, left: Tensor, right: Tensor) -> Tensor:
        near = torch.exp(-torch.cdist(left, right).square() / 2 / self.length**2)
        return (near + left @ right.T / left.shape[1]) / 2

    def expect(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return means ``(row, outcome)``, and standard deviations, noise included."""
        rows = self._standard(features)
        meet = self._kernel(rows, self.known)
        explained = (meet * torch.cholesky_solve(meet.T, self.factor).T).sum(1)
        own = (1 + rows.square().sum(1) / rows.shape[1]) / 2
        variance = (own - explained).clamp(min=0) + self.noise
        return self.mean + self.scale * (meet @ self.weights), variance.sqrt()[:, None] * self.scale


@functools.cache
def experience() -> tuple[Experience, list[str], Tensor]:
    """Return what is known, the names of outcomes, and by what their errors were too small."""
    stored = json.loads(EXPERIENCE.read_text())
    features, outcomes, reach = (
        torch.tensor(stored[name], dtype=torch.float64)
        for name in ("features", "outcomes", "reach")
    )
    return Experience(features, outcomes, stored["length"], stored["noise"]), stored["names"], reach


@dataclass(frozen=True)
class Forecast:
    """What to expect of an ensemble on data like that held out; see :func:`forecast`.

    Attributes:
        correlation: of two members' correctness; ``separate_correlation``: of separate networks.
        disagreement: how often two members will predict different classes.
        member_accuracy, accuracy: of a member, and of the ensemble; ``nll`` is its log loss.
        reference_accuracy, reference_nll: of the network alone.
        separate_accuracy, separate_nll: of as many separate networks.
        gain: in accuracy over the network alone; ``gain_over_separate``: over separate networks.
        best_members: how many members have nearly all of the gain.
        members: for how many this is.
        probe: what it was read from.
        notes: what went wrong.
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
    notes: tuple[str, ...] = field(default=())

    @property
    def verdict(self) -> str:
        """One sentence: do members differ, what is gained, how many are enough."""
        low, high = (round(100 * end) for end in (self.correlation.low, self.correlation.high))
        separate = f"separate networks: {100 * self.separate_correlation.value:.0f} %"
        few, many = (100 * end for end in (self.gain.low, self.gain.high))
        gain = f"expect {few:+.0f} to {many:+.0f} points over one network"
        if self.members == 1:
            return f"{gain.capitalize()}, which is enough."
        alone = self.best_members.value == 1
        return (
            f"Members will {'be nearly one model: they will ' if alone else ''}agree on "
            f"{low}–{high} % of their errors ({separate}); {gain}"
            + (", which is enough." if alone else f"; M = {self.best_members.value:.0f} is enough.")
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
            f"{100 * self.probe.done:.0f} % of {self.probe.steps} steps with smaller batches)",
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
        ensemble: of any family, untrained; or a network, for ``batch_ensemble`` of it.
        x: the inputs that will be trained on: a tensor, or a tuple or dict of them.
        target: their classes.
        epochs: how many are planned; and so on, as in :func:`embens.fit`.
        members: for so many members; None: those of the ensemble, 8 of a network.
        batch_size: samples in a step.
        lr: rate of the shared parameters; ``modulation_lr``: of the members' own.
        modulation_lr: None: ``lr``.
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
    count = ensemble.members if members is None else check_members(members)
    checks.check_inputs(x)
    target = _classes(target)
    checks.check_target(x, target)
    plan = {
        "batch_size": max(1, batch_size // SMALLER),
        "lr": lr,
        "modulation_lr": modulation_lr,
        "weight_decay": weight_decay,
        "gamma": gamma,
        "optimizer": optimizer,
        "seed": seed,
    }
    planned = epochs * math.ceil(len(target) / batch_size)
    probe, notes = run_probe(ensemble, x, target, planned, plan)
    return carry(probe, count, notes)


def run_probe(
    ensemble: EmbeddedEnsemble, x: Any, target: Tensor, planned: int, plan: dict[str, Any]
) -> tuple[Probe, tuple[str, ...]]:
    """Train for a small part of the planned steps; return what it showed, and what went wrong."""
    generator, batch = torch.Generator().manual_seed(plan["seed"]), plan["batch_size"]
    some = ensemble.subset(range(min(MEMBERS, ensemble.members)))
    share = COST * ensemble.members / (some.members + SEPARATE)
    steps = min(planned, max(STEPS, round(SMALLER * share * planned)))
    order = torch.randperm(len(target), generator=generator)
    held, train = order.split([count := min(HELD, len(order) // 3), len(order) - count])
    whole = min(steps, len(train) // batch)  # batches; the last of an epoch may be too small
    train = train[: whole * batch] if whole else train
    plan = plan | {"epochs": max(1, round(steps / max(1, whole)))}
    steps = plan["epochs"] * max(1, whole)
    notes: list[str] = []

    def trained(one: EmbeddedEnsemble) -> dict[str, float]:
        def look(rows: Tensor) -> Tensor:
            found = predict(one, take(x, rows)).means
            return found.where(found.isfinite().all(-1, keepdim=True), 0.0)

        def halfway(_: Any, record: dict[str, Any]) -> None:
            if record["step"] == max(1, steps // 2):
                early.append(float(metrics.member_accuracy(look(held), labels).mean()))

        early: list[float] = []
        options = {"keep": "last", "progress": False}
        options |= {"callbacks": [SimpleNamespace(on_step=halfway)]}
        try:
            fit(one, (take(x, train), target[train]), **plan, **options)
        except Divergence:
            notes.append("the probe diverged at the planned rate: take a smaller one")
        outputs, seen = look(held), look(train[:HELD])
        accuracy = float(metrics.member_accuracy(outputs, labels).mean())
        several = len(outputs) > 1
        correlation = metrics.correctness_correlation(outputs, labels) if several else 1.0
        return {
            "accuracy": accuracy,
            "nll": float(metrics.member_nll(outputs, labels).mean()),
            "train_nll": float(metrics.member_nll(seen, target[train[:HELD]]).mean()),
            "early": early[0] if early else accuracy,
            "correlation": float(torch.as_tensor(correlation).nan_to_num(1.0)),
            "alike": _alike(outputs, labels),
            "disagreement": float(metrics.disagreement(outputs)) if several else 0.0,
            "more": float(metrics.ensemble_accuracy(outputs, labels)) - accuracy,
        }

    labels = target[held]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # members that are always right
        mine = trained(some)
        if ensemble.plan.pretrained:  # one network means the fine-tuning of one
            notes.append(
                "one network is a member, fine-tuned as a whole; the forecast was fixed on "
                "networks that are trained from scratch, and its intervals are for those"
            )
            starts = [ensemble.member(a % ensemble.members) for a in range(SEPARATE)]
            alone = trained(join([network.requires_grad_(True) for network in starts]))
        else:
            alone = trained(independent(_reference(ensemble), SEPARATE, generator=generator))
    widths = effective_widths(ensemble, x)
    probe = Probe(
        members=ensemble.members,
        classes=int(target.max()) + 1,
        steps=planned,
        epochs=planned * batch * SMALLER / len(target),
        done=steps / planned,
        likeness=likeness(ensemble),
        rate=max(TINY, gradient_factor(plan["gamma"], ensemble.members, ensemble.natural_gamma)),
        width=width_of(_reference(ensemble)),
        tails=math.log(max(widths[0], TINY) / widths[1]) if widths else 0.0,
        trained=any(p.requires_grad for p in ensemble.individual_parameters()),
        mine=mine,
        alone=alone,
    )
    return probe, tuple(dict.fromkeys(notes))


def carry(probe: Probe, members: int, notes: tuple[str, ...] = ()) -> Forecast:
    """Carry what a probe said to the end of training, for this number of members."""
    known, names, reach = experience()
    expected, spread = known.expect(torch.tensor([probe.features()], dtype=torch.float64))
    means = dict(zip(names, expected[0].tolist(), strict=True))
    errors = dict(zip(names, (reach * spread[0]).tolist(), strict=True))
    equal = probe.mine["alike"] > 1 - TINY  # equal members stay equal, and are the network itself
    if equal:
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


def width_of(network: nn.Module) -> float:
    """Return the geometric mean of the outputs of layers, but for the last."""
    sizes = [len(p) for p in network.parameters() if p.dim() > 1][:-1]
    return statistics.geometric_mean(sizes) if sizes else 1.0


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
        shape = (
            f" {target.dtype} of shape {tuple(target.shape)}" if isinstance(target, Tensor) else ""
        )
        raise TypeError(
            "a forecast is made for classes: target must be a tensor (n,) of whole numbers; got "
            f"{type(target).__name__}{shape}"
        )
    if len(target) < LEAST:
        raise ValueError(f"a forecast needs at least {LEAST} samples; got {len(target)}")
    return target.long()


def _unit(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def log_of(loss: float) -> float:
    """Return the logarithm of a loss that may be 0."""
    return math.log(max(loss, TINY))


def logit_of(share: float) -> float:
    """Return the logit of an accuracy that may be 0 or 1."""
    share = min(max(share, 0.01), 0.99)
    return math.log(share / (1 - share))
