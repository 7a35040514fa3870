r"""Training in the limit: what an infinitely wide ensemble predicts after any time, in closed form.

With the loss :math:`\frac1B \sum_x \frac12 (f_a(x) - y(x))^2` of each member, the ensemble mean
follows :math:`K_m = \Theta_{aa} + (M-1) \Theta_{ab}` towards the targets, and deviations from it
follow :math:`K_d = \Theta_{aa} - \Theta_{ab}` towards 0. With :math:`A, V` of each
:class:`~embens.theory.eigenmode.Mode`, :math:`E f_a = A_m y` and
:math:`\mathrm{Cov}(f_a, f_b) = V_m + (\delta_{ab} - \tfrac1M) V_d`.

Time is in units of the rate: :math:`t = 1` is :math:`1/\eta` steps at a small rate :math:`\eta`.
Expectations are over initialisations. Train outputs come from passing the train data as test data.
Several outputs share one kernel and are independent: variances hold for each of them. Not here:
other losses (:mod:`embens.theory.classification`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from embens.checks import Gamma, check_number
from embens.theory.eigenmode import Mode
from embens.theory.kernel import Kernels, MemberKernel, check_rates
from embens.theory.problem import Problem, check_targets, draw_members

if TYPE_CHECKING:
    from jaxtyping import Float

T = TypeVar("T")


@dataclass(frozen=True)
class FlowSettings:
    """How an ensemble trains in the limit: rates relative to that of training, and a ridge."""

    shared_rate: float = 1.0
    individual_rate: float = 1.0  # of the modulations
    jitter: float = 0.0  # added to the diagonal of the train data's kernel in both modes


DEFAULT = FlowSettings()
SILENT = 1e-10  # relative size of the mean's kernel up to which it is 0


class PerMode(NamedTuple, Generic[T]):
    """A value for the ensemble mean and one for the deviations from it."""

    mean: T
    deviation: T


@dataclass(frozen=True, repr=False)
class GradientFlow:
    """An infinitely wide ensemble in training; made by :func:`gradient_flow`.

    Wherever a time ``t`` is taken (of :func:`gradient_descent`: a number of steps), it may be 0,
    infinite, or a vector of times, which come first in the result. Then come the test samples; only
    means have the outputs of the targets after them.
    """

    modes: PerMode[Mode]  # the dynamics of mean and deviations
    rate: float | None  # of gradient descent; None: gradient flow
    targets: Float[Tensor, "n ..."]
    members: int
    gamma: float  # the gradient scale that was used
    jitter: float  # what was added to the diagonal of both modes' kernels on the train data

    def mean(self, t: float | Tensor) -> Tensor:
        """Return the expected output of a member, which is that of the ensemble."""
        flat = self.targets.reshape(len(self.targets), -1)
        moved = self._at(t, lambda gains: self.modes.mean.respond(gains.mean, flat))
        return moved.reshape(*moved.shape[:-1], *self.targets.shape[1:])

    def variance(self, t: float | Tensor) -> Tensor:
        """Variance of a member's output."""
        return self._variances(t, "variance").sum(-2)

    def ensemble_variance(self, t: float | Tensor) -> Tensor:
        """Variance of the mean of the members' outputs."""
        return self._variances(t, "ensemble_variance").select(-2, 0)

    def diversity(self, t: float | Tensor) -> Tensor:
        r"""Expected spread of members, :math:`E \frac1M \sum_a (f_a - \bar f)^2`.

        Times :math:`M / (M - 1)` it is that of the unbiased sample variance.
        """
        return self._variances(t, "diversity").select(-2, 1)

    def covariance(self, t: float) -> MemberKernel:
        """Covariance of outputs within a member (``same``) and between members (``cross``).

        With one member there is no other: ``cross`` has no meaning then.
        """
        of_mean, of_deviation = self._covariances(t, "covariance")
        cross = of_mean - of_deviation / self.members
        return MemberKernel(same=cross + of_deviation, cross=cross)

    def evolve(
        self,
        t: float | Tensor,
        train: Float[Tensor, "member n ..."],
        test: Float[Tensor, "member test ..."],
    ) -> Tensor:
        """Return test outputs of one ensemble, given its train and test outputs before training."""
        mean, deviation = self.modes
        for name, given, samples in (("train", train, mean.basis), ("test", test, mean.carry)):
            expected = (self.members, len(samples), *self.targets.shape[1:])
            if given.shape != expected:
                raise ValueError(
                    f"{name} outputs must be {expected}, members first and the rest like targets; "
                    f"got {tuple(given.shape)}."
                )
        flat = train.to(self.targets).reshape(*train.shape[:2], -1)
        common, targets = flat.mean(0), self.targets.reshape(len(self.targets), -1)

        def outputs(gains: PerMode[Tensor]) -> Tensor:
            moved = deviation.respond(gains.deviation, flat - common)
            moved = moved + mean.respond(gains.mean, common - targets)
            return test.to(self.targets) - moved.reshape(test.shape)

        return self._at(t, outputs)

    def sample(
        self, t: float, draws: int = 1, *, generator: torch.Generator | None = None
    ) -> Float[Tensor, "draw member test ..."]:
        """Draw the test outputs of so many trained ensembles, each of its own initialisation."""
        both, shape = self._covariances(t, "sample"), tuple(self.targets.shape[1:])
        return self.mean(t) + draw_members(*both, self.members, shape, draws, generator)

    @property
    def largest_stable_rate(self) -> PerMode[float]:
        r"""The rates :math:`2B / \lambda_{\max}` below which gradient descent converges.

        That of the mean is the smaller one, unless members repel each other. A mode that does not
        move has an infinite one.
        """
        mean, deviation = (mode.largest_stable_rate for mode in self.modes)
        return PerMode(mean, deviation if self.members > 1 else math.inf)

    @property
    def rank(self) -> PerMode[int]:
        """Ranks of the modes' kernels on the train data, as rounding lets them be told."""
        return PerMode(*(mode.rank for mode in self.modes))

    def _variances(self, t: float | Tensor, what: str) -> Float[Tensor, "... 2 test"]:
        """Return the part of mean and deviations in a member's variance; never below 0."""
        self._require_prior(what)

        def variances(gains: PerMode[Tensor]) -> Tensor:
            each = zip(self.modes, gains, strict=True)
            mean, deviation = (mode.variance(gain) for mode, gain in each)
            return torch.stack([mean, (1 - 1 / self.members) * deviation])

        return self._at(t, variances)

    def _covariances(self, t: float, what: str) -> tuple[Tensor, Tensor]:
        self._require_prior(what)
        if isinstance(t, Tensor) and t.dim():
            raise ValueError(
                f"{what} takes one time; got a vector of {len(t)}. Call it for each of them."
            )
        each = zip(self.modes, self._gains(t), strict=True)
        return tuple(mode.covariance(gain) for mode, gain in each)  # type: ignore[return-value]

    def _require_prior(self, what: str) -> None:
        if self.modes.mean.prior_test is None:
            raise ValueError(
                f"{what} needs the kernels of the test data with themselves; got None for "
                "k_test_test. Pass kernels(ensemble, x_test); the mean does without."
            )

    def _at(self, t: float | Tensor, of_gains: Callable[[PerMode[Tensor]], Tensor]) -> Tensor:
        if hasattr(t, "__len__") and not isinstance(t, str | Tensor):
            t = torch.as_tensor(t, dtype=torch.float64)
        if not isinstance(t, Tensor) or not t.dim():
            return of_gains(self._gains(t))
        if t.dim() > 1:
            raise ValueError(f"t must be a time or a vector of them; got shape {tuple(t.shape)}.")
        return torch.stack([of_gains(self._gains(one)) for one in t.tolist()])

    def _gains(self, t: float | Tensor) -> PerMode[Tensor]:
        what, unit = ("t", "a time") if self.rate is None else ("steps", "a whole number")
        expected = f"{what} must be {unit} >= 0, which may be inf; got {t!r}."
        try:
            time = float(t)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"{expected} For several give a vector.") from None
        if not time >= 0:
            raise ValueError(f"{expected} Training starts at 0.")
        if math.isinf(time):
            self._check_limit()
        elif self.rate is not None and time != round(time):
            raise ValueError(f"{expected} For continuous time use gradient_flow.")
        return PerMode(*(mode.gain(time) for mode in self.modes))

    def _check_limit(self) -> None:
        """Say where infinite time has no limit, or one that does not fit the targets."""
        for name, mode in zip(PerMode._fields, self.modes, strict=True):
            if not mode.converges and (name == "mean" or self.members > 1):
                extremes = f"{mode.least:.3g} to {mode.eigenvalues.max().item():.3g}"
                raise ValueError(
                    f"training never ends: the {name} mode diverges, its eigenvalues are "
                    f"{extremes}. Expected none below 0 and, in gradient descent, a rate "
                    f"below {min(self.largest_stable_rate):.4g}; got {self.rate}."
                )
        mode = self.modes.mean
        if mode.rank == len(mode.eigenvalues):
            return
        lost = (mode.basis.mT @ self.targets.reshape(len(mode.basis), -1))[mode.eigenvalues == 0]
        share = (lost.norm() / self.targets.norm().clamp(min=torch.finfo(lost.dtype).tiny)).item()
        fit = "the targets agree with that"
        if share > 1e-6:
            fit = (
                f"a share {share:.2g} of the targets is never fitted (equal inputs, other targets)"
            )
        warnings.warn(
            f"the kernel of the train data is singular: rank {mode.rank} of "
            f"{len(mode.eigenvalues)} at cut-off {mode.cutoff:.2g}. At infinite time its "
            f"pseudo-inverse is used; {fit}. Pass FlowSettings(jitter=…), of the size of the "
            "targets' noise, or leave out repeated inputs.",
            stacklevel=5,
        )

    def __repr__(self) -> str:
        train, test = len(self.targets), len(self.modes.mean.carry)
        rate = "" if self.rate is None else f", rate={self.rate:g}"
        return (
            f"GradientFlow(members={self.members}, gamma={self.gamma:g}{rate}, train={train}, "
            f"test={test}, rank={tuple(self.rank)}, jitter={self.jitter:g})"
        )


