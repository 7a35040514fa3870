"""Classification with unknown classes, and processor times, for comparisons of systems."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor

from reproduction.datasets import DataSet, Part
from reproduction.grid.settings import Setting, load_data

Result = TypeVar("Result")


@dataclass(frozen=True)
class Problem:
    """Images without the classes that are left out, and test images of those classes.

    Attributes:
        data: Data of the known classes.
        unknown: Test images of the other classes.
    """

    data: DataSet
    unknown: Tensor


@functools.lru_cache(maxsize=2)
def load_problem(setting: Setting) -> Problem:
    """Return the data of a setting with the last fifth of the classes left out."""
    data = load_data(replace(setting, network="cnn"))
    known_classes = data.classes - max(1, data.classes // 5)

    def keep_known(part: Part) -> Part:
        index = (part.targets < known_classes).nonzero().squeeze(1)
        return part.take(index)

    unknown = data.test.inputs[data.test.targets >= known_classes]
    validation = None
    if data.validation is not None:
        validation = keep_known(data.validation)
    known = replace(
        data, train=keep_known(data.train), validation=validation, test=keep_known(data.test)
    )
    return Problem(known, unknown)


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """Return a result and its processor time, which other processes disturb least."""
    process_start, wall_start = time.process_time(), time.perf_counter()
    result = work()
    seconds = time.process_time() - process_start
    if seconds == 0:  # shorter than a tick of the processor's clock
        seconds = time.perf_counter() - wall_start
    return result, seconds
