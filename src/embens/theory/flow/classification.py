r"""Cross-entropy training in the limit, which has no closed form: the equation, solved numerically.

.. math::
    \dot f_a(x) = -\frac1B \sum_b \sum_{x'} \Theta_{ab}(x, x') \,
        \big(\mathrm{softmax} f_b(x') - e_{y(x')}\big)

All members' outputs are needed, since softmax mixes the modes of :mod:`embens.theory.flow`; still
the kernel is only its two blocks, :math:`\Theta R_a = K_d R_a + \Theta_{ab} \sum_b R_b`. What is
integrated is :math:`R_a(t)`, the residual up to time :math:`t`: outputs anywhere are those at
initialisation minus :math:`\frac1B \Theta R`, so that test data cost nothing on the way.

Infinite time is not here: separable classes drive outputs to infinity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from embens.checks import Gamma
from embens.theory.flow.problem import Problem
from embens.theory.kernel import Kernels, MemberKernel

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Residual = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class CrossEntropySettings:
    """How :func:`cross_entropy_flow` starts and computes.

    Attributes:
        classes: how many; None: the largest label and one.
        start: outputs before training on train and test data, ``(member, n, class)`` and
            ``(member, test, class)``; None: drawn from the prior.
        draws: how many initialisations to draw; None: one, without an axis for it.
        generator: draws them.
        shared_rate: relative rate of the shared parameters.
        individual_rate: relative rate of the modulations.
        method: a solver of ``scipy.integrate.solve_ivp``.
        rtol: its relative tolerance.
        atol: its absolute tolerance.
    """

    classes: int | None = None
    start: tuple[Tensor, Tensor] | None = None
    draws: int | None = None
    generator: torch.Generator | None = None
    shared_rate: float = 1.0
    individual_rate: float = 1.0
    method: str = "DOP853"
    rtol: float = 1e-6
    atol: float = 1e-8


_DEFAULT = CrossEntropySettings()


def cross_entropy_flow(
    k_train_train: Kernels,
    k_test_train: Kernels,
    k_test_test: Kernels | None,
    labels: Int[Tensor, " n"],
    members: int = 8,
    gamma: Gamma = None,
    *,
    times: Sequence[float] | Tensor,
    settings: CrossEntropySettings = _DEFAULT,
) -> Tensor:
    r"""Train infinitely wide ensembles by gradient flow on the cross-entropy of each member.

    Args:
        k_train_train: kernels of the train data with themselves.
        k_test_train: of the test data (rows) with the train data.
        k_test_test: of the test data with themselves; not needed where ``start`` is given.
        labels: class of each train sample.
        members: :math:`M`.
        gamma: gradient scale; see :func:`~embens.theory.gradient_flow`.
        times: at which outputs are wanted, in rising order.
        settings: start, rates and solver.

    Returns:
        Logits ``(time, member, test, class)``, each time ready for :mod:`embens.metrics`; with
        ``draws``, these come first.
    """
    problem = Problem.of(
        (k_train_train, k_test_train, k_test_test),
        members,
        gamma,
        rates={"shared_rate": settings.shared_rate, "individual_rate": settings.individual_rate},
        what="cross_entropy_flow",
    )
    sizes = len(problem.ntk[0].same), len(problem.ntk[1].same)
    labels, classes = _check_labels(labels, sizes[0], settings.classes)
    when = _check_times(times)
    if settings.start is None:
        drawn = problem.draw(classes, settings.draws or 1, settings.generator)
        starts = list(zip(*drawn, strict=True))
    else:
        starts = [_check_start(settings, [(members, size, classes) for size in sizes])]
    truth = one_hot(labels, classes).to(problem.ntk[0].same)
    solver = {"method": settings.method, "rtol": settings.rtol, "atol": settings.atol}
    results = [
        integrate(*problem.ntk, lambda f: f.softmax(-1) - truth, begin, when, **solver)
        for begin in starts
    ]
    return results[0] if settings.draws is None else torch.stack(results)


def integrate(
    ntk_train_train: MemberKernel,
    ntk_test_train: MemberKernel,
    residual: Residual,
    start: tuple[Float[Tensor, "member n k"], Float[Tensor, "member test k"]],
    times: Sequence[float],
    *,
    method: str = "DOP853",
    rtol: float = 1e-6,
    atol: float = 1e-8,
) -> Float[Tensor, "time member test k"]:
    """Return the test outputs at some times, for any loss by its ``residual`` of train outputs.

    ``residual`` is the gradient of the loss of each sample in each member's outputs.
    """
    try:
        from scipy.integrate import solve_ivp
    except ImportError as error:
        raise ImportError(
            "training on other losses than the squared one needs scipy, got none; install it with: "
            "pip install 'embens[theory]'"
        ) from error
    train, test = start
    samples = train.shape[1]

    def summed(state) -> Tensor:
        return torch.from_numpy(state).to(train).view(train.shape)

    def slope(_: float, state):
        outputs = train - apply(ntk_train_train, summed(state)) / samples
        return residual(outputs).flatten().cpu().numpy()

    nothing = torch.zeros(train.numel(), dtype=train.dtype).numpy()
    end = max(times[-1], 1e-300)  # the solver needs some time
    solution = solve_ivp(
        slope, (0.0, end), nothing, method=method, t_eval=times, rtol=rtol, atol=atol
    )
    if not solution.success:
        raise RuntimeError(
            f"the solver did not come to time {end:g}: {solution.message} Ask for earlier times, "
            "or for another method."
        )
    moved = [apply(ntk_test_train, summed(state)) for state in solution.y.T.copy()]
    return torch.stack([test - each / samples for each in moved])


def apply(
    kernel: MemberKernel, values: Float[Tensor, "member n k"]
) -> Float[Tensor, "member other k"]:
    r"""Return :math:`\sum_b K_{ab} R_b` from the two blocks.

    Example:
        >>> kernel = MemberKernel(same=2 * torch.eye(1), cross=torch.eye(1))
        >>> apply(kernel, torch.tensor([[[1.0]], [[10.0]]])).flatten().tolist()
        [12.0, 21.0]
    """
    return (kernel.same - kernel.cross) @ values + kernel.cross @ values.sum(0)


def _check_labels(labels: Tensor, n: int, classes: int | None) -> tuple[Tensor, int]:
    expected = f"labels must be {n} class indices, one for each train sample"
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
        got = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise TypeError(f"{expected}; got {got}. Convert with torch.as_tensor(labels).long().")
    if labels.shape != (n,):
        raise ValueError(f"{expected}; got shape {tuple(labels.shape)}.")
    least, most = (int(bound) for bound in labels.aminmax())
    count = max(2, most + 1) if classes is None else classes
    if least < 0 or most >= count:
        raise ValueError(f"{expected}, from 0 to {count - 1}; got {least} to {most}.")
    return labels.long(), count


def _check_times(times: Sequence[float] | Tensor) -> list[float]:
    values = [float(t) for t in times]
    rising = all(a < b for a, b in pairwise(values))
    if not values or not rising or values[0] < 0 or not math.isfinite(values[-1]):
        raise ValueError(
            f"times must be finite, >= 0 and in rising order; got {values}. Cross-entropy has no "
            "limit at infinite time."
        )
    return values


def _check_start(
    settings: CrossEntropySettings, shapes: list[tuple[int, ...]]
) -> tuple[Tensor, Tensor]:
    assert settings.start is not None
    if settings.draws is not None:
        raise ValueError("start and draws exclude each other; got both. Leave one of them out.")
    for outputs, shape, name in zip(settings.start, shapes, ("train", "test"), strict=True):
        if outputs.shape != shape:
            raise ValueError(
                f"start: expected {name} outputs of shape {shape}; got {tuple(outputs.shape)}."
            )
    return settings.start[0].double(), settings.start[1].double()
