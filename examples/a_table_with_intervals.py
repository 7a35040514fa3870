"""
A table, and how sure the model is
==================================

The estimators follow scikit-learn. The regressor predicts a distribution, and intervals that hold
what they promise on rows like those it has seen.
"""

import matplotlib.pyplot as plt
from embens.estimators import EmbeddedEnsembleRegressor
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

table, target = load_diabetes(return_X_y=True, as_frame=True)
parts = train_test_split(table, target, test_size=0.4, random_state=0)
train, test, y_train, y_test = parts
model = EmbeddedEnsembleRegressor(random_state=0, max_epochs=40).fit(train, y_train)
low, high = model.predict_interval(test, coverage=0.9).T
mean = model.predict(test)
print(
    f"R² {model.score(test, y_test):.2f}; {((low <= y_test) & (y_test <= high)).mean():.0%} inside"
)

# %%
# Rows in the order of what is predicted for them, with their intervals.

order = mean.argsort()
rows = range(len(order))
figure, axes = plt.subplots(figsize=(8, 4))
axes.fill_between(rows, low[order], high[order], alpha=0.25, lw=0, label="90 % interval")
axes.plot(rows, mean[order], lw=2, label="prediction")
axes.plot(rows, y_test.to_numpy()[order], "k.", ms=3, label="truth")
axes.set(xlabel="test rows, by prediction", ylabel="disease progression")
axes.set_title("About nine in ten test rows lie inside")
axes.legend()
figure.tight_layout()
