"""Summary, model card and pictures of a fitted estimator."""

from __future__ import annotations

import re

import matplotlib
import pytest
from tabular.problems import classifier, fitted, mixed_table


def test_the_summary_describes_the_fit():
    model, _, _ = fitted()
    text = model.summary()

    assert text.startswith("EmbeddedEnsembleClassifier\n")
    assert "4, batch_ensemble" in text
    assert f"{model.n_parameters_:,}" in text
    assert f"{model.held_out_['ensemble']:.4g}" in text
    assert "loss 'quantile', transform 'none'" in fitted("regressor")[0].summary()


def test_notebooks_show_the_summary_of_a_fitted_estimator():
    model, _, _ = fitted()
    html = model._repr_mimebundle_()["text/html"]
    assert re.search(r"<th>members</th>\s*<td>4, batch_ensemble</td>", html)
    assert "<th>members</th>" not in classifier()._repr_mimebundle_()["text/html"]


def test_the_model_card_names_columns_and_guarantees(tmp_path):
    model, _, _ = fitted("regressor")
    text = model.model_card(tmp_path / "card.md")
    assert (tmp_path / "card.md").read_text() == text
    assert "`size`, `time`, `colour`, `open`, `grade`" in text
    assert "predict_interval contains the truth" in text
    X, y = mixed_table(30)
    assert "and this fit had none" in classifier(max_epochs=1).fit(X, y > 0).model_card()


@pytest.mark.parametrize("kind", ["classifier", "regressor"])
def test_plots_use_the_axes_that_are_passed(kind):
    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    model, X, y = fitted(kind)
    figure, axes = plt.subplots(1, 3)
    assert model.plot_history(axes[0]) is axes[0]
    assert model.plot_reliability(X, y, axes[1]) is axes[1]
    assert model.plot_members(axes[2]) is axes[2]
    assert all(axis.lines for axis in axes)
    plt.close(figure)


def test_importances_find_the_columns_that_matter():
    model, X, y = fitted()
    table = model.importances(X, y, repeats=2)
    assert set(table.index[:2]) == {"size", "colour"}
    assert table["mean"].iloc[0] > 0.1
    ax = model.plot_importances(X, y, most=3, repeats=2)
    assert [t.get_text() for t in ax.get_yticklabels()][::-1] == list(table.index[:3])
