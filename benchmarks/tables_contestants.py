"""The contestants of the benchmark on tables, each by the recipe of its authors.

`CONTESTANTS[name](part, seed)` fits to the rows of a `Part` and returns a `Model`, whose `predict`
maps a frame to probabilities or to a `Forecast` of a number. All contestants get the same rows and
the same held-out rows among them; our estimators and the forest choose held-out rows themselves.

A method that predicts only the mean gets a distribution whose shape does not depend on the row: its
forecast plus its errors on the held-out rows (of the forest: out of bag). Its interval is the
conformal one of these errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd


@dataclass
class Part:
    """Rows to fit, a mask of those to hold out, and the target."""

    X: pd.DataFrame
    y: np.ndarray
    held: np.ndarray  # True for rows that are held out

    @property
    def classes(self) -> np.ndarray | None:
        return np.unique(self.y) if self.y.dtype.kind == "O" else None

    def codes(self) -> np.ndarray:
        """Return the target as numbers: the codes of classes, or the numbers themselves."""
        classes = self.classes
        if classes is None:
            return self.y
        return np.searchsorted(classes.astype(str), self.y.astype(str))


class Forecast(NamedTuple):
    """Mean, interval and CRPS of a number, `(row,)` each; the CRPS is a function of the truth."""

    mean: np.ndarray
    low: np.ndarray  # of the interval that holds 90 %
    high: np.ndarray
    crps: Callable[[np.ndarray], np.ndarray]


@dataclass
class Model:
    """A fitted contestant: its prediction for a frame and its number of parameters."""

    predict: Callable[[pd.DataFrame], Any]
    parameters: int | None = None
    members: Callable[[pd.DataFrame], Any] | None = None  # predictions of the members, if any


# Distributions


def by_errors(mean: np.ndarray, errors: np.ndarray, keep: int = 500) -> Forecast:
    """Return forecasts plus errors that do not depend on the row."""
    size = np.sort(np.abs(errors))
    place = min(math.ceil(0.9 * (len(size) + 1)), len(size)) - 1
    width = size[place]
    if len(errors) > keep:
        errors = np.quantile(errors, (np.arange(keep) + 0.5) / keep)
    return Forecast(mean, mean - width, mean + width, lambda y: crps_of_sample(y - mean, errors))


def crps_of_sample(values: np.ndarray, sample: np.ndarray) -> np.ndarray:
    r"""Return :math:`E|S - y| - \frac12 E|S - S'|` of each value y for S drawn from a sample."""
    sample = np.sort(sample)
    n, total = len(sample), np.concatenate([[0.0], np.cumsum(sample)])
    below = np.searchsorted(sample, values)
    first = (values * (2 * below - n) + total[-1] - 2 * total[below]) / n
    spread = 2 * (sample * (2 * np.arange(n) - n + 1)).sum() / n**2
    return first - spread / 2


def crps_of_normal(values, mean, std) -> np.ndarray:
    from scipy.stats import norm

    z = (values - mean) / std
    return std * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / math.sqrt(math.pi))


# Columns


class Columns:
    """Encode text as the categories of the fitted rows and dates as parts; keep numbers."""

    def __init__(self, X: pd.DataFrame, impute: bool = False, most: int | None = None):
        self.dates = [c for c in X if X[c].dtype.kind == "M"]
        self.text = [c for c in X if c not in self.dates and X[c].dtype.kind not in "fiub"]
        self.levels = {c: X[c].value_counts().index[: most or None] for c in self.text}
        self.impute, self.median = impute, {}
        numbers = self(X, learn=True).drop(columns=self.text)
        self.missing = [c for c in numbers if numbers[c].isna().any()]
        self.median = numbers.median().fillna(0.0)

    def __call__(self, X: pd.DataFrame, learn: bool = False) -> pd.DataFrame:
        found = {}
        for c in X:
            if c in self.dates:
                when = X[c].dt
                for part in ("year", "month", "day", "day_of_week", "hour"):
                    found[f"{c}.{part}"] = getattr(when, part).astype("float64")
                found[c] = (X[c] - pd.Timestamp(2000, 1, 1)).dt.total_seconds()
            elif c in self.text:
                found[c] = pd.Categorical(X[c].where(X[c].isin(self.levels[c])), self.levels[c])
            else:
                found[c] = X[c].astype("float64")
        frame = pd.DataFrame(found, index=X.index)
        if not self.impute or learn:
            return frame
        marks = {f"{c} is missing": frame[c].isna().astype("float64") for c in self.missing}
        frame = frame.fillna(self.median.to_dict()).assign(**marks)
        for c in self.text:  # missing text is a separate category
            frame[c] = frame[c].astype(object).where(frame[c].notna(), "(missing)")
        return frame

    def codes(self, X: pd.DataFrame) -> pd.DataFrame:
        """Return categories as numbers, NaN where they are unknown."""
        frame = self(X)
        codes = {c: frame[c].cat.codes.astype("float64").replace(-1, np.nan) for c in self.text}
        return frame.assign(**codes)


def finish(part: Part, model: Any, columns: Callable, parameters: int | None = None) -> Model:
    """Wrap a model with scikit-learn's methods that was fitted without the held-out rows."""
    if part.classes is not None:
        return Model(lambda X: np.asarray(model.predict_proba(columns(X))), parameters)
    held = part.X[part.held]
    errors = part.y[part.held] - np.asarray(model.predict(columns(held))).ravel()
    return Model(
        lambda X: by_errors(np.asarray(model.predict(columns(X))).ravel(), errors), parameters
    )


