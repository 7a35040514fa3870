r"""Predict with an ensemble: what the members say, and how sure they are together.

What it says of classes are :mod:`embens.metrics`. For regression the ensemble is a mixture of its
members: if each gives a mean :math:`\mu_a` and a variance :math:`\sigma_a^2`, the mixture has

.. math::
    \mu = \frac1M\sum_a \mu_a, \qquad
    \sigma^2 = \underbrace{\frac1M\sum_a \sigma_a^2}_\text{aleatoric}
             + \underbrace{\frac1M\sum_a (\mu_a - \mu)^2}_\text{epistemic} .
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from embens import metrics
from embens.checks import check_choice, check_members, check_rows, check_whole, find_gaps, suggest
from embens.ensemble import EmbeddedEnsemble
from embens.ensemble.export import evaluating
from embens.ensemble.run import gather

if TYPE_CHECKING:
    from jaxtyping import Float

Task = Literal["classification", "regression", "gaussian"]


@dataclass(frozen=True)
class Prediction:
    """The members' outputs, and what follows from them; for the ``task`` see :func:`predict`.

    Where the network returns a tuple or a dict, so are the ``members``, and ``prediction[key]`` is
    the prediction of one output, which has all the rest.
    """

    members: Float[Tensor, "member batch *output"]
    task: Task = "classification"

    def __getitem__(self, key: Any) -> Prediction:
        if isinstance(self.members, Tensor):
            raise TypeError("the network has one output; index .members, .mean or .probabilities")
        return Prediction(self.members[key], self.task)

    @property
    def means(self) -> Tensor:
        """The members' point predictions: the outputs, without log-variances."""
        members = self._outputs("means", *get_args(Task))
        return members[..., 0] if self.task == "gaussian" else members

    def __repr__(self) -> str:
        shapes = tree_map(lambda v: tuple(v.shape) if isinstance(v, Tensor) else v, self.members)
        return f"Prediction(task={self.task!r}, members of shape {shapes})"

    @property
    def mean(self) -> Tensor:
        """Mean output over members; for regression the mean of the mixture."""
        return self.means.mean(0)

    @property
    def epistemic(self) -> Tensor:
        """Variance of the members' point predictions (population variance, over members)."""
        return self.means.var(0, correction=0)

    @property
    def aleatoric(self) -> Tensor:
        """Mean of the variances that members predict; 0 where they predict none."""
        outputs = self._outputs("aleatoric", "regression", "gaussian")
        gaussian = self.task == "gaussian"
        return outputs[..., 1].exp().mean(0) if gaussian else torch.zeros_like(self.mean)

    @property
    def variance(self) -> Tensor:
        """Variance of the mixture; where members predict no variance, of their outputs."""
        return self.epistemic + self.aleatoric if self.task == "gaussian" else self.epistemic

    @property
    def probabilities(self) -> Tensor:
        """Mean of the members' class probabilities, ``(batch, class)``."""
        return self._outputs("probabilities", "classification").softmax(-1).mean(0)

    @property
    def entropy(self) -> Tensor:
        """Entropy of the mean probability, in nats: all uncertainty of each sample."""
        return metrics.predictive_entropy(self._outputs("entropy", "classification"))

    @property
    def mutual_information(self) -> Tensor:
        """Entropy of the mean probability less the members' mean entropy: the epistemic part."""
        return metrics.mutual_information(self._outputs("mutual_information", "classification"))

    def _outputs(self, name: str, *tasks: Task) -> Tensor:
        """Return the outputs for a value that is defined for these tasks."""
        if not isinstance(self.members, Tensor):
            kind = type(self.members).__name__
            raise TypeError(
                f"the network returns a {kind}; take one output: prediction[key].{name}"
            )
        if self.task in tasks:
            return self.members
        raise ValueError(
            f"{name} is defined for {' and '.join(map(repr, tasks))}; this prediction is for "
            f"{self.task!r}. Pass task={tasks[-1]!r} to predict if that is what outputs are."
        )


