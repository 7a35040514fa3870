"""Pictures of a fitted estimator; each draws on an axis and returns it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from embens.metrics import reliability

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes


def plot_history(estimator: Any, ax: Any = None) -> Axes:
    """Draw the losses against the epoch; a line marks the weights that were kept."""
    frame = estimator.history_.set_index("epoch")
    names = {"loss": "training, mean of members"}
    if "validation_loss" in frame:
        names |= {"validation_loss": "held out, mean of members", "metric": "held out, ensemble"}
    ax = frame[[*names]].rename(columns=names).plot(ax=ax, ylabel="loss")
    if estimator.run_.best_epoch:
        ax.axvline(estimator.run_.best_epoch, color="0.6", linestyle=":", label="kept")
    ax.legend()
    return ax


def plot_reliability(
    estimator: Any, X: Any, y: Any, ax: Axes | None = None, *, bins: int = 10
) -> Axes:
    """Draw what happened against what was predicted; the diagonal is calibrated.

    Of a classifier, accuracy against confidence; of a regressor, the share of targets below its
    quantiles against their levels.
    """
    import numpy as np
    from matplotlib import pyplot as plt
    from sklearn.base import is_classifier

    ax = plt.subplots()[1] if ax is None else ax
    if is_classifier(estimator):
        if isinstance(estimator.classes_, list):
            raise ValueError("plot_reliability draws one label; this classifier has several")
        chance = torch.from_numpy(estimator.predict_proba(X)).clamp(min=1e-30)
        target = estimator.head_.values([np.asarray(y)])[:, 0]
        found = reliability(chance.log()[None], target, bins=bins)
        full = found.samples > 0
        ax.plot(found.confidence[full], found.accuracy[full], marker="o")
        ax.set(xlabel="confidence", ylabel="accuracy")
    else:
        levels = np.linspace(0, 1, bins + 1)[1:-1]
        quantiles = estimator.predict_quantiles(X, levels)
        below = (np.asarray(y, dtype=float)[:, None] <= quantiles).mean(0)
        ax.plot(levels, below, marker="o")
        ax.set(xlabel="level of quantile", ylabel="share of targets below")
    ax.plot([0, 1], [0, 1], color="0.6", linestyle=":")
    return ax


def plot_members(estimator: Any, ax: Any = None) -> Axes:
    """Draw every member's loss on the held-out part, and the ensemble's as a line."""
    held = estimator.held_out_
    losses = estimator.members_["loss" if held is None else "held_out_loss"]
    words = {"xlabel": "member", "ylabel": "held-out loss"}
    ax = losses.plot(ax=ax, style="o", label="members", **words)
    ax.axhline(losses.mean(), color="0.6", linestyle=":", label="mean of members")
    if held is not None:
        ax.axhline(held["ensemble"], color="black", label="ensemble")
    ax.legend()
    return ax


def importances(
    estimator: Any, X: Any, y: Any, *, repeats: int, **options: Any
) -> pandas.DataFrame:
    """Return scikit-learn's permutation importances of columns, the largest first."""
    import narwhals.stable.v2 as nw
    import pandas
    from sklearn.inspection import permutation_importance

    frame = nw.from_native(X, eager_only=True, pass_through=True)
    X = frame.to_pandas() if isinstance(frame, nw.DataFrame) else X
    found: Any = permutation_importance(estimator, X, y, n_repeats=repeats, **options)
    columns = {"mean": found.importances_mean, "std": found.importances_std}
    table = pandas.DataFrame(columns, index=estimator.preprocessing_.names)
    return table.sort_values("mean", ascending=False)


def plot_importances(
    estimator: Any, X: Any, y: Any, ax: Any = None, *, most: int = 20, repeats: int = 5
) -> Axes:
    """Draw the importances of the columns that matter most."""
    table = estimator.importances(X, y, repeats=repeats)[:most][::-1]
    label = "fall of the score if shuffled"
    return table["mean"].plot.barh(xerr=table["std"], ax=ax, xlabel=label, color="0.6")
