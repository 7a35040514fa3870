"""Tensors that every member has separately, and their places in the reference.

The spec names the per-member tensors. The ensemble keeps them stacked, and the reference keeps a
placeholder without memory. A buffer that the user's code changes becomes per-member later.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from embens.graph.snapshots import STANDARD_ATTRIBUTES
from embens.sites import EnsembleSpec, PerMember

if TYPE_CHECKING:
    from embens.ensemble.module import EmbeddedEnsemble


def refuse_held_tensors(reference: nn.Module, spec: EnsembleSpec) -> None:
    """Raise ValueError for attributes that hold a tensor which members have separately.

    Args:
        reference: the network.
        spec: how members differ.
    """
    separate = {}
    for item in spec.per_member:
        for key in item.tensors:
            tensor = getattr(reference.get_submodule(item.module), key)
            separate[id(tensor)] = f"{item.module}.{key}".lstrip(".")
    for name, module in reference.named_modules():
        if type(module).__module__.startswith("torch.nn."):
            continue  # recurrent layers have lists of their weights, which they update
        for key, value in vars(module).items():
            if key in STANDARD_ATTRIBUTES:
                continue
            full_name = f"{name}.{key}".lstrip(".")
            for leaf in tree_leaves(value):
                # A placeholder of a separate tensor is an attribute of its module.
                if separate.get(id(leaf), full_name) != full_name:
                    raise ValueError(
                        f"the attribute {key!r} of {name or 'the reference'!r} holds the parameter "
                        f"{separate[id(leaf)]!r}, which members have separately. Read it from its "
                        "layer."
                    )


def release_tensors(reference: nn.Module, spec: EnsembleSpec) -> None:
    """Take all tensors that members have separately out of the reference."""
    for item in spec.per_member:
        for name in item.tensors:
            release_tensor(reference, item.module, name)


def release_tensor(reference: nn.Module, module: str, name: str) -> None:
    """Take a tensor that members have separately out of the reference.

    A placeholder without memory stays, as code may test whether the attribute is None.

    Args:
        reference: the ensemble's copy of the reference.
        module: name of the module in the reference.
        name: name of the parameter or buffer.
    """
    owner = reference.get_submodule(module)
    for table in (owner._parameters, owner._buffers):
        if name not in table:
            continue
        tensor = table.pop(name)
        assert tensor is not None
        owner._non_persistent_buffers_set.discard(name)
        placeholder = torch.empty_like(tensor, device="meta", requires_grad=False)
        if isinstance(tensor, nn.Parameter):
            placeholder = nn.Parameter(placeholder, tensor.requires_grad)
        vars(owner)[name] = placeholder


def separate_buffer(ensemble: "EmbeddedEnsemble", module: str, name: str, value: Tensor) -> Tensor:
    """Turn a shared buffer into one that every member has separately.

    Args:
        ensemble: the ensemble.
        module: name of the module in the reference.
        name: name of the buffer.
        value: initial value for all members.

    Returns:
        The stacked buffer, members first.
    """
    with torch.inference_mode(False):  # later passes may need gradients
        stack = value.clone().expand(ensemble.members, *value.shape).clone()
    ensemble.individual.add(f"{module}.{name}".lstrip("."), stack)
    release_tensor(ensemble.reference, module, name)
    items = {item.module: item for item in ensemble.spec.per_member}
    item = items.get(module, PerMember(module, ()))
    items[module] = replace(item, tensors=(*item.tensors, name))
    ensemble.spec = replace(ensemble.spec, per_member=tuple(items.values()))
    ensemble.foldings.clear()
    return stack


def separate_buffers(ensemble: "EmbeddedEnsemble", names: Iterable[str]) -> None:
    """Separate those shared buffers that have the names of saved tensors of members.

    Args:
        ensemble: the ensemble.
        names: names in a saved state, with slashes in place of dots.
    """
    modules = dict(ensemble.reference.named_modules())
    for saved_name in names:
        dotted = saved_name.replace("/", ".")
        module, _, name = dotted.rpartition(".")
        if dotted in ensemble.individual or module not in modules:
            continue
        buffer = modules[module]._buffers.get(name)
        if buffer is not None:
            separate_buffer(ensemble, module, name, buffer.detach().clone())


def ignore_added_counters(ensemble: "EmbeddedEnsemble", keys: Any) -> None:
    """Ignore counters that BatchNorm adds to a state without a version.

    Such a state is a plain dictionary, for example from a safetensors file. BatchNorm takes it for
    one of an old torch and adds ``num_batches_tracked``, also where members have it separately.

    Args:
        ensemble: the ensemble whose state was loaded.
        keys: missing and unexpected keys, as ``load_state_dict`` returns them; changed in place.
    """
    added = []
    for item in ensemble.spec.per_member:
        if "num_batches_tracked" in item.tensors:
            added.append(f"reference.{item.module}.num_batches_tracked")
    for key in list(keys.unexpected_keys):
        if key.endswith(tuple(added)):
            keys.unexpected_keys.remove(key)
