"""``embens.diagnose``: is this ensemble an ensemble?

It reads the regime off the infinite-width limit (or off laws and structure, where the limit of a
network is not known), and measures, on a few samples and within a budget, how the members'
gradients lie to each other (``measurement``). From these come the room, the suggested gradient
scale and rates, and the findings (``room``, ``stability``, ``findings``).
"""

from __future__ import annotations

import math
import os
import time
from typing import Any

import torch
from torch import Tensor

from embens.checks import Gamma, gradient_factor
from embens.ensemble import EmbeddedEnsemble
from embens.finite import checks
from embens.finite.diagnosis import findings, room, stability
from embens.finite.diagnosis.measurement import Measured, measure, take
from embens.finite.diagnosis.report import Diagnosis, Rates
from embens.finite.gradients import cosines, total_gram
from embens.finite.members import Criterion, unchanged
from embens.theory import kernels, natural_gamma
from embens.theory.regime import Regime, RegimeReport, Structure, regime

KERNEL_ROWS = 12
"""How many samples are enough for a kernel's largest eigenvalue."""
KERNEL_OUTPUTS = 8
"""How many outputs stand for all where all are too dear."""
SAFE = 0.5
"""The part of what is left of the time that a kernel may be expected to take."""


def diagnose(
    ensemble: EmbeddedEnsemble,
    x: Any,
    target: Any,
    *,
    criterion: Criterion | None = None,
    gamma: Gamma = None,
    optimizer: Any = None,
    wanted: str | None = None,
    seconds: float = 10.0,
    memory: float = 1e9,
    generator: torch.Generator | None = None,
    plot: str | os.PathLike[str] | None = None,
) -> Diagnosis:
    """Return the regime of an ensemble, its room, suggestions, and what will go wrong.

    The ensemble is not changed: neither parameters and their gradients, nor buffers, modes, or the
    global random state.

    Args:
        ensemble: of any family.
        x: a batch, or a tuple of the reference's arguments; some hundred samples are plenty.
        target: classes, or values.
        criterion: of one member's outputs and the target; None: cross-entropy for whole numbers,
            the mean squared error for others.
        gamma: the gradient scale that you mean to use; None: the ensemble's default.
        optimizer: the optimiser that you mean to use, or its class or name, to be checked.
        wanted: "independent" if that is what members should be.
        seconds: budget of time.
        memory: budget of bytes, beyond the ensemble itself.
        generator: draws the samples, and the masks of an ensemble with fresh ones; None: always the
            same.
        plot: a file for a picture.

    Example:
        >>> from embens import batch_ensemble, networks
        >>> generator = torch.Generator().manual_seed(0)
        >>> reference = networks.mlp(4, 64, 2, 3, generator=generator)
        >>> ensemble = batch_ensemble(reference, 4, generator=generator)
        >>> x, y = torch.randn(20, 4, generator=generator), torch.arange(20) % 3
        >>> report = diagnose(ensemble, x, y)
        >>> report.regime.value, report.gamma, report.warnings
        ('independent', 4.0, [])
    """
    if wanted not in (None, "independent"):
        raise ValueError(f"wanted must be 'independent' or None; got {wanted!r}")
    checks.check_budget(seconds, memory)
    checks.check_call(ensemble, x, target, checks.squared_error if criterion is None else criterion)
    if optimizer is not None:
        findings.optimiser_class(optimizer)  # says what is wrong with it before any work
    meant = gradient_factor(gamma, ensemble.members, ensemble.natural_gamma)
    meant *= ensemble.members
    started = time.perf_counter()
    if criterion is None:
        criterion, target = default_criterion(target), checks.as_classes(target)
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    structure = _Structure(ensemble)
    measured = measure(
        ensemble, x, target, criterion, structure.biases, seconds / 2, memory, generator
    )
    regime, natural = _limit(ensemble, measured.x, structure)
    coupling = regime.coupling
    through_biases = measured.bias_part()
    if structure.biases and not structure.read.open:  # nothing but biases couples members
        coupling, through_biases = 0.0, max(coupling, through_biases)
    overlaps = room.layer_overlaps(measured.grams, coupling)
    pull = room.total_overlap(measured.grams, coupling, len(measured.losses))
    limit, tightest = room.room(room.layer_overlaps(measured.unbiased(), coupling))
    interval = (limit, limit)
    if tightest is not None:
        interval = room.room_interval(measured.unbiased()[tightest], coupling)
    norms = torch.tensor(measured.shared)
    facts = findings.Facts(
        ensemble=ensemble,
        collective=coupling > 0,
        last=structure.last,
        natural=natural,
        gamma=meant,
        gamma_given=gamma is not None,
        optimiser=optimizer,
        wanted=wanted,
        norms=norms,
        biases=(tuple(structure.biases), through_biases),
        room=limit,
        most_room=max(interval),
    )
    left = seconds - (time.perf_counter() - started)
    with unchanged(ensemble, generator):
        rates = _rates(ensemble, measured, criterion, (natural, meant), left, memory)
    matrix = cosines(total_gram(measured.grams, len(measured.losses)))
    report = Diagnosis(
        regime=regime,
        coupling=regime.coupling,
        exact=regime.exact,
        pull=pull,
        pull_error=_error_of_mean(matrix),
        overlap=overlaps,
        room=limit,
        room_interval=interval,
        tightest=tightest,
        gamma=natural,
        gamma_as_meant=meant,
        rates=rates,
        warnings=findings.find(facts),
        cosines=matrix,
        norms=norms,
        losses=torch.tensor(measured.losses),
        members=ensemble.members,
        rows=measured.rows,
        family=ensemble.plan.family,
        seconds=time.perf_counter() - started,
        notes=measured.notes,
    )
    if plot is not None:
        report.plot(plot)
    return report


