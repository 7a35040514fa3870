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
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from embens.checks import Gamma, check_members
from embens.theory.flow.draws import draw_prior
from embens.theory.flow.problem import check_kernels
from embens.theory.kernel import Kernels, MemberKernel, check_rates, resolve_gamma

if TYPE_CHECKING:
    from jaxtyping import Float, Int

Residual = Callable[[Tensor], Tensor]


def cross_entropy_flow(
    k_train_train: Kernels,
    k_test_train: Kernels,
    k_test_test: Kernels | None,
    labels: Int[Tensor, " n"],
    members: int = 8,
    gamma: Gamma = None,
    *,
    times: Sequence[float] | Tensor,
    classes: int | None = None,
    start: tuple[Tensor, Tensor] | None = None,
    draws: int | None = None,
    generator: torch.Generator | None = None,
    shared_rate: float = 1.0,
    individual_rate: float = 1.0,
    method: str = "DOP853",
    rtol: float = 1e-6,
    atol: float = 1e-8,
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
        classes: how many; by default the largest label and one.
        start: outputs before training on train and test data, ``(member, n, class)`` and
            ``(member, test, class)``; by default drawn from the prior.
        draws: how many initialisations to draw; None: one, without an axis for it.
        generator: draws them.
        shared_rate: relative rate of the shared parameters.
        individual_rate: relative rate of the modulations.
        method: a solver of ``scipy.integrate.solve_ivp``.
        rtol: its relative tolerance.
        atol: its absolute tolerance.

    Returns:
        Logits ``(time, member, test, class)``, each time ready for :mod:`embens.metrics`; with
        ``draws``, these come first.
    """
    check_kernels(k_train_train, k_test_train, k_test_test, what="cross_entropy_flow")
    check_members(members)
    check_rates(shared_rate=shared_rate, individual_rate=individual_rate)
    labels, classes = _check_labels(labels, len(k_train_train.nngp.same), classes)
    when = _check_times(times)
    rates = {"shared_rate": shared_rate, "individual_rate": individual_rate}
    train, carry = k_train_train.to(torch.float64), k_test_train.to(torch.float64)
    scale = resolve_gamma(train, members, gamma, **rates)
    ntks = [k.ntk(members, scale, **rates) for k in (train, carry)]
    sizes = (len(labels), len(carry.nngp.same))
    if start is not None:
        starts = [_check_start(start, members, sizes, classes, draws)]
    elif k_test_test is None:
        raise ValueError(
            "outputs at initialisation can't be drawn without the kernels of the test data with "
            "themselves; got None for k_test_test. Pass it, or start=(train, test) outputs."
        )
    else:
        drawn = draw_prior(
            *(train, carry, k_test_test),
            members=members,
            outputs=classes,
            draws=1 if draws is None else draws,
            generator=generator,
        )
        starts = list(zip(*drawn, strict=True))
    truth = one_hot(labels, classes).to(train.nngp.same)
    solver = {"method": method, "rtol": rtol, "atol": atol}
    results = [
        integrate(ntks[0], ntks[1], lambda f: f.softmax(-1) - truth, begin, when, **solver)
        for begin in starts
    ]
    return results[0] if draws is None else torch.stack(results)


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
    start: tuple[Tensor, Tensor],
    members: int,
    sizes: tuple[int, int],
    classes: int,
    draws: int | None,
) -> tuple[Tensor, Tensor]:
    if draws is not None:
        raise ValueError("start and draws exclude each other; got both. Leave one of them out.")
    for outputs, size, name in zip(start, sizes, ("train", "test"), strict=True):
        if outputs.shape != (members, size, classes):
            raise ValueError(
                f"start: expected {name} outputs of shape {(members, size, classes)}; got "
                f"{tuple(outputs.shape)}."
            )
    return start[0].double(), start[1].double()
