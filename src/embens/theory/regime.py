r"""Regime: how strongly the members of an ensemble are coupled.

Members that share weights are *independent* if, in the infinite-width limit, outputs of two members
are uncorrelated and their gradients are orthogonal, :math:`\Sigma_{ab} = \Theta^{com}_{ab} = 0`,
and *collective* otherwise. The regime is a property of an ensemble, never of a law. The coupling
:math:`r = \lambda_{\max}(\Theta^{com}_{ab}) / \lambda_{\max}(\Theta^{com}_{aa})`, from 0 to 1, sets
the gradient scale that suits the ensemble (:func:`~embens.theory.natural_gamma`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from embens.ensemble import EmbeddedEnsemble
from embens.laws import Joint, Law
from embens.networks import Parametrized
from embens.theory.blocks import kernels
from embens.theory.ensembles import (
    data_flow,
    parameter_layers,
    per_member,
    plain_reference,
    site_values,
)
from embens.theory.kernel import MemberKernel

ZERO = 1e-12
"""Couplings up to this size count as 0: exact zeros of the limit, up to rounding."""


class Regime(Enum):
    """Coupling of the members of an infinitely wide ensemble.

    Example:
        >>> from embens import batch_ensemble, networks
        >>> report = regime(batch_ensemble(networks.mlp(4, 8, depth=2), members=4))
        >>> report == Regime.INDEPENDENT
        True
    """

    INDEPENDENT = "independent"
    COLLECTIVE = "collective"


@dataclass(frozen=True, eq=False)
class RegimeReport:
    """The regime of an ensemble with the number behind it; compares equal to its :class:`Regime`.

    Attributes:
        regime: The regime.
        coupling: :math:`r`, from 0 (independent) to 1 (equal members); negative if members repel.
        reason: Explanation in words.
        exact: True if the coupling comes from the kernels of the limit.
        measured: True if it was measured on a finite network. If neither is true, it is an estimate
            from laws and structure.

    Example:
        >>> report = RegimeReport(Regime.COLLECTIVE, 0.25, "E[u] ≠ 0", exact=True)
        >>> report == Regime.COLLECTIVE, report.name
        (True, 'COLLECTIVE')
        >>> print(report)
        collective (coupling 0.25): E[u] ≠ 0
    """

    regime: Regime
    coupling: float
    reason: str
    exact: bool
    measured: bool = False

    @property
    def source(self) -> str:
        """Origin of the coupling, in words."""
        if self.exact:
            return "exact, from the infinite-width limit"
        if self.measured:
            return "measured on this network, whose limit is not known"
        if self.coupling == 0:
            return "from the laws, which make it 0 in any wide network of this structure"
        return "estimated from laws and structure"

    @property
    def name(self) -> str:
        """Name of the regime, in capitals."""
        return self.regime.name

    @property
    def value(self) -> str:
        """Name of the regime, in lower case."""
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
    """Determine the regime of an ensemble and how strongly its members are coupled.

    The kernels come from the traced graph of the reference, so networks with sums, norm layers over
    units and attention of scale 1/width have an exact answer. If an operation has no rule, the
    answer is an estimate from laws and structure: independent if modulations are centred in the
    inputs of all last layers and no shared bias follows. :func:`embens.diagnose` measures the
    coupling in that case.

    Args:
        ensemble: The ensemble.
        x: Inputs on which the coupling is measured, ``(n, …)``. By default a few fixed random ones.
            A coupling of 0 does not depend on the inputs.

    Returns:
        The regime, the coupling and the reason.

    Raises:
        TypeError: If ``ensemble`` is a plain network.
        ValueError: If ``x`` does not fit the network.

    Example:
        >>> from embens import batch_ensemble, networks
        >>> print(regime(batch_ensemble(networks.mlp(4, 8, depth=2), members=4)))
        independent (coupling 0): E[u] = 0 in the input of the last layer '4'
    """
    if not isinstance(ensemble, EmbeddedEnsemble):
        kind = type(ensemble).__name__
        raise TypeError(
            f"expected an ensemble, got {kind}. Make one from it: embens.batch_ensemble(net, 4)."
        )
    if ensemble.spec.separate:
        reason = "members are separate networks"
        return RegimeReport(Regime.INDEPENDENT, 0.0, reason, exact=True)
    if are_equal(ensemble):
        reason = "all individual values are equal, so members are one model"
        return RegimeReport(Regime.COLLECTIVE, 1.0, reason, exact=True)
    structure = Structure(ensemble)
    candidates = list(structure.generic_inputs())
    coupling, error = _first_coupling(ensemble, candidates if x is None else [x])
    if x is not None and error is not None:
        generic_coupling, _ = _first_coupling(ensemble, candidates)
        if generic_coupling is not None:
            raise error  # the limit is known, so the inputs must be wrong
    exact = coupling is not None
    if coupling is None:
        coupling = structure.estimate()
    coupling = 0.0 if abs(coupling) <= ZERO else min(1.0, coupling)
    reason = structure.explain(coupling)
    if structure.flow.guesses:
        reason += f"; guessed: {'; '.join(dict.fromkeys(structure.flow.guesses))}"
    if not exact:
        problem = str(error).split(". ")[0].rstrip(".")
        if error is None:
            problem = "the shape of its inputs is not known; pass x"
        reason += f" (from laws and structure alone: {problem})"
    kind = Regime.COLLECTIVE if coupling else Regime.INDEPENDENT
    return RegimeReport(kind, coupling, reason, exact)


def are_equal(ensemble: EmbeddedEnsemble) -> bool:
    """Return True if all members are one model, because their values are equal.

    Args:
        ensemble: The ensemble; one member alone does not count.
    """
    if ensemble.members == 1:
        return False
    stacks = [parameter.detach() for parameter in ensemble.individual_parameters()]
    for site in ensemble.spec.sites:
        if not site.fresh:
            stacks.append(site_values(ensemble, site))
        elif site.law.overlap < 1:
            return False
    return all(bool((stack == stack[:1]).all()) for stack in stacks)


def _first_coupling(
    ensemble: EmbeddedEnsemble, candidates: Iterable[Tensor]
) -> tuple[float | None, Exception | None]:
    """Return the coupling on the first inputs that the limit accepts, or the first error."""
    first_error: Exception | None = None
    for inputs in candidates:
        try:
            k = kernels(ensemble, inputs)
        except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
            first_error = first_error or error
            continue
        coupling = _relative_size(k.ntk_shared)
        if abs(coupling) <= ZERO:  # members may still have outputs in common
            coupling = _relative_size(k.nngp)
        return coupling, None
    return None, first_error


def _relative_size(kernel: MemberKernel) -> float:
    r"""Return the size of the kernel between members relative to that within them, with its sign.

    For members that are not exchangeable it is the mean over pairs of
    :math:`\|K_{ab}\| / \sqrt{\|K_{aa}\| \|K_{bb}\|}`.
    """
    norms = torch.linalg.matrix_norm(kernel.same, ord=2)
    if not kernel.conditional:
        if not norms:
            return 0.0
        eigenvalues = torch.linalg.eigvalsh(kernel.cross)
        largest = eigenvalues[eigenvalues.abs().argmax()]
        return (largest / norms).item()
    members = len(norms)
    if members == 1:
        return 0.0
    between = torch.linalg.matrix_norm(kernel.cross, ord=2)
    scale = (norms[:, None] * norms).sqrt()
    ratios = torch.where(scale > 0, between / scale, 0.0)
    return ((ratios.sum() - ratios.trace()) / (members * (members - 1))).item()


class Structure:
    """Facts about the regime that follow from the laws and the data flow of an ensemble.

    Args:
        ensemble: The ensemble.

    Attributes:
        reference: The plain reference.
        flow: Which parameter layers come first and last.
        layers: Parameter layers by name.
        last: Last layers that members share, with the law of u in their inputs (None: no u).
        uncentred: Names of last layers with inputs that are not centred.
        biased: Last layers with a shared bias in the limit, and the approximate share of the bias
            in the variance of the outputs.
        mean: The moment that vanishes for centred inputs, as text.
    """

    def __init__(self, ensemble: EmbeddedEnsemble):
        self.ensemble = ensemble
        self.reference = plain_reference(ensemble)
        self.flow = data_flow(self.reference)
        self.layers = parameter_layers(self.reference)
        post_laws = {}
        for site in ensemble.spec.sites:
            if site.kind == "post":
                post_laws[site.layer] = site.law
        separately_drawn = {item.module for item in per_member(ensemble) if item.drawn}
        self.last: dict[str, Law | None] = {}
        self.uncentred: list[str] = []
        self.biased: dict[str, float] = {}
        for name, layer in self.layers.items():
            if name not in self.flow.last or name in separately_drawn:
                continue
            law = post_laws.get(name)
            self.last[name] = law
            if law is None or abs(law.overlap) > ZERO:
                self.uncentred.append(name)
            if isinstance(layer, Parametrized) and layer.bias_std:
                variance = layer.bias_std**2 + layer.weight_std**2
                self.biased[name] = layer.bias_std**2 / variance
        is_joint = any(isinstance(law, Joint) for law in self.last.values())
        self.mean = "E[u_a u_b]" if is_joint else "E[u]"

    def estimate(self) -> float:
        """Estimate the coupling from the laws, as the share of a signal common to all members.

        Returns:
            The estimate, from 0 to 1 unless members repel.
        """
        if not self.uncentred:
            return max(self.biased.values(), default=0.0)
        return self.ensemble.overlap or self._overlap_of_last()

    def explain(self, coupling: float) -> str:
        """Explain in words why members have this coupling.

        Args:
            coupling: The coupling; 0 means independent members.
        """
        if not self.last:
            return "every member has separate last layers"
        inputs = f"the input of {_join_names(self.uncentred or list(self.last))}"
        if not coupling and not self.uncentred:
            return f"{self.mean} = 0 in {inputs}"
        if not coupling:
            return f"activations average to 0 over v, although {inputs} is not centred"
        if not self.uncentred and self.biased:
            return f"the shared bias of {_join_names(list(self.biased))} couples members"
        if not self.uncentred:
            names = _join_names(list(self.last))
            return f"members share what follows {names}, although E[u] = 0 there"
        if all(self.last[name] is None for name in self.uncentred):
            return f"{inputs} is not modulated by u, so nothing there averages to 0"
        return f"{self.mean} ≠ 0 in {inputs} (overlap {self._overlap_of_last():.3g})"

    def generic_inputs(self) -> Iterator[Tensor]:
        """Yield a few random inputs, ``(n, …)``, of shapes that the network may take."""
        first_layers = [layer for name, layer in self.layers.items() if name in self.flow.first]
        if not first_layers:
            return
        first = first_layers[0]
        generator = torch.Generator().manual_seed(0)
        if isinstance(first, nn.Linear):
            yield torch.randn(6, first.in_features, generator=generator, dtype=torch.float64)
        elif isinstance(first, _ConvNd):
            for size in (8, 32, 28, 16, 64):
                pixels = (size,) * len(first.kernel_size)
                shape = (2, first.in_channels, *pixels)
                yield torch.randn(shape, generator=generator, dtype=torch.float64)

    def _overlap_of_last(self) -> float:
        laws = [self.last[name] for name in self.uncentred]
        return math.prod(law.overlap for law in laws if law is not None)


def _join_names(layers: list[str]) -> str:
    names = ", ".join(map(repr, layers))
    if len(layers) == 1:
        return f"the last layer {names}"
    return f"the last layers {names}"
