"""An epoch of `embens.fit` against a bare hand-written loop with the same arithmetic.

    python -m benchmarks.fit [--rounds 7]

Both run in turns in one process, on equal copies of one ensemble and in the same order of samples;
the ratio is the median over rounds. `fit` includes its setup, history and checks.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch

import embens
from benchmarks.timing import Result, Row, quartiles, write
from embens import networks
from embens.training import fit
from embens.training.batches import batches_of

BATCH = 128


def bare(ensemble, x, y, epochs):
    optimizer = torch.optim.SGD(ensemble.parameter_groups(), momentum=0.9, fused=True)
    ensemble.train()
    for epoch in range(epochs):
        order = batches_of((x, y), BATCH, seed=0).order(epoch)
        for index in order.split(BATCH):
            optimizer.zero_grad()
            embens.objective(ensemble(x[index]), y[index]).backward()
            optimizer.step()


def ours(ensemble, x, y, epochs):
    scheduler = embens.training.linear_decay(epochs, hold=1.0)
    fit(ensemble, (x, y), epochs=epochs, batch_size=BATCH, scheduler=scheduler)


def cases():
    """Yield a name, a bar, an ensemble, data, epochs in a round."""
    generator = torch.Generator().manual_seed(0)

    def data(rows, *shape, classes=10):
        x = torch.randn(rows, *shape, generator=generator)
        return x, torch.randint(classes, (rows,), generator=generator)

    tiny = networks.mlp(inputs=64, width=32, depth=3, outputs=10, parametrization="standard")
    wide = networks.mlp(inputs=64, width=512, depth=3, outputs=10, parametrization="standard")
    images = networks.cnn(channels=(16, 32), image=16, outputs=10)
    digits = data(1347, 64)
    yield "digits MLP 3×32, M=16", 1.15, embens.batch_ensemble(tiny, 16), digits, 4
    yield "digits MLP 3×32, M=16, last layer", 1.15, embens.last_layer_dropout(tiny, 16), digits, 8
    yield "digits MLP 3×512, M=8", 1.05, embens.batch_ensemble(wide, 8), digits, 2
    yield "CNN 16–32, 16×16, M=4", 1.05, embens.batch_ensemble(images, 4), data(512, 3, 16, 16), 2


def seconds(run: Callable, ensemble, x, y, epochs) -> float:
    mine = copy.deepcopy(ensemble)
    start = time.perf_counter()
    run(mine, x, y, epochs)
    return (time.perf_counter() - start) / epochs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    row = Row(
        name="fit",
        title="an epoch of `embens.fit`, with its setup, history and checks",
        unit="the same epoch of a bare loop",
        bar=max(case[1] for case in cases()),
        limit=1.0,
        limit_reason="the bare loop itself",
        rounds=rounds,
    )
    unit = []
    for name, bar_, ensemble, (x, y), epochs in cases():
        for run in (bare, ours):
            seconds(run, ensemble, x, y, epochs)  # warm up
        times: dict[Callable, list[float]] = {bare: [], ours: []}
        for turn in range(rounds):
            for run in (bare, ours) if turn % 2 else (ours, bare):
                times[run].append(seconds(run, ensemble, x, y, epochs))
        ratios = [a / b for a, b in zip(times[ours], times[bare], strict=True)]
        label = f"{name} (bar {bar_:g})"
        row.results.append(Result(label, True, statistics.median(ratios), quartiles(ratios)))
        unit.append(f"{1e3 * statistics.median(times[bare]):.3g}")
    row.reference = f"the bare epochs took {', '.join(unit)} ms; {rounds} rounds"
    print(row)
    write(row)


if __name__ == "__main__":
    main()
