"""``embens.diagnose``: coupling of the members, learning rates, and warnings with their fix.

The regime comes from the infinite-width limit, or from laws and structure if the limit of the
network is not known. The geometry of the members' gradients is measured on a few samples
(``measurement``). Gradient scale, learning rates and warnings (``findings``) follow from both.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from embens import sources, synonyms, theory
from embens.checks import suggest
from embens.ensemble import EmbeddedEnsemble
from embens.finite import findings
from embens.finite.arguments import Criterion, as_classes, check_measurement
from embens.finite.diagnosis import CosineSummary, Diagnosis, Rates
from embens.finite.geometry import cosines, off_diagonal, pair_error
from embens.finite.measurement import (
    Budget,
    Measurement,
    effective_widths,
    few_samples,
    measure,
    suggest_rates,
)
from embens.inference import floating_dtype
from embens.optim import Gamma, gradient_factor
from embens.theory import Regime, RegimeReport
from embens.theory.regime import Structure, are_equal


@suggest(synonyms.DIAGNOSE)
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
    """Return regime, gradient geometry, suggestions and warnings for an ensemble.

    The ensemble is not changed: neither parameters and their gradients, nor buffers, modes, or the
    global random state. The result depends on the arguments alone.

    Args:
        ensemble: Any ensemble.
        x: A batch, a tuple or a dict of the reference's arguments, as tensors or arrays; a few
            hundred samples suffice.
        target: Integer classes, or values.
        criterion: A function of one member's outputs and the target; None: cross-entropy for
            integer targets, the mean squared error for others.
        gamma: The gradient scale that you plan to use; None: the ensemble's default.
        optimizer: The optimizer that you plan to use, its class or its name, to be checked.
        wanted: ``"independent"`` if members should be independent.
        budget: Limits on samples, members and memory; None: the default limits.

    Returns:
        A report that prints as text; ``to_dict()`` exports it.

    Raises:
        TypeError: If the target is not a tensor and there is no criterion.
        ValueError: If an argument is invalid.

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
    if isinstance(ensemble, EmbeddedEnsemble):
        x, target = sources.as_tensors((x, target), floating_dtype(ensemble))
    _check_arguments(ensemble, x, target, criterion, optimizer, wanted)
    planned_factor = gradient_factor(gamma, ensemble.members, ensemble.natural_gamma)
    if criterion is None:
        criterion = _default_criterion(target)
    target = as_classes(target)
    budget = Budget() if budget is None else budget
    if budget.generator is None:
        budget = replace(budget, generator=torch.Generator().manual_seed(0))

    structure = None if ensemble.spec.separate else Structure(ensemble)
    biases = _output_biases(ensemble, structure)
    measurement = measure(ensemble, x, target, criterion, biases.values(), budget)
    regime, natural_gamma = _limit(ensemble, measurement, structure)
    rates = suggest_rates(ensemble, measurement, criterion, natural_gamma, budget.generator)
    gammas = natural_gamma, planned_factor * ensemble.members
    report = _make_report(ensemble, measurement, regime, gammas, rates)
    facts = _collect_facts(ensemble, report, structure, biases, measurement.bias_part)
    facts = replace(
        facts,
        gamma_chosen=gamma is not None,
        optimizer=optimizer,
        wanted=wanted,
    )
    return replace(report, warnings=findings.find(facts))


def _check_arguments(
    ensemble: Any,
    x: Any,
    target: Any,
    criterion: Criterion | None,
    optimizer: Any,
    wanted: str | None,
) -> None:
    if wanted not in (None, "independent"):
        raise ValueError(f"wanted must be 'independent' or None, got {wanted!r}.")
    check_measurement(ensemble, x, target, criterion or F.mse_loss)
    if optimizer is not None:
        findings.optimizer_class(optimizer)  # raises if it is not an optimizer


def _default_criterion(target: Any) -> Criterion:
    if not isinstance(target, Tensor):
        raise TypeError(
            "pass criterion= for a target that is not one tensor, or convert the target "
            f"(torch.as_tensor(target)), got {type(target).__name__}."
        )
    return F.mse_loss if target.is_floating_point() else F.cross_entropy


def _output_biases(ensemble: EmbeddedEnsemble, structure: Structure | None) -> dict[str, Tensor]:
    """Return the trainable shared biases of the last layers."""
    if structure is None:
        return {}
    shared = {id(p) for p in ensemble.shared_parameters() if p.requires_grad}
    biases = {}
    for name in structure.last:
        bias = getattr(structure.layers[name], "bias", None)
        if id(bias) in shared:
            biases[name] = bias
    return biases


