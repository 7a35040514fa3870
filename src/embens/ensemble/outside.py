"""What a forward reads or changes outside of its modules.

All members share state outside of the modules, as separate networks in one process would. A global
counter then counts the passes of all members, which is rarely meant, so such a change is a warning.
A parameter that the code reads from an object, instead of its layer, is not that of a member.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from embens.checks import warn
from embens.graph.guards import Guard
from embens.graph.reading import has_user_code
from embens.graph.snapshots import MOST_OBJECTS, PLAIN, STANDARD_ATTRIBUTES, Same, SameTensor
from embens.spec import PerMember


class OutsideState:
    """State that a forward may change: global variables, class attributes, closures, containers.

    Args:
        reference: The network.
    """

    def __init__(self, reference: nn.Module):
        self.guard = Guard(reference, strict=False)
        self.reported: set[str] = set()

    def marks(self) -> dict[tuple[int, Any], tuple[str, Any]]:
        """Return a description and a mark of every value; the mark differs if the value changes."""
        marks = {}
        for owner, key, description, mark in self._marks():
            marks[id(owner), key] = description, mark
        return marks

    def warn_about_changes(self, before: dict[tuple[int, Any], tuple[str, Any]]) -> None:
        """Warn of values that have changed; new values, often entries of a cache, are ignored.

        Args:
            before: What :meth:`marks` returned before the pass.
        """
        for key, (description, mark) in self.marks().items():
            is_changed = key in before and before[key][1] != mark
            if is_changed and description not in self.reported:
                self.reported.add(description)
                warn(
                    f"the forward of the reference changes {description!r} outside of its "
                    "modules, so all members share it. Keep what changes in attributes or buffers "
                    "of the modules."
                )

    def _marks(self) -> Iterator[tuple[Any, Any, str, Any]]:
        """Yield owner, key, description and mark of every value."""
        for namespace, name, _ in self.guard.variables:
            if name in namespace:
                yield namespace, name, name, _mark(namespace[name])
        for owner, name, _ in self.guard.attributes:
            if hasattr(owner, name):
                owner_name = getattr(owner, "__name__", type(owner).__name__)
                yield owner, name, f"{owner_name}.{name}", _mark(getattr(owner, name))
        for container, _ in self.guard.contents:
            if len(container) > MOST_OBJECTS:
                continue  # a table of data
            if isinstance(container, dict):
                for key, item in list(container.items()):
                    yield container, key, f"entry {key!r:.50} of a dictionary", _mark(item)
            elif isinstance(container, (list, deque)):
                marks = [_mark(item) for item in container]
                yield container, None, f"a {type(container).__name__}", marks


class NamedGuard(Guard):
    """A guard of values that the code names; attributes with computed names are not followed.

    With ``getattr(self, f"layer{i}")`` the code may read any attribute, also an optimizer in it.
    """

    def _is_read(self, name: Any) -> bool:
        return name in self.names


def find_hidden(reference: nn.Module) -> list[str]:
    """Return the names of parameters and buffers that the code may read from an object or a set.

    Lists, tuples and dictionaries in attributes of modules are left out, as members have their
    tensors there.

    Args:
        reference: The network.
    """
    if not has_user_code(reference):
        return []
    guard = NamedGuard(reference, strict=False)
    visible = set()
    for module in reference.modules():
        for key, value in vars(module).items():
            if key not in STANDARD_ATTRIBUTES:
                visible |= {id(leaf) for leaf in tree_leaves(value)}
    names = []
    for tensors in (reference.named_parameters, reference.named_buffers):
        for name, tensor in tensors(remove_duplicate=False):
            if id(tensor) in guard.visited and id(tensor) not in visible:
                names.append(name)
    return names


def refuse_hidden_tensors(reference: nn.Module, items: Iterable[PerMember]) -> None:
    """Raise ValueError if the code may read a per-member tensor from an object.

    Args:
        reference: The network.
        items: Modules and their per-member tensors.
    """
    names = set()
    for item in items:
        names |= {f"{item.module}.{name}".lstrip(".") for name in item.tensors}
    for name in find_hidden(reference):
        if name in names:
            refuse_hidden(name)


def refuse_hidden(name: str) -> None:
    """Raise because the code reads a tensor in which members differ from an object.

    Args:
        name: Name of the tensor.
    """
    raise ValueError(
        f"the forward of the reference finds the tensor {name!r} in an object or a set, where "
        "members cannot have separate versions. Read it from its layer."
    )


def _mark(value: Any) -> Any:
    """Return a mark of a value, which is unequal to earlier marks if the value has changed."""
    if isinstance(value, Tensor):
        return SameTensor(value)
    if isinstance(value, PLAIN):
        return type(value), value
    return Same(value)
