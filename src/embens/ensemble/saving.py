"""Ensembles in files: one safetensors file with a JSON header, no pickle.

The header holds the spec and a checksum, the file every tensor of the ensemble. Nothing in it is
ever executed. Loading needs the reference's architecture from the user. A file without the shared
parameters has their checksums instead, and needs the reference's weights as well.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from embens import markdown
from embens.checks import warn
from embens.ensemble.attributes import attribute_names, read_attributes
from embens.files import Format, checksum, is_format, is_leftover, write_tensors
from embens.folders import write_folder

if TYPE_CHECKING:
    from embens.ensemble.module import EmbeddedEnsemble

FORMAT = Format("embens ensemble", 4)
FILE, CARD = "ensemble.safetensors", "README.md"
CARD_START = "---\nlibrary_name: embens\n"


def save(
    ensemble: "EmbeddedEnsemble", path: str | os.PathLike[str], *, shared: bool = True
) -> None:
    """Write the ensemble to one safetensors file; :func:`embens.load` reads it.

    Args:
        ensemble: The ensemble.
        path: The file.
        shared: Whether to write the shared parameters. False: loading takes them from the
            reference, and refuses a reference with other weights.

    Raises:
        IsADirectoryError: If ``path`` is a folder, which is left unchanged.
        FileNotFoundError: If its folder does not exist.

    Example:
        >>> import tempfile
        >>> from torch import nn
        >>> from embens import batch_ensemble, load
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> path = f"{tempfile.mkdtemp()}/ensemble.safetensors"
        >>> batch_ensemble(net, members=4).save(path)
        >>> load(path, net).members
        4
    """
    names = attribute_names(read_attributes(ensemble))
    if names:
        warn(
            f"the file will not hold {', '.join(names)}, which the forward of the reference sets "
            "and reads, so the loaded members start without them. Keep them in buffers "
            "(register_buffer)."
        )
    header: dict[str, Any] = {"spec": ensemble.spec.to_dict()}
    tensors = dict(ensemble.state_dict())
    if not shared:
        parameters = shared_tensors(ensemble)
        header["shared"] = fingerprints(parameters)
        tensors = {name: tensor for name, tensor in tensors.items() if name not in parameters}
    write_tensors(path, FORMAT, header, tensors)


def shared_tensors(ensemble: "EmbeddedEnsemble") -> dict[str, Tensor]:
    """Return the shared parameters by their names in the state.

    Args:
        ensemble: The ensemble.
    """
    parameters = {id(parameter) for parameter in ensemble.shared_parameters()}
    state = ensemble.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if id(tensor) in parameters}


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the checksum of each tensor.

    Args:
        tensors: Tensors by name.

    Raises:
        ValueError: If a tensor is on the meta device.
    """
    checksums = {}
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ValueError(
                f"{name!r} has no values to compare: it is on the meta device. Load its values "
                "first, or use a file with the shared parameters."
            )
        checksums[name] = checksum("", {"": tensor.detach().cpu()})
    return checksums


def save_pretrained(
    ensemble: "EmbeddedEnsemble",
    folder: str | os.PathLike[str],
    *,
    shared: bool | None = None,
    base: str = "",
    results: Mapping[str, float] | None = None,
) -> None:
    """Write a folder with the ensemble and a model card, for ``embens.load(folder, …)``.

    Both files appear at once, also if the process is killed or the disk is full.

    Args:
        ensemble: The ensemble.
        folder: The folder. It may replace an empty folder, or one that this method wrote.
        shared: Whether to write the shared parameters; None: unless they are frozen.
        base: Where the reference comes from, for the card.
        results: Metrics for the card.

    Raises:
        FileExistsError: If the folder holds other files; it is left unchanged.
        NotADirectoryError: If ``folder`` is a file.

    Example:
        >>> import os, tempfile
        >>> from torch import nn
        >>> from embens import batch_ensemble
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> folder = f"{tempfile.mkdtemp()}/ensemble"
        >>> batch_ensemble(net, members=4).save_pretrained(folder)
        >>> sorted(os.listdir(folder))
        ['README.md', 'ensemble.safetensors']
    """
    if shared is None:
        shared = not ensemble.spec.frozen
    config = getattr(ensemble.reference, "config", None)
    base = base or getattr(config, "_name_or_path", "")
    card = model_card(ensemble, base, results or {}, has_shared=shared)

    def fill(place: Path) -> None:
        save(ensemble, place / FILE, shared=shared)
        (place / CARD).write_bytes(card.encode())

    write_folder(folder, fill, is_pretrained)


def is_pretrained(folder: Path) -> bool:
    """Return whether a folder was written by :func:`save_pretrained` and holds nothing else.

    Args:
        folder: An existing folder.
    """
    names = {path.name for path in folder.iterdir() if not is_leftover(path)}
    if not names <= {FILE, CARD} or not is_format(folder / FILE, FORMAT):
        return False
    return CARD not in names or _is_card(folder / CARD)


def _is_card(path: Path) -> bool:
    """Return whether a file begins as a model card does; a user's README does not."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(CARD_START)) == CARD_START.encode()


def model_card(
    ensemble: "EmbeddedEnsemble", base: str, results: Mapping[str, float], *, has_shared: bool
) -> str:
    """Return the text of a model card, with metadata for model hubs.

    Args:
        ensemble: The ensemble.
        base: Where the reference comes from.
        results: Metrics for the table.
        has_shared: Whether the ensemble's file holds the shared parameters.
    """
    spec = ensemble.spec
    network = type(ensemble.reference).__name__
    differences = [repr(site.law) for site in spec.sites]
    differences += [f"rank {site.rank}, {site.kind}" for site in spec.low_rank]
    differences += [f"separate {item.module!r}" for item in spec.per_member]
    individual = sum(parameter.numel() for parameter in ensemble.individual_parameters())
    shared = sum(parameter.numel() for parameter in ensemble.shared_parameters())
    place = "in the file" if has_shared else f"those of {base or 'the reference'}, not in the file"
    rows: dict[str, Any] = {
        "family": spec.family,
        "members differ by": ", ".join(dict.fromkeys(differences)),
        "individual parameters": f"{individual:,}",
        "shared parameters": f"{shared:,}, {place}",
        **results,
    }
    weights = "" if has_shared else f" with the weights of {base or 'the trained network'}"
    tags = ", ".join(markdown.tag(name) for name in ("ensemble", "uncertainty", spec.family))
    lines = [*CARD_START.splitlines(), f"tags: [{tags}]"]
    if base:
        lines.append(f"base_model: {markdown.quote(base)}")
    title = markdown.escape(f"{spec.members} members in one {network}")
    lines += ["---", "", f"# {title}", "", "| | |", "|---|---|"]
    for name, value in rows.items():
        lines.append(f"| {markdown.escape(name)} | {markdown.escape(value)} |")
    lines += [
        "",
        "```python",
        "import embens",
        "",
        f"reference = ...  # a {markdown.one_line(network + weights)}",
        "ensemble = embens.load(folder, reference)  # this folder",
        "prediction = embens.predict(ensemble, inputs)",
        "```",
        "",
    ]
    return "\n".join(lines)
