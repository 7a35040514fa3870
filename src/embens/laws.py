r"""Laws: the distributions that modulations are drawn from.

In theory a post-activation modulation :math:`u` enters by ``mean`` and ``second_moment`` alone. A
pre-activation modulation :math:`v` sits inside :math:`\phi(v z)`; it enters by its ``half_moment``
where :math:`\phi` is piecewise linear, and by its ``quadrature`` where it is smooth.

Laws are immutable values. Your own is a subclass of :class:`Discrete` with ``atoms``, or of
:class:`Law` with ``mean``, ``second_moment`` and ``sample``; ``half_moment`` and ``quadrature`` are
needed only for theory of pre-activations. Files and the command line find every law that is
defined or imported (:func:`known`).
"""

import dataclasses
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor

from embens.checks import check_number, closest


class Law(ABC):
    """Distribution of a modulation.

    Example:
        >>> class Uniform(Law):
        ...     mean, second_moment = 0.0, 1 / 3
        ...
        ...     def sample(self, shape, generator=None, dtype=None, device=None):
        ...         noise = torch.rand(shape, generator=generator, dtype=dtype, device=device)
        ...         return 2 * noise - 1
        >>> Uniform().overlap
        0.0
    """

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
        """Draw independent values, on the device of the generator, and move them to ``device``."""

    @property
    def variance(self) -> float:
        """Variance; zero for a law that does not tell members apart."""
        return max(0.0, self.second_moment - self.mean**2)

    @property
    def overlap(self) -> float:
        r"""Share :math:`(E u)^2 / E u^2` of a signal that two members have in common.

        It is 0 for centred laws and 1 for constant ones, 0 included, under which members are equal.
        """
        return 1.0 if self.variance == 0 else self.mean**2 / self.second_moment

    def half_moment(self, k: int, sign: int) -> float:
        r"""Return :math:`E \max(\pm v, 0)^k` for k = 1, 2, and :math:`P(\pm v > 0)` for k = 0."""
        raise NotImplementedError(
            f"{type(self).__name__} has no half-line moments, which ReLU-like activations need. "
            "Define half_moment(k, sign) for k in (0, 1, 2) and sign in (1, -1), or use Discrete."
        )

    def quadrature(self, n: int = 181) -> tuple[Tensor, Tensor]:
        r"""Return float64 nodes and weights such that :math:`E f(v) \approx \sum_i w_i f(v_i)`."""
        raise NotImplementedError(
            f"{type(self).__name__} has no quadrature, which smooth activations need. "
            "Define quadrature(n) -> (nodes, weights), or use Discrete."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the law's name and its parameters, for :func:`from_dict`."""
        kind, name = type(self), type(self).__name__
        if not dataclasses.is_dataclass(self):
            message = f"the law {name} has no fields to write to a file; make it a frozen dataclass"
            raise TypeError(message)
        if (own := known()[name]).__module__ == __name__ and own is not kind:
            raise ValueError(
                "a file knows a law by its name, and embens has one that is called "
                f"{name} too; give {_place(kind)} another name"
            )
        return {"law": name, **dataclasses.asdict(self)}


class Discrete(Law):
    """Law on finitely many values.

    Example:
        >>> class Die(Discrete):
        ...     atoms = tuple((face, 1 / 6) for face in range(1, 7))
        >>> Die().mean, Die().half_moment(0, sign=-1)
        (3.5, 0.0)
    """

    @property
    @abstractmethod
    def atoms(self) -> Sequence[tuple[float, float]]:
        """Pairs of a value and its probability."""

    @property
    def mean(self) -> float:
        return math.fsum(p * value for value, p in self._support())

    @property
    def second_moment(self) -> float:
        return math.fsum(p * value**2 for value, p in self._support())

    def sample(self, shape, generator=None, dtype=None, device=None) -> Tensor:
        uniform = _noise(torch.rand, shape, generator, dtype, device)
        values, probabilities = zip(*self._support(), strict=True)
        result = torch.full_like(uniform, values[0])
        for value, start in zip(values[1:], accumulate(probabilities), strict=False):
            result = torch.where(uniform >= start, value, result)
        return result.to(dtype=dtype or torch.get_default_dtype(), device=device)

    def half_moment(self, k: int, sign: int) -> float:
        _check_half_moment(k, sign)
        return math.fsum(p * abs(value) ** k for value, p in self._support() if sign * value > 0)

    def quadrature(self, n: int = 181) -> tuple[Tensor, Tensor]:
        nodes, weights = torch.tensor(self._support(), dtype=torch.float64, device="cpu").unbind(1)
        return nodes, weights

    def _support(self) -> list[tuple[float, float]]:
        probabilities = [p for _, p in self.atoms]
        if not abs(math.fsum(probabilities) - 1) < 1e-9 or min(probabilities) < 0:
            raise ValueError(
                f"{type(self).__name__}: the probabilities in atoms must be >= 0 and sum to 1; "
                f"got {probabilities}. Divide them by their sum."
            )
        return [(float(value), float(p)) for value, p in self.atoms if p > 0]


class _Gaussian(Law):
    std: float  # may be 0

    @property
    def second_moment(self) -> float:
        return self.mean**2 + self.variance

    @property
    def variance(self) -> float:
        return self.std**2

    def sample(self, shape, generator=None, dtype=None, device=None) -> Tensor:
        values = self.mean + self.std * _noise(torch.randn, shape, generator, dtype, device)
        return values.to(dtype=dtype or torch.get_default_dtype(), device=device)

    def half_moment(self, k: int, sign: int) -> float:
        _check_half_moment(k, sign)
        mean, std = sign * self.mean, self.std
        if std == 0:
            return mean**k if mean > 0 else 0.0
        ratio = mean / std
        mass = math.erfc(-ratio / math.sqrt(2)) / 2
        edge = std * math.exp(-ratio * ratio / 2) / math.sqrt(2 * math.pi)
        return max(0.0, (mass, mean * mass + edge, (mean**2 + std**2) * mass + mean * edge)[k])

    def quadrature(self, n: int = 181) -> tuple[Tensor, Tensor]:
        # The trapezoid rule: large values of v bring the poles of activations such as tanh near the
        # real axis, where it beats Gauss–Hermite by several digits.
        if n < 2:
            raise ValueError(f"quadrature needs n >= 2 nodes; got {n}. Leave n out for 181.")
        if self.std == 0:
            return Constant(self.mean).quadrature()
        reach = min(9.0, math.sqrt(math.pi * (n - 1)))  # so that cut-off and step err alike
        normal = torch.linspace(-reach, reach, n, dtype=torch.float64, device="cpu")
        return self.mean + self.std * normal, torch.softmax(-(normal**2) / 2, dim=0)


@final
@dataclass(frozen=True)
class Constant(Discrete):
    """One value for every member; 1 leaves the network as it is."""

    value: float = 1.0

    def __post_init__(self):
        _check(self, "value", "a finite number, the same for every member")

    @property
    def atoms(self):
        return [(self.value, 1.0)]


@final
@dataclass(frozen=True)
class Normal(_Gaussian):
    """Normal law with this mean and this standard deviation."""

    mean: float = 0.0  # pyright: ignore
    std: float = 1.0

    def __post_init__(self):
        _check(self, "mean", "a finite number")
        _check(self, "std", "a number >= 0, the root of the variance", lambda std: std >= 0)


@dataclass(frozen=True)
class _Unit(Law):
    """Laws of mean p and second moment 1."""

    p: float
    second_moment = 1.0  # pyright: ignore

    def __post_init__(self):
        expected = "a number in [-1, 1], since E u^2 = 1 (for other means use Normal)"
        _check(self, "p", expected, lambda p: -1 <= p <= 1)

    @property
    def mean(self):
        return self.p


@final
@dataclass(frozen=True)
class Shifted(_Unit, _Gaussian):
    """Normal law :math:`N(p, 1 - p^2)`, from independent members (0) to equal ones (1)."""

    @property
    def std(self):  # pyright: ignore
        return math.sqrt((1 - self.p) * (1 + self.p))


@final
@dataclass(frozen=True)
class Bernoulli(Discrete):
    """Dropout: ``scale`` with probability ``keep``, else 0; ``scale=1/keep`` makes the mean 1."""

    keep: float = 0.5
    scale: float = 1.0

    def __post_init__(self):
        _check(self, "keep", "in (0, 1], one minus the dropout rate", lambda keep: 0 < keep <= 1)
        _check(self, "scale", "a finite number, the value of a unit that is kept")

    @property
    def atoms(self):
        return [(0.0, 1 - self.keep), (self.scale, self.keep)]


@final
@dataclass(frozen=True)
class Ternary(Discrete):
    """Symmetric law on {-1, 0, 1} that is 0 with probability ``zero``."""

    zero: float = 1 / 3

    def __post_init__(self):
        expected = "a number in [0, 1), the probability of 0 (for 1 use Constant(0))"
        _check(self, "zero", expected, lambda zero: 0 <= zero < 1)

    @property
    def atoms(self):
        side = (1 - self.zero) / 2
        return [(-1.0, side), (0.0, self.zero), (1.0, side)]


@final
@dataclass(frozen=True)
class Rademacher(Discrete):
    """Random sign, -1 or 1."""

    @property
    def atoms(self):
        return [(-1.0, 0.5), (1.0, 0.5)]


@final
@dataclass(frozen=True)
class Signs(_Unit, Discrete):
    """Random sign of mean p: 1 with probability :math:`(1 + p) / 2`, else -1."""

    @property
    def atoms(self):
        return [(-1.0, (1 - self.p) / 2), (1.0, (1 + self.p) / 2)]


def known() -> dict[str, type[Law]]:
    """Return every law by its name: embens' own, and yours as soon as their class is defined.

    Of two classes with one name, embens' own is taken, else the one that was defined last.
    """
    return {kind.__name__: kind for kind in _concrete()}


def from_dict(data: dict[str, Any], others: Iterable[type[Law]] = ()) -> Law:
    """Return the law that :meth:`Law.to_dict` described; nothing is imported or executed.

    ``others`` are classes to look at before the :func:`known` ones.

    Example:
        >>> from_dict(Shifted(0.5).to_dict())
        Shifted(p=0.5)
    """
    given = {kind.__name__: kind for kind in others}
    kinds, fields = known() | given, dict(data)
    name = fields.pop("law")
    if name not in kinds:
        raise ValueError(
            f"the file uses a law {name!r} that is not known here{closest(name, kinds)}. If it is "
            f"your own, import the module that defines it, or pass its class: laws=[{name}]"
        )
    places = {_place(kind) for kind in _concrete() if kind.__name__ == name}
    if len(places) > 1 and name not in given and kinds[name].__module__ != __name__:
        raise ValueError(
            f"the file uses a law {name!r}, and several have that name: {', '.join(sorted(places))}"
            f"; pass the class that is meant: laws=[{name}]"
        )
    return kinds[name](**fields)


def _concrete() -> list[type[Law]]:
    found: list[type[Law]] = [Law]
    for kind in found:  # grows as it is read
        found += kind.__subclasses__()
    found.sort(key=lambda kind: kind.__module__ == __name__)
    return [kind for kind in found if not inspect.isabstract(kind)]


def _place(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _check(law: Law, name: str, *valid: Any) -> None:
    value = check_number(f"{type(law).__name__}: {name}", getattr(law, name), *valid)
    object.__setattr__(law, name, value)


def _check_half_moment(k: int, sign: int):
    if k not in (0, 1, 2) or sign not in (1, -1):
        raise ValueError(f"half_moment takes k in (0, 1, 2), sign in (1, -1); got {k}, {sign}.")


def _noise(source, shape, generator, dtype, device) -> Tensor:
    """Draw from torch.rand or torch.randn where the generator is, in float32 or better."""
    dtype = dtype or torch.get_default_dtype()
    if not dtype.is_floating_point:
        raise TypeError(f"sample needs a floating dtype, such as torch.float32; got {dtype}.")
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    device = device if generator is None else generator.device
    working = torch.promote_types(dtype, torch.float32)
    return source(shape, generator=generator, dtype=working, device=device)