def default_criterion(target: Any) -> Criterion:
    """Return cross-entropy for whole numbers, the mean squared error for others."""
    if not isinstance(target, Tensor):
        raise TypeError(
            "pass criterion= for a target that is not one tensor, or convert it "
            f"(torch.as_tensor(target)); got {type(target).__name__}"
        )
    if target.is_floating_point():
        return checks.squared_error
    return checks.cross_entropy


class _Structure:
    """The last layers of an ensemble: their laws, and their shared biases."""

    def __init__(self, ensemble: EmbeddedEnsemble):
        self.last: dict[str, Any] = {}
        self.biases: dict[str, Tensor] = {}
        if ensemble.plan.separate:
            return
        self.read = Structure(ensemble)
        self.last = dict(self.read.last)
        layers = {name: self.read.layers[name] for name in self.last}
        self.biases = findings.output_biases(layers, ensemble)

    def regime(self, why: str) -> Any:
        """Return the regime by laws and structure, where the limit is not asked."""
        coupling = self.read.estimate()
        kind = Regime.COLLECTIVE if coupling > 0 else Regime.INDEPENDENT
        return RegimeReport(kind, coupling, f"{self.read.explain(coupling)} ({why})", exact=False)


def _limit(ensemble: EmbeddedEnsemble, x: Any, structure: _Structure) -> tuple[Any, float]:
    """Return the regime, and the gradient scale that suits it."""
    members = ensemble.members
    if ensemble.plan.separate:
        return regime(ensemble), ensemble.natural_gamma
    rows = _few(x)
    if any(not site.hidden and site.law.variance > 0 for site in ensemble.plan.sites):
        found = structure.regime("with modulated inputs or outputs, members are not exchangeable")
    elif rows is None:
        found = structure.regime("the limit for such inputs is not computed here")
    else:
        try:
            found = regime(ensemble, rows)
            if found.exact and rows.dim() == 2:
                return found, float(natural_gamma(kernels(ensemble, rows), members))
        except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
            found = structure.regime(f"without the limit: {str(error).splitlines()[0]}")
    return found, members / (1 + (members - 1) * found.coupling)


