"""Small tables, and estimators that are fitted to them quickly."""

from __future__ import annotations

import functools

import numpy as np
import pandas as pd

from embens.estimators import EmbeddedEnsembleClassifier, EmbeddedEnsembleRegressor

SMALL = {"members": 4, "width": 32, "max_epochs": 15, "tune": False, "lr": 0.01}
SMALL |= {"random_state": 0}


def classifier(*arguments, **changes):
    return EmbeddedEnsembleClassifier(*arguments, **{**SMALL, **changes})


def regressor(*arguments, **changes):
    return EmbeddedEnsembleRegressor(*arguments, **{**SMALL, **changes})


def mixed_table(rows=240, seed=0):
    """Numbers, one of them large and one with gaps, text with gaps, truth values, categories."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "size": rng.normal(size=rows),
            "time": 1.6e9 + rng.integers(0, 1000, rows),
            "colour": rng.choice(["red", "green", "blue"], rows),
            "open": rng.choice([True, False], rows),
            "grade": pd.Categorical(rng.choice(list("abcd"), rows)),
        }
    )
    target = frame["size"] + (frame["colour"] == "red") + 0.1 * rng.normal(size=rows)
    frame.loc[::7, "size"] = np.nan
    frame.loc[::11, "colour"] = None
    return frame, target.to_numpy()


def classes_of(target):
    return np.array(["low", "mid", "high"])[np.digitize(target, [0.0, 0.8])]


@functools.cache
def fitted(kind="classifier", family="batch_ensemble"):
    """A fitted estimator and its table; not to be changed by a test."""
    X, target = mixed_table(400)
    if kind == "classifier":
        y = classes_of(target)
        return classifier(family, max_epochs=30).fit(X[:300], y[:300]), X[300:], y[300:]
    return regressor(family, max_epochs=30).fit(X[:300], target[:300]), X[300:], target[300:]


def write_table(folder):
    """Write a table with several targets to a Parquet file of many row groups."""
    frame, target = mixed_table(6000)
    frame["target"], frame["kind"], frame["double"] = target, classes_of(target), 2 * target
    frame.to_parquet(folder / "table.parquet", row_group_size=700)
    return folder / "table.parquet"