# Ours


def embens(part: Part, seed: int, **options: Any) -> Model:
    from embens.tabular import (
        EmbeddedEnsembleClassifier,
        EmbeddedEnsembleRegressor,
        neg_crps,
    )

    if part.classes is not None:
        model = EmbeddedEnsembleClassifier(random_state=seed, **options).fit(part.X, part.y)
        return Model(model.predict_proba, model.n_parameters_, model.predict_members)
    model = EmbeddedEnsembleRegressor(random_state=seed, **options).fit(part.X, part.y)

    def predict(X: pd.DataFrame) -> Forecast:
        low, high = model.predict_interval(X, 0.9).T
        return Forecast(model.predict(X), low, high, lambda y: np.array([-neg_crps(model, X, y)]))

    return Model(predict, model.n_parameters_, model.predict_members)


def embens_split(part: Part, seed: int) -> Model:
    """Ours with `folds=1`: one split instead of cross-fitting."""
    return embens(part, seed, folds=1)


def embens_tuned(part: Part, seed: int) -> Model:
    """Ours with `folds=1, tune=True`: one split and a search of hyperparameters."""
    return embens(part, seed, folds=1, tune=True)


def separate(part: Part, seed: int) -> Model:
    """A separate network for each member, with our inputs, training and calibration."""
    return embens(part, seed, family="independent")


# Networks of others


def _pytabkit(part: Part, seed: int, kind: str, classes: dict, **options: Any) -> Model:
    import pytabkit

    columns = Columns(part.X, impute=True)
    name = f"{kind}_{'Regressor' if part.classes is None else 'Classifier'}"
    options |= {} if part.classes is None else {"val_metric_name": "cross_entropy", **classes}
    model = getattr(pytabkit, name)(device="cpu", random_state=seed, n_threads=1, **options)
    X, y, fit = columns(part.X), part.codes(), ~part.held
    model.fit(X[fit], y[fit], X[part.held], y[part.held], cat_col_names=columns.text)
    return finish(part, model, columns, _count(model))


def _count(model: Any) -> int | None:
    """Count the parameters of the largest network inside an object."""
    import torch

    seen, todo, counts = set(), [model], []
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, (str, bytes, np.ndarray, torch.Tensor, type)):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.nn.Module):
            counts.append(sum(p.numel() for p in thing.parameters()))
        elif isinstance(thing, dict):
            todo += thing.values()
        elif isinstance(thing, (list, tuple)):
            todo += thing[:100]
        elif type(thing).__module__.startswith(("pytabkit", "tabm", "lightning", "pytorch")):
            todo += getattr(thing, "__dict__", {}).values()
    return max(counts, default=None)


def tabm(part: Part, seed: int) -> Model:
    """TabM by its authors' example, with piecewise-linear embeddings; pytabkit's loop runs it."""
    return _pytabkit(
        part,
        seed,
        "TabM_D",
        {},
        num_emb_type="pwl",
        weight_decay=3e-4,
        gradient_clipping_norm=1.0,
    )


def realmlp(part: Part, seed: int) -> Model:
    """RealMLP with its tuned defaults, and pytabkit's advice for the log loss."""
    return _pytabkit(part, seed, "RealMLP_TD", {"use_ls": False})


# Trees


def _patience(rows: int) -> int:
    """Return the patience of boosting in rounds by AutoGluon's rule: 300, on large tables 20."""
    return int(min(max(1.5e6 / rows, 20), 300))


def lightgbm(part: Part, seed: int) -> Model:
    import lightgbm as lgb

    columns, fit = Columns(part.X), ~part.held
    X, y = columns(part.X), part.codes()
    kind = lgb.LGBMRegressor if part.classes is None else lgb.LGBMClassifier
    model = kind(n_estimators=10_000, learning_rate=0.05, n_jobs=1, random_state=seed, verbosity=-1)
    stop = lgb.early_stopping(_patience(fit.sum()), verbose=False)
    model.fit(X[fit], y[fit], eval_X=X[part.held], eval_y=y[part.held], callbacks=[stop])
    return finish(part, model, columns)


