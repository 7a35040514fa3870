"""The global generators that a run draws from: of torch, Python and, once imported, numpy."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def get_states() -> dict[str, Any]:
    """Return the states of all global generators, as tensors, numbers and lists."""
    version, words, spare = random.getstate()
    states: dict[str, Any] = {"torch": torch.get_rng_state()}
    states["python"] = [version, list(words), spare]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, words, *rest = numpy.random.get_state()
        states["numpy"] = [kind, words.tolist(), *rest]
    return states


def set_states(states: dict[str, Any]) -> None:
    """Put the generators back to where they were."""
    version, words, spare = states["python"]
    random.setstate((version, tuple(words), spare))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"][: torch.cuda.device_count()])
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(tuple(states["numpy"]))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators, and restore them at the end."""
    before = get_states()
    try:
        torch.manual_seed(seed)
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed % 2**32)
        yield
    finally:
        set_states(before)


def combine(seed: int, *more: int) -> int:
    """Return one seed made of several numbers; different ones give unrelated seeds."""
    value = 0x9E3779B97F4A7C15
    for word in (seed & 0xFFFFFFFF, seed >> 32 & 0x7FFFFFFF, *more):  # splitmix64
        value = (value + word + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ value >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        value ^= value >> 31
    return value >> 1
