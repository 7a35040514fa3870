"""``embens.diagnose``: is this ensemble an ensemble?

It reads the regime off the infinite-width limit (or off laws and structure, where the limit of a
network is not known), and measures, on a few samples and within a budget, how the members'
gradients lie to each other (``measurement``). From these come the room, the suggested gradient
scale and rates, and the findings (``room``, ``stability``, ``findings``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from embens.checks import Gamma, gradient_factor
from embens.ensemble import EmbeddedEnsemble
from embens.finite import checks
from embens.finite.diagnosis import findings
from embens.finite.diagnosis.measurement import Budget, Measured, measure, take
from embens.finite.diagnosis.report import Diagnosis, Rates
from embens.finite.diagnosis.room import layer_overlaps, overlap, room
from embens.finite.diagnosis.stability import largest_stable_rates
from embens.finite.gradients import cosines, total_gram
from embens.finite.jackknife import pair_error
from embens.finite.members import unchanged
from embens.objective import Criterion
from embens.theory.blocks import kernels
from embens.theory.gamma import natural_gamma
from embens.theory.regime import Regime, RegimeReport, Structure, regime

LIMIT_SAMPLES = ((1, 12), (256, 2), (1024, 1))
"""For inputs of up to so many pixels: of how many samples the limit's kernels are computed."""


def diagnose(
    ensemble: EmbeddedEnsemble,
    x: Any,
    target: Any,
    *,
    criterion: Criterion | None = None,
    gamma: Gamma = None,
    optimizer: Any = None,
    wanted: str | None = None,
    budget: Budget | None = None,
) -> Diagnosis:
    """Return the regime of an ensemble, its room, suggestions, and what will go wrong.

    The ensemble is not changed: neither parameters and their gradients, nor buffers, modes, or the
    global random state. The result depends on nothing but the arguments.

    Args:
        ensemble: of any family.
        x: a batch, or a tuple of the reference's arguments; some hundred samples are plenty.
        target: classes, or values.
        criterion: of one member's outputs and the target; None: cross-entropy for whole numbers,
            the mean squared error for others.
        gamma: the gradient scale that you mean to use; None: the ensemble's default.
        optimizer: the optimizer that you mean to use, or its class or name, to be checked.
        wanted: "independent" if that is what members should be.
        budget: how many samples, members and bytes to use at most; None: the default ones.

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
    checks.check_call(ensemble, x, target, checks.squared_error if criterion is None else criterion)
    if optimizer is not None:
        findings.optimizer_class(optimizer)  # says what is wrong with it before any work
    meant = gradient_factor(gamma, ensemble.members, ensemble.natural_gamma) * ensemble.members
    if criterion is None:
        criterion, target = default_criterion(target), checks.as_classes(target)
    budget = Budget() if budget is None else budget
    generator = budget.source()

    structure = None if ensemble.plan.separate else Structure(ensemble)
    biases = findings.output_biases(ensemble, structure)
    measured = measure(ensemble, x, target, criterion, biases, budget, generator)
    found, natural = _limit(ensemble, measured.x, structure)
    coupling, through_biases = found.coupling, measured.bias_part()
    if structure is not None and biases and not structure.open:  # only biases couple members
        coupling, through_biases = 0.0, max(coupling, through_biases)
    space = room(measured.unbiased(), coupling)
    with unchanged(ensemble, generator):
        rates = _rates(ensemble, measured, criterion, (natural, meant), budget)
    gram = total_gram(measured.grams, len(measured.losses))
    matrix = cosines(gram)
    report = Diagnosis(
        regime=found,
        pull=overlap(gram, coupling),
        pull_error=pair_error(matrix),
        overlap=layer_overlaps(measured.grams, coupling),
        room=space.members,
        room_interval=space.interval,
        tightest=space.tightest,
        gamma=natural,
        gamma_as_meant=meant,
        rates=rates,
        cosines=matrix,
        norms=torch.tensor(measured.shared),
        losses=torch.tensor(measured.losses),
        members=ensemble.members,
        rows=measured.rows,
        family=ensemble.plan.family,
        separate=ensemble.plan.separate,
        notes=measured.notes,
    )
    facts = findings.Facts(
        ensemble=ensemble,
        report=report,
        last={} if structure is None else dict(structure.last),
        collective=coupling > 0,
        biases=(tuple(biases), through_biases),
        gamma_given=gamma is not None,
        optimizer=optimizer,
        wanted=wanted,
    )
    return replace(report, warnings=findings.find(facts))


def default_criterion(target: Any) -> Criterion:
    """Return cross-entropy for whole numbers, the mean squared error for others."""
    if not isinstance(target, Tensor):
        raise TypeError(
            "pass criterion= for a target that is not one tensor, or convert it "
            f"(torch.as_tensor(target)); got {type(target).__name__}"
        )
    return checks.squared_error if target.is_floating_point() else checks.cross_entropy


def _limit(
    ensemble: EmbeddedEnsemble, x: Any, structure: Structure | None
) -> tuple[RegimeReport, float]:
    """Return the regime, and the gradient scale that suits it."""
    if structure is None:
        return regime(ensemble), ensemble.natural_gamma
    rows, members = _few(x), ensemble.members
    if any(not site.hidden and site.law.variance > 0 for site in ensemble.plan.sites):
        why = "with modulated inputs or outputs, members are not exchangeable"
    elif rows is None:
        why = "the limit for such inputs is not computed here"
    else:
        try:
            found = regime(ensemble, rows)
            if found.exact and rows.dim() == 2:
                return found, float(natural_gamma(kernels(ensemble, rows), members))
            return found, members / (1 + (members - 1) * found.coupling)
        except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
            why = f"without the limit: {str(error).splitlines()[0]}"
    coupling = structure.estimate()
    kind = Regime.COLLECTIVE if coupling > 0 else Regime.INDEPENDENT
    found = RegimeReport(kind, coupling, f"{structure.explain(coupling)} ({why})", exact=False)
    return found, members / (1 + (members - 1) * coupling)


def _few(x: Any) -> Tensor | None:
    """Return few enough samples for the limit's kernels; None where even one takes too long."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() not in (2, 4):
        return None
    pixels = x[0, 0].numel()
    rows = next((rows for most, rows in LIMIT_SAMPLES if pixels <= most), 0)
    return x[:rows].detach().double() if rows else None