def gradient_flow(
    k_train_train: Kernels,
    k_test_train: Kernels,
    k_test_test: Kernels | None,
    y: Float[Tensor, "n ..."],
    members: int = 8,
    gamma: Gamma = None,
    *,
    settings: FlowSettings = DEFAULT,
) -> GradientFlow:
    r"""Train an infinitely wide ensemble by gradient flow on the squared loss.

    Args:
        k_train_train: kernels of the train data with themselves.
        k_test_train: of the test data (rows) with the train data.
        k_test_test: of the test data with themselves; None: means only.
        y: targets, a row for each train sample.
        members: :math:`M`.
        gamma: gradient scale of the shared parameters: a number, a function of the number of
            members, or None for :func:`~embens.theory.natural_gamma`.
        settings: relative rates, and a ridge.

    Example:
        >>> from embens.theory.kernel import zero_cross
        >>> one = torch.ones(1, 1, dtype=torch.float64)
        >>> alone = MemberKernel(same=one, cross=zero_cross(one))  # members share nothing
        >>> k = Kernels(nngp=alone, ntk_shared=alone, ntk_individual=MemberKernel(0 * one, 0 * one))
        >>> flow = gradient_flow(k, k, k, torch.tensor([2.0]), members=4, gamma=4.0)
        >>> flow.mean(1.0).item(), flow.variance(0).item(), flow.ensemble_variance(0).item()
        (1.264241..., 1.0, 0.25)
        >>> flow.mean(float("inf")).item(), flow.diversity(float("inf")).item()
        (2.0, 0.0)
    """
    return _solve((k_train_train, k_test_train, k_test_test), y, members, gamma, settings)


