"""What both estimators are: scikit-learn's side of the pipeline.

An estimator holds its arguments and, once it is fitted, what :mod:`embens.estimators.pipeline`
returned; its attributes look that up. The two estimators differ by their heads, and by the
predictions that these give.
"""

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import pandas
import pyarrow as pa
import torch
from joblib import effective_n_jobs
from sklearn.base import BaseEstimator
from sklearn.utils import check_consistent_length, check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from embens.ensemble import EmbeddedEnsemble
from embens.estimators import choices, files, pipeline, storage, tables
from embens.estimators.preprocessing import Preprocessing
from embens.estimators.showing import Showing
from embens.training import History


class Uncertainty(NamedTuple):
    """What is not known of each row, and its two parts: total = aleatoric + epistemic."""

    total: np.ndarray
    aleatoric: np.ndarray
    epistemic: np.ndarray


def looked_up(path: str, doc: str) -> Any:
    """Return an attribute of an estimator that is a part of what was fitted."""

    def look_up(estimator: Any) -> Any:
        check_is_fitted(estimator, "fitted_")
        return attrgetter(path)(estimator.fitted_)

    return property(look_up, doc=doc)


class TableEnsemble(Showing, choices.Options, BaseEstimator):
    """An embedded ensemble on a table; see the two estimators."""

    scoring: ClassVar[Any]
    fitted_: pipeline.Fitted

    ensemble_: EmbeddedEnsemble = looked_up("ensemble", "The :class:`embens.EmbeddedEnsemble`.")
    sizes_: choices.Sizes = looked_up("sizes", "What every 'auto' has become.")
    preprocessing_: Preprocessing = looked_up("preprocessing", "What was learnt about the columns.")
    run_: History = looked_up("run", "The course of training, as :func:`embens.fit` returns it.")
    head_: Any = looked_up("head", "What is known of the target, and how outputs are read.")
    held_out_: dict[str, Any] | None = looked_up(
        "held_out", "Losses on held-out rows: ``ensemble``, ``members``."
    )

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit to a table.

        Args:
            X: an array, or a data frame of pandas, polars or pyarrow; NaN and None are missing.
            y: the target, or a table of targets.
            sample_weight: of the rows; those of weight 0 play no part.
        """
        previous = self.fitted_ if self.warm_start and hasattr(self, "fitted_") else None
        return self._fit(X, y, sample_weight, previous)

    def _fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any,
        previous: pipeline.Fitted | None,
        known: Any = None,
        folder: str | None = None,
        began: float | None = None,
    ) -> Self:
        began = time.monotonic() if began is None else began
        choices.check(self)
        if y is None:
            name = type(self).__name__
            raise ValueError(f"{name} requires y to be passed, but the target y is None")
        table = tables.read_table(self, X, reset=previous is None)
        check_consistent_length(X, y)
        weights = tables.read_weights(sample_weight, table.rows)
        target = self.head.read(y)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        deadline = began + float(self.time_limit or math.inf)
        table.folder = folder
        with threads(self.n_jobs):
            order = (self, seed, deadline, previous, known)
            rows = pipeline.prepare(table, target, weights, *order)
            self.fitted_ = pipeline.fit(rows, previous)
        return self

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Go on with new rows alone, from the weights as they are; the first call is a :meth:`fit`.

        What is known of columns and target stays as the first rows had it; what these taught may
        fade, as in any network. ``classes`` of a classifier's first call are all there will be.
        """
        return self._fit(X, y, sample_weight, getattr(self, "fitted_", None), classes)

    def fit_files(self, source: Any, target: Any, *, ignore: Sequence[str] = ()) -> Self:
        """Fit to files that need not fit into memory; see :mod:`embens.estimators.files`.

        Args:
            source: a Parquet, Arrow or CSV file, a list of them, or a dataset of pyarrow.
            target: the name of the target's column, or several names.
            ignore: names of columns to leave out.
        """
        choices.check(self)
        began, targets = time.monotonic(), [target] if isinstance(target, str) else list(target)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            dataset = files.open_dataset(source)
            columns = files.features(dataset.schema.names, [*targets, *ignore])
            rows = source
            if not isinstance(source, pa.Table):
                rows = files.gather(files.read(dataset, columns=[*columns, *targets]), folder)
            y = pandas.DataFrame({name: files.to_numpy(rows.column(name)) for name in targets})
            y = y[target] if isinstance(target, str) else y
            return self._fit(rows.select(columns), y, None, None, None, folder, began)

    def _read(
        self, X: Any, summary: Callable[[Any, Tensor], Sequence[Tensor]], dim: int = 0
    ) -> list[Tensor]:
        """Return what ``summary(head, outputs)`` makes of a block of rows after another.

        Outputs are ``(member, row, output)``; what is made of them is joined along ``dim``.
        """
        check_is_fitted(self, "fitted_")
        fitted, table, found = self.fitted_, tables.read_table(self, X, reset=False), []
        with threads(self.n_jobs):
            for start in range(0, table.rows, pipeline.BLOCK):
                part = table.take(slice(start, start + pipeline.BLOCK))
                inputs = fitted.preprocessing.encode(part, fitted.dtype)
                found.append(summary(fitted.head, pipeline.run_members(fitted.ensemble, inputs)))
        return [torch.cat(parts, dim) for parts in zip(*found, strict=True)]

    def conformal_scores(self) -> Tensor:
        """Return the conformal scores of the calibration rows, ``(row, target)``."""
        if self.head_.scores is None:
            raise ValueError(
                "sets and intervals need rows that were held out, and this fit held out none: the "
                "table has less than 50 rows, or validation_fraction=0"
            )
        return self.head_.scores

    @property
    def history_(self) -> pandas.DataFrame:
        """The course of training, one row for each epoch."""
        return self.run_.to_pandas()

    @property
    def members_(self) -> pandas.DataFrame:
        """The members: their loss on the held-out part, and in the best epoch of training."""
        best, count = self.run_.best_epoch or len(self.run_.epochs), self.ensemble_.members
        rows = [row for row in self.run_.members if row["epoch"] == best][:count]
        frame = pandas.DataFrame(rows or None, range(count)).rename_axis("member")
        if self.held_out_ is not None:
            frame["held_out_loss"] = self.held_out_["members"]
        return frame.drop(columns=["epoch", "member"], errors="ignore")

    @property
    def n_parameters_(self) -> int:
        """How many numbers were trained."""
        return sum(p.numel() for p in self.ensemble_.parameters() if p.requires_grad)

    @property
    def feature_names_out_(self) -> np.ndarray:
        """The names of the network's inputs: what the columns have become."""
        return np.array(self.preprocessing_.inputs(self.numerical_embedding), dtype=object)

    save = storage.save
    to_onnx = storage.to_onnx

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read an estimator of this class that :meth:`save` wrote."""
        return storage.load(path, cls)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.sparse = True
        tags.target_tags.required = True
        tags.target_tags.multi_output = True
        return tags


def load(path: str | os.PathLike[str]) -> TableEnsemble:
    """Read an estimator that its method ``save`` wrote."""
    return storage.load(path, *TableEnsemble.__subclasses__())


@contextmanager
def threads(n_jobs: int | None) -> Iterator[None]:
    """Run with so many threads; None: as torch is set; -1: all, -2: all but one, …."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if n_jobs is None else int(effective_n_jobs(n_jobs)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
