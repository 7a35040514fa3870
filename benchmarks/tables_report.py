"""Report of the benchmark on tables: scores, Elo and win rates, costs, and each bar.

The loss is the log loss for classes and the CRPS for numbers. A table counts once, by the means
over its splits. A fit that was ended or failed loses to all that finished. Elo, win rates and ranks
come from TabArena's `bencheval`, with 95 % intervals by bootstrap over tables.
"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.tables_contestants import BOOSTING, CONTESTANTS

PACKAGES = ("torch", "numpy", "scikit-learn", "tabm", "pytabkit", "lightgbm", "xgboost", "catboost")
SCORES = ("log_loss", "accuracy", "calibration", "crps", "rmse", "coverage", "width", "member_loss")
COSTS = ("fit_seconds", "predict_seconds", "parameters", "memory")


def report(path: Path) -> None:
    """Print the report of a file of results, for each number of rows, and write it beside it.

    The figure is of the largest number of rows.
    """
    if not path.exists():
        raise SystemExit(f"{path} does not exist yet: `python -m benchmarks.tables run` makes it")
    texts = []
    for rows, fits in pd.read_csv(path).groupby("rows"):
        means, failed = average(fits), fits[fits["problem"].notna()]
        ranked = with_failures(losses(means), failed)
        boards = [(part, leaderboard(part)) for part in complete(ranked)]
        problems = [f"- {f.table}, {f.contestant}: {f.problem}" for f in failed.itertuples()]
        title = f"## At most {rows:,} rows to fit: {len(fits)} fits, {len(ranked)} tables\n"
        texts.append("\n".join([title, *problems, describe(means, boards), "\n### Bars\n\n"]))
        texts[-1] += "\n".join(f"- {line}" for line in bars(means, ranked, boards))
        if boards:  # all contestants, if that leaves half of the tables
            shown = [part for part in boards if 2 * len(part[0]) >= len(ranked)][-1]
            draw(means, *shown, path.with_suffix(".png"), rows)
    text = "\n\n".join([*texts, machine()])
    print(text)
    path.with_suffix(".md").write_text(text + "\n")


def describe(means: pd.DataFrame, boards: list[tuple[pd.DataFrame, pd.DataFrame]]) -> str:
    """Return the tables of scores, leaderboards and costs."""
    loss = losses(means)
    parts = [
        "\n### Log loss of classes, CRPS of numbers\n",
        markdown(loss.map(lambda v: f"{v:.4g}"), loss),
        "\n### Accuracy of classes, RMSE of numbers\n",
        markdown(second(means).map(lambda v: f"{v:.4g}")),
        *(text for part, board in boards for text in leaders(part, board)),
        "\n### Costs and calibration (means over tables; parameters: medians)\n",
        markdown(costs(means)),
    ]
    return "\n".join(parts)


def average(fits: pd.DataFrame) -> pd.DataFrame:
    """Return means over the splits that all fits of a table share, `(table, contestant)`."""
    return fits.groupby(["kind", "table", "contestant"], dropna=False)[[*SCORES, *COSTS]].mean()


def losses(means: pd.DataFrame) -> pd.DataFrame:
    """Return the losses of tables (rows) and contestants (columns)."""
    return _wide(means["log_loss"].fillna(means["crps"]))


def with_failures(loss: pd.DataFrame, failed: pd.DataFrame) -> pd.DataFrame:
    """Return losses in which a fit that failed or was ended loses to all others of its table."""
    found, worst = loss.copy(), loss.max(axis=1)
    for fit in failed.itertuples():
        if fit.table in found.index and fit.contestant in found:
            found.loc[fit.table, fit.contestant] = 1.01 * worst[fit.table]
    return found


def second(means: pd.DataFrame) -> pd.DataFrame:
    return _wide(means["accuracy"].fillna(means["rmse"]))


def _wide(column: pd.Series) -> pd.DataFrame:
    found = column.unstack("contestant").groupby("table").first()
    kinds = column.dropna().reset_index().drop_duplicates("table").set_index("table")["kind"]
    order = kinds.reset_index().sort_values(["kind", "table"])["table"]
    return found.loc[order, [c for c in CONTESTANTS if c in found]]


def leaderboard(loss: pd.DataFrame, rounds: int = 100) -> pd.DataFrame:
    """Return Elo, win rate and mean rank by bencheval; all contestants have all these tables."""
    from bencheval.evaluator import BenchmarkEvaluator

    long = loss.stack().rename("metric_error").rename_axis(["task", "method"]).reset_index()
    np.random.seed(0)  # bencheval draws its bootstrap from it
    return BenchmarkEvaluator(columns_to_agg_extra=None).leaderboard(
        long, elo_kwargs={"BOOTSTRAP_ROUNDS": rounds, "round_decimals": 0}
    )


def complete(loss: pd.DataFrame) -> list[pd.DataFrame]:
    """Return comparisons: the contestants with all of our tables, and all on shared tables."""
    known = loss[loss["embens"].notna()] if "embens" in loss else loss
    found = [known.dropna(axis=1)]
    if found[0].shape[1] < known.shape[1]:
        found.append(known.dropna(axis=0))
    return [part for part in found if part.shape[1] > 1 and len(part) > 1]


def leaders(part: pd.DataFrame, board: pd.DataFrame) -> list[str]:
    """Return a leaderboard as text."""
    cells = pd.DataFrame(
        {
            "Elo": [f"{r.elo:.0f} (−{b:.0f}, +{a:.0f})" for r, a, b in _bounds(board)],
            "win rate": board["winrate"].map("{:.2f}".format),
            "mean rank": board["rank"].map("{:.2f}".format),
        },
        index=board.index,
    )
    return [f"\n### Elo: {part.shape[1]} contestants, {len(part)} tables\n", markdown(cells)]


def _bounds(board: pd.DataFrame):
    return zip(board.itertuples(), board["elo+"], board["elo-"], strict=True)


def costs(means: pd.DataFrame) -> pd.DataFrame:
    grouped = means.groupby("contestant")
    found = grouped[["fit_seconds", "predict_seconds", "memory", "calibration", "coverage"]].mean()
    found["parameters"] = grouped["parameters"].median()
    loss = means["log_loss"].fillna(means["crps"])
    found["gain"] = (1 - loss / means["member_loss"]).groupby("contestant").mean()
    form = {
        "fit_seconds": ("CPU s of a fit", "{:.1f}"),
        "predict_seconds": ("… of predicting", "{:.2f}"),
        "memory": ("MB", "{:.0f}"),
        "parameters": ("parameters", "{:,.0f}"),
        "calibration": ("calibration error", "{:.3f}"),
        "coverage": ("coverage of 90 %", "{:.3f}"),
        "gain": ("gain over mean member", "{:.3f}"),
    }
    text = {
        title: found[name].map(lambda v, how=how: "–" if pd.isna(v) else how.format(v))
        for name, (title, how) in form.items()
    }
    return pd.DataFrame(text).loc[[c for c in CONTESTANTS if c in found.index]]


# Bars


def bars(means: pd.DataFrame, loss: pd.DataFrame, boards: list, ours: str = "embens") -> list[str]:
    """Return each bar with the measurement, for the contestants that were measured."""
    if ours not in loss:
        return [f"{ours} was not fitted yet"]
    found = [_elo_bar(*both, ours) for both in boards]
    if "tabm" in loss:
        found.append(_tabm_bar(means, ours))
    if "separate" in loss:
        found += _separate_bars(means, loss, ours)
    if rivals := [c for c in BOOSTING if c in loss]:
        found.append(_boosting_bar(loss, ours, rivals))
    covered = means.xs(ours, level="contestant")["coverage"].dropna()
    if len(covered):
        mean, error = covered.mean(), covered.sem()
        verdict = _verdict(0.89 <= mean <= 0.91)
        found.append(
            f"coverage of 90 % intervals, 89–91 %: {100 * mean:.1f} ± {100 * error:.1f} % over "
            f"{len(covered)} tables: {verdict}"
        )
    return found


def _verdict(met: bool) -> str:
    return "**met**" if met else "**missed**"


def _elo_bar(loss: pd.DataFrame, board: pd.DataFrame, ours: str) -> str:
    first, mine = board.sort_values("elo").iloc[-1], board.loc[ours]
    met = mine["elo"] >= first["elo"] - first["elo-"]
    place = int((board["elo"] > mine["elo"]).sum()) + 1
    return (
        f"Elo first, or within the interval of the first: place {place} of {len(board)} on "
        f"{len(loss)} tables ({mine['elo']:.0f}; {first.name} {first['elo']:.0f} "
        f"−{first['elo-']:.0f}): {_verdict(met)}"
    )


def _tabm_bar(means: pd.DataFrame, ours: str) -> str:
    both = second(means)[[ours, "tabm"]].dropna()
    number = means["rmse"].groupby("table").count() > 0
    sign = np.where(number[both.index], 1.0, -1.0)
    fine = sign * (both[ours] - both["tabm"]) <= 0
    return (
        f"accuracy or RMSE no worse than TabM's on ≥ 60 % of tables: {fine.sum()} of {len(fine)} "
        f"({100 * fine.mean():.0f} %): {_verdict(fine.mean() >= 0.6)}"
    )


def _separate_bars(means: pd.DataFrame, loss: pd.DataFrame, ours: str) -> list[str]:
    both = loss[[ours, "separate"]].dropna()
    change = np.log(both[ours] / both["separate"])
    ratio = {}
    for name in ("parameters", "fit_seconds"):
        wide = _wide(means[name])[[ours, "separate"]].dropna()
        ratio[name] = float(np.exp(np.log(wide[ours] / wide["separate"]).mean()))
    gain = 1 - losses(means) / _wide(means["member_loss"])
    gains = gain[[ours, "separate"]].dropna().mean()
    part = gains[ours] / gains["separate"]
    return [
        f"loss no worse than of separate networks: ratio {np.exp(change.mean()):.3f} "
        f"(± {change.sem():.3f}), no worse on {(change <= 0).sum()} of {len(change)} tables: "
        f"{_verdict(change.mean() <= 0)}; parameters × {ratio['parameters']:.2f}, bar 0.2: "
        f"{_verdict(ratio['parameters'] <= 0.2)}; time × {ratio['fit_seconds']:.2f}, bar 0.5: "
        f"{_verdict(ratio['fit_seconds'] <= 0.5)}",
        f"gain over the mean member ≥ ¾ of the separate networks': {gains[ours]:.3f} against "
        f"{gains['separate']:.3f}, {part:.2f}: {_verdict(part >= 0.75)}",
    ]


def _boosting_bar(loss: pd.DataFrame, ours: str, rivals: list[str]) -> str:
    shared = loss[[ours, *rivals]].dropna()
    best = shared[rivals].rank(axis=1).mean().idxmin()
    fine, any_ = shared[ours] < shared[best], shared[ours] < shared[rivals].min(axis=1)
    return (
        f"better loss than the best boosting on ≥ 60 % of tables: {fine.sum()} of {len(fine)} "
        f"against {best} ({100 * fine.mean():.0f} %): {_verdict(fine.mean() >= 0.6)}; against the "
        f"best of each table {any_.sum()} of {len(any_)}"
    )


# Form


def markdown(cells: pd.DataFrame, marked: pd.DataFrame | None = None) -> str:
    """Return a table; the smallest number of a row of `marked` in bold."""
    cells = cells.copy().astype(object)
    if marked is not None:
        for name, values in marked.iterrows():
            cells.loc[name, values.idxmin()] = f"**{cells.loc[name, values.idxmin()]}**"
    lines = [[cells.index.name or "", *cells.columns], ["---"] * (cells.shape[1] + 1)]
    lines += [[name, *row] for name, row in zip(cells.index, cells.to_numpy(), strict=True)]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines).replace("nan", "–")


def machine() -> str:
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:  # a contestant that was left out with --only
            versions.append(f"{name} (not installed)")
    found = ", ".join(versions)
    return f"One thread each, {platform.machine()}, Python {platform.python_version()}; {found}."


def draw(means: pd.DataFrame, loss: pd.DataFrame, board: pd.DataFrame, path: Path, rows: int):
    """Draw Elo with intervals, and the loss relative to the best of each table against time."""
    import matplotlib.pyplot as plt

    board = board.sort_values("elo")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    colours = ["C3" if name.startswith("embens") else "C0" for name in board.index]
    left.barh(board.index, board["elo"] - 1000, left=1000, color=colours, alpha=0.5)
    left.errorbar(
        board["elo"],
        board.index,
        xerr=np.stack([board["elo-"], board["elo+"]]),
        fmt="k.",
        capsize=3,
    )
    left.set(xlabel=f"Elo by log loss or CRPS, {len(loss)} tables, ≤ {rows:,} rows to fit")
    worse = np.exp(np.log(loss.div(loss.min(axis=1), axis=0)).mean()) - 1
    seconds = _wide(means["fit_seconds"]).loc[loss.index]
    for name in loss:
        colour = "C3" if name.startswith("embens") else "C0"
        x, y = np.exp(np.log(seconds[name]).mean()), 100 * worse[name]
        right.scatter(x, y, color=colour)
        right.annotate(name, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=8)
    right.set(
        xscale="log",
        xlabel="CPU seconds of a fit (geometric mean)",
        ylabel="loss above the best of a table, % (geometric mean)",
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)
