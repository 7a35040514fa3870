"""Ensembles and samples for the tests of the diagnosis."""

from __future__ import annotations

import math

import torch
from torch import nn

import embens
from embens import networks

SOURCE = torch.Generator().manual_seed(7)


X, Y = torch.randn(60, 12, generator=SOURCE), torch.arange(60) % 4


IMAGES = torch.randn(12, 3, 8, 8, generator=SOURCE)


LABELS = torch.arange(12) % 4


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mlp(width: int = 64, seed: int = 0, **kwargs) -> nn.Sequential:
    kwargs = {"weight_std": math.sqrt(2), **kwargs}
    return networks.mlp(12, width, 2, 4, generator=seeded(seed), **kwargs)


def cnn(**kwargs) -> nn.Sequential:
    return networks.cnn((16, 16), outputs=4, image=8, generator=seeded(), **kwargs)


def batch_ensemble(p: float = 0.0, members: int = 8, **kwargs) -> embens.EmbeddedEnsemble:
    law = embens.laws.Shifted
    return embens.batch_ensemble(mlp(**kwargs), members, p=p, law=law, generator=seeded(1))
