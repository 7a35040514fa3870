"""Report of the benchmark on tables: scores, Elo and win rates, costs, and each bar.

The loss is the log loss for classes and the CRPS for numbers. A table counts once, by the means
over its splits. A fit that was ended or failed loses to all that finished. Elo ratings are those of
a Bradley-Terry model of all pairs of contestants on all tables, with mean 1000 and 95 % intervals
by bootstrap over tables. `tests/test_tables_results.py` computes the published report again.
"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.tables_contestants import CONTESTANTS
from embens.files import write_atomically

PACKAGES = ("torch", "numpy", "scikit-learn", "tabm", "pytabkit", "lightgbm", "xgboost", "catboost")
SCORES = ("log_loss", "accuracy", "calibration", "crps", "rmse", "coverage", "width", "member_loss")
COSTS = ("fit_seconds", "predict_seconds", "parameters", "memory")
ROUNDS = 200  # of the bootstrap
NEARLY_ALL = 0.9  # of our tables, for a contestant to be on the first leaderboard
OURS = "embens"
TIMED_ROWS = 5000  # the bar on time; at 1,000 rows not all fits are of the same run


def report(path: Path) -> None:
    """Print the report of a file of results and write it beside it, with a figure.

    The figure is of the largest number of rows.
    """
    if not path.exists():
        raise SystemExit(f"{path} does not exist yet: `python -m benchmarks.tables run` makes it")
    fits = pd.read_csv(path)
    text = f"{body(fits)}\n\n{machine()}\n"
    print(text)
    write_atomically(path.with_suffix(".md"), text)
    rows = fits["rows"].max()
    draw(average(fits[fits["rows"] == rows]), path.with_suffix(".png"), rows)


def body(fits: pd.DataFrame) -> str:
    """Return the report of all results, for each number of rows."""
    texts = []
    for rows, part in fits.groupby("rows"):
        means, failed = average(part), part[part["problem"].notna()]
        ranked = with_failures(losses(means), failed)
        splits = part.groupby("table")[["repeat", "fold"]].nunique().prod(axis=1).max()
        title = (
            f"## At most {rows:,} rows to fit: {len(part)} fits, {len(ranked)} tables, at most "
            f"{splits} split of each\n"
        )
        problems = [f"- {f.table}, {f.contestant}: {f.problem}" for f in failed.itertuples()]
        bar_lines = [
            f"| {bar} | {result} | {met} |" for bar, result, met in bars(means, ranked, rows)
        ]
        texts += [title, *problems, describe(means, ranked), "\n### Bars\n"]
        texts += ["| bar | result | |", "|---|---|---|", *bar_lines, ""]
    return "\n".join(texts).rstrip()


def headline(fits: pd.DataFrame) -> str:
    """Return a table of the most important results, with a column for each number of rows."""
    columns = {}
    for rows, part in fits.groupby("rows"):
        means = average(part)
        ranked = with_failures(losses(means), part[part["problem"].notna()])
        board = boards(ranked)[0]
        leaders = leaderboard(board)
        covered = means.xs(OURS, level="contestant")["coverage"].dropna()
        place = leaders.index.get_loc(OURS) + 1
        columns[f"≤ {rows:,} rows"] = {
            "tables with classes, with numbers": (
                f"{len(of_kind(means, 'log_loss'))}, {len(of_kind(means, 'crps'))}"
            ),
            "place by Elo": f"{place} of {len(leaders)} on {len(board)} tables",
            "coverage of 90 % intervals: mean, lowest": (
                f"{covered.mean():.3f}, {covered.min():.3f}"
            ),
        }
        if rows == TIMED_ROWS:
            columns[f"≤ {rows:,} rows"]["CPU time ÷ CatBoost's"] = times(means, "catboost")
    return markdown(pd.DataFrame(columns).rename_axis(""))


def describe(means: pd.DataFrame, ranked: pd.DataFrame) -> str:
    """Return the tables of scores, leaderboards and costs."""
    loss = losses(means)
    parts = [
        "\n### Log loss of classes, CRPS of numbers\n",
        markdown(loss.map(lambda v: f"{v:.4g}"), loss),
        "\n### Accuracy of classes, RMSE of numbers\n",
        markdown(second(means).map(lambda v: f"{v:.4g}")),
    ]
    if OURS in ranked:
        parts += ["\n### Tables with a lower loss than the others\n", comparison(means)]
    for part in boards(ranked):
        parts += [
            f"\n### Elo: {part.shape[1]} contestants, {len(part)} tables\n",
            leaders(leaderboard(part)),
        ]
    parts += [
        "\n### Costs and calibration (means over tables; parameters: medians)\n",
        markdown(costs(means)),
    ]
    return "\n".join(parts)


def average(fits: pd.DataFrame) -> pd.DataFrame:
    """Return means over the splits to which all contestants of a table were fitted.

    Means over other splits would compare different rows.
    """
    contestants = fits.groupby("table")["contestant"].transform("nunique")
    of_split = fits.groupby(["table", "repeat", "fold"])["contestant"].transform("nunique")
    shared = fits[of_split == contestants]
    return shared.groupby(["kind", "table", "contestant"], dropna=False)[[*SCORES, *COSTS]].mean()


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


def of_kind(means: pd.DataFrame, score: str) -> pd.DataFrame:
    """Return a score of the tables that have it, `(table, contestant)`."""
    wide = means[score].unstack("contestant").groupby("table").first()
    return wide.dropna(how="all")[[c for c in CONTESTANTS if c in wide]]


def comparison(means: pd.DataFrame) -> str:
    """Return on how many tables our loss is lower, and the geometric mean of the ratios."""
    columns = {}
    for score in ("log_loss", "crps", "rmse"):
        wide = of_kind(means, score)
        if OURS not in wide:
            continue
        cells = {}
        for rival in wide.columns.drop(OURS):
            both = wide[[OURS, rival]].dropna()
            if len(both) == 0:
                continue
            ratio = np.exp(np.log(both[OURS] / both[rival]).mean())
            cells[rival] = f"{(both[OURS] < both[rival]).sum()} of {len(both)}, × {ratio:.3f}"
        columns[score.replace("_", " ").replace("crps", "CRPS").replace("rmse", "RMSE")] = cells
    frame = pd.DataFrame(columns)
    frame = frame.loc[[c for c in CONTESTANTS if c in frame.index]]
    return markdown(frame.rename_axis("embens against"))


def boards(loss: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the contestants with nearly all of our tables, and all, on tables that they share."""
    if OURS in loss:
        loss = loss[loss[OURS].notna()]
    nearly_all = loss.loc[:, loss.notna().mean() >= NEARLY_ALL]
    parts = [nearly_all.dropna()]
    if nearly_all.shape[1] < loss.shape[1]:
        parts.append(loss.dropna())
    return [part for part in parts if part.shape[1] > 1 and len(part) > 1]


