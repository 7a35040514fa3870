r"""What travels through a network on its way to the infinite-width limit.

A :class:`State` holds the kernels of one layer between some inputs ``x1`` and ``x2``; rules
(:func:`embens.theory.propagate`) turn it into that of the next layer.

Axes of every tensor: pairs of inputs (``(n1, n2)``; with ``member`` axes before them where kernels
are conditional on drawn values), then pixels. Pixels are absent, ``PAIRS`` (the pixels of ``x1``,
then those of ``x2``) or ``DIAGONAL`` (the same pixel in both), which is all that is needed where no
pooling mixes pixels.

Activations need the variances of their inputs. Those of ``x1`` depend on ``x1`` alone, so one pass
of every input with itself records them, and the pass over pairs reads them there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from embens.ensemble.layers import Modulation
from embens.ensemble.wrapping import Wrapper
from embens.laws import Law
from embens.theory.duals import Dual

PAIRS, DIAGONAL = "pairs", "diagonal"
MEASURE = "embens.finite.ntk and embens.diagnose measure any ensemble as it is."
"""What can be done where there is no limit."""


class Moments(NamedTuple):
    """Covariance of units and shared tangent kernel, within or between members; None is zero."""

    nngp: Tensor | None = None
    ntk: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> Moments:
        """Apply a linear map to both."""
        return Moments(*(None if t is None else function(t) for t in self))


class Recorded(NamedTuple):
    """An activation, the law of its modulation, and the variances of some inputs before it."""

    dual: Dual
    law: Law | None
    variances: Tensor


@dataclass(frozen=True)
class State:
    r"""Kernels on their way through a network."""

    same: Moments  # within a member
    cross: Callable[[], Moments] | None = None
    """Computes those between two members, if it is asked: centred modulations never ask. None: like
    ``same``, as nothing has told members apart yet."""
    individual: Tensor | None = None  # Θ^ind; None is zero
    variances: Sequence[list[Tensor]] = ()  # of x1 and of x2, by activation
    duals: Sequence[Dual] = ()  # of these activations
    recording: list[Recorded] | None = None  # to write, in the pass of every input with itself
    tracked: bool = True  # whether tangent and cross kernels are wanted, besides the covariance
    depth: int = 0  # how many activations came before
    layout: str | None = None  # PAIRS or DIAGONAL, where there are pixels
    spatial: int = 0  # number of pixel axes of one input
    poolings: int = 0  # how many are still to come
    gaussian: bool = False  # whether units are Gaussian, as an activation needs them to be
    pre: Modulation | None = None  # waits for the next activation
    inputs: tuple[Tensor, Tensor] | None = None  # themselves, before the first layer
    drawn: bool = False  # whether these have members first, each with its drawn modulation
    aligned: bool = False  # whether the i-th of x1 is the i-th of x2
    flat: bool = False  # whether a Flatten made pixels into features
    path: str = ""  # name of the module that comes now

    def replace(self, **changes) -> State:
        return dataclasses.replace(self, **changes)

    @property
    def covariance(self) -> Tensor:
        assert self.same.nngp is not None
        return self.same.nngp

    @property
    def crossed(self) -> Moments:
        """What two members have in common, computed now if it was not."""
        return self.same if self.cross is None else self.cross()

    @property
    def pixels(self) -> tuple[int, ...]:
        """How many pixels there are along each axis; none after a Flatten."""
        if self.layout is None or self.flat:
            return ()
        return tuple(self.covariance.shape[-self.spatial :])

    def equal_pixels(self, kernel: Tensor) -> Tensor:
        """Return a view of the entries in which both pixels are the same; these come last."""
        if self.layout != PAIRS:
            return kernel
        axis = kernel.dim() - 2 * self.spatial
        for left in range(self.spatial, 0, -1):
            kernel = kernel.diagonal(dim1=axis, dim2=axis + left)
        return kernel

    def map(self, function: Callable[[Tensor], Tensor]) -> State:
        """Apply a linear map of the pixels to all kernels."""
        cross = None if self.cross is None else cache(lambda: self.crossed.map(function))
        individual = None if self.individual is None else function(self.individual)
        return self.replace(same=self.same.map(function), cross=cross, individual=individual)


def plain_module(module: nn.Module) -> nn.Module:
    """Return what the reference has in the place of a module of the ensemble."""
    while isinstance(module, Wrapper):
        module = module.inner()
    return module


def describe(module: nn.Module, path: str) -> str:
    """Return the name and the type of a module as the reference has it, for a message."""
    kind = type(plain_module(module)).__name__
    return f"{path!r} ({kind})" if path else kind


def constant(value: float, like: Tensor) -> Tensor:
    """Return one number for all entries of a kernel, which takes no memory."""
    return torch.full((), value, dtype=like.dtype, device=like.device).expand(like.shape)


def plus(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return a sum in which None is zero; the first tensor may be overwritten."""
    if first is None or second is None:
        return second if first is None else first
    return first.add_(second)
