r"""Rates: the paper's schedule, and what :math:`\gamma` means to an optimiser that cancels it.

**Scale-free optimisers.** Adam, RMSprop, Adagrad, Lion and the like take the same step for
:math:`G` and for :math:`cG`, so a constant :math:`\gamma(M)/M` in the gradient of the shared
parameters does nothing. With SGD it is a factor of their rate: where the members' gradients
:math:`g_a` have the same size and the pairwise cosine :math:`r`, a step changes a member's loss by

.. math::
    -\eta \frac{\gamma}{M} \Big\langle g_a, \sum_b g_b \Big\rangle
    = -\eta \frac{\gamma}{\gamma^*} |g|^2, \qquad \gamma^* = \frac{M}{1 + (M-1) r} ,

that is, :math:`\gamma` sets the pace :math:`\gamma/\gamma^*` relative to the natural one. So it
does with a scale-free optimiser if the rate of the shared parameters is
:math:`\eta\,\gamma/\gamma^*`: the rate as it was given for the natural :math:`\gamma` (and for
None), :math:`\eta/M` for :math:`\gamma = 1` and independent members, nothing for 0.
:func:`embens.fit` does this. In a loop of one's own nobody can know the optimiser, and a ``gamma``
passed to the objective has no effect there: multiply the ``lr`` of the shared group by
:func:`shared_rate_factor`.

What is not restored is the natural pace itself. A step of given size serves all members at once,
so each learns more slowly than the reference would with the same rate, by a factor between
:math:`1/\sqrt{\gamma^*}` (gradients alike in size everywhere) and 1 (each weight matters to few
members). Decay that is decoupled from the gradient (AdamW) goes with the rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from embens import checks
from embens.checks import Gamma

if TYPE_CHECKING:
    from embens.ensemble import EmbeddedEnsemble

Optimiser = Callable[[list[dict[str, Any]]], Optimizer]
Schedule = Callable[[Optimizer], LRScheduler]


def linear_decay(epochs: int, *, hold: float = 0.5, final: float = 0.01) -> Schedule:
    """Return the paper's schedule: a constant rate, then linearly down.

    Args:
        epochs: of the whole run.
        hold: fraction of the epochs with the full rate.
        final: fraction of the rate at the end; the last epoch comes one step short of it.

    Example:
        >>> optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> scheduler = linear_decay(8, final=0.0)(optimiser)
        >>> [scheduler.lr_lambdas[0](epoch) for epoch in range(8)]
        [1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if not 0 <= hold <= 1 or not 0 <= final <= 1:
        raise ValueError(f"hold and final are fractions from 0 to 1; got {hold} and {final}")

    def factor(epoch: int) -> float:
        left = (epochs - epoch) / max(epochs * (1 - hold), 1e-12)
        return final + (1 - final) * min(1.0, max(0.0, left))

    return lambda optimiser: LambdaLR(optimiser, factor)


def sgd(groups: list[dict[str, Any]]) -> Optimizer:
    """Return the paper's optimiser: SGD with momentum 0.9."""
    return torch.optim.SGD(groups, momentum=0.9)


def shared_rate_factor(ensemble: EmbeddedEnsemble, gamma: Gamma = None) -> float:
    r"""Return :math:`\gamma/\gamma^*`, for the shared rate of a scale-free optimiser."""
    natural, members = ensemble.natural_gamma, ensemble.members
    return checks.gradient_factor(gamma, members, natural) * members / natural


def is_scale_free(optimiser: Optimiser) -> bool:
    """Return whether an optimiser takes the same steps for a gradient and for eight times it.

    It is tried on a small parameter, so that optimisers from elsewhere are known as well.
    """
    short, long = _last_step(optimiser, 1.0), _last_step(optimiser, 8.0)
    size = float(short.norm())
    return size > 0 and float((long - short).norm()) < 0.01 * size


def _last_step(optimiser: Optimiser, scale: float) -> torch.Tensor:
    start = torch.linspace(1.0, 2.0, 6).reshape(2, 3)
    parameter = torch.nn.Parameter(start.clone())
    groups = [{"params": [parameter], "lr": 0.01, "weight_decay": 0.0}]
    trial = optimiser(groups) if callable(optimiser) else optimiser
    if not isinstance(trial, Optimizer) or not callable(optimiser):
        raise TypeError(
            "optimiser: expected a function from parameter groups to a torch optimiser, like "
            f"torch.optim.Adam or partial(torch.optim.SGD, momentum=0.9); got {trial!r} from it"
        )
    before = start
    for turn in range(10):  # some optimisers begin with a few steps of another kind
        before = parameter.detach().clone()
        parameter.grad = scale * torch.cos(start * (3.0 + turn) * 2)
        try:
            trial.step()
        except TypeError as error:
            raise TypeError(
                f"optimiser: {type(trial).__name__} can't take plain steps ({error}); "
                "optimisers that need a closure are for a loop of your own"
            ) from None
    return parameter.detach() - before
