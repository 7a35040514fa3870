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
