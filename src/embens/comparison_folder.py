"""The folder of a comparison, which continues the same comparison only."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from embens.files.atomic import write_atomically
from embens.files.tensors import checksum
from embens.training.batches import batches_of

FILE = "comparison.json"


def open_folder(
    folder: str | os.PathLike[str], names: Iterable[str], data: Mapping[str, Any]
) -> Path:
    """Create the folder of a comparison, or check that it belongs to the same comparison.

    Checkpoints of the runs are checked by :class:`embens.training.Checkpoint`, which knows neither
    the names of the candidates nor the values of the data.

    Args:
        folder: The folder.
        names: Names of the candidates in their order.
        data: Train, validation and test data by name.

    Returns:
        The folder.

    Raises:
        ValueError: If the folder belongs to another comparison.
        NotADirectoryError: If the folder, or one of its parents, is a file or a broken link.
    """
    identity: dict[str, Any] = {"candidates": list(names)}
    for part, values in data.items():
        identity[f"{part} data"] = _describe_data(values)
    path = Path(folder) / FILE
    for place in (path.parent, *path.parent.parents):
        if os.path.lexists(place) and not place.is_dir():
            raise NotADirectoryError(
                errno.ENOTDIR, "A comparison needs a folder. Choose another path", str(place)
            )
    if path.exists():
        saved = _read_identity(path)
        for name, value in identity.items():
            if saved.get(name) != value:
                raise ValueError(
                    f"folder {str(folder)!r} belongs to a comparison with other {name}: "
                    f"{saved.get(name)} before, {value} now. Use the same arguments to continue "
                    "it, or another folder to start again."
                )
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(identity))
    return path.parent


def _read_identity(path: Path) -> dict[str, Any]:
    """Return what describes the comparison of a folder."""
    try:
        saved = json.loads(path.read_text())
    except (ValueError, RecursionError, IsADirectoryError):
        saved = None
    if not isinstance(saved, dict):
        raise ValueError(
            f"{str(path)!r} is damaged. Use another folder, or delete this one to start again."
        )
    return saved


def _describe_data(data: Any) -> str:
    """Return the number of rows or batches, with a checksum of the values of tensors."""
    source = batches_of(data, 1, seed=None)
    if source.tensors is None:
        return str(source.count)
    tensors = [leaf for leaf in tree_leaves(source.tensors) if isinstance(leaf, Tensor)]
    arrays = {str(number): tensor.detach().cpu() for number, tensor in enumerate(tensors)}
    return f"{source.count} rows, {checksum('', arrays)[:12]}"
