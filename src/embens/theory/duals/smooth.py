r"""Duals of smooth activations without a closed form: tanh, softplus, SiLU, or a user's own.

With :math:`g \sim N(0, 1)`, orthonormal Hermite polynomials :math:`h_n` and roots :math:`r_i =
\sqrt{q_i}`, the coefficients :math:`b_n(r) = E[v \phi'(v r g)\, h_n(g)]`, :math:`d_n(r) = E[g
\phi'(v r g)\, h_n(g)]` and :math:`a(r) = E[\phi(v r g)]` at given :math:`v` are sums on a grid of
:math:`g` (better than Gauss–Hermite where an activation is steep), and Mehler's formula gives

.. math::
    F = a(r_1) a(r_2) + r_1 r_2 \sum_n b_n(r_1)\, b_n(r_2)\, \frac{\rho^{n+1}}{n + 1}, \quad
    G = \sum_n b_n(r_1)\, b_n(r_2)\, \rho^n, \quad
    H = r_1 r_2 \sum_n d_n(r_1)\, d_n(r_2)\, \rho^n ,

free of cancellation for small variances. Within a member the products are averaged over :math:`v`;
between members each factor is, since :math:`F_{ab} = E[\psi \psi]` with :math:`\psi(z) = E_v
\phi(v z)`. Expectations are read from a table of all that (``tables``), which is refined until
values at :math:`\rho = 1`, the hardest, agree with direct integration to ``ACCURACY``, relative to
:math:`F, G, H` within a member (for variances down to a millionth of the largest). If not, as for
an activation with a kink, a warning says what was reached; beyond 1e-4 it is a ValueError.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embens.laws import Law, Normal, Shifted
from embens.theory.duals.expectations import Dual, tells_apart
from embens.theory.duals.tables import Axis, Table, expand, expand_powers, span

ACCURACY = 1e-10
_AIM = 2e-11
_WORST = 1e-4  # with a larger error nothing is returned
_REACH = 12.0  # exp(-REACH² / 4) is below the rounding error
_TERMS = (512, 4096, 16384)  # numbers of Hermite polynomials to try
_NODES = ((61, 0.1), (121, 0.03), (241, 0.01))
"""Numbers of nodes of a law to try, and for normal ones their width times the largest root."""
_TABLES: list[tuple[Any, Law | None, Table]] = []  # the last ones, with what tells them apart
_HELD = 128
_NUMBERS = 2**24  # coefficients held at once


class Nodes(NamedTuple):
    """Quadrature nodes for |v|, with the weights of either sign."""

    size: Tensor
    plus: Tensor
    minus: Tensor

    @classmethod
    def of(cls, law: Law | None, count: int, width: float) -> Nodes:
        """Return those of a law, without the ones that have no weight."""
        if is_normal(law):
            return cls._of_normal(law.mean, law.std, width, 61 / count)  # type: ignore[union-attr]
        one = torch.ones(1, dtype=torch.float64, device="cpu")
        v, weights = (one, one) if law is None else law.quadrature(count)
        kept = weights * (1 + v**4) > 1e-18
        v, weights = v[kept], weights[kept]
        size = torch.where(v.abs() > 1e-12, v.abs(), 0.0)
        size, index = torch.unique(size, return_inverse=True)
        plus, minus = (
            torch.zeros_like(size).index_add_(0, index, weights * side) for side in (v >= 0, v < 0)
        )
        both = plus + minus
        symmetric = (plus - minus).abs() <= 1e-14 * both  # to the last bit, so that 0 is 0
        return cls(size, *(torch.where(symmetric, both / 2, x) for x in (plus, minus)))

    @classmethod
    def _of_normal(cls, mean: float, std: float, width: float, fineness: float) -> Nodes:
        r"""Return those of a normal law, for functions singular at :math:`\pm i w` and beyond.

        With :math:`v = w \sinh t` singularities lie at :math:`\operatorname{Im} t = \pm \pi / 2`,
        wherever they were, and the trapezoid rule in :math:`t` needs few nodes.
        """
        width = min(width, std)
        step = fineness * min(0.14, 0.45 * std / max(abs(mean), 1e-300))
        far = abs(mean) + 9 * std
        t = step * (torch.arange(math.ceil(math.asinh(far / width) / step)).double() + 0.5)
        size = width * torch.sinh(t)
        density = step * width * torch.cosh(t) / (std * math.sqrt(2 * math.pi))
        plus, minus = (torch.exp(-(((s * size - mean) / std) ** 2) / 2) * density for s in (1, -1))
        kept = (plus + minus) * (1 + size**4) > 1e-18
        return cls(size[kept], plus[kept], minus[kept])

    @property
    def both(self) -> Tensor:
        return self.plus + self.minus

    @property
    def deviation(self) -> float:
        return math.sqrt(float(self.both @ self.size**2))

    def average(self, sides: Sequence[Tensor], *, slope: bool = False) -> list[Tensor]:
        """Return the means over v of φ(vz) from φ(|v|z) and φ(-|v|z), at z and -z; of vφ'(vz)."""
        right, left = sides
        plus, minus = (self.size * self.plus, -self.size * self.minus) if slope else self[1:]
        return [plus @ right + minus @ left, plus @ left + minus @ right]


