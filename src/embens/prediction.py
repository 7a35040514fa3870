r"""Predict with an ensemble: what the members say, and how sure they are together.

What it says of classes are :mod:`embens.metrics`. For regression the ensemble is a mixture of its
members: if each gives a mean :math:`\mu_a` and a variance :math:`\sigma_a^2`, the mixture has

.. math::
    \mu = \frac1M\sum_a \mu_a, \qquad
    \sigma^2 = \underbrace{\frac1M\sum_a \sigma_a^2}_\text{aleatoric}
             + \underbrace{\frac1M\sum_a (\mu_a - \mu)^2}_\text{epistemic} .
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from embens import checks, metrics, uncertainty
from embens.ensemble import EmbeddedEnsemble
from embens.ensemble.export import evaluating
from embens.ensemble.run import gather
from embens.files import refusing, write_atomically
from embens.objective import logits_of

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

Score = Callable[[Tensor], Tensor]  # an uncertainty of each row, of all members' outputs
Task = Literal["classification", "regression", "gaussian"]
Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]


@dataclass(frozen=True)
class Prediction:
    """The members' outputs, and what follows from them; for the ``task`` see :func:`predict`.

    Where the network returns a tuple or a dict, so are the ``members``, and ``prediction[key]`` is
    the prediction of one output, which has all the rest; outputs that have ``logits``, as those of
    transformers, have it at once.
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

    # Decisions, by the prediction of held-out rows and what happened there

    def risk_coverage(self, target: Tensor, score: Score | None = None) -> uncertainty.RiskCoverage:
        """Return the share of errors, or the squared error, of the most certain rows."""
        target = self._check(self, target)
        if self.task == "classification":
            losses = self.probabilities.argmax(-1) != target
        else:
            losses = (self.mean - target.view_as(self.mean)).square()
        return uncertainty.risk_coverage(losses.flatten(), self._scores(score))

    def reject(self, fraction: float, score: Score | None = None) -> Bool[Tensor, " batch"]:
        """Return which rows are the least certain fraction, to be left to somebody else.

        ``score`` is the uncertainty to go by; None: ``metrics.least_confidence``, or the variance.
        """
        checks.check_number("fraction", fraction, "a number from 0 to 1", lambda f: 0 <= f <= 1)
        scores = self._scores(score)
        worst = scores.argsort(descending=True)[: round(fraction * len(scores))]
        return torch.zeros_like(scores, dtype=torch.bool).index_fill_(0, worst, True)

    def flag(
        self, held_out: Prediction, rate: float = 0.05, score: Score | None = None
    ) -> uncertainty.Flags:
        """Flag rows that are not like the held-out ones, with a rate of false alarms at most.

        ``score`` is the uncertainty to go by; None: the mutual information (of one member, which
        has none, the entropy), or the variance.
        """
        checks.check_number("rate", rate, "a number between 0 and 1", lambda r: 0 < r < 1)
        self._check(held_out)
        if score is None and self.task == "classification":
            several = len(self.means) > 1
            score = metrics.mutual_information if several else metrics.predictive_entropy
        return uncertainty.Flags(self._scores(score), held_out._scores(score), rate)

    def temperature(self, target: Int[Tensor, " batch"]) -> float:
        """Return what logits should be divided by, from the classes of held-out rows."""
        outputs = self._outputs("temperature", "classification")
        return uncertainty.best_temperature(outputs, self._check(self, target))

    def tempered(self, temperature: float) -> Prediction:
        """Return the prediction with logits divided by a temperature."""
        checks.check_number("temperature", temperature, "a number above 0", lambda t: t > 0)
        return Prediction(self._outputs("tempered", "classification") / temperature, self.task)

    def conformal_sets(
        self, held_out: Prediction, target: Int[Tensor, " row"], coverage: float = 0.9
    ) -> uncertainty.ConformalSets:
        """Return sets of classes that hold the true one with a chance of at least ``coverage``.

        ``target`` are the classes of held-out rows that neither training nor the temperature saw.
        """
        target = self._check(held_out, target)
        right = held_out.probabilities.gather(1, target[:, None]).squeeze(1)
        threshold = -uncertainty.conformal_quantile(-right, coverage)  # 1 − p, without rounding
        return uncertainty.ConformalSets(self.probabilities >= threshold, coverage, threshold)

    def plot_reliability(self, target: Tensor, path: uncertainty.File) -> None:
        """Draw accuracy against confidence; the diagonal is calibrated."""
        outputs = self._outputs("plot_reliability", "classification")
        found = metrics.reliability(outputs, target)
        error = metrics.expected_calibration_error(outputs, target)
        labels = {"xlabel": "confidence", "ylabel": "accuracy", "xlim": (0, 1), "ylim": (0, 1)}
        title = f"expected calibration error {error:.3f}"
        with uncertainty.picture(path, title=title, **labels) as axes:
            axes.plot([0, 1], [0, 1], "k:")
            axes.plot(found.confidence.tolist(), found.accuracy.tolist(), "o-")

    def _scores(self, score: Score | None) -> Float[Tensor, " batch"]:
        if self.task == "classification":
            scores = (score or metrics.least_confidence)(self._outputs("scores", self.task))
        else:
            scores = self.variance if score is None else score(self.members)
            if score is None and not scores.any():
                raise ValueError("no row is less certain: members agree on all. Pass a score.")
        if scores.numel() != len(self.mean):
            raise ValueError(
                f"expected one uncertainty for each row; got {tuple(scores.shape)}. Pass a score, "
                "or take one output: Prediction(prediction.members[..., k], prediction.task)."
            )
        return uncertainty.known(scores.flatten())

    def _check(self, held_out: Prediction, target: Any = None) -> Any:
        """Return the target of a prediction that is like this one, on its device."""
        mine, other = ((p.task, *p.mean.shape[1:]) for p in (self, held_out))
        if mine != other:
            raise ValueError(f"held_out: expected a prediction like this, {mine}; got {other}")
        if target is None:
            return None
        rows = len(held_out.mean)
        if not isinstance(target, Tensor) or len(target) != rows:
            got = len(target) if isinstance(target, Tensor) else type(target).__name__
            raise ValueError(f"target: expected a tensor of the {rows} rows predicted; got {got}")
        if self.task == "classification":  # which says what is wrong with classes, or logits
            metrics.nll(held_out._outputs("target", self.task), target)
            self._scores(None)
        return target.to(held_out.mean.device)

    def _outputs(self, name: str, *tasks: Task) -> Tensor:
        """Return the outputs for a value that is defined for these tasks."""
        members = logits_of(self.members)
        if not isinstance(members, Tensor):
            kind = type(self.members).__name__
            raise TypeError(
                f"the network returns a {kind}; take one output: prediction[key].{name}"
            )
        if self.task in tasks:
            return members
        raise ValueError(
            f"{name} is defined for {' and '.join(map(repr, tasks))}; this prediction is for "
            f"{self.task!r}. Pass task={tasks[-1]!r} to predict if that is what outputs are."
        )