def wins(loss: np.ndarray) -> np.ndarray:
    """Return how often each contestant has a lower loss, `(table, winner, loser)`; ties are 1/2."""
    difference = loss[:, None, :] - loss[:, :, None]  # positive: the first has the lower loss
    return (difference > 0) + 0.5 * (difference == 0)


def elo(won: np.ndarray, steps: int = 25) -> np.ndarray:
    """Fit Elo ratings to `won[winner, loser]` by Newton's method; a weak prior bounds them."""
    count = len(won)
    won = won + 0.01 * (1 - np.eye(count))
    np.fill_diagonal(won, 0.0)
    games = won + won.T
    strength = np.zeros(count)
    for _ in range(steps):
        chance = 1 / (1 + np.exp(strength[None, :] - strength[:, None]))
        gradient = (won - games * chance).sum(1)
        curvature = games * chance * (1 - chance)
        hessian = np.diag(curvature.sum(1)) - curvature + np.ones((count, count))  # mean 0
        strength = strength + np.linalg.solve(hessian, gradient)
    return 1000 + 400 / np.log(10) * (strength - strength.mean())


def leaderboard(loss: pd.DataFrame, rounds: int = ROUNDS) -> pd.DataFrame:
    """Return Elo with its interval, win rate and mean rank; all contestants have all tables."""
    won = wins(loss.to_numpy())
    draw = np.random.default_rng(0)
    tables = len(loss)
    resampled = [elo(won[draw.integers(tables, size=tables)].sum(0)) for _ in range(rounds)]
    low, high = np.quantile(resampled, [0.025, 0.975], axis=0)
    board = pd.DataFrame(
        {
            "elo": elo(won.sum(0)),
            "low": low,
            "high": high,
            "winrate": (won.sum((0, 2)) - tables / 2) / (tables * (loss.shape[1] - 1)),
            "rank": loss.rank(axis=1).mean().to_numpy(),
        },
        index=pd.Index(loss.columns, name="method"),
    )
    return board.sort_values("elo", ascending=False)


def leaders(board: pd.DataFrame) -> str:
    """Return a leaderboard as text."""
    elos = [f"{r.elo:.0f} [{r.low:.0f}, {r.high:.0f}]" for r in board.itertuples()]
    cells = pd.DataFrame(
        {
            "Elo [95 %]": elos,
            "win rate": board["winrate"].map("{:.2f}".format),
            "mean rank": board["rank"].map("{:.2f}".format),
        },
        index=board.index,
    )
    return markdown(cells)


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


