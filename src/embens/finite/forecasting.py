"""``embens.forecast``: what an ensemble will be worth, before it is trained.

What a probe shows (:mod:`embens.finite.probing`), and what became of many ensembles that were
probed and trained to their end (:mod:`embens.finite.experience`), give the forecast.
``benchmarks/forecast.py`` judges forecasts on tasks that nothing was fixed by, with the errors that
``docs/how-to/is-my-ensemble-an-ensemble.md`` has.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from embens.checks import Gamma, check_members, check_number, check_whole, suggest
from embens.embedding.families import batch_ensemble
from embens.ensemble import EmbeddedEnsemble
from embens.ensemble.rates import MakeOptimizer
from embens.finite import checks
from embens.finite.experience import expect
from embens.finite.probing import TINY, Probe, run_probe

LEAST = 64  # rows with which a forecast can be made at all
REACH = 1.28  # standard deviations on either side that hold 80 %
ENOUGH = 8  # members have 7/8 of all that there is to gain
ONE_MODEL = 0.45  # of the way from separate networks to one: more members are not worth it
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
    ``best_members`` have nearly all of the gain.
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

    @property
    def verdict(self) -> str:
        """One sentence: do members differ, what is gained, how many are enough."""
        low, high = (round(100 * end) for end in (self.correlation.low, self.correlation.high))
        separate = f"separate networks: {100 * self.separate_correlation.value:.0f} %"
        few, many = (round(100 * end) for end in (self.gain.low, self.gain.high))
        gain = f"expect {few:+d} to {many:+d} points over one network"
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
        return "\n".join(rows)


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
    check_number("weight_decay", weight_decay, "a number from 0 on", lambda decay: decay >= 0)
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
    return carry(run_probe(ensemble, x, target, planned, plan, count))


def carry(probe: Probe) -> Forecast:
    """Carry what a probe said to the end of training."""
    means, errors = expect(probe)
    share = 1 - 1 / probe.members
    if probe.separate:  # what is known of separate networks is known of members
        means["more"] = max(0.0, means["separate_more"])
        means["more_log_nll"] = min(0.0, means["separate_more_log_nll"])
        means |= {"correlation": means["separate_correlation"], "lead": 0.0, "lead_log_nll": 0.0}
        errors |= {"correlation": errors["separate_correlation"]}
    elif probe.mine["alike"] > 1 - TINY:  # equal members stay equal, and are the network itself
        means |= {"correlation": 1.0, "disagreement": 0.0, "lead": 0.0, "more": 0.0}
        means |= {"lead_log_nll": 0.0, "more_log_nll": 0.0}
        chance = 0.5 / math.exp(probe.plan["rows"] / 2)  # of few rows, which differ by chance
        errors |= {"correlation": 0.0, "disagreement": 0.0, "gain": max(SEEDS, chance)}
    gain = means["lead"] + share * means["more"]
    separate = share * max(0.0, means["separate_more"])
    half = REACH * errors["gain"]

    def around(name: str, more: float = 0.0, link: Callable[[float], float] = _unit) -> Estimate:
        return _around(means[name], REACH * errors[name], lambda v: _unit(link(v) + more))

    def accuracy(more: float) -> Estimate:
        return around("logit", more, lambda v: 1 / (1 + math.exp(-v)))

    def loss(more: float) -> Estimate:
        return _around(means["log_nll"] + more, REACH * errors["log_nll"], math.exp)

    correlation, apart = around("correlation"), around("separate_correlation")
    member = accuracy(means["lead"])
    differ = 2 * member.value * (1 - member.value) * (1 - correlation.value)  # one right, one not
    one_model = correlation.value > apart.value + ONE_MODEL * (1 - apart.value)
    enough = (1, 1, 1) if one_model else (ENOUGH, ENOUGH // 2, 2 * ENOUGH)
    return Forecast(
        correlation=correlation,
        separate_correlation=apart,
        disagreement=_around(
            means["disagreement"], REACH * errors["disagreement"], lambda v: _unit(max(v, differ))
        ),
        member_accuracy=member,
        accuracy=accuracy(gain),
        nll=loss(means["lead_log_nll"] + share * means["more_log_nll"]),
        reference_accuracy=accuracy(0.0),
        reference_nll=loss(0.0),
        separate_accuracy=accuracy(separate),
        separate_nll=loss(share * min(0.0, means["separate_more_log_nll"])),
        gain=_around(gain, half, lambda v: min(v, max(gain, 1 - accuracy(0.0).value))),
        gain_over_separate=_around(gain - separate, half),
        best_members=Estimate(*enough),
        members=probe.members,
        probe=probe,
    )


def _around(value: float, half: float, link: Callable[[float], float] = lambda v: v) -> Estimate:
    return Estimate(link(value), link(value - half), link(value + half))


def _classes(target: Any) -> Tensor:
    if not isinstance(target, Tensor) or target.is_floating_point() or target.dim() != 1:
        raise TypeError(
            "a forecast is made for classes: target must be a tensor (n,) of whole numbers, such "
            f"as y.long() or y.squeeze(1); got {type(target).__name__} "
            f"{getattr(target, 'dtype', '')} {tuple(getattr(target, 'shape', ()))}"
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
