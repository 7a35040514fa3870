r"""What a layer's activation does to a Gaussian: the contract of all duals.

Let :math:`(z_1, z_2)` be centred and jointly normal with variances :math:`q_1, q_2` and covariance
:math:`c`, and let :math:`v_1, v_2` be pre-activation modulations, independent of them:

.. math::
    F = E[\phi(v_1 z_1)\, \phi(v_2 z_2)], \quad
    G = E[v_1 v_2\, \phi'(v_1 z_1)\, \phi'(v_2 z_2)] = \partial_c F, \quad
    H = E[z_1 z_2\, \phi'(v_1 z_1)\, \phi'(v_2 z_2)]

In one member :math:`v_1 = v_2`: that is ``same``. In two they are independent with the same law:
that is ``cross``, where :math:`H` never enters a kernel; ``joint`` knows joint laws as well.
The printed paper factorises :math:`G` into :math:`E[v_1 v_2]\, E[\phi' \phi']`, which is wrong:
both depend on :math:`v`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.autograd import forward_ad

from embens.laws import Joint, Law


class Dual(ABC):
    """Expectations of one activation.

    Variances and covariance are tensors that broadcast, of one dtype and on one device; results
    have the broadcast shape. ``law`` is that of the modulation; None means that there is none.
    Where a variance is 0, the correlation is taken to be 0.
    """

    @abstractmethod
    def same(
        self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None, *, with_h: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return :math:`F, G, H` within a member; None for the last unless ``with_h``."""

    @abstractmethod
    def cross(self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None) -> tuple[Tensor, Tensor]:
        """Return :math:`F, G` between two members."""

    def joint(
        self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None, members: int
    ) -> tuple[Tensor, Tensor]:
        """Return :math:`F, G` between two of so many members, whose law may be joint."""
        if not isinstance(law, Joint):
            return self.cross(q1, q2, c, law)
        alone, share = law.marginal(members), law.equal_share(members)
        equal = self.same(q1, q2, c, alone, with_h=False)
        f, g = self.cross(q1, q2, c, alone)
        return share * equal[0] + (1 - share) * f, share * equal[1] + (1 - share) * g

    def prepare(self, q_min: float, q_max: float, law: Law | None) -> Dual:
        """Return a dual that is fast for this law and all variances between these two."""
        return self


def tells_apart(law: Law | None) -> bool:
    """Whether members draw different modulations from this law; else ``cross`` is ``same``."""
    return law is not None and law.overlap < 1


def roots(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the square root of a variance and its inverse, or zeros for a variance of 0."""
    positive = q > 0
    root = torch.where(positive, q, 1.0).sqrt()
    return torch.where(positive, root, 0.0), torch.where(positive, 1 / root, 0.0)


def is_differentiated(*tensors: Tensor) -> bool:
    """Whether derivatives are being taken, so that nothing may be done in place."""
    if torch._C._are_functorch_transforms_active():
        return True
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return True
    return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)
