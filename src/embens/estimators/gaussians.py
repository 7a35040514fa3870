r"""The head of numbers: every member's opinion of a row is a few Gaussians of equal weight.

Members of the losses "likelihood" and "squared" have one each, by its mean and its logarithm of the
variance. "student" has five of the same mean, whose scales are quantiles of those
that make Student's t of :math:`\\nu = 4`. "quantile" learns nine quantiles; each is the centre of
one. With a transform of the target every Gaussian becomes eight in the target's own units. So
whatever the loss, all that is asked of the prediction is asked of a mixture. With means
:math:`\mu_a` and standard deviations :math:`\sigma_a` of its :math:`M` parts,

.. math::
    F(y) = \frac1M \sum_a \Phi\Big(\frac{y - \mu_a}{\sigma_a}\Big), \qquad
    \mathrm{CRPS}(F, y) = \frac1M \sum_a A(y - \mu_a, \sigma_a^2)
        - \frac1{2M^2} \sum_{ab} A(\mu_a - \mu_b, \sigma_a^2 + \sigma_b^2),

with :math:`A(m, s^2) = m\,(2\Phi(m/s) - 1) + 2 s\,\varphi(m/s)` (Grimit et al., 2006).

"likelihood" is the mixture's own for one member. "squared" fits the mean alone; the variance sees
the last hidden layer, but does not change it.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from sklearn.utils.validation import check_array
from torch import Tensor

from embens.estimators.heads import Classes, Head, as_columns, log_mean
from embens.estimators.tables import read_target
from embens.uncertainty import ADDED, best_scale

LOG_VARIANCES = (-10.0, 10.0)  # bounds of a member's log-variance, of a target of variance 1
KNOTS = 200  # of the transform by quantiles
CACHED = 2**14  # numbers that a processor's cache keeps
SKEWED = 2.0  # a target whose skewness is larger may be transformed


WIDTH = 0.6  # of the parts of a Gaussian, in its deviations: they overlap, and are hardly bumpy


def _middles(count: int) -> tuple[Tensor, float]:
    """Return normal quantiles of equal weight, and by what to draw them in.

    So that parts of :data:`WIDTH` there have the variance of the whole.
    """
    points = torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count)
    return points, math.sqrt((1 - WIDTH**2) / float(points.square().mean()))


EIGHT, NINE = _middles(8), _middles(9)  # once: an export can't compute them
LEVELS = (torch.arange(9) + 0.5) / 9  # of the quantiles that are learnt
SCALES = torch.tensor([1.939, 1.350, 1.092, 0.906, 0.717])  # √(ν/χ²) at .1, .3, …, with ν = 4


@dataclass(frozen=True, eq=False)
class Gaussians(Head):
    """Standardised targets, one or several, as mixtures of Gaussians."""

    targets: int
    loss: str = "likelihood"
    stopping: str = "nll"
    transform: str = "none"
    knots: Tensor | None = None  # of the transform: its values and scores; what "log" adds
    mean: Tensor | float = 0.0  # of each target, transformed
    std: Tensor | float = 1.0
    temperature: Tensor | float = 1.0  # what standard deviations are multiplied by
    apart: ClassVar[int] = 2

    @staticmethod
    def read(y: Any) -> np.ndarray:
        y = read_target(y)
        try:
            return check_array(y, ensure_2d=False, dtype="float64", input_name="y")
        except ValueError as error:
            raise ValueError(f"y: a regressor needs numbers: {error}") from None

    @classmethod
    def learn(cls, y: np.ndarray, options: Any, known: Any = None) -> Self:
        usual = {"squared": "rmse", "quantile": "crps"}.get(options.loss, "nll")
        stopping = usual if options.metric == "auto" else options.metric
        transform = "none" if options.target_transform == "auto" else options.target_transform
        targets, single = y[:1].size, y.ndim == 1
        return cls(targets, options.loss, stopping, transform, single=single)

    def scaled(self, values: Tensor, weights: Tensor) -> Self:
        if len(values) < 2:
            raise ValueError("one sample (n_samples=1) to train on; a regressor needs two or more")
        size = values.abs().amax(0)
        if ((size > 1e150) | (size < 1e-150) & (size > 0)).any():
            raise ValueError(f"y: numbers of size {size.tolist()} can't be squared; rescale them")
        head = replace(self, knots=self._find_knots(values))
        values = head._forth(values)
        share = (weights / weights.sum())[:, None]
        mean = (share * values).sum(0)
        std = (share * (values - mean) ** 2).sum(0).sqrt()
        size = values.abs().amax(0)
        return replace(head, mean=mean, std=torch.where(std > 1e-12 * size, std, 1.0))

    # Transforms

    def _find_knots(self, values: Tensor) -> Tensor | None:
        if self.transform == "none":
            return None
        if self.transform == "log":
            if (values < 0).any():
                raise ValueError("target_transform='log' needs targets that are not negative")
            least = values.where(values > 0, math.inf).amin(0)
            return torch.where((values == 0).any(0), least / 2, 0.0)[None]
        levels = torch.linspace(0.5 / KNOTS, 1 - 0.5 / KNOTS, KNOTS, dtype=torch.float64)
        rising = 1e-9 * torch.arange(KNOTS)[:, None] * values.std(0).clamp(min=1e-300)
        scores = torch.special.ndtri(levels)[:, None].expand(-1, self.targets)
        return torch.stack([values.quantile(levels, dim=0) + rising, scores])

    def _forth(self, values: Tensor) -> Tensor:
        if self.knots is None:
            return values
        if self.transform == "log":
            return (values + self.knots[0]).clamp(min=1e-150).log()
        return _interpolate(values, *self.knots)

    def _back(self, values: Tensor) -> Tensor:
        if self.knots is None:
            return values
        if self.transform == "log":
            return values.clamp(max=300.0).exp() - self.knots[0]
        return _interpolate(values, *self.knots.flip(0))

    def unpack(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values of a packed target, in their own units, and its weights."""
        weights = target[:, -1] if self.weighted else torch.ones(len(target))
        values = self._back(self.mean + self.std * target[:, : self.targets].double())
        return values, weights.double()

    # What outputs mean

    @property
    def detached(self) -> bool:  # type: ignore[override]
        return self.loss == "squared"

    @property
    def outputs(self) -> int:
        return (len(LEVELS) if self.loss == "quantile" else 2) * self.targets

    def values(self, y: np.ndarray) -> Tensor:
        columns = as_columns(y, self.targets)
        return torch.stack([torch.tensor(c.astype("float64")) for c in columns], 1)

    def numbers(self, values: Tensor) -> Tensor:
        return (self._forth(values) - self.mean) / self.std

    def pack(self, values: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        return super().pack(self.numbers(values), weights, dtype)

    def losses(self, outputs: Tensor, target: Tensor) -> Tensor:
        y = target[..., : self.targets]
        if self.loss == "quantile":
            off = y.unsqueeze(-1) - outputs.unflatten(-1, (self.targets, -1))
            levels = LEVELS.to(off)
            return 2 * torch.maximum(levels * off, (levels - 1) * off).mean(-1)
        if self.loss == "squared":
            mean, logarithm = outputs.chunk(2, dim=-1)
            logarithm = logarithm.clamp(*LOG_VARIANCES)
            square = (y - mean).square()
            return 0.5 * (square + torch.addcmul(logarithm, square.detach(), (-logarithm).exp()))
        mean, std = (part.movedim(-3, 0) for part in self.standard(outputs))
        return -log_density(mean, std, y)

    def standard(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and deviations ``(member, part, row, target)``, standardised."""
        if self.loss == "quantile":
            centres = outputs.unflatten(-1, (self.targets, -1)).sort(-1).values
            points, drawn = NINE
            slope = centres.diff(dim=-1) / points.diff().to(centres)
            wide = torch.cat([slope[..., :1], (slope[..., 1:] + slope[..., :-1]) / 2], -1)
            wide = torch.cat([wide, slope[..., -1:]], -1).clamp(min=math.exp(LOG_VARIANCES[0] / 2))
            middle = centres.mean(-1, keepdim=True)
            centres = middle + drawn * (centres - middle)
            return centres.movedim(-1, 1), WIDTH * wide.movedim(-1, 1)
        mean, logarithm = outputs.chunk(2, dim=-1)
        std = (logarithm.clamp(*LOG_VARIANCES) / 2).exp().unsqueeze(-3)
        if self.loss == "student":
            std = std * SCALES.to(std)[:, None, None]
        return mean.unsqueeze(-3).expand_as(std), std

    def members(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and deviations ``(member, part, row, target)`` of the target itself."""
        mean, std = self.standard(outputs.double())
        mean, std = self.mean + self.std * mean, self.std * std * self.temperature
        if self.knots is None:
            return mean, std
        points, drawn = EIGHT
        at = mean.unsqueeze(2) + std.unsqueeze(2) * drawn * points[:, None, None]
        far = WIDTH * std.unsqueeze(2)
        low, high = self._back(at - far), self._back(at + far)
        wide = ((high - low) / 2).clamp(min=1e-300)
        return ((low + high) / 2).flatten(1, 2), wide.flatten(1, 2)

    def parts(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same, members and their parts in one row: the whole mixture."""
        mean, std = self.members(outputs)
        return mean.flatten(0, 1), std.flatten(0, 1)

    def moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return every member's mean and standard deviation, ``(member, row, target)``."""
        mean, std = self.members(outputs)
        return mean.mean(1), ((std**2).mean(1) + mean.var(1, correction=0)).sqrt()

    def summarise(self, outputs: Tensor) -> tuple[Tensor, ...]:
        """Return mean and standard deviation of the mixture."""
        mean, std = self.parts(outputs)
        return mean.mean(0), ((std**2).mean(0) + mean.var(0, correction=0)).sqrt()

    # Metrics and calibration

    def log_mixture(self, outputs: Tensor, target: Tensor) -> Tensor:
        mean, std = (x.flatten(0, 1) for x in self.standard(outputs))
        return log_density(mean, self.temperature * std, target[:, : self.targets])

    def metric(self, outputs: Tensor, target: Tensor) -> Tensor:
        if self.stopping == "nll":
            return super().metric(outputs, target)
        if self.stopping == "crps":  # of the transformed target: eight times fewer parts
            mean, std = (x.flatten(0, 1) for x in self.standard(outputs.double()))
            rows = crps(mean, self.temperature * std, target[:, : self.targets].double())
            return self.average((self.std * rows).sum(-1), target)
        error = (self.unpack(target)[0] - self.summarise(outputs)[0]) / self.std
        return self.average(error.square().sum(-1), target).sqrt()

    def crps(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the mean score of the mixture in the target's own units, summed over targets."""
        rows = crps(*self.parts(outputs), self.unpack(target)[0])
        return self.average(rows.sum(-1), target)

    def tempered(self, outputs: Tensor, target: Tensor) -> Self:
        factors = [self._factor(k, outputs, target) for k in range(self.targets)]
        return replace(self, temperature=torch.tensor(factors, dtype=torch.float64))

    def scored(self, outputs: Tensor, target: Tensor) -> Self:
        mean, std = self.summarise(outputs)
        return replace(self, scores=(self.unpack(target)[0] - mean).abs() / std)

    def _factor(self, k: int, outputs: Tensor, target: Tensor) -> float:
        mean, std = (x[..., k].flatten(0, 1) for x in self.standard(outputs.double()))
        weights = target[:, -1].double() if self.weighted else torch.ones(len(target)).double()

        def loss(t: float) -> Tensor:
            density = log_density(mean, t * std, target[:, k].double())
            mine = len(target) * (weights @ density) / weights.sum()
            added = -math.log(t) - 0.5 / t**2  # of a row that is one standard deviation off
            return -(mine + ADDED * added)

        return best_scale(loss)


AnyHead = Classes | Gaussians


def _interpolate(values: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return a function that is linear between knots ``(knot, target)``, and beyond them."""
    found = []
    for v, a, b in zip(values.unbind(-1), x.unbind(-1), y.unbind(-1), strict=True):
        i = torch.searchsorted(a.contiguous(), v.contiguous()).clamp(1, len(a) - 1)
        slope = (b[i] - b[i - 1]) / (a[i] - a[i - 1])
        found.append(b[i - 1] + slope * (v - a[i - 1]))
    return torch.stack(found, -1)


def log_density(mean: Tensor, std: Tensor, y: Tensor) -> Tensor:
    """Return the logarithm of the mixture's density."""
    logarithms = -0.5 * ((y - mean) / std) ** 2 - std.log() - 0.5 * math.log(2 * math.pi)
    return log_mean(logarithms)


def quantile(mean: Tensor, std: Tensor, level: float) -> Tensor:
    """Return a quantile of the mixture, by bisection between those of its members."""
    if not 0 < level < 1:
        raise ValueError(f"a quantile's level lies between 0 and 1; got {level}")
    own = mean + torch.special.ndtri(torch.tensor(level, dtype=torch.float64)) * std
    low, high = own.amin(0), own.amax(0)
    for _ in range(60):
        middle = (low + high) / 2
        above = torch.special.ndtr((middle - mean) / std).mean(0) >= level
        high = torch.where(above, middle, high)
        low = torch.where(above, low, middle)
    return (low + high) / 2


def crps(mean: Tensor, std: Tensor, y: Tensor) -> Tensor:
    """Return the continuous ranked probability score, in units of ``y``; lower is better.

    Example:
        >>> crps(torch.zeros(1), torch.ones(1), torch.tensor(0.0)).item()  # (√2 − 1) / √π
        0.2336...
    """
    count, spread = len(mean), []
    blocks = (x.reshape(count, -1).split(max(1, CACHED // count), 1) for x in (mean, std))
    for m, s in zip(*blocks, strict=True):
        twice = 2 / math.sqrt(math.pi) * s.sum(0)  # of each with itself
        for a in range(count - 1):  # with those behind it: memory of M, not of M²
            pairs = _absolute(m[a] - m[a + 1 :], (s[a] ** 2 + s[a + 1 :] ** 2).sqrt())
            twice += 2 * pairs.sum(0)
        spread.append(twice / (2 * count**2))
    return _absolute(y - mean, std).mean(0) - torch.cat(spread).reshape(mean.shape[1:])


def _absolute(mean: Tensor, std: Tensor) -> Tensor:
    ratio = mean / std
    density = (-(ratio**2) / 2).exp() / math.sqrt(2 * math.pi)
    return mean * torch.erf(ratio / math.sqrt(2)) + 2 * std * density
