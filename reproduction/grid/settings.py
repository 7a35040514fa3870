"""Settings: data, reference network and training that all cells of a run share.

A preset is a :class:`Setting`. A setting contains everything that can change a measurement,
including the number of threads, the device and a fingerprint of the data. It does not contain the
data folder, which comes from the environment variable ``EMBENS_DATA``.
"""

import functools
import hashlib
import math
from dataclasses import dataclass, replace

import torch
from torch import nn

from embens import networks
from reproduction.datasets import DataSet, cifar100, digits


@dataclass(frozen=True)
class Setting:
    """Data, network and training of one preset.

    Attributes:
        preset: Name of the preset.
        data: ``"digits"`` or ``"cifar100"``.
        labels: Labels of CIFAR-100, ``"fine"`` or ``"coarse"``.
        image: Height and width to which images are downsampled.
        train: Number of training samples, the first ones after the validation part was drawn.
        validation: Number of training samples that are held out at random.
        test: Number of test samples.
        network: ``"mlp"`` or ``"cnn"``.
        channels: Units or channels of the hidden layers at relative width 1.
        parametrization: Parametrization of the weights; see :mod:`embens.networks`.
        weight_std: Standard deviation of the weights in units of the parametrization.
        epochs: Number of epochs.
        batch_size: Samples per step.
        lr: Learning rate, chosen once for a single network.
        weight_decay: Weight decay of the shared weights.
        threads: Number of threads of one cell.
        device: Device of one cell.
        records: Fingerprint of the data, set by :func:`with_fingerprint`.
    """

    preset: str = "quick"
    data: str = "digits"
    labels: str = "fine"
    image: int = 8
    train: int = 1347
    validation: int = 0
    test: int = 450
    network: str = "mlp"
    channels: tuple[int, ...] = (16, 16, 16)
    parametrization: str = "standard"
    weight_std: float = math.sqrt(2)
    epochs: int = 60
    batch_size: int = 64
    lr: float = 0.003
    weight_decay: float = 5e-4
    threads: int = 1
    device: str = "cpu"
    records: str = ""


# The learning rates were chosen once: the largest rate at which a single network (M=1) fits its
# training data within the epochs and the largest collective ensembles (p=0.9, γ=M) still train.
# Small networks learn within few epochs only if ReLU preserves the scale of signals (weight_std √2,
# "standard"). The paper uses Xavier weights and hundreds of epochs.
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


def build_reference(
    setting: Setting, width: float = 1.0, *, generator: torch.Generator | None = None
) -> nn.Module:
    """Return the reference network of a setting.

    Args:
        setting: The setting.
        width: Width relative to the setting's.
        generator: Random generator of the weights.

    Returns:
        The network on the setting's device.
    """
    if setting.data == "digits":
        image_channels, classes = 1, 10
    elif setting.labels == "coarse":
        image_channels, classes = 3, 20
    else:
        image_channels, classes = 3, 100
    if setting.network == "cnn":
        network = networks.cnn(
            setting.channels,
            width,
            inputs=image_channels,
            outputs=classes,
            image=setting.image,
            weight_std=setting.weight_std,
            parametrization=setting.parametrization,
            generator=generator,
        )
    else:
        network = networks.mlp(
            inputs=image_channels * setting.image**2,
            width=max(1, round(width * setting.channels[0])),
            depth=len(setting.channels),
            outputs=classes,
            weight_std=setting.weight_std,
            parametrization=setting.parametrization,
            generator=generator,
        )
    return network.to(setting.device)


def count_parameters(module: nn.Module) -> int:
    """Return the number of scalar parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


@functools.lru_cache(maxsize=4)
def load_data(setting: Setting) -> DataSet:
    """Return the standardised data of a setting, on its device; cached per process."""
    data = _read(setting).standardise()
    if setting.network == "mlp":
        data = data.flatten()
    return data.to(setting.device)


def _read(setting: Setting) -> DataSet:
    data = digits() if setting.data == "digits" else cifar100(labels=setting.labels)
    if setting.validation:
        # Small folders of records hold out at most a fifth.
        held_out = min(setting.validation, len(data.train.targets) // 5)
        data = data.split(held_out, generator=torch.Generator().manual_seed(0))
    train = min(setting.train, len(data.train.targets))
    test = min(setting.test, len(data.test.targets))
    data = data.subset(train=train, test=test)
    if setting.image < data.train.inputs.shape[-1]:
        data = data.downsample(setting.image)
    return data


def with_fingerprint(setting: Setting) -> Setting:
    """Return the setting with a fingerprint of its data.

    Digits are part of scikit-learn and need no fingerprint.

    Args:
        setting: The setting.

    Returns:
        The setting with ``records`` set.
    """
    if setting.data == "digits":
        return setting
    digest = hashlib.sha256()
    data = _read(setting)
    for part in (data.train, data.test):
        digest.update(part.inputs.contiguous().numpy().tobytes())
        digest.update(part.targets.numpy().tobytes())
    return replace(setting, records=digest.hexdigest()[:16])
