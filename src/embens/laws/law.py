"""The base class of laws, and the registry by which files find them."""

import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from embens.checks import closest

QUADRATURE_NODES = 181  # of one law, unless it is discrete


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
            shape: Shape of the result.
            generator: Source of randomness; None: the global generator. Values are drawn on the
                device of the generator and then moved.
            dtype: Floating type of the result; None: the default type of torch.
            device: Device of the result.

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
            members: Number of members of the ensemble.

        Returns:
            The law of the values of one member.

        Example:
            >>> from embens import laws
            >>> laws.Normal().marginal(4), laws.Disjoint().marginal(4)
            (Normal(mean=0.0, std=1.0), Bernoulli(keep=0.25, scale=2.0))
        """
        return self

    def pair_moment(self, members: int) -> float:
        """Return :math:`E[u_a u_b]` of two different members.

        Args:
            members: Number of members of the ensemble.

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
            k: The power, 0, 1 or 2.
            sign: 1 for the positive half-line, -1 for the negative one.

        Returns:
            The moment.

        Raises:
            NotImplementedError: If the law does not define it.

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
            sign_a: Half-line of the first member, 1 or -1.
            sign_b: Half-line of the second member, 1 or -1.

        Returns:
            The expectation; the product of both half moments for independent members.

        Example:
            >>> from embens import laws
            >>> laws.Rademacher().pair_half_moment(1, -1)
            0.25
        """
        return self.half_moment(1, sign_a) * self.half_moment(1, sign_b)

    def quadrature(self, n: int = QUADRATURE_NODES) -> tuple[Tensor, Tensor]:
        r"""Return nodes and weights with :math:`E f(v) \approx \sum_i w_i f(v_i)`.

        Args:
            n: Number of nodes; discrete laws return one node per value instead.

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
            members: Number of members of the ensemble.
            n: Number of nodes for each member; discrete laws have one per value instead.

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

        Returns:
            The class name under "law", and the parameters by name.

        Raises:
            TypeError: If the law is not a dataclass.
            ValueError: If another law has the same class name.

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


def registered() -> dict[str, type[Law]]:
    """Return all laws by class name, including laws defined by the user.

    If two classes have the same name, laws of embens take precedence, then the class that was
    defined last.

    Returns:
        Classes by name; abstract classes are left out.

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
        data: The class name under "law", and the parameters.

    Returns:
        The law.

    Raises:
        ValueError: If there is no law of this name.

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
