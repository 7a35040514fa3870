"""What a fitted estimator shows of itself: a summary, as text and HTML; a model card; pictures.

Every picture is drawn on an axis, which is returned.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import narwhals.stable.v2 as nw
import numpy as np
import pandas
import torch
from sklearn.base import is_classifier

from embens.files import write_atomically
from embens.metrics import reliability

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CARD = """# {kind}

{facts}

## Columns

{columns}

{notes}

## What its numbers mean

- Scores above are of held-out rows that training was stopped by: a little too good for new rows.
- {promise} The promise holds on average over rows that come from where these came from, not for
  each row, and not after the world has changed.
- Epistemic uncertainty is what members disagree about. It is small far from all rows, too: the
  members share most of their weights.
"""


class Showing:
    """The methods of an estimator by which it shows itself."""

    def _facts(self: Any) -> dict[str, str]:
        """Return what is worth knowing of a fitted estimator, by names."""
        fitted, known, head = self.fitted_, self.preprocessing_, self.head_
        run, held = fitted.run, fitted.held_out
        found = {
            "target": "classes",
            "columns": f"{len(set(known.numeric))} numeric, {len(known.categorical)} categorical",
            "members": f"{fitted.ensemble.members}, {self.family}",
            "network": f"{self.depth} layers of {fitted.sizes.width}",
            "parameters": f"{self.n_parameters_:,}",
            "dropout, weight decay": f"{fitted.sizes.dropout:g}, {fitted.sizes.weight_decay:g}",
            "training": f"{len(run.epochs)} epochs, ended by {run.stopped}; best {run.best_epoch}",
            "seconds": f"{sum(row['seconds'] for row in run.epochs):.1f}",
        }
        if not is_classifier(self):
            found["target"] = f"numbers, loss {head.loss!r}, transform {head.transform!r}"
        if held is not None:
            found[f"held-out {getattr(head, 'stopping', 'log loss')}"] = f"{held['ensemble']:.4g}"
            found["of its members"] = f"{sum(held['members']) / len(held['members']):.4g}"
        if head.scores is not None:
            found["conformal rows"] = str(len(head.scores))
        return found

    def summary(self: Any) -> str:
        """Return a few lines about the fitted estimator."""
        found = self._facts()
        width = max(map(len, found))
        lines = [f"{name:<{width}}  {value}" for name, value in found.items()]
        notes = [f"note: {note}" for note in self.preprocessing_.notes]
        return "\n".join([type(self).__name__, *lines, *notes])

    def model_card(self: Any, path: str | os.PathLike[str] | None = None) -> str:
        """Return a model card in Markdown; with a path, write it there."""
        known = self.preprocessing_
        promise = "predict_set and predict_interval need held-out rows, which this fit had none of."
        if self.head_.scores is not None:
            what = "set" if is_classifier(self) else "interval"
            promise = f"predict_{what} holds the truth with the chance that is asked for."
        text = CARD.format(
            kind=type(self).__name__,
            facts="\n".join(f"- {name}: {value}" for name, value in self._facts().items()),
            columns=", ".join(f"`{name}`" for name in known.names),
            notes="\n".join(f"- {note}" for note in known.notes),
            promise=promise,
        )
        if path is not None:
            write_atomically(path, text)
        return text

    def plot_history(self: Any, ax: Any = None) -> Axes:
        """Draw the losses against the epoch; a line marks the weights that were kept."""
        frame = self.history_.set_index("epoch")
        names = {"loss": "training, mean of members"}
        if "validation_loss" in frame:
            names |= {
                "validation_loss": "held out, mean of members",
                "metric": "held out, ensemble",
            }
        ax = frame[[*names]].rename(columns=names).plot(ax=ax, ylabel="loss")
        if self.run_.best_epoch:
            ax.axvline(self.run_.best_epoch, color="0.6", linestyle=":", label="kept")
        ax.legend()
        return ax

    def plot_reliability(
        self: Any, X: Any, y: Any, ax: Axes | None = None, *, bins: int = 10
    ) -> Axes:
        """Draw what happened against what was predicted; the diagonal is calibrated.

        Of a classifier, accuracy against confidence; of a regressor, the share of targets below its
        quantiles against their levels.
        """
        from matplotlib import pyplot as plt

        ax = plt.subplots()[1] if ax is None else ax
        if is_classifier(self):
            if isinstance(self.classes_, list):
                raise ValueError("plot_reliability draws one label; this classifier has several")
            chance = torch.from_numpy(self.predict_proba(X)).clamp(min=1e-30)
            target = self.head_.values(np.asarray(y))[:, 0]
            found = reliability(chance.log()[None], target, bins=bins)
            full = found.samples > 0
            ax.plot(found.confidence[full], found.accuracy[full], marker="o")
            ax.set(xlabel="confidence", ylabel="accuracy")
        else:
            levels = np.linspace(0, 1, bins + 1)[1:-1]
            quantiles = self.predict_quantiles(X, levels)
            below = (np.asarray(y, dtype=float)[:, None] <= quantiles).mean(0)
            ax.plot(levels, below, marker="o")
            ax.set(xlabel="level of quantile", ylabel="share of targets below")
        ax.plot([0, 1], [0, 1], color="0.6", linestyle=":")
        return ax

    def plot_members(self: Any, ax: Any = None) -> Axes:
        """Draw every member's loss on the held-out part, and the ensemble's as a line."""
        held = self.held_out_
        losses = self.members_["loss" if held is None else "held_out_loss"]
        words = {"xlabel": "member", "ylabel": "held-out loss"}
        ax = losses.plot(ax=ax, style="o", label="members", **words)
        ax.axhline(losses.mean(), color="0.6", linestyle=":", label="mean of members")
        if held is not None:
            ax.axhline(held["ensemble"], color="black", label="ensemble")
        ax.legend()
        return ax

    def importances(
        self: Any, X: Any, y: Any, *, repeats: int = 5, scoring: Any = None, random_state: Any = 0
    ) -> pandas.DataFrame:
        """Return by how much a score falls when a column is shuffled: mean and deviation.

        Of rows that were not fitted. The score is the log loss, or the CRPS, negative.
        """
        from sklearn.inspection import permutation_importance

        frame = nw.from_native(X, eager_only=True, pass_through=True)
        X = frame.to_pandas() if isinstance(frame, nw.DataFrame) else X
        options = {"scoring": scoring or self.scoring, "random_state": random_state}
        found: Any = permutation_importance(self, X, y, n_repeats=repeats, **options)
        columns = {"mean": found.importances_mean, "std": found.importances_std}
        table = pandas.DataFrame(columns, index=self.preprocessing_.names)
        return table.sort_values("mean", ascending=False)

    def plot_importances(
        self: Any, X: Any, y: Any, ax: Any = None, *, most: int = 20, repeats: int = 5
    ) -> Axes:
        """Draw the importances of the columns that matter most."""
        table = self.importances(X, y, repeats=repeats)[:most][::-1]
        label = "fall of the score if shuffled"
        return table["mean"].plot.barh(xerr=table["std"], ax=ax, xlabel=label, color="0.6")

    def _html_repr(self: Any) -> str:
        found = super()._html_repr()  # type: ignore[misc]
        if not hasattr(self, "fitted_"):
            return found
        return found + pandas.Series(self._facts()).to_frame().to_html(header=False)
