r"""The largest stable rate of an ensemble, from its measured tangent kernel.

A step of gradient descent with the rate :math:`\eta` is stable where

.. math::
    \eta < \frac{2}{\lambda_{\max}(\Theta)\,\lambda_{\max}(H)}, \qquad
    \Theta_{ab} = \frac{\gamma}{M} \Theta^{com}_{ab} + \delta_{ab} \Theta^{ind}_a ,

with the second derivative :math:`H` of one member's loss by its outputs; :math:`2B/\lambda` of
theory is the case of a squared loss with ½. The kernel is that of a few samples, averaged over
outputs (its trace), and both factors are those of the present weights: a first guess for a sweep,
not a promise. With momentum :math:`\beta` the bound is :math:`1+\beta` times as large.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from embens.ensemble import EmbeddedEnsemble
from embens.finite.empirical.kernels import trace_of
from embens.objective import Criterion


def curvature(outputs: Tensor, target: Any, criterion: Criterion, *, steps: int = 30) -> float:
    r"""Return :math:`\lambda_{\max}` of the second derivative of a loss by its outputs.

    Example:
        >>> round(curvature(torch.zeros(4, 2), torch.ones(4, 2), torch.nn.functional.mse_loss), 6)
        0.25
    """
    with torch.enable_grad():
        outputs = outputs.detach().clone().requires_grad_()
        loss = criterion(outputs, target)
        loss = loss.mean() if loss.dim() else loss
        (slope,) = torch.autograd.grad(loss, outputs, create_graph=True)
        vector = torch.cos(torch.arange(outputs.numel(), dtype=outputs.dtype) * 1.7 + 0.3)
        vector = vector.to(outputs.device).reshape(outputs.shape)
        size = 0.0
        if not slope.requires_grad:
            return size
        for _ in range(steps):
            vector = vector / vector.norm()
            (vector,) = torch.autograd.grad(slope, outputs, vector, retain_graph=True)
            size = float(vector.norm())
            if size == 0:
                break
    return size


def largest_stable_rates(
    ensemble: EmbeddedEnsemble,
    x: Any,
    target: Any,
    criterion: Criterion,
    *,
    outputs: Tensor,
    gammas: Sequence[float],
    chosen: Tensor,
    memory: float,
) -> list[float]:
    """Return the largest stable rate for each gamma.

    ``outputs`` are those of one member for these samples, ``(batch, …)``; the kernel is averaged
    over the ``chosen`` ones of a sample. A ValueError where ``memory``, in bytes, is too small.
    """
    kernel = trace_of(ensemble, x, chosen=chosen, memory=memory).to(torch.float64)
    count = len(chosen)
    bend = curvature(outputs, target, criterion)
    found = []
    for gamma in gammas:
        joint = kernel.ntk(gamma).transpose(1, 2).flatten(2).flatten(0, 1) / count
        top = float(torch.linalg.eigvalsh(joint)[-1])
        found.append(2 / (top * bend) if top * bend > 0 else float("inf"))
    return found
