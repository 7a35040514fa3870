"""``python -m reproduction demo``: embens on a real table and on digits, in two minutes.

Part one fits a real table with intervals and compares them with those of a plain network and of
gradient boosting. Part two trains eight members inside one network on digits, from independent
members (p = 0) to copies of one model (p = 1). The results are printed and written to one page with
two pictures.
"""

import base64
import html
import io
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import embens
from reproduction.datasets.sets import digits
from reproduction.storage import write_atomically

COVERAGE = 0.9
SPLITS = 16
SEEDS = (0, 1, 2)
MEANS = (0.0, 0.5, 0.9, 1.0)
MEMBERS = 8
EPOCHS = 60
INTRODUCTION = (
    "embens turns one PyTorch network into an ensemble: members share its weights and differ in a "
    "few parameters each. This page shows two results that were computed on your machine."
)
NEXT = (
    "Continue with <code>README.md</code>, which says what an ensemble gains and costs, and with "
    "<code>docs/tutorial.md</code>. The code of this page is <code>reproduction/demo.py</code>."
)
GREY, BLUE, ORANGE = "#7f7f7f", "#1f77b4", "#ff7f0e"


@dataclass(frozen=True)
class IntervalResult:
    """Intervals of one method on a table, one entry per split.

    Attributes:
        method: The name of the method.
        coverage: Fraction of test rows inside their interval.
        width: Mean width of the intervals.
        error: Root mean squared error of the predictions.
    """

    method: str
    coverage: list[float]
    width: list[float]
    error: list[float]


@dataclass(frozen=True)
class RegimeResult:
    """Eight members with one distribution of modulations, one entry per seed.

    Attributes:
        mean: Mean p of the modulations, which are signs.
        correlation: Correlation of the members' errors.
        member_loss: Mean log loss of the members.
        ensemble_loss: Log loss of the ensemble.
    """

    mean: float
    correlation: list[float]
    member_loss: list[float]
    ensemble_loss: list[float]


def run(options: Namespace) -> int:
    """Measure both parts, print a summary and write the page."""
    start = time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    print("1/2  a table with 90 % intervals: scikit-learn's diabetes", flush=True)
    tables = measure_intervals()
    print_rows(interval_rows(tables))
    print(f"\n2/2  {MEMBERS} members inside one network: scikit-learn's digits", flush=True)
    regimes = measure_regimes()
    print_rows(regime_rows(regimes))
    page = write_page(options.out / "demo.html", tables, regimes)
    print(f"\npage: {page}   ({time.perf_counter() - start:.0f} s)")
    return 0


# A table with intervals


def measure_intervals() -> list[IntervalResult]:
    """Compare intervals of three methods on random splits of a real table."""
    from sklearn.datasets import load_diabetes
    from sklearn.model_selection import train_test_split

    x, y = load_diabetes(return_X_y=True)
    methods: dict[str, Callable[..., tuple[np.ndarray, ...]]] = {
        "embens, 16 members": fit_ensemble,
        "one network": fit_network,
        "gradient boosting": fit_boosting,
    }
    results = {name: IntervalResult(name, [], [], []) for name in methods}
    for seed in range(SPLITS):
        x_train, x_test, y_train, y_test = train_test_split(x, y, random_state=seed)
        for name, fit in methods.items():
            prediction, low, high = fit(x_train, y_train, x_test, seed)
            inside = (low <= y_test) & (y_test <= high)
            result = results[name]
            result.coverage.append(float(inside.mean()))
            result.width.append(float((high - low).mean()))
            result.error.append(float(np.sqrt(((prediction - y_test) ** 2).mean())))
    return list(results.values())


def fit_ensemble(
    x: np.ndarray, y: np.ndarray, x_test: np.ndarray, seed: int
) -> tuple[np.ndarray, ...]:
    """Return predictions and interval bounds of an embedded ensemble."""
    from embens.tabular import EmbeddedEnsembleRegressor

    model = EmbeddedEnsembleRegressor(max_epochs=30, random_state=seed).fit(x, y)
    low, high = model.predict_interval(x_test, coverage=COVERAGE).T
    return model.predict(x_test), low, high