@suggest()
def predict(
    ensemble: EmbeddedEnsemble,
    x: Tensor | tuple[Any, ...] | Mapping[str, Any],
    *,
    batch_size: int = 1024,
    members: int | None = None,
    task: Task = "classification",
    generator: torch.Generator | None = None,
) -> Prediction:
    """Run an ensemble on data, batch by batch, in evaluation mode and without gradients.

    Args:
        ensemble: its mode is restored afterwards.
        x: inputs ``(batch, …)``, a tuple of them for references that take several, or a dict by
            their names; moved to the ensemble's device batch by batch, while the outputs come back
            to that of ``x``. Rows that are not finite are refused if outputs are not either.
        batch_size: how many samples at a time.
        members: how many masks to draw, where they are fresh at each pass (one mask for all
            samples); None: as many as the ensemble has members.
        task: "classification" (outputs are logits), "regression" (outputs are point predictions)
            or "gaussian" (outputs ``(…, 2)`` are a mean and the logarithm of a variance).
        generator: draws fresh masks; None: the global one.

    Example:
        >>> from embens import batch_ensemble, networks
        >>> net = networks.mlp(4, 8, 2, outputs=3)
        >>> prediction = predict(batch_ensemble(net, 5), torch.zeros(2, 4))
        >>> prediction.members.shape, prediction.probabilities.shape
        (torch.Size([5, 2, 3]), torch.Size([2, 3]))
    """
    check_choice("task", task, get_args(Task))
    check_whole("batch_size", batch_size)
    x = dict(x) if isinstance(x, Mapping) else x
    check_rows("x", x, "a tensor (batch, …), a tuple or a dict of them")
    count = ensemble.members if members is None else check_members(members)
    seeds: list[int | None] = [None]
    if any(site.random for site in ensemble.plan.sites):
        device = "cpu" if generator is None else generator.device
        passes = -(-count // ensemble.members)
        seeds = torch.randint(2**62, (passes,), generator=generator, device=device).tolist()
    elif members is not None:
        raise ValueError(
            f"members={members}: the {ensemble.members} members of this ensemble are fixed, none "
            "can be drawn. Leave members out, or embed with fresh=True (mc_dropout)."
        )
    with evaluating(ensemble), torch.no_grad():
        outputs = [_run(ensemble, x, batch_size, seed) for seed in seeds]
    result = outputs[0] if len(outputs) == 1 else gather(outputs, torch.cat)
    if find_gaps("outputs", result) and (gaps := find_gaps("x", x)):
        raise ValueError(f"{gaps}, and so have the outputs. Leave these rows out, or fill them in.")
    if task == "gaussian" and isinstance(result, Tensor) and result.shape[-1] != 2:
        raise ValueError(
            "task='gaussian' expects outputs (…, 2), a mean and the logarithm of a variance; got "
            f"{tuple(result.shape[1:])}. For point predictions use task='regression'."
        )
    return Prediction(tree_map(lambda v: v[:count] if isinstance(v, Tensor) else v, result), task)


def _run(ensemble: EmbeddedEnsemble, x: Any, batch_size: int, seed: int | None) -> Any:
    first = tree_leaves(x)[0]
    device = next(ensemble.parameters(), first).device
    devices = [device] if device.type == "cuda" else []
    outputs = []
    for start in range(0, max(len(first), 1), batch_size):
        rows = tree_map(lambda v, start=start: v[start : start + batch_size].to(device), x)
        args, kwargs = ensemble.bind(rows)
        with torch.random.fork_rng(devices, enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            result = ensemble(*args, **kwargs)
        outputs.append(
            tree_map(lambda v: v.to(first.device) if isinstance(v, Tensor) else v, result)
        )
    return outputs[0] if len(outputs) == 1 else gather(outputs, lambda parts: torch.cat(parts, 1))
