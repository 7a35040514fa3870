"""Training: ``fit``, its callbacks and its history."""

from embens.training.callbacks import Callback, TimeLimit, WeightAveraging
from embens.training.checkpoint import Checkpoint
from embens.training.clipping import ClipGradients, clip_gradients_
from embens.training.features import CacheFeatures
from embens.training.history import History
from embens.training.logs import CSVLog, Log
from embens.training.loop import fit
from embens.training.options import (
    Accumulate,
    Autocast,
    Batches,
    Compile,
    EarlyStopping,
    KeepBest,
    KeepLast,
    Objective,
    Options,
    ScheduleEveryStep,
    linear_decay,
)
from embens.training.run import Divergence, Run

__all__ = [
    "Accumulate",
    "Autocast",
    "Batches",
    "CSVLog",
    "CacheFeatures",
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
