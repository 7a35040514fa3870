"""An epoch of `embens.fit` compared with a hand-written loop.

    python -m benchmarks.fit [--rounds 7]

Both take turns in one process, on copies of the same ensemble and with the same order of samples.
The result is the median over rounds of the ratio of their times. `fit` includes its setup, history
and checks.
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
from embens.training import fit, linear_decay
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


def with_fit(ensemble, x, y, epochs):
    scheduler = linear_decay(epochs, hold=1.0)
    fit(ensemble, (x, y), epochs=epochs, batch_size=BATCH, scheduler=scheduler)


def cases():
    """Yield the name, the bar, the ensemble, the data and the number of epochs of each case."""
    generator = torch.Generator().manual_seed(0)

    def data(rows, *shape, classes=10):
        x = torch.randn(rows, *shape, generator=generator)
        return x, torch.randint(classes, (rows,), generator=generator)

    tiny = networks.mlp(inputs=64, width=32, depth=3, outputs=10, parametrization="standard")
    wide = networks.mlp(inputs=64, width=512, depth=3, outputs=10, parametrization="standard")
    images = networks.cnn(channels=(16, 32), image=16, outputs=10)
    digits = data(1347, 64)
    yield "digits MLP 3×32, M=16", 1.10, embens.batch_ensemble(tiny, 16), digits, 4
    yield "digits MLP 3×32, M=16, last layer", 1.10, embens.last_layer_dropout(tiny, 16), digits, 8
    yield "digits MLP 3×512, M=8", 1.10, embens.batch_ensemble(wide, 8), digits, 2
    yield "CNN 16–32, 16×16, M=4", 1.10, embens.batch_ensemble(images, 4), data(512, 3, 16, 16), 2


def seconds(run: Callable, ensemble, x, y, epochs) -> float:
    trained = copy.deepcopy(ensemble)
    start = time.perf_counter()
    run(trained, x, y, epochs)
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
    bare_times = []
    for name, bar, ensemble, (x, y), epochs in cases():
        for run in (bare, with_fit):
            seconds(run, ensemble, x, y, epochs)  # warm up
        times: dict[Callable, list[float]] = {bare: [], with_fit: []}
        for turn in range(rounds):
            for run in (bare, with_fit) if turn % 2 else (with_fit, bare):
                times[run].append(seconds(run, ensemble, x, y, epochs))
        ratios = [a / b for a, b in zip(times[with_fit], times[bare], strict=True)]
        label = f"{name} (bar {bar:g})"
        row.results.append(Result(label, True, statistics.median(ratios), quartiles(ratios)))
        bare_times.append(f"{1e3 * statistics.median(times[bare]):.3g}")
    row.reference = f"the bare epochs took {', '.join(bare_times)} ms; {rounds} rounds"
    print(row)
    write(row)


if __name__ == "__main__":
    main()