def _limit(
    ensemble: EmbeddedEnsemble,
    measurement: Measurement,
    structure: Structure | None,
) -> tuple[RegimeReport, float]:
    """Return the regime, and the gradient scale that suits it.

    The coupling is exact where the limit is known, and measured elsewhere.
    """
    members = ensemble.members
    if structure is None:
        return theory.regime(ensemble), ensemble.natural_gamma
    if are_equal(ensemble):
        return theory.regime(ensemble), 1.0
    samples = few_samples(measurement.x)
    if any(not site.hidden and site.law.overlap < 1 for site in ensemble.spec.sites):
        reason = "with modulated inputs or outputs, members are not exchangeable"
    elif samples is None:
        reason = "the infinite-width limit is computed for vectors, tokens and small images only"
    else:
        try:
            regime = theory.regime(ensemble, samples)
            if regime.exact and samples.dim() == 2:
                kernels = theory.kernels(ensemble, samples)
                return regime, float(theory.natural_gamma(kernels, members))
            if not regime.exact:
                regime = _measured(regime, measurement)
            return regime, _gamma_at(regime.coupling, members)
        except (TypeError, ValueError, RuntimeError) as error:
            reason = str(error).split(". ")[0].rstrip(".")
    coupling = structure.estimate()
    kind = Regime.COLLECTIVE if coupling else Regime.INDEPENDENT
    explanation = f"{structure.explain(coupling)} ({reason})"
    report = _measured(RegimeReport(kind, coupling, explanation, exact=False), measurement)
    return report, _gamma_at(report.coupling, members)


def _measured(regime: RegimeReport, measurement: Measurement) -> RegimeReport:
    """Replace an estimated coupling by the mean cosine between gradients of two members.

    A coupling of 0 follows from the laws and stays: a cosine of finite width is never exactly 0.
    """
    if regime.coupling == 0 or len(measurement.gram) < 2:
        return regime
    cosine = _summarize_cosines(measurement.gram, 1.0).mean
    return replace(regime, coupling=min(1.0, cosine), measured=True)


def _gamma_at(coupling: float, members: int) -> float:
    """Return the gradient scale that suits members with a given coupling."""
    of_mean = 1 + (members - 1) * coupling
    of_deviations = 1 - coupling  # larger if members repel each other
    return members / max(of_mean, of_deviations)


def _make_report(
    ensemble: EmbeddedEnsemble,
    measurement: Measurement,
    regime: RegimeReport,
    gammas: tuple[float, float],
    rates: Rates,
) -> Diagnosis:
    """Return the report without its warnings.

    Args:
        ensemble: The ensemble.
        measurement: The gradients of its members.
        regime: The regime of its infinite-width limit.
        gammas: The suggested and the planned gradient scale.
        rates: Suggested learning rates.
    """
    natural_gamma, planned_gamma = gammas
    gram = measurement.gram
    cosine = _summarize_cosines(gram, 1.0)
    return Diagnosis(
        regime=regime,
        one_model=_is_one_model(ensemble, regime, cosine),
        cosine=cosine,
        cosine_error=pair_error(cosines(gram)),
        layers=_summarize_layers(measurement),
        gamma=natural_gamma,
        planned_gamma=planned_gamma,
        rates=rates,
        cosines=cosines(gram),
        norms=gram.diagonal().sqrt(),
        losses=measurement.losses,
        members=ensemble.members,
        samples=measurement.samples,
        family=ensemble.spec.family,
        separate=ensemble.spec.separate,
        widths=effective_widths(ensemble, measurement.x),
        notes=measurement.notes,
    )


def _summarize_cosines(gram: Tensor, share: float) -> CosineSummary:
    """Summarize the cosines between gradients; gradients that vanish are left out.

    Args:
        gram: Scalar products of the members' gradients, ``(member, member)``.
        share: Part of the squared norm of all gradients that belongs to these parameters.
    """
    nonzero = gram.diagonal() > 0
    gram = gram[nonzero][:, nonzero]
    if len(gram) < 2:
        return CosineSummary(0.0, 0.0, share)
    pairs = off_diagonal(cosines(gram))
    mean = float(pairs.mean())
    rms = float(pairs.square().mean().sqrt())
    return CosineSummary(mean, rms, share)


def _summarize_layers(measurement: Measurement) -> dict[str, CosineSummary]:
    total = float(measurement.gram.trace()) or 1.0
    layers = {}
    for name, gram in measurement.grams.items():
        layers[name] = _summarize_cosines(gram, float(gram.trace()) / total)
    return layers


def _is_one_model(ensemble: EmbeddedEnsemble, regime: RegimeReport, cosine: CosineSummary) -> bool:
    """Return True if all members are equal, or nearly."""
    if ensemble.members == 1 or ensemble.spec.low_rank:
        return False  # low-rank members start equal and separate in training
    if regime.coupling == 1:
        return True
    return min(cosine.mean, regime.coupling) >= findings.NEARLY_EQUAL


def _collect_facts(
    ensemble: EmbeddedEnsemble,
    report: Diagnosis,
    structure: Structure | None,
    biases: dict[str, Tensor],
    bias_part: float,
) -> findings.Facts:
    """Return the facts about an ensemble that the checks of ``findings`` use."""
    last = {} if structure is None else structure.last
    coupled_sites = []
    for name, law in last.items():
        if law is not None and law.overlap != 0:
            coupled_sites.append(name)
    coupling = report.coupling
    if structure is not None and biases and not structure.uncentred:
        # Only biases couple these members.
        bias_part = max(coupling, bias_part)
        coupling = 0.0
    return findings.Facts(
        ensemble=ensemble,
        diagnosis=report,
        last=last,
        coupled_sites=coupled_sites,
        sites=[site for site in ensemble.spec.sites if site.law.overlap < 1],
        collective=coupling != 0,
        biases=list(biases),
        bias_part=bias_part,
    )
