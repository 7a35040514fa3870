"""The step of an affine layer, with the modulation before it, on each kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from torch import Tensor, nn

from embens.theory.moments import Addend, Moments, State, add, constant
from embens.theory.pixels import PixelMap
from embens.theory.placement import Modulation
from embens.theory.weight_law import WeightLaw


@dataclass(frozen=True)
class AffineStep:
    """An affine layer with the modulation before it, as it acts on each kernel.

    Attributes:
        layer: The layer.
        law: Variances and gains of the layer's parameters.
        apply: Its map of pixels.
        post: The modulation before it.
        copies: Kind of copies that members have; see :class:`~embens.theory.placement.Placement`.
        tracked: Compute tangent kernels.
    """

    layer: nn.Module
    law: WeightLaw
    apply: PixelMap
    post: Modulation | None
    copies: str
    tracked: bool

    def within(self, state: State) -> Moments:
        """Return the kernels within a member.

        Args:
            state: Kernels before the layer.
        """
        moment = 1.0 if self.post is None else self.post.second_moment
        return self._transform(state.same, moment)

    def between(self, state: State, same: Moments) -> Callable[[], Moments] | None:
        """Return a function that computes the kernels between members.

        Args:
            state: Kernels before the layer.
            same: Kernels within a member after it.

        Returns:
            None where the kernels between members are those within a member.
        """
        if self.copies == "drawn":
            return Moments  # called without arguments, it gives kernels that are zero
        differs = self.post is not None and self.post.differs_between_members
        if state.cross is None and not differs:
            return None
        moment = 1.0 if self.post is None else self.post.pair_moment

        def cross() -> Moments:
            # A centred modulation needs no kernels between members before it.
            if moment == 0:
                return self._biases(same)
            before = state.crossed
            if before.nngp is None:
                return self._biases(same)
            return self._transform(before, moment)

        return cache(cross)

    def individual(self, state: State) -> Tensor | None:
        """Return the tangent kernel of individual parameters; None is zero.

        Args:
            state: Kernels before the layer.
        """
        moment = 1.0 if self.post is None else self.post.second_moment
        kernel = None
        if state.individual is not None:
            kernel = state.individual * (self.law.weight_variance * moment)
        if self.post is not None and self.post.trainable:
            kernel = add(kernel, state.covariance * self.law.weight_variance)
        if kernel is not None:
            kernel = self.apply(kernel)
        if self.copies:  # copied layers are never modulated, so that the moment is 1
            gradients = self.law.gradients(self.apply(state.covariance), 1.0)
            kernel = add(kernel, gradients)
        return kernel

    def split(self, state: State) -> tuple[Addend, Addend]:
        """Return the units without their bias, and the bias, as two addends.

        Args:
            state: Kernels before the layer.
        """
        law = self.law._replace(bias_variance=0.0, bias_gain=0.0)
        without = replace(self, law=law)
        same = without.within(state)
        weights = Addend(same, without.between(state, same), without.individual(state))
        return weights, Addend(self._biases(same))

    def _transform(self, before: Moments, moment: float) -> Moments:
        """Return the kernels after the layer; ``moment`` is that of the modulation."""
        assert before.nngp is not None
        kernel = self.apply(before.nngp)
        nngp = kernel * (moment * self.law.weight_variance)
        if self.law.bias_variance:
            nngp = nngp + self.law.bias_variance
        if not self.tracked:
            return Moments(nngp)
        ntk = None
        if before.ntk is not None:
            ntk = self.apply(before.ntk) * (moment * self.law.weight_variance)
        if not self.copies:
            ntk = add(ntk, self.law.gradients(kernel, moment))
        return Moments(nngp, ntk)

    def _biases(self, same: Moments) -> Moments:
        """Return the kernels between members with independent inputs: those of the bias."""
        like = same.nngp
        assert like is not None
        gain = 0.0 if self.copies else self.law.bias_gain
        nngp = None
        if self.law.bias_variance:
            nngp = constant(self.law.bias_variance, like)
        ntk = None
        if gain:
            ntk = constant(gain, like)
        return Moments(nngp, ntk)
