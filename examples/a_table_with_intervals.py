"""
A table with prediction intervals
=================================

The estimators follow scikit-learn. The regressor predicts a distribution, and conformal intervals
that are calibrated on rows which the members have not seen.
"""

import matplotlib.pyplot as plt
from sklearn.datasets import make_friedman1
from sklearn.model_selection import train_test_split

from embens.tabular import EmbeddedEnsembleRegressor

table, target = make_friedman1(n_samples=1200, noise=1.0, random_state=0)
train, test, y_train, y_test = train_test_split(table, target, test_size=0.4, random_state=0)
model = EmbeddedEnsembleRegressor(random_state=0, max_epochs=30).fit(train, y_train)
low, high = model.predict_interval(test, coverage=0.9).T
mean = model.predict(test)
inside = ((low <= y_test) & (y_test <= high)).mean()
print(f"R² {model.score(test, y_test):.2f}; {inside:.0%} of the test rows are inside")

# %%
# Test rows, ordered by their prediction, with intervals.

order = mean.argsort()
rows = range(len(order))
figure, axes = plt.subplots(figsize=(8, 4))
axes.fill_between(rows, low[order], high[order], alpha=0.25, lw=0, label="90 % interval")
axes.plot(rows, mean[order], lw=2, label="prediction")
axes.plot(rows, y_test[order], "k.", ms=3, label="target")
axes.set(xlabel="test rows, ordered by prediction", ylabel="target")
axes.set_title("About nine in ten test rows are inside the interval")
axes.legend()
figure.tight_layout()