def gradient_descent(
    k_train_train: Kernels,
    k_test_train: Kernels,
    k_test_test: Kernels | None,
    y: Float[Tensor, "n ..."],
    members: int = 8,
    gamma: Gamma = None,
    *,
    rate: float,
    settings: FlowSettings = DEFAULT,
) -> GradientFlow:
    """Train an infinitely wide ensemble by gradient descent: ``t`` of the result counts steps.

    A ``rate`` beyond the largest stable one gives a warning, and outputs that diverge. The other
    arguments are those of :func:`gradient_flow`.
    """
    check_rates(rate=rate)
    parts = k_train_train, k_test_train, k_test_test
    flow = _solve(parts, y, members, gamma, settings, rate=float(rate))
    stable = flow.largest_stable_rate
    if rate >= min(stable):
        warnings.warn(
            f"rate {rate:g} is too large: gradient descent diverges from {stable.mean:.6g} (mean "
            f"of members) and from {stable.deviation:.6g} (deviations). Choose one below both.",
            stacklevel=2,
        )
    return flow


def posterior(
    k_train_train: Kernels,
    k_test_train: Kernels,
    k_test_test: Kernels,
    y: Float[Tensor, "n ..."],
    noise: float,
) -> tuple[Tensor, Tensor]:
    r"""Return mean and covariance of the test outputs given targets with noise.

    .. math:: K_{*x} (K + \sigma^2)^{-1} y, \qquad K_{**} - K_{*x} (K + \sigma^2)^{-1} K_{x*}

    :math:`K` is a member's prior covariance, ``nngp.same``: for :func:`embens.bayesian` the tangent
    kernel, and trained members are draws of this law; for others, of networks whose last layer is
    trained alone. Kernels and targets are those of :func:`gradient_flow`; ``noise`` is the standard
    deviation :math:`\sigma` of the targets, above 0. Several outputs share one covariance.
    """
    parts = k_train_train, k_test_train, k_test_test
    problem = Problem.of(parts, 1, 1.0, rates={}, what="posterior")
    train, carry, test = (kernel.same for kernel in problem.nngp if kernel is not None)
    y = check_targets(y, train)
    noise = check_number("noise", noise, "a number > 0", lambda std: std > 0)
    factor = torch.linalg.cholesky(train + noise**2 * torch.eye(len(train)).to(train))
    weights = torch.cholesky_solve(carry.mT, factor).mT
    return torch.tensordot(weights, y, 1), test - weights @ carry.mT


