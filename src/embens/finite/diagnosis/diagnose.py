"""``embens.diagnose``: is this ensemble an ensemble?

It reads the regime off the infinite-width limit (or off laws and structure, where a network's limit
is not known), and measures on a few samples how the members' gradients lie to each other
(``measurement``). From these come gradient scale, rates, and the ``findings``; the verdict is that
of a ``forecast``.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from embens.checks import Gamma, gradient_factor
from embens.ensemble import EmbeddedEnsemble
from embens.ensemble.rates import gamma_of
from embens.finite import checks
from embens.finite.diagnosis import findings, measurement
from embens.finite.diagnosis.measurement import Budget, few
from embens.finite.diagnosis.report import Diagnosis, LayerOverlap
from embens.finite.forecasting import Forecast, forecast
from embens.finite.gradients import cosines, off_diagonal, pair_error, unchanged
from embens.objective import Criterion
from embens.theory import kernels, natural_gamma
from embens.theory.regime import Regime, RegimeReport, Structure, are_equal, regime


def diagnose(
    ensemble: EmbeddedEnsemble,
    x: Any,
    target: Any,
    *,
    criterion: Criterion | None = None,
    gamma: Gamma = None,
    optimizer: Any = None,
    wanted: str | None = None,
    expected: Forecast | None = None,
    budget: Budget | None = None,
) -> Diagnosis:
    """Return what an ensemble will be worth, its regime, suggestions, and what will go wrong.

    The ensemble is not changed: neither parameters and their gradients, nor buffers, modes, or the
    global random state. The result depends on nothing but the arguments.

    Args:
        ensemble: of any family.
        x: a batch, a tuple or a dict of the reference's arguments; some hundred samples do, but
            a forecast is of a training on these alone.
        target: classes, or values.
        criterion: of one member's outputs and the target; None: cross-entropy for whole numbers,
            the mean squared error for others.
        gamma: the gradient scale that you mean to use; None: the ensemble's default.
        optimizer: the optimizer that you mean to use, or its class or name, to be checked.
        wanted: "independent" if that is what members should be.
        expected: the ``embens.forecast`` of the training that you plan; None: it is made here, of
            30 epochs as :func:`embens.fit` does them by default, with that optimizer.
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
    given, ensemble = ensemble, checks.at_test(ensemble)
    checks.check_call(ensemble, x, target, criterion or F.mse_loss)
    if optimizer is not None:
        findings.optimizer_class(optimizer)  # says what is wrong with it before any work
    meant = gradient_factor(gamma, ensemble.members, ensemble.natural_gamma) * ensemble.members
    if criterion is None:
        if not isinstance(target, Tensor):
            raise TypeError(
                "pass criterion= for a target that is not one tensor, or convert it "
                f"(torch.as_tensor(target)); got {type(target).__name__}"
            )
        criterion = F.mse_loss if target.is_floating_point() else F.cross_entropy
    target = checks.as_classes(target)
    budget = Budget() if budget is None else budget
    if budget.generator is None:
        budget = replace(budget, generator=torch.Generator().manual_seed(0))

    structure = None if ensemble.plan.separate else Structure(ensemble)
    biases = {} if structure is None else findings.output_biases(ensemble, structure)
    measured = measurement.measure(ensemble, x, target, criterion, biases.values(), budget)
    if ensemble is not given:
        measured.notes.append(
            "this is the network at test: one input for all members, whose blocks of first layers "
            "are summed to one. In training every member has an input of its own."
        )
    found, natural = _limit(ensemble, measured.x, structure)
    coupling, through_biases = found.coupling, measured.bias_part
    if structure is not None and biases and not structure.open:  # only biases couple members
        coupling, through_biases = 0.0, max(coupling, through_biases)
    with unchanged(ensemble, budget.generator):
        rates = measurement.suggested_rates(ensemble, measured, criterion, natural)
    matrix, pull = cosines(measured.gram), _overlap(measured.gram)
    equal = found.coupling == 1 or min(pull.mean, found.coupling) >= findings.NEARLY_EQUAL
    equal = equal and not ensemble.plan.low_rank  # which begin equal, and part in training
    total = float(measured.gram.trace()) or 1.0
    if expected is None and criterion is not F.cross_entropy:
        measured.notes.append("no forecast: it is made for classes and their cross-entropy alone")
    elif expected is None:
        try:
            expected = forecast(given, x, target, gamma=gamma, **_meant(optimizer))
        except (TypeError, ValueError, RuntimeError) as error:
            measured.notes.append(f"no forecast: {str(error).splitlines()[0]}")
    report = Diagnosis(
        regime=found,
        forecast=expected,
        one_model=equal and ensemble.members > 1,
        pull=pull,
        pull_error=pair_error(matrix),
        overlap={n: _overlap(g, float(g.trace()) / total) for n, g in measured.grams.items()},
        gamma=natural,
        gamma_as_meant=meant,
        rates=rates,
        cosines=matrix,
        norms=measured.gram.diagonal().sqrt(),
        losses=measured.losses,
        members=ensemble.members,
        rows=measured.rows,
        family=ensemble.plan.family,
        separate=ensemble.plan.separate,
        widths=measurement.effective_widths(ensemble, measured.x),
        notes=measured.notes,
    )
    last = {} if structure is None else structure.last
    facts = findings.Facts(
        ensemble=ensemble,
        report=report,
        last=last,
        shifted=[n for n, law in last.items() if law is not None and law.overlap != 0],
        sites=[s for s in ensemble.plan.sites if s.law.overlap < 1],
        collective=coupling != 0,
        biases=list(biases),
        bias_part=through_biases,
        gamma_given=gamma is not None,
        optimizer=optimizer,
        wanted=wanted,
    )
    return replace(report, warnings=findings.find(facts))


