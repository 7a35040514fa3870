r"""What travels through a network on its way to the infinite-width limit.

A :class:`State` holds the kernels of one layer between some inputs ``x1`` and ``x2``: covariance
and shared tangent kernel within a member (``same``) and between two (``cross``), and the individual
tangent kernel. Rules (:func:`embens.theory.propagate`) turn it into that of the next layer.

Axes of every tensor: pairs of inputs (``(n1, n2)``; with ``member`` axes before them where kernels
are conditional on drawn values), then pixels. Pixels are absent, ``PAIRS`` (the pixels of ``x1``,
then those of ``x2``) or ``DIAGONAL`` (the same pixel in both), which is all that is needed where no
pooling mixes pixels.

Activations need the variances of their inputs. Those of ``x1`` depend on ``x1`` alone, so one pass
of every input with itself writes them to a :class:`Tape`, and the pass over pairs reads them there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn

from embens.laws import Law
from embens.theory.duals.expectations import Dual

PAIRS, DIAGONAL = "pairs", "diagonal"


class Side(NamedTuple):
    """Covariance and shared tangent kernel, within or between members; None is zero."""

    nngp: Tensor | None
    ntk: Tensor | None

    def map(self, function: Callable[[Tensor], Tensor]) -> Side:
        """Apply a linear map to both."""
        return Side(*(None if t is None else function(t) for t in self))


class Lazy:
    """A side that is computed when it is asked for: centred modulations never ask."""

    def __init__(self, compute: Callable[[], Side]):
        self._compute = compute
        self._side: Side | None = None

    def __call__(self) -> Side:
        if self._side is None:
            self._side = self._compute()
        return self._side


@dataclass(frozen=True)
class Pre:
    """A pre-activation modulation that waits for its activation."""

    law: Law
    trainable: bool


@dataclass
class Tape:
    """Variances of some inputs at each activation, in the order of the network.

    ``duals`` are the activations themselves, ``laws`` those of the modulations before them.
    """

    variances: list[Tensor] = field(default_factory=list)
    duals: list[Dual] = field(default_factory=list)
    laws: list[Law | None] = field(default_factory=list)

    def rows(self, rows: slice, members: int) -> Tape:
        """Return the tape of a part of the inputs; ``members`` is the number of axes before."""
        index = (slice(None),) * members + (rows,)
        return Tape([v[index] for v in self.variances], self.duals, self.laws)


@dataclass(frozen=True)
class State:
    r"""Kernels on their way through a network.

    Attributes:
        same: within a member.
        cross: between two members; ``same`` itself while nothing tells members apart.
        individual: :math:`\Theta^{ind}`; None is zero.
        tapes: of ``x1`` and ``x2``; None while every input is paired with itself.
        recording: the tape to write, in the pass of every input with itself.
        tracked: whether tangent kernels and cross kernels are wanted, besides the covariance.
        depth: how many activations came before.
        layout: None, ``PAIRS`` or ``DIAGONAL``.
        spatial: number of pixel axes of one input.
        poolings: how many poolings are still to come.
        gaussian: whether the units are Gaussian, as an activation needs them to be.
        pre: modulation that waits for the next activation.
        inputs: the inputs themselves, before the first layer, with their modulation.
        drawn: whether they have members first, each with its drawn modulation.
        aligned: whether the i-th of ``x1`` is the i-th of ``x2``.
        flat: whether a Flatten made pixels into features.
        path: name of the module that comes now.
    """

    same: Side
    cross: Side | Lazy
    individual: Tensor | None = None
    tapes: tuple[Tape, Tape] | None = None
    recording: Tape | None = None
    tracked: bool = True
    depth: int = 0
    layout: str | None = None
    spatial: int = 0
    poolings: int = 0
    gaussian: bool = False
    pre: Pre | None = None
    inputs: tuple[Tensor, Tensor] | None = None
    drawn: bool = False
    aligned: bool = False
    flat: bool = False
    path: str = ""

    def replace(self, **changes) -> State:
        """Return the state with some attributes changed."""
        return dataclasses.replace(self, **changes)

    @property
    def members_alike(self) -> bool:
        """Whether nothing has told members apart yet."""
        return self.cross is self.same

    @property
    def crossed(self) -> Side:
        """What two members have in common, computed now if it was not."""
        return self.cross() if isinstance(self.cross, Lazy) else self.cross

    def map(self, function: Callable[[Tensor], Tensor]) -> State:
        """Apply a linear map of the pixels to all kernels."""
        same = self.same.map(function)
        if self.members_alike:
            cross: Side | Lazy = same
        elif isinstance(self.cross, Lazy):
            cross = Lazy(lambda cross=self.cross: cross().map(function))
        else:
            cross = self.cross.map(function)
        individual = None if self.individual is None else function(self.individual)
        return self.replace(same=same, cross=cross, individual=individual)


def describe(module: nn.Module, path: str) -> str:
    """Return a module's name and type for a message."""
    return f"{path!r} ({type(module).__name__})" if path else type(module).__name__


def diagonal_of(kernel: Tensor, spatial: int) -> Tensor:
    """Return a view of the entries in which both pixels are the same; those pixels come last.

    Example:
        >>> import torch
        >>> diagonal_of(torch.arange(16.0).reshape(1, 2, 2, 2, 2), spatial=2)
        tensor([[[ 0.,  5.],
                 [10., 15.]]])
    """
    axis = kernel.dim() - 2 * spatial
    for left in range(spatial, 0, -1):
        kernel = kernel.diagonal(dim1=axis, dim2=axis + left)
    return kernel
