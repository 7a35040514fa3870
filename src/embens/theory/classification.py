r"""Classes in the limit: cross-entropy training, and what an infinitely wide ensemble achieves.

*Cross-entropy* has no closed form; :math:`\dot f_a = -\frac1B \sum_b \Theta_{ab}\,
(\mathrm{softmax} f_b - e_y)` is integrated. Softmax mixes the modes of :mod:`embens.theory.dynamics`,
still the kernel is only its two blocks. The state is :math:`R_a(t)`, the residual up to time
:math:`t`: outputs anywhere are those at initialisation minus :math:`\frac1B \Theta R`, so that test
data cost nothing on the way. Not here: infinite time, where separable classes diverge.

*Performance* is of regression on centred one-hot targets, so that all is Gaussian; the outputs of
drawn ensembles are scored as logits. Accuracy does not depend on the ``scale`` of targets that
outweigh the prior; likelihood and calibration do, since logits ``scale`` apart are that sure.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from embens import metrics
from embens.checks import Gamma, check_whole
from embens.theory.dynamics import GradientFlow
from embens.theory.kernel import Kernels, MemberKernel
from embens.theory.problem import Problem

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True)
class CrossEntropySettings:
    """How :func:`cross_entropy_flow` starts: from given outputs, or from a draw of the prior.

    ``start`` has train and test outputs, ``(member, n, class)`` and ``(member, test, class)``.
    """

    classes: int | None = None  # None: the largest label and one
    start: tuple[Tensor, Tensor] | None = None
    generator: torch.Generator | None = None
    shared_rate: float = 1.0  # relative, of the shared parameters
    individual_rate: float = 1.0  # of the modulations


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

    ``labels`` are the classes of the train samples, ``times`` those at which outputs are wanted, in
    rising order. The other arguments are those of :func:`~embens.theory.gradient_flow`;
    ``k_test_test`` is not needed where ``settings.start`` is given.

    Returns:
        Logits ``(time, member, test, class)``, each time ready for :mod:`embens.metrics`.
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
    start = settings.start
    if start is None:
        start = problem.draw(classes, settings.generator)
    for outputs, size, name in zip(start, sizes, ("train", "test"), strict=True):
        if outputs.shape != (members, size, classes):
            raise ValueError(
                f"start: expected {name} outputs of shape {(members, size, classes)}; got "
                f"{tuple(outputs.shape)}."
            )
    begin = start[0].double(), start[1].double()
    truth = one_hot(labels, classes).to(problem.ntk[0].same)
    return integrate(*problem.ntk, lambda f: f.softmax(-1) - truth, begin, when)


def integrate(
    ntk_train_train: MemberKernel,
    ntk_test_train: MemberKernel,
    residual: Callable[[Tensor], Tensor],
    start: tuple[Float[Tensor, "member n k"], Float[Tensor, "member test k"]],
    times: Sequence[float],
    accuracy: float = 1e-6,
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
    options = {"method": "DOP853", "t_eval": times, "rtol": accuracy, "atol": accuracy / 100}
    solution = solve_ivp(slope, (0.0, end), nothing, **options)
    if not solution.success:
        raise RuntimeError(
            f"the solver did not come to time {end:g}: {solution.message} Ask for earlier times."
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


@dataclass(frozen=True)
class Performance:
    """Expected quality of an ensemble over initialisations, by the functions of ``metrics``.

    What is between members is NaN for one, and correlation where a member is always right.
    """

    accuracy: float
    member_accuracy: float
    nll: float
    brier: float
    calibration_error: float
    correlation: float  # of two members' correctness
    disagreement: float
    error: dict[str, float]  # standard errors of all these, from the draws alone


def centred_targets(
    labels: Int[Tensor, " n"], classes: int, *, scale: float = 1.0
) -> Float[Tensor, "n class"]:
    """Return one-hot targets whose mean over classes is 0.

    Example:
        >>> centred_targets(torch.tensor([1]), classes=4, scale=4.0).tolist()
        [[-1.0, 3.0, -1.0, -1.0]]
    """
    return scale * (one_hot(labels.long(), classes).double() - 1 / classes)


def performance(
    flow: GradientFlow,
    labels: Int[Tensor, " test"],
    *,
    t: float = math.inf,
    draws: int = 32,
    generator: torch.Generator | None = None,
) -> Performance:
    """Return what an infinitely wide ensemble is expected to achieve on its test data.

    ``flow`` is that of targets with one output for each class, such as :func:`centred_targets`,
    ``labels`` are the classes of the test samples, ``t`` is when training stops, and the result is
    the mean of so many ``draws``.
    """
    if flow.targets.dim() != 2:
        raise ValueError(
            "performance needs targets with one output for each class, (n, class); got "
            f"{tuple(flow.targets.shape)}. Train on centred_targets(labels, classes)."
        )
    check_whole("draws", draws)
    measures = {
        "accuracy": metrics.ensemble_accuracy,
        "member_accuracy": lambda f, y: metrics.member_accuracy(f, y).mean(),
        "nll": metrics.nll,
        "brier": metrics.brier,
        "calibration_error": metrics.expected_calibration_error,
        "correlation": metrics.correctness_correlation,
        "disagreement": metrics.disagreement,
    }
    drawn = flow.sample(t, draws, generator=generator)
    mean, error = {}, {}
    for name, measure in measures.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a member alone, or always right
            values = torch.stack([measure(outputs, labels) for outputs in drawn])
        values = values[~values.isnan()]
        mean[name] = values.mean().item()
        error[name] = values.std().item() / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Performance(**mean, error=error)
