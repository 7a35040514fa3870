"""A stand-in for torchvision, which timm imports: what its models need, and names for the rest."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn


class FrozenBatchNorm2d(nn.Module):
    """BatchNorm with fixed statistics, all of it buffers."""

    def __init__(self, num_features: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        for name, value in (("weight", 1.0), ("bias", 0.0), ("mean", 0.0), ("var", 1.0)):
            name = name if name in ("weight", "bias") else f"running_{name}"
            self.register_buffer(name, torch.full((num_features,), value))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale[:, None, None] + shift[:, None, None]


class _Names(ModuleType):
    """A module that has every name."""

    __path__ = ()

    def __getattr__(self, name: str) -> MagicMock:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


@contextmanager
def stand_in() -> Iterator[None]:
    """Let ``import torchvision`` find the stand-in, for as long as the context is open."""
    parts = ("", ".datasets", ".ops", ".ops.misc", ".transforms", ".transforms.functional")
    modules = {f"torchvision{part}": _Names(f"torchvision{part}") for part in parts}
    modules["torchvision.ops.misc"].FrozenBatchNorm2d = FrozenBatchNorm2d
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
