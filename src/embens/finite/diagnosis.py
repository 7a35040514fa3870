"""The result of :func:`embens.diagnose`, as an object, as text and as a dict."""

import math
import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from embens.theory import RegimeReport

LINE_WIDTH = 92
INDENT = 10


@dataclass(frozen=True)
class CosineSummary:
    """Cosines between the gradients of pairs of members.

    Attributes:
        mean: Mean over pairs of the signed cosines.
        rms: Root mean square over pairs.
        share: The part of the squared norm of all gradients that belongs to these parameters.
    """

    mean: float
    rms: float
    share: float


@dataclass(frozen=True)
class Rates:
    """Suggested learning rates.

    Attributes:
        largest_stable: The rate above which plain gradient descent with the suggested gamma
            diverges at once; None if it was not measured.
        modulation_factor: The ratio of the rates at which modulations and shared parameters make
            steps of the same length; None if no modulation is trained.
    """

    largest_stable: float | None = None
    modulation_factor: float | None = None


@dataclass(frozen=True)
class Finding:
    """A problem of an ensemble, with its fix.

    Attributes:
        code: A short name, for example ``"large-gamma"``.
        message: The problem.
        fix: The change that solves it.

    Example:
        >>> print(Finding("large-gamma", "gamma=8 is too large", "use gamma=2"))
        large-gamma: gamma=8 is too large → use gamma=2
    """

    code: str
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.code}: {self.message} → {self.fix}"


