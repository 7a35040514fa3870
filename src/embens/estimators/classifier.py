"""The classifier: the mean of its members' probabilities; equations: :mod:`embens.metrics`."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from torch import Tensor

from embens.estimators.base import TableEnsemble, Uncertainty, looked_up
from embens.estimators.heads import Classes
from embens.uncertainty import conformal_quantile


@dataclass(eq=False, repr=False)
class EmbeddedEnsembleClassifier(ClassifierMixin, TableEnsemble):
    """Embedded ensemble of perceptrons for the classes of a table's rows.

    What a fit has found is in attributes that end with ``_``; ``preprocessing_.notes`` are what to
    know of the columns.

    Args:
        family: "batch_ensemble", "last_layer_dropout", "mc_dropout" or "independent".
        members: how many; "auto": 16.
        p: of ``batch_ensemble``: from 0, independent members, to 1, equal ones; "auto": 0.
        law: of the modulations or masks; None: signs of mean p, or the dropout family's own.
        sites: where members of a ``batch_ensemble`` differ: behind the "first" layer, at all
            "hidden" sites, or at "all", inputs and outputs too; "auto": "first" for classes,
            "hidden" for numbers.
        own: whether they have an output layer of their own.
        width: of the hidden layers; "auto": 64 to 256 by the number of rows.
        depth: how many hidden layers.
        dropout: rate of ordinary dropout behind hidden layers; "auto": by the race of ``tune``,
            or 0.1; none on tiny tables.
        numerical_embedding: "piecewise" (linear bins), "periodic", "both" or "none".
        scaling: "quantile" or "standard", of numeric columns.
        bins: of a numeric column, at most; "auto": 32 to 128 by the number of rows.
        binning: edges by "quantile" of the column, or by a "tree" that knows the target.
        categorical_features: "auto": by the columns' types; or names, numbers or a mask.
        max_categories: that are kept of a column; the others are one, "rare".
        lr: highest rate of AdamW; "auto": 0.002, or 0.004 from 5,000 rows on.
        weight_decay: of the shared parameters; "auto": by the race of ``tune``, or 0.0003.
        batch_size: rows in a step; "auto": 64 to 1024 by the number of rows.
        max_epochs: at most; "auto": 24 to 100, for about 1,800 steps.
        patience: epochs without a better held-out score before the run ends; "auto": a quarter
            of the epochs, at least 8.
        validation_fraction: of rows to hold out; "auto": a fifth, at most 10,000, none of tables
            of less than 50 rows. 0: nothing.
        tune: run a short race for what is "auto" of dropout and weight decay.
        time_limit: seconds for a whole fit; None: as long as it takes.
        refit: train once more with the held-out rows, but those for conformal scores.
        select: so many members to keep, chosen on held-out rows one by one; None: all.
        calibrate: choose a temperature on the held-out rows.
        warm_start: a second ``fit`` goes on from the weights of the first.
        random_state: a number makes everything deterministic.
        n_jobs: threads; None: as torch is set.
        verbose: 1 shows progress.
        class_weight: as of scikit-learn's classifiers: factors of the rows' weights by class, a
            dictionary (of several labels a list of them); "balanced": inverse to the numbers of
            rows; None: 1.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> model = EmbeddedEnsembleClassifier(members=4, random_state=0).fit(X, y)
        >>> model.score(X, y) > 0.9
        True
    """

    _: KW_ONLY
    class_weight: Any = None
    head = Classes
    scoring = "neg_log_loss"

    classes_ = looked_up("head.classes", "The classes, or a list of them for several labels.")
    temperature_ = looked_up("head.temperature", "What logits are divided by.")

    def predict_proba(self, X: Any) -> Any:
        """Return the mean probabilities ``(row, class)``.

        Several labels of 0 and 1: the chance of 1, ``(row, label)``; other labels: a list.
        """
        labels = [p.numpy() for p in self._read(X, Classes.summarise)]
        if self.head_.single:
            return labels[0]
        return np.stack([p[:, 1] for p in labels], 1) if self.head_.multilabel else labels

    def predict_log_proba(self, X: Any) -> Any:
        """Return the logarithms of :meth:`predict_proba`."""
        found = self.predict_proba(X)
        with np.errstate(divide="ignore"):
            return [np.log(p) for p in found] if isinstance(found, list) else np.log(found)

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable classes."""
        found = self._read(X, Classes.summarise)
        several = [self.classes_] if self.head_.single else self.classes_
        labels = [c[p.argmax(1).numpy()] for c, p in zip(several, found, strict=True)]
        return labels[0] if self.head_.single else np.stack(labels, 1)

    def predict_members(self, X: Any) -> Any:
        """Return members' probabilities ``(member, row, class)``; of several labels a list."""
        labels = [p.numpy() for p in self._read(X, Classes.probabilities, 1)]
        return labels[0] if self.head_.single else labels

    def predict_set(self, X: Any, coverage: float = 0.9) -> Any:
        """Return conformal sets of classes, ``(row, class)``, True where a class is in the set.

        They hold the class of a new row with a chance of at least ``coverage``, on average over
        rows, if rows are alike those that were fitted, however good the model; a row that is like
        no other may have none. Of several labels a list, each with its own guarantee.
        """
        pairs = zip(self._read(X, Classes.summarise), self.conformal_scores().T, strict=True)
        sets = [(p >= -conformal_quantile(mine, coverage)).numpy() for p, mine in pairs]
        return sets[0] if self.head_.single else sets

    def predict_uncertainty(self, X: Any) -> Uncertainty:
        """Return the entropy of the prediction, in nats, and its two parts.

        Aleatoric is the members' mean entropy, epistemic the rest: what they disagree about. Of
        several labels ``(row, label)``.
        """

        def entropies(head: Classes, outputs: Tensor) -> tuple[Tensor, Tensor]:
            labels = head.probabilities(outputs)
            total = [torch.special.entr(p.mean(0)).sum(-1) for p in labels]
            members = [torch.special.entr(p).sum(-1).mean(0) for p in labels]
            return torch.stack(total, 1), torch.stack(members, 1)

        total, aleatoric = self._read(X, entropies)
        if self.head_.single:
            total, aleatoric = total[:, 0], aleatoric[:, 0]
        epistemic = (total - aleatoric).clamp(min=0)
        return Uncertainty(total.numpy(), (total - epistemic).numpy(), epistemic.numpy())

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags
