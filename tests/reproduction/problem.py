"""Small cells and folders for tests of the machinery."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import torch

from reproduction.__main__ import main
from reproduction.figures.transition import NORMAL
from reproduction.grid.cells import Cell
from reproduction.grid.settings import PRESETS

SETTING = replace(PRESETS["quick"], epochs=1, train=64, test=32)


def cell_of(members, setting=SETTING, kind=Cell, **more):
    """Return a cell of ``transition``."""
    swept = {"law": NORMAL, "p": 0.5, "members": members, "gamma": "M", "seed": 0, **more}
    return kind(setting, swept, "transition")


def cells(count=4, setting=SETTING):
    return [cell_of(members, setting) for members in range(1, count + 1)]


def bad(setting=SETTING):
    """Return a cell whose measurement raises."""
    return cell_of(0, setting)


def slow():
    """Return a cell that takes minutes."""
    return cell_of(2, replace(PRESETS["quick"], epochs=100_000))


class Deadly(Cell):
    """A cell that kills the process that measures it, once; the process of the test survives."""

    def __getitem__(self, axis):
        if axis == "gamma":  # read in the middle of ``transition.measure``
            mark = Path(self["mark"])
            if os.getpid() != self["home"] and not mark.exists():
                mark.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(axis)


class Stuck(Cell):
    """A cell whose measurement never ends on one node of a Ray cluster."""

    def __getitem__(self, axis):
        if axis == "gamma" and _node() == self["node"]:
            Path(self["mark"]).write_text(str(os.getpid()))
            time.sleep(600)
        return super().__getitem__(axis)


def _node():
    import ray

    return ray.get_runtime_context().get_node_id() if ray.is_initialized() else None


def deadly(mark, seed=7):
    return cell_of(2, kind=Deadly, mark=str(mark), home=os.getpid(), seed=seed)


def stuck(mark, node, count=4):
    numbers = range(1, count + 1)
    return [cell_of(m, kind=Stuck, mark=str(mark), node=node, seed=9) for m in numbers]


def plain(cell):
    """Return the same cell without its trap."""
    return cell_of(cell["members"], cell.setting, seed=cell.seed)


def reproduce(*arguments):
    """Run ``python -m reproduction``."""
    return main([str(argument) for argument in arguments])


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
