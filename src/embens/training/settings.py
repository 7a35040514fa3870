"""What determines a run: its settings, checked, and written down for checkpoints to compare."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from embens import checks, metrics
from embens.checks import Gamma, closest
from embens.ensemble.rates import MakeOptimizer
from embens.objective import OPTIONS, BatchKind, Criterion, Of
from embens.training import rates

if TYPE_CHECKING:
    from embens.ensemble import EmbeddedEnsemble

Metric = str | Callable[[Tensor, Tensor], Any] | None
METRICS = {"loss": False, "accuracy": True}
"""Whether more is better."""
_DIRECTIONS: dict[Any, bool] = {
    metrics.ensemble_accuracy: True,
    metrics.nll: False,
    metrics.brier: False,
    metrics.expected_calibration_error: False,
}


@dataclass(frozen=True)
class Settings:
    """The arguments of :func:`embens.fit` that can change its result."""

    epochs: int
    batch_size: int
    lr: float
    modulation_lr: float | None
    weight_decay: float
    modulation_weight_decay: float
    gamma: Gamma
    criterion: Criterion | None
    batch: BatchKind
    of: Of
    chunk: int | None
    optimizer: MakeOptimizer | None
    scheduler: rates.MakeScheduler | None
    metric: Metric
    maximise: bool | None
    patience: int | None
    keep: str
    seed: int

    def check(self, validation: bool) -> None:
        """Raise where a value, or a combination, has no meaning."""
        least = {"epochs": 0, "batch_size": 1, "chunk": 1, "patience": 1, "seed": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if value is None and name in ("chunk", "patience"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(
                    f"{name}: expected a whole number of at least {low}; got {value!r}"
                )
        choices = {**OPTIONS, "keep": ("best", "last")}
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name}: unknown {value!r}{closest(value, allowed)}")
        if self.chunk is not None and (self.batch != "same" or self.of != "members"):
            raise ValueError(
                "chunk= runs members one group after another on the same batch; it can't be "
                f"combined with batch={self.batch!r}, of={self.of!r}. Leave chunk out."
            )
        if self.of == "mean" and self.batch != "same":
            raise ValueError(f"of='mean' needs batch='same'; got batch={self.batch!r}")
        if self.patience is not None and not validation:
            raise ValueError("patience: early stopping needs validation data; got none")
        self.more_is_better()

    def more_is_better(self, name: str = "accuracy") -> bool:
        """Return the direction of the metric; ``name`` is what None stands for."""
        metric = name if self.metric is None else self.metric
        known = METRICS.get(metric) if isinstance(metric, str) else _DIRECTIONS.get(metric)
        if isinstance(metric, str) and known is None:
            raise ValueError(
                f"metric: unknown {metric!r}{closest(metric, METRICS)}, or a function of (outputs, "
                "target) such as embens.metrics.nll"
            )
        if self.maximise is not None:
            return self.maximise
        if known is None:
            raise ValueError(
                "metric: whether more or less is better can't be known of a function of your own; "
                "pass maximise=True or maximise=False"
            )
        return known

    def make_optimizer(self, ensemble: EmbeddedEnsemble) -> Optimizer:
        """Return the optimizer, gamma in its rates."""
        make = rates.sgd if self.optimizer is None else self.optimizer
        groups = ensemble.parameter_groups(
            *(self.lr, self.modulation_lr, self.weight_decay),
            gamma=self.gamma,
            optimizer=SGD if self.optimizer is None else make,
            modulation_weight_decay=self.modulation_weight_decay,
        )
        return make(groups)

    def describe(
        self, ensemble: EmbeddedEnsemble, optimizer: Optimizer, rows: int
    ) -> dict[str, Any]:
        """Return what identifies a run, for its checkpoints."""
        members, natural = ensemble.members, ensemble.natural_gamma
        factor = checks.gradient_factor(self.gamma, members, natural)
        hidden = ("lr", "initial_lr")
        groups = [
            {k: v for k, v in group.items() if k not in hidden and _is_plain(v)}
            for group in optimizer.param_groups
        ]
        plain = {k: v for k, v in vars(self).items() if v is None or _is_plain(v)}
        named = ("criterion", "scheduler", "metric")
        sites = [[s.layer, s.kind, repr(s.law), s.trainable, s.fresh] for s in ensemble.plan.sites]
        return {
            "family": ensemble.plan.family,
            "members": members,
            "sites": sites,
            **{
                f"shape of {name}": [list(tensor.shape), str(tensor.dtype)]
                for name, tensor in ensemble.state_dict().items()
            },
            **plain,
            **{name: describe(getattr(self, name)) for name in named},
            "gamma": factor * members,
            "optimizer": {"name": type(optimizer).__name__, "groups": groups},
            "batches or rows": rows,
        }


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(v) for v in value)
    return isinstance(value, (bool, int, str)) or (
        isinstance(value, float) and not math.isnan(value)
    )


def describe(value: Any) -> Any:
    """Return a name for a function, a module or a number that is the same in every process."""
    if value is None or _is_plain(value):
        return value
    if isinstance(value, functools.partial):
        return [describe(value.func), *map(describe, value.args)] + [
            [key, describe(v)] for key, v in sorted(value.keywords.items())
        ]
    if isinstance(value, Tensor):
        return value.tolist() if value.numel() < 1000 else list(value.shape)
    if isinstance(value, nn.Module):
        return [repr(value), *(describe(t) for t in value.state_dict().values())]
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return type(value).__name__