def is_normal(law: Law | None) -> bool:
    """Whether a law is normal, and no constant."""
    return isinstance(law, Normal | Shifted) and law.std > 0


class Smooth(Dual):
    """Dual of any function that acts on each number alone and is smooth.

    Its derivative is taken by torch; ``name`` is what messages call it.

    Example:
        >>> one = torch.ones(1, dtype=torch.float64)
        >>> f, g, _ = Smooth(torch.erf, "erf").same(one, one, one / 2, None)
        >>> f.item(), g.item()  # 2/π arcsin 1/3, 4/π/√8
        (0.2163468959..., 0.4501581580...)
    """

    def __init__(self, function: Callable[[Tensor], Tensor], name: str):
        self.function, self.name = function, name
        self._prepared: Table | None = None

    def same(
        self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None, *, with_h: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        table = self._prepared or self._table(*span(q1, q2), law)
        return table.same(q1, q2, c, with_h=with_h)

    def cross(self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None) -> tuple[Tensor, Tensor]:
        table = self._prepared or self._table(*span(q1, q2), law)
        return table.cross(q1, q2, c)

    def prepare(self, q_min: float, q_max: float, law: Law | None) -> Dual:
        prepared = copy.copy(self)
        prepared._prepared = self._table(q_min, q_max, law)
        return prepared

    def _table(self, q_min: float, q_max: float, law: Law | None) -> Table:
        """Return a table for these variances, a new one if none of the last few will do."""
        if torch._C._are_functorch_transforms_active():
            # What is made under a transform ends with it. Transforms hold for one thread.
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(self._table, q_min, q_max, law).result()
        ends = round_out(q_min, q_max)
        with torch.inference_mode(False), torch.no_grad():
            # Functions are told apart by their values: each pass looks them up anew.
            size = torch.logspace(-3, 4, 256, dtype=torch.float64, device="cpu")
            key = self.name, ends, self.function(torch.cat([-size, size])).tolist()
            for known, of, table in _TABLES:
                if known == key and (law is of or law == of):
                    return table
            table = self._tabulate(math.sqrt(ends[0]), math.sqrt(ends[1]), law)
        _TABLES[:] = [(key, law, table), *_TABLES[: _HELD - 1]]
        return table

    def _tabulate(self, low: float, high: float, law: Law | None) -> Table:
        """Return a table with nodes and terms enough to agree with direct integration, if any."""
        top = _numbers(high)
        ladder = [Nodes.of(law, count, width / high) for count, width in _NODES]
        known = [self._moments(top, top, nodes, 4 * _TERMS[-1]) for nodes in ladder]
        if not known[-1].isfinite().all():
            raise ValueError(
                f"{self.name} is not finite, or grows too fast, for the arguments that a variance "
                f"of {high**2:.3g} needs with {law}. Scale the inputs or the weights down."
            )
        scale = known[-1][:, [0, 1, 2, 0, 1]].clamp(min=1e-300)  # F, G, H within a member
        errors = [float(((found - known[-1]) / scale).abs().max()) for found in known[:-1]]
        fine = next((i for i, error in enumerate(errors) if error < _AIM), len(errors))
        nodes, terms, missing = ladder[fine], 0, math.inf
        for terms in _TERMS:
            sums = torch.cat([x.sum(0)[0] for x in self._series(top, nodes, terms)[1:]])
            missing = float((sums / known[-1][0, 1:3].clamp(min=1e-300) - 1).abs().max())
            if missing < _AIM:
                break
        error = errors[min(fine, len(errors) - 1)]
        self._judge(max(error, missing), high**2, law)
        kinds = (False, True) if tells_apart(law) else (False,)
        table = self._build(Axis(low, high, nodes.deviation or 1.0), nodes, terms, scale, kinds)
        roots = torch.linspace(max(low, high / 8), high, 9, dtype=torch.float64)
        exact = self._moments(roots, top, ladder[-1], 4 * _TERMS[-1])
        found = (_at_the_end(table, roots, top) - exact) / scale
        self._judge(max(error, float(found.abs().max())), high**2, law, warn=True)
        return table

    def _judge(self, error: float, q_max: float, law: Law | None, *, warn: bool = False) -> None:
        where = f"expectations of {self.name} for variances up to {q_max:.3g} with {law}"
        if not error < _WORST:
            raise ValueError(
                f"{where} must be accurate to {_WORST:g} at least; reached was {error:.1g}. "
                "Standardise the inputs or use a smaller weight_std; for an activation with a "
                "kink, or a very steep one, register a dual of your own."
            )
        if warn and not error < ACCURACY:
            warnings.warn(
                f"{where} are accurate to {error:.1g} only, not {ACCURACY:g}. Either it has a kink "
                "or is very steep, for which the series here is not made (register a dual of your "
                "own), or variances are large (scale the inputs or the weights down).",
                RuntimeWarning,
                stacklevel=5,
            )

    def _sides(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the function at x and at -x, and its derivative there."""
        with torch.enable_grad():
            leaf = torch.stack([x, -x]).requires_grad_()
            values = self.function(leaf)
            (slopes,) = torch.autograd.grad(values.sum(), leaf)
        return list(values.detach()), list(slopes)

    def _moments(self, roots: Tensor, other: Tensor, nodes: Nodes, fineness: int) -> Tensor:
        """Return F, G, H/rr', and F, G between members, at ρ = 1, by direct integration."""
        points, weights = _grid(fineness)
        left, right = (
            self._sides(x[:, None, None] * nodes.size[:, None] * points) for x in (roots, other)
        )
        flat, steep, curved = nodes.both, nodes.both * nodes.size**2, weights * points**2
        within = [
            sum((x * y) @ w @ v for x, y in zip(left[i], right[i], strict=True))
            for i, v, w in ((0, flat, weights), (1, steep, weights), (1, flat, curved))
        ]
        sides = [[nodes.average(x[0]), nodes.average(x[1], slope=True)] for x in (left, right)]
        between = [
            sum((x * y) @ weights for x, y in zip(*pair, strict=True))
            for pair in zip(*sides, strict=True)
        ]
        return torch.stack([*within, *between], dim=1)  # type: ignore[list-item]

    def _build(
        self, axis: Axis, nodes: Nodes, terms: int, scale: Tensor, kinds: Sequence[bool]
    ) -> Table:
        """Return a table within a member and, where ``kinds`` has means over v, between members."""
        largest = min(7 * nodes.deviation, float(nodes.size.max())) * axis.high
        edge = 1 / (1 + 4 * largest**2)  # singularities at |v| r ρ of size 1 and beyond
        top, found = _numbers(axis.high), []
        axis = axis.refine(lambda roots: self._moments(roots, top, nodes, terms) / scale)
        for means in kinds:
            start, *series = self._series(axis.nodes(), nodes, terms, means)
            f = expand_powers(series[0], edge, integrated=True)
            start = expand(start[None], cut=1e-16)  # F is small where roots are
            found.append((start, f, *(expand_powers(x, edge) for x in series)))
        return Table(axis, found[0], found[-1], edge)

    def _series(self, roots: Tensor, nodes: Nodes, terms: int, means: bool = False) -> list[Tensor]:
        """Return a a, then b b and d d as ``(n, root, root)``, averaged over v.

        ``means``: a a and b b of averages over v.
        """
        total: list[Tensor] = []
        size = len(nodes.size) if means else max(1, _NUMBERS // (terms * len(roots)))
        for part in zip(*(x.split(size) for x in nodes), strict=True):
            some = Nodes(*part)
            weights = [1.0] * 2 if means else [some.both, some.both * some.size**2, some.both]
            coefficients = self._coefficients(roots, some, terms, means)
            found = [(x * w) @ x.mT for x, w in zip(coefficients, weights, strict=True)]
            total = [x + y for x, y in zip(total, found, strict=True)] if total else found
        return total

    def _coefficients(self, roots: Tensor, nodes: Nodes, terms: int, means: bool) -> list[Tensor]:
        """Return a ``(root, v)`` and, of φ' alone, b and d ``(n, root, v)``; or means over v."""
        points, weights = _grid(terms)
        values, slopes = self._sides(roots[:, None, None] * nodes.size[:, None] * points)
        if means:
            values, slopes = nodes.average(values), nodes.average(slopes, slope=True)
            values, slopes = ([x[:, None] for x in pair] for pair in (values, slopes))
        a, (right, left) = (values[0] + values[1]) @ weights, slopes
        b = a.new_empty(terms, *a.shape)
        for parity, side in enumerate((right + left, right - left)):
            b[parity::2] = (_hermite(terms)[parity::2] @ side.flatten(0, 1).T).unflatten(1, a.shape)
        if means:
            return [a, b[:-1]]
        n = torch.arange(1, terms, dtype=torch.float64).sqrt()[:, None, None]
        d = n * b[1:]
        d[1:] += n[:-1] * b[:-2]
        return [a, b[:-1], d]


def _numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _at_the_end(table: Table, roots: Tensor, top: Tensor) -> Tensor:
    """Return what ``_moments`` does, from a table."""
    arguments = roots**2, top**2, roots * top
    f, g, h = table.same(*arguments)
    assert h is not None
    return torch.stack([f, g, h / (roots * top), *table.cross(*arguments)], dim=1)


def _grid(count: int) -> tuple[Tensor, Tensor]:
    """Return points :math:`g ≥ 0` and weights, fine enough for this many Hermite polynomials.

    The weights are those of the normal density, and 0 counts half: it is there for both signs.
    """
    steps = math.ceil(_REACH * max(8.0, math.sqrt(count)) / 2.5)
    points = torch.linspace(0, _REACH, steps + 1, dtype=torch.float64, device="cpu")
    weights = torch.exp(-(points**2) / 2) * (_REACH / steps / math.sqrt(2 * math.pi))
    weights[0] /= 2
    return points, weights


@lru_cache(maxsize=len(_TERMS))
def _hermite(count: int) -> Tensor:
    """Return orthonormal Hermite polynomials ``(n, point)`` times the weights of the grid."""
    points, weights = _grid(count)
    result = points.new_empty(count, len(points))
    result[0] = torch.exp(-(points**2) / 4)
    result[1] = points * result[0]
    for n in range(1, count - 1):
        torch.mul(points, result[n], out=result[n + 1])
        result[n + 1].sub_(result[n - 1], alpha=math.sqrt(n)).div_(math.sqrt(n + 1))
    return result.mul_(weights * torch.exp(points**2 / 4))


def round_out(q_min: float, q_max: float) -> tuple[float, float]:
    """Return a wider range, of which there are few, so that tables are used again."""
    if not 0 <= q_min <= q_max < math.inf:
        raise ValueError(
            f"variances must be finite and >= 0; got some from {q_min:.6g} to {q_max:.6g}. "
            "Look for infinite or missing values among the inputs."
        )
    if q_max == 0:
        return 0.0, 1.0
    high = 2 ** (math.floor(2 * math.log2(q_max) + 1) / 2)
    low = 0.0 if q_min < q_max / 1000 else 2 ** (math.floor(2 * math.log2(q_min)) / 2)
    return min(low, q_min), max(high, q_max)
