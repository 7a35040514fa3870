"""Summary, model card and pictures of a fitted estimator."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import narwhals.stable.v2 as nw
import numpy as np
import pandas
import torch
from sklearn.base import is_classifier

from embens.files import write_atomically
from embens.markdown import code, escape
from embens.metrics import reliability

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CARD = """# {kind}

{facts}

## Columns

{columns}

{notes}

## How to read its predictions

- The held-out scores above are from rows that also stopped the training: they are slightly
  optimistic.
- {coverage}
- Epistemic uncertainty is the disagreement of the members. It can be small far from all training
  rows, because the members share most of their weights.
"""


COVERAGE = """{method} contains the truth with the requested probability. This holds on average
  over rows from the same distribution as the fitted ones, not for each row, and not after a
  distribution shift. With several folds it holds only approximately."""


class Display:
    """Methods by which an estimator shows what was fitted; a mixin of the estimators."""

    def _facts(self: Any) -> dict[str, str]:
        """Return the facts of the summary by name."""
        fitted = self._get_fitted()
        run, head, held_out = fitted.run, fitted.head, fitted.held_out
        numeric = len({column.position for column in fitted.preprocessing.numeric})
        categorical = len(fitted.preprocessing.categorical)
        seconds = sum(row["seconds"] for row in run.epochs)
        target = "classes"
        metric = "log loss"
        if not is_classifier(self):
            target = f"numbers, loss {head.loss!r}, transform {head.transform!r}"
            metric = head.stopping
        facts = {
            "target": target,
            "columns": f"{numeric} numeric, {categorical} categorical",
            "members": f"{fitted.ensemble.members}, {self.family}",
            "network": f"{self.depth} layers of {fitted.sizes.width}",
            "parameters": f"{self.n_parameters_:,}",
            "dropout, weight decay": f"{fitted.sizes.dropout:g}, {fitted.sizes.weight_decay:g}",
            "training": f"{len(run.epochs)} epochs, ended by {run.stopped}; best {run.best_epoch}",
            "seconds": f"{seconds:.1f}",
        }
        if held_out is not None:
            facts[f"held-out {metric}"] = f"{held_out['ensemble']:.4g}"
            if "all_members" in held_out:
                facts["all members before selection"] = f"{held_out['all_members']:.4g}"
            facts["mean of the members"] = f"{np.mean(held_out['members']):.4g}"
            facts[head.constant_name] = f"{held_out['constant']:.4g}"
        if head.scores is not None:
            facts["conformal rows"] = str(len(head.scores))
        return facts

    def _notes(self: Any) -> list[str]:
        """Return remarks about the columns and the fit."""
        fitted = self._get_fitted()
        return [*fitted.preprocessing.notes, *fitted.remarks]

    def summary(self: Any) -> str:
        """Return a few lines about the fitted estimator.

        Returns:
            The class, then one line for each fact and note.

        Example:
            >>> from sklearn.datasets import load_iris
            >>> from embens.tabular import EmbeddedEnsembleClassifier
            >>> X, y = load_iris(return_X_y=True)
            >>> model = EmbeddedEnsembleClassifier(members=2, max_epochs=2, tune=False)
            >>> model = model.fit(X, y)
            >>> print(model.summary().splitlines()[2])
            columns                4 numeric, 0 categorical
        """
        facts = self._facts()
        width = max(len(name) for name in facts)
        lines = [type(self).__name__]
        lines += [f"{name:<{width}}  {value}" for name, value in facts.items()]
        lines += [f"note: {note}" for note in self._notes()]
        return "\n".join(lines)

    def model_card(self: Any, path: str | os.PathLike[str] | None = None) -> str:
        """Return a model card in Markdown.

        Args:
            path: A file to write it to as well.

        Returns:
            The text of the card.

        Example:
            >>> from sklearn.datasets import load_iris
            >>> from embens.tabular import EmbeddedEnsembleClassifier
            >>> X, y = load_iris(return_X_y=True)
            >>> model = EmbeddedEnsembleClassifier(members=2, max_epochs=2, tune=False)
            >>> model = model.fit(X, y)
            >>> model.model_card().splitlines()[0]
            '# EmbeddedEnsembleClassifier'
        """
        coverage = "predict_set and predict_interval need held-out rows, and this fit had none."
        if self.head_.scores is not None:
            method = "predict_set" if is_classifier(self) else "predict_interval"
            coverage = COVERAGE.format(method=method)
        text = CARD.format(
            kind=type(self).__name__,
            facts="\n".join(
                f"- {escape(name)}: {escape(value)}" for name, value in self._facts().items()
            ),
            columns=", ".join(code(name) for name in self.preprocessing_.names),
            notes="\n".join(f"- {escape(note)}" for note in self._notes()),
            coverage=coverage,
        )
        if path is not None:
            write_atomically(path, text)
        return text

    def plot_history(self: Any, ax: Any = None) -> Axes:
        """Plot the losses against the epoch; a vertical line marks the weights that were kept.

        Args:
            ax: The axes to draw on; None for new ones.

        Returns:
            The axes.

        Example:
            >>> from sklearn.datasets import load_iris
            >>> from embens.tabular import EmbeddedEnsembleClassifier
            >>> X, y = load_iris(return_X_y=True)
            >>> model = EmbeddedEnsembleClassifier(members=2, max_epochs=2, tune=False)
            >>> model = model.fit(X, y)
            >>> model.plot_history().get_ylabel()
            'loss'
        """
        # Not every epoch is validated.
        frame = self.history_.set_index("epoch").interpolate(limit_area="inside")
        names = {"loss": "training, mean of members"}
        if "validation_loss" in frame:
            names["validation_loss"] = "validation, mean of members"
            names["metric"] = "validation, ensemble"
        ax = frame[list(names)].rename(columns=names).plot(ax=ax, ylabel="loss")
        if self.run_.best_epoch:
            ax.axvline(self.run_.best_epoch, color="0.6", linestyle=":", label="kept")
        ax.legend()
        return ax

    def plot_reliability(
        self: Any, X: Any, y: Any, ax: Axes | None = None, *, bins: int = 10
    ) -> Axes:
        """Plot observed against predicted frequencies; the diagonal is perfectly calibrated.

        For a classifier, accuracy against confidence. For a regressor, the fraction of targets
        below a quantile against its level.

        Args:
            X: Rows that were not fitted.
            y: Their targets.
            ax: The axes to draw on; None for new ones.
            bins: Number of bins or quantiles.

        Returns:
            The axes.

        Example:
            >>> from sklearn.datasets import load_iris
            >>> from embens.tabular import EmbeddedEnsembleClassifier
            >>> X, y = load_iris(return_X_y=True)
            >>> model = EmbeddedEnsembleClassifier(members=2, max_epochs=2, tune=False)
            >>> model = model.fit(X, y)
            >>> model.plot_reliability(X, y).get_ylabel()
            'accuracy'
        """
        from matplotlib import pyplot

        if ax is None:
            _, ax = pyplot.subplots()
        if is_classifier(self):
            if isinstance(self.classes_, list):
                raise ValueError(
                    f"plot_reliability needs one label, got {len(self.classes_)} labels."
                )
            log_probabilities = torch.from_numpy(self.predict_proba(X)).clamp(min=1e-30).log()
            target = self.head_.values(np.asarray(y))[:, 0]
            diagram = reliability(log_probabilities[None], target, bins=bins)
            is_filled = diagram.samples > 0
            ax.plot(diagram.confidence[is_filled], diagram.accuracy[is_filled], marker="o")
            ax.set(xlabel="confidence", ylabel="accuracy")
        else:
            levels = np.linspace(0, 1, bins + 1)[1:-1]
            quantiles = self.predict_quantiles(X, levels)
            below = (np.asarray(y, dtype=float)[:, None] <= quantiles).mean(0)
            ax.plot(levels, below, marker="o")
            ax.set(xlabel="level of quantile", ylabel="fraction of targets below")
        ax.plot([0, 1], [0, 1], color="0.6", linestyle=":")
        return ax

    def plot_members(self: Any, ax: Any = None) -> Axes:
        """Plot the held-out loss of each member, with a line for the ensemble.

        Args:
            ax: The axes to draw on; None for new ones.

        Returns:
            The axes.

        Example:
            >>> from sklearn.datasets import load_iris
            >>> from embens.tabular import EmbeddedEnsembleClassifier
            >>> X, y = load_iris(return_X_y=True)
            >>> model = EmbeddedEnsembleClassifier(members=2, max_epochs=2, tune=False)
            >>> model = model.fit(X, y)
            >>> model.plot_members().get_xlabel()
            'member'
        """
        column = "loss"
        if self.held_out_ is not None:
            column = "held_out_loss"
        losses = self.members_[column]
        ax = losses.plot(ax=ax, style="o", label="members", xlabel="member", ylabel="held-out loss")
        ax.axhline(losses.mean(), color="0.6", linestyle=":", label="mean of members")
        if self.held_out_ is not None:
            ax.axhline(self.held_out_["ensemble"], color="black", label="ensemble")
        ax.legend()
        return ax

    def importances(
        self: Any, X: Any, y: Any, *, repeats: int = 5, scoring: Any = None, random_state: Any = 0
    ) -> pandas.DataFrame:
        """Return the permutation importance of each column, largest first.

        Args:
            X: Rows that were not fitted.
            y: Their targets.
            repeats: Permutations of each column.
            scoring: As in scikit-learn; None for the negative log loss, or the negative CRPS.
            random_state: Seed of the permutations.

        Returns:
            A frame with ``mean`` and ``std`` of the decrease of the score, indexed by column name.

        Example:
            >>> from sklearn.datasets import load_iris
            >>> from embens.tabular import EmbeddedEnsembleClassifier
            >>> X, y = load_iris(return_X_y=True)
            >>> model = EmbeddedEnsembleClassifier(members=2, max_epochs=2, tune=False)
            >>> model = model.fit(X, y)
            >>> model.importances(X, y, repeats=2).shape
            (4, 2)
        """
        from sklearn.inspection import permutation_importance

        frame = nw.from_native(X, eager_only=True, pass_through=True)
        if isinstance(frame, nw.DataFrame):
            X = frame.to_pandas()
        importance: Any = permutation_importance(
            self,
            X,
            y,
            n_repeats=repeats,
            scoring=scoring or self.scoring,
            random_state=random_state,
        )
        table = pandas.DataFrame(
            {"mean": importance.importances_mean, "std": importance.importances_std},
            index=self.preprocessing_.names,
        )
        return table.sort_values("mean", ascending=False)

    def plot_importances(
        self: Any, X: Any, y: Any, ax: Any = None, *, most: int = 20, repeats: int = 5
    ) -> Axes:
        """Plot the largest permutation importances.

        Args:
            X: Rows that were not fitted.
            y: Their targets.
            ax: The axes to draw on; None for new ones.
            most: Number of columns to show.
            repeats: Permutations of each column, as in :meth:`importances`.

        Returns:
            The axes.

        Example:
            >>> from sklearn.datasets import load_iris
            >>> from embens.tabular import EmbeddedEnsembleClassifier
            >>> X, y = load_iris(return_X_y=True)
            >>> model = EmbeddedEnsembleClassifier(members=2, max_epochs=2, tune=False)
            >>> model = model.fit(X, y)
            >>> len(model.plot_importances(X, y, repeats=2).patches)
            4
        """
        table = self.importances(X, y, repeats=repeats)[:most][::-1]
        return table["mean"].plot.barh(
            xerr=table["std"], ax=ax, xlabel="decrease of the score if permuted", color="0.6"
        )

    def _repr_mimebundle_(self: Any, **kwargs: Any) -> dict[str, str]:
        """Add the facts of the summary to scikit-learn's HTML in notebooks."""
        bundle = super()._repr_mimebundle_(**kwargs)  # type: ignore[misc]
        if "text/html" in bundle and hasattr(self, "fitted_"):
            bundle["text/html"] += pandas.Series(self._facts()).to_frame().to_html(header=False)
        return bundle
