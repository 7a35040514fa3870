"""Base classes of laws, the registry, and the laws of independent members."""

import dataclasses
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, final

import torch
from torch import Tensor

from embens.checks import closest

QUADRATURE_NODES = 181


class Law(ABC):
    """Distribution of a modulation.

    Example:
        >>> class Exponential(Law):
        ...     mean = 1.0
        ...     second_moment = 2.0
        ...
        ...     def sample(self, shape, generator=None, dtype=None, device=None):
        ...         noise = torch.rand(shape, generator=generator, dtype=dtype, device=device)
        ...         return -torch.log1p(-noise)
        >>> Exponential().overlap
        0.5
    """

    balanced = False
    """Whether the mean square over the units of a layer equals ``second_moment`` in every draw."""

    @property
    @abstractmethod
    def mean(self) -> float:
        """Expectation :math:`E u`."""

    @property
    @abstractmethod
    def second_moment(self) -> float:
        """Expectation :math:`E u^2`."""

    @abstractmethod
    def sample(
        self,
        shape: int | Sequence[int],
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Draw independent values.

        Args:
            shape: shape of the result.
            generator: source of randomness; None: the global generator. Values are drawn on the
                device of the generator and then moved.
            dtype: floating type of the result; None: the default type of torch.
            device: device of the result.

        Returns:
            A tensor of the given shape.

        Example:
            >>> from embens import laws
            >>> laws.Normal().sample((2, 3), torch.Generator().manual_seed(0)).shape
            torch.Size([2, 3])
        """

    @property
    def variance(self) -> float:
        """Variance :math:`E u^2 - (E u)^2`."""
        return max(0.0, self.second_moment - self.mean**2)

    @property
    def overlap(self) -> float:
        r"""Correlation of two members' modulations, :math:`E[u_a u_b] / E u^2`.

        It is 0 for centred laws and 1 for constant laws, including the constant 0.

        Example:
            >>> from embens import laws
            >>> laws.Bernoulli(keep=0.9).overlap
            0.9
        """
        if self.variance == 0:
            return 1.0
        return self.mean**2 / self.second_moment

    @property
    def kurtosis(self) -> float:
        r"""Normalised fourth moment :math:`E u^4 / (E u^2)^2`.

        It is 1 for signs and 3 for centred normal laws. A larger kurtosis reduces the effective
        width of a member (:func:`embens.theory.effective_width`).
        """
        nodes, weights = self.quadrature()
        if self.second_moment == 0:
            return 1.0
        return float(weights @ nodes**4) / self.second_moment**2

    def marginal(self, members: int) -> "Law":
        """Return the law of a single member (``self`` unless the law is joint).

        Args:
            members: number of members of the ensemble.
        """
        return self

    def pair_moment(self, members: int) -> float:
        """Return :math:`E[u_a u_b]` of two different members.

        Args:
            members: number of members of the ensemble.

        Returns:
            The expectation; the square of the mean for independent members.

        Example:
            >>> from embens import laws
            >>> laws.Shifted(0.5).pair_moment(8), laws.Disjoint().pair_moment(8)
            (0.25, 0.0)
        """
        return self.mean**2

    def half_moment(self, k: int, sign: int) -> float:
        r"""Return :math:`E \max(\pm v, 0)^k`, or :math:`P(\pm v > 0)` for ``k=0``.

        Args:
            k: the power, 0, 1 or 2.
            sign: 1 for the positive half-line, -1 for the negative one.

        Example:
            >>> from embens import laws
            >>> laws.Signs(0.5).half_moment(1, sign=-1)
            0.25
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no half-line moments, which piecewise linear activations "
            "need. Define half_moment(k, sign) for k in (0, 1, 2) and sign in (1, -1), or derive "
            "the law from Discrete."
        )

    def pair_half_moment(self, sign_a: int, sign_b: int) -> float:
        r"""Return :math:`E[\max(\pm v_a, 0) \max(\pm v_b, 0)]` of two different members.

        Args:
            sign_a: half-line of the first member, 1 or -1.
            sign_b: half-line of the second member, 1 or -1.
        """
        return self.half_moment(1, sign_a) * self.half_moment(1, sign_b)

    def quadrature(self, n: int = QUADRATURE_NODES) -> tuple[Tensor, Tensor]:
        r"""Return nodes and weights with :math:`E f(v) \approx \sum_i w_i f(v_i)`.

        Args:
            n: number of nodes; discrete laws return one node per value instead.

        Returns:
            Nodes and weights ``(node,)``, in float64 on the CPU.

        Example:
            >>> from embens import laws
            >>> nodes, weights = laws.Ternary(0.5).quadrature()
            >>> nodes.tolist(), weights.tolist()
            ([-1.0, 0.0, 1.0], [0.25, 0.5, 0.25])
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no quadrature, which smooth activations and the kurtosis "
            "need. Define quadrature(n) -> (nodes, weights), or derive the law from Discrete."
        )

    def pair_quadrature(
        self, members: int, n: int = QUADRATURE_NODES
    ) -> tuple[Tensor, Tensor, Tensor]:
        r"""Return nodes and weights for the values of two different members.

        Args:
            members: number of members of the ensemble.
            n: number of nodes for each member; discrete laws have one per value instead.

        Returns:
            Values of the first member, values of the second member and weights, each ``(node,)``
            in float64 on the CPU, so that :math:`E f(u_a, u_b) \approx \sum_i w_i f(u_i, u'_i)`.

        Example:
            >>> from embens import laws
            >>> first, second, weights = laws.Signs(0.5).pair_quadrature(members=4)
            >>> round(float(weights @ (first * second)), 9)  # (E u)²
            0.25
        """
        nodes, weights = self.quadrature(n)
        count = len(nodes)
        first = nodes.repeat_interleave(count)
        second = nodes.repeat(count)
        return first, second, torch.outer(weights, weights).flatten()

    def to_dict(self) -> dict[str, Any]:
        """Return the class name and the parameters, the inverse of :func:`from_dict`.

        Raises:
            TypeError: if the law is not a dataclass.
            ValueError: if another law has the same class name.

        Example:
            >>> from embens import laws
            >>> laws.Normal(0.5).to_dict()
            {'law': 'Normal', 'mean': 0.5, 'std': 1.0}
        """
        name = type(self).__name__
        if not dataclasses.is_dataclass(self):
            raise TypeError(
                f"{name} has no fields that can be saved. Make the law a frozen dataclass."
            )
        if registered()[name] is not type(self):
            raise ValueError(
                f"Files identify laws by their class name, but two laws are called {name}. "
                "Rename one of them."
            )
        return {"law": name, **dataclasses.asdict(self)}


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


# --- Files ---------------------------------------------------------------------------------------


def registered() -> dict[str, type[Law]]:
    """Return all laws by class name, including laws defined by the user.

    If two classes have the same name, laws of embens take precedence, then the class that was
    defined last.

    Example:
        >>> from embens import laws
        >>> laws.registered()["Normal"] is laws.Normal
        True
    """
    user_classes: dict[str, type[Law]] = {}
    library_classes: dict[str, type[Law]] = {}
    pending: list[type[Law]] = [Law]
    # Breadth first, in the order of definition.
    while pending:
        law_class = pending.pop(0)
        pending.extend(law_class.__subclasses__())
        if inspect.isabstract(law_class):
            continue
        if law_class.__module__.startswith("embens.laws."):
            library_classes[law_class.__name__] = law_class
        else:
            user_classes[law_class.__name__] = law_class
    return {**user_classes, **library_classes}


def from_dict(data: dict[str, Any]) -> Law:
    """Return the law that :meth:`Law.to_dict` described.

    Only laws that are defined in this process are found; nothing is imported or executed.

    Args:
        data: the class name under "law", and the parameters.

    Raises:
        ValueError: if there is no law of this name.

    Example:
        >>> from embens import laws
        >>> laws.from_dict({"law": "Signs", "p": 0.5})
        Signs(p=0.5)
    """
    parameters = dict(data)
    name = parameters.pop("law")
    law_classes = registered()
    if name not in law_classes:
        raise ValueError(
            f"the file uses an unknown law {name!r}{closest(name, law_classes)}. If you defined "
            "this law, import its module first."
        )
    return law_classes[name](**parameters)


# --- Checks --------------------------------------------------------------------------------------


def check_field(
    law: Law,
    name: str,
    expected: str,
    valid: Callable[[float], bool] = math.isfinite,
) -> None:
    """Check a parameter of a law and convert it to float.

    Args:
        law: the law, a frozen dataclass.
        name: name of the parameter.
        expected: completes the sentence "the parameter must be …".
        valid: returns True for valid values; called with finite values only.
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


# Laws of independent members


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
        value: the value.

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
        mean: the expectation.
        std: the standard deviation, at least 0.

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
        p: the mean, from -1 to 1.

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
        # The product keeps full accuracy for p near ±1, unlike 1 − p².
        return math.sqrt((1 - self.p) * (1 + self.p))

    @property
    def second_moment(self) -> float:
        return 1.0


@final
@dataclass(frozen=True)
class Bernoulli(Discrete):
    """Dropout mask: ``scale`` with probability ``keep``, otherwise 0.

    Mean ``keep * scale``, second moment ``keep * scale**2``, overlap ``keep``. With
    ``scale=1 / keep`` the mean is 1.

    Args:
        keep: probability of keeping a unit, one minus the dropout rate; in (0, 1].
        scale: value of a unit that is kept.

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
        low: lower end.
        high: upper end, greater than ``low``.

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
        zero: probability of 0; in [0, 1).
        scale: size of the other two values.

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
        p: the mean, from -1 to 1.

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
