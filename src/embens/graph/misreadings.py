"""Code that torch.fx would trace without an error, but wrongly.

While a network is traced, its values are symbols and not tensors. ``isinstance(x, Tensor)`` is
False, and a ``torch.autograd.Function`` becomes its forward pass, without its gradient. Results of
computations with real tensors become constants. :func:`refused_misreadings` and
:class:`OutsideGraph` turn such code into errors.
"""

import builtins
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from embens.graph.operations import SHAPE_QUERIES, TENSOR_QUERIES, is_in_place

_MISSING = object()

Problem = Callable[[str], Exception]


class Untraceable(ValueError):
    """A network cannot be traced into a graph that is right for every call."""


class OutsideGraph(TorchFunctionMode):
    """Sees computations with real tensors while a network is traced.

    Their results are constants of the graph. Such code looks at values, draws random numbers,
    updates parameters, or recomputes activations (``torch.utils.checkpoint``).

    Args:
        refused: Whether they are refused; otherwise only changes in place are, as a traced copy
            shares its parameters with the reference.
    """

    def __init__(self, *, refused: bool):
        super().__init__()
        self.refused = refused

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        is_symbolic = any(isinstance(leaf, torch.fx.Proxy) for leaf in leaves)
        owner = getattr(func, "__self__", None)  # for a property of a tensor
        name = getattr(owner, "__name__", None) or getattr(func, "__name__", "")
        is_assigned = getattr(func, "__name__", "") == "__set__"  # such as parameter.data = ...
        is_query = (name in SHAPE_QUERIES or name in TENSOR_QUERIES) and not is_assigned
        is_change = is_assigned or is_in_place(name)
        if is_symbolic or is_query or not (self.refused or is_change):
            return func(*args, **kwargs)
        raise Untraceable(f"the code computes with tensors that are not inputs ({name!r})")


@contextmanager
def refused_misreadings(namespaces: Iterable[dict[str, Any]], problem: Problem) -> Iterator[None]:
    """Raise where the code of a network would be misread.

    Args:
        namespaces: Global variables of the functions that the network may call.
        problem: Makes an error of a message.
    """
    original = vars(torch.autograd.Function)["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, torch.fx.Proxy) for leaf in tree_leaves((args, kwargs))):
            raise problem(f"the code calls the autograd function {cls.__name__!r}")
        return original.__func__(cls, *args, **kwargs)

    shadows = _type_queries(problem)
    places: list[tuple[Any, str, Any]] = [(vars(torch), "is_tensor", shadows.pop("is_tensor"))]
    # As torch.fx does with functions that it wraps, global variables of the user's functions shadow
    # the builtins.
    for namespace in namespaces:
        for name, function in shadows.items():
            if namespace.get(name, _MISSING) in (_MISSING, getattr(builtins, name)):
                places.append((namespace, name, function))
    originals = [namespace.get(name, _MISSING) for namespace, name, _ in places]
    for namespace, name, function in places:
        namespace[name] = function
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original
        for (namespace, name, _), value in zip(places, originals, strict=True):
            if value is _MISSING:
                del namespace[name]
            else:
                namespace[name] = value


def _type_queries(problem: Problem) -> dict[str, Callable[..., Any]]:
    """Return functions of the names of builtins that refuse symbols."""

    def check(name: str, value: Any) -> None:
        if isinstance(value, torch.fx.Proxy):
            raise problem(f"the code asks for the type of a tensor ({name})")

    def is_instance(value: Any, kinds: Any) -> bool:
        check("isinstance", value)
        return isinstance(value, type if kinds is type_of else kinds)

    def type_of(*args: Any, **kwargs: Any) -> Any:
        check("type", args[0])
        return type(*args, **kwargs)

    def is_callable(value: Any) -> bool:
        check("callable", value)
        return callable(value)

    def is_tensor(value: Any) -> bool:
        check("torch.is_tensor", value)
        return isinstance(value, Tensor)

    return {
        "isinstance": is_instance,
        "type": type_of,
        "callable": is_callable,
        "is_tensor": is_tensor,
    }
