"""Attributes of the members in files: what their forward has set and may read again.

A forward may keep state in plain attributes, such as a counter or its last result. Each member has
its version of them. They are no part of a ``state_dict``, but an interrupted run needs them to
continue with the same bits.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embens.ensemble.copies import copy_attributes
from embens.fields import Fields, refusal
from embens.graph.guards import Guard, Unwatchable
from embens.graph.snapshots import STANDARD_ATTRIBUTES

if TYPE_CHECKING:
    from embens.ensemble.module import EmbeddedEnsemble

MemberAttributes = dict[str, dict[str, Any]]
"""Attributes of one member, by name of the module and of the attribute."""

_SCALARS = (bool, int, float, str, type(None))


def read_attributes(ensemble: "EmbeddedEnsemble") -> list[MemberAttributes]:
    """Return what the forward of each member has set and may read; [] if there is nothing.

    An attribute that the code only sets, such as the auxiliary loss of a pass, is left out, and so
    is a configuration of transformers, which the user's reference brings along.

    Args:
        ensemble: The ensemble between two passes.
    """
    if not ensemble.merged.changed_attributes():
        return []
    try:
        guard = Guard(ensemble.reference)
    except Unwatchable:
        guard = None
    result = []
    for attributes in ensemble.merged.member_attributes():
        saved: MemberAttributes = {}
        for module, values in attributes.items():
            for name, value in values.items():
                if _is_configuration(value):
                    continue
                if guard is None or guard.reads_any_name or name in guard.loaded:
                    saved.setdefault(module, {})[name] = value
        result.append(copy_attributes(saved))
    return result if any(result) else []


def attribute_names(attributes: list[MemberAttributes], *, unwritable: bool = False) -> list[str]:
    """Return the names of attributes, each with its type.

    Args:
        attributes: The attributes of each member.
        unwritable: Whether to return only those that a file cannot hold.
    """
    names = {}
    for member in attributes:
        for values in member.values():
            for name, value in values.items():
                if not (unwritable and _is_plain(value)):
                    names[name] = f"{name!r} ({type(value).__name__})"
    return list(names.values())


def restore_attributes(ensemble: "EmbeddedEnsemble", attributes: list[MemberAttributes]) -> None:
    """Set what :func:`read_attributes` returned.

    Args:
        ensemble: An ensemble with as many members.
        attributes: The attributes of each member.
    """
    executor = ensemble.merged
    executor.restore_attributes(attributes)
    for copied, values in zip(executor.copies, attributes, strict=False):
        copied.set_attributes(values)


def check_attributes(ensemble: "EmbeddedEnsemble", value: Any, place: str) -> None:
    """Raise unless a value of a file holds attributes that the code of members may have set.

    Args:
        ensemble: The ensemble whose members get them.
        value: Read from a file.
        place: Name of the file and of the field, for error messages.

    Raises:
        embens.files.Refused: if a module is unknown, a name is a method or a tensor of its module,
            or a value has another type than that of the reference.
    """
    if not isinstance(value, list) or len(value) != ensemble.members:
        raise refusal(place, f"a list of {ensemble.members} members", value)
    modules = dict(ensemble.reference.named_modules())
    for index, attributes in enumerate(value):
        for name in Fields(attributes, f"{place}[{index}]").values:
            if not isinstance(name, str) or name not in modules:
                raise refusal(f"{place}[{index}]", "attributes of modules of the reference", name)
            _check_module(modules[name], Fields(attributes[name], f"{place}[{index}].{name}"))


def _check_module(module: nn.Module, fields: Fields) -> None:
    occupied = STANDARD_ATTRIBUTES | {"training", *dir(nn.Module)}
    occupied |= {*module._parameters, *module._buffers, *module._modules}
    for name, value in fields.values.items():
        is_method = isinstance(name, str) and callable(getattr(type(module), name, None))
        if not isinstance(name, str) or name in occupied or is_method:
            raise refusal(fields.place, "attributes that a forward may set", name)
        before = vars(module).get(name)
        if isinstance(before, (bool, int, float, str)) and type(value) is not type(before):
            raise fields.fail(name, f"a value of type {type(before).__name__}")


def _is_configuration(value: Any) -> bool:
    """Return whether a value is a configuration of transformers.

    The forward notes the kind of loss there, and derives it again in the next process.
    """
    return any(kind.__module__.startswith("transformers.") for kind in type(value).__mro__)


def _is_plain(value: Any) -> bool:
    """Return whether a file gives back a value of the same type."""
    if type(value) in _SCALARS:
        return True
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.layout is torch.strided and not value.is_meta
    if type(value) in (list, tuple):
        return all(_is_plain(item) for item in value)
    if type(value) is dict:
        keys = all(type(key) in _SCALARS for key in value)
        return keys and all(_is_plain(item) for item in value.values())
    return False
