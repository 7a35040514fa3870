r"""The classifier.

With members' probabilities :math:`p_a`, ``predict_proba`` is their mean :math:`\bar p`, and its
entropy is what members agree to be unsure about plus what they disagree about:
:math:`H(\bar p) = \frac1M\sum_a H(p_a) + I`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from embens.estimators.base import TableEnsemble
from embens.estimators.calibration import best_scale
from embens.estimators.heads import Classes
from embens.estimators.inputs import read_target

try:
    from sklearn.base import ClassifierMixin
except ModuleNotFoundError:  # pragma: no cover - said by embens.estimators.base
    raise

if TYPE_CHECKING:
    import numpy as np


class Uncertainty(NamedTuple):
    """What is not known of each row, and its two parts: total = aleatoric + epistemic."""

    total: np.ndarray
    aleatoric: np.ndarray
    epistemic: np.ndarray


class EmbeddedEnsembleClassifier(ClassifierMixin, TableEnsemble):
    """Embedded ensemble of perceptrons for the classes of a table's rows.

    Args:
        family: "batch_ensemble", "last_layer_dropout", "mc_dropout" or "independent".
        members: how many; "auto": 16, or less where the diagnosis finds less room, at least 8.
        p: of ``batch_ensemble``: from 0, independent members, to 1, equal ones; "auto": 0.25, or
            0.5 where the diagnosis finds no room for all members at 0.25.
        law: of the masks of the dropout families; None: theirs.
        width: of the hidden layers; "auto": 64 to 256 by the number of rows.
        depth: how many hidden layers.
        dropout: rate of ordinary dropout behind hidden layers; "auto": 0.1, none on tiny tables.
        numerical_embedding: "piecewise" (linear bins), "periodic" or "none".
        scaling: "quantile" or "standard", of numeric columns.
        bins: of a numeric column, at most.
        categorical_features: "auto": by the columns' types; or names, numbers or a mask.
        max_categories: that are kept of a column; the others are one, "rare".
        gamma: gradient scale of the shared parameters; "auto": by the diagnosis.
        lr: rate of AdamW; "auto": 0.002.
        modulation_lr: rate of the individual parameters; "auto": as ``lr``.
        weight_decay: of the shared parameters.
        batch_size: rows in a step; "auto": 64 to 1024 by the number of rows.
        max_epochs: at most; "auto": 200.
        patience: epochs without a better held-out score before the run ends.
        validation_fraction: of rows to hold out; "auto": a fifth, at most 10,000, none of tables
            of less than 50 rows. 0: nothing.
        calibrate: choose a temperature on the held-out rows.
        warm_start: a second ``fit`` goes on from the weights of the first.
        random_state: a number makes everything deterministic.
        n_jobs: threads; None: as torch is set.
        verbose: 1 shows progress.

    Attributes:
        classes_: the classes, or a list of them for several labels.
        ensemble_: the :class:`embens.EmbeddedEnsemble`.
        preprocessing_: what was learnt about the columns; its ``notes`` say what to know of them.
        diagnosis_: the library's own diagnosis of the ensemble before training; ``p_`` and
            ``gamma_`` are what was made of it.
        history_: the course of training as a data frame; ``members_``: of the members.
        temperature_: what logits are divided by.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> model = EmbeddedEnsembleClassifier(members=4, random_state=0).fit(X, y)
        >>> model.score(X, y) > 0.9
        True
    """

    def _learn_target(self, y: Any) -> Tensor:
        import numpy as np
        from sklearn.utils import column_or_1d
        from sklearn.utils.multiclass import check_classification_targets

        y = read_target(y)
        if y.dtype.kind == "f" and not np.isfinite(y).all():
            raise ValueError("Input y contains infinity.")
        if y.ndim == 2 and y.shape[1] == 1:
            y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        columns = [y] if y.ndim == 1 else list(y.T)
        if self.warm_start and hasattr(self, "ensemble_"):
            return self._target_values(np.stack(columns, 1))
        found = [np.unique(column, return_inverse=True) for column in columns]
        classes = [values for values, _ in found]
        self.classes_ = classes[0] if y.ndim == 1 else classes
        self.multilabel_ = y.ndim == 2 and all(set(c.tolist()) <= {0, 1} for c in classes)
        if self.multilabel_:
            self.classes_ = classes = [np.array([0, 1], dtype=y.dtype) for _ in classes]
            return torch.from_numpy(y.astype("int64"))
        return torch.from_numpy(np.stack([codes for _, codes in found], 1).astype("int64"))

    def _learn_classes(self, classes: list[Any], *, single: bool) -> None:
        self.classes_ = classes[0] if single else classes
        self.multilabel_ = not single and all(set(c.tolist()) <= {0, 1} for c in classes)

    def _target_values(self, y: np.ndarray) -> Tensor:
        import numpy as np

        return torch.from_numpy(np.stack(list(map(_codes, y.T, self._labels)), 1))

    @property
    def _labels(self) -> list[np.ndarray]:
        return self.classes_ if isinstance(self.classes_, list) else [self.classes_]

    def _groups(self, values: Tensor) -> Tensor | None:
        return values[:, 0] if values.shape[1] == 1 else None

    def _make_head(self, weighted: bool) -> Classes:
        return Classes(tuple(len(classes) for classes in self._labels), weighted)

    def _calibrate(
        self,
        stop: tuple[Tensor, Tensor],
        calibrate: tuple[Tensor, Tensor],
        weights: Tensor | None,
    ) -> None:
        if self.calibrate:
            outputs, head = stop[0].double(), self._make_head(weights is not None)
            target = head.pack(stop[1], weights, outputs.dtype)
            rows = outputs.shape[1]

            def loss(t: float) -> Tensor:
                return rows * head.metric(outputs / t, target) + head.any_class(outputs / t)

            self.temperature_ = best_scale(loss)

    def _forget_calibration(self) -> None:
        self.temperature_ = 1.0

    def _probabilities(self, X: Any) -> list[list[Tensor]]:
        """Return the members' probabilities by label and block, ``(member, row, class)``."""
        sizes = self._make_head(False).sizes if hasattr(self, "classes_") else ()
        found: list[list[Tensor]] = [[] for _ in sizes]
        for outputs in self._blocks(X):
            parts = (outputs.double() / self.temperature_).split(sizes, dim=-1)
            for label, logits in zip(found, parts, strict=True):
                label.append(logits.softmax(-1))
        return found

    def predict_proba(self, X: Any) -> Any:
        """Return the mean probabilities ``(row, class)``.

        Several labels of 0 and 1: the chance of 1, ``(row, label)``; other labels: a list.
        """
        labels = [torch.cat([p.mean(0) for p in blocks]) for blocks in self._probabilities(X)]
        if not isinstance(self.classes_, list):
            return labels[0].numpy()
        if self.multilabel_:
            return torch.stack([p[:, 1] for p in labels], 1).numpy()
        return [p.numpy() for p in labels]

    def predict_log_proba(self, X: Any) -> Any:
        """Return the logarithms of :meth:`predict_proba`."""
        import numpy as np

        found = self.predict_proba(X)
        with np.errstate(divide="ignore"):
            return [np.log(p) for p in found] if isinstance(found, list) else np.log(found)

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable classes."""
        import numpy as np

        found = self.predict_proba(X)
        if not isinstance(self.classes_, list):
            return self.classes_[found.argmax(1)]
        if self.multilabel_:
            return (found > 0.5).astype(self.classes_[0].dtype)
        return np.stack([c[p.argmax(1)] for c, p in zip(self.classes_, found, strict=True)], 1)

    def predict_members(self, X: Any) -> Any:
        """Return members' probabilities ``(member, row, class)``; of several labels a list."""
        labels = [torch.cat(blocks, 1).numpy() for blocks in self._probabilities(X)]
        return labels if isinstance(self.classes_, list) else labels[0]

    def predict_uncertainty(self, X: Any) -> Uncertainty:
        """Return the entropy of the prediction, in nats, and its two parts.

        Aleatoric is the members' mean entropy, epistemic the rest: what they disagree about. Of
        several labels ``(row, label)``.
        """
        totals, parts = [], []
        for blocks in self._probabilities(X):
            totals.append(torch.cat([_entropy(p.mean(0)) for p in blocks]))
            parts.append(torch.cat([_entropy(p).mean(0) for p in blocks]))
        total, aleatoric = torch.stack(totals, 1), torch.stack(parts, 1)
        if not isinstance(self.classes_, list):
            total, aleatoric = total[:, 0], aleatoric[:, 0]
        epistemic = (total - aleatoric).clamp(min=0)
        return Uncertainty(total.numpy(), (total - epistemic).numpy(), epistemic.numpy())

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        tags.target_tags.multi_output = True
        return tags


def _entropy(p: Tensor) -> Tensor:
    return torch.special.entr(p).sum(-1)


def _codes(column: np.ndarray, classes: np.ndarray) -> np.ndarray:
    import numpy as np

    unknown = sorted(set(np.unique(column).tolist()) - set(classes.tolist()), key=str)
    if unknown:
        raise ValueError(
            f"y has classes that the first fit did not: {unknown[:5]}. A warm start can't add "
            "classes; fit anew with warm_start=False."
        )
    return np.searchsorted(classes, column)
