r"""Classification in the limit: cross-entropy training, and the expected performance.

*Cross-entropy* has no closed form, so

.. math::
    \dot f_a = -\frac1B \sum_b \Theta_{ab}\, (\mathrm{softmax} f_b - e_y)

is integrated numerically. Softmax mixes the two modes of :mod:`embens.theory.dynamics`, but the
kernel still has only two blocks. The state is :math:`R_a(t)`, the residual integrated up to time
:math:`t`. Outputs anywhere are those at initialisation minus :math:`\frac1B \Theta R`, so test data
cost nothing during the integration. There is no limit at infinite time, because outputs of
separable classes diverge.

*Performance* is that of regression on centred one-hot targets, for which all outputs are Gaussian.
Outputs of drawn ensembles are scored as logits. The accuracy does not depend on the ``scale`` of
targets that outweigh the prior. Likelihood and calibration do, because logits that differ by
``scale`` express that confidence.
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
from embens.checks import check_whole
from embens.optim import Gamma
from embens.theory.dynamics import GradientFlow
from embens.theory.kernel import Kernels, MemberKernel
from embens.theory.problem import Problem

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True)
class CrossEntropySettings:
    """Settings of :func:`cross_entropy_flow`.

    Attributes:
        classes: Number of classes; None means the largest label plus 1.
        start: Train and test outputs before training, ``(member, n, class)`` and ``(member, test,
            class)``; None draws them from the prior.
        generator: Source of randomness for that draw; None means torch's default one.
        shared_rate: Rate of shared parameters, relative to the learning rate.
        individual_rate: Rate of individual parameters, relative to the learning rate.

    Example:
        >>> CrossEntropySettings(classes=10, individual_rate=0.0).classes
        10
    """

    classes: int | None = None
    start: tuple[Tensor, Tensor] | None = None
    generator: torch.Generator | None = None
    shared_rate: float = 1.0
    individual_rate: float = 1.0


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
    r"""Train an infinitely wide ensemble by gradient flow on the cross-entropy of each member.

    Args:
        k_train_train: Kernels of the train data with themselves.
        k_test_train: Kernels of the test data (rows) with the train data.
        k_test_test: Kernels of the test data with themselves; may be None with
            ``settings.start``.
        labels: Classes of the train samples, ``(n,)``.
        members: Number of members.
        gamma: Gradient scale of shared parameters, as in :func:`~embens.theory.gradient_flow`.
        times: Times at which outputs are returned, in increasing order.
        settings: Start and relative rates.

    Returns:
        Logits ``(time, member, test, class)``; each time fits :mod:`embens.metrics`.

    Raises:
        TypeError: If labels are not integers.
        ValueError: If shapes do not fit, or times are not increasing.

    Example:
        >>> from embens import batch_ensemble, networks
        >>> from embens.theory import kernels
        >>> ensemble = batch_ensemble(networks.mlp(2, 8, depth=1), members=3)
        >>> k, labels = kernels(ensemble, torch.eye(2)), torch.tensor([0, 1])
        >>> settings = CrossEntropySettings(generator=torch.Generator().manual_seed(0))
        >>> logits = cross_entropy_flow(k, k, k, labels, 3, times=[0.0, 100.0], settings=settings)
        >>> logits.shape, logits[-1].mean(0).argmax(1).tolist()
        (torch.Size([2, 3, 2, 2]), [0, 1])
    """
    problem = Problem.of(
        (k_train_train, k_test_train, k_test_test),
        members,
        gamma,
        rates={
            "shared_rate": settings.shared_rate,
            "individual_rate": settings.individual_rate,
        },
        caller="cross_entropy_flow",
    )
    ntk_train, ntk_test = problem.ntk
    labels, classes = _check_labels(labels, len(ntk_train.same), settings.classes)
    increasing_times = _check_times(times)
    start = settings.start
    if start is None:
        start = problem.draw(classes, settings.generator)
    train, test = start
    _check_start("train", train, (members, len(ntk_train.same), classes))
    _check_start("test", test, (members, len(ntk_test.same), classes))
    truth = one_hot(labels, classes).to(ntk_train.same)

    def residual(outputs: Tensor) -> Tensor:
        return outputs.softmax(-1) - truth

    start = train.double(), test.double()
    return integrate(ntk_train, ntk_test, residual, start, increasing_times)


def integrate(
    ntk_train_train: MemberKernel,
    ntk_test_train: MemberKernel,
    residual: Callable[[Tensor], Tensor],
    start: tuple[Float[Tensor, "member n k"], Float[Tensor, "member test k"]],
    times: Sequence[float],
    accuracy: float = 1e-6,
) -> Float[Tensor, "time member test k"]:
    """Integrate training on any loss.

    Args:
        ntk_train_train: Tangent kernel of the train data with themselves.
        ntk_test_train: Tangent kernel of the test data with the train data.
        residual: Function of the train outputs ``(member, n, k)`` that returns the gradient of the
            loss of each sample.
        start: Train and test outputs before training.
        times: Times at which outputs are returned, in increasing order.
        accuracy: Relative tolerance of the solver.

    Returns:
        Test outputs ``(time, member, test, k)``.

    Raises:
        ImportError: If scipy is not installed.
        RuntimeError: If the solver fails.
    """
    try:
        from scipy.integrate import solve_ivp
    except ImportError as error:
        raise ImportError(
            "training on other losses than the squared one needs scipy, which is not installed. "
            "Install it: pip install 'embens[theory]'"
        ) from error
    train, test = start
    samples = train.shape[1]

    def unflatten(state) -> Tensor:
        return torch.from_numpy(state).to(train).view(train.shape)

    def derivative(_: float, state):
        outputs = train - apply(ntk_train_train, unflatten(state)) / samples
        return residual(outputs).flatten().cpu().numpy()

    zero = torch.zeros(train.numel(), dtype=train.dtype).numpy()
    end = max(times[-1], 1e-300)  # the solver needs a positive time
    solution = solve_ivp(
        derivative,
        (0.0, end),
        zero,
        method="DOP853",
        t_eval=times,
        rtol=accuracy,
        atol=accuracy / 100,
    )
    if not solution.success:
        raise RuntimeError(
            f"the solver did not reach time {end:g}: {solution.message} Use earlier times."
        )
    outputs = []
    for state in solution.y.T.copy():
        outputs.append(test - apply(ntk_test_train, unflatten(state)) / samples)
    return torch.stack(outputs)


def apply(
    kernel: MemberKernel, values: Float[Tensor, "member n k"]
) -> Float[Tensor, "member other k"]:
    r"""Return :math:`\sum_b K_{ab} R_b`, computed from the two blocks.

    Args:
        kernel: The kernel :math:`K`.
        values: The values :math:`R_b`, ``(member, n, k)``.

    Example:
        >>> kernel = MemberKernel(same=2 * torch.eye(1), cross=torch.eye(1))
        >>> apply(kernel, torch.tensor([[[1.0]], [[10.0]]])).flatten().tolist()
        [12.0, 21.0]
    """
    return (kernel.same - kernel.cross) @ values + kernel.cross @ values.sum(0)


def _check_labels(labels: Tensor, n: int, classes: int | None) -> tuple[Tensor, int]:
    """Return valid labels and the number of classes."""
    expected = f"labels must be {n} class indices, one for each train sample"
    fix = "Convert with torch.as_tensor(labels).long()."
    if not isinstance(labels, Tensor):
        raise TypeError(f"{expected}; got {type(labels).__name__}. {fix}")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise TypeError(f"{expected}; got {labels.dtype}. {fix}")
    if labels.shape != (n,):
        raise ValueError(f"{expected}; got shape {tuple(labels.shape)}.")
    smallest, largest = int(labels.min()), int(labels.max())
    count = max(2, largest + 1) if classes is None else classes
    if smallest < 0 or largest >= count:
        raise ValueError(f"{expected}, from 0 to {count - 1}; got {smallest} to {largest}.")
    return labels.long(), count


def _check_times(times: Sequence[float] | Tensor) -> list[float]:
    values = [float(t) for t in times]
    increasing = all(first < second for first, second in pairwise(values))
    if not values or not increasing or values[0] < 0 or not math.isfinite(values[-1]):
        raise ValueError(
            f"times must be finite, >= 0 and increasing; got {values}. Cross-entropy has no "
            "limit at infinite time."
        )
    return values


def _check_start(name: str, outputs: Tensor, expected: tuple[int, int, int]) -> None:
    if outputs.shape != expected:
        raise ValueError(
            f"start: expected {name} outputs of shape {expected}; got {tuple(outputs.shape)}."
        )


@dataclass(frozen=True)
class Performance:
    """Expected quality of an ensemble over initialisations, by the functions of ``metrics``.

    Quantities between members are NaN for one member. The correlation is NaN where a member is
    always right.

    Attributes:
        accuracy: Accuracy of the ensemble.
        member_accuracy: Mean accuracy of a member.
        nll: Negative log-likelihood.
        brier: Brier score.
        calibration_error: Expected calibration error.
        correlation: Correlation of two members' correctness.
        disagreement: Disagreement of members.
        error: Standard errors of all these over the draws.

    Example:
        >>> from embens import batch_ensemble, networks
        >>> from embens.theory import gradient_flow, kernels
        >>> k = kernels(batch_ensemble(networks.mlp(2, 8, depth=1), members=4), torch.eye(2))
        >>> labels = torch.tensor([0, 1])
        >>> flow = gradient_flow(k, k, k, centred_targets(labels, 2), members=4)
        >>> report = performance(flow, labels, draws=4)
        >>> report.member_accuracy, report.error["accuracy"]
        (1.0, 0.0)
    """

    accuracy: float
    member_accuracy: float
    nll: float
    brier: float
    calibration_error: float
    correlation: float
    disagreement: float
    error: dict[str, float]


def centred_targets(
    labels: Int[Tensor, " n"],
    classes: int,
    *,
    scale: float = 1.0,
) -> Float[Tensor, "n class"]:
    """Return one-hot targets, shifted so that their mean over classes is 0.

    Args:
        labels: Classes, ``(n,)``.
        classes: Number of classes.
        scale: Difference between the target of the true class and that of the others.

    Returns:
        Targets ``(n, class)``.

    Example:
        >>> centred_targets(torch.tensor([1]), classes=4, scale=4.0).tolist()
        [[-1.0, 3.0, -1.0, -1.0]]
    """
    return scale * (one_hot(labels.long(), classes).double() - 1 / classes)


_MEASURES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "accuracy": metrics.ensemble_accuracy,
    "member_accuracy": lambda outputs, labels: metrics.member_accuracy(outputs, labels).mean(),
    "nll": metrics.nll,
    "brier": metrics.brier,
    "calibration_error": metrics.expected_calibration_error,
    "correlation": metrics.correctness_correlation,
    "disagreement": metrics.disagreement,
}


def performance(
    flow: GradientFlow,
    labels: Int[Tensor, " test"],
    *,
    t: float = math.inf,
    draws: int = 32,
    generator: torch.Generator | None = None,
) -> Performance:
    """Estimate how an infinitely wide ensemble performs on its test data.

    Args:
        flow: Training on targets with one output for each class, such as :func:`centred_targets`.
        labels: Classes of the test samples, ``(test,)``.
        t: Time at which training stops.
        draws: Number of ensembles to draw and average over.
        generator: Source of randomness; None means torch's default one.

    Returns:
        Means over the draws, with standard errors.

    Raises:
        ValueError: If targets do not have one output for each class.

    Example:
        >>> from embens import batch_ensemble, networks
        >>> from embens.theory import gradient_flow, kernels
        >>> ensemble = batch_ensemble(networks.mlp(2, 8, depth=1), members=4)
        >>> k, labels = kernels(ensemble, torch.eye(2)), torch.tensor([0, 1])
        >>> flow = gradient_flow(k, k, k, centred_targets(labels, 2), members=4)
        >>> performance(flow, labels, draws=4).accuracy  # on the train data, after training
        1.0
    """
    if flow.targets.dim() != 2:
        raise ValueError(
            "performance needs targets with one output for each class, (n, class); got "
            f"{tuple(flow.targets.shape)}. Train on centred_targets(labels, classes)."
        )
    check_whole("draws", draws)
    ensembles = flow.sample(t, draws, generator=generator)
    means = {}
    errors = {}
    for name, measure in _MEASURES.items():
        with warnings.catch_warnings():
            # A single member, or one that is always right, has no correlation.
            warnings.simplefilter("ignore", RuntimeWarning)
            values = torch.stack([measure(outputs, labels) for outputs in ensembles])
        values = values[~values.isnan()]
        means[name] = values.mean().item()
        errors[name] = math.nan
        if len(values) > 1:
            errors[name] = values.std().item() / math.sqrt(len(values))
    return Performance(**means, error=errors)
