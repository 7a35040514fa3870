"""``embens.advise``: which ensemble to make of a network, within a budget.

Every family is forecast once from a probe, which serves all numbers of members; what it costs is
counted: parameters, the arithmetic of a pass, and the bytes that its backward pass keeps, each
relative to the network alone.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from embens import laws, metrics
from embens.checks import check_number, check_whole, suggest
from embens.embedding import families
from embens.ensemble import EmbeddedEnsemble
from embens.finite import checks
from embens.finite.diagnosis.measurement import kept_bytes, take
from embens.finite.forecasting import Forecast, carry, forecast
from embens.prediction import predict
from embens.training import fit

ROWS = 16  # of the pass whose cost is counted
FAMILIES: Mapping[str, Callable[..., EmbeddedEnsemble]] = {
    "independent({})": families.independent,
    "batch_ensemble({})": families.batch_ensemble,
    "batch_ensemble({}, p=0.5)": partial(families.batch_ensemble, p=0.5),
    "embed({}, pre=laws.Signs(0), post=None)": partial(
        families.embed, pre=laws.Signs(0.0), post=None
    ),
    "masksembles({})": families.masksembles,
    "embed({}, pre=None, post=laws.Disjoint())": partial(
        families.embed, pre=None, post=laws.Disjoint()
    ),
    "mc_dropout({})": families.mc_dropout,
    "last_layer_dropout({})": families.last_layer_dropout,
    "embed({}, pre=None, post=None, own='last')": partial(
        families.embed, pre=None, post=None, own="last"
    ),
}
"""What is tried, as it is written."""


@dataclass(frozen=True)
class Cost:
    """Of an ensemble, in multiples of the network alone: parameters, time of a pass, memory."""

    parameters: float
    time: float
    memory: float


@dataclass(frozen=True)
class Proposal:
    """An ensemble: how it is made, at which width, what it costs, and what to expect of it.

    ``one_network`` is the log loss to expect of one of this width, the same for all proposals;
    ``checked`` has what a short training gave on rows that were held out, if it was asked for.
    """

    call: str
    members: int
    width: float
    cost: Cost
    forecast: Forecast
    one_network: float = math.nan
    checked: dict[str, float] | None = None

    @property
    def log_loss(self) -> float:
        """What to expect, by how much the forecast has it better than one network."""
        expected = self.forecast
        return self.one_network * expected.nll.value / expected.reference_nll.value

    def __str__(self) -> str:
        cost, expected = self.cost, self.forecast
        at = "" if self.width == 1 else f", at {self.width:g} times the width"
        lines = [
            f"embens.{self.call}{at}",
            f"  costs {cost.parameters:.2f} × the parameters, {cost.time:.2f} × the time, "
            f"{cost.memory:.2f} × the memory of one network",
            f"  log loss {self.log_loss:.3f}, one network {self.one_network:.3f}"
            + ("" if self.log_loss < self.one_network else ": not worth it"),
            f"  {expected.verdict}",
        ]
        if self.checked:
            told = ", ".join(f"{name} {value:.3f}" for name, value in self.checked.items())
            lines.append(f"  checked by a short training: {told}")
        return "\n".join(lines)


@suggest()
def advise(
    reference: nn.Module | Callable[[float], nn.Module],
    x: Tensor,
    target: Tensor,
    *,
    parameters: float = math.inf,
    time: float = math.inf,
    memory: float = math.inf,
    members: Sequence[int] = (2, 4, 8, 16),
    widths: Sequence[float] = (0.5, 1.0, 2.0),
    proposals: int = 3,
    check: int | None = None,
    epochs: int = 30,
    batch_size: int = 128,
    lr: float = 0.01,
    seed: int = 0,
) -> list[Proposal]:
    """Propose the ensembles with the least log loss to expect, each of another family.

    Args:
        reference: a network, or a function from a relative width to one.
        x: the inputs that will be trained on.
        target: their classes.
        parameters: the budget, in multiples of one network's (at width 1).
        time: that of a pass, in the same way.
        memory: that of a training step.
        members: the numbers of members to choose from.
        widths: the relative widths to choose from, where ``reference`` is a function.
        proposals: how many.
        check: train the proposals for so many epochs, on four fifths of the rows.
        epochs: of the training that is planned; and so on, as in :func:`embens.fit`.
        batch_size: samples in a step.
        lr: rate of the shared parameters.
        seed: of draws and training.
    """
    for name, budget in (("parameters", parameters), ("time", time), ("memory", memory)):
        if budget != math.inf:
            check_number(name, budget, "a number above 0", lambda most: most > 0)
    for count in (*members, proposals, 1 if check is None else check):
        check_whole("members, proposals and check", count)
    for width in widths:
        check_number("widths", width, "numbers above 0", lambda one: one > 0)
    if not callable(reference):
        got = type(reference).__name__
        raise TypeError(f"reference: expected a network, or a function from a width; got {got}")
    checks.check_inputs(x)
    build = (lambda width: reference) if isinstance(reference, nn.Module) else reference
    widths = (1.0,) if isinstance(reference, nn.Module) else widths
    plan = {"batch_size": batch_size, "lr": lr, "seed": seed}
    generator = torch.Generator().manual_seed(seed)
    some = take(x, torch.arange(min(ROWS, len(target))))
    unit = _count(families.join([build(1.0)]), some)
    found: dict[str, list[Proposal]] = {}
    refused: ValueError | None = None  # an ensemble that can't be made
    failed: ValueError | None = None  # a forecast that can't
    for width in widths:
        network = build(width)
        for call, family in FAMILIES.items():
            affordable: dict[int, tuple[EmbeddedEnsemble, Cost]] = {}
            for count in members:
                try:
                    ensemble = family(network, count, generator=generator)
                except ValueError as error:  # such as fewer units than members, in Disjoint
                    refused = error
                    continue
                cost = _count(ensemble, some, unit)
                if cost.parameters <= parameters and cost.time <= time and cost.memory <= memory:
                    affordable[count] = ensemble, cost
            if not affordable:
                continue
            ensemble, _ = affordable[max(affordable)]
            try:
                probe = forecast(ensemble, x, target, epochs=epochs, **plan).probe
            except ValueError as error:  # such as a rate at which this family diverges
                failed = error
                continue
            found.setdefault(call, []).extend(
                Proposal(call.format(f"reference, {m}"), m, width, cost, carry(probe.of(m)))
                for m, (_, cost) in affordable.items()
            )
    if not found and failed is not None:
        raise failed
    if not found:
        raise ValueError(
            "no ensemble keeps to this budget, which is in multiples of what one network needs "
            f"(parameters={parameters:g}, time={time:g}, memory={memory:g}): allow more"
        ) from refused
    best = {call: min(some, key=attrgetter("log_loss")) for call, some in _compared(found).items()}
    chosen = sorted(best.values(), key=attrgetter("log_loss"))[:proposals]
    if check is None:
        return chosen
    order = torch.randperm(len(target), generator=generator)
    held, train = order[: len(order) // 5], order[len(order) // 5 :]
    checked = []
    for proposal in chosen:
        make = FAMILIES[next(call for call, of in best.items() if of is proposal)]
        ensemble = make(build(proposal.width), proposal.members, generator=generator)
        fit(ensemble, (take(x, train), target[train]), epochs=check, progress=False, **plan)
        outputs = predict(ensemble, take(x, held)).members
        scores = {"accuracy": metrics.ensemble_accuracy, "log loss": metrics.nll}
        results = {name: float(score(outputs, target[held])) for name, score in scores.items()}
        checked.append(replace(proposal, checked=results))
    return checked


def _compared(found: dict[str, list[Proposal]]) -> dict[str, list[Proposal]]:
    """Return proposals with log losses that compare: all of a width have one network beside them.

    Every probe has its own idea of that network, which differs by more than ensembles do.
    """
    beside: dict[float, list[float]] = {}
    for proposal in chain.from_iterable(found.values()):
        beside.setdefault(proposal.width, []).append(proposal.forecast.reference_nll.value)
    one = {width: statistics.median(losses) for width, losses in beside.items()}
    return {
        call: [replace(p, one_network=one[p.width]) for p in some] for call, some in found.items()
    }


def _count(ensemble: EmbeddedEnsemble, x: Any, unit: Cost | None = None) -> Cost:
    """Return what a training step takes, relative to a unit."""
    with FlopCounterMode(display=False) as counter, kept_bytes(ensemble) as kept:
        args, named = ensemble.bind(x)
        ensemble(*args, **named)
    numbers = sum(p.numel() for p in ensemble.parameters())
    cost = Cost(numbers, max(1, counter.get_total_flops()), max(1, sum(kept.values())))
    if unit is None:
        return cost
    return Cost(*(mine / one for mine, one in zip(astuple(cost), astuple(unit), strict=True)))
