"""Clipping of gradients, member by member."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embens.checks import check_number
from embens.ensemble import EmbeddedEnsemble
from embens.optim import Gamma, gradient_factor
from embens.training.callbacks import Callback

if TYPE_CHECKING:
    from embens.training.run import Run


@torch.no_grad()
def clip_gradients_(ensemble: EmbeddedEnsemble, norm: float, *, gamma: Gamma = None) -> Tensor:
    r"""Clip the gradients of an ensemble in place, member by member.

    The gradient that moves the network of member :math:`a` has the norm :math:`n_a`. The factor
    :math:`c_a` clips it to the norm :math:`C`:

    .. math::
        n_a^2 = \Big\| \frac{\gamma}{M} \sum_b \frac{\partial L_b}{\partial w} \Big\|^2
              + \Big\| \frac{\partial L_a}{\partial u_a} \Big\|^2, \qquad
        c_a = \min\Big(1, \frac{C}{n_a}\Big).

    Individual gradients are multiplied by the :math:`c_a` of their member, shared gradients by the
    smallest :math:`c_a`. So no member's norm exceeds :math:`C`.

    Args:
        ensemble: An ensemble with the gradients of the objective, before the optimizer's step.
        norm: The largest norm of a member's gradient, :math:`C`.
        gamma: As for :meth:`~embens.EmbeddedEnsemble.parameter_groups`.

    Returns:
        The norms before clipping, ``(member,)``.

    Example:
        >>> from torch import nn
        >>> from embens import batch_ensemble
        >>> ensemble = batch_ensemble(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)), 3)
        >>> ensemble(torch.ones(4, 2)).square().sum().backward()
        >>> _ = clip_gradients_(ensemble, norm=0.5)
        >>> bool((clip_gradients_(ensemble, norm=0.5) < 0.501).all())
        True
    """
    check_number("norm", norm, "a number above 0", lambda value: value > 0)
    factor = gradient_factor(gamma, ensemble.members, ensemble.natural_gamma)
    shared = [p.grad for p in ensemble.shared_parameters() if p.grad is not None]
    individual = [p.grad for p in ensemble.individual_parameters() if p.grad is not None]
    squared_norms = []
    for gradient in individual:
        squared_norms.append(gradient.reshape(ensemble.members, -1).square().sum(1))
    if shared:
        shared_norm = factor * torch.nn.utils.get_total_norm(shared)
        squared_norms.append(shared_norm.square().expand(ensemble.members))
    norms = torch.stack(squared_norms).sum(0).sqrt()
    scales = (norm / norms).clamp(max=1.0)
    for gradient in shared:
        gradient.mul_(scales.min())
    for gradient in individual:
        trailing_axes = [1] * (gradient.dim() - 1)
        gradient.mul_(scales.view(-1, *trailing_axes))
    return norms


class ClipGradients(Callback):
    """Clip the gradient of every member before each step (:func:`clip_gradients_`).

    Args:
        norm: The largest norm of a member's gradient, above 0.
        gamma: As for :func:`clip_gradients_`; None: the gamma of ``fit``.

    Example:
        >>> callbacks = [ClipGradients(1.0)]
    """

    changes_training = True

    def __init__(self, norm: float, gamma: Gamma = None):
        self.norm = check_number("norm", norm, "a number above 0", lambda value: value > 0)
        self.gamma = gamma

    def on_gradients(self, run: Run) -> None:
        """Clip the gradients."""
        gamma = run.gamma if self.gamma is None else self.gamma
        clip_gradients_(run.ensemble, self.norm, gamma=gamma)