def _meant(optimizer: Any) -> dict[str, Any]:
    """Return what a forecast is told of an optimizer; one that is made has its rate."""
    if isinstance(optimizer, torch.optim.Optimizer):
        options = {k: v for k, v in optimizer.defaults.items() if k not in ("lr", "weight_decay")}
        rate = float(optimizer.defaults["lr"])
        return {"optimizer": partial(type(optimizer), **options), "lr": rate}
    kind = None if optimizer is None else findings.optimizer_class(optimizer)
    return {} if kind in (None, torch.optim.SGD) else {"optimizer": kind}


def _overlap(gram: Tensor, share: float = 1.0) -> LayerOverlap:
    """Return how gradients with these inner products lie; those that vanish don't count."""
    alive = gram.diagonal() > 0
    gram = gram[alive][:, alive]
    if len(gram) < 2:
        return LayerOverlap(0.0, 0.0, share)
    pairs = off_diagonal(cosines(gram))
    return LayerOverlap(float(pairs.mean()), float(pairs.square().mean().sqrt()), share)


def _limit(
    ensemble: EmbeddedEnsemble, x: Any, structure: Structure | None
) -> tuple[RegimeReport, float]:
    """Return the regime, and the gradient scale that suits it."""
    if structure is None or are_equal(ensemble):
        return regime(ensemble), 1.0 if structure else ensemble.natural_gamma
    rows, members = few(x), ensemble.members
    if any(not site.hidden and site.law.overlap < 1 for site in ensemble.plan.sites):
        why = "with modulated inputs or outputs, members are not exchangeable"
    elif rows is None:
        why = "without the limit, which takes real (n, features) or few images (n, channels, y, x)"
    else:
        try:
            found = regime(ensemble, rows)
            if found.exact and rows.dim() == 2:
                return found, float(natural_gamma(kernels(ensemble, rows), members))
            return found, gamma_of(members, found.coupling)
        except (TypeError, ValueError, RuntimeError) as error:
            why = f"without the limit: {str(error).splitlines()[0]}"
    coupling = structure.estimate()
    kind = Regime.COLLECTIVE if coupling else Regime.INDEPENDENT
    found = RegimeReport(kind, coupling, f"{structure.explain(coupling)} ({why})", exact=False)
    return found, gamma_of(members, coupling)