def fit_network(
    x: np.ndarray, y: np.ndarray, x_test: np.ndarray, seed: int
) -> tuple[np.ndarray, ...]:
    """Return predictions of one network, with the spread of its training errors."""
    from sklearn.neural_network import MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    scale = y.std()
    network = MLPRegressor(
        hidden_layer_sizes=(128, 128), early_stopping=True, max_iter=500, random_state=seed
    )
    model = make_pipeline(StandardScaler(), network).fit(x, (y - y.mean()) / scale)
    prediction = scale * model.predict(x_test) + y.mean()
    errors = y - (scale * model.predict(x) + y.mean())
    low, high = np.quantile(errors, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return prediction, prediction + low, prediction + high


def fit_boosting(
    x: np.ndarray, y: np.ndarray, x_test: np.ndarray, seed: int
) -> tuple[np.ndarray, ...]:
    """Return predictions and quantiles of gradient boosting."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    predictions = [HistGradientBoostingRegressor(random_state=seed).fit(x, y).predict(x_test)]
    for quantile in ((1 - COVERAGE) / 2, (1 + COVERAGE) / 2):
        model = HistGradientBoostingRegressor(loss="quantile", quantile=quantile, random_state=seed)
        predictions.append(model.fit(x, y).predict(x_test))
    return tuple(predictions)


def interval_rows(results: list[IntervalResult]) -> list[list[str]]:
    """Return the header and the lines of the table of intervals, means over the splits."""
    rows = [["", "targets inside", "mean width", "RMSE"]]
    for result in results:
        coverage = f"{100 * np.mean(result.coverage):.0f} %"
        width, error = np.mean(result.width), np.mean(result.error)
        rows.append([result.method, coverage, f"{width:.0f}", f"{error:.1f}"])
    return rows


# Two regimes


def measure_regimes() -> list[RegimeResult]:
    """Train members with different distributions of modulations on 500 digits."""
    data = digits().subset(train=500)
    train = (data.train.inputs.flatten(1), data.train.targets)
    x_test, y_test = data.test.inputs.flatten(1), data.test.targets
    results = [RegimeResult(mean, [], [], []) for mean in MEANS]
    for seed in SEEDS:
        for result in results:
            torch.manual_seed(seed)
            network = embens.networks.mlp(
                train[0].shape[1], 64, 3, 10, weight_std=2**0.5, parametrization="standard"
            )
            ensemble = embens.batch_ensemble(network, MEMBERS, result.mean)
            embens.fit(ensemble, train, epochs=EPOCHS, lr=0.05, seed=seed, progress=False)
            outputs = embens.predict(ensemble, x_test).members
            losses = [embens.metrics.nll(outputs[a : a + 1], y_test) for a in range(MEMBERS)]
            result.member_loss.append(float(np.mean([float(loss) for loss in losses])))
            result.ensemble_loss.append(float(embens.metrics.nll(outputs, y_test)))
            correlation = embens.metrics.correctness_correlation(outputs, y_test)
            result.correlation.append(float(correlation))
    return results


def regime_rows(results: list[RegimeResult]) -> list[list[str]]:
    """Return the header and the lines of the table of regimes, means over the seeds."""
    rows = [["mean p", "correlation of errors", "log loss of a member", "of the ensemble"]]
    for result in results:
        correlation = np.mean(result.correlation)
        member, ensemble = np.mean(result.member_loss), np.mean(result.ensemble_loss)
        rows.append([f"{result.mean}", f"{correlation:.2f}", f"{member:.3f}", f"{ensemble:.3f}"])
    return rows


def print_rows(rows: list[list[str]]) -> None:
    """Print a table with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for first, *others in rows:
        line = first.ljust(widths[0])
        for text, width in zip(others, widths[1:], strict=True):
            line += "   " + text.rjust(width)
        print("     " + line)


# The page


def write_page(path: Path, tables: list[IntervalResult], regimes: list[RegimeResult]) -> Path:
    """Write one page with both pictures and return its path."""
    sections = [
        (
            "A table with 90 % intervals",
            f"scikit-learn's diabetes table, {SPLITS} random splits. 90 % intervals should contain "
            "90 % of the test targets, on average over the splits. Those of embens do, because "
            "they are calibrated on rows that their members have not seen (conformal prediction). "
            "Intervals of one network, from its training errors, and of boosting, from its "
            "quantile loss, are too narrow; the same calibration would repair them. Single splits "
            "differ (dots), because a split has few test rows.",
            interval_rows(tables),
            draw_intervals(tables),
        ),
        (
            "Two regimes of members inside one network",
            f"500 digits, {MEMBERS} members, {len(SEEDS)} seeds. Modulations are random signs with "
            "mean p, by which members multiply activations. With p = 0 members are independent: "
            "their errors differ most, and the ensemble is better than its members. With p = 1 all "
            "members are one model, and the ensemble gains nothing.",
            regime_rows(regimes),
            draw_regimes(regimes),
        ),
    ]
    body = ""
    for title, text, rows, picture in sections:
        data = base64.b64encode(picture).decode()
        body += f"<h2>{html.escape(title)}</h2><p>{html.escape(text)}</p>{html_table(rows)}"
        body += f'<img alt="{html.escape(title)}" src="data:image/png;base64,{data}">'
    content = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>embens: a demo</title>'
        "<style>body{font:16px/1.5 sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem}"
        "img{max-width:100%}table{border-collapse:collapse;margin:1rem 0}"
        "td,th{padding:.2rem .8rem;border-bottom:1px solid #ccc;text-align:right}"
        "td:first-child,th:first-child{text-align:left}</style>"
        f"<h1>embens: many models inside one network</h1><p>{INTRODUCTION}</p>{body}"
        f"<p>{NEXT}</p></html>"
    )
    write_atomically(path, content.encode())
    return path


