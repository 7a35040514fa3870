"""Settings: data, reference network and training that all cells of a run share.

A preset is a :class:`Setting`. A setting contains everything that can change a measurement,
including the number of threads, the device and a fingerprint of the data. It does not contain the
data folder, which comes from the environment variable ``EMBENS_DATA``.

Learning rates and the number of epochs are chosen on validation data by the experiment ``tuning``
and recorded in ``choices.json``, which :data:`PRESETS` reads. The learning rates of ``compare`` are
chosen by ``compare-rates`` and recorded in the same file.
"""

import functools
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from embens import networks
from reproduction.datasets import DataSet, cifar100, digits

NETWORKS, MODULATIONS, SIGNS = "networks", "modulations", "signs"
DROPOUT, LAST_LAYER, LOW_RANK = "dropout", "last layer", "low rank"
"""Families with separate learning rates; ``networks`` are single and separate ones."""


@dataclass(frozen=True)
class Setting:
    """Data, network and training of one preset.

    Attributes:
        preset: Name of the preset.
        data: ``"digits"`` or ``"cifar100"``.
        labels: Labels of CIFAR-100, ``"fine"`` or ``"coarse"``.
        image: Height and width to which images are downsampled.
        pool: Number of training records that are read, the first ones; 0: all of them.
        train: Number of training samples, the first ones after the validation part was drawn.
        validation: Number of training samples that are held out at random.
        test: Number of test samples.
        network: ``"mlp"``, ``"cnn"`` (of the paper), or ``"norm-cnn"`` (with batch norm).
        channels: Units or channels of the hidden layers at relative width 1.
        parametrization: Parametrization of the weights; see :mod:`embens.networks`.
        weight_std: Standard deviation of the weights in units of the parametrization.
        epochs: Number of epochs.
        batch_size: Samples per step.
        lr: Learning rate of families without a rate in ``rates``.
        rates: Learning rates of families as pairs ``(family, rate)``.
        weight_decay: Weight decay of the shared weights.
        augment: Largest shift of training images in pixels; they are flipped as well. 0: none.
        precision: Type of the passes in training, ``"float32"`` or ``"bfloat16"``.
        channels_last: Whether images have their channels last in memory, which GPUs prefer.
        chunk: Members that run together in training; 0: all of them.
        threads: Number of threads of one cell.
        device: Device of one cell.
        records: Fingerprint of the data, set by :func:`with_fingerprint`.
    """

    preset: str = "quick"
    data: str = "digits"
    labels: str = "fine"
    image: int = 8
    pool: int = 0
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
    rates: tuple[tuple[str, float], ...] = ()
    weight_decay: float = 5e-4
    augment: int = 0
    precision: str = "float32"
    channels_last: bool = False
    chunk: int = 0
    threads: int = 1
    device: str = "cpu"
    records: str = ""

    def rate_of(self, family: str) -> float:
        """Return the learning rate that was chosen for a family, or ``lr`` if none was."""
        return dict(self.rates).get(family, self.lr)


CHOICES = Path(__file__).parent.parent / "choices.json"
"""Learning rates and numbers of epochs that ``python -m reproduction record`` has written."""

_PAPER = Setting(
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
    precision="bfloat16",
    channels_last=True,
    chunk=10,
)
# Small networks learn within few epochs only if ReLU preserves the scale of signals (weight_std √2,
# "standard"). The paper uses Xavier weights and hundreds of epochs.
UNTUNED = {
    "quick": Setting(),
    "cpu": Setting(
        preset="cpu",
        data="cifar100",
        labels="coarse",
        image=16,
        # A folder with the first records gives the same samples as the whole archive.
        pool=20_000,
        train=10_000,
        validation=2_000,
        test=5_000,
        network="cnn",
        channels=(16, 32, 64, 128),
        epochs=30,
        batch_size=128,
        lr=0.05,
        augment=2,
        precision="bfloat16",
        channels_last=True,
    ),
    "gpu": replace(_PAPER, preset="gpu", epochs=200),
    "paper": _PAPER,
}
"""Settings by name, without the recorded choices."""

Value = TypeVar("Value")


def of_preset(values: Mapping[str, Value], preset: str) -> Value:
    """Return the value of a preset; ``gpu`` uses the value of ``paper`` by default."""
    if preset == "gpu" and "gpu" not in values:
        preset = "paper"
    return values[preset]


def read_choices(path: Path = CHOICES) -> dict[str, Any]:
    """Return the recorded choices by preset; empty without a file."""
    if not path.exists():
        return {}
    return json.loads(path.read_text())


def with_choice(setting: Setting, choice: Mapping[str, Any] | None) -> Setting:
    """Return a setting with the recorded number of epochs and learning rates.

    Args:
        setting: A setting.
        choice: ``epochs`` and ``rates`` by family; without ``epochs`` nothing changes.
    """
    if choice is None or "epochs" not in choice:
        return setting
    rates = tuple(sorted(choice["rates"].items()))
    return replace(setting, epochs=choice["epochs"], rates=rates)


def recorded_rates(experiment: str, preset: str) -> tuple[tuple[str, float], ...]:
    """Return the recorded learning rates of an experiment with a separate tuning.

    Args:
        experiment: Name of the experiment.
        preset: Name of the preset.

    Returns:
        Pairs ``(system, rate)``; empty without a record.
    """
    choice = read_choices().get(preset, {}).get(experiment, {})
    return tuple(sorted(choice.get("rates", {}).items()))


def _make_presets() -> dict[str, Setting]:
    choices = read_choices()
    return {name: with_choice(each, choices.get(name)) for name, each in UNTUNED.items()}


PRESETS = _make_presets()
"""Settings by name, with the recorded choices."""


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
    elif setting.network == "norm-cnn":
        network = build_norm_cnn(setting, width, image_channels, classes, generator)
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


def build_norm_cnn(
    setting: Setting,
    width: float,
    inputs: int,
    outputs: int,
    generator: torch.Generator | None,
) -> nn.Module:
    """Return the paper's network with batch norm and a mean over pixels before the last layer."""
    layers: list[nn.Module] = []
    channels = inputs
    for number, count in enumerate(setting.channels):
        wider = max(1, round(width * count))
        layers.append(nn.Conv2d(channels, wider, 3, padding=1, bias=False))
        layers += [nn.BatchNorm2d(wider), nn.ReLU()]
        if number < len(setting.channels) - 1:
            layers.append(nn.AvgPool2d(2))
        channels = wider
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, outputs)]
    network = nn.Sequential(*layers)
    for layer in network:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return network


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
    if setting.pool:
        pool = min(setting.pool, len(data.train.targets))
        data = data.subset(train=pool, test=len(data.test.targets))
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
