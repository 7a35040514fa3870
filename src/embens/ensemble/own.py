"""Modules some of whose tensors depend on the member."""

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._pytree import tree_map

from embens.ensemble.layers import is_stock
from embens.ensemble.plan import OwnTensors
from embens.ensemble.run import Run, gather, together
from embens.ensemble.wrapping import Individual, Sealed, Wrapper
from embens.reading.attention import Unfoldable


class MemberLayer(Wrapper, Individual):
    """A module some of whose tensors depend on the member: a subclass says how.

    Several members of a Linear layer run as one batched product, of an Embedding as one lookup;
    anything else runs one member after another. ``names`` are the tensors that depend on the
    member; at the ``border`` the input is still the same for all members.
    """

    def __init__(self, module: nn.Module, names: Sequence[str], *, border: bool = False):
        super().__init__()
        self.module = module
        self.names = tuple(names)
        self.border = border
        hooked = module._forward_hooks or module._forward_pre_hooks
        self._plain = "weight" in self.names and is_stock(module) and not hooked
        self._batched = self._plain and isinstance(module, (nn.Linear, nn.Embedding))
        if isinstance(module, nn.Embedding):
            options = (module.max_norm, module.padding_idx, module.sparse or None)
            self._batched &= options == (None,) * 3 and not module.scale_grad_by_freq
        self.train(module.training)

    def inner(self) -> nn.Module:
        return self.module

    def now(self, run: Run) -> dict[str, Tensor]:
        """Return the tensors of the members that run, by name, members first."""
        return run.of(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with the running members' tensors."""
        run = self.current.run or self.current.get()
        if run.count == 1:
            return self._alone(run, args, kwargs)
        least = 1 + isinstance(self.module, nn.Linear)
        if self._batched and not kwargs and len(args) == 1 and args[0].dim() >= least:
            return self._together(run, args[0])
        common = self.border and run.common
        outputs = []
        for a in range(run.count):
            mine = tree_map(lambda x, a=a: run.rows_of(x, a, common=common), (args, kwargs))
            with run.only(a):
                outputs.append(self._alone(run, *mine))
        return gather(outputs, torch.cat)

    def _alone(self, run: Run, args: tuple, kwargs: dict, method: str = "__call__") -> Any:
        """Call the module, or a method of it, for the one member that runs."""
        if not self.names:
            return getattr(self.module, method)(*args, **kwargs)
        mine = {name: stack.select(0, 0) for name, stack in self.now(run).items()}
        return call_with(self.module, mine, args, kwargs, method)

    def _together(self, run: Run, x: Tensor) -> Tensor:
        """Return a layer's output for all members that run, ``(member · row, …)``."""
        module, stacks = self.module, self.now(run)
        weight, bias = stacks["weight"], stacks.get("bias", getattr(module, "bias", None))
        effective = getattr(module, "effective_parameters", None)
        if effective is not None:
            weight, bias = effective(weight, bias)
        common = self.border and run.common
        if isinstance(module, nn.Embedding):
            first = torch.arange(run.count, device=x.device) * weight.shape[1]
            x = x.expand(run.count, *x.shape) if common else run.apart(x)
            x = x + first.view(-1, *(1,) * (x.dim() - 1))
            return together(F.embedding(x, weight.flatten(0, 1)))
        axes = x.shape[1:-1]
        x = x.flatten(0, -2).expand(run.count, -1, -1) if common else run.apart(x).flatten(1, -2)
        products = torch.bmm(x, weight.mT)  # (member, row, out)
        if bias is not None:
            bias = bias.expand(run.count, bias.shape[-1])
            products = products + bias.unsqueeze(1).to(products.dtype)
        products = together(products)
        return products.unflatten(0, (-1, *axes)) if axes else products

    def _inner_attribute(self, name: str) -> Any:
        value = getattr(self.module, name)
        method = inspect.ismethod(value) and value.__self__ is self.module and bool(self.names)
        run = self.current.run if name in self.names or method else None
        if run is None or not run.open:
            return value
        if run.count > 1:
            why = Unfoldable(f"the code reads {name!r}, of which every member has its own")
            with run.only(0):
                return Sealed(torch.empty(0) if method else self.now(run)[name][0], why)
        if method:
            return lambda *args, **kwargs: self._alone(run, args, kwargs, name)
        return self.now(run)[name][0]


class Own(MemberLayer):
    """A module of which every member has some tensors of its own.

    They are replaced by stacks with the members first, which in-place updates (running statistics)
    reach. ``stacks`` are those that were made before, by the id of the tensor: tied ones stay tied.
    """

    def __init__(
        self,
        module: nn.Module,
        own: OwnTensors,
        members: int,
        *,
        border: bool = False,
        stacks: dict[int, Tensor] | None = None,
    ):
        super().__init__(module, own.tensors, border=border)
        self.drawn = own.drawn
        stacks = {} if stacks is None else stacks
        for name in self.names:
            tensor = getattr(module, name)
            if id(tensor) not in stacks:
                stack = tensor.detach().expand(members, *tensor.shape).clone()
                if isinstance(tensor, nn.Parameter):
                    stack = nn.Parameter(stack, tensor.requires_grad)
                stacks[id(tensor)] = stack
            setattr(module, name, stacks[id(tensor)])

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self.module, name) for name in self.names}

    def extra_repr(self) -> str:
        names = ", ".join(self.names) or "batch statistics"
        return f"{names} of each member's own" + (", drawn" if self.drawn else "")

    def plain(self, member: int | None, memo: dict[int, Any]) -> nn.Module:
        for stack in self.tensors().values():
            if id(stack) not in memo:
                tensor = stack.detach()
                tensor = tensor.mean(0) if member is None else tensor[member].clone()
                parameter = isinstance(stack, nn.Parameter)
                memo[id(stack)] = nn.Parameter(tensor, stack.requires_grad) if parameter else tensor
        return copy.deepcopy(self.module, memo)