def html_table(rows: list[list[str]]) -> str:
    """Return a table in HTML; the first row is its header."""
    text = ""
    for index, row in enumerate(rows):
        tag = "th" if index == 0 else "td"
        cells = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
        text += f"<tr>{cells}</tr>"
    return f"<table>{text}</table>"


def draw_intervals(results: list[IntervalResult]) -> bytes:
    """Draw coverage and width of each method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    coverage_axes, width_axes = figure.subplots(1, 2, sharey=True)
    for row, result in enumerate(results):
        colour = BLUE if row == 0 else GREY
        coverage = 100 * np.array(result.coverage)
        coverage_axes.barh(row, coverage.mean(), color=colour)
        coverage_axes.plot(coverage, [row] * len(coverage), "k.", markersize=4)
        width_axes.barh(row, np.mean(result.width), color=colour)
    coverage_axes.axvline(100 * COVERAGE, color="black", linestyle="--")
    coverage_axes.set_xlabel("test targets inside, %\n(dashed: promised; dots: splits)")
    coverage_axes.set_yticks(range(len(results)), [result.method for result in results])
    coverage_axes.invert_yaxis()
    width_axes.set_xlabel("mean width of the intervals")
    return _png(figure)


def draw_regimes(results: list[RegimeResult]) -> bytes:
    """Draw correlation and log losses against the mean of the modulations."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    correlation_axes, loss_axes = figure.subplots(1, 2)
    means = [result.mean for result in results]
    correlations = [np.mean(result.correlation) for result in results]
    correlation_axes.plot(means, correlations, "o-", color=BLUE)
    correlation_axes.set_ylabel("correlation of errors")
    correlation_axes.set_ylim(0, 1.05)
    members = [np.mean(result.member_loss) for result in results]
    ensembles = [np.mean(result.ensemble_loss) for result in results]
    loss_axes.plot(means, members, "s--", color=ORANGE, label="mean member")
    loss_axes.plot(means, ensembles, "o-", color=BLUE, label=f"ensemble of {MEMBERS}")
    loss_axes.set_ylabel("log loss, test")
    loss_axes.legend(frameon=False)
    for axes in (correlation_axes, loss_axes):
        axes.set_xlabel("mean p of the modulations\n(0: independent, 1: one model)")
    return _png(figure)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()
