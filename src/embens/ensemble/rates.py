r""":math:`\gamma` is a rate: that of the shared parameters of an ensemble.

With the sum of the members' losses as the objective, the paper's update

.. math::
    \Delta w = -\eta \frac{\gamma(M)}{M} \sum_a \frac{\partial L_a}{\partial w} - \eta \lambda w,
    \qquad \Delta u_a = -\eta_u \frac{\partial L_a}{\partial u_a}

is plain gradient descent with the rate :math:`\eta\gamma/M` and the decay :math:`\lambda M/\gamma`
for the shared parameters, with any momentum.

**Optimizers of the Adam kind** take the same step for a gradient and for any multiple of it, so
their rate can't be :math:`\eta\gamma/M`. Where the members' gradients :math:`g_a` have one size and
the pairwise cosine :math:`r`, a step of SGD changes a member's loss by

.. math::
    -\eta \frac{\gamma}{M} \Big\langle g_a, \sum_b g_b \Big\rangle
    = -\eta \frac{\gamma}{\gamma^*} |g|^2, \qquad \gamma^* = \frac{M}{1 + (M-1) r} ,

so :math:`\gamma` is the pace :math:`\gamma/\gamma^*` relative to the natural one, and so it is for
them with the rate :math:`\eta\gamma/\gamma^*`. AdamW multiplies its decay by the rate, so it is
:math:`\lambda\gamma^*/\gamma`; Adam adds it to the gradient, so it is :math:`\lambda M/\gamma`.

Every group has its factor of the rate as ``gamma_factor``, for code that sets rates itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from embens.checks import Gamma, gradient_factor

if TYPE_CHECKING:
    from embens.ensemble.module import EmbeddedEnsemble

MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]


def gamma_of(members: int, coupling: float) -> float:
    r"""Return :math:`\gamma^*`; with :math:`r < 0` deviations are faster than the mean."""
    return members / max(1 + (members - 1) * coupling, 1 - coupling)


def shared_factors(
    ensemble: EmbeddedEnsemble, gamma: Gamma, optimizer: MakeOptimizer
) -> tuple[float, float]:
    """Return the factors of the rate and of the decay of the shared parameters."""
    natural, members = ensemble.natural_gamma, ensemble.members
    factor = gradient_factor(gamma, members, natural)
    kind = kind_of(optimizer)
    if factor == 0:
        return 0.0, 0.0
    rate = factor * members / natural if kind.scale_free else factor
    return rate, 1 / (rate if kind.decoupled else factor)


class Kind(NamedTuple):
    """What an optimizer does with the size of a gradient, and with decay."""

    scale_free: bool  # it takes the same steps for a gradient and for any multiple of it
    decoupled: bool  # of these: its decay is multiplied by the rate, not added to the gradient


def kind_of(optimizer: MakeOptimizer) -> Kind:
    """Return the kind; what is not known is tried on a small parameter."""
    made = optimizer.func if isinstance(optimizer, functools.partial) else optimizer
    if made is torch.optim.SGD:
        return Kind(False, False)
    if optimizer is torch.optim.Adam or optimizer is torch.optim.AdamW:
        return Kind(True, optimizer is torch.optim.AdamW)
    short, long = _last_step(optimizer, 1.0), _last_step(optimizer, 8.0)
    size = float(short.norm())
    if size == 0 or float((long - short).norm()) > 0.01 * size:
        return Kind(False, False)
    plain, decayed = (_last_step(optimizer, 1e6, decay) for decay in (0.0, 0.5))
    return Kind(True, float((decayed - plain).norm()) > 0.01 * size)


def is_linear_in_rate(optimizer: MakeOptimizer) -> bool:
    """Return whether the steps of an optimizer are proportional to its rate."""
    short, long = _last_step(optimizer, 1.0), _last_step(optimizer, 1.0, lr=0.02)
    return torch.allclose(long, 2 * short, rtol=1e-3, atol=1e-6)


def _last_step(
    optimizer: MakeOptimizer, scale: float, decay: float = 0.0, lr: float = 0.01
) -> Tensor:
    start = torch.linspace(1.0, 2.0, 6).reshape(2, 3)
    parameter = nn.Parameter(start.clone())
    groups = [{"params": [parameter], "lr": lr, "weight_decay": decay}]
    trial = optimizer(groups) if callable(optimizer) else optimizer
    if not isinstance(trial, Optimizer) or not callable(optimizer):
        raise TypeError(
            "optimizer: expected a function from parameter groups to a torch optimizer, like "
            f"torch.optim.Adam or partial(torch.optim.SGD, momentum=0.9); got {trial!r} from it"
        )
    before = start
    for turn in range(10):  # some optimizers begin with a few steps of another kind
        before = parameter.detach().clone()
        parameter.grad = scale * torch.cos(start * (3.0 + turn) * 2)
        try:
            trial.step()
        except TypeError as error:
            raise TypeError(
                f"optimizer: {type(trial).__name__} can't take plain steps ({error}); "
                "optimizers that need a closure are for a loop of your own"
            ) from None
    return parameter.detach() - before
