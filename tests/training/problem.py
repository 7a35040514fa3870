"""A small problem that trains in a moment, and helpers, for the tests of training."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import embens
from embens.training import Callback

ROWS = 60


def data(rows: int = ROWS, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=generator)
    return x, ((x[:, 0] + x[:, 1] > 0).long() + (x[:, 2] > 0.5).long())


def reference(outputs: int = 3, dropout: float = 0.0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(4, 16),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(16, 16),
            nn.ReLU(),
            nn.Linear(16, outputs),
        )


class Normalised(nn.Module):
    """A perceptron with norm layers, whose first one comes before any modulation."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.hidden = nn.Linear(4, 16), nn.Linear(16, 16)
            self.last = nn.Linear(16, 3)
        self.norms = nn.ModuleList([nn.BatchNorm1d(4), nn.BatchNorm1d(16), nn.BatchNorm1d(16)])

    def forward(self, x):
        h = torch.relu(self.norms[1](self.first(self.norms[0](x))))
        return self.last(torch.relu(self.norms[2](self.hidden(h))))


class Remembering(nn.Module):
    """State of several kinds that a forward changes and reads again.

    Args:
        past: the passes are appended to it, if it is not None.
        draws: whether the forward draws numbers of Python and numpy.
    """

    def __init__(self, past: Any = None, *, draws: bool = False):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 3)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("steps", torch.tensor(0))
        self.calls, self.result, self.past, self.draws = 0, None, past, draws

    def forward(self, x):
        h = torch.relu(self.first(x))
        self.calls += 1
        self.steps += 1
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        if self.past is not None:
            self.past.append(self.calls)
            h = h + len(self.past)
        if self.draws:
            h = h * (1.0 + random.random() + np.random.rand())
        if self.result is not None:
            h = h + self.result
        self.result = h.detach().mean(0)
        return self.last(h - self.mean) * (1 + 1 / self.calls + 1 / self.steps)


def ensemble(members: int = 3, p: float = 0.0, **kwargs) -> embens.EmbeddedEnsemble:
    generator = torch.Generator().manual_seed(1)
    return embens.batch_ensemble(reference(**kwargs), members, p=p, generator=generator)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def without_time(history) -> list[dict]:
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in history.epochs]
    return rows + history.members


class Pairs(Dataset):
    """A map-style data set that is no TensorDataset."""

    def __init__(self, x, y, noise=False):
        self.x, self.y, self.noise = x, y, noise

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        x = self.x[i]
        if self.noise:
            x = x + 0.1 * torch.randn(x.shape) + 0.1 * random.random()
        return x, self.y[i]


class Recorder(Callback):
    """Record all steps, epochs and the end of a run."""

    def __init__(self):
        self.steps, self.losses, self.rates, self.epochs, self.ends = [], [], [], [], []

    def on_step(self, run):
        torch.rand(3)  # must not change the run
        self.steps.append((run.epoch, run.step, run.steps))
        self.losses.append(run.loss)
        self.rates.append(run.learning_rates())

    def on_epoch(self, run, record):
        self.epochs.append(record)

    def on_end(self, run, history):
        self.ends.append(history)


class Stop(Exception):
    """Raised by tests to interrupt a run."""


class Interrupt(Callback):
    """Raise after a number of steps, as a crash would."""

    def __init__(self, steps: int):
        self.steps = steps

    def on_gradients(self, run):
        if run.steps == self.steps:
            raise Stop
