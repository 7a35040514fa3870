r"""Interference: the variance, at finite width, of the tangent kernel between two members.

A training step of member :math:`b` changes the outputs of member :math:`a` through the kernel
:math:`\Theta_{ab}`. In the infinite-width limit this kernel is a number, zero for centred
modulations. At finite width it is random. To leading order in 1/width its variance is a sum over
hidden layers,

.. math::
    \mathrm{Var}\, \Theta_{ab}(x, x') = \Big(\frac{\gamma}{M}\Big)^2
        \sum_l \frac{\mathrm{Var}\, Y^l}{N_l} ,

where :math:`Y^l` is the contribution of one unit of layer :math:`l`
(:mod:`embens.theory.unit_noise`). Its coefficients are derivatives of the limit's recursion by the
kernels of layer :math:`l`. ``docs/theory-derivations.md`` derives the formula.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embens.checks import check_members
from embens.ensemble import EmbeddedEnsemble
from embens.optim import Gamma
from embens.theory.blocks import kernels
from embens.theory.kernel import resolve_gamma
from embens.theory.limit import Limit
from embens.theory.unit_chain import InterferingChain

if TYPE_CHECKING:
    from jaxtyping import Float

_PAIRS_AT_ONCE = 256


def interference(
    ensemble: EmbeddedEnsemble,
    x: Tensor,
    members: int | None = None,
    gamma: Gamma = None,
) -> Float[Tensor, "n n"]:
    r"""Compute the variance of :math:`\Theta_{ab}(x, x')`, a ≠ b, to leading order in 1/width.

    The variance is over draws of weights and modulations, for one output. Perceptrons and
    convolutional networks in ``nn.Sequential`` have a formula.

    Args:
        ensemble: An ensemble; the widths of its layers matter.
        x: Inputs, ``(n, …)``.
        members: Number of members M; None means that of the ensemble.
        gamma: Gradient scale: a number, a function of M, or None for the natural scale.

    Returns:
        The variance of :math:`\Theta_{ab} = \frac\gamma M \Theta^{com}_{ab}` for each pair of
        inputs, ``(n, n)``.

    Raises:
        TypeError: If layers and activations do not alternate, or members have copies of layers.
        ValueError: If inputs or outputs are modulated, or members are separate networks.

    Example:
        Signs in one hidden layer without an activation:

        >>> from embens import embed, laws, networks
        >>> net = networks.mlp(1, 100, depth=1, activation="identity")
        >>> signs = embed(net, 4, pre=None, post=laws.Signs(0.0))
        >>> round(interference(signs, torch.ones(1, 1), gamma=4).item(), 6)  # E[(z² + W²)²] / 100
        0.08
    """
    terms = interference_terms(ensemble, x, members, gamma)
    return torch.stack(list(terms.values())).sum(0)


def interference_terms(
    ensemble: EmbeddedEnsemble,
    x: Tensor,
    members: int | None = None,
    gamma: Gamma = None,
) -> dict[str, Float[Tensor, "n n"]]:
    """Compute the contribution of each hidden layer to :func:`interference`.

    Args:
        ensemble: An ensemble.
        x: Inputs, ``(n, …)``.
        members: Number of members M; None means that of the ensemble.
        gamma: Gradient scale, as in :func:`interference`.

    Returns:
        Variances ``(n, n)`` by the names of the layers whose units cause them.

    Example:
        >>> from embens import embed, laws, networks
        >>> signs = embed(networks.mlp(3, 64, depth=3), 4, pre=None, post=laws.Signs(0.0))
        >>> terms = interference_terms(signs, torch.eye(3))
        >>> [bool(term.any()) for term in terms.values()]  # the first and the last layer matter
        [True, False, True]
    """
    limit = Limit(ensemble, x)
    chain = InterferingChain.of(limit)
    members = ensemble.members if members is None else check_members(members)
    scale = resolve_gamma(kernels(ensemble, x), members, gamma) / members
    n = len(limit.x1)
    rows, columns = torch.triu_indices(n, n, device=limit.device)
    parts = []
    # Images go one pair at a time, because pairs of pixels are many.
    size = 1 if limit.x1.dim() > 2 else _PAIRS_AT_ONCE
    for i, j in zip(rows.split(size), columns.split(size), strict=True):
        parts.append(chain.variances(limit.x1[i], limit.x1[j]))
    terms = {}
    for index, layer in enumerate(chain.hidden):
        values = torch.cat([part[index] for part in parts])
        variance = values.new_zeros(n, n)
        variance[rows, columns] = values
        variance[columns, rows] = values
        terms[layer.name] = scale**2 * variance
    return terms


def layer_names(ensemble: EmbeddedEnsemble, x: Tensor) -> list[str]:
    """Return the names of all affine layers of a network that has a formula.

    Args:
        ensemble: An ensemble.
        x: Inputs, ``(n, …)``.
    """
    chain = InterferingChain.of(Limit(ensemble, x[:1]))
    return [layer.name for layer in chain.layers]
