r"""How much members depend on each other, by the numbers of the paper's NTK figures.

All are functions of a tangent kernel :math:`\Theta_{ab}(x, x')` between all members: a
:class:`~embens.finite.FiniteKernel` without class axes (``outputs="nll"``, ``"target"`` or
``"trace"``), which is combined to

.. math:: \Theta_{ab} = \frac{\gamma}{M} \Theta^{com}_{ab} + \delta_{ab} \Theta^{ind}_a

with the paper's :math:`\gamma = M`; or a tensor (member, member, batch, batch) that already is,
such as ``kernel.ntk(gamma)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embens.finite.empirical.kernels import FiniteKernel
from embens.finite.gradients import off_diagonal

if TYPE_CHECKING:
    from jaxtyping import Float

Kernel = FiniteKernel | Tensor


def ntk_ratio(
    kernel: Kernel, *, same: Float[Tensor, "*m n1 n2"] | None = None
) -> Float[Tensor, ""]:
    r"""Return the mean squared kernel between members over that within members.

    .. math::
        \frac{\langle \Theta_{ab}^2(x, x') \rangle_{a \ne b,\, x, x'}}
             {\langle \Theta_{aa}^2(x, x') \rangle_{a,\, x, x'}}

    It falls as one over the width where members are independent. The measured denominator is
    inflated by heavy tails at small width; give the limit's kernel as ``same`` to be rid of that.

    Example:
        >>> kernel = torch.tensor([[2.0, 1.0], [1.0, 2.0]])[:, :, None, None]
        >>> ntk_ratio(kernel).item()
        0.25
    """
    theta = _dense(kernel)
    cross = off_diagonal(theta.square().mean((2, 3))).mean()
    return cross / (theta.diagonal() if same is None else same.to(theta)).square().mean()


def other_members_weight(kernel: Kernel, m: int) -> Float[Tensor, ""]:
    r"""Return the weight of other members in :math:`\partial_t \log p`, relative to a member's own.

    With :math:`t_{ab}(x) = \frac1B \sum_{x'} \Theta_{ab}(x, x')`, what training member :math:`b`
    does to member :math:`a` at :math:`x`, and a set :math:`\mathcal B` of ``m`` other members,

    .. math::
        \frac{\sum_{a, x} \big( \sum_{b \in \mathcal B} t_{ab}(x) \big)^2}
             {\sum_{a, x} t_{aa}(x)^2} .

    The paper takes any such set; this is the mean over all of them, in closed form. It grows as
    :math:`m` over the width where members are independent, as :math:`m^2` where they are not.
    For the kernel of samples with themselves and ``outputs="nll"`` it is what its name says; the
    paper's third number is the same with ``outputs="target"``.

    Example:
        >>> kernel = torch.ones(4, 4, 1, 1)  # all members equal
        >>> other_members_weight(kernel, 3).item()
        9.0
    """
    theta = _dense(kernel)
    others = len(theta) - 1
    if isinstance(m, bool) or not isinstance(m, int) or not 1 <= m <= others:
        raise ValueError(
            f"m must be a whole number of other members, from 1 to {others}; got {m!r}"
        )
    pull = theta.mean(3)  # (member, member, batch)
    own = pull.diagonal().mT  # (member, batch)
    squares = pull.square().sum(1) - own.square()
    pairs = (pull.sum(1) - own).square() - squares
    together = (m - 1) / (others - 1) if m > 1 else 0.0
    return (m / others * (squares + together * pairs)).mean() / own.square().mean()


def ntk_drift(before: Kernel, after: Kernel) -> Float[Tensor, ""]:
    r"""Return how much the kernel of one network changed, :math:`|\Delta\Theta| / |\Theta|`.

    Of one seed: the mean of this over seeds is what falls with the width (the paper's A3), the
    change of the mean is not. Norms are over all entries.

    Example:
        >>> before = torch.ones(2, 2, 3, 3)
        >>> ntk_drift(before, 1.5 * before).item()
        0.5
    """
    first, second = (_dense(kernel, classes=True) for kernel in (before, after))
    if first.shape != second.shape:
        raise ValueError(
            "the kernels before and after must be of the same members and samples; got shapes "
            f"{tuple(first.shape)} and {tuple(second.shape)}"
        )
    return (second - first).norm() / first.norm()


def _dense(kernel: Kernel, *, classes: bool = False) -> Tensor:
    """Return the kernel between all members, in double precision."""
    theta = kernel.to(torch.float64)
    theta = theta.ntk(theta.members) if isinstance(theta, FiniteKernel) else theta
    if theta.dim() != 4 and not (classes and theta.dim() == 6):
        raise ValueError(
            "expected a kernel (member, member, batch, batch); got shape "
            f"{tuple(theta.shape)}. Reduce the classes: outputs='nll', 'target' or 'trace'."
        )
    if not classes and len(theta) < 2:
        raise ValueError("dependence is between members; got a kernel of one member")
    return theta
