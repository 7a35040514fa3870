r"""Expectations of an activation under normal distributions: the interface of all duals.

Let :math:`(z_1, z_2)` be centred and jointly normal with variances :math:`q_1, q_2` and covariance
:math:`c`. Let :math:`v_1, v_2` be pre-activation modulations, independent of :math:`z_1, z_2`. A
dual of the activation :math:`\phi` computes

.. math::
    F = E[\phi(v_1 z_1)\, \phi(v_2 z_2)], \quad
    G = E[v_1 v_2\, \phi'(v_1 z_1)\, \phi'(v_2 z_2)] = \partial_c F, \quad
    H = E[z_1 z_2\, \phi'(v_1 z_1)\, \phi'(v_2 z_2)] .

Within one member :math:`v_1 = v_2` (method ``same``). Between two members :math:`v_1, v_2` are
independent draws of the same law (``cross``), or draws of a joint law (``joint``). No kernel needs
:math:`H` between members. The paper prints :math:`E[v_1 v_2]\, E[\phi' \phi']` for :math:`G`; that
is wrong, because both factors depend on :math:`v`.
"""

from __future__ import annotations

import importlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.autograd import forward_ad

from embens.laws import Joint, Law


class Dual(ABC):
    """Expectations F, G and H of one activation.

    Variances ``q1``, ``q2`` and the covariance ``c`` are tensors of one dtype and device that
    broadcast. Results have the broadcast shape. ``law`` is the distribution of the pre-activation
    modulation; None means that there is no modulation. Where a variance is 0, the correlation
    counts as 0.

    Example:
        >>> from embens.theory import Dual
        >>> class Linear(Dual):
        ...     def same(self, q1, q2, c, law, *, with_h=True):
        ...         moment = 1.0 if law is None else law.second_moment
        ...         return moment * c, moment * torch.ones_like(c), c if with_h else None
        ...
        ...     def cross(self, q1, q2, c, law):
        ...         moment = 1.0 if law is None else law.mean**2
        ...         return moment * c, moment * torch.ones_like(c)
        >>> one = torch.ones(1)
        >>> dual = Linear().prepare(q_max=1.0, law=None)
        >>> dual.same(one, one, 0.5 * one, None)[0]
        tensor([0.5000])
        >>> dual.joint(one, one, 0.5 * one, None, members=4)[0]
        tensor([0.5000])
    """

    @abstractmethod
    def same(
        self,
        q1: Tensor,
        q2: Tensor,
        c: Tensor,
        law: Law | None,
        *,
        with_h: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute the expectations within a member.

        Args:
            q1: Variances of the first inputs.
            q2: Variances of the second inputs.
            c: Covariances of both.
            law: Distribution of the modulation, or None.
            with_h: Compute H.

        Returns:
            F, G and H; None instead of H unless ``with_h``.
        """

    @abstractmethod
    def cross(self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None) -> tuple[Tensor, Tensor]:
        """Compute the expectations between two members with independent modulations.

        Args:
            q1: Variances of the first inputs.
            q2: Variances of the second inputs.
            c: Covariances of both, between members.
            law: Distribution of the modulation, or None.

        Returns:
            F and G.
        """

    def joint(
        self,
        q1: Tensor,
        q2: Tensor,
        c: Tensor,
        law: Law | None,
        members: int,
    ) -> tuple[Tensor, Tensor]:
        """Compute the expectations between two members, for any law.

        Args:
            q1: Variances of the first inputs.
            q2: Variances of the second inputs.
            c: Covariances of both, between members.
            law: Distribution of the modulation, or None.
            members: Number of members that a joint law was drawn for.

        Returns:
            F and G.
        """
        if not isinstance(law, Joint):
            return self.cross(q1, q2, c, law)
        # The pair of modulations is a mixture of equal and of independent ones.
        marginal = law.marginal(members)
        share = law.equal_share(members)
        f_equal, g_equal, _ = self.same(q1, q2, c, marginal, with_h=False)
        f_independent, g_independent = self.cross(q1, q2, c, marginal)
        f = share * f_equal + (1 - share) * f_independent
        g = share * g_equal + (1 - share) * g_independent
        return f, g

    def prepare(self, q_max: float, law: Law | None) -> Dual:
        """Return a dual that is faster for one law and a bounded variance.

        Args:
            q_max: Largest variance that will occur.
            law: Distribution of the modulation, or None.

        Returns:
            This dual, unless a subclass can choose its quadrature in advance.
        """
        return self


def differs_between_members(law: Law | None) -> bool:
    """Return True if members draw different modulations; otherwise ``cross`` equals ``same``."""
    return law is not None and law.overlap < 1


def roots(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the square roots of variances and their inverses, with 0 for the inverse of 0.

    Example:
        >>> roots(torch.tensor([4.0, 0.0]))
        (tensor([2., 0.]), tensor([0.5000, 0.0000]))
    """
    positive = q > 0
    # Replacing 0 before the square root keeps its derivative finite.
    root = torch.where(positive, q, 1.0).sqrt()
    return torch.where(positive, root, 0.0), torch.where(positive, 1 / root, 0.0)


def is_differentiated(*tensors: Tensor) -> bool:
    """Return True while derivatives are taken, which forbids in-place operations."""
    if torch._C._are_functorch_transforms_active():  # there is no public way to ask
        return True
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def slope_along(function: Callable[[Tensor], Tensor], point: Tensor, direction: Tensor) -> Tensor:
    """Return the derivative of a function along a direction.

    Example:
        >>> slope_along(torch.square, torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.5]))
        tensor([6., 4.])
    """
    _load_derivative_rules()
    return torch.func.jvp(function, (point,), (direction,))[1]


@cache
def _load_derivative_rules() -> None:
    """Call ``torch.func.jvp`` once, to suppress the deprecation warning of its first call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.func.jvp(torch.sqrt, (torch.ones(()),), (torch.ones(()),))
        importlib.import_module("torch._decomp.decompositions_for_jvp")
