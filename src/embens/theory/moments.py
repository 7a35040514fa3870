r"""State of the recursion over layers: the kernels of one layer between inputs ``x1`` and ``x2``.

Rules (:func:`embens.theory.propagate`) turn the :class:`State` before a module into the state after
it.

Axes of every kernel: pairs of inputs ``(n1, n2)``, with ``member`` axes before them where kernels
are conditional on drawn values, then pixels. The pixel axes are absent, ``PAIRS`` (the pixels of
``x1``, then those of ``x2``) or ``DIAGONAL`` (the same pixel of both inputs). The latter is enough
where no later pooling mixes pixels.

Activations need the variances :math:`\Sigma_{aa}(x, x)` of their inputs. Those of ``x1`` depend on
``x1`` alone. So a first pass of every input with itself records them, and the pass over pairs of
inputs reads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from embens.laws import Law
from embens.spec import LowRankSite
from embens.theory.expectations import Dual
from embens.theory.placement import SHARED, Modulation, Placement

PAIRS, DIAGONAL = "pairs", "diagonal"
MEASURE = "embens.finite.ntk and embens.diagnose measure any ensemble as it is."
"""Advice for networks whose limit is not known."""
Map = Callable[[Tensor], Tensor]
"""A linear map of one kernel."""


class Moments(NamedTuple):
    r"""Kernels :math:`\Sigma` and :math:`\Theta^{com}`, within or between members.

    None stands for a kernel that is zero.
    """

    nngp: Tensor | None = None
    ntk: Tensor | None = None

    def map(self, function: Map) -> Moments:
        """Apply a linear map to both kernels."""
        nngp = None if self.nngp is None else function(self.nngp)
        ntk = None if self.ntk is None else function(self.ntk)
        return Moments(nngp, ntk)


class Recorded(NamedTuple):
    """Record of an activation in the first pass.

    Attributes:
        dual: Expectations of the activation.
        law: Distribution of one member's pre-activation modulation, or None.
        variances: Variances of the inputs before it, ``(*member, n, *pixel)``.
    """

    dual: Dual
    law: Law | None
    variances: Tensor


@dataclass(frozen=True)
class Pass:
    """Facts that stay the same during one pass through the network.

    Attributes:
        placements: Modulations and copies at each layer of the reference.
        variances: Variances of ``x1`` and of ``x2`` before each activation.
        duals: Duals of these activations, prepared for the variances.
        recording: List to append to in the pass of every input with itself; None otherwise.
        tracked: Compute tangent and cross kernels as well as the covariance.
        aligned: True if the i-th input of ``x1`` is the i-th input of ``x2``.
        input_members: True if inputs have a member axis, multiplied by drawn modulations.
    """

    placements: Mapping[nn.Module, Placement] = field(default_factory=dict)
    variances: tuple[Sequence[Tensor], Sequence[Tensor]] = ((), ())
    duals: Sequence[Dual] = ()
    recording: list[Recorded] | None = None
    tracked: bool = True
    aligned: bool = False
    input_members: bool = False


@dataclass(frozen=True)
class Addend:
    r"""Normal units that are one part of a sum, each times a random factor.

    Attributes:
        same: Kernels within a member, without the factor.
        cross: Function that computes the kernels between members; None: they are ``same``.
        individual: :math:`\Theta^{ind}` without the factor; None is zero.
        pre: Modulation that is the factor of a unit.
        low_rank: Low-rank matrices whose rows determine the factor.
        scales: Names of the trainable scales of units, such as weights of LayerNorm.
    """

    same: Moments
    cross: Callable[[], Moments] | None = None
    individual: Tensor | None = None
    pre: Modulation | None = None
    low_rank: LowRankSite | None = None
    scales: frozenset[str] = frozenset()

    @property
    def waits(self) -> bool:
        """True if a factor or its tangents wait for the next activation."""
        return self.pre is not None or self.low_rank is not None or bool(self.scales)

    @property
    def covariance(self) -> Tensor:
        """Covariance within a member, without the factor."""
        assert self.same.nngp is not None
        return self.same.nngp

    @property
    def crossed(self) -> Moments:
        """Kernels between two members."""
        return self.same if self.cross is None else self.cross()

    def replace(self, **changes) -> Addend:
        """Return a copy with some attributes changed."""
        return dataclasses.replace(self, **changes)

    def map(self, function: Map, between: Map | None = None) -> Addend:
        """Apply linear maps to all kernels; see :meth:`State.map`."""
        return self.replace(**_mapped(self, function, between))


@dataclass(frozen=True)
class State:
    r"""Kernels before or after a module.

    Attributes:
        same: Kernels within a member.
        cross: Function that computes the kernels between two members. It is called only when
            needed, which centred modulations never do. None: members are still equal, so these
            kernels are ``same``.
        individual: :math:`\Theta^{ind}`; None is zero.
        depth: Number of activations so far.
        layout: ``PAIRS`` or ``DIAGONAL`` where there are pixels.
        spatial: Number of pixel axes of one input.
        poolings: Number of poolings that are still to come.
        gaussian: True if units are Gaussian, given the factors that wait. The input of an
            activation must be.
        pre: Pre-activation modulation that waits for the next activation.
        low_rank: Low-rank matrices of members that wait for the next activation.
        inputs: The inputs themselves, before the first layer.
        flat: True if an ``nn.Flatten`` turned pixels into features.
        features_last: True if pixels are tokens, ``(n, token, feature)``; False for images,
            ``(n, channel, pixel…)``.
        heads: Number of heads of attention that units are split into; 0 without an axis of heads.
        heads_first: True for ``(n, head, token, feature)``, False for
            ``(n, token, head, feature)``.
        centred: True if units have mean 0.
        scales: Names of the trainable scales of units, such as weights of LayerNorm, whose tangents
            wait for the next activation.
        addends: Independent parts of which units are the sum, if factors of some of them wait for
            the next activation. ``same``, ``cross`` and ``individual`` are kernels of the sum. A
            rule changes them by ``map``, or drops the addends.
        sources: Names of the layers that drew these units; disjoint streams are independent.
        path: Name of the module that comes next.
        facts: Facts of the whole pass.

    Example:
        >>> state = State(Moments(torch.eye(2)))  # two inputs, a perceptron
        >>> state.replace(gaussian=True).covariance.shape
        torch.Size([2, 2])
        >>> state.placement(nn.Linear(2, 2)).post is None  # not modulated
        True
        >>> state.equal_pixels(state.covariance).shape  # a perceptron has no pixels
        torch.Size([2, 2])
        >>> variances = torch.tensor([1.0, 1.5])
        >>> [part.shape for part in state.align(variances, variances)]
        [torch.Size([2, 1]), torch.Size([1, 2])]
        >>> state.with_exact_diagonal(state.covariance, variances).diagonal()
        tensor([1.0000, 1.5000])
    """

    same: Moments
    cross: Callable[[], Moments] | None = None
    individual: Tensor | None = None
    depth: int = 0
    layout: str | None = None
    spatial: int = 0
    poolings: int = 0
    gaussian: bool = False
    pre: Modulation | None = None
    low_rank: LowRankSite | None = None
    inputs: tuple[Tensor, Tensor] | None = None
    flat: bool = False
    features_last: bool = False
    heads: int = 0
    heads_first: bool = False
    centred: bool = False
    scales: frozenset[str] = frozenset()
    addends: tuple[Addend, ...] = ()
    sources: frozenset[str] = frozenset()
    path: str = ""
    facts: Pass = Pass()

    def replace(self, **changes) -> State:
        """Return a copy with some attributes changed.

        Args:
            **changes: New values by the names of attributes.

        Returns:
            The copy.
        """
        return dataclasses.replace(self, **changes)

    def placement(self, module: nn.Module) -> Placement:
        """Return the modulations and copies at a layer of the reference.

        Args:
            module: The layer, a module of the plain reference.

        Returns:
            Its placement; that of a shared, unmodulated layer if it has none.
        """
        return self.facts.placements.get(module, SHARED)

    @property
    def covariance(self) -> Tensor:
        r"""The kernel :math:`\Sigma_{aa}`."""
        assert self.same.nngp is not None
        return self.same.nngp

    @property
    def pending_moment(self) -> float:
        """Mean square factor of units by the modulation or the matrices that wait."""
        if self.low_rank is not None:
            return 1 + self.low_rank.scale**2
        return 1.0 if self.pre is None else self.pre.second_moment

    @property
    def waits(self) -> bool:
        """True if factors or their tangents wait for the next activation."""
        is_modulated = self.pre is not None or self.low_rank is not None
        return is_modulated or bool(self.scales) or bool(self.addends)

    @property
    def crossed(self) -> Moments:
        """Kernels between two members; they are computed now if they were not before."""
        return self.same if self.cross is None else self.cross()

    @property
    def pixels(self) -> tuple[int, ...]:
        """Number of pixels along each axis; empty after an ``nn.Flatten``."""
        if self.layout is None or self.flat:
            return ()
        return tuple(self.covariance.shape[-self.spatial :])

    def equal_pixels(self, kernel: Tensor) -> Tensor:
        """Return a view of the entries in which both pixels are equal.

        Args:
            kernel: A kernel with the axes of this state.

        Returns:
            The entries ``(…, *pixel)``.
        """
        if self.layout != PAIRS:
            return kernel
        # Each step takes the diagonal of one axis pair and moves it to the end.
        axis = kernel.dim() - 2 * self.spatial
        for remaining in range(self.spatial, 0, -1):
            kernel = kernel.diagonal(dim1=axis, dim2=axis + remaining)
        return kernel

    def align(
        self, first: Tensor, second: Tensor, *, paired: bool = False, between: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Insert axes into variances ``(*member, n, *pixel)`` so that they broadcast with a kernel.

        Args:
            first: Variances of ``x1``.
            second: Variances of ``x2``.
            paired: True if the kernel is that of every input with itself.
            between: True if the kernel has two member axes.

        Returns:
            Views of both variances.
        """
        pixels = self.spatial
        has_members = first.dim() > 1 + pixels
        if between and has_members:
            first = first.unsqueeze(1)
            second = second.unsqueeze(0)
        if not paired:
            first = first.unsqueeze(-1 - pixels)
            second = second.unsqueeze(-2 - pixels)
        if self.layout == PAIRS:
            no_pixels = (1,) * pixels
            first = first.reshape(*first.shape, *no_pixels)
            axis = second.dim() - pixels
            leading = second.shape[:axis]
            trailing = second.shape[axis:]
            second = second.reshape(*leading, *no_pixels, *trailing)
        return first, second

    def with_exact_diagonal(self, covariance: Tensor, variances: Tensor) -> Tensor:
        """Replace entries of an input with itself by its variance, so that its angle is exactly 0.

        Args:
            covariance: Covariances of inputs with themselves.
            variances: Their variances, ``(*member, n, *pixel)``.

        Returns:
            The covariances with these variances.
        """
        members = variances.dim() - 1 - self.spatial
        covariance = covariance.clone()
        diagonal = covariance.diagonal(dim1=members, dim2=members + 1).movedim(-1, members)
        self.equal_pixels(diagonal).copy_(variances)
        return covariance

    def map(self, function: Map, between: Map | None = None) -> State:
        """Apply a linear map, such as one of pixels, to all kernels.

        Args:
            function: The map, which takes and returns one kernel.
            between: The map of kernels between members; None: the same.

        Returns:
            The state with the new kernels; other attributes stay.

        Example:
            >>> state = State(Moments(torch.ones(1, 1))).map(lambda kernel: 4 * kernel)
            >>> state.covariance
            tensor([[4.]])
        """
        addends = tuple(addend.map(function, between) for addend in self.addends)
        return self.replace(**_mapped(self, function, between), addends=addends)


def _mapped(kernels: State | Addend, function: Map, between: Map | None) -> dict[str, Any]:
    """Return the kernels of a state or an addend after linear maps."""
    cross = None
    if kernels.cross is not None:
        cross = cache(lambda: kernels.crossed.map(between or function))
    individual = None
    if kernels.individual is not None:
        individual = function(kernels.individual)
    return {"same": kernels.same.map(function), "cross": cross, "individual": individual}


def describe(module: nn.Module, path: str) -> str:
    """Return the name and the type of a module for a message."""
    kind = type(module).__name__
    return f"{path!r} ({kind})" if path else kind


def constant(value: float, like: Tensor) -> Tensor:
    """Return one value for all entries of a kernel, without memory for each of them."""
    return torch.full((), value, dtype=like.dtype, device=like.device).expand(like.shape)


def add(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return the sum, in which None is zero. The first tensor may be overwritten."""
    if first is None:
        return second
    if second is None:
        return first
    return first.add_(second)
