"""Pictures of fitted estimators."""

from __future__ import annotations

import matplotlib
import pytest
from estimators.problems import fitted


@pytest.mark.parametrize("kind", ["classifier", "regressor"])
def test_pictures_are_drawn_on_the_axis_that_is_given(kind):
    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    model, X, y = fitted(kind)
    figure, axes = plt.subplots(1, 3)
    assert model.plot_history(axes[0]) is axes[0]
    assert model.plot_reliability(X, y, axes[1]) is axes[1]
    assert model.plot_members(axes[2]) is axes[2]
    assert all(axis.lines for axis in axes)
    plt.close(figure)


def test_importances_find_the_columns_that_matter_and_are_drawn(tmp_path):
    model, X, y = fitted()
    table = model.importances(X, y, repeats=2)
    assert set(table.index[:2]) == {"size", "colour"}
    assert table["mean"].iloc[0] > 0.1
    ax = model.plot_importances(X, y, most=3, repeats=2)
    assert [t.get_text() for t in ax.get_yticklabels()][::-1] == list(table.index[:3])
