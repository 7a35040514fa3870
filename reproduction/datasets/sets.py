"""Data sets as tensors.

Images are ``(sample, channel, height, width)`` in float32 from 0 to 1, targets are class indices.
Every method of :class:`DataSet` returns a new data set.

Files are searched in the folder passed as ``root`` and in its subfolder named after the data set;
without ``root``, in :func:`cache_folder`. Downloads happen only with ``download=True``.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from reproduction.datasets.download import fetch, unpack

CIFAR100_URL = "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"
CIFAR100_SHA256 = "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"
CIFAR100_SIZE = 168_513_733  # bytes of the archive
CIFAR100_FOLDER = "cifar-100-binary"
CIFAR100_FILES = ("train.bin", "test.bin", "fine_label_names.txt", "coarse_label_names.txt")
CIFAR100_CLASSES = {"coarse": 20, "fine": 100}
CIFAR100_COLUMN = {"coarse": 0, "fine": 1}  # byte of a record that has the label
CIFAR100_RECORD = 2 + 3 * 32 * 32  # coarse label, fine label, pixels by channel


class Part(NamedTuple):
    """Inputs and targets, one row per sample."""

    inputs: Tensor
    targets: Tensor

    def __repr__(self) -> str:
        return f"Part({len(self.targets)} samples of shape {tuple(self.inputs.shape[1:])})"

    def take(self, index: Tensor) -> "Part":
        """Return the samples with these indices, in their original order."""
        index = index.sort().values
        return Part(self.inputs[index], self.targets[index])


@dataclass(frozen=True)
class DataSet:
    """Train, validation and test part of a classification problem.

    Attributes:
        train: Training samples.
        validation: Validation samples, or None.
        test: Test samples.
        classes: Number of classes.
        name: Name for error messages.

    Example:
        >>> x, y = torch.rand(10, 3, 8, 8), torch.arange(10)
        >>> data = DataSet(Part(x, y), None, Part(x, y), classes=10, name="noise")
        >>> data = data.split(4, generator=torch.Generator().manual_seed(0)).downsample(4)
        >>> data.train.inputs.shape, data.validation.inputs.shape
        (torch.Size([6, 3, 4, 4]), torch.Size([4, 3, 4, 4]))
    """

    train: Part
    validation: Part | None
    test: Part
    classes: int
    name: str

    def split(self, validation: int, *, generator: torch.Generator | None = None) -> "DataSet":
        """Move randomly drawn samples from the train part to the validation part.

        Args:
            validation: Number of samples to move.
            generator: Random generator of the draw.

        Returns:
            The data set with a validation part.

        Raises:
            ValueError: If there is a validation part already, or a part would be empty.
        """
        if self.validation is not None:
            raise ValueError(
                f"{self.name} already has a validation part of {len(self.validation.targets)} "
                "samples. Split the original data set."
            )
        train, held_out = _hold_out(self.train, validation, generator)
        return replace(self, train=train, validation=held_out)

    def subset(self, *, train: int | None = None, test: int | None = None) -> "DataSet":
        """Keep the first samples of the train and test part.

        Args:
            train: Number of training samples; None keeps all.
            test: Number of test samples; None keeps all.

        Returns:
            The smaller data set.

        Raises:
            ValueError: If a number is not between 1 and the size of its part.
        """
        return replace(
            self,
            train=self._first("train", self.train, train),
            test=self._first("test", self.test, test),
        )

    def _first(self, part_name: str, part: Part, size: int | None) -> Part:
        if size is None:
            return part
        count = len(part.targets)
        if not 0 < size <= count:
            raise ValueError(
                f"{part_name} must be between 1 and {count}, the size of the {part_name} part of "
                f"{self.name}, got {size}."
            )
        return Part(part.inputs[:size], part.targets[:size])

    def standardise(self) -> "DataSet":
        """Shift and scale channels or features to mean 0 and variance 1 on the train part.

        Constant features are shifted only.

        Returns:
            The standardised data set.
        """
        axes = [axis for axis in range(self.train.inputs.ndim) if axis != 1]
        variance, mean = torch.var_mean(self.train.inputs, axes, correction=0, keepdim=True)
        scale = torch.where(variance > 0, variance, 1).sqrt()
        return self._map_inputs(lambda inputs: (inputs - mean) / scale)

    def downsample(self, size: int) -> "DataSet":
        """Average images over areas.

        Args:
            size: New height and width.

        Returns:
            The data set of smaller images.

        Raises:
            ValueError: If inputs are not images, or are smaller than ``size``.
        """
        shape = tuple(self.train.inputs.shape)
        if len(shape) != 4 or not 0 < size <= min(shape[2:]):
            raise ValueError(
                f"downsample needs images (sample, channel, height, width) of at least {size} "
                f"pixels per side, got shape {shape}. Downsample before flattening."
            )
        return self._map_inputs(lambda inputs: adaptive_avg_pool2d(inputs, size))

    def flatten(self) -> "DataSet":
        """Return the data set with each input flattened to a vector."""
        return self._map_inputs(lambda inputs: inputs.flatten(1))

    def to(self, device: torch.device | str) -> "DataSet":
        """Return the data set on a device."""
        return self._map(lambda part: Part(part.inputs.to(device), part.targets.to(device)))

    def _map_inputs(self, change: Callable[[Tensor], Tensor]) -> "DataSet":
        return self._map(lambda part: Part(change(part.inputs), part.targets))

    def _map(self, change: Callable[[Part], Part]) -> "DataSet":
        validation = None
        if self.validation is not None:
            validation = change(self.validation)
        return replace(
            self, train=change(self.train), validation=validation, test=change(self.test)
        )


def _hold_out(part: Part, size: int, generator: torch.Generator | None) -> tuple[Part, Part]:
    """Return the remaining and the held-out samples."""
    count = len(part.targets)
    if not 0 < size < count:
        raise ValueError(
            f"held-out samples must be at least 1 and fewer than all {count}, got {size}."
        )
    order = torch.randperm(count, generator=generator)
    return part.take(order[size:]), part.take(order[:size])


def digits(*, test: int = 450, generator: torch.Generator | None = None) -> DataSet:
    """Load the 1797 handwritten digits of 8 by 8 pixels that come with scikit-learn.

    Args:
        test: Number of samples drawn for the test part.
        generator: Random generator of the draw; None draws the same samples every time.

    Returns:
        The data set, without a validation part.

    Raises:
        ImportError: If scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "digits need scikit-learn. Install it: pip install 'embens[reproduction]'"
        ) from error
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    pixels, targets = load_digits(return_X_y=True)
    inputs = torch.from_numpy(pixels).float().div(16).unflatten(1, (1, 8, 8))
    samples = Part(inputs, torch.from_numpy(targets).long())
    train_part, test_part = _hold_out(samples, test, generator)
    return DataSet(train_part, None, test_part, classes=10, name="digits")


