"""Modules of which every member has some tensors of its own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from embens.ensemble.layers import is_stock
from embens.ensemble.run import Run, Unfoldable, gather, interleave, together
from embens.ensemble.wrapping import Individual, Sealed, Wrapper


class Own(Wrapper, Individual):
    """A module some of whose tensors have one value for every member.

    The module's own tensors of these names are stacks with the members first; a call uses the
    running members'. In-place updates (running statistics) reach the stacks. A Linear runs all
    members as one batched product, anything else one member after another.

    Args:
        module: the module; its tensors are replaced by stacks.
        names: of its own tensors, not of those of modules inside it.
        members: how many.
        border: whether its input is still the same for all members.
        stacks: stacks that were made before, by the id of the tensor: tied ones stay tied.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Sequence[str],
        members: int,
        *,
        border: bool = False,
        stacks: dict[int, Tensor] | None = None,
    ):
        super().__init__()
        self.module = module
        self.names = tuple(names)
        self.border = border
        stacks = {} if stacks is None else stacks
        for name in self.names:
            tensor = getattr(module, name)
            if id(tensor) not in stacks:
                stack = tensor.detach().expand(members, *tensor.shape).clone()
                if isinstance(tensor, nn.Parameter):
                    stack = nn.Parameter(stack, tensor.requires_grad)
                stacks[id(tensor)] = stack
            setattr(module, name, stacks[id(tensor)])
        linear = isinstance(module, nn.Linear) and {"weight"} <= set(self.names)
        hooked = module._forward_hooks or module._forward_pre_hooks
        self._batched = linear and is_stock(module) and not hooked
        self.train(module.training)

    def inner(self) -> nn.Module:
        return self.module

    def tensors(self) -> list[Tensor]:
        return [getattr(self.module, name) for name in self.names]

    def tensor_names(self) -> tuple[str, ...]:
        return self.names

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with the running members' tensors."""
        run = self.current.run or self.current.get()
        if run.index is None:
            if run.count == 1:
                return self._alone(run, args, kwargs)
            if self._batched and not kwargs and args[0].dim() > 1:
                return self._together(run, args[0])
        common = self.border and run.common
        present = range(run.count)
        if run.index is not None:
            present = range(min(run.members, len(run.index)))
        outputs = []
        for a in present:
            mine = tree_map(lambda x, a=a: run.rows_of(x, a, common=common), (args, kwargs))
            with run.only(a):
                outputs.append(self._alone(run, *mine))
        if run.index is None:
            return gather(outputs, torch.cat)
        return gather(outputs, lambda parts: interleave(parts, run.index))  # type: ignore[arg-type]

    def _alone(self, run: Run, args: tuple, kwargs: dict) -> Any:
        """Call the module for the one member that runs."""
        if not self.names:
            return self.module(*args, **kwargs)
        mine = {name: run.of(self, i)[0] for i, name in enumerate(self.names)}
        return call_with(self.module, mine, args, kwargs)

    def _together(self, run: Run, x: Tensor) -> Tensor:
        """Return a Linear layer's output for all members that run, as one product."""
        module, stacks = self.module, {n: run.of(self, i) for i, n in enumerate(self.names)}
        weight, bias = stacks["weight"], stacks.get("bias", module.bias)
        effective = getattr(module, "effective_parameters", None)
        if effective is not None:
            weight, bias = effective(weight, bias)
        axes = x.shape[1:-1]
        common = self.border and run.common
        x = x.flatten(0, -2).expand(run.count, -1, -1) if common else run.apart(x).flatten(1, -2)
        products = torch.bmm(x, weight.mT)  # (member, row, out)
        if bias is not None:
            assert isinstance(bias, Tensor)
            products = products + bias.reshape(-1, 1, bias.shape[-1]).to(products.dtype)
        products = together(products)
        return products.unflatten(0, (-1, *axes)) if axes else products

    def _inner_attribute(self, name: str) -> Any:
        run = self.current.run
        if name not in self.names or run is None or not run.open:
            return getattr(self.module, name)
        if run.count > 1 or run.index is not None:
            why = f"the code reads {name!r}, of which every member has its own"
            return Sealed(getattr(self.module, name)[0], Unfoldable(why))
        return run.of(self, self.names.index(name))[0]

    def plain(self, member: int, memo: dict[int, Any]) -> nn.Module:
        """Return a copy of the module with the tensors of one member.

        ``memo`` is that of a deep copy of the whole network under way.
        """
        for stack in self.tensors():
            tensor = stack.detach()[member].clone()
            if id(stack) not in memo:
                parameter = isinstance(stack, nn.Parameter)
                memo[id(stack)] = nn.Parameter(tensor, stack.requires_grad) if parameter else tensor
        return copy.deepcopy(self.module, memo)


def call_with(module: nn.Module, tensors: dict[str, Tensor], args: tuple, kwargs: dict) -> Any:
    """Call a module with other tensors in place of some of its own.

    Unlike ``torch.func.functional_call`` it does not touch the module, which other threads may be
    running; names may lead into modules inside it.
    """
    if torch.compiler.is_compiling():
        return torch.func.functional_call(module, tensors, args, kwargs)
    twin = _twin(module, tensors)
    result = twin(*args, **kwargs)
    for name, given in tensors.items():
        left = twin._buffers.get(name)
        if left is not None and left is not given:  # a buffer that was assigned anew
            with torch.no_grad():
                given.copy_(left)
    return result


def _twin(module: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    """Return a module that is another but for some tensors."""
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    parameters, buffers = dict(module._parameters), dict(module._buffers)
    inside: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        child, _, rest = name.partition(".")
        if rest:
            inside.setdefault(child, {})[rest] = tensor
        else:
            (parameters if name in parameters else buffers)[name] = tensor  # type: ignore[assignment]
    children = {n: _twin(module.get_submodule(n), inside[n]) for n in inside}
    modules = {**module._modules, **children}
    twin.__dict__.update(_parameters=parameters, _buffers=buffers, _modules=modules)
    return twin
