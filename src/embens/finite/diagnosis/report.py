"""A diagnosis: what :func:`embens.diagnose` found, as text, as a dict, as a picture."""

import json
import math
import os
import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from embens.finite.diagnosis.measurement import Rates
from embens.finite.forecasting import Forecast
from embens.theory.regime import RegimeReport

WIDTH = 92


@dataclass(frozen=True)
class LayerOverlap:
    """How the members' gradients of one layer's shared parameters lie to each other."""

    mean: float  # of the cosine of two members
    rms: float  # root of the mean squared one
    share: float  # of the squared gradient of all layers that this layer has


@dataclass(frozen=True)
class Finding:
    """Something that will go wrong: its code, what it is, and what to do."""

    code: str
    message: str
    what_to_do: str

    def __str__(self) -> str:
        return f"{self.code}: {self.message} → {self.what_to_do}"


@dataclass(frozen=True)
class Diagnosis:
    """What was found out about an ensemble."""

    regime: RegimeReport  # equals Regime.INDEPENDENT or Regime.COLLECTIVE; with its reason
    forecast: Forecast | None  # of its training; None where it can't be made, see ``notes``
    one_model: bool  # whether members are one and the same, or nearly
    pull: LayerOverlap  # of all shared gradients
    pull_error: float  # standard error of its mean
    overlap: dict[str, LayerOverlap]  # by layer
    gamma: float  # suggested gradient scale
    gamma_as_meant: float  # the one that was given, or the default
    rates: Rates
    cosines: Tensor  # of the measured members' shared gradients
    norms: Tensor  # theirs
    losses: Tensor
    members: int
    rows: int  # how many samples were used
    family: str  # which function made the ensemble
    separate: bool  # whether members are separate networks
    widths: list[float] = field(default_factory=list)  # a member's effective one, and the plain one
    notes: list[str] = field(default_factory=list)  # what was left out, and why
    warnings: list[Finding] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """One sentence for those who want one: do members differ, and what is it worth."""
        if self.forecast is not None:
            return self.forecast.verdict
        if self.one_model:
            return "Members are one model: others add nothing to the first."
        if self.separate:
            return "Members are separate networks."
        alike = "know nothing of each other" if self.coupling == 0 else "pull together"
        return f"Members {alike} in an infinitely wide network; no forecast was made."

    @property
    def coupling(self) -> float:
        """The coupling of members in the infinite-width limit, from 0 to 1."""
        return self.regime.coupling

    def to_dict(self) -> dict[str, Any]:
        """Return everything as numbers, strings, lists and dicts; None for what is infinite."""
        regime = self.regime
        values = asdict(self) | {"regime": regime.value, "reason": regime.reason}
        values |= {"coupling": regime.coupling, "exact": regime.exact}
        text = json.dumps(values, default=Tensor.tolist)
        return json.loads(text, parse_constant=lambda infinite: None)

    def __str__(self) -> str:
        pull, error = self.pull, self.pull_error
        exact = self.regime.exact
        source = "exact, from the infinite-width limit" if exact else "from laws and structure"
        lines = textwrap.wrap(self.verdict, WIDTH)
        lines += ["", f"{self.family}, {self.members} members"]

        def say(head: str, text: str) -> None:
            wrapped = textwrap.wrap(text, WIDTH - 10) or [""]
            lines.extend(f"{head if not i else '':10}{line}" for i, line in enumerate(wrapped))

        say("regime", f"{self.regime.value}: {self.regime.reason}")
        say("", f"coupling {self.coupling:.3g} ({source})")
        if not self.overlap:
            say("pull", "none: members share no parameters that are trained")
        else:
            about = "" if math.isnan(error) else f" ± {error:.2g}"
            say(
                "pull",
                f"two members' gradients have a cosine of {pull.mean:+.3f}{about} in the mean, "
                f"{pull.rms:.3f} in size ({len(self.norms)} members, {self.rows} samples)",
            )
            width = max([20, *(min(40, len(layer)) for layer in self.overlap)])
            for layer, overlap in self.overlap.items():
                bar = "#" * round(20 * overlap.rms)
                lines.append(
                    f"{'':10}{layer[-width:]:<{width}} mean {overlap.mean:+.3f}  "
                    f"size {overlap.rms:.3f}  share {overlap.share:4.0%}  {bar}"
                )
        if self.widths:
            effective, plain = self.widths
            text = f"a member of width {plain:.3g} fluctuates like a plain network of width"
            say("width", f"{text} {effective:.3g}: tails of laws cost width, signs cost none")
        if not self.separate:
            off = abs(self.gamma_as_meant - self.gamma) > 0.01 * self.gamma
            say("gamma", f"{self.gamma:.3g}" + f" (now {self.gamma_as_meant:.3g})" * off)
        rates, (stable, factor) = [], (self.rates.largest_stable, self.rates.modulation_factor)
        if stable is not None:
            rates.append(f"plain gradient descent is stable up to a rate of about {stable:.2g}")
        if factor is not None:
            most = f"{factor:.2g} times their rate, the most to try"
            rates.append(f"modulations make steps as long as weights at {most}")
        say("rates", "; ".join(rates) or "not measured")
        for note in self.notes:
            say("note", note)
        say("warnings", "none" if not self.warnings else "")
        for finding in self.warnings:
            lines += textwrap.wrap(f"! {finding.message}", WIDTH, subsequent_indent="  ")
            lines += textwrap.wrap(f"  do: {finding.what_to_do}", WIDTH, subsequent_indent="      ")
        return "\n".join(line.rstrip() for line in lines)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the cosines of members' gradients, in all and by layer."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 3.6), layout="constrained")
        axes = figure.subplots(1, 2)
        image = axes[0].imshow(self.cosines.numpy(), vmin=-1, vmax=1, cmap="RdBu_r")
        figure.colorbar(image, ax=axes[0], shrink=0.8)
        axes[0].set(title="cosine of members' gradients", xlabel="member", ylabel="member")
        places = range(len(self.overlap))
        axes[1].barh(places, [o.rms for o in self.overlap.values()], label="size")
        axes[1].plot([o.mean for o in self.overlap.values()], places, "k|", ms=12, label="mean")
        axes[1].set_yticks(places, labels=list(self.overlap), fontsize=8 if len(places) < 12 else 5)
        axes[1].invert_yaxis()
        axes[1].set(title="by layer", xlabel="cosine of two members")
        axes[1].legend(fontsize=8)
        figure.savefig(path, dpi=80)
