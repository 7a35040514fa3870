"""Small cells and folders for tests of the machinery."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from embens.cli import main
from embens.experiments.setting import PRESETS
from embens.experiments.transition import Cell

SETTING = replace(PRESETS["quick"], epochs=1, train=64, test=32)


def cells(count=4, setting=SETTING):
    return [Cell(0.5, members, "M", setting=setting) for members in range(1, count + 1)]


def bad(setting=SETTING):
    """Return a cell whose measurement raises."""
    return Cell(0.5, 0, "M", setting=setting)


def slow():
    """Return a cell that takes minutes."""
    return Cell(0.5, 2, "M", setting=replace(PRESETS["quick"], epochs=100_000))


@dataclass(frozen=True)
class Deadly(Cell):
    """A cell whose measurement kills the process that it is in, once; never the test's own."""

    mark: str
    home: int

    def __getattribute__(self, name):
        if name == "gamma":  # read in the middle of ``transition.measure``
            mark = Path(object.__getattribute__(self, "mark"))
            if os.getpid() != object.__getattribute__(self, "home") and not mark.exists():
                mark.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL)
        return object.__getattribute__(self, name)


@dataclass(frozen=True)
class Stuck(Cell):
    """A cell whose measurement never ends on one node of a Ray cluster."""

    mark: str
    node: str

    def __getattribute__(self, name):
        if name == "gamma" and _node() == object.__getattribute__(self, "node"):
            Path(object.__getattribute__(self, "mark")).write_text(str(os.getpid()))
            time.sleep(600)
        return object.__getattribute__(self, name)


def _node():
    import ray

    return ray.get_runtime_context().get_node_id() if ray.is_initialized() else None


def deadly(mark, seed=7):
    return Deadly(0.5, 2, "M", str(mark), os.getpid(), setting=SETTING, seed=seed)


def stuck(mark, node, count=4):
    return [
        Stuck(0.5, members, "M", str(mark), node, setting=SETTING, seed=9)
        for members in range(1, count + 1)
    ]


def plain(cell):
    """Return the same cell without its trap."""
    return Cell(cell.p, cell.members, "M", setting=cell.setting, seed=cell.seed)


def reproduce(*arguments):
    """Run ``embens reproduce``."""
    return main(["reproduce", *map(str, arguments)])


def write_cifar(folder, train=40, test=20):
    """Write random records in CIFAR-100's binary format."""
    generator = torch.Generator().manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train.bin", train), ("test.bin", test)):
        coarse = torch.randint(20, (count, 1), generator=generator)
        fine = torch.randint(100, (count, 1), generator=generator)
        pixels = torch.randint(256, (count, 3072), generator=generator)
        records = torch.cat([coarse, fine, pixels], 1).to(torch.uint8)
        (folder / name).write_bytes(records.numpy().tobytes())
    return folder