def bars(means: pd.DataFrame, ranked: pd.DataFrame, rows: int) -> list[tuple[str, str, str]]:
    """Return bars, results and whether they are met, for the contestants that were measured."""
    if OURS not in ranked:
        return []
    found = []
    for rival in ("catboost", "catboost_all_rows"):
        if rival in ranked:
            found += _against(means, "log_loss", rival, "classes", 0.5)
            found += _against(means, "rmse", rival, "numbers", 0.6)
    crps = of_kind(means, "crps")
    if OURS in crps:
        found += [_elo_bar("CRPS first in Elo", part, False) for part in boards(crps)]
    found += [
        _elo_bar("Elo first, or in the interval of the first", part, True)
        for part in boards(ranked)
    ]
    if "separate" in ranked:
        found.append(_separate_bar(means, ranked))
    covered = means.xs(OURS, level="contestant")["coverage"].dropna()
    if len(covered):
        mean, low = covered.mean(), covered.min()
        met = 0.89 <= mean <= 0.91 and low >= 0.85
        result = f"{mean:.3f} ± {covered.sem():.3f}, lowest {low:.3f}, {len(covered)} tables"
        found.append(("coverage of 90 % intervals: mean .89–.91, all ≥ .85", result, _met(met)))
    for rival in ("catboost", "catboost_all_rows"):
        if rival in ranked and rows == TIMED_ROWS:
            found.append(_time_bar(means, rival))
    return found


def _met(met: bool) -> str:
    return "met" if met else "**missed**"


def _against(means: pd.DataFrame, score: str, rival: str, kind: str, share: float):
    wide = of_kind(means, score)
    if OURS not in wide or rival not in wide:
        return []
    both = wide[[OURS, rival]].dropna()
    better = both[OURS] < both[rival]
    ratio = np.exp(np.log(both[OURS] / both[rival]).mean())
    bar = f"{score.replace('_', ' ')} lower than {rival} on ≥ {100 * share:.0f} % of {kind}"
    result = f"{better.sum()} of {len(both)}, ratio {ratio:.3f}"
    return [(bar, result, _met(better.mean() >= share))]


def _elo_bar(bar: str, loss: pd.DataFrame, interval_counts: bool):
    board = leaderboard(loss)
    first, ours = board.iloc[0], board.loc[OURS]
    place = int((board["elo"] > ours["elo"]).sum()) + 1
    result = f"place {place} of {len(board)} on {len(loss)} tables, {ours['elo']:.0f}"
    if place > 1:
        result += f"; {first.name} {first['elo']:.0f} [{first['low']:.0f}, {first['high']:.0f}]"
    met = place == 1 or (interval_counts and ours["elo"] >= first["low"])
    return bar, result, _met(met)


def _separate_bar(means: pd.DataFrame, ranked: pd.DataFrame):
    both = ranked[[OURS, "separate"]].dropna()
    change = np.log(both[OURS] / both["separate"])
    sizes = _wide(means["parameters"])[[OURS, "separate"]].dropna()
    size = np.exp(np.log(sizes[OURS] / sizes["separate"]).mean())
    result = (
        f"ratio {np.exp(change.mean()):.3f} (± {change.sem():.3f}), no worse on "
        f"{(change <= 0).sum()} of {len(change)}; parameters × {size:.2f}"
    )
    met = change.mean() <= 0 and size <= 0.2
    return "loss no worse than of separate networks, ≤ 1/5 of the parameters", result, _met(met)


def time_ratios(means: pd.DataFrame, rival: str) -> tuple[float, float]:
    """Return our CPU time over that of a rival: of all fits, and the geometric mean of tables."""
    seconds = _wide(means["fit_seconds"])[[OURS, rival]].dropna()
    ratios = seconds[OURS] / seconds[rival]
    return seconds[OURS].sum() / seconds[rival].sum(), np.exp(np.log(ratios).mean())


def times(means: pd.DataFrame, rival: str) -> str:
    """Return both ratios as text."""
    total, typical = time_ratios(means, rival)
    return f"{total:.1f} (all fits together), {typical:.1f} (geometric mean over tables)"


def _time_bar(means: pd.DataFrame, rival: str):
    met = max(time_ratios(means, rival)) <= 3  # one slow fit must not decide
    return f"CPU time of a fit ÷ {rival} ≤ 3", times(means, rival), _met(met)


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


def draw(means: pd.DataFrame, path: Path, rows: int) -> None:
    """Draw Elo with intervals, and the loss relative to the best of each table against time."""
    import matplotlib.pyplot as plt

    parts = boards(losses(means))
    if not parts:
        return
    loss = parts[0]
    board = leaderboard(loss).sort_values("elo")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    colours = ["C3" if name.startswith(OURS) else "C0" for name in board.index]
    left.barh(board.index, board["elo"] - 1000, left=1000, color=colours, alpha=0.5)
    errors = np.stack([board["elo"] - board["low"], board["high"] - board["elo"]]).clip(0)
    left.errorbar(board["elo"], board.index, xerr=errors, fmt="k.", capsize=3)
    left.set(xlabel=f"Elo by log loss or CRPS, {len(loss)} tables, ≤ {rows:,} rows to fit")
    worse = np.exp(np.log(loss.div(loss.min(axis=1), axis=0)).mean()) - 1
    seconds = _wide(means["fit_seconds"]).loc[loss.index]
    for name in loss:
        colour = "C3" if name.startswith(OURS) else "C0"
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
