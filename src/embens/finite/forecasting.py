r"""``embens.forecast``: what an ensemble will be worth, before it is trained.

A *probe* trains up to four members, and beside them two separate networks, for a small part of the
planned steps on a small part of the rows, at a higher rate; the other rows are held out. Two
numbers say how alike members will become: the correlation :math:`w` of their probabilities on those
rows, within each class, and the *likeness* :math:`o`, the mean overlap of what two members feed to
the shared layers, which the laws give (0 for separate networks). From these

.. math::
    \rho = c_0 + c_1 w + c_2 o + c_3 w o + c_4 a , \qquad
    a_M - a_1 = c\, (1 - \rho)\, (1 - 1/M) , \qquad
    \log \frac{\ell_M}{\ell_1} = -c' (1 - \rho)\, (1 - 1/M) ,

with accuracies :math:`a` and log losses :math:`\ell` of :math:`M` members, and so on. Coefficients
and the half widths of intervals were fixed on tasks made for it and judged on others: see
``benchmarks/forecast.py``, and ``docs/how-to/is-my-ensemble-an-ensemble.md`` for the errors.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from embens import metrics
from embens.checks import Gamma, check_members, check_number, check_whole, suggest
from embens.embedding.families import batch_ensemble, independent, join
from embens.ensemble import EmbeddedEnsemble
from embens.ensemble.rates import MakeOptimizer
from embens.ensemble.wrapping import without_members
from embens.finite import checks
from embens.finite.gradients import off_diagonal
from embens.prediction import predict
from embens.theory.regime import Structure
from embens.training import Divergence, fit

PART = 0.1732  # of the epochs, and of the rows, that a probe takes: 3 % of the steps
FASTER = 3.0  # times the planned rate
MEMBERS, SEPARATE, HELD = 4, 2, 1000  # in a probe, at most: members, networks, rows held out
LEAST = 64  # rows with which a forecast can be made at all


@dataclass(frozen=True)
class Form:
    """A linear form of what was measured, and the half width of the interval that holds 80 %."""

    coefficients: tuple[float, ...]
    half: float

    def __call__(self, *features: float) -> float:
        return sum(c * f for c, f in zip(self.coefficients, features, strict=True))


# Fixed by ``python -m benchmarks.forecast fix``. A feature that is 1 is the constant.
# 1, w, o, w · o, accuracy in the probe
CORRELATION = Form((0.369, 0.265, 0.051, 0.116, 0.151), 0.125)
DISAGREEMENT = Form((-0.002, 0.908), 0.089)  # 1, (1 - ρ) · error of a member in the probe
MORE_ACCURACY = Form((0.084,), 0.019)  # (1 - ρ)(1 - 1/M)
MORE_LOG_NLL = Form((-0.781,), 0.184)  # (1 - ρ)(1 - 1/M)
LEAD = Form((-0.013, 0.101), 0.029)  # of a member over one network: 1, the same in the probe
LEAD_LOG_NLL = Form((0.117, 0.445), 0.240)  # 1, the same in the probe
LOGIT = Form((1.222, 0.827), 0.793)  # of the accuracy of one network: 1, the same in the probe
LOG_NLL = Form((-0.563, 1.076), 0.743)  # of one network: 1, the same in the probe
ENOUGH = 8  # members have 7/8 of all that there is to gain
ONE_MODEL = 0.8  # correlation above which more members are not worth their cost
TINY = 1e-6


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
    """What a short training said.

    Attributes:
        likeness: mean overlap of what two members feed to the shared layers.
        alike, separate_alike: correlation of two members' probabilities within classes.
        accuracy, separate_accuracy: of a member and of a separate network on the rows held out.
        nll, separate_nll: their log losses.
        steps, planned_steps: of the probe, and of the training that it stands for.
    """

    likeness: float
    alike: float
    separate_alike: float
    accuracy: float
    separate_accuracy: float
    nll: float
    separate_nll: float
    steps: int
    planned_steps: int


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
        if self.members == 1 or self.best_members.value == 1:
            alike = "" if self.members == 1 else "Members will be nearly one model: they will "
            alike += f"agree on {low}–{high} % of their errors ({separate}); " if alike else ""
            text = (
                f"{alike}expect {few:+.0f} to {many:+.0f} points over one network, which is enough."
            )
        else:
            text = (
                f"Members will agree on {low}–{high} % of their errors ({separate}); expect "
                f"{few:+.0f} to {many:+.0f} points over one network; "
                f"M = {self.best_members.value:.0f} is enough."
            )
        return text[0].upper() + text[1:]

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
            f"(80 % intervals; {self.members} members, from {self.probe.steps} of "
            f"{self.probe.planned_steps} steps)",
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
    check_number("lr", lr, "a number above 0", lambda rate: rate > 0)
    generator = torch.Generator().manual_seed(seed)
    if not isinstance(ensemble, EmbeddedEnsemble):
        if not isinstance(ensemble, nn.Module):
            raise TypeError(f"expected an ensemble or a network; got {type(ensemble).__name__}")
        drawn = torch.Generator().manual_seed(seed)
        ensemble = batch_ensemble(ensemble, members or 8, generator=drawn)
    count = ensemble.members if members is None else check_members(members)
    checks.check_inputs(x, ensemble=ensemble)
    target = _classes(target)
    checks.check_target(x, target)
    plan = {
        "epochs": max(1, round(PART * epochs)),
        "batch_size": batch_size,
        "lr": FASTER * lr,
        "modulation_lr": modulation_lr and FASTER * modulation_lr,
        "weight_decay": weight_decay,
        "gamma": gamma,
        "optimizer": optimizer,
        "keep": "last",
        "seed": seed,
        "progress": False,
    }
    order = torch.randperm(len(target), generator=generator)
    size = max(min(32, len(target) // 2), round(PART * len(target)))
    train, held = order[:size], order[size : size + HELD]

    notes: list[str] = []

    def outputs(some: EmbeddedEnsemble) -> Tensor:
        rows = take(x, train), target[train]
        try:
            fit(some, rows, **plan)
        except Divergence:
            notes.append(f"the probe diverged at {FASTER:g} times the rate: take a smaller one")
        found = predict(some, take(x, held)).means
        return found.where(found.isfinite().all(-1, keepdim=True), 0.0)

    probed = outputs(ensemble.subset(range(min(MEMBERS, ensemble.members))))
    if ensemble.plan.pretrained:  # one network means the fine-tuning of one
        notes.append(
            "one network means fine-tuning the whole of one; the forecast was fixed on networks "
            "that are trained from scratch, and its intervals are for those"
        )
        starts = [ensemble.member(a % ensemble.members) for a in range(SEPARATE)]
        alone = outputs(join([network.requires_grad_(True) for network in starts]))
    else:
        alone = outputs(independent(_reference(ensemble), SEPARATE, generator=generator))
    labels = target[held]
    probe = Probe(
        likeness=likeness(ensemble),
        alike=_alike(probed, labels),
        separate_alike=_alike(alone, labels),
        accuracy=float(metrics.member_accuracy(probed, labels).mean()),
        separate_accuracy=float(metrics.member_accuracy(alone, labels).mean()),
        nll=float(metrics.member_nll(probed, labels).mean()),
        separate_nll=float(metrics.member_nll(alone, labels).mean()),
        steps=plan["epochs"] * math.ceil(size / batch_size),
        planned_steps=epochs * math.ceil(len(target) / batch_size),
    )
    return carry(probe, count, tuple(dict.fromkeys(notes)))


def carry(probe: Probe, members: int, notes: tuple[str, ...] = ()) -> Forecast:
    """Carry what a probe said to the end of training, for this number of members."""
    correlation = correlation_of(probe.alike, probe.likeness, probe.accuracy)
    separate = correlation_of(probe.separate_alike, 0.0, probe.separate_accuracy)
    apart, separate_apart = ((1 - r.value) * (1 - 1 / members) for r in (correlation, separate))
    lead = LEAD(1, probe.accuracy - probe.separate_accuracy)
    gain, separate_gain = lead + MORE_ACCURACY(apart), MORE_ACCURACY(separate_apart)
    lead_nll = LEAD_LOG_NLL(1, log_of(probe.nll) - log_of(probe.separate_nll))
    logit = LOGIT(1, logit_of(probe.separate_accuracy))
    log_nll = LOG_NLL(1, log_of(probe.separate_nll))

    def accuracy(more: float) -> Estimate:
        return _around(logit, LOGIT.half, lambda v: _unit(1 / (1 + math.exp(-v)) + more))

    def loss(more: float) -> Estimate:
        return _around(log_nll + more, LOG_NLL.half, math.exp)

    enough = (1, 1, 1) if correlation.value > ONE_MODEL else (ENOUGH, ENOUGH // 2, 2 * ENOUGH)
    wrong = (1 - correlation.value) * (1 - probe.accuracy)
    return Forecast(
        correlation=correlation,
        separate_correlation=separate,
        disagreement=_around(DISAGREEMENT(1, wrong), DISAGREEMENT.half, _unit),
        member_accuracy=accuracy(lead),
        accuracy=accuracy(gain),
        nll=loss(lead_nll + MORE_LOG_NLL(apart)),
        reference_accuracy=accuracy(0.0),
        reference_nll=loss(0.0),
        separate_accuracy=accuracy(separate_gain),
        separate_nll=loss(MORE_LOG_NLL(separate_apart)),
        gain=_around(gain, LEAD.half),
        gain_over_separate=_around(gain - separate_gain, LEAD.half),
        best_members=Estimate(*enough),
        members=members,
        probe=probe,
        notes=notes,
    )


def correlation_of(alike: float, likeness: float, accuracy: float) -> Estimate:
    """Return the correlation of two members' correctness to expect."""
    if alike > 1 - TINY:  # equal members stay equal
        return Estimate(1.0, 1.0, 1.0)
    form = CORRELATION(1, alike, likeness, alike * likeness, accuracy)
    return _around(form, CORRELATION.half, _unit)


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


def take(x: Any, rows: Tensor) -> Any:
    """Return some rows of inputs."""
    return tree_map(lambda v: v[rows.to(v.device)] if isinstance(v, Tensor) else v, x)


def _unit(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def log_of(loss: float) -> float:
    """Return the logarithm of a loss that may be 0."""
    return math.log(max(loss, TINY))


def logit_of(share: float) -> float:
    """Return the logit of an accuracy that may be 0 or 1."""
    share = min(max(share, 0.01), 0.99)
    return math.log(share / (1 - share))
