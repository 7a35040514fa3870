r"""What became of ensembles that were probed and then trained to their end.

``experience.npz`` has the features of their probes and the weights with which a Gaussian process
carries the outcomes of their trainings over to a probe that is new; ``benchmarks/forecast.py``
trained them and made it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embens.finite.probing import TINY, Probe

EXPERIENCE = Path(__file__).with_name("experience.npz")
SAMPLE = 800  # ensembles that tell how far a probe lies from all
SHORT = 0.0  # logarithm of steps times rate: of shorter trainings less is known


@dataclass(frozen=True)
class Experience:
    r"""A Gaussian process on the probes of ensembles whose training was seen to its end.

    .. math::
        k(x, x') = \tfrac12 e^{-|x - x'|^2 / 2 d \ell^2} + \tfrac12 \frac{x \cdot x'}{d}

    of d standardised features, with noise :math:`\sigma^2` of standardised outcomes.

    Attributes:
        known: standardised features of all ensembles; ``centre`` and ``spread`` standardise others.
        weights: of ensembles, by outcome; ``mean`` and ``scale`` are the outcomes' own.
        length: :math:`\ell`; ``noise``: :math:`\sigma^2`.
    """

    known: Tensor
    weights: Tensor
    centre: Tensor
    spread: Tensor
    mean: Tensor
    scale: Tensor
    length: float
    noise: float

    @classmethod
    def of(cls, features: Tensor, outcomes: Tensor, length: float, noise: float) -> Experience:
        """Return what features and outcomes of ensembles teach."""
        centre, spread = features.mean(0), features.std(0).clamp(min=TINY)
        known, mean, scale = standard(features, centre, spread), outcomes.mean(0), outcomes.std(0)
        factor = torch.linalg.cholesky(joint(known, length, noise))
        weights = torch.cholesky_solve((outcomes - mean) / scale, factor)
        return cls(known, weights, centre, spread, mean, scale, length, noise)

    @functools.cached_property
    def sample(self) -> tuple[Tensor, Tensor]:
        """Some of the ensembles, and the Cholesky factor of their kernel."""
        some = self.known[:: -(-len(self.known) // SAMPLE)]
        return some, torch.linalg.cholesky(joint(some, self.length, self.noise))

    def expect(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return means ``(row, outcome)``, and standard deviations, noise included."""
        rows = standard(features, self.centre, self.spread)
        some, factor = self.sample
        meet = kernel(rows, some, self.length)
        explained = (meet * torch.cholesky_solve(meet.T, factor).T).sum(1)
        own = (1 + rows.square().sum(1) / rows.shape[1]) / 2
        variance = (own - explained).clamp(min=0) + self.noise
        means = kernel(rows, self.known, self.length) @ self.weights
        return self.mean + self.scale * means, variance.sqrt()[:, None] * self.scale


def standard(features: Tensor, centre: Tensor, spread: Tensor) -> Tensor:
    """Return features in units of their spread, without outliers."""
    return ((features - centre) / spread).clamp(-3, 3)


def kernel(left: Tensor, right: Tensor, length: float) -> Tensor:
    """Return how alike rows of standardised features are."""
    count = left.shape[1]
    near = torch.exp(-torch.cdist(left, right).square() / 2 / count / length**2)
    return (near + left @ right.T / count) / 2


def joint(known: Tensor, length: float, noise: float) -> Tensor:
    """Return the kernel of rows with noise."""
    return kernel(known, known, length) + noise * torch.eye(len(known), dtype=known.dtype)


@functools.cache
def known() -> tuple[Experience, dict[str, tuple[float, float]]]:
    """Return what is known, and by outcome the factors that make its errors honest.

    There are two, of long and of short trainings.
    """
    import numpy

    with numpy.load(EXPERIENCE) as stored:
        names = stored["names"].tolist()
        numbers = {name: stored[name].astype(float) for name in stored if name != "names"}
    reach = dict(zip(names, map(tuple, numbers.pop("reach").tolist()), strict=True))
    parts: dict[str, Any] = {
        name: torch.from_numpy(v) if v.ndim else float(v) for name, v in numbers.items()
    }
    return Experience(**parts), reach


def expect(probe: Probe) -> tuple[dict[str, float], dict[str, float]]:
    """Return what to expect after the training: means by name, and standard deviations."""
    (process, reach), short = known(), probe.plan["time"] < SHORT
    features = torch.tensor([list(probe.features().values())], dtype=torch.float64)
    means, spreads = (values[0].tolist() for values in process.expect(features))
    errors = (wide[short] * spread for wide, spread in zip(reach.values(), spreads, strict=True))
    return dict(zip(reach, means, strict=True)), dict(zip(reach, errors, strict=True))