def cifar100(
    root: str | Path | None = None, *, labels: str = "fine", download: bool = False
) -> DataSet:
    """Load CIFAR-100, 32 by 32 colour images, from the official binary files.

    Args:
        root: Folder with ``train.bin`` and ``test.bin``, or with a subfolder
            ``cifar-100-binary`` that has them. The files may hold fewer records. None:
            :func:`cache_folder`.
        labels: ``"fine"`` (100 classes) or ``"coarse"`` (20 classes).
        download: Download missing files (161 MB).

    Returns:
        The data set, without a validation part.

    Raises:
        FileNotFoundError: If files are missing and ``download`` is False.
        ValueError: If a file is damaged.
    """
    if labels not in CIFAR100_CLASSES:
        raise ValueError(f"labels must be 'fine' or 'coarse', got {labels!r}.")
    folder = _find_cifar100(root, download)
    train = _read_cifar100(folder / "train.bin", labels)
    test = _read_cifar100(folder / "test.bin", labels)
    return DataSet(train, None, test, classes=CIFAR100_CLASSES[labels], name="cifar100")


def cache_folder() -> Path:
    """Return the folder of data sets: ``EMBENS_DATA``, or the platform's cache folder."""
    chosen = os.environ.get("EMBENS_DATA")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches" / "embens"
    if sys.platform == "win32":
        variable, default = "LOCALAPPDATA", "AppData/Local"
    else:
        variable, default = "XDG_CACHE_HOME", ".cache"
    return Path(os.environ.get(variable) or Path.home() / default) / "embens"


def _find_cifar100(root: str | Path | None, download: bool) -> Path:
    """Return the folder with the records; download them if they are missing and allowed."""
    root = cache_folder() if root is None else Path(root).expanduser()
    folder = root / CIFAR100_FOLDER
    for candidate in (folder, root):
        if _has_records(candidate):
            return candidate
    if not download:
        raise FileNotFoundError(
            f"CIFAR-100 was not found: expected train.bin and test.bin in {root} or {folder}. "
            "Pass the folder that has them, or allow the download."
        )
    root.mkdir(parents=True, exist_ok=True)
    # Concurrent processes wait here; the first one downloads.
    with FileLock(root / f".{CIFAR100_FOLDER}.lock"):
        if not _has_records(folder):
            archive = fetch(
                CIFAR100_URL,
                root / f"{CIFAR100_FOLDER}.tar.gz",
                sha256=CIFAR100_SHA256,
                size=CIFAR100_SIZE,
            )
            unpack(archive, folder, CIFAR100_FILES)
    return folder


def _has_records(folder: Path) -> bool:
    return (folder / "train.bin").is_file() and (folder / "test.bin").is_file()


def _read_cifar100(path: Path, labels: str) -> Part:
    size = path.stat().st_size
    advice = "Replace it with the official file, or download it again."
    if size == 0 or size % CIFAR100_RECORD:
        raise ValueError(
            f"{path} must consist of records of {CIFAR100_RECORD} bytes, got {size} bytes. {advice}"
        )
    content = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    records = content.view(-1, CIFAR100_RECORD)
    targets = records[:, CIFAR100_COLUMN[labels]].long()
    classes = CIFAR100_CLASSES[labels]
    if int(targets.max()) >= classes:
        raise ValueError(
            f"{path} must have labels from 0 to {classes - 1}, got {int(targets.max())}. {advice}"
        )
    pixels = records[:, 2:].view(-1, 3, 32, 32)
    return Part(pixels.float().div(255), targets)
