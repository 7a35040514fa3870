"""Data sets as tensors.

Images are ``(sample, channel, height, width)`` in float32 from 0 to 1, targets are class indices.
What prepares them is a method of :class:`DataSet` that returns a new one.

Files are looked for in the folder that is passed as ``root``, or in one named after the data set
within it; without ``root``, in :func:`cache_folder`. Nothing is downloaded unless asked for
(``download=True``), and nothing downloaded is used before its checksum is right.

Not here: augmentation, and data too large for memory; ``embens.fit`` takes any ``DataLoader``.
"""

import gzip
import math
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from filelock import FileLock
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from embens.checks import check_choice
from reproduction.datasets.download import fetch, unpack

_CIFAR100 = (
    "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
    "03b5dce01913d631647c71ecec9e9cb8",
)
_CIFAR100_FILES = ("train.bin", "test.bin", "fine_label_names.txt", "coarse_label_names.txt")
_CIFAR100_CLASSES = {"coarse": 20, "fine": 100}  # in the order of their bytes in a record
_CIFAR100_RECORD = 2 + 3 * 32 * 32  # coarse label, fine label, pixels by channel
_IDX_FILES = tuple(
    f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
)
_IDX_MOST = 2**27  # bytes; MNIST has 47 million
_MNIST = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/ "
    "f68b3c2dcbeaaa9fbdd348bbdeb94873 d53e105ee54ea40749a09fcbcd1e9432 "
    "9fb629c4189551a2d022fa330f9573f3 ec29112dd5afa0611ce80d1b7f02629c"
).split()
_FASHION_MNIST = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/ "
    "8d4fb7e6c68d591d4c3dfef9ec88bf0d 25c81989df183df01b3e8a0aad5dffbe "
    "bef4ecab320f06d8554ea6380940ec79 bb300cfdad3c16e7a12a480ee83cd310"
).split()


class Part(NamedTuple):
    """Inputs and their targets, a row for each sample."""

    inputs: Tensor
    targets: Tensor

    def __repr__(self) -> str:
        return f"Part({len(self.targets)} samples of shape {tuple(self.inputs.shape[1:])})"

    def take(self, index: Tensor) -> "Part":
        """Return these samples, in the order that they have here."""
        index = index.sort().values
        return Part(self.inputs[index], self.targets[index])


