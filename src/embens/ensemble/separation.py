"""Buffers that become per-member buffers after embedding."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embens.sites import release_tensor
from embens.spec import PerMember

if TYPE_CHECKING:
    from embens.ensemble.module import EmbeddedEnsemble


def separate_buffer(ensemble: "EmbeddedEnsemble", module: str, name: str, value: Tensor) -> Tensor:
    """Turn a shared buffer into one that every member has separately.

    Args:
        ensemble: The ensemble.
        module: Name of the module in the reference.
        name: Name of the buffer.
        value: Initial value for all members.

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


def match_buffers(ensemble: "EmbeddedEnsemble", state: dict[str, Any], prefix: str = "") -> None:
    """Make buffers shared or separate as in a state that is about to be loaded.

    A pass can turn a shared buffer into one buffer per member.

    Args:
        ensemble: The ensemble, changed in place.
        state: The state, changed in place.
        prefix: Of the names in the state.
    """
    start = f"{prefix}individual."
    saved_names = [key.removeprefix(start) for key in state if key.startswith(start)]
    saved, present = set(saved_names), set(ensemble.individual.state_dict())
    if saved - present:
        # Members had separate buffers when the state was saved.
        separate_buffers(ensemble, saved_names)
    if present - saved:
        # Buffers were separated after the state was saved.
        expand_buffers(ensemble, state, prefix)


def separate_buffers(ensemble: "EmbeddedEnsemble", names: Iterable[str]) -> None:
    """Separate those shared buffers that have the names of saved tensors of members.

    Args:
        ensemble: The ensemble.
        names: Names in a saved state, with slashes in place of dots.
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


def expand_buffers(ensemble: "EmbeddedEnsemble", state: dict[str, Any], prefix: str = "") -> None:
    """Give every member the shared buffers of a state that is older than their separation.

    Args:
        ensemble: The ensemble, some of whose buffers were separated by a pass.
        state: Its state before that pass; changed in place.
        prefix: Of the names in the state.
    """
    for item in ensemble.spec.per_member:
        for name in item.tensors:
            dotted = f"{item.module}.{name}".lstrip(".")
            shared = f"{prefix}reference.{dotted}"
            separate = f"{prefix}individual.{dotted.replace('.', '/')}"
            buffer = state.get(shared)
            is_parameter = isinstance(ensemble.individual[dotted], nn.Parameter)
            if isinstance(buffer, Tensor) and separate not in state and not is_parameter:
                state[separate] = buffer.expand(ensemble.members, *buffer.shape).clone()
                del state[shared]
