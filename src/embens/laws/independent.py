"""Laws of independent members: normal, uniform and discrete distributions."""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import final

import torch
from torch import Tensor

from embens.laws.law import QUADRATURE_NODES, Law


class Sampled(Law):
    """Base of laws with samples that are a function of independent noise.

    The noise is uniform on [0, 1) unless a subclass replaces ``_draw_noise``.
    """

    _draw_noise = staticmethod(torch.rand)

    def sample(self, shape, generator=None, dtype=None, device=None) -> Tensor:
        dtype = dtype or torch.get_default_dtype()
        if not dtype.is_floating_point:
            raise TypeError(
                f"sample needs a floating dtype, got {dtype}. Pass for example torch.float32."
            )
        if isinstance(shape, int):
            shape = (shape,)
        noise_device = self._noise_device(device)
        if generator is not None:
            noise_device = generator.device
        # Noise in half precision would be too coarse to compare with probabilities.
        noise_dtype = torch.promote_types(dtype, torch.float32)
        noise = self._draw_noise(
            tuple(shape),
            generator=generator,
            dtype=noise_dtype,
            device=noise_device,
        )
        return self._transform(noise).to(dtype=dtype, device=device)

    def _noise_device(self, device: torch.device | str | None) -> torch.device | str | None:
        """Return the device on which noise is drawn if there is no generator."""
        return device

    @abstractmethod
    def _transform(self, noise: Tensor) -> Tensor:
        """Turn noise into samples of the same shape."""


class Discrete(Sampled):
    """Law with finitely many values.

    Derive from it and define ``atoms``, pairs of a value and its probability.

    Example:
        >>> class Die(Discrete):
        ...     atoms = tuple((face, 1 / 6) for face in range(1, 7))
        >>> Die().mean, Die().half_moment(0, sign=-1)
        (3.5, 0.0)
    """

    @property
    @abstractmethod
    def atoms(self) -> Sequence[tuple[float, float]]:
        """Pairs of a value and its probability; the probabilities sum to 1."""

    @property
    def mean(self) -> float:
        return math.fsum(p * value for value, p in self._support())

    @property
    def second_moment(self) -> float:
        return math.fsum(p * value**2 for value, p in self._support())

    def half_moment(self, k: int, sign: int) -> float:
        check_half_moment(k, sign)
        terms = []
        for value, probability in self._support():
            if sign * value > 0:
                terms.append(probability * abs(value) ** k)
        return math.fsum(terms)

    def quadrature(self, n: int = QUADRATURE_NODES) -> tuple[Tensor, Tensor]:
        table = torch.tensor(self._support(), dtype=torch.float64, device="cpu")
        return table[:, 0], table[:, 1]

    def _transform(self, noise: Tensor) -> Tensor:
        # Inverse of the cumulative distribution function.
        support = self._support()
        samples = torch.full_like(noise, support[0][0])
        threshold = support[0][1]
        for value, probability in support[1:]:
            samples = torch.where(noise >= threshold, value, samples)
            threshold += probability
        return samples

    def _support(self) -> list[tuple[float, float]]:
        """Return the atoms with a positive probability."""
        probabilities = [p for _, p in self.atoms]
        is_normalised = abs(math.fsum(probabilities) - 1) < 1e-9
        if not is_normalised or min(probabilities) < 0:
            raise ValueError(
                f"{type(self).__name__}: the probabilities in atoms must be >= 0 and sum to 1, "
                f"got {probabilities}. Divide them by their sum."
            )
        return [(float(value), float(p)) for value, p in self.atoms if p > 0]


class _Gaussian(Sampled):
    """Normal laws; subclasses define ``mean`` and ``std``, which may be 0."""

    std: float
    _draw_noise = staticmethod(torch.randn)

    @property
    def second_moment(self) -> float:
        return self.mean**2 + self.variance

    @property
    def variance(self) -> float:
        return self.std**2

    @property
    def kurtosis(self) -> float:
        # The overlap is the share of mean² in the second moment.
        return 3 - 2 * self.overlap**2

    def half_moment(self, k: int, sign: int) -> float:
        check_half_moment(k, sign)
        mean, std = sign * self.mean, self.std
        if std == 0:
            return mean**k if mean > 0 else 0.0
        ratio = mean / std
        probability = math.erfc(-ratio / math.sqrt(2)) / 2
        density = std * math.exp(-ratio * ratio / 2) / math.sqrt(2 * math.pi)
        if k == 0:
            moment = probability
        elif k == 1:
            moment = mean * probability + density
        else:
            moment = (mean**2 + std**2) * probability + mean * density
        # Far in the tail the two terms cancel, and rounding may make the difference negative.
        return max(0.0, moment)

    def quadrature(self, n: int = QUADRATURE_NODES) -> tuple[Tensor, Tensor]:
        if n < 2:
            raise ValueError(f"quadrature needs at least 2 nodes, got n={n}.")
        if self.std == 0:
            return Constant(self.mean).quadrature()
        # We use the trapezoid rule instead of Gauss–Hermite. Large values of v move the poles of
        # activations such as tanh close to the real axis; there the trapezoid rule is more accurate
        # by several digits. The range balances the errors of truncation and of the step size.
        reach = min(9.0, math.sqrt(math.pi * (n - 1)))
        nodes = torch.linspace(-reach, reach, n, dtype=torch.float64, device="cpu")
        weights = torch.softmax(-(nodes**2) / 2, dim=0)
        return self.mean + self.std * nodes, weights

    def _transform(self, noise: Tensor) -> Tensor:
        return self.mean + self.std * noise


