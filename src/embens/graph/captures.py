"""Attributes of a network that a copy cannot have.

Members are copies of the reference. Python copies modules, methods and containers, but not the
variables of functions or weak references: a copied ``self.call = lambda x: self.layer(x)`` still
calls the original layer. A view of a weight does not follow the weights of a member. Such
attributes, and attributes that cannot be copied at all, raise an error with their name.
"""

import copy
import functools
import weakref
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from embens.graph.snapshots import HOOKS, STANDARD_ATTRIBUTES


def check_captures(reference: nn.Module) -> None:
    """Raise if an attribute of a network refers to the network in a way that copying breaks.

    These are functions and weak references that refer to a part, and views of parameters or
    buffers.

    Args:
        reference: The user's network.

    Raises:
        ValueError: Names the attribute or the hook.
    """
    owned = {id(module) for module in reference.modules()}
    memories: dict[int, tuple[str, Tensor]] = {}  # addresses of the tensors of the network
    for name, tensor in (*reference.named_parameters(), *reference.named_buffers()):
        owned.add(id(tensor))
        memories[memory_of(tensor)] = (name, tensor)
    memories.pop(0, None)
    for name, module in reference.named_modules():
        where = name or "the reference"
        attributes = vars(module)
        if type(module).__module__.startswith("torch.nn."):
            attributes = replaced_methods(module)
        for key, value in attributes.items():
            if key not in STANDARD_ATTRIBUTES and _captures(value, owned, set()):
                raise ValueError(
                    f"the attribute {key!r} of {where!r} refers to the reference itself (a "
                    "variable of a function, or a weak reference), so members would share it. "
                    "Make it a method, or pass what it needs as an argument."
                )
            if key not in STANDARD_ATTRIBUTES and f"{key}_orig" not in module._parameters:
                _check_views(key, where, value, memories)
        for hooks in HOOKS:
            for hook in getattr(module, hooks).values():
                if _captures(hook, owned, set()):
                    raise ValueError(
                        f"a hook of {where!r} refers to the reference itself (a variable of a "
                        "function), so members would share it. Use a bound method as hook, or "
                        "register it on ensemble.reference."
                    )


def _check_views(key: str, where: str, value: Any, memories: dict[int, tuple[str, Tensor]]) -> None:
    """Raise if an attribute is a view of a parameter or buffer, which members have separately."""
    for leaf in tree_leaves(value):
        if not isinstance(leaf, Tensor):
            continue
        name, tensor = memories.get(memory_of(leaf), ("", leaf))
        if leaf is not tensor:
            raise ValueError(
                f"the attribute {key!r} of {where!r} is a view of {name!r}, so members would share "
                "it. Compute it in the forward, or keep the tensor itself."
            )


def memory_of(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; 0 if it has none.

    Tensors of torch.func and parameters of lazy modules have none.
    """
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError, ValueError):
        return 0


def replaced_methods(module: nn.Module) -> dict[str, Any]:
    """Return the functions among the attributes of a module, such as another ``forward``."""
    methods = {}
    for key, value in vars(module).items():
        if isinstance(value, (FunctionType, functools.partial)):
            methods[key] = value
    return methods


def _captures(value: Any, owned: set[int], seen: set[int]) -> bool:
    """Return whether a value holds something that copying does not replace."""
    if id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, FunctionType):
        parts = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        for cell in value.__closure__ or ():
            try:
                parts.append(cell.cell_contents)
            except ValueError:  # the variable has no value yet
                continue
        return any(_holds(part, owned) or _captures(part, owned, seen) for part in parts)
    if isinstance(value, weakref.ref):
        return isinstance(value(), nn.Module) and id(value()) in owned
    if type(value) in weakref.ProxyTypes:
        return id(value.__repr__.__self__) in owned
    if isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
        has_tensor = any(isinstance(part, Tensor) and id(part) in owned for part in parts)
        return has_tensor or _captures(parts, owned, seen)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(_captures(item, owned, seen) for item in value)
    return False


def _holds(value: Any, owned: set[int]) -> bool:
    """Return whether a variable is a part of the network, or holds one."""
    if isinstance(value, MethodType):
        value = value.__self__
    if isinstance(value, (list, tuple)):
        return any(_holds(item, owned) for item in value)
    if isinstance(value, dict):
        return any(_holds(item, owned) for item in value.values())
    return id(value) in owned


def explain_copying(module: nn.Module, memo: dict[int, Any], error: Exception) -> None:
    """Raise TypeError with the name of the attribute that cannot be copied, if there is one.

    Args:
        module: The network that could not be copied.
        memo: The memo of the failed copy.
        error: Its error.
    """
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if not _is_copied(value, memo):
                where = f" of {name!r}" if name else ""
                raise TypeError(
                    f"the attribute {key!r}{where} ({type(value).__name__}) cannot be copied, "
                    f"and members are copies of the reference: {error}. Create it where it is "
                    "used, or keep it outside of the module."
                ) from error


def _is_copied(value: Any, memo: dict[int, Any]) -> bool:
    if isinstance(value, (dict, nn.Module)) and any(
        isinstance(leaf, nn.Module) for leaf in tree_leaves(value)
    ):
        return True  # its parts are checked one by one
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:
        return False
    return True
