r"""Regime: how strongly members are coupled, and what follows from it.

Members that share weights are *independent* in the limit where nothing of their outputs or
gradients is common to two of them, :math:`\Sigma_{ab} = \Theta^{com}_{ab} = 0`, and *collective*
otherwise. That is a property of an ensemble, never of a law. How strong the coupling :math:`r =
\lambda_{\max}(\Theta^{com}_{ab}) / \lambda_{\max}(\Theta^{com}_{aa})` is, from 0 to 1, sets the
gradient scale that suits the ensemble (:func:`~embens.theory.natural_gamma`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from embens import reading
from embens.ensemble.wrapping import without_members
from embens.laws import Joint
from embens.networks import Parametrized
from embens.theory.blocks import kernels
from embens.theory.kernel import MemberKernel

if TYPE_CHECKING:
    from embens.ensemble import EmbeddedEnsemble

ZERO = 1e-12
"""Couplings up to this are 0: exact zeros of the limit, and what quadrature leaves of them."""


class Regime(Enum):
    """Whether members of an infinitely wide ensemble know of each other."""

    INDEPENDENT = "independent"
    COLLECTIVE = "collective"


@dataclass(frozen=True, eq=False)
class RegimeReport:
    """The regime of an ensemble, and the number behind it; equals its :class:`Regime`.

    Example:
        >>> report = RegimeReport(Regime.COLLECTIVE, 0.25, "E[u] ≠ 0", exact=True)
        >>> report == Regime.COLLECTIVE, report.name
        (True, 'COLLECTIVE')
        >>> print(report)
        collective (coupling 0.25): E[u] ≠ 0
    """

    regime: Regime
    coupling: float  # r, from 0 (independent) to 1 (members are equal); below 0 they repel
    reason: str
    exact: bool  # from the kernels of the limit; else from laws and structure, as an estimate

    @property
    def name(self) -> str:
        return self.regime.name

    @property
    def value(self) -> str:
        return self.regime.value

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Regime):
            return self.regime is other
        if isinstance(other, RegimeReport):
            return vars(self) == vars(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self.regime)

    def __str__(self) -> str:
        about = "" if self.exact else "about "
        return f"{self.value} (coupling {about}{self.coupling:.3g}): {self.reason}"


def regime(ensemble: EmbeddedEnsemble, x: Tensor | None = None) -> RegimeReport:
    """Return the regime of an ensemble, and how strongly its members are coupled.

    Args:
        ensemble: any.
        x: inputs on which the coupling is measured; by default a few random ones, always the
            same. Whether it is 0 does not depend on them, unless they are special.

    Where the limit of the network is not known (norm layers, attention), the answer is read from
    laws and structure: independent if modulations are centred in the inputs of all last layers
    and no shared bias follows.
    """
    ensemble.plan.require_embedded("the regime")
    if ensemble.plan.separate:
        reason = "members are separate networks"
        return RegimeReport(Regime.INDEPENDENT, 0.0, reason, exact=True)
    if are_equal(ensemble):
        reason = "whatever is a member's own is the same for all, so members are one model"
        return RegimeReport(Regime.COLLECTIVE, 1.0, reason, exact=True)
    structure = Structure(ensemble)
    generic = structure.generic_inputs()
    coupling, unknown = _first_coupling(ensemble, generic if x is None else [x])
    if x is not None and unknown and _first_coupling(ensemble, generic)[0] is not None:
        raise unknown  # the limit is known, so it must be the inputs
    exact = coupling is not None
    if coupling is None:
        coupling = structure.estimate()
    coupling = 0.0 if abs(coupling) <= ZERO else min(1.0, coupling)
    reason = structure.explain(coupling)
    if structure.flow.guesses:
        reason += f"; guessed: {'; '.join(dict.fromkeys(structure.flow.guesses))}"
    if not exact:
        why = "the shape of its inputs is not known; pass x" if unknown is None else unknown
        reason += f" (from laws and structure alone, without the limit: {why})"
    found = Regime.COLLECTIVE if coupling else Regime.INDEPENDENT
    return RegimeReport(found, coupling, reason, exact)


def are_equal(ensemble: EmbeddedEnsemble) -> bool:
    """Return whether all members are one model: whatever is a member's own has the same values."""
    drawn = any(site.fresh and site.law.overlap < 1 for site in ensemble.plan.sites)
    stacks = [t for m in ensemble.individuals.values() for t in m.tensors().values()]
    return ensemble.members > 1 and not drawn and all(bool((t == t[:1]).all()) for t in stacks)


