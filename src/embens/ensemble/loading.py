"""Reading ensembles from files; :mod:`embens.ensemble.saving` writes them."""

import copy
import os
import warnings
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from embens.ensemble.module import EmbeddedEnsemble
from embens.ensemble.saving import FILE, FORMAT, fingerprints, shared_tensors
from embens.files import Refused, read_tensors, refusing
from embens.graph.reading import detached_state
from embens.sites import EnsembleSpec


def load(path: str | os.PathLike[str], reference: nn.Module) -> EmbeddedEnsemble:
    """Read an ensemble from a file, or from a folder of ``save_pretrained``.

    Args:
        path: the file or folder.
        reference: a network of the same architecture and dtype, which is not changed. Its weights
            are used if the file was written with ``shared=False``, and have to be the same then.

    Returns:
        The ensemble.

    Raises:
        embens.files.Refused: if the file is damaged, or if it belongs to another reference.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from embens import batch_ensemble
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> ensemble, x = batch_ensemble(net, members=4), torch.ones(2, 4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ensemble.save(f"{folder}/ensemble.safetensors")
        ...     loaded = load(f"{folder}/ensemble.safetensors", net)
        >>> torch.equal(loaded(x), ensemble(x))
        True
    """
    path = Path(path)
    if path.is_dir():
        path = path / FILE
    header, tensors = read_tensors(path, FORMAT)
    with refusing(path):
        spec = EnsembleSpec.from_dict(header["spec"])
        spec.check_reference(reference)
        values = _stacks(path.name, spec, reference, tensors)
        copied = copy.deepcopy(reference, detached_state(reference))
        ensemble = EmbeddedEnsemble(copied, spec, values)
        if "shared" in header:
            parameters = shared_tensors(ensemble)
            _check_shared(path.name, header["shared"], parameters)
            tensors = {**parameters, **tensors}
        _check_tensors(path.name, tensors, ensemble.state_dict())
        ensemble.load_state_dict(tensors)
    return ensemble


def _stacks(
    name: str, spec: EnsembleSpec, reference: nn.Module, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the members' values of a file, as parameters or buffers."""

    def stack(key: str, shape: tuple[int, ...] | None = None) -> Tensor:
        tensor = tensors.get("individual." + key.replace(".", "/"))
        if tensor is None:
            raise Refused(f"{name}: the tensor {key!r} is missing.")
        if len(tensor) != spec.members or (shape is not None and tuple(tensor.shape[1:]) != shape):
            raise Refused(
                f"{name}: header and tensors disagree: {key!r} has shape {tuple(tensor.shape)} for "
                f"{spec.members} members."
            )
        return tensor

    # The order is that of embens.embed.build, so that optimizers find their parameters.
    values: dict[str, Tensor] = {}
    tied: dict[int, Tensor] = {}
    for item in spec.per_member:
        for tensor_name in item.tensors:
            key = f"{item.module}.{tensor_name}".lstrip(".")
            original = getattr(reference.get_submodule(item.module), tensor_name)
            tensor = stack(key, tuple(original.shape))
            if isinstance(original, nn.Parameter):
                if id(original) not in tied:
                    tied[id(original)] = nn.Parameter(tensor, original.requires_grad)
                tensor = tied[id(original)]
            values[key] = tensor
    for site in spec.sites:
        if not site.fresh:
            tensor = stack(site.key, (site.size,))
            values[site.key] = nn.Parameter(tensor) if site.trainable else tensor
    for low_rank in spec.low_rank:
        for part in ("left", "right"):
            key = f"{low_rank.layer}.{part}"
            values[key] = nn.Parameter(stack(key))
    return values


def _check_shared(name: str, expected: dict[str, str], parameters: Mapping[str, Tensor]) -> None:
    """Raise if a reference has other weights than the file was saved for."""
    different = set(expected.items()) ^ set(fingerprints(parameters).items())
    if different:
        first = min(different)[0]
        raise Refused(
            f"{name} holds the members' values only, and the reference has other weights "
            f"({first!r}) than they were saved for. Pass the checkpoint that they belong to; if "
            "training changed shared weights, save the whole ensemble."
        )


def _check_tensors(
    name: str, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> None:
    """Raise if the tensors of a file are not those that the ensemble needs; warn about NaN."""
    for key in sorted(tensors.keys() ^ expected.keys()):
        place = "reference" if key in tensors else "file"
        raise Refused(
            f"{name}: the {place} has no tensor {key!r}. Pass the architecture that was saved."
        )
    for key, tensor in expected.items():
        saved = tensors[key]
        if saved.shape != tensor.shape or saved.dtype != tensor.dtype:
            raise Refused(
                f"{name}: {key!r} has shape {tuple(saved.shape)} and {saved.dtype}, the reference "
                f"has {tuple(tensor.shape)} and {tensor.dtype}. Pass the architecture that was "
                f"saved, as reference.to({saved.dtype})."
            )
    with_nan = [key for key, tensor in tensors.items() if tensor.isnan().any()]
    if with_nan:
        warnings.warn(f"{name} was saved with NaN in {', '.join(with_nan[:5])}.", stacklevel=3)
