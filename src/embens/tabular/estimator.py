"""Base class of the two estimators: fit, blockwise prediction and fitted attributes.

An estimator stores its arguments and, after ``fit``, what :mod:`embens.tabular.pipeline` returned.
Classifier and regressor differ in their head and in the predictions made from it.
"""

import inspect
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any, NamedTuple, Self

import numpy as np
import pandas
import torch
from joblib import effective_n_jobs
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_consistent_length, check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from embens import EmbeddedEnsemble
from embens.checks import closest, warn
from embens.tabular import pipeline, storage
from embens.tabular.columns import Preprocessing
from embens.tabular.defaults import HINTS, Arguments, Sizes, check_arguments, choose_sizes
from embens.tabular.display import Display
from embens.tabular.frames import read_table
from embens.tabular.groups import GroupedEnsemble, fit_groups
from embens.tabular.predictor import predict_members
from embens.tabular.preparation import prepare
from embens.tabular.targets import read_weights
from embens.training import History

RELIABLE_ROWS = 100  # calibration rows below which sets and intervals come with a warning
PREDICTION_ROWS = 512  # rows that are predicted at a time: hidden units stay in the cache


class Uncertainty(NamedTuple):
    """Uncertainty of each row and its two parts: total = aleatoric + epistemic.

    Attributes:
        total: ``(row,)``, or ``(row, target)`` for several targets.
        aleatoric: The part that more training rows would not reduce; same shape.
        epistemic: The disagreement of the members; same shape.

    Example:
        >>> uncertainty = Uncertainty(np.array([3.0]), np.array([2.0]), np.array([1.0]))
        >>> total, aleatoric, epistemic = uncertainty
        >>> total
        array([3.])
    """

    total: np.ndarray
    aleatoric: np.ndarray
    epistemic: np.ndarray


