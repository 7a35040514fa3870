"""Fixed seeds, tests that need a newer torch, and folded forms that must be right."""

from __future__ import annotations

import os
import random
import re
from typing import Any

import numpy
import pytest
import torch

from embens.ensemble import crosscheck

NEEDS = {  # the part of a test's name: the torch that it needs, what for
    r"ensemble/.*(compil|export)": ((2, 10), "to compile or export a whole ensemble"),
    r"\[Adam, decoupled": ((2, 7), "for Adam(decoupled_weight_decay=True)"),
}
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for pattern, (version, what) in NEEDS.items():
            if version > TORCH and re.search(pattern, item.nodeid):
                reason = f"needs torch {version[0]}.{version[1]} {what}"
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)  # before fixtures of any scope
def pytest_runtest_setup() -> None:
    """Seed the global generators; results depend neither on the order nor on the worker."""
    seed = int(os.environ.get("SEED", "0"))
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def folded_forms_are_right(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a folded form differs from a plain member.

    Users get the merged form then, which would hide the mistake from the tests.
    """
    if request.path.name == "test_crosscheck.py" or "zoo" in request.path.parts:
        return  # norm layers over two values turn the rounding of large networks into differences
    find_difference = crosscheck.find_difference

    def find_no_difference(*args: Any, **kwargs: Any) -> str:
        difference = find_difference(*args, **kwargs)
        if difference.startswith("its folded form"):
            raise AssertionError(difference)
        return difference

    monkeypatch.setattr(crosscheck, "find_difference", find_no_difference)