@dataclass(frozen=True)
class Diagnosis:
    """Regime, gradient geometry, suggestions and warnings for an ensemble.

    Attributes:
        regime: The regime of the infinite-width limit, with its coupling and the reason.
        one_model: True if all members are equal, or nearly.
        cosine: Cosines of the members' gradients of all shared parameters.
        cosine_error: Standard error of the mean cosine; NaN for fewer than three members.
        layers: The same cosines by layer.
        gamma: The suggested gradient scale.
        planned_gamma: The gradient scale that was passed, or the default.
        rates: Suggested learning rates.
        cosines: Cosines between the gradients of the measured members, ``(member, member)``.
        norms: Norms of the gradients of shared parameters, ``(member,)``.
        losses: Losses of the measured members, ``(member,)``.
        members: The number of members of the ensemble.
        samples: The number of samples that were used.
        family: The function that made the ensemble.
        separate: True if members are separate networks.
        widths: A member's effective width and its width; empty if unknown.
        notes: Parts that were left out, with the reason.
        warnings: Problems, each with its fix.

    Example:
        >>> import torch
        >>> from embens import batch_ensemble, diagnose, networks
        >>> ensemble = batch_ensemble(networks.mlp(inputs=4, width=8, depth=2), members=3)
        >>> report = diagnose(ensemble, torch.ones(5, 4), torch.zeros(5, 1))
        >>> report.members, report.cosines.shape, report.to_dict()["regime"]
        (3, torch.Size([3, 3]), 'independent')
    """

    regime: RegimeReport
    one_model: bool
    cosine: CosineSummary
    cosine_error: float
    layers: dict[str, CosineSummary]
    gamma: float
    planned_gamma: float
    rates: Rates
    cosines: Tensor
    norms: Tensor
    losses: Tensor
    members: int
    samples: int
    family: str
    separate: bool
    widths: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)

    @property
    def coupling(self) -> float:
        """The coupling of members, from 0 to 1; ``regime.source`` says where it comes from."""
        return self.regime.coupling

    @property
    def verdict(self) -> str:
        """The regime and the coupling in one sentence."""
        if self.members == 1:
            return "The ensemble has one member, so there is no coupling."
        coupling = f"coupling {self.coupling:.3g}"
        if self.one_model:
            return f"Members are one model ({coupling}): the others add nothing to the first."
        if self.separate:
            return f"Members are independent ({coupling}): they are separate networks."
        if self.coupling == 0:
            return (
                f"Members are independent ({coupling}): in an infinitely wide network, training "
                "one member does not change the others."
            )
        return (
            f"Members are collective ({coupling}): even in an infinitely wide network, training "
            "one member changes the others."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as floats, strings, lists and dicts.

        Returns:
            A dict that JSON can hold. Infinite values and NaN become None.
        """
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values["regime"] = self.regime.value
        values["reason"] = self.regime.reason
        values["coupling"] = self.regime.coupling
        values["exact"] = self.regime.exact
        values["measured"] = self.regime.measured
        values["verdict"] = self.verdict
        values["rates"] = asdict(self.rates)
        values["cosine"] = asdict(self.cosine)
        values["layers"] = {name: asdict(summary) for name, summary in self.layers.items()}
        values["warnings"] = [asdict(finding) for finding in self.warnings]
        return _json_values(values)

    def __str__(self) -> str:
        lines = textwrap.wrap(self.verdict, LINE_WIDTH)
        lines += ["", f"{self.family}, {self.members} members"]
        lines += _entry("regime", self._describe_regime())
        lines += self._describe_cosines()
        if self.widths:
            lines += _entry("width", self._describe_width())
        if not self.separate:
            lines += _entry("gamma", self._describe_gamma())
        lines += _entry("rates", self._describe_rates())
        for note in self.notes:
            lines += _entry("note", note)
        lines += self._describe_warnings()
        return "\n".join(line.rstrip() for line in lines)

    def _describe_regime(self) -> str:
        regime = self.regime
        return f"{regime.value}, coupling {regime.coupling:.3g} ({regime.source}): {regime.reason}"

    def _describe_cosines(self) -> list[str]:
        if not self.layers:
            return _entry("cosines", "none: members share no trainable parameters")
        error = ""
        if not math.isnan(self.cosine_error):
            error = f" ± {self.cosine_error:.2g}"
        lines = _entry(
            "cosines",
            f"between the gradients of two members: mean {self.cosine.mean:+.3f}{error}, root mean "
            f"square {self.cosine.rms:.3f} ({len(self.norms)} members, {self.samples} samples)",
        )
        longest = max(len(layer) for layer in self.layers)
        width = min(40, max(20, longest))
        for layer, summary in self.layers.items():
            bar = "#" * round(20 * summary.rms)
            lines.append(
                f"{'':{INDENT}}{layer[-width:]:<{width}} mean {summary.mean:+.3f}  "
                f"rms {summary.rms:.3f}  share {summary.share:4.0%}  {bar}"
            )
        return lines

    def _describe_width(self) -> str:
        effective, width = self.widths
        return (
            f"a member of width {width:.3g} fluctuates like a plain network of width "
            f"{effective:.3g}; heavy-tailed laws reduce the effective width"
        )

    def _describe_gamma(self) -> str:
        if abs(self.planned_gamma - self.gamma) > 0.01 * self.gamma:
            return f"{self.gamma:.3g} suggested, {self.planned_gamma:.3g} planned"
        return f"{self.gamma:.3g}"

    def _describe_rates(self) -> str:
        parts = []
        if self.rates.largest_stable is not None:
            parts.append(
                "plain gradient descent is stable up to a learning rate of about "
                f"{self.rates.largest_stable:.2g}"
            )
        if self.rates.modulation_factor is not None:
            parts.append(
                "modulations take steps as long as weights at "
                f"{self.rates.modulation_factor:.2g} times their learning rate, the largest factor "
                "to try"
            )
        return "; ".join(parts) or "not measured"

    def _describe_warnings(self) -> list[str]:
        if not self.warnings:
            return _entry("warnings", "none")
        lines = ["warnings"]
        for finding in self.warnings:
            lines += textwrap.wrap(f"! {finding.message}", LINE_WIDTH, subsequent_indent="  ")
            lines += textwrap.wrap(f"  fix: {finding.fix}", LINE_WIDTH, subsequent_indent="       ")
        return lines


def _entry(head: str, text: str) -> list[str]:
    """Return wrapped lines of text with a heading in the margin."""
    lines = textwrap.wrap(text, LINE_WIDTH - INDENT)
    entries = [f"{head:{INDENT}}{lines[0]}"]
    entries += [f"{'':{INDENT}}{line}" for line in lines[1:]]
    return entries


def _json_values(value: Any) -> Any:
    """Return nested values as JSON can hold them."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: _json_values(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_values(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
