"""What both estimators are: a table, a reference network, an embedded ensemble, a run.

``fit`` deals out rows (:mod:`~embens.estimators.choices`), learns about the columns
(:mod:`~embens.estimators.preprocessing`), builds the reference network
(:mod:`~embens.estimators.network`), embeds the members, asks for their diagnosis, trains with
:func:`embens.fit` and calibrates on what was held out. The two estimators say what a target is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import embens
from embens.ensemble import EmbeddedEnsemble
from embens.estimators import choices, files, fitting, network, onnx, plots, settings, storage
from embens.estimators.heads import Classes, Gaussians
from embens.estimators.inputs import read_table, read_weights
from embens.estimators.preprocessing import Preprocessing
from embens.training import History

try:
    from sklearn.base import BaseEstimator
except ModuleNotFoundError as error:  # pragma: no cover
    raise ModuleNotFoundError(
        f"{error}: embens.estimators needs scikit-learn. pip install 'embens[estimators]'"
    ) from None

if TYPE_CHECKING:
    import numpy as np
    import pandas

BLOCK = 65_536
"""Rows that are predicted at a time."""


class TableEnsemble(BaseEstimator):
    """An embedded ensemble on a table; see the two estimators."""

    ensemble_: EmbeddedEnsemble
    preprocessing_: Preprocessing
    run_: History
    diagnosis_: Any
    gamma_: float
    p_: float
    width_: int
    dropout_: float
    held_out_: dict[str, Any] | None

    def __init__(
        self,
        family: str = "batch_ensemble",
        members: Any = "auto",
        p: Any = "auto",
        law: Any = None,
        *,
        width: Any = "auto",
        depth: int = 2,
        dropout: Any = "auto",
        numerical_embedding: str = "piecewise",
        scaling: str = "quantile",
        bins: int = 32,
        categorical_features: Any = "auto",
        max_categories: int = 256,
        gamma: Any = "auto",
        lr: Any = "auto",
        modulation_lr: Any = "auto",
        weight_decay: float = 3e-4,
        batch_size: Any = "auto",
        max_epochs: Any = "auto",
        patience: int = 10,
        validation_fraction: Any = "auto",
        calibrate: bool = True,
        warm_start: bool = False,
        random_state: Any = None,
        n_jobs: int | None = None,
        verbose: int = 0,
    ):
        self.family = family
        self.members = members
        self.p = p
        self.law = law
        self.width = width
        self.depth = depth
        self.dropout = dropout
        self.numerical_embedding = numerical_embedding
        self.scaling = scaling
        self.bins = bins
        self.categorical_features = categorical_features
        self.max_categories = max_categories
        self.gamma = gamma
        self.lr = lr
        self.modulation_lr = modulation_lr
        self.weight_decay = weight_decay
        self.batch_size = batch_size
        self.max_epochs = max_epochs
        self.patience = patience
        self.validation_fraction = validation_fraction
        self.calibrate = calibrate
        self.warm_start = warm_start
        self.random_state = random_state
        self.n_jobs = n_jobs
        self.verbose = verbose

    # What the two estimators define

    def _learn_target(self, y: Any) -> Tensor:
        """Learn what there is to know of the target; return it as numbers ``(row, target)``."""
        raise NotImplementedError

    def _learn_classes(self, classes: list[Any], *, single: bool) -> None:
        """Learn what there is to know of a target that is read in parts."""
        raise NotImplementedError

    def _target_values(self, y: np.ndarray) -> Tensor:
        """Return a part of a target, ``(row, target)``, as numbers."""
        raise NotImplementedError

    def _scale_target(self, values: Tensor, weights: Tensor | None) -> None:
        """Learn the scale of the training part's target."""

    def _make_head(self, weighted: bool) -> Classes | Gaussians:
        raise NotImplementedError

    def _to_target(self, values: Tensor) -> Tensor:
        """Return values as the network is to see them."""
        return values

    def _calibrate(
        self,
        stop: tuple[Tensor, Tensor],
        calibrate: tuple[Tensor, Tensor],
        weights: Tensor | None,
    ) -> None:
        """Calibrate by the outputs and values of the two held-out parts; weights of the first."""
        raise NotImplementedError

    def _forget_calibration(self) -> None:
        """Go back to before any calibration."""
        raise NotImplementedError

    _separate_calibration = False

    # Fitting

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Fit to a table.

        Args:
            X: an array, or a data frame of pandas, polars or pyarrow; NaN and None are missing.
            y: the target, or a table of targets.
            sample_weight: of the rows; those of weight 0 play no part.
        """
        from sklearn.utils import check_consistent_length

        settings.check(self.get_params(deep=False))
        again = self.warm_start and hasattr(self, "ensemble_")
        if y is None:
            raise ValueError(
                f"{type(self).__name__} requires y to be passed, but the target y is None"
            )
        table = read_table(self, X, reset=not again)
        check_consistent_length(X, y)
        weights = read_weights(sample_weight, table.rows)
        values = self._learn_target(y)
        if weights is not None:
            rows = weights.nonzero().squeeze(1)
            table, values, weights = table.take(rows.numpy()), values[rows], weights[rows]
        with fitting.threads(self.n_jobs):
            fitting.train(self, table, values, weights, again)
        return self

    def fit_files(self, source: Any, target: Any, *, weight: str | None = None) -> Any:
        """Fit to files that need not fit into memory; see :mod:`embens.estimators.files`.

        Args:
            source: a Parquet, Arrow or CSV file, a list of them, or a dataset of pyarrow.
            target: the name of the target's column, or several names.
            weight: the name of a column of weights.
        """
        settings.check(self.get_params(deep=False))
        with fitting.threads(self.n_jobs):
            files.fit_files(self, source, target, weight)
        return self

    def _groups(self, values: Tensor) -> Tensor | None:
        return None

    def _sizes(self, rows: int) -> choices.Sizes:
        return choices.choose_sizes(
            rows, self.members, self.width, self.batch_size, self.max_epochs
        )

    def _reference(
        self, outputs: int, generator: torch.Generator | None = None
    ) -> network.TableNetwork:
        return network.build(
            self.preprocessing_,
            outputs,
            width=self.width_,
            depth=int(self.depth),
            dropout=self.dropout_,
            embedding=self.numerical_embedding,
            generator=generator,
        )

    # Predicting

    def _blocks(self, X: Any) -> Iterator[Tensor]:
        """Yield the members' outputs ``(member, row, output)`` of some rows after others."""
        from sklearn.utils.validation import check_is_fitted

        check_is_fitted(self, "ensemble_")
        table = read_table(self, X, reset=False)
        dtype = next(self.ensemble_.parameters()).dtype
        with fitting.threads(self.n_jobs):
            for start in range(0, table.rows, BLOCK):
                part = table.take(slice(start, start + BLOCK)) if table.rows > BLOCK else table
                yield self._run_members(self.preprocessing_.encode(part, dtype))

    def _run_members(self, inputs: tuple[Tensor, ...]) -> Tensor:
        prediction = embens.predict(
            self.ensemble_,
            inputs,
            task="regression",
            generator=torch.Generator().manual_seed(0),  # of fresh masks, the same every time
        )
        return prediction.members

    # Looking

    @property
    def history_(self) -> pandas.DataFrame:
        """The course of training, one row for each epoch."""
        return self._fitted("run_").to_pandas()

    @property
    def members_(self) -> pandas.DataFrame:
        """The members: their loss on the held-out part, and in the best epoch of training."""
        import pandas

        run = self._fitted("run_")
        epoch = run.best_epoch or len(run.epochs)
        frame = pandas.DataFrame([row for row in run.members if row["epoch"] == epoch])
        frame = frame.drop(columns="epoch").set_index("member")
        if self.held_out_ is not None:
            frame["held_out_loss"] = self.held_out_["members"]
        return frame

    @property
    def n_parameters_(self) -> int:
        """How many numbers were trained."""
        ensemble = self._fitted("ensemble_")
        return sum(p.numel() for p in ensemble.parameters() if p.requires_grad)

    def plot_history(self, ax: Any = None) -> Any:
        """Draw the course of training; see :mod:`embens.estimators.plots`."""
        return plots.plot_history(self, ax)

    def plot_reliability(self, X: Any, y: Any, ax: Any = None, *, bins: int = 10) -> Any:
        """Draw what happened against what was predicted."""
        return plots.plot_reliability(self, X, y, ax, bins=bins)

    def plot_members(self, ax: Any = None) -> Any:
        """Draw the members' losses beside the ensemble's."""
        return plots.plot_members(self, ax)

    # Keeping

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted estimator to one file, without pickle."""
        storage.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Any:
        """Read an estimator of this class that :meth:`save` wrote."""
        found = storage.load(path)
        if not isinstance(found, cls):
            raise ValueError(f"{path} holds a {type(found).__name__}, not a {cls.__name__}")
        return found

    def to_onnx(self, path: str | os.PathLike[str]) -> Path:
        """Write one ONNX file from raw columns to the prediction, checked with onnxruntime."""
        return onnx.to_onnx(self, path)

    def _fitted(self, name: str) -> Any:
        from sklearn.utils.validation import check_is_fitted

        check_is_fitted(self, name)
        return getattr(self, name)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.target_tags.required = True
        return tags
