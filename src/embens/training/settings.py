"""What determines a run: its settings, checked, and written down for checkpoints to compare."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from embens import metrics
from embens.checks import Gamma, check_choice, check_whole, closest, gradient_factor
from embens.ensemble.rates import MakeOptimizer
from embens.objective import OPTIONS, BatchKind, Criterion, Of
from embens.training.rates import MakeScheduler, linear_decay

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
    scheduler: MakeScheduler | None
    metric: Metric
    maximise: bool | None
    patience: int | None
    keep: str
    seed: int

    def check(self, validation: bool) -> None:
        """Raise where a value, or a combination, has no meaning."""
        least = {"epochs": 0, "batch_size": 1, "chunk": 1, "patience": 1, "seed": 0}
        for name, low in least.items():
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), low)
        for name, choices in {**OPTIONS, "keep": ("best", "last")}.items():
            check_choice(name, getattr(self, name), choices)
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
        """Return the optimizer, with gamma in its rates; None: SGD with momentum 0.9."""
        make = self.optimizer or functools.partial(SGD, momentum=0.9, fused=_can_fuse(ensemble))
        groups = ensemble.parameter_groups(
            *(self.lr, self.modulation_lr, self.weight_decay),
            gamma=self.gamma,
            optimizer=make,
            modulation_weight_decay=self.modulation_weight_decay,
        )
        return make(groups)

    def make_scheduler(self, optimizer: Optimizer) -> LRScheduler:
        """Return the scheduler; None: the paper's."""
        return (self.scheduler or linear_decay(self.epochs))(optimizer)

    def gamma_of(self, ensemble: EmbeddedEnsemble) -> float:
        """Return the number that gamma stands for."""
        members = ensemble.members
        return members * gradient_factor(self.gamma, members, ensemble.natural_gamma)

    def describe(
        self, ensemble: EmbeddedEnsemble, optimizer: Optimizer, rows: int
    ) -> dict[str, Any]:
        """Return what identifies a run, for its checkpoints."""
        hidden = ("params", "lr", "initial_lr")
        groups = [
            {k: describe(v) for k, v in group.items() if k not in hidden}
            for group in optimizer.param_groups
        ]
        sites = [[s.layer, s.kind, repr(s.law), s.trainable, s.fresh] for s in ensemble.plan.sites]
        tensors = ensemble.state_dict().items()
        return {
            "family": ensemble.plan.family,
            "members": ensemble.members,
            "sites": sites,
            **{f"shape of {name}": [list(t.shape), str(t.dtype)] for name, t in tensors},
            **{name: describe(value) for name, value in vars(self).items()},
            "gamma": self.gamma_of(ensemble),
            "optimizer": {"name": type(optimizer).__name__, "groups": groups},
            "batches or rows": rows,
        }


def _can_fuse(ensemble: EmbeddedEnsemble) -> bool:
    """Return whether one fused kernel may update all parameters.

    On the CPU torch's takes any memory for contiguous, and it has none for sparse gradients.
    """
    sparse = any(getattr(module, "sparse", False) for module in ensemble.modules())
    dense = (p.is_contiguous() and p.device.type == "cpu" for p in ensemble.parameters())
    return not sparse and all(dense)


def describe(value: Any) -> Any:
    """Return JSON for a function, a module or a number that is the same in every process."""
    if isinstance(value, (tuple, list)):
        return [describe(v) for v in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return str(value) if math.isnan(value) else value
    if isinstance(value, functools.partial):
        return describe([value.func, value.args, sorted(value.keywords.items())])
    if isinstance(value, Tensor):
        return value.tolist() if value.numel() < 1000 else list(value.shape)
    if isinstance(value, nn.Module):
        return [repr(value), *map(describe, value.state_dict().values())]
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return type(value).__name__