def _rates(
    ensemble: EmbeddedEnsemble,
    measured: Measured,
    criterion: Criterion,
    gammas: tuple[float, float],
    budget: Budget,
) -> Rates:
    """Return the suggested rates, as far as they can be found."""
    shared, own = (torch.tensor(norms).square() for norms in (measured.shared, measured.individual))
    factor = None
    if ensemble.plan.sites and float(own.sum()) > 0 and float(shared.sum()) > 0:
        factor = float((shared.mean() / own.mean()).sqrt())
    outputs, rows = measured.outputs, min(budget.rate_samples, measured.rows)
    if rows == 0:
        return Rates(modulation_factor=factor)
    if not isinstance(outputs, Tensor) or len(outputs) != measured.rows:
        measured.notes.append("no stable rate: outputs are not one tensor with a row per sample")
        return Rates(modulation_factor=factor)
    index, count = torch.arange(rows), outputs[0].numel()
    chosen = torch.randperm(count)[: budget.rate_outputs].sort().values
    try:
        stable = largest_stable_rates(
            ensemble,
            take(measured.x, index),
            take(measured.target, index),
            criterion,
            outputs=outputs[index],
            gammas=gammas,
            chosen=chosen,
            memory=budget.memory,
        )
    except (ValueError, RuntimeError, NotImplementedError, TypeError) as error:
        measured.notes.append(f"no stable rate: {str(error).splitlines()[0]}")
        return Rates(modulation_factor=factor)
    if len(chosen) < count:
        measured.notes.append(f"the stable rate is that of {len(chosen)} of {count} outputs")
    return Rates(*stable, modulation_factor=factor)