def _solve(
    parts: tuple[Kernels, Kernels, Kernels | None],
    y: Tensor,
    members: int,
    gamma: Gamma,
    settings: FlowSettings,
    rate: float | None = None,
) -> GradientFlow:
    rates = {"shared_rate": settings.shared_rate, "individual_rate": settings.individual_rate}
    problem = Problem.of(parts, members, gamma, rates=rates, what="gradient_flow")
    y = check_targets(y, problem.ntk[0].same)
    jitter = check_number("jitter", settings.jitter, "a number >= 0", lambda x: x >= 0)
    modes = []
    for k, name in enumerate(PerMode._fields):
        share = 1 / members if name == "mean" else 1.0  # of what `modes` gives
        ntk = [n.modes(members)[k] for n in problem.ntk]
        nngp = [None if n is None else share * n.modes(members)[k] for n in problem.nngp]
        if name == "mean" and ntk[0].abs().max() < SILENT * problem.ntk[0].same.abs().max():
            ntk = [torch.zeros_like(n) for n in ntk]  # but for rounding
            warnings.warn(
                "the mean of the members can't learn: what they have in common cancels (cross is "
                "-1/(M - 1) times same), so it stays what it is. Use a rho above -1/(M - 1), "
                "modulations that are trained, or an output bias.",
                stacklevel=3,
            )
        mode = Mode.solve(tuple(ntk), tuple(nngp), jitter, rate)  # type: ignore[arg-type]
        if mode.indefinite and (name == "mean" or members > 1):
            warnings.warn(
                f"the {name} mode's kernel on the train data is not positive semi-definite: its "
                f"smallest eigenvalue is {mode.least:.3g}, the largest "
                f"{mode.eigenvalues.max().item():.3g}. Its outputs grow without bound; check the "
                "kernels.",
                stacklevel=3,
            )
        modes.append(mode)
    return GradientFlow(PerMode(*modes), rate, y, members, problem.gamma, jitter)
