"""Training: ``fit``, its callbacks and its history."""

from embens.training.averaging import WeightAveraging
from embens.training.callbacks import Callback, CSVLog, Log
from embens.training.checkpoint import Checkpoint
from embens.training.clipping import ClipGradients, clip_gradients_
from embens.training.history import History
from embens.training.loop import fit
from embens.training.options import (
    Accumulate,
    Autocast,
    Batches,
    Compile,
    KeepBest,
    KeepLast,
    Objective,
    Options,
    ScheduleEveryStep,
)
from embens.training.run import Divergence, Run
from embens.training.schedule import linear_decay
from embens.training.stopping import EarlyStopping, TimeLimit

__all__ = [
    "Accumulate",
    "Autocast",
    "Batches",
    "CSVLog",
    "Callback",
    "Checkpoint",
    "ClipGradients",
    "Compile",
    "Divergence",
    "EarlyStopping",
    "History",
    "KeepBest",
    "KeepLast",
    "Log",
    "Objective",
    "Options",
    "Run",
    "ScheduleEveryStep",
    "TimeLimit",
    "WeightAveraging",
    "clip_gradients_",
    "fit",
    "linear_decay",
]
