r"""Predictions of an ensemble: mean output, uncertainty and decisions.

For classification the predictive distribution is the mean of the members' class probabilities; see
:mod:`embens.metrics`. For regression the ensemble is a mixture of its members. If member :math:`a`
predicts the mean :math:`\mu_a` and the variance :math:`\sigma_a^2`, the mixture has

.. math::
    \mu = \frac1M\sum_a \mu_a, \qquad
    \sigma^2 = \underbrace{\frac1M\sum_a \sigma_a^2}_\text{aleatoric}
             + \underbrace{\frac1M\sum_a (\mu_a - \mu)^2}_\text{epistemic} .
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data._utils.collate import default_collate_fn_map

from embens import checks, conformal, metrics, mixtures, pictures, sources, uncertainty
from embens.logits import FLATTEN_POSITIONS, check_labelled
from embens.losses import logits_of
from embens.trees import gather

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

Score = Callable[[Tensor], Tensor]  # from outputs of all members to an uncertainty per row
Task = Literal["classification", "regression", "gaussian"]


# Not frozen: Lightning moves the fields of a prediction to another device by setting them.
@dataclass(eq=False, repr=False)
class Prediction:
    """Outputs of all members, and the quantities that follow from them.

    If the network returns a tuple or a dict, ``members`` has the same structure, and
    ``prediction[key]`` is the prediction of one output. If a dict has ``logits``, as the outputs of
    transformers, ``members`` are the logits.

    ``DataLoader`` collates predictions by concatenating their rows; ``torch.save`` and
    ``torch.load`` keep them.

    Attributes:
        members: Outputs ``(member, batch, *output)``.
        task: The meaning of the outputs, see :func:`embens.predict`.
        outputs: All outputs of a network that returns ``logits`` among others; otherwise None.

    Example:
        >>> prediction = Prediction(torch.tensor([[[2.0, 0.0]], [[0.0, 2.0]]]))
        >>> prediction.probabilities
        tensor([[0.5000, 0.5000]])
    """

    members: Float[Tensor, "member batch *output"]
    task: Task = "classification"
    outputs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        outputs: Any = self.members
        logits = logits_of(outputs)
        if logits is not outputs:
            self.outputs = dict(outputs)
            self.members = logits

    def __getitem__(self, key: Any) -> Prediction:
        outputs = self.members if self.outputs is None else self.outputs
        if isinstance(outputs, Tensor):
            raise TypeError(
                "The network has a single output. Index .members, .mean or .probabilities instead."
            )
        return Prediction(outputs[key], self.task)

    def __repr__(self) -> str:
        def shape(leaf: Any) -> Any:
            return tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf

        return f"Prediction(task={self.task!r}, members of shape {tree_map(shape, self.members)})"

    # --- Moments of the outputs

    @property
    def means(self) -> Tensor:
        """Point predictions of the members, which are the outputs without log-variances."""
        outputs = self._outputs("means", *get_args(Task))
        if self.task == "gaussian":
            return outputs[..., 0]
        return outputs

    @property
    def mean(self) -> Tensor:
        """Mean output over members."""
        return self.means.mean(0)

    @property
    def epistemic(self) -> Tensor:
        """Variance of the members' point predictions, with the divisor M instead of M - 1."""
        return self.means.var(0, correction=0)

    @property
    def aleatoric(self) -> Tensor:
        """Mean of the variances that members predict; 0 for point predictions."""
        outputs = self._outputs("aleatoric", "regression", "gaussian")
        if self.task == "gaussian":
            return outputs[..., 1].exp().mean(0)
        return torch.zeros_like(self.mean)

    @property
    def variance(self) -> Tensor:
        """Variance of the mixture; for point predictions the variance over members."""
        if self.task == "gaussian":
            return self.epistemic + self.aleatoric
        return self.epistemic

    @property
    def std(self) -> Tensor:
        """Standard deviation of the mixture, the square root of ``variance``."""
        return self.variance.sqrt()

    # --- Classification

    @property
    def probabilities(self) -> Tensor:
        """Mean of the members' class probabilities ``(batch, class)``."""
        outputs = self._outputs("probabilities", "classification")
        if outputs.dim() > 3:
            # The classes of images are axis 2 and those of tokens the last one.
            raise ValueError(
                "probabilities needs logits (member, batch, class), got shape "
                f"{tuple(outputs.shape)}. {FLATTEN_POSITIONS}"
            )
        if outputs.shape[-1] == 1:
            raise ValueError(
                "probabilities needs at least two classes, got a single output per row. For a "
                "regression pass task='regression' to predict and use mean; for one logit z per "
                "row pass torch.cat([torch.zeros_like(z), z], -1)."
            )
        return outputs.softmax(-1).mean(0)

    @property
    def entropy(self) -> Tensor:
        """Total uncertainty in nats ``(batch,)``, the entropy of the mean probability."""
        return metrics.predictive_entropy(self._outputs("entropy", "classification"))

    @property
    def mutual_information(self) -> Tensor:
        """Mutual information of class and member in nats ``(batch,)``, the epistemic part."""
        return metrics.mutual_information(self._outputs("mutual_information", "classification"))

    # --- Regression

    @property
    def components(self) -> tuple[Tensor, Tensor]:
        """Means and standard deviations of the predictive mixture of normals, ``(component, …)``.

        With ``task="gaussian"`` there is one component per member. Point predictions are not
        distributions, so they give a single component with the mean and standard deviation over
        members.
        """
        self._refuse_logits()
        if self.task == "gaussian":
            outputs = self._outputs("components", "gaussian")
            return outputs[..., 0], (outputs[..., 1] / 2).exp()
        return self.mean[None], self.std[None]

    def quantile(self, q: float) -> Tensor:
        """Return a quantile of the predictive distribution (``components``).

        Args:
            q: The probability, between 0 and 1.

        Returns:
            The quantile, with the shape of ``mean``.

        Example:
            >>> prediction = Prediction(torch.tensor([[-1.0], [1.0]]), "regression")
            >>> prediction.quantile(0.975)  # of the normal distribution with mean 0 and std 1
            tensor([1.9600])
        """
        means, stds = self.components
        return mixtures.quantile(means, stds, q)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return the central prediction interval.

        Args:
            level: Probability of the interval under the predictive distribution.

        Returns:
            Lower and upper ends, with the shape of ``mean``.

        Example:
            >>> low, high = Prediction(torch.tensor([[-1.0], [1.0]]), "regression").interval(0.95)
            >>> low, high
            (tensor([-1.9600]), tensor([1.9600]))
        """
        level = checks.check_number(
            "level", level, "a number between 0 and 1", lambda level: 0 < level < 1
        )
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    # --- Decisions

    def risk_coverage(self, target: Tensor, score: Score | None = None) -> uncertainty.RiskCoverage:
        """Return the risk of the most certain rows as a function of their number.

        Args:
            target: Class indices or values ``(batch,)``.
            score: The uncertainty; None: ``metrics.least_confidence``, or the variance.

        Returns:
            The curve; the loss is the error rate, or the squared error.

        Example:
            >>> prediction = Prediction(torch.tensor([[[3.0, 0.0], [1.0, 0.0]]]))
            >>> prediction.risk_coverage(torch.tensor([0, 1])).risk.tolist()
            [0.0, 0.5]
        """
        target = self._check_target(target)
        if self.task == "classification":
            losses = self.probabilities.argmax(-1) != target
        else:
            losses = (self.mean - target.view_as(self.mean)).square()
        return uncertainty.risk_coverage(losses.flatten(), self._scores(score))

    def reject(self, fraction: float, score: Score | None = None) -> Bool[Tensor, " batch"]:
        """Select the least certain rows.

        Args:
            fraction: Fraction of rows to select.
            score: The uncertainty; None: ``metrics.least_confidence``, or the variance.

        Returns:
            Boolean mask of the selected rows.

        Example:
            >>> prediction = Prediction(torch.tensor([[[3.0, 0.0], [1.0, 0.0]]]))
            >>> prediction.reject(0.5)
            tensor([False,  True])
        """
        checks.check_number("fraction", fraction, "a number from 0 to 1", lambda f: 0 <= f <= 1)
        scores = self._scores(score)
        count = round(fraction * len(scores))
        rejected = torch.zeros_like(scores, dtype=torch.bool)
        rejected[scores.argsort(descending=True)[:count]] = True
        return rejected

    def flag(
        self, held_out: Prediction, rate: float = 0.05, score: Score | None = None
    ) -> uncertainty.Flags:
        """Flag rows that are less certain than held-out rows.

        Args:
            held_out: Prediction for rows that were not used in training.
            rate: Largest rate of false alarms.
            score: The uncertainty; None: the mutual information (the entropy for a single member),
                or the variance.

        Returns:
            The scores, the threshold and the flagged rows.

        Example:
            >>> sure = Prediction(torch.tensor([9.0, 0.0]).expand(1, 20, 2))
            >>> unsure = Prediction(torch.zeros(1, 3, 2))
            >>> unsure.flag(sure).flagged
            tensor([True, True, True])
        """
        checks.check_number("rate", rate, "a number between 0 and 1", lambda r: 0 < r < 1)
        self._check_like(held_out)
        if score is None and self.task == "classification":
            score = metrics.mutual_information
            if len(self.means) == 1:  # a single member has no mutual information
                score = metrics.predictive_entropy
        return uncertainty.Flags(self._scores(score), held_out._scores(score), rate)

    def temperature(self, target: Int[Tensor, " batch"]) -> float:
        """Return the number by which logits should be divided for calibration.

        Args:
            target: Classes ``(batch,)`` of these rows, which must not be used in training.

        Returns:
            The temperature, for :meth:`tempered`.

        Example:
            >>> logits = 4.0 * torch.eye(2).repeat(1, 50, 1)  # confident
            >>> target = torch.tensor([0, 1] * 50)
            >>> target[:10] = 1 - target[:10]  # and wrong on one row in ten
            >>> Prediction(logits).temperature(target) > 1
            True
        """
        outputs = self._outputs("temperature", "classification")
        return uncertainty.best_temperature(outputs, self._check_target(target))

    def tempered(self, temperature: float) -> Prediction:
        """Return the prediction with logits divided by a temperature.

        Args:
            temperature: A positive number.

        Returns:
            A new prediction with the same members and rows.

        Example:
            >>> Prediction(torch.tensor([[[4.0, 0.0]]])).tempered(2.0).members
            tensor([[[2., 0.]]])
        """
        checks.check_number("temperature", temperature, "a number above 0", lambda t: t > 0)
        return Prediction(self._outputs("tempered", "classification") / temperature, self.task)

    def conformal_sets(
        self, held_out: Prediction, target: Int[Tensor, " row"], coverage: float = 0.9
    ) -> conformal.ConformalSets:
        """Return sets of classes that contain the true class with a given probability.

        Args:
            held_out: Prediction for rows that neither training nor the temperature used.
            target: Classes of the held-out rows.
            coverage: The probability, between 0 and 1.

        Returns:
            The sets of all rows.

        Example:
            >>> held_out = Prediction(torch.tensor([3.0, 0.0]).expand(1, 20, 2))
            >>> target = torch.zeros(20, dtype=torch.int64)
            >>> Prediction(torch.tensor([[[9.0, 0.0]]])).conformal_sets(held_out, target).sets
            tensor([[ True, False]])
        """
        self._check_like(held_out)
        self._scores(None)  # raises if the logits are not finite
        target = held_out._check_target(target)
        return conformal.conformal_sets(
            self.probabilities, held_out.probabilities, target, coverage
        )

    def conformal_intervals(
        self, held_out: Prediction, target: Float[Tensor, " row"], coverage: float = 0.9
    ) -> conformal.ConformalIntervals:
        """Return intervals that contain the true value with a given probability.

        The central prediction interval of each row is widened, or narrowed, by one margin for all
        rows, such that the guarantee holds for any network (conformalised quantile regression,
        Romano et al., 2019).

        Args:
            held_out: Prediction for rows that were not used in training.
            target: Values of the held-out rows.
            coverage: The probability, between 0 and 1.

        Returns:
            The intervals of all rows.

        Example:
            >>> held_out = Prediction(torch.zeros(2, 19), "regression")
            >>> intervals = Prediction(torch.ones(2, 1), "regression").conformal_intervals(
            ...     held_out, torch.arange(-9.0, 10.0), coverage=0.5
            ... )
            >>> intervals.low, intervals.high
            (tensor([-4.]), tensor([6.]))
        """
        if self.mean.numel() != len(self.mean):
            raise ValueError(
                "conformal_intervals needs one value per row, got a mean of shape "
                f"{tuple(self.mean.shape)}. Use conformal_sets for classes; select one of several "
                "values: Prediction(prediction.members[..., k], prediction.task)."
            )
        self._check_like(held_out)
        return conformal.conformal_intervals(
            self.interval(coverage), held_out.interval(coverage), target, coverage
        )

    def plot_reliability(
        self, target: Tensor, path: pictures.File, *, before: Prediction | None = None
    ) -> None:
        """Plot accuracy against confidence, and the number of samples at each confidence.

        A calibrated ensemble is on the diagonal. Error bars are standard errors.

        Args:
            target: Class indices ``(batch,)``.
            path: File to write.
            before: Prediction for the same samples to compare with, for example before
                :meth:`tempered`.

        Raises:
            OSError: If no file can be written there.

        Example:
            >>> import os, tempfile
            >>> path = os.path.join(tempfile.mkdtemp(), "reliability.png")
            >>> Prediction(torch.zeros(3, 4, 2)).plot_reliability(torch.tensor([0, 0, 0, 1]), path)
            >>> os.path.getsize(path) > 0
            True
        """
        curves = {"this prediction": self}
        if before is not None:
            curves = {"before": before, "after": self}
        diagrams = {}
        for name, prediction in curves.items():
            outputs = prediction._outputs("plot_reliability", "classification")
            labels = prediction._check_target(target)
            error = metrics.expected_calibration_error(outputs, labels)
            diagram = metrics.reliability(outputs, labels, bins=10)
            diagrams[f"{name}: calibration error {error:.3f}"] = diagram
        pictures.plot_reliability(diagrams, path)

    # --- Checks

    def _outputs(self, name: str, *tasks: Task) -> Tensor:
        """Return the outputs for a quantity that is defined for these tasks."""
        outputs = self.members
        if not isinstance(outputs, Tensor):
            kind = type(self.members).__name__
            raise TypeError(
                f"The network returns a {kind}. Select one output: prediction[key].{name}."
            )
        if self.task not in tasks:
            names = " and ".join(repr(task) for task in tasks)
            raise ValueError(
                f"{name} is defined for {names}, but this prediction has task={self.task!r}. Pass "
                f"task={tasks[-1]!r} to predict if the outputs have this meaning."
            )
        return outputs

    def _refuse_logits(self) -> None:
        """Raise ValueError if outputs are class logits, for which intervals are not defined."""
        outputs = self._outputs("components", *get_args(Task))
        if self.task == "classification" and outputs.dim() > 2 and outputs.shape[-1] > 1:
            raise ValueError(
                "intervals and quantiles are defined for values, but this prediction has "
                f"task='classification' and {outputs.shape[-1]} logits per row. For a regression "
                "pass task='regression' to predict; for classes use conformal_sets."
            )

    def _scores(self, score: Score | None) -> Float[Tensor, " batch"]:
        """Return the uncertainty of each row."""
        if self.task == "classification":
            outputs = self._outputs("scores", "classification")
            scores = metrics.least_confidence(outputs) if score is None else score(outputs)
        elif score is None:
            scores = self.variance
            if not scores.any():
                raise ValueError(
                    "The variance of all rows is 0, so that no row is less certain. Pass a score."
                )
        else:
            scores = score(self.members)
        if scores.numel() != len(self.mean):
            raise ValueError(
                f"expected one uncertainty for each row, got shape {tuple(scores.shape)}. Pass a "
                "score, or select one output: Prediction(prediction.members[..., k], "
                "prediction.task)."
            )
        return conformal.check_scores(scores.flatten())

    def _check_like(self, held_out: Prediction) -> None:
        """Check that another prediction has the same task and the same outputs."""
        expected = (self.task, *self.mean.shape[1:])
        received = (held_out.task, *held_out.mean.shape[1:])
        if received != expected:
            raise ValueError(
                f"held_out must have the task and the output shape of this prediction, {expected}, "
                f"got {received}."
            )

    def _check_target(self, target: Tensor) -> Tensor:
        """Check the target of this prediction and move it to the device of the outputs."""
        rows = len(self.mean)
        target = sources.as_tensors(target)
        if not isinstance(target, Tensor):
            raise TypeError(
                f"target must be a tensor with {rows} rows, got {type(target).__name__}."
            )
        if len(target) != rows:
            raise ValueError(f"target must be a tensor with {rows} rows, got {len(target)} rows.")
        if self.task == "classification":
            check_labelled(self._outputs("target", "classification"), target)
        return target.to(self.mean.device)


def collate_predictions(
    batch: Sequence[Prediction], *, collate_fn_map: Mapping[Any, Any] | None = None
) -> Prediction:
    """Concatenate the rows of predictions; ``DataLoader`` calls this.

    Args:
        batch: Predictions with the same members and task.
        collate_fn_map: Not used.

    Raises:
        ValueError: If the tasks differ.

    Example:
        >>> parts = [Prediction(torch.zeros(4, 2, 3)), Prediction(torch.zeros(4, 1, 3))]
        >>> torch.utils.data.default_collate(parts).members.shape
        torch.Size([4, 3, 3])
    """
    tasks = {prediction.task for prediction in batch}
    if len(tasks) > 1:
        raise ValueError(f"predictions of one batch must have the same task, got {sorted(tasks)}.")

    def concatenate(values: list[Any]) -> Any:
        return gather(values, lambda tensors: torch.cat(tensors, 1))

    outputs = None
    if batch[0].outputs is not None:
        outputs = concatenate([prediction.outputs for prediction in batch])
    members = concatenate([prediction.members for prediction in batch])
    return Prediction(members, batch[0].task, outputs)


# DataLoader can then collate predictions, and torch.load accepts them with weights_only=True.
default_collate_fn_map[Prediction] = collate_predictions
torch.serialization.add_safe_globals([Prediction])
