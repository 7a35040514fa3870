"""States and seeds of the global random generators of torch, Python and numpy.

numpy is not a dependency: its generator is included once something has imported it.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def get_states() -> dict[str, Any]:
    """Return the states of all global generators as tensors, numbers and lists."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {"torch": torch.get_rng_state()}
    states["python"] = [version, list(words), gauss]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, words, position, has_gauss, gauss = numpy.random.get_state()
        states["numpy"] = [name, words.tolist(), position, has_gauss, gauss]
    return states


def set_states(states: dict[str, Any]) -> None:
    """Restore the states that :func:`get_states` returned."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"][: torch.cuda.device_count()])
    numpy = sys.modules.get("numpy")
    if "numpy" in states and numpy is not None:
        numpy.random.set_state(tuple(states["numpy"]))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators; restore their states on exit.

    Example:
        >>> before = torch.get_rng_state()
        >>> with seeded(0):
        ...     _ = torch.rand(3)
        >>> torch.equal(torch.get_rng_state(), before)
        True
    """
    before = get_states()
    try:
        torch.manual_seed(seed)
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        yield
    finally:
        set_states(before)


def combine(seed: int, *numbers: int) -> int:
    """Hash a seed and further numbers to one seed below 2⁶³ (splitmix64)."""
    value = 0x9E3779B97F4A7C15
    words = (seed & 0xFFFFFFFF, seed >> 32 & 0x7FFFFFFF, *numbers)
    for word in words:
        value = (value + word + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ value >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        value ^= value >> 31
    return value >> 1
