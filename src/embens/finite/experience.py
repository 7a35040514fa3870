r"""What became of ensembles that were probed and then trained to their end.

``experience.json`` has the features of their probes and the outcomes of their trainings, which
``benchmarks/forecast.py`` made; Gaussian processes carry them over to a probe that is new.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch
from torch import Tensor

from embens.finite.probing import TINY, Probe

EXPERIENCE = Path(__file__).with_name("experience.json")


class Experience:
    r"""A Gaussian process on the probes of ensembles whose training was seen to its end.

    .. math::
        k(x, x') = \tfrac12 e^{-|x - x'|^2 / 2 d \ell^2} + \tfrac12 \frac{x \cdot x'}{d}

    of d standardised features, with noise :math:`\sigma^2` of standardised outcomes.
    """

    def __init__(self, features: Tensor, outcomes: Tensor, length: float, noise: float):
        self.centre, self.spread = features.mean(0), features.std(0).clamp(min=TINY)
        self.mean, self.scale = outcomes.mean(0), outcomes.std(0)
        self.length, self.noise = length, noise
        self.known, self.outcomes = self._standard(features), (outcomes - self.mean) / self.scale
        self.joint = self._kernel(self.known, self.known)
        self.joint += noise * torch.eye(len(features), dtype=torch.float64)
        self.factor = torch.linalg.cholesky(self.joint)
        self.weights = torch.cholesky_solve(self.outcomes, self.factor)

    def _standard(self, features: Tensor) -> Tensor:
        return ((features - self.centre) / self.spread).clamp(-3, 3)

    def _kernel(self, left: Tensor, right: Tensor) -> Tensor:
        count = left.shape[1]
        near = torch.exp(-torch.cdist(left, right).square() / 2 / count / self.length**2)
        return (near + left @ right.T / count) / 2

    def expect(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return means ``(row, outcome)``, and standard deviations, noise included."""
        rows = self._standard(features)
        meet = self._kernel(rows, self.known)
        explained = (meet * torch.cholesky_solve(meet.T, self.factor).T).sum(1)
        own = (1 + rows.square().sum(1) / rows.shape[1]) / 2
        variance = (own - explained).clamp(min=0) + self.noise
        return self.mean + self.scale * (meet @ self.weights), variance.sqrt()[:, None] * self.scale


@functools.cache
def known() -> tuple[Experience, dict[str, float]]:
    """Return what is known, and by outcome the factor that makes its errors honest."""
    stored = json.loads(EXPERIENCE.read_text())
    features, values = (
        torch.tensor(stored[name], dtype=torch.float64) for name in ("features", "values")
    )
    return Experience(features, values, stored["length"], stored["noise"]), stored["reach"]


def expect(probe: Probe) -> tuple[dict[str, float], dict[str, float]]:
    """Return what to expect after the training: means by name, and standard deviations."""
    process, reach = known()
    features = torch.tensor([list(probe.features().values())], dtype=torch.float64)
    means, spreads = (values[0].tolist() for values in process.expect(features))
    errors = (wide * spread for wide, spread in zip(reach.values(), spreads, strict=True))
    return dict(zip(reach, means, strict=True)), dict(zip(reach, errors, strict=True))
