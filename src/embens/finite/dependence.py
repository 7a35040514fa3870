r"""Measures of the dependence between members, from the paper's figures of tangent kernels.

All are functions of a tangent kernel :math:`\Theta_{ab}(x, x')` between all members. It is either a
:class:`~embens.finite.FiniteKernel` without class axes (``outputs="nll"``, ``"target"`` or
``"trace"``), which is combined to

.. math:: \Theta_{ab} = \frac{\gamma}{M} \Theta^{com}_{ab} + \delta_{ab} \Theta^{ind}_a

with the paper's :math:`\gamma = M`, or a tensor ``(member, member, batch, batch)`` such as
``kernel.ntk(gamma)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embens.finite.geometry import off_diagonal
from embens.finite.tangent import FiniteKernel

if TYPE_CHECKING:
    from jaxtyping import Float

Kernel = FiniteKernel | Tensor


def ntk_ratio(
    kernel: Kernel, *, same: Float[Tensor, "*m n1 n2"] | None = None
) -> Float[Tensor, ""]:
    r"""Return the mean squared kernel between members, divided by that within members.

    .. math::
        \frac{\langle \Theta_{ab}^2(x, x') \rangle_{a \ne b,\, x, x'}}
             {\langle \Theta_{aa}^2(x, x') \rangle_{a,\, x, x'}}

    It falls as one over the width if members are independent.

    Args:
        kernel: Between at least two members.
        same: The kernel within members for the denominator, for example that of the limit. The
            measured one is inflated by heavy tails at small width. None: the measured one.

    Returns:
        The ratio, a tensor without axes, in float64.

    Example:
        >>> kernel = torch.tensor([[2.0, 1.0], [1.0, 2.0]])[:, :, None, None]
        >>> ntk_ratio(kernel).item()
        0.25
    """
    theta = _without_classes(kernel)
    cross = off_diagonal(theta.square().mean((2, 3))).mean()
    within = theta.diagonal() if same is None else same.to(theta)
    return cross / within.square().mean()


def other_members_weight(kernel: Kernel, m: int) -> Float[Tensor, ""]:
    r"""Return the effect of ``m`` other members on a member, relative to its effect on itself.

    Let :math:`t_{ab}(x) = \frac1B \sum_{x'} \Theta_{ab}(x, x')` be the effect of training member
    :math:`b` on member :math:`a` at :math:`x`. For a set :math:`\mathcal B` of ``m`` other members
    the result is

    .. math::
        \frac{\sum_{a, x} \big( \sum_{b \in \mathcal B} t_{ab}(x) \big)^2}
             {\sum_{a, x} t_{aa}(x)^2} ,

    averaged over all such sets, in closed form. It grows as :math:`m` over the width if members are
    independent, and as :math:`m^2` if they are not. With the kernel of samples with themselves and
    ``outputs="nll"`` it refers to :math:`\partial_t \log p`; the paper's third number is the same
    with ``outputs="target"``.

    Args:
        kernel: Between at least two members.
        m: The number of other members.

    Returns:
        The relative effect, a tensor without axes, in float64.

    Example:
        >>> kernel = torch.ones(4, 4, 1, 1)  # all members equal
        >>> other_members_weight(kernel, 3).item()
        9.0
    """
    theta = _without_classes(kernel)
    other_members = len(theta) - 1
    is_integer = isinstance(m, int) and not isinstance(m, bool)
    if not is_integer or not 1 <= m <= other_members:
        raise ValueError(
            f"m must be a number of other members, from 1 to {other_members}, got {m!r}."
        )
    effects = theta.mean(3)  # (member, member, batch)
    same = effects.diagonal().mT  # (member, batch)
    # The mean over sets of a squared sum. With n other members, the square of one member counts
    # m / n times, and the product of two members m (m - 1) / (n (n - 1)) times.
    squares = effects.square().sum(1) - same.square()
    products = (effects.sum(1) - same).square() - squares
    product_weight = 0.0
    if m > 1:
        product_weight = (m - 1) / (other_members - 1)
    mean_effect = m / other_members * (squares + product_weight * products)
    return mean_effect.mean() / same.square().mean()


def ntk_drift(before: Kernel, after: Kernel) -> Float[Tensor, ""]:
    r"""Return the relative change of a network's kernel, :math:`|\Delta\Theta| / |\Theta|`.

    Norms are over all entries. The mean of this over seeds falls with the width (the paper's A3);
    the change of the mean kernel need not.

    Args:
        before: The kernel at one time.
        after: The kernel of the same members and samples at another time.

    Returns:
        The relative change, a tensor without axes, in float64.

    Example:
        >>> before = torch.ones(2, 2, 3, 3)
        >>> ntk_drift(before, 1.5 * before).item()
        0.5
    """
    first, second = _between_members(before), _between_members(after)
    if first.dim() not in (4, 6):
        raise ValueError(
            "expected a kernel (member, member, batch, batch[, class, class]), got shape "
            f"{tuple(first.shape)}."
        )
    if first.shape != second.shape:
        raise ValueError(
            "both kernels must be of the same members and samples, got shapes "
            f"{tuple(first.shape)} and {tuple(second.shape)}."
        )
    return (second - first).norm() / first.norm()


def _between_members(kernel: Kernel) -> Tensor:
    """Return the kernel between all members, in float64."""
    kernel = kernel.to(torch.float64)
    if isinstance(kernel, FiniteKernel):
        return kernel.ntk(kernel.members)
    return kernel


def _without_classes(kernel: Kernel) -> Tensor:
    """Return a kernel ``(member, member, batch, batch)`` of at least two members, in float64."""
    theta = _between_members(kernel)
    if theta.dim() != 4:
        raise ValueError(
            f"expected a kernel (member, member, batch, batch), got shape {tuple(theta.shape)}. "
            "Reduce the classes: outputs='nll', 'target' or 'trace'."
        )
    if len(theta) < 2:
        raise ValueError("dependence is between members, got a kernel of one member.")
    return theta
