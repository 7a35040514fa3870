"""What determines a run: its settings, checked, and written down for checkpoints to compare."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from embens import metrics
from embens.checks import check_choice, check_number, check_whole, gradient_factor
from embens.objective import OPTIONS
from embens.training.each import EachMember

if TYPE_CHECKING:
    from embens.ensemble import EmbeddedEnsemble

MakeScheduler = Callable[[Optimizer], LRScheduler]
Metric = str | Callable[[Tensor, Tensor], Any] | None
MORE: dict[Any, bool] = {"accuracy": True, metrics.ensemble_accuracy: True, "loss": False}
"""Whether more of a metric is better."""
MORE |= dict.fromkeys((metrics.nll, metrics.brier, metrics.expected_calibration_error), False)


class Settings(SimpleNamespace):
    """The arguments of :func:`embens.fit` that can change its result, by their names there."""

    def check(self, validation: bool) -> None:
        for name in ("epochs", "batch_size", "chunk", "patience", "seed", "accumulate"):
            if (value := getattr(self, name)) is not None:
                check_whole(name, value, 0 if name in ("epochs", "seed") else 1)
        choices = {**OPTIONS, "keep": ("best", "last"), "schedule_by": ("epoch", "step")}
        choices["autocast"] = (None, torch.bfloat16, torch.float16)
        for name, possible in choices.items():
            check_choice(name, getattr(self, name), possible)
        if self.clip is not None:
            check_number("clip", self.clip, "a number above 0", lambda bound: bound > 0)
        if self.compile and (self.chunk is not None or torch.__version__ < (2, 10)):  # type: ignore[operator]
            raise ValueError("compile=True needs torch 2.10, and all members at once: no chunk=")
        if self.each is not None:
            if self.chunk is not None or self.batch == "split" or self.of != "members":
                raise ValueError("each= needs all members at once: no chunk=, batch='split' or of=")
            if self.each.dropout is not None and self.compile:
                raise ValueError("each: members with dropout of their own can't be compiled")
        if self.chunk is not None and (self.batch != "same" or self.of != "members"):
            raise ValueError("chunk= needs batch='same' and of='members'; leave it out")
        if self.of != "members" and self.batch != "same":
            raise ValueError(f"of={self.of!r} needs batch='same'; got batch={self.batch!r}")
        if self.patience is not None and not validation:
            raise ValueError("patience: early stopping needs validation data; got none")
        more_is_better(self.metric or "accuracy", self.maximise)

    def make_optimizer(self, ensemble: EmbeddedEnsemble) -> Optimizer:
        """Return the optimizer, with gamma in its rates; None: SGD with momentum 0.9."""
        # On the CPU the fused kernel takes any memory for contiguous, and no sparse gradients.
        sparse = any(getattr(module, "sparse", False) for module in ensemble.modules())
        dense = (p.is_contiguous() and p.device.type == "cpu" for p in ensemble.parameters())
        fused = not sparse and all(dense)
        make = self.optimizer or functools.partial(SGD, momentum=0.9, fused=fused)
        groups = ensemble.parameter_groups(
            *(self.lr, self.modulation_lr, self.weight_decay),
            gamma=self.gamma,
            optimizer=make,
            modulation_weight_decay=self.modulation_weight_decay,
        )
        return make(groups)

    def gamma_of(self, ensemble: EmbeddedEnsemble) -> float:
        factor = gradient_factor(self.gamma, ensemble.members, ensemble.natural_gamma)
        return ensemble.members * factor

    def describe(
        self, ensemble: EmbeddedEnsemble, optimizer: Optimizer, rows: int
    ) -> dict[str, Any]:
        """Return what identifies a run, for its checkpoints."""
        hidden, plan = ("params", "lr", "initial_lr"), ensemble.plan
        groups = optimizer.param_groups
        groups = [{k: describe(v) for k, v in g.items() if k not in hidden} for g in groups]
        tensors = ensemble.state_dict().items()
        return {
            "family": plan.family + str(plan.heads or ""),
            "members": ensemble.members,
            "sites": [[s.layer, s.kind, repr(s.law), s.trainable, s.fresh] for s in plan.sites],
            **{f"shape of {name}": [list(t.shape), str(t.dtype)] for name, t in tensors},
            **{name: describe(value) for name, value in vars(self).items()},
            "gamma": self.gamma_of(ensemble),
            "optimizer": {"name": type(optimizer).__name__, "groups": groups},
            "batches or rows": rows,
        }


def more_is_better(metric: Metric, maximise: bool | None) -> bool:
    """Return the direction of a metric; ``maximise`` says so for a function of the user's."""
    if isinstance(metric, str):
        check_choice("metric", metric, ("accuracy", "loss"))
    if maximise is not None:
        return maximise
    if metric not in MORE:
        raise ValueError("metric: whether more is better is not known; pass maximise=True or False")
    return MORE[metric]


def linear_decay(epochs: int, *, hold: float = 0.5, final: float = 0.01) -> MakeScheduler:
    """Return the paper's schedule: a constant rate, then linearly down.

    Args:
        epochs: of the whole run.
        hold: fraction of the epochs with the full rate.
        final: fraction of the rate at the end; the last epoch comes one step short of it.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> scheduler = linear_decay(8, final=0.0)(optimizer)
        >>> [scheduler.lr_lambdas[0](epoch) for epoch in range(8)]
        [1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if not 0 <= hold <= 1 or not 0 <= final <= 1:
        raise ValueError(f"hold and final are fractions from 0 to 1; got {hold} and {final}")

    def factor(epoch: int) -> float:
        left = (epochs - epoch) / max(epochs * (1 - hold), 1e-12)
        return final + (1 - final) * min(1.0, max(0.0, left))

    return lambda optimizer: LambdaLR(optimizer, factor)


def describe(value: Any) -> Any:
    """Return JSON for a function, a module or a number that is the same in every process."""
    if isinstance(value, EachMember):
        value = list(vars(value).values())
    elif isinstance(value, functools.partial):
        value = [value.func, value.args, sorted(value.keywords.items())]
    elif isinstance(value, nn.Module):
        value = [repr(value), *value.state_dict().values()]
    if isinstance(value, (tuple, list)):
        return [describe(v) for v in value]
    if isinstance(value, Tensor):
        return value.tolist() if value.numel() < 1000 else list(value.shape)
    if value is None or (isinstance(value, (bool, int, str, float)) and value == value):
        return value
    if name := getattr(value, "__qualname__", ""):
        return f"{value.__module__}.{name}"
    return str(value) if isinstance(value, (torch.dtype, float)) else type(value).__name__
