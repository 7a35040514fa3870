"""Reading ensembles from files; :mod:`embens.ensemble.saving` writes them."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from embens.checks import warn
from embens.ensemble.header import read_spec
from embens.ensemble.module import EmbeddedEnsemble
from embens.ensemble.saving import FILE, FORMAT, fingerprints, shared_tensors
from embens.fields import FIX, Fields
from embens.files import Refused, read_tensors, refusing
from embens.graph.reading import copy_reference
from embens.sites import find_layers
from embens.spec import EnsembleSpec


def load(path: str | os.PathLike[str], reference: nn.Module) -> EmbeddedEnsemble:
    """Read an ensemble from a file, or from a folder of ``save_pretrained``.

    Args:
        path: The file or folder.
        reference: A network of the same architecture and dtype, which is not changed. Its weights
            are used if the file was written with ``shared=False``, and have to be the same then.

    Returns:
        The ensemble.

    Raises:
        embens.files.Refused: If the file is damaged, or if it belongs to another reference.
        TypeError: If ``reference`` is no module.

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
    if not isinstance(reference, nn.Module):
        raise TypeError(
            "reference must be a torch.nn.Module of the architecture that was saved, got "
            f"{reference!r}."
        )
    path = Path(path)
    if path.is_dir():
        path = path / FILE
    header, tensors = read_tensors(path, FORMAT)
    with refusing(path):
        fields = Fields(header, f"{path.name}: header", ["format", "version", "spec"], ["shared"])
        spec = read_spec(fields.get("spec"), f"{path.name}: spec")
        spec.check_reference(reference)
        values = _StackReader(path.name, spec, reference, tensors).read_all()
        copied = copy_reference(reference)
        ensemble = EmbeddedEnsemble(copied, spec, values)
        if "generator_state" in tensors:
            generator = torch.Generator()
            generator.set_state(tensors["generator_state"])  # raises if it is not a state
            ensemble.generator_state = generator.get_state()
        if "shared" in header:
            parameters = shared_tensors(ensemble)
            _check_shared(path.name, fields.fields("shared"), parameters)
            tensors = {**parameters, **tensors}
        _check_tensors(path.name, tensors, ensemble.state_dict())
        # A reference without memory gets its weights from the file.
        is_meta = any(parameter.is_meta for parameter in reference.parameters())
        ensemble.load_state_dict(tensors, assign=is_meta)
    return ensemble


class _StackReader:
    """Reads the members' values of a file, as parameters or buffers.

    Args:
        name: Name of the file, for error messages.
        spec: How members differ.
        reference: The network that the ensemble is made of.
        tensors: All tensors of the file.
    """

    def __init__(
        self, name: str, spec: EnsembleSpec, reference: nn.Module, tensors: Mapping[str, Tensor]
    ):
        self.name = name
        self.spec = spec
        self.reference = reference
        self.tensors = tensors
        self.layers = find_layers(reference)

    def read_all(self) -> dict[str, Tensor]:
        """Return the values ``(member, …)`` by name.

        The order is that of :func:`embens.embed.build`, so that optimizers find their parameters.
        """
        values = self._read_per_member()
        for site in self.spec.sites:
            if not site.fresh:
                tensor = self._read(site.key, (site.size,), self._example(site.layer))
                values[site.key] = nn.Parameter(tensor) if site.trainable else tensor
        for low_rank in self.spec.low_rank:
            layer = self.layers[low_rank.layer]
            rows, columns = layer.matrix(self.reference.get_submodule(layer.module)).shape
            shapes = {"left": (rows, low_rank.rank), "right": (low_rank.rank, columns)}
            for part, shape in shapes.items():
                key = f"{low_rank.layer}.{part}"
                tensor = self._read(key, shape, self._example(low_rank.layer))
                values[key] = nn.Parameter(tensor)
        return values

    def _read_per_member(self) -> dict[str, Tensor]:
        """Return the separate tensors; those that are tied in the reference stay tied."""
        values: dict[str, Tensor] = {}
        tied: dict[int, Tensor] = {}
        for item in self.spec.per_member:
            module = self.reference.get_submodule(item.module)
            for tensor_name in item.tensors:
                key = f"{item.module}.{tensor_name}".lstrip(".")
                original = getattr(module, tensor_name)
                tensor = self._read(key, tuple(original.shape), original)
                if isinstance(original, nn.Parameter):
                    if id(original) not in tied:
                        tied[id(original)] = nn.Parameter(tensor, original.requires_grad)
                    tensor = tied[id(original)]
                values[key] = tensor
        return values

    def _read(self, key: str, shape: tuple[int, ...], example: Tensor) -> Tensor:
        """Return a tensor of all members.

        Args:
            key: Its name.
            shape: Its shape for one member.
            example: A tensor of the reference with its type and device.
        """
        tensor = self.tensors.get("individual." + key.replace(".", "/"))
        if tensor is None:
            raise Refused(f"{self.name}: the tensor {key!r} is missing. {FIX}")
        expected = (self.spec.members, *shape)
        if tuple(tensor.shape) != expected:
            raise Refused(
                f"{self.name}: header and tensors disagree: {key!r} has shape "
                f"{tuple(tensor.shape)}, {self.spec.members} members of this reference need "
                f"{expected}. Pass the architecture that was saved; if it is the same, the file is "
                "damaged."
            )
        if tensor.dtype != example.dtype:
            raise Refused(_describe_difference(self.name, key, tensor, expected, example.dtype))
        return tensor if example.is_meta else tensor.to(example.device)

    def _example(self, layer_name: str) -> Tensor:
        """Return a parameter of a layer of the reference."""
        return next(self.reference.get_submodule(self.layers[layer_name].module).parameters())


def _describe_difference(
    name: str, key: str, saved: Tensor, shape: Sequence[int], dtype: torch.dtype
) -> str:
    """Return the error for a tensor that does not fit the reference."""
    return (
        f"{name}: {key!r} has shape {tuple(saved.shape)} and {saved.dtype}, the reference has "
        f"{tuple(shape)} and {dtype}. Pass the architecture that was saved, as "
        f"reference.to({saved.dtype})."
    )


def _check_shared(name: str, expected: Fields, parameters: Mapping[str, Tensor]) -> None:
    """Raise if a reference has other weights than the file was saved for."""
    saved = {key: expected.text(key) for key in expected.values}
    different = set(saved.items()) ^ set(fingerprints(parameters).items())
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
            raise Refused(_describe_difference(name, key, saved, tensor.shape, tensor.dtype))
    with_nan = [key for key, tensor in tensors.items() if tensor.isnan().any()]
    if with_nan:
        warn(f"{name} was saved with NaN in {', '.join(with_nan[:5])}.")
