r"""Duals of smooth activations without a closed form: tanh, softplus, SiLU, or a user's own.

All expectations are read from a table (:mod:`embens.theory.duals.averages`), which is refined until
the values at :math:`\rho = 1`, the hardest, agree with direct integration to ``ACCURACY``, relative
to :math:`F, G, H` within a member (for variances down to a millionth of the largest). If not,
as for an activation with a kink, a warning says what was reached; beyond 1e-4 it is a ValueError.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from embens.laws import Law
from embens.theory.duals.averages import Averages, Mehler, Nodes
from embens.theory.duals.expectations import Dual, tells_apart
from embens.theory.duals.series import REACH, TIERS, Axis, normal_grid, to_hermite
from embens.theory.duals.tables import Tabulated, span

ACCURACY = 1e-10
AIM = 1e-11
_TABLES: list[tuple[Any, Tabulated]] = []  # the last ones, with what tells them apart
_HELD = 128
_WORST = 1e-4  # with a larger error nothing is returned
# Nodes for v, and fineness for z.
STEPS = ((61, 256), (121, 512), (241, 1024), (481, 4096), (961, 16384), (1921, 16384))


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

    def same(
        self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None, *, with_h: bool = True
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.prepare(*span(q1, q2), law).same(q1, q2, c, law, with_h=with_h)

    def cross(self, q1: Tensor, q2: Tensor, c: Tensor, law: Law | None) -> tuple[Tensor, Tensor]:
        return self.prepare(*span(q1, q2), law).cross(q1, q2, c, law)

    def prepare(self, q_min: float, q_max: float, law: Law | None) -> Dual:
        """Return a table for these variances, a new one if none of the last few will do."""
        if torch._C._are_functorch_transforms_active():
            # What is made under a transform ends with it. Transforms hold for one thread.
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(self.prepare, q_min, q_max, law).result()
        ends = round_out(q_min, q_max)
        with torch.inference_mode(False), torch.no_grad():
            # Functions are told apart by their values: each pass looks them up anew.
            size = torch.logspace(-3, 4, 256, dtype=torch.float64, device="cpu")
            key = self.name, ends, self.function(torch.cat([-size, size])).tolist()
            for known, table in _TABLES:
                if known == key and (law is table.law or law == table.law):
                    return table
            table = self._tabulate(*ends, law)
        _TABLES[:] = [(key, table), *_TABLES[: _HELD - 1]]
        return table

    def _derivative(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            return torch.autograd.grad(self.function(x).sum(), x)[0]

    def _tabulate(self, q_min: float, q_max: float, law: Law | None) -> Tabulated:
        low, high = math.sqrt(q_min), math.sqrt(q_max)
        nodes, exact, error = self._integrate(high, law)
        count, missing = self._count_terms(high, law)
        self._check(max(error, missing), q_max, law)
        averages = Averages(self._series(low, high, nodes, count), nodes)
        table = self._table(low, high, law, averages)
        error = max(error, _difference(_on_diagonal(table, q_max), exact))
        self._check(error, q_max, law, warn=True)
        return table

    def _table(
        self, low: float, high: float, law: Law | None, averages: Averages, *, within: bool = True
    ) -> Tabulated:
        axis, edge = Axis(low, high, averages.nodes.spread or 1.0), averages.nodes.edge(high)
        first, inside = averages.within(axis, edge) if within else (axis, ())
        other, between = averages.between(axis, edge) if tells_apart(law) else (first, inside[:3])
        axis = axis.resize(max(first.count, other.count))
        return Tabulated(self, law, axis, inside, between, edge)

    def _check(self, error: float, q_max: float, law: Law | None, *, warn: bool = False) -> None:
        if not error < _WORST:
            reached = f"{error:.1g}" if error < 1 else "no digit at all"
            raise ValueError(
                f"expectations of {self.name} for variances up to {q_max:.3g} with {law} must be "
                f"accurate to {_WORST:g} at least; reached was {reached}. Standardise the inputs "
                "or use a smaller weight_std; for an activation with a kink, or a very steep one, "
                "register a dual of your own."
            )
        if warn and not error < ACCURACY:
            warnings.warn(
                f"expectations of {self.name} for variances up to {q_max:.3g} with {law} are "
                f"accurate to {error:.1g} only, not {ACCURACY:g}. Either it has a kink or is very "
                "steep, for which the series here is not made (register a dual of your own), or "
                "variances are large (scale the inputs or the weights down).",
                RuntimeWarning,
                stacklevel=5,
            )

    def _integrate(self, root: float, law: Law | None) -> tuple[Nodes, Tensor, float]:
        """Return nodes for v that suffice at this root, the values at ρ = 1, and their error."""
        coarse = Nodes.of(law, STEPS[0][0])
        exact, error = self._moments(root, coarse, STEPS[0][1]), math.inf
        for count, fineness in STEPS[1:]:
            nodes, last = Nodes.of(law, count), exact
            exact = self._moments(root, nodes, fineness)
            if not exact.isfinite().all():
                raise ValueError(
                    f"{self.name} is not finite, or grows too fast, for arguments up to "
                    f"{nodes.size.max() * root * REACH:.3g}, which a variance of "
                    f"{root**2:.3g} needs with {law}. Scale the inputs or the weights down."
                )
            error = _difference(last, exact)
            if error < AIM:
                break
            coarse = nodes
        return coarse, exact, error

    def _moments(self, root: float, nodes: Nodes, fineness: int) -> Tensor:
        """Return F, G, H/q, and F, G between members, at ρ = 1 by direct integration."""
        points, weights = normal_grid(fineness)
        size = nodes.size[:, None]
        sums = points.new_zeros(3)
        averages = points.new_zeros(2, 2, len(points))  # of φ(vz) and vφ'(vz), at z and at -z
        for sign in (0, 1):
            arguments = (1 - 2 * sign) * root * size * points
            value, slope = self.function(arguments), self._derivative(arguments)
            terms = (value, size * slope, points * slope)
            sums += torch.stack([nodes.both @ term**2 @ weights for term in terms])
            averages[0, sign] += nodes.plus @ value
            averages[0, 1 - sign] += nodes.minus @ value
            averages[1, sign] += nodes.plus @ (size * slope)
            averages[1, 1 - sign] -= nodes.minus @ (size * slope)
        return torch.cat([sums, (averages**2).sum(1) @ weights])

    def _count_terms(self, root: float, law: Law | None) -> tuple[int, float]:
        """Return how many coefficients carry F, G and H at ρ = 1 (Parseval), and what they miss."""
        nodes = Nodes.of(law, STEPS[0][0])
        count, missing = 0, math.inf
        for tier in TIERS:
            count = tier - 1
            exact = self._moments(root, nodes, tier)[:3, None]
            a, b, d = self._coefficients(root * nodes.size, count)
            n = torch.arange(1, count + 1, dtype=torch.float64)
            f, g = nodes.steep @ b**2 * (root**2 / n), nodes.steep @ b**2
            f[0] += nodes.both @ a**2
            sums = torch.stack([f, g, nodes.both @ d**2]).cumsum(1)
            errors = ((sums - exact).abs() / exact.clamp(min=1e-300)).amax(0)
            missing = float(errors[-1])
            enough = errors <= AIM
            if enough.any():
                return int(enough.int().argmax()) + 1, 0.0
        return count, missing

    def _coefficients(self, scales: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first coefficient of φ(sg), and those of φ'(sg) and gφ'(sg)."""
        points, weights = normal_grid(max(count, TIERS[0]))
        arguments = scales[:, None] * points
        a = (self.function(arguments) + self.function(-arguments)) @ weights
        b = to_hermite(self._derivative, scales, count + 1)
        n = torch.arange(1, count + 1, dtype=torch.float64).sqrt()
        d = n * b[:, 1:]
        d[:, 1:] += n[:-1] * b[:, : count - 1]
        return a, b[:, :count], d

    def _series(self, low: float, high: float, nodes: Nodes, count: int) -> Mehler:
        least, most = float(nodes.size.min()) * low, float(nodes.size.max()) * high
        some = min(count, TIERS[0] - 1)
        axis = Axis(least, most or 1.0, 1.0).refine(
            lambda scales: torch.cat(self._coefficients(scales, some)[1:], 1)
        )
        return Mehler(axis, *self._coefficients(axis.nodes(), count))


def _on_diagonal(table: Tabulated, q: float) -> Tensor:
    """Return what ``_moments`` does, from a table."""
    variance = torch.tensor([q], dtype=torch.float64)
    f, g, h = table.same(variance, variance, variance, table.law)
    assert h is not None
    return torch.cat([f, g, h / q, *table.cross(variance, variance, variance, table.law)])


def _difference(found: Tensor, exact: Tensor) -> float:
    """Return the largest error relative to F, G, H within a member."""
    scale = exact[[0, 1, 2, 0, 1]].clamp(min=1e-300)
    return float(((found - exact).abs() / scale).max())


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
