r"""Clip gradients so that a bound means the same for any number of members.

To a member :math:`a` a step on :func:`embens.objective` is one of its own network, with

.. math::
    n_a^2 = \Big\| \frac{\gamma}{M} \sum_b \frac{\partial L_b}{\partial w} \Big\|^2
          + \Big\| \frac{\partial L_a}{\partial u_a} \Big\|^2, \qquad
    c_a = \min\Big(1, \frac{C}{n_a}\Big),

its gradient's norm and the factor that clips it to :math:`C`. Individual gradients are multiplied
by their member's :math:`c_a`, shared ones by the smallest, so no member's norm exceeds :math:`C`.
Equal members with :math:`\gamma = 1` are clipped as one of them alone would be.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embens.checks import Gamma, check_number, gradient_factor
from embens.ensemble import EmbeddedEnsemble


@torch.no_grad()
def clip_gradients_(ensemble: EmbeddedEnsemble, bound: float, *, gamma: Gamma = None) -> Tensor:
    """Clip the gradients of an ensemble in place; return the members' norms before, ``(member,)``.

    Args:
        ensemble: with the plain gradients of the objective, before the optimizer's step.
        bound: the largest norm, :math:`C`.
        gamma: as for :meth:`~embens.EmbeddedEnsemble.parameter_groups`.
    """
    check_number("clip", bound, "a number above 0", lambda value: value > 0)
    factor = gradient_factor(gamma, ensemble.members, ensemble.natural_gamma)
    shared = [p.grad for p in ensemble.shared_parameters() if p.grad is not None]
    own = [p.grad for p in ensemble.individual_parameters() if p.grad is not None]
    squares = [g.reshape(ensemble.members, -1).square().sum(1) for g in own]
    if shared:
        square = (factor * torch.nn.utils.get_total_norm(shared)).square()
        squares.append(square.expand(ensemble.members))
    norms = torch.stack(squares).sum(0).sqrt()
    scales = (bound / norms).clamp(max=1.0)
    for gradient in shared:
        gradient.mul_(scales.min())
    for gradient in own:
        gradient.mul_(scales.view(-1, *(1,) * (gradient.dim() - 1)))
    return norms