@dataclass(frozen=True)
class DataSet:
    """Train, validation and test part of a classification problem with so many ``classes``.

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
        """Move this many samples, drawn at random, from the train part to the validation part."""
        if self.validation is not None:
            got = f"got one of {len(self.validation.targets)} samples; split it as it was loaded"
            raise ValueError(f"split: expected {self.name} without a validation part, {got}")
        train, held = _hold_out(self.train, validation, generator)
        return replace(self, train=train, validation=held)

    def subset(
        self,
        *,
        train: int | None = None,
        validation: int | None = None,
        test: int | None = None,
        generator: torch.Generator | None = None,
    ) -> "DataSet":
        """Keep so many samples of each part: the first ones, or drawn if there is a generator."""
        parts = {}
        for name, size in {"train": train, "validation": validation, "test": test}.items():
            part: Part | None = getattr(self, name)
            count = 0 if part is None else len(part.targets)
            if size is not None:
                if part is None or not 0 < size <= count:
                    has = f"the {count} samples that the {name} part of {self.name} has"
                    raise ValueError(f"{name}: expected at most {has}, and at least 1, got {size}")
                drawn = generator is not None
                order = torch.randperm(count, generator=generator) if drawn else torch.arange(count)
                parts[name] = part.take(order[:size])
        return replace(self, **parts)

    def standardise(self) -> "DataSet":
        """Shift and scale channels or features to mean 0 and variance 1 (or 0) in train."""
        axes = [axis for axis in range(self.train.inputs.ndim) if axis != 1]
        variance, mean = torch.var_mean(self.train.inputs, axes, correction=0, keepdim=True)
        scale = torch.where(variance > 0, variance, 1).sqrt()
        return self._map(lambda inputs: inputs.sub(mean).div_(scale))

    def downsample(self, size: int) -> "DataSet":
        """Average images over areas, to this height and width."""
        shape = tuple(self.train.inputs.shape)
        if len(shape) != 4 or not 0 < size <= min(shape[2:]):
            images = f"images (sample, channel, height, width) of at least {size} pixels a side"
            advice = "downsample before flattening, and only to fewer pixels"
            raise ValueError(f"size: expected {images}, got shape {shape}; {advice}")
        return self._map(lambda inputs: adaptive_avg_pool2d(inputs, size))

    def flatten(self) -> "DataSet":
        """Make each input a vector."""
        return self._map(lambda inputs: inputs.flatten(1))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None):
        """Return it with inputs and targets on a device, and inputs of a floating type."""
        return self._map(lambda x: x.to(device=device, dtype=dtype), device)

    def _map(self, change: Callable[[Tensor], Tensor], device=None) -> "DataSet":
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        for name, part in parts.items():
            parts[name] = part and Part(change(part.inputs), part.targets.to(device=device))
        return replace(self, **parts)


def _hold_out(part: Part, size: int, generator: torch.Generator | None) -> tuple[Part, Part]:
    count = len(part.targets)
    if not 0 < size < count:
        expected = f"expected to hold out at least 1 sample and fewer than all {count}"
        raise ValueError(f"{expected}, got {size}; choose another size")
    order = torch.randperm(count, generator=generator)
    return part.take(order[size:]), part.take(order[:size])


def digits(*, test: int = 450, generator: torch.Generator | None = None) -> DataSet:
    """Load the 1797 handwritten digits of 8 by 8 pixels that come with scikit-learn.

    ``test`` samples are drawn for the test part, always the same ones if there is no generator.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        needed = "digits come with scikit-learn; install it with: pip install 'embens[data]'"
        raise ImportError(needed) from error
    pixels, targets = load_digits(return_X_y=True)
    inputs = torch.from_numpy(pixels).float().div_(16).unflatten(1, (1, 8, 8))
    whole = Part(inputs, torch.from_numpy(targets).long())
    train, held = _hold_out(whole, test, generator or torch.Generator().manual_seed(0))
    return DataSet(train, None, held, classes=10, name="digits")


def cifar100(
    root: str | Path | None = None, *, labels: str = "fine", download: bool = False
) -> DataSet:
    """Load CIFAR-100, 32 by 32 pixels in colour, from the official binary files (161 MB).

    They are ``train.bin`` and ``test.bin`` in ``root`` or in its folder ``cifar-100-binary``, and
    may hold fewer records. Labels are ``"fine"`` (100 classes) or ``"coarse"`` (20).
    """
    check_choice("labels", labels, _CIFAR100_CLASSES)
    files, fetch_into = _CIFAR100_FILES[:2], _fetch_cifar100 if download else None
    folder = _find(root, "cifar-100-binary", files, fetch_into)
    train, test = (_read_cifar100(folder / name, labels) for name in files)
    return DataSet(train, None, test, classes=_CIFAR100_CLASSES[labels], name="cifar100")


def mnist(root: str | Path | None = None, *, download: bool = False) -> DataSet:
    """Load MNIST, 28 by 28 pixels, from its four IDX files, plain or with gzip (12 MB)."""
    return _load_idx("mnist", root, _MNIST if download else None)


def fashion_mnist(root: str | Path | None = None, *, download: bool = False) -> DataSet:
    """Load Fashion-MNIST, 28 by 28 pixels, from its four IDX files, plain or with gzip (31 MB)."""
    return _load_idx("fashion-mnist", root, _FASHION_MNIST if download else None)


def cache_folder() -> Path:
    """Return where data sets are kept: ``EMBENS_DATA``, or as the platform has it."""
    if os.environ.get("EMBENS_DATA"):
        return Path(os.environ["EMBENS_DATA"]).expanduser()
    places = {"darwin": ("", "Library/Caches"), "win32": ("LOCALAPPDATA", "AppData/Local")}
    name, usual = places.get(sys.platform, ("XDG_CACHE_HOME", ".cache"))
    return Path(os.environ.get(name) or Path.home() / usual) / "embens"


