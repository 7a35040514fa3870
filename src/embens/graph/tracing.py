"""Strict tracing: a graph that has to be right for every later call.

The flow of a network may be read from a graph that is right for one call
(:class:`embens.graph.reading.Tracer`). A folded network replaces the user's code, so whatever its
graph would get wrong has to be an error: code that looks at values or computes with tensors outside
of the graph, code that changes its attributes or draws random numbers while it is traced, and code
that recomputes its activations, or switches autocast or the inference mode.
"""

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.fx.proxy import Attribute, TraceError

from embens.graph.guards import Guard
from embens.graph.misreadings import OutsideGraph, Untraceable, refused_misreadings
from embens.graph.operations import DTYPE_QUERIES, IN_PLACE_OPERATORS
from embens.graph.reading import Tracer, copy_module, has_user_code
from embens.graph.snapshots import HOOKS, random_state, unchanged_random_state

TENSORS = frozenset("T mT H mH data real imag".split())
"""Attributes of a tensor that are tensors."""

SHAPES = frozenset("shape ndim".split())
"""Attributes of a tensor with its sizes."""


class SymbolicValue(torch.fx.Proxy):
    """A symbolic value that has the attributes of a tensor and no others.

    Everything that Python would answer for the symbol instead of the tensor is a problem.
    """

    tracer: "StrictTracer"

    def __getattr__(self, name: str) -> Any:
        if not hasattr(Tensor, name):
            raise AttributeError(f"'Tensor' object has no attribute {name!r}")
        is_known = name in TENSORS or name in SHAPES or name in DTYPE_QUERIES
        # A symbol is never identical with a type, None, or True.
        is_compared = name in DTYPE_QUERIES and self.tracer.guard.compares_identity
        if is_compared or not (is_known or callable(getattr(Tensor, name))):
            raise self.tracer.problem(f"the code reads the attribute {name!r} of a tensor")
        return SymbolicAttribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(Tensor, name):
            raise self.tracer.problem(f"the code sets the attribute {name!r} of a tensor")
        super().__setattr__(name, value)

    def __len__(self) -> int:
        raise self.tracer.problem("the code asks for the length of a batch")

    def __repr__(self) -> str:  # also for str, print and format
        raise self.tracer.problem("the code prints a tensor")

    def __hash__(self) -> int:
        raise self.tracer.problem("the code looks a value up in a set or a dictionary")

    def __copy__(self) -> Any:
        raise self.tracer.problem("the code copies a tensor with the module copy")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.__copy__()

    def __dir__(self) -> list[str]:
        raise self.tracer.problem("the code asks for the names of attributes of a tensor")

    def __int__(self) -> int:
        raise self.tracer.problem("the code looks at values")

    def __float__(self) -> float:
        raise self.tracer.problem("the code looks at values")

    def __complex__(self) -> complex:
        raise self.tracer.problem("the code looks at values")

    def __index__(self) -> int:
        raise self.tracer.problem("the code looks at values")

    def __round__(self, digits: int = 0) -> Any:
        raise self.tracer.problem("the code looks at values")

    def __divmod__(self, other: Any) -> Any:
        raise self.tracer.problem("the code looks at values")

    def __format__(self, description: str) -> str:
        raise self.tracer.problem("the code prints a tensor")

    def __setitem__(self, index: Any, value: Any) -> None:
        raise self.tracer.problem("the code assigns parts of a tensor")


def _in_place(name: str) -> Callable[[SymbolicValue, Any], torch.fx.Proxy]:
    """Return a method for an operator such as ``+=``, which torch.fx would trace as ``+``."""
    function = getattr(operator, name)

    def change(self: SymbolicValue, other: Any) -> torch.fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return change


for _name in sorted(IN_PLACE_OPERATORS - {"setitem", "delitem"}):
    setattr(SymbolicValue, f"__{_name}__", _in_place(_name))


class SymbolicAttribute(Attribute, SymbolicValue):
    """An attribute or a method of a symbolic value."""

    def __getattr__(self, name: str) -> Any:
        if self.attr in TENSORS or (self.attr, name) == ("shape", "numel"):
            return super().__getattr__(name)
        raise self.tracer.problem(f"the code reads the attribute {name!r} of {self.attr!r}")


class StrictTracer(Tracer):
    """A tracer whose graph gives the results of the code at every later call, or an error.

    Arguments as for :class:`embens.graph.reading.Tracer`.

    Attributes:
        guard: The Python values that the code may read.

    Raises:
        Unwatchable: If the code depends on something whose changes cannot be seen.
    """

    def __init__(self, root: nn.Module, arguments: Any, constants: Mapping[str, Any]):
        super().__init__(root, arguments, constants)
        self.problems: list[str] = []  # code may catch the errors of problems
        self.guard = Guard(root)
        self.saving_hooks = _saving_hooks()
        self.autocast_state = _autocast_state()
        self.is_inference = torch.is_inference_mode_enabled()

    def trace_graph(self, root: nn.Module) -> torch.fx.Graph:
        graph = super().trace_graph(root)
        if self.problems:
            raise Untraceable(self.problems[0])
        return graph

    @contextmanager
    def checks(self, root: nn.Module) -> Iterator[None]:
        namespaces = self.guard.namespaces.values()
        with unchanged_random_state():
            before = random_state()
            with OutsideGraph(refused=True), refused_misreadings(namespaces, self.problem):
                yield
            if random_state() != before:
                raise self.problem("the code draws random numbers")

    def problem(self, message: str) -> Untraceable:
        """Return an error, and remember it."""
        self.problems.append(message)
        return Untraceable(message)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_leaf = super().is_leaf_module(m, module_qualified_name)
        # The graph calls a leaf again, and the trace has the code of its __call__ already.
        if is_leaf and type(m).__call__ is not nn.Module.__call__:
            raise self.problem(f"the class of {module_qualified_name!r} has another __call__")
        return is_leaf

    def proxy(self, node: torch.fx.Node) -> torch.fx.Proxy:
        return SymbolicValue(node, self)

    def to_bool(self, obj: torch.fx.Proxy) -> bool:
        raise self.problem("the code looks at values")

    def iter(self, obj: torch.fx.Proxy) -> Any:
        try:
            return super().iter(obj)
        except TraceError:
            raise self.problem("the code iterates over a tensor") from None

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        if _saving_hooks() != self.saving_hooks:
            raise self.problem("the code recomputes or moves its activations")
        if _autocast_state() != self.autocast_state:
            raise self.problem("the code switches autocast on or off")
        if torch.is_inference_mode_enabled() != self.is_inference:
            raise self.problem("the code switches the inference mode on or off")
        return super().create_node(*args, **kwargs)


def shows_all_layers(reference: nn.Module) -> bool:
    """Return whether a trace shows all calls of layers, also in branches and hooks.

    Args:
        reference: A network whose forward takes a fixed number of arguments.
    """
    if any(vars(module)[hooks] for module in reference.modules() for hooks in HOOKS):
        return False
    if not has_user_code(reference):
        return True
    parameters = inspect.signature(reference.forward).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty]
    constants = {p.name: p.default for p in parameters if p.default is not p.empty}
    root = copy_module(reference).train()
    try:
        StrictTracer(root, required, constants).trace_graph(root)
    except Exception:  # the user's code may raise anything on symbolic values
        return False
    return True


def _saving_hooks() -> Any:
    """Return the hooks that torch.utils.checkpoint and save_on_cpu set, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]


def _autocast_state() -> list[tuple[bool, torch.dtype]]:
    """Return whether autocast is on, and its type, for the kinds of devices that have it."""
    devices = ("cpu", "cuda")
    return [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
