"""Classifier: the mean of the members' probabilities."""

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from torch import Tensor

from embens.conformal import conformal_quantile
from embens.tabular.estimator import TableEstimator, Uncertainty
from embens.tabular.targets import ClassHead


@dataclass(eq=False, repr=False)
class EmbeddedEnsembleClassifier(ClassifierMixin, TableEstimator):
    """Embedded ensemble of perceptrons for classification of tables.

    Results of a fit are attributes that end with ``_``. ``preprocessing_.notes`` has remarks about
    the columns.

    Args:
        family: "batch_ensemble", "last_layer_dropout", "mc_dropout" or "independent".
        members: Number of members; "auto" is 16.
        p: Mean of the signs of ``batch_ensemble``, from 0 (independent members) to 1 (equal
            ones); "auto" is 0.
        law: Distribution of the modulations or masks; None is ``laws.Signs(p)`` for
            ``batch_ensemble`` and the default of the other families.
        sites: Where members of a ``batch_ensemble`` differ: after the "first" layer, at all
            "hidden" sites, or at "all" sites including input and output; "auto" is "first" for
            classification and "hidden" for regression.
        own: Whether each member has its own output layer.
        width: Width of the hidden layers; "auto" is 64 below 500 rows, else 256.
        depth: Number of hidden layers.
        dropout: Dropout rate after hidden layers; "auto" is 0.1, or 0 for tables with fewer than
            50 rows, or chosen with ``tune=True``.
        numerical_embedding: "piecewise" (linear bins), "periodic", "both" or "none".
        bins: Maximal number of bins of a numeric column; "auto" is 32 to 128 by the number of
            rows.
        categorical_features: "auto" (by column type), or column names, positions or a mask.
        max_categories: Maximal number of categories of a column; all others are "rare".
        max_columns: Maximal number of numeric columns to use, those that explain the target best;
            "auto" is 32 for tables with more than 256 numeric columns, fewer than four rows for
            each, and a target that few columns explain better than all; else all columns.
        lr: Maximal learning rate of AdamW; "auto" is 0.002, or 0.004 from 5,000 rows on.
        weight_decay: Weight decay of the shared parameters; "auto" is 0.0003, or chosen with
            ``tune=True``.
        batch_size: Number of rows in a training step; "auto" is 64 to 1024 by the number of rows.
        max_epochs: Maximal number of epochs; "auto" is 24 to 100, for about 1,800 steps.
        patience: Epochs without improvement on validation rows before training stops; "auto" is
            a quarter of the epochs, at least 8.
        validation_fraction: Fraction of rows to hold out with ``folds=1``; "auto" is a fifth, at
            most 10,000, and nothing for tables with fewer than 50 rows.
        tune: Whether short runs choose dropout and weight decay, where these are "auto". The fit
            takes two to three times as long.
        time_limit: Seconds for the whole fit; None for no limit.
        refit: Whether to train again with the validation rows included.
        keep_members: Number of members to keep after training, for faster predictions: those that
            predict the validation rows best together; "all" keeps all. ``held_out_`` has the loss
            of "all_members" as well.
        folds: 1 holds out a part of the rows. A larger number cross-fits: the members form as many
            groups, each with another held-out fold, so that all rows train and calibrate. It
            must divide the number of members. "auto" is 4, or 1 where groups are impossible:
            fewer than 50 rows, a wide table whose columns are selected (``max_columns``), members
            that do not form four groups of two or more, or a value for ``validation_fraction``,
            ``time_limit``, ``refit`` or ``keep_members``.
        calibrate: Whether to fit a temperature on the validation rows.
        warm_start: Whether another ``fit`` continues from the current weights.
        random_state: An integer makes the fit deterministic.
        n_jobs: Number of threads; None for the setting of torch.
        verbose: 1 shows progress.
        class_weight: Weights of the classes as in scikit-learn: a dictionary, a list of
            dictionaries for several labels, "balanced", or None.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> model = EmbeddedEnsembleClassifier(members=4, random_state=0).fit(X, y)
        >>> model.score(X, y) > 0.9
        True
    """

    _: KW_ONLY
    class_weight: Any = None
    head_class: ClassVar[Any] = ClassHead
    scoring: ClassVar[str] = "neg_log_loss"

    @property
    def classes_(self) -> Any:
        """The classes, or a list of classes for several labels."""
        return self.head_.classes

    def predict_proba(self, X: Any) -> Any:
        """Return the probabilities.

        Args:
            X: The rows.

        Returns:
            ``(row, class)``. For several labels of 0 and 1, the probability of 1 ``(row, label)``;
            for several other labels, a list with one array for each label.

        Example:
            >>> from sklearn.datasets import load_iris
            >>> X, y = load_iris(return_X_y=True)
            >>> model = EmbeddedEnsembleClassifier(members=2, max_epochs=2, tune=False)
            >>> model = model.fit(X, y)
            >>> model.predict_proba(X).shape
            (150, 3)
        """
        labels = [label.numpy() for label in self._predict_blocks(X, ClassHead.summarise)]
        if self.head_.single:
            return labels[0]
        if self.head_.is_multilabel:
            return np.stack([label[:, 1] for label in labels], 1)
        return labels

    def predict_log_proba(self, X: Any) -> Any:
        """Return the logarithms of the probabilities.

        Args:
            X: The rows.

        Returns:
            As :meth:`predict_proba`; minus infinity where a probability is 0.

        Example:
            >>> from sklearn.datasets import load_iris
            >>> X, y = load_iris(return_X_y=True)
            >>> model = EmbeddedEnsembleClassifier(members=2, max_epochs=2, tune=False)
            >>> model = model.fit(X, y)
            >>> bool((model.predict_log_proba(X) <= 0).all())
            True
        """
        probabilities = self.predict_proba(X)
        with np.errstate(divide="ignore"):
            if isinstance(probabilities, list):
                return [np.log(label) for label in probabilities]
            return np.log(probabilities)

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable classes.

        Args:
            X: The rows.

        Returns:
            ``(row,)``, or ``(row, label)`` for several labels.

        Example:
            >>> from sklearn.datasets import load_iris
            >>> X, y = load_iris(return_X_y=True)
            >>> model = EmbeddedEnsembleClassifier(members=2, max_epochs=2, tune=False)
            >>> model = model.fit(X, y)
            >>> model.predict(X).shape
            (150,)
        """
        probabilities = self._predict_blocks(X, ClassHead.summarise)
        columns = []
        for classes, label in zip(self.head_.labels, probabilities, strict=True):
            columns.append(classes[label.argmax(1).numpy()])
        if self.head_.single:
            return columns[0]
        return np.stack(columns, 1)

    def predict_members(self, X: Any) -> Any:
        """Return the probabilities of each member.

        Args:
            X: The rows.

        Returns:
            ``(member, row, class)``; a list with one array for each label for several labels.

        Example:
            >>> from sklearn.datasets import load_iris
            >>> X, y = load_iris(return_X_y=True)
            >>> model = EmbeddedEnsembleClassifier(members=2, max_epochs=2, tune=False)
            >>> model = model.fit(X, y)
            >>> model.predict_members(X).shape
            (2, 150, 3)
        """
        labels = [label.numpy() for label in self._predict_blocks(X, ClassHead.probabilities, 1)]
        if self.head_.single:
            return labels[0]
        return labels

    def predict_set(self, X: Any, coverage: float = 0.9) -> Any:
        """Return conformal prediction sets.

        A set contains the class of a new row with probability at least ``coverage``, on average
        over rows that are exchangeable with the fitted ones, for any model. With several folds
        this holds only approximately, because each score comes from one group of members and not
        from the whole ensemble. A set can be empty.

        Args:
            X: The rows.
            coverage: The probability, between 0 and 1.

        Returns:
            Boolean ``(row, class)``; for several labels a list, each with a separate guarantee.

        Example:
            >>> from sklearn.datasets import load_iris
            >>> X, y = load_iris(return_X_y=True)
            >>> model = EmbeddedEnsembleClassifier(
            ...     members=2, max_epochs=2, tune=False, validation_fraction=0.5
            ... )
            >>> model = model.fit(X, y)
            >>> model.predict_set(X, coverage=0.8).shape  # warns: 19 rows calibrate these sets
            (150, 3)
        """
        probabilities = self._predict_blocks(X, ClassHead.summarise)
        sets = []
        for label, scores in zip(probabilities, self.conformal_scores(coverage).T, strict=True):
            threshold = -conformal_quantile(scores, coverage)
            sets.append((label >= threshold).numpy())
        if self.head_.single:
            return sets[0]
        return sets

    def predict_uncertainty(self, X: Any) -> Uncertainty:
        """Return the entropy of the prediction in nats and its two parts.

        Aleatoric is the mean entropy of the members. Epistemic is the rest, their disagreement.

        Args:
            X: The rows.

        Returns:
            Three arrays ``(row,)``, or ``(row, label)`` for several labels.

        Example:
            >>> from sklearn.datasets import load_iris
            >>> X, y = load_iris(return_X_y=True)
            >>> model = EmbeddedEnsembleClassifier(members=2, max_epochs=2, tune=False)
            >>> model = model.fit(X, y)
            >>> total, aleatoric, epistemic = model.predict_uncertainty(X)
            >>> total.shape
            (150,)
        """
        total, aleatoric = self._predict_blocks(X, _entropies)
        if self.head_.single:
            total, aleatoric = total[:, 0], aleatoric[:, 0]
        epistemic = (total - aleatoric).clamp(min=0)
        return Uncertainty(total.numpy(), (total - epistemic).numpy(), epistemic.numpy())


def _entropies(head: ClassHead, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entropy of the mean and the mean entropy of the members, ``(row, label)``."""
    totals = []
    member_means = []
    for probabilities in head.probabilities(outputs):
        totals.append(torch.special.entr(probabilities.mean(0)).sum(-1))
        member_means.append(torch.special.entr(probabilities).sum(-1).mean(0))
    return torch.stack(totals, 1), torch.stack(member_means, 1)