def _first_coupling(
    ensemble: EmbeddedEnsemble, candidates: Iterable[Tensor]
) -> tuple[float | None, Exception | None]:
    """Return the coupling on the first inputs that the limit takes, or why it takes none."""
    unknown: Exception | None = None
    for inputs in candidates:
        try:
            found = kernels(ensemble, inputs)
        except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
            unknown = unknown or error
        else:
            of_gradients = _overlap(found.ntk_shared)  # where these have none, of outputs
            return of_gradients if abs(of_gradients) > ZERO else _overlap(found.nngp), None
    return None, unknown


def _overlap(kernel: MemberKernel) -> float:
    r"""Return how large the kernel is between members, relative to that within them, with its sign.

    Of members that are not exchangeable, the mean over pairs of
    :math:`\|K_{ab}\| / \sqrt{\|K_{aa}\| \|K_{bb}\|}`.
    """
    norms = torch.linalg.matrix_norm(kernel.same, ord=2)
    if not kernel.conditional:
        values = torch.linalg.eigvalsh(kernel.cross)
        return (values[values.abs().argmax()] / norms).item() if norms else 0.0
    between = torch.linalg.matrix_norm(kernel.cross, ord=2)
    scale = (norms[:, None] * norms).sqrt()
    ratios = torch.where(scale > 0, between / scale, 0.0)
    members = len(norms)
    pairs = members * (members - 1)
    return ((ratios.sum() - ratios.trace()) / pairs).item() if pairs else 0.0


class Structure:
    """What laws and data flow of an ensemble say about its regime.

    ``last`` has the last layers that members share, with the laws of u in their inputs; ``open``
    are those with inputs that are not centred, ``biased`` those that a shared bias follows in the
    limit, with about its share.
    """

    def __init__(self, ensemble: EmbeddedEnsemble):
        self.ensemble = ensemble
        self.reference = without_members(ensemble.network)
        self.flow = reading.read(self.reference)
        self.layers = reading.parameter_layers(self.reference)
        posts = {s.layer: s.law for s in ensemble.plan.sites if s.kind == "post"}
        drawn = {o.module for o in ensemble.plan.own if o.drawn}
        last = [n for n in self.layers if n in self.flow.last]
        self.last = {n: posts.get(n) for n in last if n not in drawn}
        self.open = [n for n, law in self.last.items() if law is None or abs(law.overlap) > ZERO]
        joint = any(isinstance(law, Joint) for law in self.last.values())
        self.mean = "E[u_a u_b]" if joint else "E[u]"
        self.biased = {
            name: layer.bias_std**2 / (layer.bias_std**2 + layer.weight_std**2)
            for name in self.last
            if isinstance(layer := self.layers[name], Parametrized) and layer.bias_std
        }

    def estimate(self) -> float:
        """Return the coupling by the laws: the share of a signal that members have in common."""
        if not self.open:
            return max(self.biased.values(), default=0.0)
        return self.ensemble.overlap or self._overlap_of_last()

    def explain(self, coupling: float) -> str:
        if not self.last:
            return "every member has last layers of its own"
        where = f"the input of {_name(self.open or list(self.last))}"
        if not coupling:
            if not self.open:
                return f"{self.mean} = 0 in {where}"
            return f"activations average to 0 over v, although {where} is not centred"
        if not self.open:
            if self.biased:
                return f"the shared bias of {_name(list(self.biased))} couples members"
            return f"members share what follows {_name(list(self.last))}, although E[u] = 0 there"
        if all(self.last[name] is None for name in self.open):
            return f"{where} is not modulated by u, so nothing there averages to 0"
        return f"{self.mean} ≠ 0 in {where} (overlap {self._overlap_of_last():.3g})"

    def _overlap_of_last(self) -> float:
        laws = [self.last[name] for name in self.open]
        return math.prod(law.overlap for law in laws if law is not None)

    def generic_inputs(self) -> Iterator[Tensor]:
        """Yield a few random inputs, of shapes that the network may take."""
        first = next((self.layers[n] for n in self.layers if n in self.flow.first), None)
        generator = torch.Generator().manual_seed(0)
        if isinstance(first, nn.Linear):
            yield torch.randn(6, first.in_features, generator=generator, dtype=torch.float64)
        elif isinstance(first, nn.modules.conv._ConvNd):
            axes = len(first.kernel_size)
            for size in (8, 32, 28, 16, 64):
                shape = (2, first.in_channels, *(size,) * axes)
                yield torch.randn(shape, generator=generator, dtype=torch.float64)


def _name(layers: list[str]) -> str:
    names = ", ".join(map(repr, layers))
    return f"the last layer {names}" if len(layers) == 1 else f"the last layers {names}"