@final
@dataclass(frozen=True)
class Constant(Discrete):
    """The same value for every member; 1 leaves the network unchanged.

    Mean ``value``, second moment ``value**2``, overlap 1.

    Args:
        value: The value.

    Example:
        >>> Constant(2.0).second_moment
        4.0
    """

    value: float = 1.0

    def __post_init__(self) -> None:
        check_field(self, "value", "a finite number")

    @property
    def atoms(self) -> list[tuple[float, float]]:
        return [(self.value, 1.0)]


@final
@dataclass(frozen=True)
class Normal(_Gaussian):
    r"""Normal law :math:`N(\mathrm{mean}, \mathrm{std}^2)`.

    Second moment ``mean**2 + std**2``, kurtosis 3 if centred.

    Args:
        mean: The expectation.
        std: The standard deviation, at least 0.

    Example:
        >>> Normal(1.0, 0.5).overlap
        0.8
    """

    mean: float = 0.0  # pyright: ignore[reportIncompatibleMethodOverride]
    std: float = 1.0

    def __post_init__(self) -> None:
        check_field(self, "mean", "a finite number")
        check_field(self, "std", "a number >= 0", lambda std: std >= 0)


@final
@dataclass(frozen=True)
class Shifted(_Gaussian):
    r"""Normal law :math:`N(p, 1 - p^2)` with second moment 1 and overlap :math:`p^2`.

    It interpolates between independent members (``p=0``) and equal members (``p=1``).

    Args:
        p: The mean, from -1 to 1.

    Example:
        >>> Shifted(0.6).mean, Shifted(0.6).std, Shifted(0.6).second_moment
        (0.6, 0.8, 1.0)
    """

    p: float

    def __post_init__(self) -> None:
        check_signed_unit(self, "p")

    @property
    def mean(self) -> float:
        return self.p

    @property
    def std(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        r"""Standard deviation :math:`\sqrt{1 - p^2}`."""
        # The product keeps full accuracy for p near ±1, unlike 1 − p².
        return math.sqrt((1 - self.p) * (1 + self.p))

    @property
    def second_moment(self) -> float:
        return 1.0

    @property
    def overlap(self) -> float:
        return self.p**2


@final
@dataclass(frozen=True)
class Bernoulli(Discrete):
    """Dropout mask: ``scale`` with probability ``keep``, otherwise 0.

    Mean ``keep * scale``, second moment ``keep * scale**2``, overlap ``keep``. With
    ``scale=1 / keep`` the mean is 1.

    Args:
        keep: Probability of keeping a unit, one minus the dropout rate; in (0, 1].
        scale: Value of a unit that is kept.

    Example:
        >>> Bernoulli(keep=0.5, scale=2.0).mean
        1.0
    """

    keep: float = 0.5
    scale: float = 1.0

    def __post_init__(self) -> None:
        expected = "in (0, 1], one minus the dropout rate"
        check_field(self, "keep", expected, lambda keep: 0 < keep <= 1)
        check_field(self, "scale", "a finite number")

    @property
    def atoms(self) -> list[tuple[float, float]]:
        return [(0.0, 1 - self.keep), (self.scale, self.keep)]


@final
@dataclass(frozen=True)
class Uniform(Sampled):
    """Uniform law on [low, high], by default with mean 0 and second moment 1.

    Args:
        low: Lower end.
        high: Upper end, greater than ``low``.

    Example:
        >>> Uniform(0.0, 3.0).mean, Uniform(0.0, 3.0).second_moment
        (1.5, 3.0)
    """

    low: float = -math.sqrt(3)
    high: float = math.sqrt(3)

    def __post_init__(self) -> None:
        check_field(self, "low", "a finite number")
        expected = "a number above low (for a single value use Constant)"
        check_field(self, "high", expected, lambda high: high > self.low)

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    @property
    def second_moment(self) -> float:
        return self.half_moment(2, 1) + self.half_moment(2, -1)

    def half_moment(self, k: int, sign: int) -> float:
        check_half_moment(k, sign)
        # The part of the interval on this half-line, mirrored to positive values.
        ends = [max(0.0, sign * self.low), max(0.0, sign * self.high)]
        difference = max(ends) ** (k + 1) - min(ends) ** (k + 1)
        return difference / ((k + 1) * (self.high - self.low))

    def quadrature(self, n: int = QUADRATURE_NODES) -> tuple[Tensor, Tensor]:
        # Gauss–Legendre by Golub and Welsch (1969): the nodes are the eigenvalues of the symmetric
        # recurrence matrix of the Legendre polynomials. `eigh` reads its lower triangle only.
        k = torch.arange(1, n, dtype=torch.float64, device="cpu")
        recurrence = torch.diag(k / (4 * k**2 - 1).sqrt(), -1)
        nodes, vectors = torch.linalg.eigh(recurrence)
        weights = vectors[0] ** 2
        half_width = (self.high - self.low) / 2
        return self.mean + half_width * nodes, weights / weights.sum()

    def _transform(self, noise: Tensor) -> Tensor:
        return self.low + (self.high - self.low) * noise


@final
@dataclass(frozen=True)
class Ternary(Discrete):
    """Symmetric law on {-scale, 0, scale}.

    Mean 0, second moment ``(1 - zero) * scale**2``, overlap 0.

    Args:
        zero: Probability of 0; in [0, 1).
        scale: Size of the other two values.

    Example:
        >>> Ternary(zero=0.5).kurtosis
        2.0
    """

    zero: float = 1 / 3
    scale: float = 1.0

    def __post_init__(self) -> None:
        expected = "a number in [0, 1), the probability of 0 (for 1 use Constant(0))"
        check_field(self, "zero", expected, lambda zero: 0 <= zero < 1)
        check_field(self, "scale", "a finite number")

    @property
    def atoms(self) -> list[tuple[float, float]]:
        side = (1 - self.zero) / 2
        return [(-self.scale, side), (0.0, self.zero), (self.scale, side)]


@final
@dataclass(frozen=True)
class Rademacher(Discrete):
    """Random sign: -1 or 1 with equal probability. Mean 0, second moment 1.

    Example:
        >>> Rademacher().mean, Rademacher().second_moment
        (0.0, 1.0)
    """

    @property
    def atoms(self) -> list[tuple[float, float]]:
        return [(-1.0, 0.5), (1.0, 0.5)]


@final
@dataclass(frozen=True)
class Signs(Discrete):
    r"""Biased random sign: 1 with probability :math:`(1 + p) / 2`, otherwise -1.

    Mean :math:`p`, second moment 1, overlap :math:`p^2`.

    Args:
        p: The mean, from -1 to 1.

    Example:
        >>> Signs(0.5).atoms
        [(-1.0, 0.25), (1.0, 0.75)]
    """

    p: float

    def __post_init__(self) -> None:
        check_signed_unit(self, "p")

    @property
    def atoms(self) -> list[tuple[float, float]]:
        return [(-1.0, (1 - self.p) / 2), (1.0, (1 + self.p) / 2)]

    @property
    def mean(self) -> float:
        return self.p

    @property
    def second_moment(self) -> float:
        return 1.0

    @property
    def overlap(self) -> float:
        return self.p**2


def check_field(
    law: Law,
    name: str,
    expected: str,
    valid: Callable[[float], bool] = math.isfinite,
) -> None:
    """Check a parameter of a law and convert it to float.

    Args:
        law: The law, a frozen dataclass.
        name: Name of the parameter.
        expected: Completes the sentence "the parameter must be …".
        valid: Returns True for valid values; called with finite values only.

    Raises:
        TypeError: If the value is not a real number.
        ValueError: If the value is NaN, infinite or not valid.
    """
    value = getattr(law, name)
    number = value
    if isinstance(value, Tensor) and value.numel() == 1:
        number = value.item()
    message = f"{type(law).__name__}: {name} must be {expected}, got {value!r}."
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError(message)
    if not math.isfinite(number) or not valid(float(number)):
        raise ValueError(message)
    object.__setattr__(law, name, float(number))  # the dataclass is frozen


def check_signed_unit(law: Law, name: str) -> None:
    """Check a parameter that lies in [-1, 1] because the second moment is 1."""
    expected = "a number in [-1, 1], since the second moment is 1 (for other means use Normal)"
    check_field(law, name, expected, lambda value: -1 <= value <= 1)


def check_half_moment(k: int, sign: int) -> None:
    """Check the arguments of :meth:`Law.half_moment`."""
    if k not in (0, 1, 2) or sign not in (1, -1):
        raise ValueError(
            f"half_moment needs k in (0, 1, 2) and sign in (1, -1), got k={k} and sign={sign}."
        )