class TableEstimator(Display, Arguments, BaseEstimator):
    """Embedded ensemble for tables; base class of the two estimators."""

    fitted_: pipeline.Fitted

    def __new__(cls, *args: Any, **options: Any) -> Self:
        # The __init__ that the dataclass generates would raise without a suggestion.
        names = list(inspect.signature(cls.__init__).parameters)[1:]
        for name in options:
            if name not in names:
                hint = HINTS.get(name) or closest(name, names)
                raise TypeError(f"{cls.__name__} has no argument {name!r}{hint}")
        return super().__new__(cls)

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the ensemble to a table.

        Args:
            X: An array, or a data frame of pandas, polars or pyarrow. NaN and None are missing
                values.
            y: The target, ``(row,)``, or a table of targets.
            sample_weight: ``(row,)``; rows of weight 0 are ignored.

        Returns:
            The estimator.

        Example:
            >>> from sklearn.datasets import load_iris
            >>> from embens.tabular import EmbeddedEnsembleClassifier
            >>> X, y = load_iris(return_X_y=True)
            >>> model = EmbeddedEnsembleClassifier(members=2, max_epochs=2, tune=False)
            >>> model.fit(X, y).sizes_.members
            2
        """
        previous = None
        if self.warm_start:
            previous = getattr(self, "fitted_", None)
        if previous is not None and not isinstance(self.random_state, Integral):
            warn(
                "warm_start draws other held-out rows in each fit, so the ensemble was trained on "
                "some of them. Early stopping and calibration are then too optimistic. Pass an "
                "integer as random_state."
            )
        return self._fit(X, y, sample_weight, previous)

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Continue training with new rows only; the first call is a :meth:`fit`.

        The encoding of columns and target stays that of the first rows. Earlier rows can be
        forgotten, as in any network.

        Args:
            X: The new rows.
            y: Their targets.
            classes: All classes, in the first call of a classifier.
            sample_weight: Weights of the new rows.

        Returns:
            The estimator.

        Example:
            >>> from sklearn.datasets import load_iris
            >>> from embens.tabular import EmbeddedEnsembleClassifier
            >>> X, y = load_iris(return_X_y=True)
            >>> model = EmbeddedEnsembleClassifier(members=2, max_epochs=2, tune=False)
            >>> model = model.partial_fit(X[::2], y[::2], classes=[0, 1, 2])
            >>> model = model.partial_fit(X[1::2], y[1::2])
        """
        return self._fit(X, y, sample_weight, getattr(self, "fitted_", None), classes)

    def _fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any,
        previous: pipeline.Fitted | None,
        classes: Any = None,
    ) -> Self:
        start = time.monotonic()
        check_arguments(self)
        if y is None:
            name = type(self).__name__
            raise ValueError(f"{name} requires y to be passed, but the target y is None")
        table = read_table(self, X, reset=previous is None)
        check_consistent_length(X, y)
        target = self.head_class.read(y)
        weights = read_weights(sample_weight, table.rows)
        deadline = math.inf
        if self.time_limit is not None:
            deadline = start + self.time_limit
        random_state = check_random_state(self.random_state)
        with threads(self.n_jobs):
            prepared = prepare(
                table, target, weights, self, random_state, previous, classes, deadline
            )
            sizes = choose_sizes(len(prepared.train), self)
            if prepared.folds > 1:
                self.fitted_ = fit_groups(prepared, sizes, previous)
            else:
                self.fitted_ = pipeline.fit(prepared, sizes, deadline, previous)
        if previous is None:
            for note in prepared.preprocessing.notes:
                warn(note)
        for remark in self.fitted_.remarks:
            warn(remark, ConvergenceWarning)
        return self

    def _predict_blocks(
        self, X: Any, summarise: Callable[[Any, Tensor], Sequence[Tensor]], dim: int = 0
    ) -> list[Tensor]:
        """Apply ``summarise(head, outputs)`` to blocks of rows and concatenate the results.

        Args:
            X: The rows.
            summarise: Function of the head and the outputs ``(member, row, output)`` of a block
                that returns tensors.
            dim: The axis of the rows in these tensors.
        """
        fitted = self._get_fitted()
        table = read_table(self, X, reset=False)
        blocks = []
        numbers, codes = fitted.preprocessing.encode(table, fitted.dtype)
        with threads(self.n_jobs):
            for start in range(0, table.rows, PREDICTION_ROWS):
                block = slice(start, start + PREDICTION_ROWS)
                outputs = predict_members(
                    fitted.ensemble, fitted.encoder, numbers[block], codes[block]
                )
                blocks.append(summarise(fitted.head, outputs))
        return [torch.cat(parts, dim) for parts in zip(*blocks, strict=True)]

    def conformal_scores(self, coverage: float | None = None) -> Tensor:
        """Return the conformal scores of the calibration rows.

        Args:
            coverage: Coverage of the sets or intervals. With fewer than 100 rows a warning states
                how reliable it is; None for no warning.

        Returns:
            The scores ``(row, target)``.

        Raises:
            ValueError: If no rows were held out.

        Example:
            >>> from sklearn.datasets import load_iris
            >>> from embens.tabular import EmbeddedEnsembleClassifier
            >>> X, y = load_iris(return_X_y=True)
            >>> model = EmbeddedEnsembleClassifier(members=2, max_epochs=2, tune=False)
            >>> model.fit(X, y).conformal_scores().shape  # a fourth of 30 held-out rows
            torch.Size([7, 1])
        """
        scores = self.head_.scores
        if scores is None:
            raise ValueError(
                "Conformal sets and intervals need held-out rows, and this fit held out none: the "
                "table has fewer than 50 rows, or validation_fraction=0."
            )
        if coverage is not None and 0 < coverage < 1 and len(scores) < RELIABLE_ROWS:
            error = math.sqrt(coverage * (1 - coverage) / (len(scores) + 2))
            fix = "Fit with more rows."
            if isinstance(self.ensemble_, EmbeddedEnsemble):
                fix = "Fit with more rows, a larger validation_fraction, or folds=4."
            warn(
                f"Only {len(scores)} held-out rows calibrate this prediction. Its coverage is "
                f"{coverage:g} on average over calibration rows, with a standard deviation of "
                f"{error:.2f}. {fix}"
            )
        return scores

    def _get_fitted(self) -> pipeline.Fitted:
        check_is_fitted(self, "fitted_")
        return self.fitted_

    @property
    def ensemble_(self) -> EmbeddedEnsemble | GroupedEnsemble:
        """The trained :class:`embens.EmbeddedEnsemble`; with several folds a group of them."""
        return self._get_fitted().ensemble

    @property
    def sizes_(self) -> Sizes:
        """The values that were chosen for arguments that are "auto"."""
        return self._get_fitted().sizes

    @property
    def preprocessing_(self) -> Preprocessing:
        """The learned encoding of the columns; ``notes`` are remarks about them."""
        return self._get_fitted().preprocessing

    @property
    def head_(self) -> Any:
        """Representation of the target, temperature and conformal scores."""
        return self._get_fitted().head

    @property
    def run_(self) -> History:
        """The history of training, as returned by :func:`embens.fit`."""
        return self._get_fitted().run

    @property
    def held_out_(self) -> dict[str, Any] | None:
        """Losses on the validation rows of the "ensemble", the "members" and a "constant"."""
        return self._get_fitted().held_out

    @property
    def temperature_(self) -> Any:
        """Divisor of the logits, or factor of the predicted standard deviations."""
        return self._get_fitted().head.temperature

    @property
    def history_(self) -> pandas.DataFrame:
        """The history of training, one row for each epoch."""
        return self.run_.to_pandas()

    @property
    def members_(self) -> pandas.DataFrame:
        """Losses of each member in the best epoch of training and on the validation rows."""
        best_epoch = self.run_.best_epoch or len(self.run_.epochs)
        members = range(self.ensemble_.members)
        trained: Any = members
        if isinstance(self.ensemble_, EmbeddedEnsemble) and self.ensemble_.spec.chosen:
            trained = self.ensemble_.spec.chosen  # indices before members were selected
        row_of_member = {}
        for row in self.run_.members:
            if row["member"] in trained and row["epoch"] <= best_epoch:
                row_of_member[row["member"]] = row  # the last one is that of the best epoch
        rows = [row_of_member[member] for member in trained if member in row_of_member]
        frame = pandas.DataFrame(rows or None, members)
        frame = frame.rename_axis("member").drop(columns=["epoch", "member"], errors="ignore")
        if self.held_out_ is not None:
            frame["held_out_loss"] = self.held_out_["members"]
        return frame

    @property
    def n_parameters_(self) -> int:
        """Number of trained parameters."""
        return sum(p.numel() for p in self.ensemble_.parameters() if p.requires_grad)

    @property
    def feature_names_out_(self) -> np.ndarray:
        """Names of the encoded inputs of the network."""
        names = self.preprocessing_.input_names(self.numerical_embedding)
        return np.array(names, dtype=object)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted estimator to one file, without pickle.

        Args:
            path: The file. :func:`embens.tabular.load` reads it, and has an example.
        """
        storage.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read an estimator of this class that :meth:`save` wrote.

        Args:
            path: The file. Nothing in it is executed.

        Returns:
            The fitted estimator.

        Raises:
            embens.files.Refused: if the file is damaged or holds something else.
        """
        return storage.load(path, [cls])

    def to_onnx(self, path: str | os.PathLike[str]) -> None:
        """Write an ONNX file that maps raw numbers to predictions.

        The input is ``numbers``, float64 ``(row, column)`` with NaN for missing values; the
        metadata entry ``numeric`` has its column names, where ``when:month`` and the like are
        parts of dates. The outputs are ``probabilities`` of a classifier (``probabilities_0``, …
        of several labels), or ``predicted_mean`` and ``predicted_std`` of a regressor. The file is
        checked with onnxruntime.

        Args:
            path: The file.

        Raises:
            ValueError: If the table has categorical columns, or the target transform is
                "quantile".
        """
        storage.to_onnx(self, path)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.sparse = True
        tags.target_tags.required = True
        tags.target_tags.multi_output = True
        if tags.classifier_tags is not None:
            tags.classifier_tags.multi_label = True
        return tags


def load(path: str | os.PathLike[str]) -> TableEstimator:
    """Read an estimator that its method ``save`` wrote.

    Args:
        path: The file. Nothing in it is executed.

    Returns:
        The fitted estimator.

    Raises:
        embens.files.Refused: if the file is damaged or holds something else.

    Example:
        >>> import tempfile
        >>> from embens.tabular import EmbeddedEnsembleRegressor, load
        >>> model = EmbeddedEnsembleRegressor(members=2, max_epochs=1)
        >>> model = model.fit([[0.0], [1.0], [2.0]], [0.0, 1.0, 2.0])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save(f"{folder}/model.safetensors")
        ...     load(f"{folder}/model.safetensors").members
        2
    """
    return storage.load(path, TableEstimator.__subclasses__())


@contextmanager
def threads(n_jobs: int | None) -> Iterator[None]:
    """Set the number of torch threads within a block.

    Args:
        n_jobs: As in joblib: -1 for all processors, -2 for all but one; None changes nothing.
    """
    before = torch.get_num_threads()
    if n_jobs is not None:
        torch.set_num_threads(int(effective_n_jobs(n_jobs)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
