"""What needs a newer torch than the oldest supported one is skipped there, with the reason."""

from __future__ import annotations

import re

import pytest
import torch

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