class StoredPrediction:
    """A prediction in an Arrow file, to be gone through one batch after another.

    A row of the file is a sample: the outputs of all its members, ``(member, *output)``.
    """

    def __init__(self, path: str | os.PathLike[str]):
        import pyarrow as pa

        self.path = Path(path)
        with refusing(path), pa.memory_map(str(path)) as source:
            reader = pa.ipc.open_file(source)
            metadata = reader.schema.metadata or {}
            if b"embens" not in metadata:
                raise ValueError("it has no predictions of embens")
            self.shape, self.task = json.loads(metadata[b"embens"])
            self._rows = sum(reader.get_batch(i).num_rows for i in range(reader.num_record_batches))

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> Iterator[Prediction]:
        import pyarrow as pa

        with pa.memory_map(str(self.path)) as source:
            reader = pa.ipc.open_file(source)
            for i in range(reader.num_record_batches):
                values = torch.tensor(reader.get_batch(i).column(0).flatten().to_numpy())
                yield Prediction(values.view(-1, *self.shape).movedim(1, 0), self.task)

    @classmethod
    def write(
        cls, path: str | os.PathLike[str], parts: Iterable[Any], task: Task
    ) -> StoredPrediction:
        """Write members' outputs ``(member, batch, …)``, batch by batch; the file appears whole."""
        import pyarrow as pa

        def fill(place: Path) -> None:
            writer = schema = None
            with pa.OSFile(str(place), "wb") as sink:
                for part in map(logits_of, parts):
                    if not isinstance(part, Tensor):
                        kind = type(part).__name__
                        raise TypeError(f"to: expected a network with one output; got a {kind}")
                    samples = part.movedim(0, 1).cpu()
                    shape, flat = list(samples.shape[1:]), samples.flatten()
                    numbers = (flat.float() if flat.dtype == torch.bfloat16 else flat).numpy()
                    column = pa.FixedSizeListArray.from_arrays(numbers, math.prod(shape))
                    if writer is None:
                        about = {"embens": json.dumps([shape, task])}
                        schema = pa.schema([("members", column.type)], about)
                        writer = pa.ipc.new_file(sink, schema)
                    writer.write(pa.record_batch([column], schema=schema))
                if writer is None:
                    raise ValueError("x: expected at least one batch; got none")
                writer.close()

        write_atomically(path, fill)
        return cls(path)


