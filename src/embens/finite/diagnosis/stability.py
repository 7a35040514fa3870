r"""The largest stable rate of an ensemble, from its measured tangent kernel.

A step of gradient descent with the rate :math:`\eta` is stable where

.. math::
    \eta < \frac{2}{\lambda_{\max}(\Theta)\,\lambda_{\max}(H)}, \qquad
    \Theta_{ab} = \frac{\gamma}{M} \Theta^{com}_{ab} + \delta_{ab} \Theta^{ind}_a ,

with the second derivative :math:`H` of one member's loss by its outputs. The kernel is that of a
few samples, averaged over outputs (its trace), and both factors are those of the present weights: a
first guess for a sweep, not a promise. With momentum :math:`\beta` the bound is
:math:`1+\beta` times as large.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embens.ensemble import EmbeddedEnsemble
from embens.finite.diagnosis.measurement import Budget, Measured, take
from embens.finite.diagnosis.report import Rates
from embens.finite.empirical.kernels import trace_of
from embens.objective import Criterion


def suggested_rates(
    ensemble: EmbeddedEnsemble,
    measured: Measured,
    criterion: Criterion,
    gammas: tuple[float, float],
    budget: Budget,
) -> Rates:
    """Return the rates as far as they can be found, the stable one for each of two gammas."""
    shared, own = (torch.tensor(norms).square() for norms in (measured.shared, measured.individual))
    factor = None
    if ensemble.plan.sites and float(own.sum()) > 0 and float(shared.sum()) > 0:
        factor = float((shared.mean() / own.mean()).sqrt())
    outputs, rows = measured.outputs, min(budget.rate_samples, measured.rows)
    stable: list[float] = []
    if rows and (not isinstance(outputs, Tensor) or len(outputs) != measured.rows):
        measured.notes.append("no stable rate: outputs are not one tensor with a row per sample")
    elif rows:
        index, count = torch.arange(rows), outputs[0].numel()
        x, target = (take(values, index) for values in (measured.x, measured.target))
        chosen = torch.randperm(count)[: budget.rate_outputs].sort().values
        try:
            kernel = trace_of(ensemble, x, chosen=chosen, memory=budget.memory).to(torch.float64)
            bend = curvature(outputs[index], target, criterion)
            joint = (kernel.ntk(gamma).transpose(1, 2).flatten(2).flatten(0, 1) for gamma in gammas)
            tops = [bend * float(torch.linalg.eigvalsh(j / len(chosen))[-1]) for j in joint]
            stable = [2 / top if top > 0 else float("inf") for top in tops]
            if len(chosen) < count:
                what = f"the stable rate is that of {len(chosen)} of {count} outputs"
                measured.notes.append(what)
        except (ValueError, RuntimeError, NotImplementedError, TypeError) as error:
            measured.notes.append(f"no stable rate: {str(error).splitlines()[0]}")
    return Rates(*stable, modulation_factor=factor)


def curvature(outputs: Tensor, target: Any, criterion: Criterion, *, steps: int = 30) -> float:
    r"""Return :math:`\lambda_{\max}` of the second derivative of a loss by its outputs.

    Example:
        >>> round(curvature(torch.zeros(4, 2), torch.ones(4, 2), torch.nn.functional.mse_loss), 6)
        0.25
    """
    size = 0.0
    with torch.enable_grad():
        outputs = outputs.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(
            criterion(outputs, target).mean(), outputs, create_graph=True
        )
        vector = torch.cos(torch.arange(outputs.numel(), dtype=outputs.dtype) * 1.7 + 0.3)
        vector = vector.to(outputs.device).reshape(outputs.shape)
        for _ in range(steps if slope.requires_grad else 0):
            vector = vector / vector.norm()
            (vector,) = torch.autograd.grad(slope, outputs, vector, retain_graph=True)
            size = float(vector.norm())
            if size == 0:
                break
    return size
