"""Small tables, and estimators that fit them quickly."""

from __future__ import annotations

import functools

import numpy as np
import pandas as pd

from embens.tabular import EmbeddedEnsembleClassifier, EmbeddedEnsembleRegressor

SMALL = {
    "members": 4,
    "width": 32,
    "max_epochs": 15,
    "tune": False,
    "lr": 0.01,
    "random_state": 0,
}


def classifier(*arguments, **changes):
    return EmbeddedEnsembleClassifier(*arguments, **{**SMALL, **changes})


def regressor(*arguments, **changes):
    return EmbeddedEnsembleRegressor(*arguments, **{**SMALL, **changes})


def mixed_table(rows=240, seed=0):
    """Return a frame with numeric, text, boolean and categorical columns and missing values."""
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
    """Return a fitted estimator, test rows and their targets; tests must not change them."""
    X, target = mixed_table(400)
    if kind == "classifier":
        y = classes_of(target)
        model = classifier(family, max_epochs=30)
    else:
        y = target
        model = regressor(family, max_epochs=30)
    return model.fit(X[:300], y[:300]), X[300:], y[300:]