def _find(root: str | Path | None, name: str, files: Sequence[str], fetch_into: Any) -> Path:
    """Return the folder with the files, after fetching them if there is none."""
    root = cache_folder() if root is None else Path(root).expanduser()
    for folder in (root / name, root):
        if all(_path(folder, file) for file in files):
            return folder
    folder = root / name
    if fetch_into is None:
        raise FileNotFoundError(
            f"{name}: expected the files {', '.join(files)} in {root} or {folder}, "
            "got not all in either; pass the folder that has them as root, or download=True"
        )
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f".{name}.lock"):
        if not all(_path(folder, file) for file in files):
            fetch_into(folder)
    return folder


def _path(folder: Path, file: str) -> Path | None:
    """Return the path of a file, if there is one; those of the IDX format may be compressed."""
    names = [file, f"{file}.gz"] if file in _IDX_FILES else [file]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _fetch_cifar100(folder: Path) -> None:
    url, md5 = _CIFAR100
    archive = fetch(url, folder.with_name(url.rpartition("/")[2]), md5=md5)
    unpack(archive, folder, _CIFAR100_FILES)


def _read_cifar100(path: Path, labels: str) -> Part:
    size = path.stat().st_size
    if not size or size % _CIFAR100_RECORD:
        _refuse(path, f"records of {_CIFAR100_RECORD} bytes", f"{size} bytes")
    content = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    records = content.view(-1, _CIFAR100_RECORD)
    targets = records[:, list(_CIFAR100_CLASSES).index(labels)]
    return _part(path, records[:, 2:].view(-1, 3, 32, 32), targets, _CIFAR100_CLASSES[labels])


def _fetch_idx(source: Sequence[str], folder: Path) -> None:
    for file, md5 in zip(_IDX_FILES, source[1:], strict=True):
        if not _path(folder, file):
            fetch(f"{source[0]}{file}.gz", folder / f"{file}.gz", md5=md5)


def _load_idx(name: str, root: str | Path | None, source: Sequence[str] | None) -> DataSet:
    folder = _find(root, name, _IDX_FILES, partial(_fetch_idx, source) if source else None)
    parts = []
    for images, labels in (_IDX_FILES[:2], _IDX_FILES[2:]):
        pixels, targets = _read_idx(folder, images, 3), _read_idx(folder, labels, 1)
        if len(pixels) != len(targets):
            got = f"{len(pixels)} images in {images} and {len(targets)} labels in {labels}"
            _refuse(folder, "a label for each image", got)
        parts.append(_part(folder / labels, pixels.unsqueeze(1), targets, 10))
    return DataSet(parts[0], None, parts[1], classes=10, name=name)


def _read_idx(folder: Path, file: str, axes: int) -> Tensor:
    """Read bytes in the IDX format: 0, 0, 8 (for bytes), axes, sizes in 4 bytes each, values."""
    path, start = _path(folder, file) or folder / file, 4 + 4 * axes
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as opened:
            content = bytearray(opened.read(start))
            shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
            expected = start + math.prod(shape)
            content += opened.read(min(expected - start, _IDX_MOST) + 1)  # gzip may hold anything
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        _refuse(path, "a whole gzip file", str(error))
    begin = bytes((0, 0, 8, axes))
    if content[:4] != begin or len(content) != expected or 0 in shape:
        bytes_of = f"IDX bytes that begin {begin!r} and {expected} bytes for shape {tuple(shape)}"
        _refuse(path, bytes_of, f"{bytes(content[:4])!r} and {len(content)} bytes")
    return torch.frombuffer(content, dtype=torch.uint8, offset=start).view(shape)


def _part(path: Path, pixels: Tensor, targets: Tensor, classes: int) -> Part:
    if int(targets.max()) >= classes:
        _refuse(path, f"labels from 0 to {classes - 1}", str(int(targets.max())))
    return Part(pixels.float().div_(255), targets.long())


def _refuse(path: Path, expected: str, got: str) -> NoReturn:
    cut = "it is cut, damaged or another one: replace it by the official one, or download it again"
    raise ValueError(f"{path}: expected {expected}, got {got}; {cut}")