def _few(x: Any) -> Tensor | None:
    """Return so many samples as the limit's kernels take a moment for; None: not even one."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() not in (2, 4):
        return None
    pixels = x[0, 0].numel()
    rows = {True: 0, pixels <= 1024: 1, pixels <= 256: 2, pixels == 1: KERNEL_ROWS}[True]
    return x[:rows].detach().double() if rows else None


def _error_of_mean(matrix: Tensor) -> float:
    """Return the standard error of the mean cosine of pairs, leaving out one member at a time."""
    count = len(matrix)
    if count < 3:
        return math.nan
    total = matrix.sum() - matrix.trace()
    without = (total - 2 * (matrix.sum(0) - matrix.diagonal())) / ((count - 1) * (count - 2))
    return float(((count - 1) / count * (without - without.mean()).square().sum()).sqrt())


def _rates(
    ensemble: EmbeddedEnsemble,
    measured: Measured,
    criterion: Criterion,
    gammas: tuple[float, float],
    seconds: float,
    memory: float,
) -> Rates:
    """Return the suggested rates, as far as time and memory allow."""
    shared, own = torch.tensor(measured.shared), torch.tensor(measured.individual)
    factor = None
    if ensemble.plan.sites and float(own.sum()) > 0 and float(shared.sum()) > 0:
        factor = float(shared.square().mean().sqrt() / own.square().mean().sqrt())
    outputs = measured.outputs
    if not isinstance(outputs, Tensor) or len(outputs) != measured.rows:
        measured.notes.append("no stable rate: outputs are not one tensor with a row per sample")
        return Rates(modulation_factor=factor)
    order = torch.randperm(outputs[0].numel())

    def stable(rows: int, chosen: Tensor) -> list[float]:
        index = torch.arange(rows)
        return stability.largest_stable_rates(
            ensemble,
            take(measured.x, index),
            take(measured.target, index),
            criterion,
            outputs=outputs[index],
            gammas=gammas,
            chosen=chosen,
            memory=memory,
        )

    rows, began = min(2, measured.rows), time.perf_counter()
    least = 2 * ensemble.members * measured.pass_seconds * rows / measured.rows
    try:
        if least < seconds:  # a trial tells what it takes
            for _ in range(2):  # the second time it is warm
                stable(rows, order[:2])
                least = time.perf_counter() - began
                seconds, began = seconds - least, began + least
                if 2 * least > seconds:
                    break
        tried = rows * min(2, len(order))
        size = _affordable(measured.rows, len(order), SAFE * seconds * tried / max(least, 1e-9))
        if size is None:
            measured.notes.append(
                f"no stable rate: its tangent kernel would take at least {2 * least:.1g} more "
                "seconds"
            )
            return Rates(modulation_factor=factor)
        rows, classes = size
        if (rows, classes) != (min(KERNEL_ROWS, measured.rows), len(order)):
            measured.notes.append(f"the stable rate is that of {rows} samples, {classes} outputs")
        found = stable(rows, order[:classes].sort().values)
    except (ValueError, RuntimeError, NotImplementedError, TypeError) as error:
        measured.notes.append(f"no stable rate: {str(error).splitlines()[0]}")
        return Rates(modulation_factor=factor)
    return Rates(found[0], found[1], factor)


def _affordable(rows: int, outputs: int, work: float) -> tuple[int, int] | None:
    """Return for how many samples and outputs there is time; None: not even for few.

    Args:
        rows: how many samples there are.
        outputs: how many outputs.
        work: how many gradients, of one sample and output each, there is time for.

    Example:
        >>> _affordable(64, 100, 2000.0), _affordable(64, 100, 200.0), _affordable(64, 100, 7.0)
        ((12, 100), (12, 8), None)
    """
    few = min(KERNEL_OUTPUTS, outputs)
    sizes = [(KERNEL_ROWS, outputs), (KERNEL_ROWS, few), (6, few), (4, min(4, few)), (4, 2)]
    sizes = [(min(n, rows), min(k, outputs)) for n, k in sizes]
    return next(((n, k) for n, k in sizes if n * k <= work), None)