def xgboost(part: Part, seed: int) -> Model:
    import xgboost as xgb

    columns, fit = Columns(part.X), ~part.held
    X, y = columns(part.X), part.codes()
    model = (xgb.XGBRegressor if part.classes is None else xgb.XGBClassifier)(
        n_estimators=10_000,
        learning_rate=0.1,
        n_jobs=1,
        random_state=seed,
        enable_categorical=True,
        tree_method="hist",
        early_stopping_rounds=_patience(fit.sum()),
        **({} if part.classes is None else {"eval_metric": _log_loss(part, "logloss", "mlogloss")}),
    )
    model.fit(X[fit], y[fit], eval_set=[(X[part.held], y[part.held])], verbose=False)
    return finish(part, model, columns)


def _log_loss(part: Part, two: str, many: str) -> str:
    return two if part.classes is not None and len(part.classes) == 2 else many


def catboost(part: Part, seed: int, stop: bool = True) -> Model:
    """CatBoost with its default 1,000 rounds and learning rate, and early stopping."""
    import catboost as cat

    known, fit = Columns(part.X), ~part.held

    def columns(X):
        frame = known(X)
        text = {c: frame[c].astype(object).where(frame[c].notna(), "(missing)") for c in known.text}
        return frame.assign(**text)

    X, y = columns(part.X), part.codes()
    model = (cat.CatBoostRegressor if part.classes is None else cat.CatBoostClassifier)(
        thread_count=1,
        random_seed=seed,
        cat_features=known.text,
        allow_writing_files=False,
        verbose=False,
    )
    validation = (X[part.held], y[part.held])
    if stop:
        patience = _patience(fit.sum())
        model.fit(X[fit], y[fit], eval_set=validation, early_stopping_rounds=patience)
        return finish(part, model, columns)
    if part.classes is None:
        # The held-out rows give the distribution of errors, and then belong to the training rows.
        model.fit(X[fit], y[fit])
        errors = validation[1] - model.predict(validation[0])
        model = model.copy()
        model.fit(X, y)
        return Model(lambda X: by_errors(model.predict(columns(X)), errors))
    model.fit(X, y)
    return finish(part, model, columns)


def catboost_all_rows(part: Part, seed: int) -> Model:
    """CatBoost with all of its 1,000 rounds on all rows, without early stopping."""
    return catboost(part, seed, stop=False)


def hist_gradient_boosting(part: Part, seed: int) -> Model:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    columns, fit = Columns(part.X, most=254), ~part.held
    X, y = columns(part.X), part.codes()
    kind = HistGradientBoostingRegressor if part.classes is None else HistGradientBoostingClassifier
    model = kind(
        max_iter=10_000,
        early_stopping=True,
        n_iter_no_change=20,
        categorical_features="from_dtype",
        random_state=seed,
    )
    model.fit(X[fit], y[fit], X_val=X[part.held], y_val=y[part.held])
    return finish(part, model, columns)


def random_forest(part: Part, seed: int) -> Model:
    """A forest of 300 trees on all rows, as AutoGluon's; its errors are those out of bag."""
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

    columns = Columns(part.X)
    kind = RandomForestRegressor if part.classes is None else RandomForestClassifier
    model = kind(n_estimators=300, oob_score=part.classes is None, random_state=seed)
    model.fit(columns.codes(part.X), part.codes())
    if part.classes is not None:
        return finish(part, model, columns.codes)
    errors = part.y - model.oob_prediction_
    return Model(lambda X: by_errors(model.predict(columns.codes(X)), errors))


CONTESTANTS: dict[str, Callable[[Part, int], Model]] = {
    "embens": embens,
    "embens_split": embens_split,
    "embens_tuned": embens_tuned,
    "separate": separate,
    "tabm": tabm,
    "realmlp": realmlp,
    "lightgbm": lightgbm,
    "xgboost": xgboost,
    "catboost": catboost,
    "catboost_all_rows": catboost_all_rows,
    "hist_gradient_boosting": hist_gradient_boosting,
    "random_forest": random_forest,
}
OURS = ("embens", "embens_split", "embens_tuned", "separate")
PRELOAD = [
    *("torch", "torch._dynamo", "sklearn.ensemble"),
    *("lightgbm", "xgboost", "catboost", "pytabkit"),
]
"""What contestants import, for the process that others are forked from. The first step of an
optimizer imports `torch._dynamo`."""
