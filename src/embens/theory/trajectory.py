"""An infinitely wide ensemble in training: outputs, variances and samples at any time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from embens.checks import warn
from embens.theory.eigenmode import Mode
from embens.theory.kernel import MemberKernel
from embens.theory.problem import draw_members

if TYPE_CHECKING:
    from jaxtyping import Float

T = TypeVar("T")


class PerMode(NamedTuple, Generic[T]):
    """A value for the ensemble mean and one for the deviations from it."""

    mean: T
    deviation: T


@dataclass(frozen=True, repr=False)
class GradientFlow:
    """An infinitely wide ensemble in training; made by :func:`gradient_flow`.

    A time ``t`` (for :func:`gradient_descent` a number of steps) may be 0, infinite, or a vector of
    times, which then is the first axis of the result. The next axis is that of test samples. Means
    also have the output axes of the targets.

    Attributes:
        modes: Dynamics of mean and deviations.
        rate: Rate of gradient descent; None means gradient flow.
        targets: Targets of the train data, ``(n, …)``.
        members: Number of members.
        gamma: Gradient scale that was used.
        jitter: Number added to the diagonal of both modes' kernels.

    Example:
        >>> from embens import batch_ensemble, networks
        >>> from embens.theory import gradient_flow, kernels
        >>> ensemble = batch_ensemble(networks.mlp(2, 8, depth=1), members=4)
        >>> k = kernels(ensemble, torch.eye(2))
        >>> flow = gradient_flow(k, k, k, torch.tensor([1.0, -1.0]), members=4)
        >>> flow.mean(torch.tensor([0.0, 1.0])).shape, flow.variance(1.0).shape
        (torch.Size([2, 2]), torch.Size([2]))
        >>> flow.sample(1.0, draws=3).shape
        torch.Size([3, 4, 2])
        >>> spread = flow.variance(1.0) - flow.ensemble_variance(1.0)
        >>> torch.allclose(flow.diversity(1.0), spread)
        True
        >>> flow.covariance(1.0).cross.shape
        torch.Size([2, 2])
        >>> outputs = torch.zeros(4, 2)  # of all members before training
        >>> flow.evolve(1.0, train=outputs, test=outputs).shape
        torch.Size([4, 2])
    """

    modes: PerMode[Mode]
    rate: float | None
    targets: Float[Tensor, "n ..."]
    members: int
    gamma: float
    jitter: float

    def mean(self, t: float | Tensor) -> Tensor:
        """Return the expected output of a member, which is that of the ensemble.

        Args:
            t: Time, or a vector of times.

        Returns:
            Means ``(test, …)`` with the output axes of the targets; for a vector
            ``(time, test, …)``.
        """
        targets = self._flat_targets()
        outputs = self._at(t, lambda gains: self.modes.mean.respond(gains.mean, targets))
        return outputs.reshape(*outputs.shape[:-1], *self.targets.shape[1:])

    def variance(self, t: float | Tensor) -> Tensor:
        """Return the variance of a member's output.

        Args:
            t: Time, or a vector of times.

        Returns:
            Variances ``(test,)``; for a vector ``(time, test)``.
        """
        self._require_prior("variance")
        mean, deviation = self.modes
        share = 1 - 1 / self.members

        def total(gains: PerMode[Tensor]) -> Tensor:
            of_mean = mean.variance(gains.mean)
            of_deviation = deviation.variance(gains.deviation)
            return of_mean + share * of_deviation

        return self._at(t, total)

    def ensemble_variance(self, t: float | Tensor) -> Tensor:
        """Return the variance of the mean of the members' outputs.

        Args:
            t: Time, or a vector of times.

        Returns:
            Variances ``(test,)``; for a vector ``(time, test)``.
        """
        self._require_prior("ensemble_variance")
        return self._at(t, lambda gains: self.modes.mean.variance(gains.mean))

    def diversity(self, t: float | Tensor) -> Tensor:
        r"""Return the expected spread of members, :math:`E \frac1M \sum_a (f_a - \bar f)^2`.

        Multiply by :math:`M / (M - 1)` for the unbiased sample variance.

        Args:
            t: Time, or a vector of times.

        Returns:
            Spreads ``(test,)``; for a vector ``(time, test)``.
        """
        self._require_prior("diversity")
        share = 1 - 1 / self.members

        def spread(gains: PerMode[Tensor]) -> Tensor:
            return share * self.modes.deviation.variance(gains.deviation)

        return self._at(t, spread)

    def covariance(self, t: float) -> MemberKernel:
        """Return the covariance of test outputs within and between members.

        With one member, ``cross`` has no meaning.

        Args:
            t: Time.

        Returns:
            The kernel with blocks ``(test, test)``.
        """
        mean, deviation = self._covariances(t, "covariance")
        cross = mean - deviation / self.members
        return MemberKernel(same=cross + deviation, cross=cross)

    def evolve(
        self,
        t: float | Tensor,
        train: Float[Tensor, "member n ..."],
        test: Float[Tensor, "member test ..."],
    ) -> Tensor:
        """Return the test outputs of one ensemble, given its outputs before training.

        Args:
            t: Time, or a vector of times.
            train: Train outputs before training, ``(member, n, …)``.
            test: Test outputs before training, ``(member, test, …)``.

        Returns:
            Test outputs ``(member, test, …)``; for a vector ``(time, member, test, …)``.

        Raises:
            ValueError: If a shape does not fit.
        """
        mean, deviation = self.modes
        self._check_outputs("train", train, len(mean.basis))
        self._check_outputs("test", test, len(mean.test_train))
        flat_train = train.to(self.targets).reshape(*train.shape[:2], -1)
        ensemble_mean = flat_train.mean(0)
        targets = self._flat_targets()

        def outputs(gains: PerMode[Tensor]) -> Tensor:
            change = deviation.respond(gains.deviation, flat_train - ensemble_mean)
            change = change + mean.respond(gains.mean, ensemble_mean - targets)
            return test.to(self.targets) - change.reshape(test.shape)

        return self._at(t, outputs)

    def sample(
        self,
        t: float,
        draws: int = 1,
        *,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "draw member test ..."]:
        """Draw test outputs of trained ensembles with independent initialisations.

        Args:
            t: Time.
            draws: Number of ensembles.
            generator: Source of randomness; None means torch's default one.

        Returns:
            Outputs ``(draw, member, test, …)``.
        """
        mean, deviation = self._covariances(t, "sample")
        shape = tuple(self.targets.shape[1:])
        fluctuations = draw_members(mean, deviation, self.members, shape, draws, generator)
        return self.mean(t) + fluctuations

    @property
    def largest_stable_rate(self) -> PerMode[float]:
        r"""Rates :math:`2B / \lambda_{\max}` below which gradient descent converges.

        The mean has the smaller one, unless members repel each other. A mode that does not move has
        an infinite one.
        """
        mean, deviation = self.modes
        if self.members == 1:
            return PerMode(mean.largest_stable_rate, math.inf)
        return PerMode(mean.largest_stable_rate, deviation.largest_stable_rate)

    @property
    def rank(self) -> PerMode[int]:
        """Numerical ranks of the modes' kernels on the train data."""
        return PerMode(self.modes.mean.rank, self.modes.deviation.rank)

    def __repr__(self) -> str:
        train, test = len(self.targets), len(self.modes.mean.test_train)
        rate = "" if self.rate is None else f", rate={self.rate:g}"
        return (
            f"GradientFlow(members={self.members}, gamma={self.gamma:g}{rate}, train={train}, "
            f"test={test}, rank={tuple(self.rank)}, jitter={self.jitter:g})"
        )

    def _flat_targets(self) -> Tensor:
        return self.targets.reshape(len(self.targets), -1)

    def _check_outputs(self, name: str, outputs: Tensor, samples: int) -> None:
        expected = (self.members, samples, *self.targets.shape[1:])
        if outputs.shape != expected:
            raise ValueError(
                f"{name} outputs must be {expected}, members first and the rest like targets; "
                f"got {tuple(outputs.shape)}."
            )

    def _covariances(self, t: float, caller: str) -> tuple[Tensor, Tensor]:
        """Return the covariances of the mean and of deviations, each ``(test, test)``."""
        self._require_prior(caller)
        if isinstance(t, Tensor) and t.dim():
            raise ValueError(
                f"{caller} takes one time; got a vector of {len(t)}. Call it for each of them."
            )
        gains = self._gains(t)
        mean, deviation = self.modes
        return mean.covariance(gains.mean), deviation.covariance(gains.deviation)

    def _require_prior(self, caller: str) -> None:
        if self.modes.mean.prior_test is None:
            raise ValueError(
                f"{caller} needs the kernels of the test data with themselves; got None for "
                "k_test_test. Pass kernels(ensemble, x_test); the mean does without."
            )

    def _at(self, t: float | Tensor, function: Callable[[PerMode[Tensor]], Tensor]) -> Tensor:
        """Return a function of the gains at one time, or stacked for a vector of times."""
        if hasattr(t, "__len__") and not isinstance(t, str | Tensor):
            t = torch.as_tensor(t, dtype=torch.float64)
        if not isinstance(t, Tensor) or not t.dim():
            return function(self._gains(t))
        if t.dim() > 1:
            raise ValueError(f"t must be a time or a vector of them; got shape {tuple(t.shape)}.")
        return torch.stack([function(self._gains(time)) for time in t.tolist()])

    def _gains(self, t: float | Tensor) -> PerMode[Tensor]:
        """Return the gains of both modes at a valid time."""
        expected = f"t must be a time >= 0 or inf; got {t!r}."
        if self.rate is not None:
            expected = f"steps must be a non-negative integer or inf; got {t!r}."
        try:
            time = float(t)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"{expected} For several times pass a vector.") from None
        if not time >= 0:
            raise ValueError(f"{expected} Training starts at 0.")
        if math.isinf(time):
            self._require_convergence()
            self._warn_of_null_directions()
        elif self.rate is not None and time != round(time):
            raise ValueError(f"{expected} For continuous time use gradient_flow.")
        return PerMode(self.modes.mean.gain(time), self.modes.deviation.gain(time))

    def _require_convergence(self) -> None:
        """Raise where outputs have no limit at infinite time."""
        for name, mode in zip(PerMode._fields, self.modes, strict=True):
            is_relevant = name == "mean" or self.members > 1
            if is_relevant and not mode.converges:
                largest = mode.eigenvalues.max().item()
                raise ValueError(
                    f"training does not converge: the {name} mode has eigenvalues from "
                    f"{mode.least:.3g} to {largest:.3g}. They must not be negative, and gradient "
                    f"descent needs a rate below {min(self.largest_stable_rate):.4g}; got "
                    f"{self.rate}."
                )

    def _warn_of_null_directions(self) -> None:
        """Warn where the limit at infinite time uses a pseudo-inverse."""
        mode = self.modes.mean
        if mode.rank == len(mode.eigenvalues):
            return
        unfitted = (mode.basis.mT @ self._flat_targets())[mode.eigenvalues == 0]
        smallest = torch.finfo(unfitted.dtype).tiny
        share = (unfitted.norm() / self.targets.norm().clamp(min=smallest)).item()
        fit = "the targets agree with that"
        if share > 1e-6:
            fit = (
                f"a share {share:.2g} of the targets cannot be fitted (equal inputs with different "
                "targets)"
            )
        warn(
            f"the kernel of the train data is singular: rank {mode.rank} of "
            f"{len(mode.eigenvalues)} at cut-off {mode.cutoff:.2g}. At infinite time its "
            f"pseudo-inverse is used; {fit}. Pass FlowSettings(jitter=…), of the size of the "
            "targets' noise, or leave out repeated inputs.",
        )
