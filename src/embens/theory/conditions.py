r"""Conditions: drawn input and output modulations on which kernels depend.

Input modulations :math:`u^0` and output modulations :math:`v^{L+1}` act on finitely many units, so
their averages do not concentrate. Kernels are then conditional on the drawn values. Given
:math:`u^0`, member :math:`a` is a network on the inputs :math:`u^0_a \circ x`; given
:math:`v^{L+1}`, kernels are multiplied by :math:`v_a v_b`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from embens.theory.ensembles import site_values
from embens.theory.expectations import slope_along
from embens.theory.kernel import MemberKernel
from embens.theory.placement import Modulation


@dataclass(frozen=True)
class Conditions:
    """Drawn modulations of inputs and outputs.

    Attributes:
        input_post: Modulation of the inputs, or None.
        output_pre: Modulation of the outputs, or None.
        input_values: Drawn values of the inputs' modulation, ``(member, feature)``, or None.
        output_values: Drawn values of the outputs' modulation, ``(member, output)``, or None.
    """

    input_post: Modulation | None = None
    output_pre: Modulation | None = None
    input_values: Tensor | None = None
    output_values: Tensor | None = None

    @classmethod
    def of(
        cls, ensemble: Any, input_post: Modulation | None, output_pre: Modulation | None
    ) -> Conditions:
        """Look up the drawn values of modulations of an ensemble."""
        input_values = output_values = None
        if input_post is not None:
            input_values = _feature_values(ensemble, input_post)
        if output_pre is not None:
            output_values = _feature_values(ensemble, output_pre)
        return cls(input_post, output_pre, input_values, output_values)

    @property
    def exist(self) -> bool:
        """True if kernels depend on drawn values."""
        return self.input_post is not None or self.output_pre is not None

    def modulate(self, x: Tensor, values: Tensor | None = None) -> Tensor:
        """Multiply inputs by the drawn input modulations, if there are any.

        Args:
            x: Inputs, ``(n, …)``.
            values: Values to use in place of the drawn ones, ``(member, feature)``.

        Returns:
            The inputs of each member, ``(member, n, …)``; without modulations the inputs.
        """
        if self.input_values is None:
            return x
        u = self.input_values.to(x) if values is None else values
        return x * u.reshape(len(u), 1, u.shape[1], *(1,) * (x.dim() - 2))

    def input_tangents(
        self, covariance: Callable[[Tensor, Tensor], Tensor], like: Tensor
    ) -> Tensor:
        r"""Return the tangent kernel of trainable input modulations, ``(member, n1, n2)``.

        .. math:: \sum_c \partial_{u_c} \partial_{u'_c} \Sigma_{aa}(u \circ x, u' \circ x')

        is its mean over initialisations. With finitely many inputs it does not concentrate.

        Args:
            covariance: The covariance of outputs as a function of the modulations of both inputs.
            like: A tensor with the dtype and device of the inputs.
        """
        assert self.input_post is not None
        assert self.input_values is not None
        u = self.input_values.to(like)

        def mixed_slope(direction: Tensor) -> Tensor:
            def inner_slope(u1: Tensor) -> Tensor:
                return slope_along(partial(covariance, u1), u, direction)

            return slope_along(inner_slope, u, direction)

        site = self.input_post.site
        channels = torch.eye(site.size, dtype=u.dtype, device=u.device)
        channels = channels.repeat_interleave(site.repeat, dim=1)
        total = mixed_slope(channels[0].expand_as(u))
        for channel in channels[1:]:
            total = total + mixed_slope(channel.expand_as(u))
        return total

    def apply(
        self,
        nngp: MemberKernel,
        shared: MemberKernel,
        individual: MemberKernel,
    ) -> tuple[MemberKernel, MemberKernel, MemberKernel]:
        """Give kernels their member axes, and multiply them by drawn output modulations.

        Args:
            nngp: Covariance of the outputs.
            shared: Tangent kernel of shared parameters.
            individual: Tangent kernel of individual parameters.

        Returns:
            The three kernels of the drawn members.
        """
        values = self.output_values if self.input_values is None else self.input_values
        assert values is not None
        members = len(values)
        weights = torch.ones(members, members, dtype=nngp.same.dtype, device=nngp.same.device)
        if self.output_values is not None:
            v = self.output_values.to(weights)
            weights = v @ v.mT / v.shape[1]  # mean over outputs
        diagonal = torch.eye(members, dtype=torch.bool, device=nngp.same.device)
        diagonal = diagonal[:, :, None, None]

        def condition(kernel: MemberKernel, more: Tensor | None = None) -> MemberKernel:
            same = weights.diagonal()[:, None, None] * kernel.same
            if more is not None:
                same = same + more
            cross = weights[:, :, None, None] * kernel.cross
            return MemberKernel(same, torch.where(diagonal, same[:, None], cross))

        output_tangents = None
        if self.output_pre is not None and self.output_pre.trainable:
            output_tangents = nngp.same
        return (
            condition(nngp),
            condition(shared),
            condition(individual, output_tangents),
        )


def _feature_values(ensemble: Any, modulation: Modulation) -> Tensor:
    """Return the drawn values of a modulation, one for each feature, ``(member, feature)``."""
    values = site_values(ensemble, modulation.site)
    return values.repeat_interleave(modulation.site.repeat, dim=1)