class OwnState:
    """What the code keeps in attributes of modules from one call to the next, for every member."""

    def __init__(self, places: list[tuple[nn.Module, str]], members: int):
        self.places = places
        self.values = [copy.deepcopy(self._take()) for _ in range(members)]

    def _take(self) -> list[Any]:
        values = [m.__dict__.get(name, m._buffers.get(name, _ABSENT)) for m, name in self.places]
        return tree_map(lambda v: v.detach() if isinstance(v, Tensor) and v.grad_fn else v, values)

    @contextmanager
    def of(self, a: int) -> Iterator[None]:
        """Let the code find what it has kept for one member."""
        for (module, name), value in zip(self.places, self.values[a], strict=True):
            if value is not _ABSENT:
                setattr(module, name, value)
            else:
                module.__dict__.pop(name, None)
        try:
            yield
        finally:
            self.values[a] = self._take()


_ABSENT = inspect.Parameter.empty  # copied and pickled as itself


def iterates(module: nn.Module) -> bool:
    """Return whether a module computes a weight anew at each call, perhaps from the last one."""
    hooks = module._forward_pre_hooks.values()
    return isinstance(module, ParametrizationList) or SpectralNorm in map(type, hooks)


def call_with(
    module: nn.Module, tensors: dict[str, Tensor], args: tuple, kwargs: dict, method="__call__"
) -> Any:
    """Call a module, or a method of it, with other tensors in place of some of its own.

    Unlike ``torch.func.functional_call`` it does not touch the tensors of the module, which other
    threads may be running. What the code assigns stays.
    """
    if torch.compiler.is_compiling() and method == "__call__":
        left = dict(tensors)
        result = torch.func.functional_call(module, left, args, kwargs, tie_weights=False)
    else:
        lent = dict(tensors)
        if not type(module).__module__.startswith("torch."):  # a change of one member's is not
            lent |= {n: t.clone() for n, t in tensors.items() if n in module._buffers}  # all's
        twin, tables = object.__new__(type(module)), ("_parameters", "_buffers")
        vars(twin).update(vars(module))
        for table in tables:
            mine = getattr(module, table)
            vars(twin)[table] = {**mine, **{n: t for n, t in lent.items() if n in mine}}
        result = getattr(twin, method)(*args, **kwargs)
        left = twin._buffers
        vars(module).update({k: v for k, v in vars(twin).items() if k not in tables})
    for name, given in tensors.items():
        new = left.get(name)
        if new is None or new is given:
            continue
        if new.shape != given.shape:
            raise ValueError(
                f"the buffer {name!r} of a {type(module).__name__} went from shape "
                f"{tuple(given.shape)} to {tuple(new.shape)}; one of which every member has its "
                "own must keep its shape: give it the last one from the start"
            )
        with torch.no_grad():
            given.copy_(new)
    return result
