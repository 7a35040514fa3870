"""The set-up that all cells of a run share: data, reference network, training.

A preset is a :class:`Setting`; an experiment sweeps what its cells add to it. Everything that can
change a number is in it, down to the threads, the device and a fingerprint of the data's records.
Where the files are is not: the folder comes from ``EMBENS_DATA``.
"""

import functools
import hashlib
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from embens import networks
from reproduction import datasets as data
from reproduction.datasets import DataSet


@dataclass(frozen=True)
class Setting:
    """Data, network and training of one preset."""

    preset: str = "quick"
    data: str = "digits"  # or "cifar100"
    labels: str = "fine"  # of CIFAR-100, or "coarse"
    image: int = 8  # height and width that images are averaged to
    train: int = 1347  # samples, the first ones of the data after validation was drawn
    validation: int = 0  # samples drawn at random from the train part and held out
    test: int = 450
    network: str = "mlp"  # or "cnn"
    channels: tuple[int, ...] = (16, 16, 16)  # units of hidden layers at relative width 1
    parametrization: str = "standard"  # see embens.networks
    weight_std: float = math.sqrt(2)
    epochs: int = 60
    batch_size: int = 64
    lr: float = 0.003  # chosen once for a single network
    weight_decay: float = 5e-4  # of the shared weights
    threads: int = 1  # of one cell
    device: str = "cpu"
    records: str = ""  # fingerprint of the data that were read


# Rates were chosen once: the largest at which a single network (M=1) fits its train data well
# within the epochs and the largest collective ensembles (p=0.9, γ=M) still train. Small networks
# learn in few epochs only if ReLU keeps the size of signals (weight_std √2, "standard"); the
# paper's own has Xavier weights and hundreds of epochs.
PRESETS = {
    "quick": Setting(),
    "cpu": Setting(
        preset="cpu",
        data="cifar100",
        labels="coarse",
        image=16,
        train=1000,
        test=2000,
        network="cnn",
        channels=(8, 16, 32, 64),
        epochs=80,
        batch_size=32,
        lr=0.02,
    ),
    "paper": Setting(
        preset="paper",
        data="cifar100",
        labels="fine",
        image=32,
        train=40_000,
        validation=10_000,
        test=10_000,
        network="cnn",
        channels=(64, 128, 256, 512),
        parametrization="xavier",
        weight_std=1.0,
        epochs=1000,
        batch_size=128,
        lr=0.01,
    ),
}

_CLASSES = {"fine": 100, "coarse": 20}


def reference(setting: Setting, width: float = 1.0, *, generator: Any = None) -> nn.Module:
    """Return the reference network at a relative width."""
    channels, image = setting.channels, setting.image
    inputs, outputs = (1, 10) if setting.data == "digits" else (3, _CLASSES[setting.labels])
    law = {"weight_std": setting.weight_std, "parametrization": setting.parametrization}
    if setting.network == "cnn":
        make = partial(networks.cnn, channels, width, inputs=inputs, outputs=outputs, image=image)
    else:
        units = max(1, round(width * channels[0]))
        make = partial(networks.mlp, inputs * image**2, units, len(channels), outputs)
    return make(**law, generator=generator).to(setting.device)


def count_parameters(module: nn.Module) -> int:
    """Return how many numbers a module trains."""
    return sum(p.numel() for p in module.parameters())


@functools.lru_cache(maxsize=4)
def data_set(setting: Setting) -> DataSet:
    """Return the data, standardised, on the device; read once in a process."""
    found = _read(setting).standardise()
    return (found.flatten() if setting.network == "mlp" else found).to(setting.device)


def _read(setting: Setting) -> DataSet:
    found = data.digits() if setting.data == "digits" else data.cifar100(labels=setting.labels)
    if setting.validation:
        held = min(setting.validation, len(found.train.targets) // 5)
        found = found.split(held, generator=torch.Generator().manual_seed(0))
    train, test = len(found.train.targets), len(found.test.targets)
    found = found.subset(train=min(setting.train, train), test=min(setting.test, test))
    smaller = setting.image < found.train.inputs.shape[-1]
    return found.downsample(setting.image) if smaller else found


def fingerprint(setting: Setting) -> Setting:
    """Return the setting with the fingerprint of its data; digits, from a library, need none."""
    if setting.data == "digits":
        return setting
    hashed = hashlib.sha256()
    found = _read(setting)
    for part in (found.train, found.test):
        hashed.update(part.inputs.contiguous().numpy().tobytes())
        hashed.update(part.targets.numpy().tobytes())
    return replace(setting, records=hashed.hexdigest()[:16])