@checks.suggest()
def predict(
    ensemble: EmbeddedEnsemble,
    x: Inputs | Iterable[Inputs],
    *,
    batch_size: int = 1024,
    members: int | None = None,
    task: Task = "classification",
    generator: torch.Generator | None = None,
    to: str | os.PathLike[str] | None = None,
) -> Prediction | Any:
    """Run an ensemble on data, batch by batch, in evaluation mode and without gradients.

    Args:
        ensemble: its mode is restored afterwards.
        x: inputs ``(batch, …)``, a tuple of them, or a dict by their names; moved to the ensemble's
            device batch by batch, while the outputs come back to that of ``x``. With ``to`` also an
            iterator, or a loader, of such batches.
        batch_size: how many samples at a time.
        members: how many masks to draw, where they are fresh at each pass (one mask for all
            samples); None: as many as the ensemble has members.
        task: "classification" (outputs are logits), "regression" (outputs are point predictions)
            or "gaussian" (outputs ``(…, 2)`` are a mean and the logarithm of a variance).
        generator: draws fresh masks; None: the global one.
        to: an Arrow file to write the outputs to, batch by batch, where they don't fit in memory;
            the result then gives the prediction of one batch after another.

    Example:
        >>> from embens import batch_ensemble, networks
        >>> net = networks.mlp(4, 8, 2, outputs=3)
        >>> prediction = predict(batch_ensemble(net, 5), torch.zeros(2, 4))
        >>> prediction.members.shape, prediction.probabilities.shape
        (torch.Size([5, 2, 3]), torch.Size([2, 3]))
    """
    checks.check_choice("task", task, get_args(Task))
    checks.check_whole("batch_size", batch_size)
    batches = x if isinstance(x, Iterable) and not isinstance(x, (Tensor, tuple, Mapping)) else None
    if batches is None or to is None:
        x = dict(x) if isinstance(x, Mapping) else x
        rows = checks.check_rows("x", x, "a tensor (batch, …), a tuple or a dict of them")
        starts = range(0, rows or 1, batch_size)
        batches = (tree_map(lambda v, i=i: v[i : i + batch_size], x) for i in starts)
    count = ensemble.members if members is None else checks.check_members(members)
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
        parts = (_run(ensemble, batch, seeds, count, task) for batch in batches)
        if to is not None:
            return StoredPrediction.write(to, parts, task)
        parts = list(parts)
    result = parts[0] if len(parts) == 1 else gather(parts, lambda some: torch.cat(some, 1))
    return Prediction(result, task)


def _run(
    ensemble: EmbeddedEnsemble, x: Any, seeds: Sequence[int | None], count: int, task: Task
) -> Any:
    """Return the outputs of so many members for one batch, with one pass for each seed."""
    home = tree_leaves(x)[0]
    device = next(ensemble.parameters(), home).device
    devices = [device] if device.type == "cuda" else []
    args, kwargs = ensemble.bind(tree_map(lambda v: v.to(device), x))
    outputs = []
    for seed in seeds:
        with torch.random.fork_rng(devices, enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            outputs.append(ensemble(*args, **kwargs))
    result = outputs[0] if len(outputs) == 1 else gather(outputs, torch.cat)
    if checks.find_gaps("outputs", result) and (gaps := checks.find_gaps("x", x)):
        raise ValueError(f"{gaps}, and so have the outputs. Leave these rows out, or fill them in.")
    if task == "gaussian" and isinstance(result, Tensor) and result.shape[-1] != 2:
        raise ValueError(
            f"task='gaussian' expects outputs (…, 2), a mean and a log-variance; got "
            f"{tuple(result.shape[1:])}. For point predictions use task='regression'."
        )
    return tree_map(lambda v: v[:count].to(home.device) if isinstance(v, Tensor) else v, result)
